"""Addresses of services: what they may have in them, and where credentials come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.errors import SettingsError
from kvkeep.tiers.service_address import ServiceAddress, credential

SCHEMES, OPTIONS = ("valkey", "rediss"), ("timeout", "ca", "cluster")


def parse(text: str) -> ServiceAddress:
    return ServiceAddress.parse(text, SCHEMES, OPTIONS, 6379)


def test_an_address_is_read() -> None:
    short = parse("valkey://kv.example")
    assert (short.scheme, short.host, short.port) == ("valkey", "kv.example", 6379)
    assert (short.path, short.database, short.timeout_s) == ("", 0, 2.0)
    long = parse("rediss://[::1]:7000/3?timeout=250ms&cluster=yes&ca=/etc/kv%20keep/ca.pem")
    assert (long.host, long.port, long.database, long.timeout_s) == ("::1", 7000, 3, 0.25)
    assert long.options["ca"] == "/etc/kv keep/ca.pem" and long.yes("cluster")
    assert not short.yes("cluster")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("http://kv.example", "expected valkey://host"),
        ("", "expected valkey://host"),
        ("valkey://", "expected a host"),
        ("valkey://kv.example#x", "expected a host"),
        ("valkey://kv.example:port", "cannot be read"),
        ("valkey://[::1", "cannot be read"),
        ("valkey://kv.example?size=1GiB", "unknown option 'size'; known: timeout, ca, cluster"),
        ("valkey://kv.example?timeout=2", "timeout: expected a duration"),
        ("valkey://kv.example?timeout=0s", "timeout: expected at most 60s"),
        ("valkey://kv.example?timeout=2h", "timeout: expected at most 60s"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(text: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        parse(text)


def test_what_is_wrong_with_a_part_is_said() -> None:
    with pytest.raises(SettingsError, match="number of a database"):
        _ = parse("valkey://kv.example/kv").database
    with pytest.raises(SettingsError, match="cluster: expected yes or no"):
        parse("valkey://kv.example?cluster=true").yes("cluster")


@pytest.mark.parametrize(
    "text",
    [
        "valkey://:hidden@kv.example",
        "valkey://user:hidden@kv.example:1/0?bad=1",
        "valkey://hidden@kv.example",
        "valkey://kv.example?password=hidden",
        "rediss://kv.example?Secret=hidden",
        "hidden://kv.example?token=hidden",
        "valkey://user:hidden@[::1",
    ],
)
def test_an_address_with_a_password_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse(text)
    said = str(refused.value).replace("a hidden:// tier", "")  # the scheme is no secret
    assert "hidden" not in said and "kv.example" not in said


def test_a_credential_is_in_a_variable_or_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVKEEP_X", raising=False)
    assert credential("KVKEEP_X") is None
    monkeypatch.setenv("KVKEEP_X", "from the environment")
    assert credential("KVKEEP_X") == "from the environment"
    file = tmp_path / "x"
    file.write_text("from the file\n")
    file.chmod(0o600)
    monkeypatch.setenv("KVKEEP_X_FILE", str(file))
    assert credential("KVKEEP_X") == "from the file"
    file.chmod(0o604)
    with pytest.raises(SettingsError, match=str(file)) as refused:
        credential("KVKEEP_X")
    assert "from the file" not in str(refused.value)
