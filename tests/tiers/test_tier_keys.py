"""The file of a shared tier's secrets: what is refused, and what changes while it is in use."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from secret_keys import key_file, key_text, secret

from kvkeep.errors import SettingsError
from kvkeep.testing.clock import eventually
from kvkeep.tiers import tier_keys
from kvkeep.tiers.tier_keys import KeyFile, TierKeys, id_of, new_tier_keys, read_tier_keys


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()  # each look at the clock takes one
    monkeypatch.setattr(tier_keys, "time", SimpleNamespace(monotonic=lambda: next(seconds)))


def test_a_new_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tier.keys"
    path.write_text(new_tier_keys())
    path.chmod(0o600)
    keys = read_tier_keys(path)
    assert len(keys.log) == len(keys.keys[0]) == 32 and len(keys.keys) == 1
    assert new_tier_keys() != new_tier_keys()


def test_two_keys_stay_in_their_order(tmp_path: Path) -> None:
    keys = read_tier_keys(key_file(tmp_path / "keys", "a", "b"))
    assert [each.hex() for each in keys.keys] == [secret("a"), secret("b")]
    assert keys.describe() == (
        f"key {id_of(keys.keys[0])} writes and reads, {id_of(keys.keys[1])} reads"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has 0 entries log"),
        (f"log {secret('log')}\n", "has 0 entries key"),
        (f"key {secret('a')}\n", "has 0 entries log"),
        (key_text("a") + key_text("b"), "has 2 entries log"),
        (key_text("a", "b", "c"), "has 3 entries key, and not one or two"),
        (key_text("a", "a"), "has a secret twice"),
        (key_text("log"), "has a secret twice"),
        (key_text("a")[:-2], "entry 2 of .* is not log or key and 64 hex"),
        (key_text("a").replace("key", "kay"), "entry 2 of"),
        (f"log {secret('log')}\n# a comment\n\nkey zz{secret('a')[2:]}\n", "entry 2 of"),
        ("\0\xff", "entry 1 of"),
    ],
)
def test_what_is_no_file_of_keys_is_refused_and_never_quoted(
    tmp_path: Path, text: str, why: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SettingsError, match=why) as caught:
        read_tier_keys(path)
    assert caught.value.message.startswith("tier_keys: ") and str(path) in caught.value.message
    assert caught.value.hint
    shown = str(caught.value)
    assert not any(secret(word)[:12] in shown for word in ("log", "a", "b", "c"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"tier_keys: {tmp_path / 'none'} cannot be read") as e:
        read_tier_keys(tmp_path / "none")
    assert "exists" in e.value.hint


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o644])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path / "keys", "a")
    path.chmod(mode)
    with pytest.raises(SettingsError, match=f"tier_keys: .*mode 0{mode:o}") as caught:
        read_tier_keys(path)
    assert caught.value.hint == f"chmod 600 {path}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = key_file(tmp_path / "keys", "a")
    os.chown(path, 4321, -1)
    with pytest.raises(SettingsError, match=r"tier_keys: .*belongs to another user"):
        read_tier_keys(path)


def test_nothing_that_is_printed_has_a_secret_in_it() -> None:
    keys = TierKeys(bytes.fromhex(secret("log")), (bytes.fromhex(secret("a")),))
    shown = repr(keys) + keys.describe() + keys.log_id
    for word in ("log", "a"):
        assert (
            secret(word)[:8] not in shown and repr(bytes.fromhex(secret(word)))[2:-1] not in shown
        )


def test_keys_that_change_in_the_file_are_used(tmp_path: Path) -> None:
    file = KeyFile(key_file(tmp_path / "keys", "a"))
    key_file(tmp_path / "keys", "b", "a")
    assert eventually(lambda: len(file.keys().keys) == 2)
    assert file.keys().keys[0].hex() == secret("b")


@pytest.mark.parametrize("change", ["removed", "open", "half", "other log"])
def test_a_file_that_cannot_be_used_any_more_changes_nothing(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = key_file(tmp_path / "keys", "a")
    file = KeyFile(path)
    before = file.keys()
    if change == "removed":
        path.unlink()
    elif change == "open":
        path.chmod(0o644)
    elif change == "half":
        path.write_text(key_text("a", "b")[:-30])
    else:
        key_file(path, "a", log="other")
    for _ in range(3):
        assert file.keys() == before
    (record,) = caplog.records
    assert "tier_keys" in record.message and "the keys of before are used" in record.message
    if change == "other log":
        assert "restart" in record.message
    key_file(tmp_path / "new", "b").rename(path)
    assert [each.hex() for each in file.keys().keys] == [secret("b")], "it is usable again"
