"""The private certificate authority of a mesh.

Its key lies in the state directory, readable by the owner only. It signs one
certificate per service, made anew at every start. The certificate says who the
service is (URI SAN `spiffe://kvmesh/<role>/<name>`), and carries DNS names because
gRPC checks those and not the URI. Keys are ECDSA P-256: BoringSSL, which both
gRPC and Envoy use, offers no Ed25519 in TLS by default.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mesh.config import CERT_DAYS, IdentityFiles
from mesh.files import write_atomically

TRUST_DOMAIN = "kvmesh"
DNS_SUFFIX = "kvmesh.internal"
# Apart from the names of services, so that no service can be called like a role.
ROLE_DNS_SUFFIX = "kvmesh-role.internal"
CA_DAYS = 3650
# Two machines whose clocks differ a little must not refuse a fresh certificate.
BACKDATE_MINUTES = 5

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")


class CaError(Exception):
    """The authority's files cannot be used; the message names the file and the cure."""


def service_uri(role: str, name: str) -> str:
    """The URI that names a service in its certificate."""
    return f"spiffe://{TRUST_DOMAIN}/{role}/{name}"


def dns_name(name: str) -> str:
    """The DNS name of a service, for TLS only: nobody resolves it."""
    return f"{name}.{DNS_SUFFIX}"


def role_dns_name(role: str) -> str:
    """The DNS name that every service of a role has: what a client checks that knows no name."""
    return f"{role}.{ROLE_DNS_SUFFIX}"


def check_name(word: str) -> str:
    """`word` if it may be a role or a service name; ValueError otherwise."""
    if not _NAME.fullmatch(word):
        raise ValueError(
            f"not a service name: {word!r} (lower case letters, digits, dots and dashes, up to 63)"
        )
    return word


@dataclass(frozen=True, slots=True)
class CertificateAuthority:
    """Signs the certificates of one mesh."""

    key: ec.EllipticCurvePrivateKey
    cert: x509.Certificate
    cert_file: Path

    @classmethod
    def open_or_create(cls, directory: Path) -> CertificateAuthority:
        """The authority in `directory`, made on first use (files `ca.key` and `ca.pem`)."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        key_file, cert_file = directory / "ca.key", directory / "ca.pem"
        if not key_file.exists() and not cert_file.exists():
            key, cert = _new_authority()
            # The certificate last: it is what tells that the pair is complete.
            write_atomically(key_file, _private_pem(key))
            write_atomically(cert_file, cert.public_bytes(serialization.Encoding.PEM), mode=0o644)
        return cls(*_load_authority(key_file, cert_file), cert_file)

    def issue(
        self, directory: Path, *, role: str, name: str, hosts: Sequence[str] = (), days: float = CERT_DAYS
    ) -> IdentityFiles:
        """A new key and certificate for one service: `<name>.key` and `<name>.pem` in `directory`.

        `hosts` are further DNS names or IP addresses, for a service that outsiders call.
        """
        check_name(role)
        check_name(name)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        sans: list[x509.GeneralName] = [x509.UniformResourceIdentifier(service_uri(role, name))]
        names = (dns_name(name), role_dns_name(role), "localhost", *hosts)
        sans += [_general_name(host) for host in dict.fromkeys(names)]
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        cert = (
            _builder(f"{role}/{name}", self.cert.subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(usage, critical=False)
            .add_extension(x509.SubjectAlternativeName(sans), critical=False)
            .add_extension(authority_key, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        files = IdentityFiles(directory / f"{name}.key", directory / f"{name}.pem", self.cert_file)
        write_atomically(files.key, _private_pem(key))
        write_atomically(files.cert, cert.public_bytes(serialization.Encoding.PEM), mode=0o644)
        return files


def _new_authority() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvmesh private CA")])
    cert = (
        _builder("kvmesh private CA", name, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return key, cert


def _load_authority(key_file: Path, cert_file: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    cure = f"remove {key_file} and {cert_file} to make a new one"
    try:
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
        cert = x509.load_pem_x509_certificate(cert_file.read_bytes())
    except (OSError, ValueError) as error:
        raise CaError(f"the mesh's certificate authority cannot be read ({error}); {cure}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        raise CaError(f"{key_file} is not the key of {cert_file}; {cure}")
    if cert.not_valid_after_utc < datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=CERT_DAYS):
        raise CaError(f"{cert_file} expires on {cert.not_valid_after_utc:%Y-%m-%d}; {cure}")
    return key, cert


def _builder(
    common_name: str, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    # A common name holds 64 characters; nobody reads it, the SAN is what counts.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=BACKDATE_MINUTES))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
