"""Lookups of blocks that a server brings up from a tier: waited for within patience, asked again and
never by sleeping, and no lease is left behind."""

from __future__ import annotations

from typing import Any

import pytest
from tests.client.test_scheduler import adapter, keys, leases, store

from kvkeep.client.scheduler import Answer, Lookup, SchedulerAdapter
from kvkeep.wire import messages as m
from kvkeep_lab.simulation.tiers import SimulatedTiers


class Tiered:
    """A simulation whose server has a tier, with an engine's scheduler that polls it."""

    def __init__(self, sim: Any, block_ms: int = 10, **options: Any) -> None:
        self.sim = sim
        self.tiers = SimulatedTiers(sim.server, block_ms)
        sim.recorder.handle = self._handle
        self._handle_of_service = type(sim.recorder).handle
        self.scheduler: SchedulerAdapter = adapter(sim, **options)

    def _handle(self, frames: Any, now_ms: int) -> Any:
        self.tiers.promote(now_ms)
        return self._handle_of_service(self.sim.recorder, frames, now_ms)

    def on_disk(self, count: int, in_memory: int = 0) -> None:
        """The first `count` blocks are on disk, and the first `in_memory` in memory as well."""
        store(self.sim, count)
        assert self.tiers.take_down() == count
        if in_memory:
            store(self.sim, in_memory)

    @property
    def now_ms(self) -> int:
        return int(self.sim.network.clock.now_ms)

    def poll(self, lookup: Lookup, most_ms: float | None = None) -> Answer | None:
        """What an engine does in each step: None if the request has to wait."""
        answer = self.scheduler.answer(lookup)
        if answer is None or self.scheduler.wait_for_tier(lookup, most_ms):
            return None
        return lookup.answer

    def wait(self, lookup: Lookup, most_ms: float | None = None) -> tuple[Answer, int]:
        """The answer that counts, and how long it took."""
        began_ms = self.now_ms
        for _ in range(20_000):
            if (answer := self.poll(lookup, most_ms)) is not None:
                return answer, self.now_ms - began_ms
            self.sim.run(1, step_ms=1)
        raise AssertionError("it waits for ever")

    @property
    def patience(self) -> list[int]:
        return [each.patience_ms for each in self.sim.recorder.came if isinstance(each, m.Lookup)]


def test_blocks_on_disk_are_waited_for_and_asked_for_once_more(sim: Any) -> None:
    tiered = Tiered(sim)
    tiered.on_disk(5, in_memory=2)
    lookup = tiered.scheduler.lookup(None, keys(6))
    answer, took_ms = tiered.wait(lookup)
    assert (answer.blocks, answer.coming, len(answer.slots)) == (5, 0, 0), "network plane: no slots"
    assert answer.checksums.shape == (5, 1)
    assert 30 <= took_ms <= 40
    assert len(tiered.patience) == 2 and tiered.patience[0] == 200 > tiered.patience[1] > 150
    sim.run(20)
    assert leases(sim) == 1, "the lease of the first answer went back"
    tiered.scheduler.release(lookup)
    sim.run(20)
    assert leases(sim) == 0


def test_while_it_waits_the_lease_keeps_what_memory_has(sim: Any) -> None:
    tiered = Tiered(sim)
    tiered.on_disk(5, in_memory=2)
    lookup = tiered.scheduler.lookup(None, keys(5))
    for _ in range(25):
        assert tiered.poll(lookup) is None
        sim.run(1, step_ms=1)
        assert leases(sim) == 1
    tiered.scheduler.release(lookup)
    sim.run(20)
    assert leases(sim) == 0 and sim.recorder.count(m.Lookup) == 1


def test_a_request_that_ends_while_it_asks_again_leaves_no_lease(sim: Any) -> None:
    tiered = Tiered(sim)
    tiered.on_disk(5, in_memory=2)
    lookup = tiered.scheduler.lookup(None, keys(5))
    while sim.recorder.count(m.Lookup) < 2:
        assert tiered.poll(lookup) is None
        sim.run(1, step_ms=1)
    assert leases(sim) == 2
    tiered.scheduler.release(lookup)
    sim.run(20)
    assert leases(sim) == 0


