"""Lookups that never block: asked once, answered always the same, and given back on every path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.client.conftest import Transfer

from kvkeep.client.connection import MOST_REPORTS
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import StoreRequest
from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import addresses
from kvkeep.kv.runs import BlockRuns
from kvkeep.store.table import READY
from kvkeep.wire import messages as m
from kvkeep_lab.simulation.wire import Faults

Make = Callable[..., Any]


def keys(count: int, name: str = "k") -> bytes:
    return b"".join(f"{name}{at}".encode().ljust(16, b".") for at in range(count))


def store(sim: Any, count: int, name: str = "k", salt: str | None = None) -> None:
    connection = sim.connected()
    blocks = np.full((count, 1000), 7, dtype=np.uint8)
    request = StoreRequest(tenant_of(salt), b"", keys(count, name), np.arange(count))
    assert Transfer(connection, [GroupMemory(BlockRuns.of([blocks]))], 0).store(request) == count


def adapter(sim: Any, **options: Any) -> SchedulerAdapter:
    connection = sim.connected(**options)
    return SchedulerAdapter(connection.shape, connection=connection)


def leases(sim: Any) -> int:
    return sum(held for held, _ in sim.held())


def test_a_lookup_is_none_until_the_answer_has_come_and_then_always_the_same(
    simulation: Make,
) -> None:
    sim = simulation(shared_memory=True)
    store(sim, 3)
    scheduler = adapter(sim)
    sim.network.faults = Faults(delay_ms=(10, 10))
    lookup = scheduler.lookup(None, keys(5))
    for _ in range(5):
        assert scheduler.answer(lookup) is None
    sim.run(30)
    answer = scheduler.answer(lookup)
    assert answer is not None
    assert (answer.blocks, answer.skip, answer.epoch, answer.failure) == (3, 0, 1, "")
    assert answer.slots.shape == (3,)
    assert answer.checksums.shape == (3, 1)
    for _ in range(5):
        assert scheduler.answer(lookup) is answer
    assert sim.recorder.count(m.Lookup) == 1
    assert leases(sim) == 1


def test_an_answer_stays_under_its_lease_until_it_is_released(sim: Any) -> None:
    store(sim, 3)
    scheduler = adapter(sim)
    lookup = scheduler.lookup(None, keys(3))
    sim.run(60_000, step_ms=100)
    assert leases(sim) == 1
    sent = scheduler.connection.counters.sent
    scheduler.release(lookup)
    assert scheduler.connection.counters.sent == sent + 1, "said at once, not when somebody polls"
    sim.run(20)
    assert leases(sim) == 0
    scheduler.release(lookup)
    sim.run(20)
    assert sim.recorder.count(m.Release) == 1


@pytest.mark.parametrize("is_told", [True, False])
def test_the_server_is_told_what_was_loaded_if_it_counts_that(sim: Any, is_told: bool) -> None:
    store(sim, 3, salt="s")
    scheduler = adapter(sim)
    if not is_told:
        scheduler.connection.welcome.capabilities.remove(m.LOADED_TOKENS)
    lookup = scheduler.lookup("s", keys(3))
    sim.run(20)
    scheduler.release(lookup, 48)
    sim.run(20)
    assert leases(sim) == 0
    counts = sim.server.service.counters.tenants.of(tenant_of("s"))
    assert (counts.lookups, counts.hit_blocks, counts.loaded_tokens) == (1, 3, 48 if is_told else 0)


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("is_told", [True, False])
def test_a_server_is_told_of_the_span_that_waits_if_it_makes_spans(sim: Any, is_told: bool) -> None:
    scheduler = adapter(sim)
    if is_told:
        scheduler.connection.welcome.capabilities.append(m.TRACES)
    scheduler.lookup(None, keys(3), trace=TRACE)
    scheduler.lookup(None, keys(3))
    sim.run(20)
    asked = [each.trace for each in sim.recorder.came if isinstance(each, m.Lookup)]
    assert asked == [TRACE if is_told else "", ""]


def a_report(name: str, **fields: Any) -> m.RequestReport:
    return m.RequestReport(name, "default", [("lacked", 3), ("last", 1)], 49, **fields)


def test_reports_go_out_together_and_name_the_lookups_of_this_session(sim: Any) -> None:
    scheduler = adapter(sim)
    before, after = (scheduler.lookup(None, keys(3)) for _ in range(2))
    sim.run(20)
    for name, lookup in (("first", before), ("second", after)):
        scheduler.report(a_report(name, computed_tokens=49), [lookup.call])
    assert sim.recorder.count(m.ReportRequests) == 0, "not in the step that ends the request"
    sim.run(300)
    [told] = [each for each in sim.recorder.came if isinstance(each, m.ReportRequests)]
    assert [each.lookups for each in told.requests] == [[before.call.number], [after.call.number]]
    assert sim.server.service.counters.computed_tokens == 98
    scheduler.report(a_report("third"), [before.call])
    scheduler.connection.start_over()
    sim.run(2_000)
    told = [each for each in sim.recorder.came if isinstance(each, m.ReportRequests)][-1]
    assert [(each.request, each.lookups) for each in told.requests] == [("third", [])]


def test_a_server_that_takes_no_reports_is_told_nothing(sim: Any) -> None:
    scheduler = adapter(sim)
    scheduler.connection.welcome.capabilities.remove(m.REPORTS)
    scheduler.report(a_report("r"), [])
    sim.run(1_000)
    scheduler.close()
    assert sim.recorder.count(m.ReportRequests) == 0


def test_what_is_not_told_yet_is_told_at_the_end(sim: Any) -> None:
    scheduler = adapter(sim)
    for number in range(m.MAX_REPORTS + 5):
        scheduler.report(a_report(f"r{number}"), [])
    scheduler.close()
    sim.run(100)
    told = [each for each in sim.recorder.came if isinstance(each, m.ReportRequests)]
    assert all(len(each.requests) <= 32 for each in told)
    assert sim.server.service.counters.requests == m.MAX_REPORTS + 5


def test_reports_that_no_server_takes_are_bounded(sim: Any) -> None:
    scheduler = adapter(sim)
    sim.network.serve(None)
    sim.run(5_000, step_ms=100)
    for number in range(MOST_REPORTS + 5):
        scheduler.report(a_report(f"r{number}"), [])
    sim.network.serve(sim.recorder)
    sim.run(5_000, step_ms=100)
    assert sim.server.service.counters.requests == MOST_REPORTS


def test_what_was_found_in_a_session_that_is_lost_is_asked_anew(sim: Any) -> None:
    """The server is the same, but the lease went with the session: its slots may be anybody's."""
    store(sim, 3)
    scheduler = adapter(sim)
    lookup = scheduler.lookup(None, keys(3))
    sim.run(20)
    first = scheduler.answer(lookup)
    scheduler.connection.start_over()
    sim.run(200)
    assert scheduler.connection.up and leases(sim) == 0
    assert scheduler.answer(lookup) is None
    sim.run(20)
    again = scheduler.answer(lookup)
    assert again is not None and again is not first and again.epoch == scheduler.connection.epoch
    assert leases(sim) == 1 and sim.recorder.count(m.Lookup) == 2


