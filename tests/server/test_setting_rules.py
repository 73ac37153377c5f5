"""Tests for what settings may not say together: above all, listening where others are with nothing to keep them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.errors import SettingsError
from kvkeep.server.settings import Settings
from kvkeep.wire.address import is_loopback

FILES = {"--tls-cert": "/keys/server.pem", "--tls-key": "/keys/server.key", "--tls-ca": "/keys/ca.pem"}
TLS = [word for pair in FILES.items() for word in pair]
CLIENTS = ["--authorized-clients", "/keys/authorized"]
TOKEN = ["--admin-token", "/keys/admin-token"]
BEYOND = ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://[::]:5555", "tcp://cache.example:5555", "tcp://192.0.2.7:1"]
BEYOND += ["tcp://localhost.example:5555", "tcp://[::ffff:192.0.2.7]:5555", "tcp://eth0:5555"]


def load(*argv: str) -> Settings:
    return Settings.load(None, {}, ["--pool-size", "64MiB", *argv])


def refusal(*argv: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load(*argv)
    assert caught.value.hint
    return str(caught.value)


@pytest.mark.parametrize("address", BEYOND)
@pytest.mark.parametrize("other", [[], TOKEN])
def test_engines_are_listened_for_beyond_loopback_with_tls_alone(address: str, other: list[str]) -> None:
    said = refusal("--address", address, *other)
    assert f'address = "{address}"' in said and "tls_cert is not set" in said and "kvkeep keygen" in said
    assert load("--address", address, *TLS, *other).address == address


@pytest.mark.parametrize("address", [each.removeprefix("tcp://").replace(":5555", ":80") for each in BEYOND])
@pytest.mark.parametrize("other", [[], TLS])
def test_http_is_listened_for_beyond_loopback_with_a_token_alone(address: str, other: list[str]) -> None:
    said = refusal("--http-address", address, *other)
    assert f'http_address = "{address}"' in said and "admin_token is not set" in said and "--admin-token" in said
    settings = load("--http-address", address, *TOKEN, *other)
    assert settings.http_address == address and not settings.http_is_local
    assert settings.http_has_tls == bool(other)


def test_a_list_of_certificates_does_instead_of_a_token() -> None:
    assert load("--http-address", "0.0.0.0:1", *TLS, *CLIENTS).admin_token is None
    assert "authorized_clients" in refusal("--http-address", "0.0.0.0:1", *TLS)


def test_on_loopback_http_is_plain_also_with_tls_files() -> None:
    for address in ("localhost:1", "127.0.0.1:1", "[::1]:1"):
        settings = load("--http-address", address, *TLS, *CLIENTS)
        assert settings.http_is_local and not settings.http_has_tls


@pytest.mark.parametrize("missing", FILES)
def test_tls_needs_all_three_files(missing: str) -> None:
    said = refusal(*[word for pair in FILES.items() if pair[0] != missing for word in pair])
    assert f"is set and {missing[2:].replace('-', '_')} is not" in said and "kvkeep keygen" in said


def test_a_list_of_clients_needs_tls() -> None:
    assert "authorized_clients is set and tls_cert is not" in refusal(*CLIENTS)
    assert load(*TLS, *CLIENTS).authorized_clients == Path("/keys/authorized")


def test_on_loopback_certificates_and_token_may_be_and_need_not() -> None:
    assert load().tls_cert is None
    settings = load(*TLS, *TOKEN)
    assert settings.tls_key == Path("/keys/server.key") and settings.admin_token == Path("/keys/admin-token")
    assert load("--tls-cert", "none", "--tls-key", "NONE", "--tls-ca", "none").tls_ca is None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.1", "::1"])
def test_what_is_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "Localhost.", "localhost.localdomain", "127.1", "10.0.0.1"])
def test_what_is_not(host: str) -> None:
    assert not is_loopback(host)
