"""The signing keys of one issuer, fetched without ever blocking the event loop.

* young keys (under the soft limit) answer from memory;
* older ones answer from memory too while one background fetch renews them;
* beyond the hard limit they are not trusted any more: `Unavailable` until a fetch succeeds;
* an unknown key id causes at most one fetch per cool-down for all callers together,
  and is then remembered as unknown;
* a failed fetch keeps the last good keys and is repeated with growing pauses.

Key ids are looked up in a dictionary and nowhere else. Only public signature keys
are taken in: symmetric and private ones, short RSA keys and foreign curves are
left out. The module knows no token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from iam_authz import strict_json
from iam_authz.options import LOOPBACK, Issuer
from mesh.errors import Unavailable

log = logging.getLogger(__name__)

MAX_JWKS_BYTES = 262_144
MAX_KEYS = 100
FETCH_TIMEOUT_S = 2.0
COOLDOWN_S = 5.0
UNKNOWN_KEPT_S = 60.0
MAX_UNKNOWN = 1024
MAX_PAUSE_S = 30.0
MIN_RSA_BITS = 2048

Fetch = Callable[[], Awaitable[bytes]]

_CURVES = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521"}


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """A public key for one algorithm, as PyJWT takes it."""

    algorithm: str
    key: Any


@dataclass(frozen=True, slots=True)
class _Entry:
    kid: str | None
    members: dict[str, Any]


class Jwks:
    """One issuer's keys. `fetch` gives the document's bytes or raises."""

    def __init__(
        self,
        issuer: Issuer,
        fetch: Fetch | None = None,
        *,
        on_fetch: Callable[[str, bool], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._issuer = issuer
        self._fetch = fetch or _source(issuer)
        self._on_fetch = on_fetch
        self._clock = clock
        self._entries: list[_Entry] = []
        self._left_out = 0
        self._ready: dict[tuple[str | None, str], VerificationKey | None] = {}
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._fetched: float | None = None
        self._asked = float("-inf")
        self._failures = 0
        self._running: asyncio.Task[None] | None = None

    async def find(self, kid: str | None, algorithm: str) -> VerificationKey | None:
        """The key of an id for an algorithm, or None. Without an id, the only key there is.

        Raises Unavailable when there are no keys that may be trusted now.
        """
        now = self._clock()
        age = None if self._fetched is None else now - self._fetched
        if age is None or age >= self._issuer.hard_ttl_s:
            await self._renew(wait=True)
        elif age >= self._issuer.soft_ttl_s:
            await self._renew(wait=False)
        self._require_trust()
        found = self._pick(kid, algorithm)
        if found is not None or kid is None or self._known_unknown(kid):
            return found
        if self._clock() - self._asked >= COOLDOWN_S or self._running is not None:
            # The issuer may have rotated its keys just now.
            asked_before = self._asked
            await self._renew(wait=True)
            found = self._pick(kid, algorithm)
            if found is None and self._failures == 0 and self._asked > asked_before:
                self._remember_unknown(kid)
        return found

    async def close(self) -> None:
        """Ends a fetch that is under way."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _require_trust(self) -> None:
        if self._fetched is None or self._clock() - self._fetched >= self._issuer.hard_ttl_s:
            raise Unavailable(
                "The token's issuer cannot be reached, so the token cannot be checked now.", retry_after_s=2.0
            )

    async def _renew(self, *, wait: bool) -> None:
        if self._running is None:
            pause = min(MAX_PAUSE_S, 2.0 ** (self._failures - 1)) if self._failures else 0.0
            if self._clock() - self._asked < pause:
                return
            self._asked = self._clock()
            self._running = asyncio.create_task(self._load())
            self._running.add_done_callback(self._loaded)
        if wait:
            await asyncio.wait((self._running,))

    def _loaded(self, task: asyncio.Task[None]) -> None:
        self._running = None

    async def _load(self) -> None:
        try:
            document = await self._fetch()
            entries, left_out = await asyncio.to_thread(_parse, document)
        except Exception as error:
            # Whatever went wrong there, the last good keys stay.
            self._failures += 1
            log.warning("signing keys not fetched: %s", error, extra={"issuer": self._issuer.issuer})
        else:
            self._failures = 0
            if left_out != self._left_out:
                log.warning(
                    "%d keys of the issuer cannot be used", left_out, extra={"issuer": self._issuer.issuer}
                )
            self._entries, self._left_out = entries, left_out
            self._ready.clear()
            self._unknown.clear()
            self._fetched = self._clock()
        if self._on_fetch is not None:
            self._on_fetch(self._issuer.issuer, self._failures == 0)

    def _pick(self, kid: str | None, algorithm: str) -> VerificationKey | None:
        if kid is None and len(self._entries) != 1:
            return None
        place = (kid, algorithm)
        if place in self._ready:
            return self._ready[place]
        fitting = [
            key
            for entry in self._entries
            if kid is None or entry.kid == kid
            if (key := _key(entry.members, algorithm)) is not None
        ]
        # Two keys that fit one id: the issuer is broken, and guessing is not for us.
        found = fitting[0] if len(fitting) == 1 else None
        if found is not None:
            self._ready[place] = found
        return found

    def _known_unknown(self, kid: str) -> bool:
        since = self._unknown.get(kid)
        return since is not None and self._clock() - since < UNKNOWN_KEPT_S

    def _remember_unknown(self, kid: str) -> None:
        self._unknown[kid] = self._clock()
        self._unknown.move_to_end(kid)
        while len(self._unknown) > MAX_UNKNOWN:
            self._unknown.popitem(last=False)


