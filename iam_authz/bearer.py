"""Bearer tokens (JWT) of configured issuers.

PyJWT checks the signature and the times; everything around it is stricter here:
the issuer is chosen by exact `iss` from the configuration, the algorithm from that
issuer's list, the key by `kid` from that issuer's set. `jku`, `jwk` and their kind
are refused rather than ignored, JSON has one meaning, and a token lives no longer
than the issuer's entry allows. This module knows no API key and no gRPC.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jwt

from iam_authz import strict_json
from iam_authz.jwks import Jwks
from iam_authz.names import MAX_KEY_MODELS, MAX_KEY_MODELS_CHARS
from iam_authz.options import Issuer
from iam_authz.records import TOKEN_PREFIX, Caller

MAX_TOKEN_CHARS = 8_192
MAX_CLAIM_BYTES = 256
DEFAULT_PROJECT = "default"

# Headers that would let the token name its own key, or change what is signed.
_REFUSED_HEADERS = ("jku", "jwk", "x5u", "x5c", "crit", "b64", "enc", "zip")
_REQUIRED = ("exp", "iat", "iss", "aud", "sub")
_TYPES = ("jwt", "at+jwt", "application/at+jwt")
_SEGMENTS = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)")
_LATEST = 2**40


class BearerError(Exception):
    """The token is not accepted. The reason is for our log, not for its holder."""

    def __init__(self, reason: str, *, expired: bool = False) -> None:
        super().__init__(reason)
        self.expired = expired


class BearerVerifier:
    """Checks tokens against the issuers it was built with."""

    def __init__(
        self, keys: Mapping[str, tuple[Issuer, Jwks]], clock: Callable[[], float] = time.time
    ) -> None:
        self._keys = keys
        self._clock = clock

    async def verify(self, token: str) -> Caller:
        """Who the token stands for. Raises BearerError, or Unavailable when keys cannot be had."""
        match = _SEGMENTS.fullmatch(token) if len(token) <= MAX_TOKEN_CHARS else None
        if match is None:
            raise BearerError("not a signed token of at most 8 KB")
        header, claims = _object(match[1], "header"), _object(match[2], "claims")
        issuer, keys = self._issuer(claims)
        algorithm = _algorithm(header, issuer)
        kid = header.get("kid")
        if kid is not None and (not isinstance(kid, str) or not 0 < len(kid) <= MAX_CLAIM_BYTES):
            raise BearerError("kid is not a short string")
        _check_times(claims, issuer, self._clock())
        key = await keys.find(kid, algorithm)
        if key is None:
            raise BearerError("no key of that id for that algorithm")
        try:
            jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=list(issuer.audience),
                issuer=issuer.issuer,
                leeway=issuer.leeway_s,
                options={"require": list(_REQUIRED)},
            )
        except jwt.ExpiredSignatureError as error:
            raise BearerError("expired", expired=True) from error
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise BearerError(f"refused by PyJWT: {type(error).__name__}") from error
        return _caller(claims, issuer, f"{match[1]}.{match[2]}")

    def _issuer(self, claims: dict[str, Any]) -> tuple[Issuer, Jwks]:
        name = claims.get("iss")
        found = self._keys.get(name) if isinstance(name, str) else None
        if found is None:
            raise BearerError("issuer is not configured")
        return found


def _object(segment: str, what: str) -> dict[str, Any]:
    try:
        data = base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4))
        value = strict_json.loads(data)
    except ValueError as error:
        raise BearerError(f"{what}: {error}") from error
    if not isinstance(value, dict):
        raise BearerError(f"{what}: not an object")
    return value


def _algorithm(header: dict[str, Any], issuer: Issuer) -> str:
    for name in _REFUSED_HEADERS:
        if name in header:
            raise BearerError(f"header {name} is not accepted")
    algorithm = header.get("alg")
    if not isinstance(algorithm, str) or algorithm not in issuer.algorithms:
        raise BearerError("algorithm is not on the issuer's list")
    kind = header.get("typ")
    if kind is not None and (not isinstance(kind, str) or kind.lower() not in _TYPES):
        raise BearerError("typ is not that of an access token")
    if issuer.require_typ is not None:
        # RFC 9068: keeps ID tokens of the same issuer and audience out.
        plain = (kind or "").lower().removeprefix("application/")
        if plain != issuer.require_typ.lower().removeprefix("application/"):
            raise BearerError("typ is not the one that is required")
    return algorithm


def _check_times(claims: dict[str, Any], issuer: Issuer, now: float) -> None:
    for name in _REQUIRED:
        if claims.get(name) is None:
            raise BearerError(f"claim {name} is missing")
    times = {}
    for name in ("exp", "iat", "nbf"):
        value = claims.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LATEST:
            raise BearerError(f"claim {name} is not a time")
        times[name] = float(value)
    if not 0 < times["exp"] - times["iat"] <= issuer.max_lifetime_s:
        raise BearerError("lives longer than the issuer's tokens may")
    if max(times["iat"], times["nbf"]) > now + issuer.leeway_s:
        raise BearerError("not valid yet")
    if times["exp"] <= now - issuer.leeway_s:
        raise BearerError("expired", expired=True)


def _caller(claims: dict[str, Any], issuer: Issuer, signed: str) -> Caller:
    organisation = _text(claims, issuer.org_claim)
    if issuer.org_map is not None:
        mapped = issuer.org_map.get(organisation)
        if mapped is None:
            raise BearerError("the organisation is not in the issuer's map")
        organisation = mapped
    project = DEFAULT_PROJECT
    if issuer.project_claim is not None and issuer.project_claim in claims:
        project = _text(claims, issuer.project_claim)
    return Caller(
        organisation=organisation,
        project=project,
        principal=f"user:{_text(claims, 'sub')}",
        credential=_credential(claims, issuer, signed),
        models=_models(claims, issuer),
        expires=float(claims["exp"]) + issuer.leeway_s,
    )


def _text(claims: dict[str, Any], name: str) -> str:
    value = claims.get(name)
    # The value goes into an identity token, whose size is limited.
    if (
        not isinstance(value, str)
        or not value.isprintable()
        or not 0 < len(value.encode()) <= MAX_CLAIM_BYTES
    ):
        raise BearerError(f"claim {name} is not a short text")
    return value


def _models(claims: dict[str, Any], issuer: Issuer) -> tuple[str, ...] | None:
    if issuer.models_claim is None or issuer.models_claim not in claims:
        return None
    value = claims[issuer.models_claim]
    if not isinstance(value, list) or not all(isinstance(name, str) and name.isascii() for name in value):
        raise BearerError(f"claim {issuer.models_claim} is not a list of models")
    if len(value) > MAX_KEY_MODELS or sum(map(len, value)) > MAX_KEY_MODELS_CHARS:
        raise BearerError(f"claim {issuer.models_claim} names too many models")
    return tuple(value)


def _credential(claims: dict[str, Any], issuer: Issuer, signed: str) -> str:
    # Without a jti the signed text stands for the token: a signature may have
    # several valid spellings, what it signs has one.
    jti = claims.get("jti")
    mark = f"jti\0{jti}" if isinstance(jti, str) and jti else f"text\0{signed}"
    digest = hashlib.sha256(f"{issuer.issuer}\0{mark}".encode()).digest()
    return TOKEN_PREFIX + base64.urlsafe_b64encode(digest[:18]).decode("ascii")
