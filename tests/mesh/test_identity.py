"""Tokens: what is accepted, and every way that one must be refused."""

from __future__ import annotations

import base64
import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mesh.ca import CaError, CertificateAuthority, service_uri
from mesh.errors import Unauthenticated
from mesh.identity import (
    TOKEN_LIMIT_BYTES,
    TTL_LIMIT_S,
    ServiceIdentity,
    TokenVerifier,
    certified_service,
    parse_service_uri,
    service_audience,
)

ROLES = ("iam",)


def test_a_minted_token_is_read_back(site: Any) -> None:
    token = site.identity("iam", "iam-0").mint({"org": "acme", "models": None}, audience="router", ttl_s=60)
    verified = site.verifier().verify(token, audience="router", roles=ROLES)
    assert (verified.name, verified.role) == ("iam-0", "iam")
    assert dict(verified.claims) == {"org": "acme", "models": None}


def test_the_reserved_claims_belong_to_mint(site: Any) -> None:
    with pytest.raises(ValueError, match="role"):
        site.identity("iam", "iam-0").mint({"role": "operator"}, audience="router", ttl_s=60)


def test_the_service_token_is_reused_and_bound_to_the_callee(site: Any) -> None:
    router = site.identity("router", "router-0")
    token = router.service_token("decode")
    assert router.service_token("decode") is token
    verifier = site.verifier()
    assert verifier.verify(token, audience=service_audience("decode"), roles={"router"}).name == "router-0"
    for audience in (service_audience("prefill"), "decode", "data", "router"):
        with pytest.raises(Unauthenticated, match="audience"):
            verifier.verify(token, audience=audience, roles={"router"})


def test_an_identity_token_does_not_say_who_calls(site: Any) -> None:
    token = site.identity("iam", "iam-0").mint({}, audience="router", ttl_s=60)
    with pytest.raises(Unauthenticated, match="audience"):
        site.verifier().verify(token, audience=service_audience("router"), roles=ROLES)


def test_a_token_ends_also_for_who_has_seen_it_before(site: Any) -> None:
    now = time.time()
    verifier = TokenVerifier(site.ca.cert_file, clock=lambda: now)
    token = site.identity("iam", "iam-0").mint({}, audience="router", ttl_s=60)
    verifier.verify(token, audience="router", roles=ROLES)
    now += 61
    with pytest.raises(Unauthenticated, match="expired"):
        verifier.verify(token, audience="router", roles=ROLES)


def test_only_the_edge_may_have_a_token_that_lives_long(site: Any) -> None:
    long_s = TTL_LIMIT_S * 24 * 30
    edge = site.identity("edge", "envoy-0").mint({}, audience="x", ttl_s=long_s)
    assert site.verifier().verify(edge, audience="x", roles={"edge"}).name == "envoy-0"
    other = site.identity("router", "router-0").mint({}, audience="x", ttl_s=long_s)
    with pytest.raises(Unauthenticated, match="lives too long"):
        site.verifier().verify(other, audience="x", roles={"router"})


# The attack table: each makes a token out of a good one, or out of nothing.


def _b64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def _signed(identity: ServiceIdentity, header: str, payload: str) -> str:
    """A token with exactly these JSON texts, signed by the identity's key."""
    key = serialization.load_pem_private_key(identity.key_pem, None)
    signing_input = f"{_b64(header.encode())}.{_b64(payload.encode())}"
    algorithm = jwt.get_algorithm_by_name("ES256")
    return f"{signing_input}.{_b64(algorithm.sign(signing_input.encode(), key))}"


def _header(identity: ServiceIdentity, **changes: Any) -> str:
    der = x509.load_pem_x509_certificate(identity.cert_pem).public_bytes(serialization.Encoding.DER)
    return json.dumps({"alg": "ES256", "typ": "JWT", "x5c": [base64.b64encode(der).decode()], **changes})


def _payload(**changes: Any) -> str:
    now = time.time()
    claims = {"iss": "iam-0", "role": "iam", "aud": "router", "iat": now, "exp": now + 60, "org": "acme"}
    claims.update(changes)
    return json.dumps({key: value for key, value in claims.items() if value is not ...})


def _algorithm_none(iam: ServiceIdentity, site: Any) -> str:
    return f"{_b64(_header(iam, alg='none').encode())}.{_b64(_payload().encode())}."


