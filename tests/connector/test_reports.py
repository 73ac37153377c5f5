"""Tests for reports of finished requests: every block of the prompt has one outcome."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from planning import BLOCK_TOKENS, ScriptedCache, Side

from kvkeep.client.requests import Finished, LoadOutcome
from kvkeep.client.scheduler import Answer, Lookup
from kvkeep.connector.cost_model import LEAST_SAMPLES, CostModel
from kvkeep.connector.group_layout import CacheGroup, GroupLayout
from kvkeep.connector.request_state import RequestState
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.kv.outcomes import REPORTED
from kvkeep.wire.messages import MAX_RUNS, RequestReport


def arrive(
    side: Side, name: str = "r", blocks: int = 5, salt: str | None = None, **more: Any
) -> RequestState:
    """A request of so many full blocks and one more token."""
    keys = b"".join(bytes([1, at]) + bytes(KEY_BYTES - 2) for at in range(blocks))
    state = side.arrive(name, salt, None, keys)
    state.prompt_tokens = blocks * BLOCK_TOKENS + 1
    state.tokens = more.get("tokens", list(range(state.prompt_tokens)))
    state.adapter = more.get("adapter", "")
    return state


def load(
    side: Side, blocks: int, local: int = 0, bad: int | None = None, took_s: float = 0.5
) -> None:
    """Loads what was found into blocks 10, 11, ...; that of the place `bad` fails."""
    job = side.prepare_load("r", local, range(10, 10 + blocks))
    side.build_step()
    failed = frozenset() if bad is None else frozenset([10 + bad])
    side.complete([Finished(loads={job.number: LoadOutcome(failed, took_s)})])


def end(side: Side, cache: ScriptedCache, name: str = "r", computed: int = 5) -> RequestReport:
    """The request computes what is left of its first blocks, and ends."""
    side.no_load(name)
    side.hold(name, computed)
    side.end(name)
    return cache.reports[-1]


def test_blocks_are_local_loaded_lacked_or_last(side: Side, cache: ScriptedCache) -> None:
    arrive(side)
    cache.blocks = 3
    assert side.lookup("r", 1, 5) == 2
    load(side, 2, local=1)
    report = end(side, cache)
    assert report.runs == [("local", 1), ("loaded", 2), ("lacked", 2), ("last", 1)]
    assert (report.prompt_tokens, report.local_tokens, report.computed_tokens) == (21, 4, 9)
    assert report.tenant == "default" and report.request == "r"


def test_a_failed_load_counts_from_its_first_bad_block_on(side: Side, cache: ScriptedCache) -> None:
    arrive(side)
    cache.blocks = 4
    assert side.lookup("r", 0, 5) == 4
    load(side, 4, bad=1)
    assert end(side, cache).runs == [("loaded", 1), ("load_failed", 3), ("lacked", 1), ("last", 1)]


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [("deadline", "unreachable"), ("breaker_open", "unreachable"), ("too_many_leases", "refused")],
)
def test_without_an_answer_it_says_why(
    side: Side, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch, failure: str, outcome: str
) -> None:
    answer = cache.found(b"", 0)
    failed = Answer(0, 0, 0, answer.slots, answer.checksums, failure)
    monkeypatch.setattr(cache, "found", lambda keys, skip: failed)
    arrive(side)
    assert side.lookup("r", 0, 5) == 0
    assert end(side, cache).runs == [(outcome, 5), ("last", 1)]


def test_what_a_tier_brings_too_late(side: Side, cache: ScriptedCache) -> None:
    arrive(side)
    cache.blocks, cache.coming = 1, 3
    assert side.lookup("r", 0, 5) == 1
    load(side, 1)
    report = end(side, cache)
    assert report.runs == [("loaded", 1), ("too_late", 3), ("lacked", 1), ("last", 1)]


def test_what_the_server_has_without_a_part_that_the_request_needs(cache: ScriptedCache) -> None:
    window = CacheGroup("window", BLOCK_TOKENS, reach=6)  # two blocks
    side = Side(cache, GroupLayout([CacheGroup("full", BLOCK_TOKENS), window]))
    cache.blocks = 4
    cache.absent = np.array([[False, False]] * 2 + [[False, True]] * 2)
    arrive(side)
    assert side.lookup("r", 0, 5) == 2
    job = side.prepare_load("r", 0, [[10, 11], [20, 21]])
    side.build_step()
    side.complete([Finished(loads={job.number: LoadOutcome(frozenset(), 0.5)})])
    report = end(side, cache)
    assert report.runs == [("loaded", 2), ("incomplete", 2), ("lacked", 1), ("last", 1)]


def test_what_is_computed_faster_than_loaded(cache: ScriptedCache) -> None:
    side = Side(cache, costs=CostModel("faster"))
    arrive(side, blocks=1)
    cache.blocks = 1
    assert side.lookup("r", 0, 1) == 0, "one small block"
    assert end(side, cache, computed=1).runs == [("not_worth", 1), ("last", 1)]


def test_a_prompt_took_until_all_of_it_was_there(
    side: Side, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("kvkeep.connector.request_state.time.monotonic", lambda: now_s)
    for name in ("r", "ends before the engine says so"):
        arrive(side, name).arrived_s = now_s
        side.no_load(name)
    now_s += 0.25
    side.hold("r", 4)
    now_s += 0.25
    side.hold("r", 5)
    now_s += 1.5
    for name, took_us in (("r", 500_000), ("ends before the engine says so", 2_000_000)):
        side.end(name)
        assert cache.reports[-1].prompt_us == took_us


def test_a_request_that_ends_early_has_not_reached_the_rest(
    side: Side, cache: ScriptedCache
) -> None:
    arrive(side)
    assert side.lookup("r", 0, 5) == 0
    report = end(side, cache, computed=2)
    assert report.runs == [("lacked", 2), ("not_reached", 3), ("last", 1)]
    assert report.computed_tokens == 2 * BLOCK_TOKENS
    arrive(side, "never scheduled")
    side.end("never scheduled")
    assert cache.reports[-1].runs == [("not_reached", 5), ("last", 1)]


def test_a_request_that_does_not_read_asks_nothing(side: Side, cache: ScriptedCache) -> None:
    arrive(side).reads = False
    assert side.lookup("r", 0, 5) == 0
    assert end(side, cache).runs == [("not_asked", 5), ("last", 1)]


def test_what_was_loaded_before_a_preemption_stays_loaded(side: Side, cache: ScriptedCache) -> None:
    arrive(side)
    cache.blocks = 5
    assert side.lookup("r", 0, 5) == 5
    load(side, 5)
    assert side.lookup("r", 2, 5) == 3, "preempted, and two of its blocks are left"
    load(side, 3, local=2)
    assert end(side, cache).runs == [("loaded", 5), ("last", 1)]


def test_the_lookups_that_lacked_blocks_are_named(side: Side, cache: ScriptedCache) -> None:
    state = arrive(side)
    side.lookup("r", 0, 5)
    assert list(state.lacked_by) == [cache.lookups[0].call]


# -- the same tokens, asked for in another way


def test_the_same_tokens_under_another_salt_are_named(side: Side, cache: ScriptedCache) -> None:
    for name, salt in (("first", "alice"), ("second", "bob")):
        arrive(side, name, 5, salt)
        side.lookup(name, 0, 5)
        end(side, cache, name)
    assert [report.runs[0] for report in cache.reports] == [("lacked", 5), ("other_salt", 5)]
    first, second = (report.probes for report in cache.reports)
    assert first and first != second, "probes are bound to the tenant"
    assert "alice" not in str(cache.reports) and cache.reports[0].tenant == tenant_of("alice")


def test_the_same_tokens_with_another_adapter_are_named(side: Side, cache: ScriptedCache) -> None:
    for name, adapter in (("first", "sql"), ("second", ""), ("again", "")):
        arrive(side, name, 5, adapter=adapter)
        side.lookup(name, 0, 5)
        end(side, cache, name)
    found = [report.runs[0] for report in cache.reports]
    assert found == [("lacked", 5), ("other_adapter", 5), ("lacked", 5)]


def test_only_the_blocks_that_are_the_same_are_named(side: Side, cache: ScriptedCache) -> None:
    arrive(side, "first", 5, "alice")
    side.lookup("first", 0, 5)
    end(side, cache, "first")
    other = [*range(2 * BLOCK_TOKENS), *range(1000, 1013)]
    arrive(side, "second", 5, "bob", tokens=other)
    side.lookup("second", 0, 5)
    assert end(side, cache, "second").runs == [("other_salt", 2), ("lacked", 3), ("last", 1)]


def test_tokens_that_do_not_show_all_are_not_compared(side: Side, cache: ScriptedCache) -> None:
    for salt in ("alice", "bob"):
        arrive(side, salt, 5, salt, tokens=())
        side.lookup(salt, 0, 5)
        assert end(side, cache, salt).runs[0] == ("lacked", 5)
        assert cache.reports[-1].probes == b""


# -- time saved


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_time_saved_is_what_computing_would_take_less_the_load(cache: ScriptedCache) -> None:
    clock = Clock()
    costs = CostModel("always", clock=clock)
    side = Side(cache, costs=costs)
    for _ in range(LEAST_SAMPLES):  # a tenth of a second a token
        costs.begin_step(tokens=101, requests=1)
        clock.now_s += 10.0
        costs.end_step()
    cache.blocks = 4
    arrive(side)
    side.lookup("r", 0, 5)
    load(side, 4, took_s=0.5)
    report = end(side, cache)
    assert report.avoided_us == pytest.approx(16 * 0.1e6) and report.load_us == 500_000
    assert report.unpriced_tokens == 0


def test_tokens_loaded_before_any_speed_is_known_have_no_price(
    side: Side, cache: ScriptedCache
) -> None:
    cache.blocks = 4
    arrive(side)
    side.lookup("r", 0, 5)
    load(side, 4)
    report = end(side, cache)
    assert (report.unpriced_tokens, report.avoided_us, report.load_us) == (16, 0, 0)


# -- always


def test_a_prompt_in_shreds_is_cut_to_what_a_message_takes(
    side: Side, cache: ScriptedCache
) -> None:
    state = arrive(side, blocks=200)
    state.outcomes[:] = bytes(at % 2 for at in range(200))
    report = end(side, cache, computed=200)
    assert len(report.runs) <= MAX_RUNS and sum(count for _, count in report.runs) == 201


@pytest.mark.parametrize("seed", range(200))
def test_the_outcomes_add_up_whatever_happens(
    seed: int, side: Side, cache: ScriptedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random life: lookups that find anything or fail, loads that fail in part, preemptions, an
    end at any time."""
    chance = random.Random(seed)
    blocks = chance.randrange(1, 12)
    state = arrive(side, blocks=blocks)
    found = cache.found

    def answer(keys: bytes, skip: int) -> Answer:
        cache.blocks, cache.coming = chance.randrange(blocks + 1), chance.randrange(3)
        said = found(keys, skip)
        none = Answer(0, skip, 0, said.slots[:0], said.checksums[:0], "deadline")
        return said if chance.random() < 0.8 else none

    monkeypatch.setattr(cache, "found", answer)
    for _ in range(chance.randrange(6)):
        local = chance.randrange(blocks + 1)
        cache.silent = chance.random() < 0.2
        if chance.random() < 0.3:
            cache.surely_lacking.add(state.key(min(local, blocks - 1)))
        extra = side.lookup("r", local, blocks)
        if extra:
            bad = chance.randrange(extra) if chance.random() < 0.3 else None
            load(side, extra, local, bad)
        elif extra == 0:
            state.hold_local(local)
            side.no_load("r")
        side.hold("r", chance.randrange(blocks + 1))
    side.end("r")
    [report] = cache.reports
    assert {name for name, _ in report.runs} <= REPORTED
    assert sum(count for _, count in report.runs) == blocks + 1, "and the last one"
    counted = dict.fromkeys(REPORTED, 0)
    for name, count in report.runs:
        counted[name] += count
    assert state.loaded == counted["loaded"] and report.computed_tokens >= 0
    assert report.local_tokens == counted["local"] * BLOCK_TOKENS


def test_reports_name_no_lookup_twice(side: Side, cache: ScriptedCache) -> None:
    state = arrive(side)
    for _ in range(10):
        side.lookup("r", 0, 5)
    assert len(state.lacked_by) == 1
    assert isinstance(cache.lookups[0], Lookup)
