"""The secret beside the database, and the keys made from it.

One random file (0600), apart from the database: whoever gets only a copy of the
database can neither test guesses of API keys nor rewrite the audit trail.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

PEPPER_BYTES = 32


class PepperError(Exception):
    """The pepper file cannot be used; the message says why and what to do."""


class Pepper:
    """Keyed hashes of API keys and audit lines. It never shows its secret."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != PEPPER_BYTES:
            raise PepperError(f"a pepper has {PEPPER_BYTES} bytes, this one {len(secret)}")
        self._key_hash = hmac.digest(secret, b"kvmesh api key 1", "sha256")
        self._audit = hmac.digest(secret, b"kvmesh audit chain 1", "sha256")
        self.fingerprint = hmac.digest(secret, b"kvmesh fingerprint 1", "sha256")[:8]

    def key_digest(self, api_key: bytes) -> bytes:
        """32 bytes; the keyed hash of a whole API key."""
        return hmac.digest(self._key_hash, api_key, "sha256")

    def audit_digest(self, previous: bytes, line: bytes) -> bytes:
        """32 bytes; chains an audit line to the one before."""
        return hmac.digest(self._audit, previous + line, "sha256")

    @classmethod
    def load(cls, path: Path, *, create: bool) -> Pepper:
        """Reads the file, or makes it when it is absent and `create` is set."""
        if create and not path.exists():
            _create(path)
        try:
            if path.stat().st_mode & 0o077:
                raise PepperError(f"{path} is readable by others; run: chmod 600 {path}")
            return cls(path.read_bytes())
        except FileNotFoundError as error:
            raise PepperError(
                f"{path} is missing, so no API key in the database can be checked; "
                "restore it from a backup or start with a new state directory"
            ) from error


def _create(path: Path) -> None:
    # Two processes may start at once: `link` lets one win, whole.
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(PEPPER_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(scratch, path)
        except FileExistsError:
            pass
    finally:
        scratch.unlink()
