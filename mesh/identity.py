"""Who a service is, and how it proves it.

A service holds a key and a certificate of the mesh's CA. It signs short-lived
tokens (JWT, ES256) that carry the certificate in their `x5c` header, so that a
verifier needs the CA and nothing else. Three uses:

| token      | audience         | minted by     | says                                  |
|------------|------------------|---------------|---------------------------------------|
| service    | `service:<role>` | every service | who calls the rpc                     |
| identity   | `router`         | iam           | on behalf of whom a request is made   |
| capability | `data`           | router        | which blocks a worker may touch       |

The audiences differ, so that one kind never passes for another. This module does
not know what the claims mean.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.x509.oid import ExtendedKeyUsageOID

from mesh.ca import TRUST_DOMAIN, check_name
from mesh.errors import Unauthenticated

ALGORITHM = "ES256"
TOKEN_LIMIT_BYTES = 8192
SERVICE_TTL_S = 60.0
# The longest life of a token. Envoy cannot mint: its static token lives as long as the process.
TTL_LIMIT_S = 3600.0
EDGE_ROLE = "edge"
# How far the clock of another node may be ahead.
CLOCK_SKEW_S = 10.0

_CACHE_LIMIT = 8192
_SIGNING = ec.ECDSA(hashes.SHA256())
# Of each of the two that make a signature (P-256).
_NUMBER_BYTES = 32
_HEADER_FIELDS = {"alg", "typ", "x5c"}
_RESERVED_CLAIMS = {"iss", "aud", "exp", "iat", "role"}


class KeyFiles(Protocol):
    """PEM files of one identity; `mesh.config.IdentityFiles` is one."""

    @property
    def key(self) -> Path: ...
    @property
    def cert(self) -> Path: ...
    @property
    def ca(self) -> Path: ...


@dataclass(frozen=True, slots=True)
class VerifiedToken:
    """A token whose signature, chain, audience and times hold. `name` and `role` are the signer's."""

    name: str
    role: str
    claims: Mapping[str, Any] = field(repr=False)


def service_audience(role: str) -> str:
    """The audience of tokens that say who calls a service of `role`."""
    return f"service:{role}"


@dataclass(slots=True)
class _MintedToken:
    token: str
    renew_at: float


class ServiceIdentity:
    """The key and certificate of this process."""

    def __init__(self, *, key_pem: bytes, cert_pem: bytes, ca_pem: bytes) -> None:
        key = serialization.load_pem_private_key(key_pem, password=None)
        cert = x509.load_pem_x509_certificate(cert_pem)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
            raise ValueError("the private key does not belong to the certificate")
        self.role, self.name = certified_service(cert)
        self.key_pem, self.cert_pem, self.ca_pem = key_pem, cert_pem, ca_pem
        self._key = key
        der = cert.public_bytes(serialization.Encoding.DER)
        header = {"typ": "JWT", "alg": ALGORITHM, "x5c": [base64.b64encode(der).decode()]}
        self._header = _base64url(json.dumps(header, separators=(",", ":")).encode())
        self._service_tokens: dict[str, _MintedToken] = {}

    @classmethod
    def load(cls, files: KeyFiles) -> ServiceIdentity:
        """Reads the three PEM files. Raises OSError or ValueError."""
        return cls(
            key_pem=files.key.read_bytes(), cert_pem=files.cert.read_bytes(), ca_pem=files.ca.read_bytes()
        )

    def mint(self, claims: Mapping[str, Any], *, audience: str, ttl_s: float) -> str:
        """A signed token with `claims`, valid for `ttl_s` seconds from now."""
        reserved = _RESERVED_CLAIMS.intersection(claims)
        if reserved:
            raise ValueError(f"claims set by mint itself: {', '.join(sorted(reserved))}")
        now = time.time()
        payload = {
            **claims,
            "iss": self.name,
            "role": self.role,
            "aud": audience,
            "iat": round(now, 3),
            "exp": round(now + ttl_s, 3),
        }
        signed = f"{self._header}.{_base64url(json.dumps(payload, separators=(',', ':')).encode())}"
        r, s = decode_dss_signature(self._key.sign(signed.encode("ascii"), _SIGNING))
        return f"{signed}.{_base64url(r.to_bytes(_NUMBER_BYTES) + s.to_bytes(_NUMBER_BYTES))}"

    def service_token(self, callee_role: str) -> str:
        """The token for calls to services of `callee_role`; made anew at half its life."""
        minted = self._service_tokens.get(callee_role)
        now = time.monotonic()
        if minted is None or now >= minted.renew_at:
            token = self.mint({}, audience=service_audience(callee_role), ttl_s=SERVICE_TTL_S)
            minted = _MintedToken(token, now + SERVICE_TTL_S / 2)
            self._service_tokens[callee_role] = minted
        return minted.token