def test_who_waits_for_its_turn_when_an_outage_ends_is_asked_for_once_more(sim: Any) -> None:
    store(sim, 3)
    scheduler = adapter(sim, ping_interval_ms=100)
    sim.network.serve(None)
    lookup = scheduler.lookup(None, keys(3))
    sim.run(2_000)
    miss = scheduler.answer(lookup)
    assert miss is not None and miss.failure and scheduler.answer(lookup) is miss
    sim.network.serve(sim.recorder)
    sim.run(2_000)
    assert scheduler.answer(lookup) is None
    sim.run(20)
    found = scheduler.answer(lookup)
    assert found is not None and (found.blocks, found.failure) == (3, "")


def test_a_server_that_is_slow_and_not_away_is_asked_no_third_time(
    sim: Any, passing: object
) -> None:
    """Or a request would wait for it for ever."""
    scheduler = adapter(sim, lookup_deadline_ms=100)
    sim.recorder.instead = lambda header, request: (
        None if isinstance(request, m.Lookup) else passing
    )
    lookup, answers = scheduler.lookup(None, keys(3)), []
    for _ in range(50):
        answers.append(scheduler.answer(lookup))
        assert isinstance(
            scheduler.connection.wait(scheduler.connection.call(m.Ping(), 100)), m.Done
        )
        sim.run(20)
    assert sim.recorder.count(m.Lookup) == 2
    assert answers[-1] is not None and answers[-1].failure == "deadline"


