from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.server import status as module
from kvkeep.server.counters import CountsByTenant
from kvkeep.store.tenants import Tenant, Tenants

Start = Callable[..., Any]


def test_bytes_by_state_add_up_over_several_layouts(start: Start) -> None:
    running = start()
    running.store("default", 10)
    running.store("default", 4, first=100, complete=False)
    store = running.daemon.store

    def other_size() -> None:
        layout = store.open_layout(1, b"g" * 16, (100_000,))
        store.prepare_store(1, 1000, "default", layout.number, 0, b"", b"k" * 16, 0)

    running.in_loop(other_size)
    pool = running.http.admin.status().pool
    assert pool.blocks == {"writing": 5, "waiting": 0, "ready": 10, "evicting": 0}
    assert pool.used_bytes == {
        "writing": 4 * 4096 + 102_400,
        "waiting": 0,
        "ready": 40_960,
        "evicting": 0,
    }
    assert sum(pool.used_bytes.values()) == store.tenants.get("default").usage_bytes
    assert pool.slabs - pool.unused_slabs == 2


def test_a_snapshot_does_not_change_with_the_server(start: Start) -> None:
    running = start()
    before = running.http.admin.status()
    running.store("default", 3)
    running.daemon.service.counters.refuse("bad_keys")
    assert before.pool.blocks["ready"] == 0 and before.refusals == {}
    after = running.http.admin.status()
    assert after.pool.blocks["ready"] == 3 and after.refusals == {"bad_keys": 1}
    assert [row.tenant for row in after.largest_tenants] == ["default"]


def test_a_snapshot_does_not_look_at_every_tenant(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    for number in range(30):
        running.store(f"t-{number:032x}", 1 + number % 7, first=100 * number)
    shown: list[object] = []
    show = module.tenant_shown

    def counted(tenant: Tenant, counts: CountsByTenant) -> object:
        shown.append(tenant)
        return show(tenant, counts)

    monkeypatch.setattr(module, "tenant_shown", counted)
    monkeypatch.setattr(Tenants, "__iter__", lambda _: pytest.fail("every tenant was looked at"))
    now = running.http.admin.status()
    assert now.tenants == 30 and len(shown) == len(now.largest_tenants) == 20
    usages = [row.usage_bytes for row in now.largest_tenants]
    assert usages == sorted(usages, reverse=True) and usages[0] == 7 * 4096
    monkeypatch.undo()
