"""Makes certificates: a CA, and what it signs for a server and for clients. Needs `cryptography`
(kvkeep[tls])."""

from __future__ import annotations

import ipaddress
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvkeep.errors import SettingsError

# Between the host that makes a certificate and the one that uses it.
_CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key, both in PEM."""

    cert: str
    key: str

    @property
    def fingerprint(self) -> str:
        """As `sha256:HEX`, which is how authorized_clients names one certificate."""
        return (
            "sha256:"
            + x509.load_pem_x509_certificate(self.cert.encode()).fingerprint(hashes.SHA256()).hex()
        )


def new_authority(days: int, now: datetime | None = None) -> Issued:
    """A CA that signs servers and clients, and no other CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _named(f"kvkeep CA {secrets.token_hex(4)}")
    begin = now or datetime.now(UTC)
    builder = _builder(name, name, key.public_key(), begin, begin + timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return _signed(builder, key, key)


def issue(
    authority: Issued,
    name: str,
    hosts: tuple[str, ...] = (),
    *,
    days: int,
    now: datetime | None = None,
) -> Issued:
    """A certificate with that common name: with `hosts` for a server that is reached by these names
    and IP addresses, without for a client. It ends when its CA does, at the latest. SettingsError
    if the CA cannot sign it."""
    ca, ca_key = _opened(authority)
    begin = now or datetime.now(UTC)
    if ca.not_valid_after_utc <= begin:
        raise SettingsError(
            "the CA has expired",
            "make a new one in another --dir, and put both into tls_ca for a while",
        )
    end = min(begin + timedelta(days=days), ca.not_valid_after_utc)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_named(name), ca.subject, key.public_key(), begin, end)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
    )
    if hosts:
        names = x509.SubjectAlternativeName([_host(host) for host in dict.fromkeys(hosts)])
        builder = builder.add_extension(names, critical=False)
    return _signed(builder, key, ca_key)


def _opened(authority: Issued) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        ca = x509.load_pem_x509_certificate(authority.cert.encode())
        key = serialization.load_pem_private_key(authority.key.encode(), password=None)
    except (ValueError, TypeError):  # no PEM; or a key with a passphrase
        raise SettingsError(
            "the CA's certificate or key is no PEM file", "restore it, or use another --dir"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise SettingsError(
            "the CA's key does not belong to its certificate", "restore it, or use another --dir"
        )
    return ca, key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begin: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(begin - _CLOCK_SKEW).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _signed(
    builder: x509.CertificateBuilder,
    key: ec.EllipticCurvePrivateKey,
    by: ec.EllipticCurvePrivateKey,
) -> Issued:
    cert = builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Issued(cert.decode(), secret.decode())


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
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


def is_host(text: str) -> bool:
    """Whether a certificate can be for it: a host name in ASCII, or an IP address."""
    return _is_ip(text) or bool(
        re.fullmatch(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?", text)
    )


def _is_ip(text: str) -> bool:
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def _host(text: str) -> x509.GeneralName:
    if not is_host(text):
        raise SettingsError(
            f'--host "{text}": expected a host name or an IP address', "write it without a port"
        )
    return x509.IPAddress(ipaddress.ip_address(text)) if _is_ip(text) else x509.DNSName(text)