def test_an_answer_describes_the_blocks_after_those_that_are_skipped(sim: Any) -> None:
    store(sim, 4)
    scheduler = adapter(sim)

    def ask(*arguments: Any) -> tuple[int, int]:
        lookup = scheduler.lookup(*arguments)
        while (answer := scheduler.answer(lookup)) is None:
            sim.run(10)
        scheduler.release(lookup)
        return answer.blocks, len(answer.checksums)

    assert ask(None, keys(2)) == (2, 2)
    assert ask(None, keys(4)) == (4, 4)
    assert ask(None, keys(4), 3) == (4, 1)
    assert ask("salt", keys(4)) == (0, 0)
    assert sim.recorder.count(m.Lookup) == 4
    sim.run(20)
    assert leases(sim) == 0


def test_a_lookup_cancelled_while_on_its_way_leaves_no_lease(sim: Any) -> None:
    store(sim, 3)
    scheduler = adapter(sim)
    sim.network.faults = Faults(delay_ms=(20, 20))
    lookup = scheduler.lookup(None, keys(3))
    assert scheduler.answer(lookup) is None
    scheduler.release(lookup)
    sim.run(200)
    assert sim.recorder.count(m.Lookup) == 1
    assert leases(sim) == 0
    assert scheduler.connection.counters.late_replies == 1


@pytest.mark.parametrize("answers", [True, False])
def test_what_comes_of_an_answer_that_nobody_wants_goes_back(
    sim: Any, answers: bool, passing: object
) -> None:
    """Somebody stored it in the moment between the look at what the server lacks and the lookup."""
    store(sim, 3)
    scheduler = adapter(sim)
    connection = scheduler.connection
    scheduler.lacks = lambda key: True  # type: ignore[method-assign]
    sim.network.faults = Faults(delay_ms=(10, 10))
    if not answers:
        sim.recorder.instead = lambda header, request: (
            None if isinstance(request, m.Lookup) else passing
        )
    lookup = scheduler.lookup(None, keys(3))
    assert scheduler.answer(lookup) is None
    scheduler.release(lookup)
    assert "calls=0" not in repr(connection), (
        "its answer is still waited for, by nobody in particular"
    )
    sim.run(5)
    assert sim.recorder.count(m.Release) == 0
    sim.run(1_000)
    assert sim.recorder.count(m.Release) == 1 and leases(sim) == 0
    assert connection.counters.late_replies == 0
    assert connection.counters.failures == ({} if answers else {"deadline": 1})


def test_two_requests_for_the_same_prefix_have_a_lease_each(sim: Any) -> None:
    store(sim, 3)
    scheduler = adapter(sim)
    lookups = [scheduler.lookup(None, keys(3)) for _ in range(2)]
    sim.run(20)
    assert leases(sim) == 2
    scheduler.release(lookups[0])
    sim.run(20)
    assert leases(sim) == 1


def test_a_finished_conversation_is_evicted_before_older_ones(simulation: Make) -> None:
    sim = simulation(slots=6)
    store(sim, 3, "old")
    store(sim, 3, "new")
    scheduler = adapter(sim)
    scheduler.finish_conversation(None, keys(3, "new")[-16:])
    sim.run(20)
    store(sim, 2, "another")
    tenant = sim.store.tenants.get("default")
    ready = [
        address
        for address, row in tenant.index.items()
        if sim.store.blocks.table.state[row] == READY
    ]
    fingerprint = scheduler.connection.shape.fingerprint
    left = {
        addresses(address, fingerprint).decode().rstrip(".") for address in ready
    }  # which gives back the keys
    assert left == {"old0", "old1", "old2", "new0", "another0", "another1"}


