from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.server import status as module
from kvkeep.server.counters import CountsByTenant
from kvkeep.server.figures import MODELS
from kvkeep.store.tenants import Tenant, Tenants
from kvkeep.wire import messages as m
from kvkeep_lab.simulation.peer import Peer, chain

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


def test_memory_adds_up_by_model(start: Start) -> None:
    """Also with blocks of which no engine says whose they are, and of two identities of a model."""
    running = start()
    peer = Peer(running.handle)
    peer.attach()
    running.store("default", 3)
    for fingerprint, model, blocks in (("a", "one", 4), ("b", "one", 2), ("c", "two", 1)):
        opened = m.OpenLayout(fingerprint.encode() * 16, [8192], parts={"model": model})
        layout = peer.ask(m.LayoutOpened, opened).layout
        peer.store(layout, chain(fingerprint, blocks), [bytes(8192)] * blocks)
    status = running.http.admin.status()
    shown = {each.model: (each.blocks, each.usage_bytes) for each in status.models}
    assert shown == {"unknown": (3, 3 * 4096), "one": (6, 6 * 8192), "two": (1, 8192)}
    assert sum(nbytes for _, nbytes in shown.values()) == sum(status.pool.used_bytes.values())
    known = m.OpenLayout(b"f" * 16, [4096], parts={"model": "three"})
    peer.ask(m.LayoutOpened, known)
    shown = {each.model: each.blocks for each in running.http.admin.status().models}
    assert shown == {"one": 6, "two": 1, "three": 3}


def test_models_without_number_are_counted_together(start: Start) -> None:
    running = start("--max-layouts", "64")
    peer = Peer(running.handle)
    for number in range(40):
        if number % 16 == 0:  # as many as a session may open
            peer.attach()
        opened = m.OpenLayout(bytes([number]) * 16, [64], parts={"model": f"model {number}"})
        layout = peer.ask(m.LayoutOpened, opened).layout
        peer.store(layout, chain(str(number), 1), [bytes(64)])
    shown = {each.model: each.blocks for each in running.http.admin.status().models}
    assert len(shown) == MODELS + 1 and shown["other"] == 40 - MODELS and shown["model 0"] == 1


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
