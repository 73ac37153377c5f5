"""Tests for what settings may not say together: above all, listening where others are with nothing to keep them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.errors import SettingsError
from kvkeep.server.setting_rules import is_loopback
from kvkeep.server.settings import Settings

KEYS = ["--curve-key", "/keys/server.key", "--authorized-keys", "/keys/authorized"]
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
def test_engines_are_listened_for_beyond_loopback_with_keys_alone(address: str, other: list[str]) -> None:
    said = refusal("--address", address, *other)
    assert f'address = "{address}"' in said and "curve_key is not set" in said and "kvkeep keygen" in said
    assert load("--address", address, *KEYS, *other).address == address


@pytest.mark.parametrize("address", [each.removeprefix("tcp://").replace(":5555", ":80") for each in BEYOND])
@pytest.mark.parametrize("other", [[], KEYS])
def test_http_is_listened_for_beyond_loopback_with_a_token_alone(address: str, other: list[str]) -> None:
    said = refusal("--http-address", address, *other)
    assert f'http_address = "{address}"' in said and "admin_token is not set" in said and "--admin-token" in said
    assert load("--http-address", address, *TOKEN, *other).http_address == address


@pytest.mark.parametrize("given", [KEYS[:2], KEYS[2:]])
def test_keys_come_in_pairs(given: list[str]) -> None:
    said = refusal(*given)
    assert "is set and" in said and "curve_key" in said and "authorized_keys" in said


def test_on_loopback_keys_and_token_may_be_and_need_not() -> None:
    assert load().curve_key is None
    settings = load(*KEYS, *TOKEN)
    assert settings.curve_key == Path("/keys/server.key") and settings.admin_token == Path("/keys/admin-token")
    assert load("--curve-key", "none", "--authorized-keys", "NONE").authorized_keys is None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.1", "::1"])
def test_what_is_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "Localhost.", "localhost.localdomain", "127.1", "10.0.0.1"])
def test_what_is_not(host: str) -> None:
    assert not is_loopback(host)
