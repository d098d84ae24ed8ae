"""Digests of weights that were computed before, so that a start need not read gigabytes.

A digest is always one of the whole content. It is kept under the *stamp* of the files it was computed from:
device, inode, size, times of change (to a nanosecond, also that of the inode, which nobody can set back) and
a digest of both ends. Knows nothing of weights' formats.
"""

import contextlib
import os
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, runtime_checkable

_END_BYTES = 1 << 16
_SETTLED_S = 2.0
"""A file that changed later than this before it was read may change again without its times telling."""
_MOST = 256


def file_stamp(path: Path, opened: os.stat_result) -> bytes | None:
    """Changes whenever the file's content does; None where `path` is no longer the file that was opened."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if _facts(status) != _facts(opened):
                return None
            ends = file.read(_END_BYTES)
            file.seek(max(0, status.st_size - _END_BYTES))
            ends += file.read(_END_BYTES)
    except OSError:
        return None
    return repr(_facts(status)).encode() + blake2b(ends, digest_size=16).digest()


def _facts(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def last_change_s(opened: os.stat_result) -> float:
    """Unix time."""
    return max(opened.st_mtime_ns, opened.st_ctime_ns) / 1e9


@runtime_checkable
class Stamped(Protocol):
    """Weights that lie in files."""

    def stamp(self) -> bytes | None:
        """Cheap; None where nothing can be said."""

    def changed_s(self) -> float:
        """When the last of the files changed, unix time."""

    def digest(self) -> bytes: ...


class KnownDigests:
    """`directory` is made where it is missing; where it cannot be used nothing is kept."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._clock = clock

    def digest(self, weights: Stamped) -> bytes:
        """16 bytes, of the whole content."""
        began_s, stamp = self._clock(), weights.stamp()
        if stamp is None:
            return weights.digest()
        note = self._directory / blake2b(stamp, digest_size=16).hexdigest()
        known = _read(note, stamp)
        if known is not None:
            return known
        digest = weights.digest()
        if weights.changed_s() + _SETTLED_S < began_s and weights.stamp() == stamp:
            with contextlib.suppress(OSError):
                self._write(note, stamp, digest)
        return digest

    def _write(self, note: Path, stamp: bytes, digest: bytes) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = note.with_suffix(f".{os.getpid()}")
        handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(digest + _seal(stamp, digest))
        scratch.replace(note)
        notes = sorted(self._directory.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in notes[:-_MOST]:
            old.unlink(missing_ok=True)


def _read(note: Path, stamp: bytes) -> bytes | None:
    try:
        content = note.read_bytes()
    except OSError:
        return None
    digest = content[:16]
    return digest if content == digest + _seal(stamp, digest) else None


def _seal(stamp: bytes, digest: bytes) -> bytes:
    return blake2b(stamp + digest, digest_size=16).digest()
