"""Certificates of another CA than `kvkeep keygen`'s: RSA keys, an intermediate CA, and the files
that cert-manager makes, mounted as Kubernetes mounts a Secret."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import clients
import pytest
from attackers import HOST
from clients import holds, stores
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from engines import eventually

from kvkeep.cli.remote import ask
from kvkeep.errors import Unavailable
from kvkeep.testing.process import ServerProcess

TOKENS = list(range(8))
SERVES, ASKS = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
KEY_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


@dataclass
class Holder:
    """A certificate and its key. `above`: the intermediate certificates that lead to the root."""

    certificate: x509.Certificate
    key: rsa.RSAPrivateKey
    above: str = ""

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(Encoding.PEM).decode()

    @property
    def key_pem(self) -> str:
        form = PrivateFormat.TraditionalOpenSSL  # PKCS #1, as cert-manager writes it
        return self.key.private_bytes(Encoding.PEM, form, NoEncryption()).decode()


def issue(name: str, by: Holder | None, purpose: x509.ObjectIdentifier | None = None) -> Holder:
    """A root CA without `by`, an intermediate one without a purpose."""
    key, now, is_ca = rsa.generate_private_key(65537, 2048), datetime.now(UTC), purpose is None
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer, issuer = (key, subject) if by is None else (by.key, by.certificate.subject)
    used = dict.fromkeys(KEY_USAGES, False)
    used["key_cert_sign" if is_ca else "digital_signature"] = True
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(is_ca, None), critical=True)
        .add_extension(x509.KeyUsage(**used), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if purpose is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    if purpose == SERVES:
        host = x509.IPAddress(ipaddress.ip_address(HOST))
        builder = builder.add_extension(x509.SubjectAlternativeName([host]), critical=False)
    is_below_an_intermediate = by is not None and by.certificate.issuer != by.certificate.subject
    above = by.pem + by.above if by is not None and is_below_an_intermediate else ""
    return Holder(builder.sign(signer, hashes.SHA256()), key, above)


def mount(secret: Path, holder: Holder, root: Holder, version: int = 1) -> dict[str, str]:
    """Puts cert-manager's files there, in place of those of an earlier version. Returns options."""
    files = {"tls.crt": holder.pem + holder.above, "tls.key": holder.key_pem, "ca.crt": root.pem}
    data = secret / f"..version-{version}"
    data.mkdir(parents=True)
    for name, text in files.items():
        (data / name).write_text(text)
        (data / name).chmod(0o400)
        if version == 1:
            (secret / name).symlink_to(f"..data/{name}")
    (secret / "..new").symlink_to(data.name)
    (secret / "..new").rename(secret / "..data")
    kinds = {"tls_cert": "tls.crt", "tls_key": "tls.key", "tls_ca": "ca.crt"}
    return {option: str(secret / name) for option, name in kinds.items()}


@dataclass
class Company:
    """A root, an intermediate CA that signs, and a server with its certificate."""

    root: Holder
    signs: Holder
    server: ServerProcess
    secret: Path

    @property
    def address(self) -> str:
        return f"tcp://{HOST}:{self.server.address.rpartition(':')[2]}"

    def failures(self) -> dict[str, int]:
        token = self.secret.parent / "state" / self.server.name / "admin.token"
        counted: dict[str, int] = ask(self.server.http, "/v1/status", token_file=token)[
            "auth_failures"
        ]
        return counted


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    tmp_path = tmp_path_factory.mktemp("company")
    root = issue("company root", None)
    signs = issue("company servers", root)
    secret = tmp_path / "server"
    options = mount(secret, issue("cache-host", signs, SERVES), root)
    (tmp_path / "authorized").write_text("engines\n")
    (tmp_path / "authorized").chmod(0o600)
    options["authorized_clients"] = str(tmp_path / "authorized")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    place = {"state_dir": tmp_path / "state"}
    usual = ("--pool-size", "16MiB", "--session-check-interval", "50ms")
    with ServerProcess(*usual, "--address", "tcp://0.0.0.0:0", *flags, **place) as server:
        yield Company(root, signs, server, secret)


def test_certificates_of_an_intermediate_ca_serve_and_are_renewed(
    company: Company, tmp_path: Path
) -> None:
    failures = company.failures()
    files = mount(tmp_path / "engine", issue("engines", company.signs, ASKS), company.root)
    for shared_memory in (True, False):
        with clients.connect(company.address, shared_memory=shared_memory, **files) as cache:
            assert stores(cache, TOKENS) in (0, 2) and holds(cache, TOKENS) == 2
    mount(company.secret, issue("cache-host", company.signs, SERVES), company.root, 2)
    mount(tmp_path / "engine", issue("engines", company.signs, ASKS), company.root, 2)
    assert eventually(lambda: "were read again" in company.server.log())
    with clients.connect(company.address, **files) as cache:
        assert holds(cache, TOKENS) == 2
    assert company.failures() == failures


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("another name", "unknown_client"),
        ("without the intermediate CA", "handshake"),
        ("of another root", "handshake"),
        ("for servers", "handshake"),
    ],
)
def test_other_certificates_are_refused(
    company: Company, tmp_path: Path, wrong: str, reason: str
) -> None:
    signs = issue("other root", None) if wrong == "of another root" else company.signs
    name = "strangers" if wrong == "another name" else "engines"
    holder = issue(name, signs, SERVES if wrong == "for servers" else ASKS)
    if wrong == "without the intermediate CA":
        holder.above = ""
    files = mount(tmp_path / "engine", holder, company.root)
    before = company.failures()
    with pytest.raises(Unavailable):
        clients.connect(company.address, wait_ms=1_000, **files)
    assert eventually(lambda: company.failures() != before)
    assert {kind for kind, count in company.failures().items() if count != before.get(kind)} == {
        reason
    }
