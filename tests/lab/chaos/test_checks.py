"""Every check can fail: what it looks for is brought about behind everybody's back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvkeep.engine.blocks import BlockPool
from kvkeep.store.table import READY
from kvkeep_lab.chaos.checks import Checks
from kvkeep_lab.chaos.plan import Plan
from kvkeep_lab.chaos.record import Outcome
from kvkeep_lab.chaos.run import ChaosRun

Interfere = Callable[[ChaosRun], None]


def outcome_of(plan: Plan, interfere: Interfere, at_ms: int) -> Outcome:
    run = ChaosRun(plan)
    run._simulation.at(at_ms * 1000, lambda: interfere(run))
    return run.run()


def change_a_byte(run: ChaosRun) -> None:
    table = run._server.store.blocks.table
    row = next(row for row in table.live_rows().tolist() if table.state[row] == READY)
    run._server.pool.segments.view(table.slot[row], 1)[0] ^= 1
    run._checks.everything()


def move_a_block(run: ChaosRun) -> None:
    """To another tenant."""
    table, tenants = run._server.store.blocks.table, run._server.store.tenants
    row = next(row for row in table.live_rows().tolist() if table.state[row] == READY)
    tenants.by_number[table.tenant[row]].name = "t" * 32
    run._checks._check_ready_blocks()


def contradict_the_store(run: ChaosRun) -> None:
    store = run._server.store
    store.blocks.table.pins[store.blocks.table.live_rows().tolist()[0]] += 1
    run._checks.everything()


def hold_a_lease(run: ChaosRun) -> None:
    store = run._server.store
    row = next(
        row
        for row in store.blocks.table.live_rows().tolist()
        if store.blocks.table.state[row] == READY
    )
    session = next(iter(store.sessions.values()))
    store.blocks.pin(row)
    store.blocks.hold(np.array([row]))
    session.leases[1 << 40] = row


def open_a_session(run: ChaosRun) -> None:
    """That nobody has, and that does not time out."""
    service = run._server.service
    service.store.open_session(99)
    service.sessions.add(99, "nobody", 1, None, 1 << 60)


def wait_for_ever(run: ChaosRun) -> None:
    connection = run._clients[0].connections[0]
    call = connection.call.__globals__["Call"](1 << 40, -1 << 40)
    connection._calls.add(call)
    run._checks.everything()


def owe_much(run: ChaosRun) -> None:
    run._clients[0].connections[0]._debts._owed["lease"] |= dict.fromkeys(range(5_000), 0)
    run._checks.everything()


def keep_an_engine_busy(run: ChaosRun) -> None:
    engine = run._clients[0].engine
    assert engine is not None
    engine._requests["nobody"] = object()  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("interfere", "finding"),
    [
        (change_a_byte, "wrong_bytes"),
        (move_a_block, "wrong_bytes"),
        (contradict_the_store, "broken_rules"),
        (hold_a_lease, "leaked_leases"),
        (open_a_session, "leaked_leases"),
        (wait_for_ever, "broken_rules"),
        (owe_much, "broken_rules"),
        (keep_an_engine_busy, "stuck_requests"),
    ],
)
def test_it_is_noticed(make_plan: Callable[..., Plan], interfere: Interfere, finding: str) -> None:
    plan = make_plan(pool_blocks=150)
    outcome = outcome_of(plan, interfere, plan.duration_ms - 1)
    assert outcome.finding == finding, outcome.violation


def test_a_wrong_answer_is_noticed(make_plan: Callable[..., Plan]) -> None:
    def forge(run: ChaosRun) -> None:
        turn = next(
            turn for client in run._clients for turn in client.turns if turn[1].finish_reason
        )
        turn[1].tokens[-1] ^= 1

    plan = make_plan()
    assert outcome_of(plan, forge, plan.duration_ms - 1).finding == "wrong_tokens"


def test_an_engine_that_keeps_blocks_is_noticed(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockPool, "num_free", property(lambda self: len(self._free) - 1))
    assert ChaosRun(make_plan()).run().finding == "leaked_blocks"


def test_slots_that_are_lost_are_noticed(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Checks.engines_hold_nothing

    def lose_one(self: Checks) -> None:
        right(self)
        self._server.store.slabs._unused.pop()

    monkeypatch.setattr(Checks, "engines_hold_nothing", lose_one)
    outcome = ChaosRun(make_plan(pool_blocks=150)).run()
    assert (outcome.finding, "are lost" in outcome.violation) == ("leaked_blocks", True), (
        outcome.violation
    )


def test_a_tenant_that_loses_what_it_was_promised_is_noticed(
    make_plan: Callable[..., Plan],
) -> None:
    def rob(run: ChaosRun) -> None:
        checks, store = run._checks, run._server.store
        checks._check_quotas()
        names = [tenant.name for tenant in store.tenants]
        checks._usage[names[0]] = (store.tenants.get(names[0]).usage_bytes + 4096, 1 << 30)  # type: ignore[union-attr]
        checks._usage["t"] = (0, None)
        other = next(tenant for tenant in store.tenants if tenant.name != names[0])
        checks._usage[other.name] = (other.usage_bytes - 4096, None)
        store.eviction.evictions += 1
        checks._check_quotas()

    plan = make_plan(pool_blocks=150)
    outcome = outcome_of(plan, rob, plan.duration_ms - 1)
    assert (outcome.finding, "within its quota" in outcome.violation) == ("broken_rules", True), (
        outcome.violation
    )