def _parse(document: bytes) -> tuple[list[_Entry], int]:
    if len(document) > MAX_JWKS_BYTES:
        raise ValueError(f"more than {MAX_JWKS_BYTES} bytes")
    value = strict_json.loads(document)
    keys = value.get("keys") if isinstance(value, dict) else None
    if not isinstance(keys, list) or len(keys) > MAX_KEYS:
        raise ValueError(f"not a key set of at most {MAX_KEYS} keys")
    entries = []
    for members in keys:
        if not isinstance(members, dict) or not _public_signature_key(members):
            continue
        kid = members.get("kid")
        entries.append(_Entry(kid if isinstance(kid, str) else None, members))
    if not entries:
        raise ValueError("no usable key in the key set")
    return entries, len(keys) - len(entries)


def _public_signature_key(members: dict[str, Any]) -> bool:
    if members.get("kty") not in ("RSA", "EC", "OKP") or "d" in members:
        return False
    if members.get("use", "sig") != "sig":
        return False
    operations = members.get("key_ops", ["verify"])
    return isinstance(operations, list) and "verify" in operations


def _key(members: dict[str, Any], algorithm: str) -> VerificationKey | None:
    if members.get("alg", algorithm) != algorithm or not _fits(members, algorithm):
        return None
    try:
        key = PyJWK(members, algorithm=algorithm).key
    except (PyJWTError, ValueError, TypeError, KeyError):
        return None
    if isinstance(key, RSAPublicKey) and key.key_size < MIN_RSA_BITS:
        return None
    if algorithm == "EdDSA" and not isinstance(key, Ed25519PublicKey):
        return None
    return VerificationKey(algorithm, key)


def _fits(members: dict[str, Any], algorithm: str) -> bool:
    kind: object = members["kty"]
    if algorithm.startswith(("RS", "PS")):
        return kind == "RSA"
    if algorithm == "EdDSA":
        return kind == "OKP" and members.get("crv") == "Ed25519"
    return kind == "EC" and bool(members.get("crv") == _CURVES.get(algorithm))


def _source(issuer: Issuer) -> Fetch:
    if issuer.jwks_file is not None:
        path = issuer.jwks_file
        return lambda: asyncio.to_thread(_read, path)
    url = issuer.jwks_url
    if url is None:
        raise ValueError("an issuer has a jwks_url or a jwks_file")
    return lambda: _download(url)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_JWKS_BYTES + 1)


async def _download(url: str) -> bytes:
    # Reading the trusted roots takes tens of milliseconds, so not on the loop.
    trust = await asyncio.to_thread(httpx.create_ssl_context)
    # A proxy of the environment has no business with loopback.
    trust_env = urlsplit(url).hostname not in LOOPBACK
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    async with (
        asyncio.timeout(FETCH_TIMEOUT_S),
        # Redirects are not followed: the place of the keys is configuration, not content.
        httpx.AsyncClient(verify=trust, trust_env=trust_env, follow_redirects=False) as client,
        client.stream("GET", url, headers=headers) as answer,
    ):
        if answer.status_code != 200 or "content-encoding" in answer.headers:
            raise ValueError(f"status {answer.status_code}, or an encoding that was not asked for")
        document = b""
        async for part in answer.aiter_raw():
            document += part
            if len(document) > MAX_JWKS_BYTES:
                raise ValueError(f"more than {MAX_JWKS_BYTES} bytes")
        return document