def test_a_conversation_without_a_stored_block_has_nothing_to_finish(sim: Any) -> None:
    adapter(sim).finish_conversation(None, b"")
    sim.run(20)
    assert sim.recorder.count(m.Finish) == 0


@pytest.mark.parametrize("fault", ["down", "silent", "breaker", "refused", "nonsense"])
def test_a_fault_is_an_empty_answer_that_says_why(sim: Any, fault: str, passing: object) -> None:
    scheduler = (
        adapter(sim)
        if fault != "down"
        else SchedulerAdapter(sim.connection().shape, connection=sim.connection())
    )
    expected = {
        "down": "not_connected",
        "silent": "deadline",
        "breaker": "breaker_open",
        "refused": "cross",
    }
    if fault in ("silent", "down"):
        sim.network.serve(None)
    if fault == "breaker":
        scheduler.connection.breaker.is_open = True
    reply = m.Refused("cross", "no") if fault == "refused" else m.Found(7, b"", b"")
    if fault in ("refused", "nonsense"):
        sim.recorder.instead = lambda header, request: (
            reply if isinstance(request, m.Lookup) else passing
        )
    lookup = scheduler.lookup(None, keys(3))
    while (answer := scheduler.answer(lookup)) is None:
        sim.run(10)
    assert (answer.blocks, answer.epoch, len(answer.slots), answer.checksums.shape) == (
        0,
        0,
        0,
        (0, 1),
    )
    assert answer.failure == expected.get(fault, "protocol")
    assert scheduler.answer(lookup) is answer, "and it is not asked again in every step"


@pytest.mark.parametrize("read_before", [False, True])
def test_an_answer_of_a_server_that_is_gone_is_asked_anew(
    simulation: Make, read_before: bool
) -> None:
    sim = simulation(shared_memory=True)
    store(sim, 3)
    scheduler = adapter(sim)
    lookup = scheduler.lookup(None, keys(3))
    sim.run(20)
    if read_before:
        answer = scheduler.answer(lookup)
        assert answer is not None and (answer.blocks, answer.epoch) == (3, 1)
    sim.replace_server(epoch=2)
    sim.run(2_000)
    assert scheduler.connection.epoch == 2
    assert scheduler.answer(lookup) is None, "on its way"
    sim.run(20)
    answer = scheduler.answer(lookup)
    assert answer is not None and (answer.blocks, answer.epoch) == (0, 2)


def test_only_keys_and_the_tenants_digest_leave_the_engine(sim: Any) -> None:
    scheduler = adapter(sim)
    scheduler.lookup("a secret salt", keys(2))
    scheduler.finish_conversation("a secret salt", keys(1))
    sim.run(20)
    (asked,) = [request for request in sim.recorder.came if isinstance(request, m.Lookup)]
    assert (asked.tenant, asked.keys) == (tenant_of("a secret salt"), keys(2))
    assert all("secret" not in repr(request) for request in sim.recorder.came)


def test_close_ends_the_session_and_what_it_held(sim: Any) -> None:
    store(sim, 3)
    scheduler = adapter(sim)
    scheduler.lookup(None, keys(3))
    sim.run(20)
    scheduler.close()
    assert leases(sim) == 0
    answer = scheduler.answer(scheduler.lookup(None, keys(3)))
    assert answer is not None
    assert answer.failure == "not_connected"


@pytest.mark.parametrize(
    ("salt", "keys", "skip"),
    [
        (5, b"k" * 16, 0),
        ({"a": 1}, b"k" * 16, 0),
        (["x"], b"k" * 16, 0),
        (None, object(), 0),
        (None, b"k" * 16, 2**70),
    ],
)
def test_a_request_with_a_wrong_field_is_a_miss_and_hurts_nobody(
    simulation: Make, salt: Any, keys: Any, skip: Any
) -> None:
    """Peers die of one such request."""
    sim = simulation()
    scheduler = adapter(sim)
    lookup = scheduler.lookup(salt, keys, skip)
    for _ in range(20):
        answer = scheduler.answer(lookup)
        sim.run(20)
    assert answer is not None and answer.blocks == 0 and answer.failure
    scheduler.release(lookup)
    scheduler.finish_conversation(salt, b"k" * 16)
    assert scheduler.connection.up
