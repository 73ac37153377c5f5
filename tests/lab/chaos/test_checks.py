"""Every check can fail: what it looks for is brought about behind everybody's back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvkeep.client.calls import Call
from kvkeep.engine.blocks import BlockPool
from kvkeep.store.operators import set_quota
from kvkeep.store.table import READY
from kvkeep_lab.chaos.checks import Checks
from kvkeep_lab.chaos.plan import Plan
from kvkeep_lab.chaos.record import Outcome
from kvkeep_lab.chaos.run import ChaosRun, Cluster

Interfere = Callable[[Cluster], None]


def outcome_of(plan: Plan, interfere: Interfere) -> Outcome:
    """Of a run with this interference shortly before the faults end."""

    def prepare(cluster: Cluster) -> None:
        cluster.simulation.at((plan.duration_ms - 1) * 1000, lambda: interfere(cluster))

    return ChaosRun(plan, prepare=prepare).run()


def ready_row(cluster: Cluster) -> int:
    table = cluster.server.store.blocks.table
    return next(row for row in table.live_rows().tolist() if table.state[row] == READY)


def change_a_byte(cluster: Cluster) -> None:
    slot = cluster.server.store.blocks.table.slot[ready_row(cluster)]
    cluster.server.pool.segments.view(slot, 1)[0] ^= 1
    cluster.checks.everything()


def change_a_checksum(cluster: Cluster) -> None:
    store, row = cluster.server.store, ready_row(cluster)
    table = store.blocks.table
    store.layouts[table.layout[row]].checks[table.check[row]] ^= np.uint64(1)
    cluster.checks.everything()


def move_a_block(cluster: Cluster) -> None:
    """To another tenant."""
    store = cluster.server.store
    number = store.blocks.table.tenant[ready_row(cluster)]
    store.tenants.by_number[number].name = "t" * 32
    cluster.checks._check_ready_blocks()  # the check of the store's integrity sees it, too


def contradict_the_store(cluster: Cluster) -> None:
    cluster.server.store.blocks.table.pins[ready_row(cluster)] += 1
    cluster.checks.everything()


def hold_a_lease(cluster: Cluster) -> None:
    store, row = cluster.server.store, ready_row(cluster)
    session = next(iter(store.sessions.values()))
    store.blocks.pin(row)
    store.blocks.hold(np.array([row]))
    session.leases[1 << 40] = row


def open_a_session(cluster: Cluster) -> None:
    """That nobody has, and that does not time out."""
    service = cluster.server.service
    service.store.open_session(99)
    service.sessions.add(99, "nobody", 1, None, 1 << 60)


def wait_for_ever(cluster: Cluster) -> None:
    cluster.clients[0].connections[0]._calls.add(Call(1 << 40, -1 << 40))
    cluster.checks.everything()


def owe_much(cluster: Cluster) -> None:
    owed = cluster.clients[0].connections[0]._debts._owed
    owed["lease"] |= dict.fromkeys(range(5_000), 0)
    cluster.checks.everything()


def keep_an_engine_busy(cluster: Cluster) -> None:
    engine = cluster.clients[0].engine
    assert engine is not None
    engine._requests["nobody"] = object()  # type: ignore[assignment]


def forge_an_answer(cluster: Cluster) -> None:
    turns = [turn for client in cluster.clients for turn in client.turns]
    next(request for _, request in turns if request.finish_reason).tokens[-1] ^= 1


def rob_a_tenant(cluster: Cluster) -> None:
    """It loses a block within its quota, and another tenant has more than before."""
    store, now_ms = cluster.server.store, cluster.server.process.now_ms()
    loser, taker, *_ = sorted(store.tenants, key=lambda tenant: -tenant.blocks)
    set_quota(store, loser.name, store.pool_bytes // 2, now_ms)
    while store.tidy(now_ms):
        pass
    cluster.checks.after_request()
    loser.usage_bytes -= 4096
    taker.usage_bytes += 4096
    store.eviction.evictions += 1
    cluster.checks.after_request()


@pytest.mark.parametrize(
    ("interfere", "finding", "said"),
    [
        (change_a_byte, "wrong_bytes", "other bytes than its own"),
        (change_a_checksum, "broken_rules", "checksums of other bytes"),
        (move_a_block, "wrong_bytes", "for another tenant"),
        (contradict_the_store, "broken_rules", "contradicts itself"),
        (hold_a_lease, "leaked_leases", "holds lease"),
        (open_a_session, "leaked_leases", "session"),
        (wait_for_ever, "broken_rules", "waits for"),
        (owe_much, "broken_rules", "owes"),
        (keep_an_engine_busy, "stuck_requests", "engine"),
        (forge_an_answer, "wrong_tokens", "instead of"),
        (rob_a_tenant, "broken_rules", "within its quota"),
    ],
)
def test_it_is_noticed(
    make_plan: Callable[..., Plan], interfere: Interfere, finding: str, said: str
) -> None:
    outcome = outcome_of(make_plan(pool_blocks=150), interfere)
    assert (outcome.finding, said in outcome.violation) == (finding, True), outcome.violation


def test_an_engine_that_keeps_blocks_is_noticed(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = BlockPool.num_free.fget
    assert right is not None
    monkeypatch.setattr(BlockPool, "num_free", property(lambda self: right(self) - 1))
    assert ChaosRun(make_plan()).run().finding == "leaked_blocks"


def test_slots_that_are_lost_are_noticed(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Checks.engines_hold_nothing

    def lose_one(self: Checks) -> None:
        right(self)
        store = self._server.store
        store.slabs.take(next(iter(store.layouts)).slot_bytes, 1)

    monkeypatch.setattr(Checks, "engines_hold_nothing", lose_one)
    outcome = ChaosRun(make_plan(pool_blocks=150)).run()
    assert (outcome.finding, "are lost" in outcome.violation) == ("leaked_blocks", True), (
        outcome.violation
    )