def _hmac_with_the_certificate(iam: ServiceIdentity, site: Any) -> str:
    header, payload = _b64(_header(iam, alg="HS256").encode()), _b64(_payload().encode())
    algorithm = jwt.get_algorithm_by_name("HS256")
    secret = base64.b64decode(json.loads(_header(iam))["x5c"][0])
    return f"{header}.{payload}.{_b64(algorithm.sign(f'{header}.{payload}'.encode(), secret))}"


def _another_key(iam: ServiceIdentity, site: Any) -> str:
    router = site.identity("router", "router-0")
    return _signed(router, _header(iam), _payload())


def _another_services_certificate(iam: ServiceIdentity, site: Any) -> str:
    router = site.identity("router", "router-0")
    return _signed(router, _header(router), _payload())


def _another_authority(iam: ServiceIdentity, site: Any) -> str:
    foreign = CertificateAuthority.open_or_create(site.path / "foreign")
    identity = ServiceIdentity.load(foreign.issue(site.path / "foreign", role="iam", name="iam-0"))
    return identity.mint({}, audience="router", ttl_s=60)


def _self_signed(iam: ServiceIdentity, site: Any) -> str:
    return _with_certificate(issuer_key=None, site=site)


def _issued_by_a_service(iam: ServiceIdentity, site: Any) -> str:
    """A service's own certificate must not work as an authority."""
    key = serialization.load_pem_private_key(iam.key_pem, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return _with_certificate(issuer_key=key, site=site)


def _with_certificate(issuer_key: ec.EllipticCurvePrivateKey | None, site: Any) -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "iam/iam-0")]))
        .issuer_name(site.ca.cert.subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(service_uri("iam", "iam-0"))]), False
        )
        .sign(issuer_key or key, hashes.SHA256())
    )
    der = cert.public_bytes(serialization.Encoding.DER)
    header = {"typ": "JWT", "x5c": [base64.b64encode(der).decode()]}
    return jwt.encode(json.loads(_payload()), key, "ES256", header)


def _duplicate_claim(iam: ServiceIdentity, site: Any) -> str:
    return _signed(iam, _header(iam), _payload()[:-1] + ', "org": "other"}')


def _duplicate_header(iam: ServiceIdentity, site: Any) -> str:
    return _signed(iam, _header(iam)[:-1] + ', "alg": "ES256"}', _payload())


def _changed_payload(iam: ServiceIdentity, site: Any) -> str:
    header, _, signature = _signed(iam, _header(iam), _payload()).split(".")
    return f"{header}.{_b64(_payload(org='other').encode())}.{signature}"


def _payload_case(**changes: Any) -> Callable[[ServiceIdentity, Any], str]:
    return lambda iam, site: _signed(iam, _header(iam), _payload(**changes))


def _header_case(**changes: Any) -> Callable[[ServiceIdentity, Any], str]:
    return lambda iam, site: _signed(iam, _header(iam, **changes), _payload())


