"""A table of attack tokens against bearer tokens, through Envoy's question."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from kvmesh.v1 import iam_pb2

from tests.iam_authz.world import World, running_iam

ISSUER = "https://idp.test"
AUDIENCE = "https://api.test"


def public_jwk(key: Any, **members: Any) -> dict[str, Any]:
    kinds: dict[type, Any] = {rsa.RSAPublicKey: RSAAlgorithm, ec.EllipticCurvePublicKey: ECAlgorithm}
    public = key.public_key()
    algorithm = next((a for kind, a in kinds.items() if isinstance(public, kind)), OKPAlgorithm)
    return {**json.loads(algorithm.to_jwk(public)), **members}


@dataclass
class Idp:
    """An issuer of our own, with a few keys."""

    rs: rsa.RSAPrivateKey = field(default_factory=lambda: rsa.generate_private_key(65537, 2048))
    es: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    ed: ed25519.Ed25519PrivateKey = field(default_factory=ed25519.Ed25519PrivateKey.generate)
    weak: rsa.RSAPrivateKey = field(default_factory=lambda: rsa.generate_private_key(65537, 1024))

    def jwks(self) -> dict[str, Any]:
        return {
            "keys": [
                public_jwk(self.rs, kid="r", use="sig", alg="RS256"),
                public_jwk(self.es, kid="e"),
                public_jwk(self.ed, kid="d"),
                public_jwk(self.rs, kid="enc", use="enc"),
                {"kty": "oct", "kid": "o", "k": "c2VjcmV0"},
                public_jwk(self.weak, kid="weak"),
            ]
        }

    def claims(self, **changes: Any) -> dict[str, Any]:
        now = int(time.time())
        claims = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": "alice",
            "org": "acme",
            "iat": now,
            "exp": now + 300,
            "jti": "j1",
        } | changes
        return {name: value for name, value in claims.items() if value is not ...}

    def token(self, *, kid: Any = "r", headers: dict[str, Any] | None = None, **changes: Any) -> str:
        return self.sign(json.dumps(self.claims(**changes)).encode(), kid=kid, headers=headers)

    def sign(self, payload: bytes, *, kid: Any = "r", headers: dict[str, Any] | None = None) -> str:
        header = {"alg": "RS256", "typ": "JWT", "kid": kid, **(headers or {})}
        header = {name: value for name, value in header.items() if value is not ...}
        return self.sign_raw(json.dumps(header).encode(), payload)

    def sign_raw(self, header: bytes, payload: bytes, key: rsa.RSAPrivateKey | None = None) -> str:
        text = f"{b64(header)}.{b64(payload)}"
        signature = RSAAlgorithm(RSAAlgorithm.SHA256).sign(text.encode(), key or self.rs)
        return f"{text}.{b64(signature)}"


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def hs256(key: bytes, claims: dict[str, Any], kid: str = "r") -> str:
    header = json.dumps({"alg": "HS256", "typ": "JWT", "kid": kid}).encode()
    text = f"{b64(header)}.{b64(json.dumps(claims).encode())}"
    return f"{text}.{b64(hmac.digest(key, text.encode(), hashlib.sha256))}"


@pytest.fixture(scope="module")
def idp() -> Idp:
    return Idp()


@pytest.fixture
async def bearer_world(tmp_path: Path, idp: Idp) -> AsyncIterator[World]:
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps(idp.jwks()))
    issuers = [
        {"issuer": ISSUER, "audience": AUDIENCE, "jwks_file": str(file), "models_claim": "models"},
        {
            "issuer": "https://strict.test",
            "audience": [AUDIENCE],
            "jwks_file": str(file),
            "algorithms": ["ES256"],
            "org_claim": "owner",
            "org_map": {"ACME Inc": "acme"},
            "project_claim": "project",
            "require_typ": "at+jwt",
            "max_lifetime_s": 600,
        },
    ]
    async with running_iam(tmp_path, options={"issuers": issuers}) as world:
        await world.organisation()
        yield world


async def status_of(world: World, token: str) -> int:
    response = await world.check(f"Bearer {token}")
    return response.denied_response.status.code if response.HasField("denied_response") else 200


async def test_good_tokens_are_known(bearer_world: World, idp: Idp) -> None:
    token = bearer_world.identity_of(await bearer_world.check(f"Bearer {idp.token(models=['a', 'b'])}"))
    assert token.claims["org"] == "acme"
    assert token.claims["principal"] == "user:alice"
    assert token.claims["credential"].startswith("jwt_")
    assert token.claims["models"] == ["a", "b"]
    for kid, key, algorithm in (("e", idp.es, "ES256"), ("d", idp.ed, "EdDSA")):
        good = jwt.encode(idp.claims(), key, algorithm=algorithm, headers={"kid": kid})
        assert await status_of(bearer_world, good) == 200
    now = int(time.time())
    for changes in (
        {"aud": ["other", AUDIENCE]},
        {"exp": now - 20, "iat": now - 100},
        {"iat": now + 20},
        {"nbf": now + 20},
        {"jti": ...},
        {"exp": now + 30.5},
    ):
        assert await status_of(bearer_world, idp.token(**changes)) == 200, changes
    assert await status_of(bearer_world, idp.token(headers={"typ": "at+jwt"})) == 200
    assert await status_of(bearer_world, idp.token(headers={"typ": ...})) == 200


async def test_the_longest_claims_still_fit_into_an_identity_token(bearer_world: World, idp: Idp) -> None:
    token = idp.token(sub="é" * 128, models=['"' * 256] * 4)
    claims = bearer_world.identity_of(await bearer_world.check(f"Bearer {token}")).claims
    assert claims["principal"] == "user:" + "é" * 128
    assert claims["models"] == ['"' * 256] * 4


async def test_an_issuer_s_own_rules_hold(bearer_world: World, idp: Idp) -> None:
    def token(typ: str | None = "at+jwt", key: Any = idp.es, **changes: Any) -> str:
        mine = {"iss": "https://strict.test", "org": ..., "owner": "ACME Inc", "project": "red"}
        claims = idp.claims(**mine | changes)
        return jwt.encode(claims, key, algorithm="ES256", headers={"kid": "e", "typ": typ or "JWT"})

    identity = bearer_world.identity_of(await bearer_world.check(f"Bearer {token()}"))
    assert (identity.claims["org"], identity.claims["project"]) == ("acme", "red")
    assert await status_of(bearer_world, token("application/at+jwt")) == 200
    assert await status_of(bearer_world, token("JWT")) == 401
    assert await status_of(bearer_world, token(exp=int(time.time()) + 700)) == 401
    assert await status_of(bearer_world, token(owner="acme")) == 401
    # RS256 is not on this issuer's list, though the key is in its set.
    assert await status_of(bearer_world, idp.token(iss="https://strict.test", owner="ACME Inc")) == 401


def attacks(idp: Idp) -> dict[str, str]:
    now = int(time.time())
    good = idp.token()
    head, body, signature = good.split(".")
    pem = idp.rs.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    other = rsa.generate_private_key(65537, 2048)
    deep = b'{"iss": "%s", "x": ' % ISSUER.encode()
    plain = json.dumps(idp.claims()).encode()

    def unsigned(algorithm: str) -> str:
        return f"{b64(json.dumps({'alg': algorithm, 'typ': 'JWT', 'kid': 'r'}).encode())}.{body}."

    def raw(**members: Any) -> bytes:
        # Later duplicates of a member, which a lenient parser takes.
        extra = "".join(f", {json.dumps(name)}: {value}" for name, value in members.items())
        return (json.dumps(idp.claims())[:-1] + extra + "}").encode()

    return {
        "alg none": unsigned("none"),
        "alg NoNe": unsigned("NoNe"),
        "alg none, signed": idp.token(headers={"alg": "none"}),
        "no signature": f"{head}.{body}.",
        "another's signature": jwt.encode(idp.claims(), other, algorithm="RS256", headers={"kid": "r"}),
        "changed body": f"{head}.{b64(json.dumps(idp.claims(org='evil')).encode())}.{signature}",
        "HS256 with the public key": hs256(pem, idp.claims()),
        "HS256 with the modulus": hs256(public_jwk(idp.rs)["n"].encode(), idp.claims()),
        "RS512 on an RS256 key": jwt.encode(idp.claims(), idp.rs, algorithm="RS512", headers={"kid": "r"}),
        "PS256 on an RS256 key": jwt.encode(idp.claims(), idp.rs, algorithm="PS256", headers={"kid": "r"}),
        "ES256 with an RSA kid": jwt.encode(idp.claims(), idp.es, algorithm="ES256", headers={"kid": "r"}),
        "alg is a list": idp.token(headers={"alg": ["RS256"]}),
        "alg is missing": idp.token(headers={"alg": ...}),
        "own key in jwk": jwt.encode(
            idp.claims(), other, algorithm="RS256", headers={"kid": "r", "jwk": public_jwk(other)}
        ),
        "jku": idp.token(headers={"jku": "https://evil.test/jwks"}),
        "x5u": idp.token(headers={"x5u": "https://evil.test/cert"}),
        "x5c": idp.token(headers={"x5c": ["MIIB"]}),
        "crit": idp.token(headers={"crit": ["exp"]}),
        "empty crit": idp.token(headers={"crit": []}),
        "b64 false": idp.token(headers={"b64": False}),
        "zip": idp.token(headers={"zip": "DEF"}),
        "unknown kid": idp.token(kid="nobody"),
        "kid is a path": idp.token(kid="../../dev/null"),
        "kid is SQL": idp.token(kid="' OR 1=1 --"),
        "kid is a number": idp.token(kid=1),
        "kid is empty": idp.token(kid=""),
        "kid is huge": idp.token(kid="k" * 1_000),
        "no kid, several keys": idp.token(kid=...),
        "encryption key": idp.token(kid="enc"),
        "RS256 with a symmetric key": idp.token(kid="o"),
        "HS256 with the set's symmetric key": hs256(b"secret", idp.claims(), kid="o"),
        "weak key": idp.sign_raw(b'{"alg": "RS256", "kid": "weak"}', plain, idp.weak),
        "ID token's typ": idp.token(headers={"typ": "id_token"}),
        "typ is a number": idp.token(headers={"typ": 1}),
        "no exp": idp.token(exp=...),
        "no iat": idp.token(iat=...),
        "no sub": idp.token(sub=...),
        "no aud": idp.token(aud=...),
        "no iss": idp.token(iss=...),
        "no org": idp.token(org=...),
        "null sub": idp.token(sub=None),
        "empty sub": idp.token(sub=""),
        "sub is a number": idp.token(sub=7),
        "sub is a list": idp.token(sub=["alice"]),
        "sub with a line break": idp.token(sub="alice\r\nx-mesh-identity: root"),
        "huge sub": idp.token(sub="a" * 300),
        "org is a list": idp.token(org=["acme"]),
        "expired": idp.token(exp=now - 31, iat=now - 100),
        "exp in 100 years": idp.token(exp=now + 100 * 365 * 86_400),
        "exp is text": idp.token(exp=str(now + 60)),
        "exp is true": idp.token(exp=True),
        "exp before iat": idp.token(exp=now + 10, iat=now + 20),
        "exp is infinite": idp.sign(plain[:-1] + b', "exp": 1e999}'),
        "exp is NaN": idp.sign(plain[:-1].replace(b'"exp"', b'"x"') + b', "exp": NaN}'),
        "exp has 5000 digits": idp.sign(b'{"exp": ' + b"9" * 5_000 + b"}"),
        "nbf ahead": idp.token(nbf=now + 60),
        "iat ahead": idp.token(iat=now + 60),
        "negative iat": idp.token(iat=-1),
        "wrong aud": idp.token(aud="https://other.test"),
        "aud is a prefix": idp.token(aud=AUDIENCE + "/"),
        "empty aud list": idp.token(aud=[]),
        "aud is a map": idp.token(aud={AUDIENCE: 1}),
        "wrong iss": idp.token(iss="https://evil.test"),
        "iss with a slash": idp.token(iss=ISSUER + "/"),
        "iss is a list": idp.token(iss=[ISSUER]),
        "org twice": idp.sign(raw(org='"evil"')),
        "exp twice": idp.sign(raw(exp=str(now + 10**9))),
        "alg twice": idp.sign_raw(b'{"alg": "none", "alg": "RS256", "kid": "r"}', plain),
        "deep payload": idp.sign(deep + b"[" * 2_000 + b"]" * 2_000 + b"}"),
        "unclosed payload": idp.sign(deep + b"[" * 4_000),
        "deep header": idp.sign_raw(b'{"alg": "RS256", "kid": "r", "x": ' + b"[" * 1_500, plain),
        "payload is a list": idp.sign(b"[]"),
        "payload is text": idp.sign(b'"x"'),
        "payload is empty": idp.sign(b""),
        "payload is not UTF-8": idp.sign(b'{"sub": "\xff\xfe"}'),
        "lone surrogate": idp.sign(plain.replace(b'"alice"', b'"\\ud83d"')),
        "20 KB": idp.token(pad="x" * 20_000),
        "9 KB": idp.token(pad="x" * 6_500),
        "five parts": f"{good}.a.b",
        "padding": f"{head}=.{body}.{signature}",
        "models is text": idp.token(models="a"),
        "too many models": idp.token(models=["m" * 40] * 60),
    }


async def test_attack_tokens_are_refused(bearer_world: World, idp: Idp) -> None:
    began = time.perf_counter()
    answers = {name: await status_of(bearer_world, token) for name, token in attacks(idp).items()}
    assert {name: status for name, status in answers.items() if status != 401} == {}
    assert time.perf_counter() - began < 5
    assert await status_of(bearer_world, idp.token()) == 200


async def test_unknown_and_suspended_organisations_are_forbidden(bearer_world: World, idp: Idp) -> None:
    assert await status_of(bearer_world, idp.token(org="nobody")) == 403
    await bearer_world.admin.PutOrganisation(iam_pb2.PutOrganisationRequest(id="acme", suspended=True))
    assert await status_of(bearer_world, idp.token()) == 403


async def test_one_token_can_be_revoked(bearer_world: World, idp: Idp) -> None:
    first, second = idp.token(jti="one"), idp.token(jti="two")
    identity = bearer_world.identity_of(await bearer_world.check(f"Bearer {first}"))
    credential = identity.claims["credential"]
    await bearer_world.admin.RevokeKey(iam_pb2.RevokeKeyRequest(id=credential))
    assert await status_of(bearer_world, first) == 401
    # The same jti signed again is the same token.
    assert await status_of(bearer_world, idp.token(jti="one", extra=1)) == 401
    assert await status_of(bearer_world, second) == 200
    assert credential in bearer_world.iam.directory.snapshot.revoked