def test_what_is_up_when_patience_ends_is_used(sim: Any) -> None:
    tiered = Tiered(sim, block_ms=30, tier_patience="timeout=100")
    tiered.on_disk(10)
    lookup = tiered.scheduler.lookup(None, keys(10))
    answer, took_ms = tiered.wait(lookup)
    assert answer.blocks == 3 and 100 <= took_ms <= 110
    assert tiered.patience[0] == 100 and tiered.patience[-1] == 0, "the last says that it has ended"


@pytest.mark.parametrize("policy", ["best_effort", "timeout=0"])
def test_best_effort_takes_what_memory_has_and_the_next_request_finds_more(
    sim: Any, policy: str
) -> None:
    tiered = Tiered(sim, tier_patience=policy)
    tiered.on_disk(5, in_memory=2)
    first, took_ms = tiered.wait(tiered.scheduler.lookup(None, keys(5)))
    assert first.blocks == 2 and took_ms <= 2
    sim.run(40)
    assert tiered.wait(tiered.scheduler.lookup(None, keys(5)))[0].blocks == 5
    assert tiered.patience == [0, 0]


def test_wait_goes_on_as_long_as_blocks_are_coming(sim: Any) -> None:
    tiered = Tiered(sim, block_ms=400, tier_patience="wait")
    tiered.on_disk(10)
    answer, took_ms = tiered.wait(tiered.scheduler.lookup(None, keys(10)))
    assert answer.blocks == 10 and took_ms >= 4_000


def test_blocks_that_come_sooner_than_the_server_expects_are_used_soon(sim: Any) -> None:
    """It has not measured its tier yet. No request waits more than twice as long as it must."""
    tiered = Tiered(sim, tier_patience="wait")
    tiered.on_disk(10)
    tiered.tiers.guess_ms = 5_000
    answer, took_ms = tiered.wait(tiered.scheduler.lookup(None, keys(10)))
    assert answer.blocks == 10 and 100 <= took_ms <= 160
    assert len(tiered.patience) == 3


def test_a_stalled_tier_stops_no_request(sim: Any) -> None:
    tiered = Tiered(sim, tier_patience="wait")
    tiered.on_disk(10, in_memory=2)
    tiered.tiers.stalled = True
    answer, took_ms = tiered.wait(tiered.scheduler.lookup(None, keys(10)))
    assert answer.blocks == 2 and took_ms <= 10_100


@pytest.mark.parametrize(
    ("most_ms", "blocks", "longest_ms"), [(None, 10, 200), (85, 10, 90), (79, 2, 5), (0, 2, 5)]
)
def test_no_request_waits_longer_than_computing_takes(
    sim: Any, most_ms: float | None, blocks: int, longest_ms: int
) -> None:
    """Eight blocks are expected in 80 ms."""
    tiered = Tiered(sim, block_ms=10)
    tiered.on_disk(10, in_memory=2)
    lookup = tiered.scheduler.lookup(None, keys(10))
    answer, took_ms = tiered.wait(lookup, most_ms)
    assert answer.blocks == blocks and took_ms <= longest_ms
    for _ in range(3):
        assert tiered.poll(lookup) is answer


def test_a_busy_moment_does_not_undo_the_wait(sim: Any) -> None:
    """When it asks again, the server expects what is left later than computing it would take."""
    tiered = Tiered(sim, block_ms=10)
    tiered.on_disk(10)
    lookup = tiered.scheduler.lookup(None, keys(10))
    while sim.recorder.count(m.Lookup) < 2:
        tiered.tiers.guess_ms = 5_000 if lookup.until_ms else 0
        assert tiered.poll(lookup, most_ms=150) is None
        sim.run(1, step_ms=1)
    answer, _ = tiered.wait(lookup, most_ms=1)
    assert answer.blocks == 10


def test_a_request_whose_turn_comes_late_finds_what_has_come_meanwhile(sim: Any) -> None:
    """It was queued in the engine; that it took long to ask is no reason not to wait."""
    tiered = Tiered(sim, block_ms=100)
    tiered.on_disk(10)
    lookup = tiered.scheduler.lookup(None, keys(10))
    sim.run(3_000)
    answer, took_ms = tiered.wait(lookup, most_ms=50)
    assert answer.blocks == 10 and took_ms <= 5


