"""Certificates say what they are for, and each CA signs its own alone. openssl judges them in
test_keygen.py."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvkeep.cli.certificates import Issued, is_host, issue, new_authority
from kvkeep.errors import SettingsError

CA = new_authority(2)


def read(issued: Issued) -> x509.Certificate:
    return x509.load_pem_x509_certificate(issued.cert.encode())


def test_a_ca_signs_servers_and_clients_and_no_other_ca() -> None:
    limits = read(CA).extensions.get_extension_for_class(x509.BasicConstraints)
    assert limits.critical and limits.value == x509.BasicConstraints(ca=True, path_length=0)
    for issued, purpose in (
        (issue(CA, "s", ("localhost",), days=1), ExtendedKeyUsageOID.SERVER_AUTH),
        (issue(CA, "c", days=1), ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        certificate = read(issued)
        certificate.verify_directly_issued_by(read(CA))
        extensions = certificate.extensions
        assert list(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [purpose]
        assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert not extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    with pytest.raises(ValueError, match="match"):
        read(issue(new_authority(2), "c", days=1)).verify_directly_issued_by(read(CA))


def test_no_two_certificates_are_alike() -> None:
    made = [issue(CA, "c", days=1) for _ in range(3)]
    assert (
        len({read(each).serial_number for each in made})
        == len({each.fingerprint for each in made})
        == 3
    )
    assert len({each.key for each in made}) == 3
    assert read(new_authority(1)).subject != read(CA).subject


def test_a_clock_that_is_a_little_late_takes_a_new_certificate() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    ca = new_authority(30, now)
    certificate = read(issue(ca, "c", days=7, now=now))
    assert certificate.not_valid_before_utc == now - timedelta(minutes=5)
    assert certificate.not_valid_after_utc == now + timedelta(days=7)


def test_nothing_is_signed_beyond_the_end_of_the_ca() -> None:
    assert read(issue(CA, "a", days=10)).not_valid_after_utc == read(CA).not_valid_after_utc
    old = new_authority(2, datetime.now(UTC) - timedelta(days=5))
    with pytest.raises(SettingsError, match="the CA has expired"):
        issue(old, "a", days=1)


def test_hosts_are_names_or_addresses_and_each_is_named_once() -> None:
    issued = issue(CA, "s", ("a.example", "192.0.2.7", "::1", "*.b.example", "a.example"), days=1)
    names = read(issued).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["a.example", "*.b.example"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "::1"]
    assert (
        is_host("under_score.example") and is_host("a") and not is_host("a.") and not is_host("a:1")
    )


@pytest.mark.parametrize("key", ["", "nonsense", new_authority(2).key])
def test_a_ca_with_another_key_signs_nothing(key: str) -> None:
    with pytest.raises(SettingsError, match="the CA's"):
        issue(Issued(CA.cert, key), "a", days=1)
