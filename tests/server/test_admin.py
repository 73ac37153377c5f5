"""Changes by operators: saved first, all or nothing, and never long in the loop."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.errors import RequestError
from kvkeep.server import status as module
from kvkeep.server.admin import Admin
from kvkeep.store.operators import set_quota
from kvkeep.testing.clock import eventually
from kvkeep.units import MIB
from kvkeep_lab.simulation.store_integrity import check_integrity

TENANT = "t-" + "a" * 32
OTHER = "t-" + "b" * 32
Start = Callable[..., Any]


def fail_to_save(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def refusal(change: Callable[[], Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        change()
    return caught.value


def test_a_quota_is_saved_before_it_is_in_force(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    admin: Admin = running.http.admin
    admin.set_quota(TENANT, 8 * MIB)
    assert running.daemon.quotas.load().tenants == {TENANT: 8 * MIB}
    monkeypatch.setattr(running.daemon.quotas, "save", fail_to_save)
    error = refusal(lambda: admin.set_quota(TENANT, 4 * MIB))
    assert error.code == "not_saved" and "No space left" in error.message
    assert admin.tenant(TENANT).quota_bytes == 8 * MIB
    assert (
        refusal(lambda: admin.change_settings({"default_quota": "1MiB", "verify": "false"})).code
        == "not_saved"
    )
    assert running.daemon.settings.default_quota is None and running.daemon.service.verify is True


def test_what_was_saved_but_could_not_be_put_in_force_is_taken_back(start: Start) -> None:
    running = start("--max-tenants", "1")
    admin: Admin = running.http.admin
    admin.set_quota(TENANT, MIB)
    assert refusal(lambda: admin.set_quota(OTHER, MIB)).code == "too_many_tenants"
    assert running.daemon.quotas.load().tenants == {TENANT: MIB}
    assert running.daemon.kept_quotas.tenants == {TENANT: MIB}


def test_own_quotas_together_fit_the_pool(start: Start) -> None:
    admin: Admin = start().http.admin
    admin.set_quota(TENANT, 20 * MIB)
    assert refusal(lambda: admin.set_quota(OTHER, 20 * MIB)).code == "quota_too_large"
    admin.set_quota(TENANT, 10 * MIB)
    admin.set_quota(OTHER, 20 * MIB)


def test_quotas_and_the_default_survive_a_restart(
    start: Start, stop: Callable[[Any], None]
) -> None:
    first = start()
    first.http.admin.set_quota(TENANT, 8 * MIB)
    first.http.admin.change_settings({"default_quota": "0"})
    stop(first)
    again = start()
    assert again.http.admin.tenant(TENANT).quota_bytes == 8 * MIB
    assert again.daemon.store.tenants.default_quota_bytes == 0
    again.http.admin.set_quota(TENANT, None)
    again.http.admin.change_settings({"default_quota": "none"})
    stop(again)
    last = start("--default-quota", "1MiB")
    assert last.http.admin.tenants(10).total == 0
    assert last.daemon.settings.default_quota is None, "what was set at run time overrules flags"


def test_cleared_blocks_are_out_of_use_at_once_and_their_memory_comes_back_in_pieces(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    running.store(TENANT, 50)
    running.store(OTHER, 20)
    store, turns = running.daemon.store, list[int]()
    tidy, store.blocks.a_turn = store.tidy, 7

    def counted(now_ms: int) -> bool:
        before = store.blocks.freed
        has_more = tidy(now_ms)
        turns.append(store.blocks.freed - before)
        owner = store.tenants.get(TENANT)
        assert owner is None or not owner.index, "nothing can be found any more"
        return has_more

    monkeypatch.setattr(store, "tidy", counted)
    assert running.http.admin.clear(TENANT) == 50
    assert sum(turns) == 43 and max(turns) == 7, "the first piece goes with the request"
    assert running.http.admin.clear_all() == 20
    running.in_loop(lambda: check_integrity(running.daemon.store))
    assert running.in_loop(lambda: len(store.blocks.table)) == 0


def test_a_limit_is_reached_even_if_nobody_waits_for_it(start: Start) -> None:
    running = start(loop_wait_s=0.0)  # the caller gives up at once, wherever it is
    running.store(TENANT, 50)
    store = running.daemon.store
    store.blocks.a_turn = 2
    while running.in_loop(lambda: store.tenants.limit_of(TENANT)) != 8192:
        with contextlib.suppress(RequestError):
            running.http.admin.set_limit(TENANT, 8192)
    for _ in range(200):
        if not running.in_loop(lambda: store.has_to_tidy):
            break
    assert running.in_loop(lambda: store.tenants.get(TENANT).usage_bytes) == 8192
    running.store(TENANT, 2, first=100)
    assert running.in_loop(lambda: store.tenants.get(TENANT).usage_bytes) == 8192, (
        "and it can store again"
    )


def test_clearing_blocks_that_are_held_waits_for_their_holders(start: Start) -> None:
    running = start()
    running.store(TENANT, 4, complete=False)
    assert running.http.admin.clear(TENANT) == 4
    assert running.http.admin.status().pool.blocks["evicting"] == 4
    running.in_loop(lambda: running.daemon.store.close_session(1, 0))
    assert running.http.admin.status().pool.blocks["evicting"] == 0


def test_what_the_loop_has_begun_has_an_unknown_outcome(start: Start) -> None:
    running = start(loop_wait_s=0.05)
    release = threading.Event()
    assert (
        refusal(lambda: running.http.admin.in_loop(lambda: release.wait(60))).code
        == "outcome_unknown"
    )
    release.set()


def test_one_change_at_a_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start(loop_wait_s=0.05)
    admin, quotas, seen = running.http.admin, running.daemon.quotas, list[str]()
    save = quotas.save

    def meanwhile(kept: Any) -> None:
        seen.append(refusal(lambda: admin.set_quota(TENANT, 2 * MIB)).code)
        save(kept)

    monkeypatch.setattr(quotas, "save", meanwhile)
    admin.set_quota(TENANT, MIB)
    monkeypatch.undo()
    assert seen == ["loop_busy"]
    admin.set_quota(TENANT, MIB)


@pytest.mark.parametrize("name", ["", "t-", "a-salt", "T-" + "a" * 32, "t-" + "g" * 32, "default "])
def test_what_is_no_tenant_id_is_refused_and_not_repeated(start: Start, name: str) -> None:
    admin: Admin = start().http.admin
    calls: list[Callable[[], Any]] = [
        lambda: admin.tenant(name),
        lambda: admin.clear(name),
        lambda: admin.set_quota(name, 1),
    ]
    for call in calls:
        error = refusal(call)
        assert error.code == "bad_tenant"
        assert "a-salt" not in str(error)


def test_the_log_shows_settings_as_they_would_be_written(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    admin: Admin = start().http.admin
    with caplog.at_level("INFO", "kvkeep"):
        admin.change_settings({"default_quota": "1MiB", "verify": "off", "log_level": "info"})
        admin.change_settings({"default_quota": "none"})
        admin.set_quota(TENANT, 8 * MIB)
    said = [record.getMessage() for record in caplog.records]
    assert {"default_quota = 1MiB", "verify = false", "default_quota = none"} <= set(said)
    assert f"quota of tenant {TENANT}: 8MiB" in said


def test_many_tenants_are_shown_a_few_at_a_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody on the host may ask for all of them, and engines are served in between."""
    running = start()
    admin: Admin = running.http.admin
    names = [f"t-{number:032x}" for number in range(1000)]
    running.in_loop(lambda: [set_quota(running.daemon.store, name, 0, 0) for name in names])
    running.store(names[7], 3)
    running.store(names[3], 2)
    shown, turns = module.tenant_shown, [0]

    def counted(*arguments: Any) -> Any:
        turns[-1] += 1
        return shown(*arguments)

    in_loop = admin.in_loop

    def in_a_new_turn(duty: Callable[[], Any]) -> Any:
        turns.append(0)
        return in_loop(duty)

    monkeypatch.setattr(module, "tenant_shown", counted)
    monkeypatch.setattr(admin, "in_loop", in_a_new_turn)
    listed = admin.tenants(100_000)
    assert [row.tenant for row in listed.tenants[:2]] == [
        names[7],
        names[3],
    ] and listed.total == 1000
    assert {row.tenant for row in listed.tenants} == set(names)
    assert sum(turns) == 1000 and max(turns) <= 128
    assert len(admin.tenants(5).tenants) == 5


def test_what_is_asked_while_the_loop_carries_out_requests_waits_for_its_next_turn(
    start: Start,
) -> None:
    """Or clients that ask again at once would keep engines waiting."""
    daemon = start().daemon
    turns: list[float | None] = []  # since when the loop was busy

    def again() -> None:
        turns.append(daemon.busy_since)
        if len(turns) < 10:
            daemon.run_in_loop(again)

    daemon.run_in_loop(again)
    assert eventually(lambda: len(turns) == 10)
    assert len(set(turns)) == 10