@dataclass(frozen=True, slots=True)
class _Signer:
    key: ec.EllipticCurvePublicKey
    role: str
    name: str
    not_before: float
    not_after: float


@dataclass(frozen=True, slots=True)
class _Checked:
    token: VerifiedToken
    audience: str
    expires: float


class TokenVerifier:
    """Checks tokens against one CA; remembers the ones it has checked until they expire."""

    def __init__(self, ca_file: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._ca = x509.load_pem_x509_certificate(ca_file.read_bytes())
        self._clock = clock
        self._signers: dict[str, _Signer] = {}
        self._checked: dict[bytes, _Checked] = {}

    def verify(self, token: str, *, audience: str, roles: Collection[str]) -> VerifiedToken:
        """The token's content, or Unauthenticated. `roles` are the signers that are accepted."""
        if not token or len(token) > TOKEN_LIMIT_BYTES:
            raise _refused("missing" if not token else "over the size limit")
        key = hashlib.blake2b(token.encode(errors="replace"), digest_size=20).digest()
        checked = self._checked.get(key)
        now = self._clock()
        if checked is None:
            checked = self._check(token, now)
            self._remember(key, checked, now)
        if now >= checked.expires:
            raise _refused("expired")
        if checked.audience != audience:
            raise _refused("meant for another audience")
        if checked.token.role not in roles:
            raise _refused("signed by a service of another role")
        return checked.token

    def _remember(self, key: bytes, checked: _Checked, now: float) -> None:
        if len(self._checked) >= _CACHE_LIMIT:
            self._checked = {k: v for k, v in self._checked.items() if v.expires > now}
            while len(self._checked) >= _CACHE_LIMIT:
                del self._checked[next(iter(self._checked))]
        self._checked[key] = checked

    def _check(self, token: str, now: float) -> _Checked:
        header, payload = _parts(token)
        if set(header) != _HEADER_FIELDS or header["alg"] != ALGORITHM or header["typ"] != "JWT":
            raise _refused("not a token of this mesh")
        signer = self._signer(header["x5c"])
        if not signer.not_before <= now <= signer.not_after:
            raise _refused("signed with an expired certificate")
        signed, _, signature = token.rpartition(".")
        try:
            signer.key.verify(_der(signature), signed.encode("ascii"), _SIGNING)
        except (InvalidSignature, ValueError):
            raise _refused("signature does not match") from None
        return _claims(payload, signer, now)

    def _signer(self, chain: Any) -> _Signer:
        if not isinstance(chain, list) or len(chain) != 1 or not isinstance(chain[0], str):
            raise _refused("needs one certificate")
        signer = self._signers.get(chain[0])
        if signer is None:
            signer = self._certified(chain[0])
            if len(self._signers) >= _CACHE_LIMIT:
                self._signers.clear()
            self._signers[chain[0]] = signer
        return signer

    def _certified(self, encoded: str) -> _Signer:
        try:
            cert = x509.load_der_x509_certificate(base64.b64decode(encoded, validate=True))
            cert.verify_directly_issued_by(self._ca)
            constraints = cert.extensions.get_extension_for_class(x509.BasicConstraints).value
            usage = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
            role, name = certified_service(cert)
            key = cert.public_key()
        except (ValueError, TypeError, InvalidSignature, binascii.Error, x509.ExtensionNotFound):
            raise _refused("certificate is not one of this mesh") from None
        if constraints.ca or ExtendedKeyUsageOID.CLIENT_AUTH not in usage:
            raise _refused("certificate may not sign tokens")
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise _refused("certificate has a key of another kind")
        return _Signer(key, role, name, _unix(cert.not_valid_before_utc), _unix(cert.not_valid_after_utc))


def certified_service(cert: x509.Certificate) -> tuple[str, str]:
    """Role and name in a certificate's only URI. Raises ValueError."""
    try:
        sans = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ValueError("certificate names no service") from None
    uris = sans.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise ValueError("certificate must name exactly one service")
    return parse_service_uri(uris[0])


def parse_service_uri(uri: str) -> tuple[str, str]:
    """(role, name) of `spiffe://kvmesh/<role>/<name>`. Raises ValueError."""
    parts = urlsplit(uri)
    words = parts.path.split("/")
    if parts.scheme != "spiffe" or parts.netloc != TRUST_DOMAIN or len(words) != 3 or words[0]:
        raise ValueError(f"not the name of a service: {uri}")
    if parts.query or parts.fragment:
        raise ValueError(f"not the name of a service: {uri}")
    return check_name(words[1]), check_name(words[2])


def _refused(reason: str) -> Unauthenticated:
    return Unauthenticated(f"mesh token refused: {reason}", code="invalid_mesh_token")


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _der(signature: str) -> bytes:
    """The two numbers of a JWT's signature as the library wants them. Raises ValueError."""
    raw = _unbase64url(signature)
    if len(raw) != 2 * _NUMBER_BYTES:
        raise ValueError("not a signature of this curve")
    return encode_dss_signature(int.from_bytes(raw[:_NUMBER_BYTES]), int.from_bytes(raw[_NUMBER_BYTES:]))


def _unbase64url(part: str) -> bytes:
    """Raises ValueError."""
    return base64.b64decode(part.encode("ascii") + b"=" * (-len(part) % 4), altchars=b"-_", validate=True)


def _unix(moment: datetime.datetime) -> float:
    return moment.timestamp()


def _parts(token: str) -> tuple[dict[str, Any], dict[str, Any]]:
    parts = token.split(".")
    if len(parts) != 3:
        raise _refused("not a token")
    return _json_object(parts[0]), _json_object(parts[1])


def _json_object(part: str) -> dict[str, Any]:
    """Strict: a name that occurs twice, NaN and anything that is no object are refused."""
    try:
        value = json.loads(_unbase64url(part).decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise _refused("not well formed") from None
    if not isinstance(value, dict):
        raise _refused("not well formed")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _claims(payload: dict[str, Any], signer: _Signer, now: float) -> _Checked:
    issued, expires = _seconds(payload, "iat"), _seconds(payload, "exp")
    audience = payload.get("aud")
    if payload.get("iss") != signer.name or payload.get("role") != signer.role:
        raise _refused("names another service than its certificate")
    if not isinstance(audience, str):
        raise _refused("has no audience")
    if issued > now + CLOCK_SKEW_S:
        raise _refused("issued in the future")
    if signer.role != EDGE_ROLE and expires - issued > TTL_LIMIT_S:
        raise _refused("lives too long")
    claims = {key: value for key, value in payload.items() if key not in _RESERVED_CLAIMS}
    return _Checked(
        VerifiedToken(signer.name, signer.role, MappingProxyType(claims)),
        audience,
        min(expires, signer.not_after),
    )


def _seconds(payload: dict[str, Any], name: str) -> float:
    value = payload.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(f"has no {name}")
    return float(value)