ATTACKS: dict[str, tuple[Callable[[ServiceIdentity, Any], str], str]] = {
    "algorithm none": (_algorithm_none, "not a token"),
    "hmac with the public certificate": (_hmac_with_the_certificate, "not a token"),
    "another key": (_another_key, "signature"),
    "another service's certificate": (_another_services_certificate, "another service"),
    "another authority": (_another_authority, "not one of this mesh"),
    "self-signed": (_self_signed, "not one of this mesh"),
    "issued by a service": (_issued_by_a_service, "not one of this mesh"),
    "duplicate claim": (_duplicate_claim, "well formed"),
    "duplicate header field": (_duplicate_header, "well formed"),
    "changed payload": (_changed_payload, "signature"),
    "expired": (_payload_case(iat=time.time() - 100, exp=time.time() - 1), "expired"),
    "no exp": (_payload_case(exp=...), "no exp"),
    "exp is text": (_payload_case(exp="tomorrow"), "no exp"),
    "exp is true": (_payload_case(exp=True), "no exp"),
    "exp is infinite": (_payload_case(exp=float("inf")), "well formed"),
    "no iat": (_payload_case(iat=...), "no iat"),
    "issued in the future": (_payload_case(iat=time.time() + 3000, exp=time.time() + 3060), "future"),
    "lives too long": (_payload_case(exp=time.time() + 2 * TTL_LIMIT_S), "too long"),
    "other audience": (_payload_case(aud="data"), "audience"),
    "list of audiences": (_payload_case(aud=["router"]), "no audience"),
    "no audience": (_payload_case(aud=...), "no audience"),
    "names another role": (_payload_case(role="operator"), "another service"),
    "names another service": (_payload_case(iss="iam-1"), "another service"),
    "critical header": (_header_case(crit=["b64"], b64=False), "not a token"),
    "key in the header": (_header_case(jwk={"kty": "EC"}), "not a token"),
    "two certificates": (
        lambda iam, site: _signed(iam, _header(iam, x5c=json.loads(_header(iam))["x5c"] * 2), _payload()),
        "one certificate",
    ),
    "certificate that is none": (_header_case(x5c=["AAAA"]), "not one of this mesh"),
    "empty": (lambda iam, site: "", "missing"),
    "two parts": (lambda iam, site: "a.b", "not a token"),
    "no base64": (lambda iam, site: "!!.??.##", "well formed"),
    "text outside of ascii": (lambda iam, site: "é.é.é", "well formed"),
    "half a surrogate": (lambda iam, site: "\ud800.a.b", "well formed"),
    "payload is a list": (lambda iam, site: _signed(iam, _header(iam), "[1]"), "well formed"),
    "deep nesting": (lambda iam, site: _signed(iam, _header(iam), "[" * 2500), "well formed"),
    "too long": (_payload_case(org="x" * TOKEN_LIMIT_BYTES), "size limit"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused(name: str, site: Any) -> None:
    make, reason = ATTACKS[name]
    token = make(site.identity("iam", "iam-0"), site)
    verifier = site.verifier()
    for _ in range(2):  # the second time from whatever was remembered
        with pytest.raises(Unauthenticated, match=reason):
            verifier.verify(token, audience="router", roles=ROLES)


def test_the_attacks_differ_from_a_good_token_in_one_thing_only(site: Any) -> None:
    iam = site.identity("iam", "iam-0")
    good = _signed(iam, _header(iam), _payload())
    assert site.verifier().verify(good, audience="router", roles=ROLES).claims["org"] == "acme"
    with pytest.raises(Unauthenticated, match="another role"):
        site.verifier().verify(good, audience="router", roles={"router"})


def test_an_expired_certificate_signs_nothing(site: Any) -> None:
    token = site.identity("iam", "iam-0").mint({}, audience="router", ttl_s=60)
    later = TokenVerifier(site.ca.cert_file, clock=lambda: time.time() + 200 * 86400)
    with pytest.raises(Unauthenticated, match="expired certificate"):
        later.verify(token, audience="router", roles=ROLES)


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://other/iam/iam-0",
        "https://kvmesh/iam/iam-0",
        "spiffe://kvmesh/iam",
        "spiffe://kvmesh/iam/iam-0/more",
        "spiffe://kvmesh//iam-0",
        "spiffe://kvmesh/iam/..",
        "spiffe://kvmesh/iam/iam-0?x=1",
        "spiffe://kvmesh/Iam/iam-0",
        "spiffe://user@kvmesh/iam/iam-0",
    ],
)
def test_only_one_form_of_name_is_a_service(uri: str) -> None:
    with pytest.raises(ValueError, match="service"):
        parse_service_uri(uri)


def test_the_authority_is_made_once_and_its_keys_are_private(tmp_path: Path) -> None:
    first = CertificateAuthority.open_or_create(tmp_path / "ca")
    again = CertificateAuthority.open_or_create(tmp_path / "ca")
    assert first.cert == again.cert
    files = again.issue(tmp_path / "id", role="edge", name="envoy-0", hosts=("example.org", "127.0.0.1"))
    assert (tmp_path / "ca" / "ca.key").stat().st_mode & 0o777 == 0o600
    assert files.key.stat().st_mode & 0o777 == 0o600
    cert = x509.load_pem_x509_certificate(files.cert.read_bytes())
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [
        "envoy-0.kvmesh.internal",
        "edge.kvmesh-role.internal",
        "localhost",
        "example.org",
    ]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert certified_service(cert) == ("edge", "envoy-0")


def test_a_broken_authority_is_an_error_with_a_cure(tmp_path: Path) -> None:
    CertificateAuthority.open_or_create(tmp_path)
    (tmp_path / "ca.key").write_text("nonsense")
    with pytest.raises(CaError, match=r"ca\.key"):
        CertificateAuthority.open_or_create(tmp_path)


@pytest.mark.parametrize("name", ["", "Iam", "a/b", "a b", "-a", "a-", "x" * 64, "ä"])
def test_a_name_that_would_break_elsewhere_is_refused(name: str, site: Any) -> None:
    with pytest.raises(ValueError, match="service name"):
        site.ca.issue(site.path / "id", role="iam", name=name)
