"""The file that keeps quotas: what it holds is in force after a restart, or the start stops and says why."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep.errors import SettingsError
from kvkeep.server.quotas import KeptQuotas, QuotaFile, apply_kept
from kvkeep.server.settings import Settings
from kvkeep.store.store import Store
from kvkeep.units import GIB, MIB

TENANT = "t-" + "a" * 32
PATH = Path("/state/quotas.json")


def settings(*argv: str) -> Settings:
    return Settings.load(None, {}, ["--pool-size", "64MiB", *argv])


def store(tenants: int = 100) -> Store:
    made = Store(64 * MIB, MIB)
    made.tenants.limit = tenants
    return made


def test_nothing_is_kept_at_first(tmp_path: Path) -> None:
    assert QuotaFile(tmp_path / "none" / "quotas.json").load() == KeptQuotas()


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    file = QuotaFile(tmp_path / "new" / "quotas.json")
    for kept in (KeptQuotas({TENANT: 5, "default": 0}, True, 7), KeptQuotas({}, True, None), KeptQuotas()):
        file.save(kept)
        assert file.load() == kept
    assert [path.name for path in file.path.parent.iterdir()] == ["quotas.json"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = QuotaFile(tmp_path / "quotas.json")
    file.save(KeptQuotas({TENANT: 5}))
    (tmp_path / "quotas.new").mkdir()  # where the draft would be written
    with pytest.raises(OSError):
        file.save(KeptQuotas({TENANT: 6}))
    assert file.load().tenants == {TENANT: 5}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "\x00",
        "\udcff",
        json.dumps({"version": 2, "tenants": {}}),
        json.dumps({"version": 1}),
        json.dumps({"version": 1, "tenants": {}, "more": 1}),
        json.dumps({"version": 1, "tenants": {"a salt": 5}}),
        json.dumps({"version": 1, "tenants": {TENANT: -5}}),
        json.dumps({"version": 1, "tenants": {TENANT: "5"}}),
        json.dumps({"version": 1, "tenants": {}, "default_set": True, "default_bytes": -1}),
        "[" * 100_000,
    ],
)
def test_a_file_that_cannot_be_trusted_stops_the_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "quotas.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SettingsError) as caught:
        QuotaFile(path).load()
    assert str(path) in caught.value.message and "remove it" in caught.value.hint


def test_a_file_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--state-dir"):
        QuotaFile(tmp_path).load()


def test_kept_quotas_are_put_in_force() -> None:
    made = store()
    after = apply_kept(made, settings("--default-quota", "1MiB"), KeptQuotas({TENANT: 5 * MIB}), PATH)
    assert made.tenants.default_quota_bytes == MIB == after.default_quota
    tenant = made.tenants.get(TENANT)
    assert tenant is not None and tenant.quota_bytes == 5 * MIB


@pytest.mark.parametrize("default_bytes", [None, 0, 2 * MIB])
def test_a_kept_default_overrules_a_flag_and_says_so(
    default_bytes: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    made = store()
    with caplog.at_level(logging.WARNING, "kvkeep"):
        after = apply_kept(made, settings("--default-quota", "1MiB"), KeptQuotas({}, True, default_bytes), PATH)
    assert made.tenants.default_quota_bytes == after.default_quota == default_bytes
    assert after.sources["default_quota"] == f"kept in {PATH}"
    assert str(PATH) in caplog.text


def test_a_kept_quota_that_no_longer_fits_names_the_file() -> None:
    with pytest.raises(SettingsError) as caught:
        apply_kept(store(), settings(), KeptQuotas({TENANT: GIB}), PATH)
    assert str(PATH) in caught.value.message and "--pool-size" in caught.value.hint
    with pytest.raises(SettingsError, match=str(PATH)):
        apply_kept(store(tenants=1), settings(), KeptQuotas({TENANT: 1, "default": 1}), PATH)


def test_a_default_quota_that_does_not_fit_names_its_source() -> None:
    with pytest.raises(SettingsError, match="flag --default-quota"):
        apply_kept(store(), settings("--default-quota", "1GiB"), KeptQuotas(), PATH)
    with pytest.raises(SettingsError, match=f"kept in {PATH}"):
        apply_kept(store(), replace(settings()), KeptQuotas({}, True, GIB), PATH)


def test_a_directory_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    file = QuotaFile(tmp_path / "state" / "a" / "quotas.json")
    file.check_writable()
    assert list(file.path.parent.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="cannot write to") as caught:
        QuotaFile(tmp_path / "file" / "a" / "quotas.json").check_writable()
    assert "--state-dir" in caught.value.hint
