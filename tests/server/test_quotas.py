"""The file that keeps quotas and limits: what it holds is in force after a restart, as far as it
fits."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from kvkeep.errors import SettingsError
from kvkeep.server.quotas import KeptQuotas, QuotaFile, apply_kept
from kvkeep.server.settings import Settings
from kvkeep.store.operators import usage
from kvkeep.store.store import Store
from kvkeep.units import GIB, MIB

TENANT = "t-" + "a" * 32
PATH = Path("/state/quotas.json")
LIMITED = KeptQuotas({}, False, None, {TENANT: 0, "default": 9}, True, 3)


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
    for kept in (
        KeptQuotas({TENANT: 5, "default": 0}, True, 7),
        KeptQuotas({}, True, None),
        KeptQuotas(),
        LIMITED,
    ):
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
        json.dumps({"version": 1, "tenants": {}, "limits": {"a salt": 5}}),
        json.dumps({"version": 1, "tenants": {}, "limits": {TENANT: -5}}),
        json.dumps(
            {"version": 1, "tenants": {}, "default_limit_set": True, "default_limit_bytes": -1}
        ),
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
    after = apply_kept(
        made, settings("--default-quota", "1MiB"), KeptQuotas({TENANT: 5 * MIB}), PATH
    )
    assert made.tenants.default_quota_bytes == MIB == after.default_quota
    tenant = made.tenants.get(TENANT)
    assert tenant is not None and tenant.quota_bytes == 5 * MIB


@pytest.mark.parametrize("default_bytes", [None, 0, 2 * MIB])
def test_a_kept_default_overrules_a_flag_and_says_so(
    default_bytes: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    made = store()
    with caplog.at_level(logging.WARNING, "kvkeep"):
        after = apply_kept(
            made, settings("--default-quota", "1MiB"), KeptQuotas({}, True, default_bytes), PATH
        )
    assert made.tenants.default_quota_bytes == after.default_quota == default_bytes
    assert after.sources["default_quota"] == f"kept in {PATH}"
    assert str(PATH) in caplog.text


def test_kept_quotas_that_no_longer_fit_are_scaled_down_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = store()
    kept = KeptQuotas({TENANT: 96 * MIB, "default": 32 * MIB})
    with caplog.at_level(logging.WARNING, "kvkeep"):
        apply_kept(made, settings(), kept, PATH)
    shown = {each.tenant: (each.quota_bytes, each.set_quota_bytes) for each in usage(made)}
    assert shown == {TENANT: (48 * MIB, 96 * MIB), "default": (16 * MIB, 32 * MIB)}
    assert kept.tenants == {TENANT: 96 * MIB, "default": 32 * MIB}, (
        "what is kept stays as it was set"
    )
    (line,) = [record.getMessage() for record in caplog.records]
    for part in (
        str(PATH),
        "128MiB together",
        "scaled down to 64MiB",
        "a pool of 64MiB",
        "--pool-size of 128MiB",
    ):
        assert part in line
    larger = Store(128 * MIB, MIB)
    caplog.clear()
    apply_kept(larger, settings(), kept, PATH)
    assert {each.tenant: each.quota_bytes for each in usage(larger)} == kept.tenants
    assert not caplog.records


def test_more_tenants_than_there_may_be_stop_the_start_and_name_the_file() -> None:
    for kept in (
        KeptQuotas({TENANT: 1, "default": 1}),
        KeptQuotas(limits={TENANT: 1, "default": 1}),
    ):
        with pytest.raises(SettingsError, match=str(PATH)) as caught:
            apply_kept(store(tenants=1), settings(), kept, PATH)
        assert "--max-tenants" in caught.value.hint


def test_a_default_quota_and_a_pool_size_that_contradict_each_other_stop_the_start() -> None:
    with pytest.raises(SettingsError, match="flag --default-quota") as caught:
        apply_kept(store(), settings("--default-quota", "1GiB"), KeptQuotas(), PATH)
    assert "--pool-size" in caught.value.hint


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (settings(), KeptQuotas({}, True, GIB)),
        (Settings.load(None, {}, ["--default-quota", "1GiB"]), KeptQuotas()),
    ],
    ids=["kept", "for a pool of a size that is found"],
)
def test_a_default_quota_of_a_larger_pool_is_in_force_as_far_as_it_fits(
    given: Settings, kept: KeptQuotas, caplog: pytest.LogCaptureFixture
) -> None:
    made = store()
    with caplog.at_level(logging.WARNING, "kvkeep"):
        after = apply_kept(made, given, kept, PATH)
    assert made.tenants.get_or_add(TENANT).quota_bytes == 64 * MIB and after.default_quota == GIB
    assert "default_quota = 1GiB does not fit a pool of 64MiB" in caplog.text
    assert "--pool-size" in caplog.text


def test_kept_limits_are_put_in_force() -> None:
    made = store()
    after = apply_kept(
        made, settings(), KeptQuotas({}, False, None, {TENANT: 0}, True, 2 * MIB), PATH
    )
    assert [(each.tenant, each.limit_bytes, each.own_limit) for each in usage(made)] == [
        (TENANT, 0, True)
    ]
    assert made.tenants.default_limit_bytes == after.default_limit == 2 * MIB
    assert after.sources["default_limit"] == f"kept in {PATH}"


def test_limits_lower_the_quotas_that_exceed_them_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = store()
    kept = KeptQuotas({TENANT: 8 * MIB}, True, 4 * MIB)
    with caplog.at_level(logging.WARNING, "kvkeep"):
        after = apply_kept(made, settings("--default-limit", "1MiB"), kept, PATH)
    assert [(each.quota_bytes, each.set_quota_bytes) for each in usage(made)] == [(MIB, 8 * MIB)]
    assert after.default_quota == MIB == made.tenants.get_or_add("default").quota_bytes
    assert "default_quota = 4MiB" in caplog.text
    assert "1 tenants are more than default_limit" in caplog.text
    after.changed({"log_level": "debug"})  # other settings can still change


def test_a_file_without_limits_has_no_word_of_them(tmp_path: Path) -> None:
    """A server that knows no limits can read it."""
    file = QuotaFile(tmp_path / "quotas.json")
    file.save(KeptQuotas({TENANT: 5}))
    assert json.loads(file.path.read_bytes()) == {"version": 1, "tenants": {TENANT: 5}}


def test_a_directory_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    file = QuotaFile(tmp_path / "state" / "a" / "quotas.json")
    file.check_writable()
    assert list(file.path.parent.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="cannot write to") as caught:
        QuotaFile(tmp_path / "file" / "a" / "quotas.json").check_writable()
    assert "--state-dir" in caught.value.hint