def test_other_lookups_are_answered_meanwhile(sim: Any) -> None:
    tiered = Tiered(sim)
    tiered.on_disk(10)
    store(sim, 3, "other")
    waiting = tiered.scheduler.lookup(None, keys(10))
    sim.run(1, step_ms=1)
    assert tiered.poll(waiting) is None
    answer, took_ms = tiered.wait(tiered.scheduler.lookup(None, keys(3, "other")))
    assert answer.blocks == 3 and took_ms <= 2
    assert tiered.poll(waiting) is None


def test_if_the_repeated_question_gets_no_answer_the_first_one_counts(
    sim: Any, passing: object
) -> None:
    tiered = Tiered(sim)
    tiered.on_disk(5, in_memory=2)
    lookup = tiered.scheduler.lookup(None, keys(5))
    sim.run(5, step_ms=1)
    assert tiered.poll(lookup) is None
    sim.recorder.instead = lambda header, request: (
        None if isinstance(request, m.Lookup) else passing
    )
    answer, _ = tiered.wait(lookup)
    assert (answer.blocks, answer.failure, answer.coming) == (2, "", 0)
    sim.run(20)
    assert leases(sim) == 1
    tiered.scheduler.release(lookup)
    sim.run(20)
    assert leases(sim) == 0


def test_if_the_server_is_replaced_meanwhile_the_new_one_is_asked(sim: Any) -> None:
    tiered = Tiered(sim)
    tiered.on_disk(5, in_memory=2)
    lookup = tiered.scheduler.lookup(None, keys(5))
    sim.run(5, step_ms=1)
    assert tiered.poll(lookup) is None
    sim.replace_server(epoch=2)
    sim.run(2_000)
    answer, _ = tiered.wait(lookup)
    assert (answer.blocks, answer.epoch, answer.failure) == (0, 2, "")
    assert sim.recorder.came[-1].patience_ms == 0, "it has no tier"


def test_a_server_without_tiers_gets_no_field_that_it_may_not_know(sim: Any) -> None:
    store(sim, 2)
    scheduler = adapter(sim)
    lookup = scheduler.lookup(None, keys(5))
    sim.run(5, step_ms=1)
    answer = scheduler.answer(lookup)
    assert answer is not None and not scheduler.wait_for_tier(lookup)
    scheduler.prefetch(None, keys(5))
    sim.run(5, step_ms=1)
    (asked,) = [each for each in sim.recorder.came if isinstance(each, m.Lookup)]
    assert (asked.patience_ms, asked.found_before) == (0, -1)
    assert sim.recorder.count(m.Prefetch) == 0


def test_a_server_that_promises_for_ever_is_asked_within_patience_only(
    sim: Any, passing: object
) -> None:
    tiered = Tiered(sim)
    sim.recorder.instead = lambda header, request: (
        m.Found(0, b"", b"", 1 << 40, -5) if isinstance(request, m.Lookup) else passing
    )
    lookup = tiered.scheduler.lookup(None, keys(3))
    answer, took_ms = tiered.wait(lookup)
    assert (answer.blocks, answer.failure) == (0, "") and took_ms <= 210
    assert len(tiered.patience) <= 210


# -- prefetch


def test_a_prefetch_brings_blocks_up_and_is_said_once(sim: Any) -> None:
    tiered = Tiered(sim)
    tiered.on_disk(5, in_memory=2)
    for _ in range(3):
        tiered.scheduler.prefetch(None, keys(5))
    tiered.scheduler.prefetch("other", keys(3))
    sim.run(100)
    tiered.tiers.promote(tiered.now_ms)
    assert tiered.tiers.promoted == 3
    assert sim.recorder.count(m.Prefetch) == 2
    sim.run(1_000)
    tiered.scheduler.prefetch(None, keys(5))
    sim.run(10)
    assert sim.recorder.count(m.Prefetch) == 3, "later it may be on disk only again"


@pytest.mark.parametrize(("salt", "prompt"), [(5, b"k" * 16), (["x"], b"k" * 16), (None, b"")])
def test_a_prefetch_that_cannot_be_meant_is_not_sent(sim: Any, salt: Any, prompt: bytes) -> None:
    tiered = Tiered(sim)
    tiered.scheduler.prefetch(salt, prompt)
    sim.run(10)
    assert sim.recorder.count(m.Prefetch) == 0
