"""Shared tiers by their addresses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from secret_keys import key_file

from kvkeep.errors import TierError
from kvkeep.tiers.opening import SharedPlace, check_installed, open_place, open_tier
from kvkeep.tiers.tier import Part
from kvkeep.tiers.tier_address import SCHEMES, parse_tier
from kvkeep.tiers.tier_keys import read_tier_keys


def test_a_tier_is_opened_by_its_address_and_verifies_its_blocks(tmp_path: Path) -> None:
    tier = open_tier(parse_tier(f"file://{tmp_path / 'kv'}?size=16MiB"))
    name = "v1/tenant/0/layout/abcd"
    assert tier.write([Part(name, [memoryview(b"block")])]) == [True]
    (path,) = [path for path in (tmp_path / "kv" / "v1").rglob("*") if path.is_file()]
    assert path.read_bytes() != b"block" and path.read_bytes().endswith(b"block")
    tier.close()


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = replace(SCHEMES["file"], extra="valkey", modules=("json", "no_such_module"))
    monkeypatch.setitem(SCHEMES, "file", lacking)
    with pytest.raises(TierError, match="no_such_module is not installed") as caught:
        check_installed(parse_tier("file:///a?size=16MiB"))
    assert caught.value.hint == "pip install 'kvkeep[valkey]'"


def test_a_missing_library_of_the_system_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    libraries = {"libc6": "libc.so.6", "libnone1": "libnone.so.1", "libnone2": "libnone.so.2"}
    monkeypatch.setitem(SCHEMES, "file", replace(SCHEMES["file"], libraries=libraries))
    with pytest.raises(TierError, match=r"libnone\.so\.1") as caught:
        check_installed(parse_tier("file:///a?size=16MiB"))
    assert caught.value.hint == "on Debian and Ubuntu: apt-get install libnone1 libnone2"


def test_a_place_with_keys_is_encrypted(tmp_path: Path) -> None:
    address, keys = f"file://{tmp_path / 'kv'}?size=16MiB", key_file(tmp_path / "keys", "a")
    place = SharedPlace(address, str(keys), read_tier_keys(keys).log_id)
    tier = open_place(place.description())
    assert tier.write([Part("v1/tenant/0/layout/abcd", [memoryview(b"block")])]) == [True]
    (path,) = [path for path in (tmp_path / "kv" / "v1").rglob("*") if path.is_file()]
    assert "tenant" not in str(path) and b"block" not in path.read_bytes()
    tier.close()
    assert keys.read_text()[4:20] not in place.description().decode()


def test_a_place_whose_log_has_changed_is_not_opened(tmp_path: Path) -> None:
    keys = key_file(tmp_path / "keys", "a")
    place = SharedPlace(f"file://{tmp_path / 'kv'}?size=16MiB", str(keys), "0" * 16)
    with pytest.raises(TierError, match="another entry log") as caught:
        open_place(place.description())
    assert "restart" in caught.value.hint


def test_encryption_without_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TierError, match="cryptography is not installed") as caught:
        check_installed(parse_tier("file:///a?size=16MiB"), encrypted=True)
    assert caught.value.hint == "pip install 'kvkeep[encryption]'"
