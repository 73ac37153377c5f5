"""A disk that stalls, is slow, full or read-only, fails, gives garbage or half a block, or is
removed, below a real server: tokens are right, memory hits are as before, nothing grows, and
operators see it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engines import (
    POOL,
    at_rest,
    counting,
    engine,
    eventually,
    forget_local,
    oracle,
    prompt,
    serve,
    tokens_of,
    without_cache,
)
from faulty_server import FaultyServer
from tiered import BLOCKS, FOUND, TOKENS, WAITS, hit, is_written, restart_cold, tiers

from kvkeep.engine.llm import LLM
from kvkeep.units import MIB

MOST_IN_FLIGHT = 16 * MIB  # a quarter of the pool
MOST_GROWTH = 16 * MIB
Shown = Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class Fault:
    """`begin` makes the fault for as long as its block lasts. `disk_hit`: tokens that a prompt gets
    that only the disk has; None: any number. `is_shown` is true of the tier as operators see it, in
    which `text` is part of what `kvkeep tiers` prints."""

    begin: Callable[[FaultyServer, Path], AbstractContextManager[None]]
    disk_hit: int | None
    is_shown: Shown
    text: str
    options: dict[str, Any] = field(default_factory=dict)


def faulty(**faults: str) -> Callable[[FaultyServer, Path], AbstractContextManager[None]]:
    return lambda server, tier: server.fault(**faults)


@contextmanager
def removed(server: FaultyServer, tier: Path) -> Iterator[None]:
    shutil.rmtree(tier)
    yield


def aside_for(problem: str) -> Shown:
    return lambda tier: tier["state"] == "set aside" and problem in tier["problem"]


FAULTS = {
    "stalled": Fault(
        faulty(stall_read="", stall_write=""), 0, aside_for("more than 10 s"), "more than 10 s"
    ),
    "slow": Fault(
        faulty(slow_read="0.3", slow_write="0.3"),
        FOUND,
        lambda tier: tier["state"] == "ok" and tier["read_ms"] > 200,
        "state       ok",
    ),
    "full": Fault(faulty(fail_write="ENOSPC"), FOUND, aside_for("ENOSPC"), "No space left"),
    "read-only": Fault(
        faulty(fail_write="EROFS", fail_append="EROFS"), FOUND, aside_for("EROFS"), "Read-only"
    ),
    "failing": Fault(
        faulty(fail_read="EIO", fail_write="EIO"), 0, aside_for("EIO"), "Input/output error"
    ),
    "garbage": Fault(
        faulty(garbage_read=""), None, lambda tier: tier["counts"]["bad_blocks"] > 0, "bad blocks  "
    ),
    "half a block": Fault(
        faulty(half_read=""),
        None,
        lambda tier: tier["counts"]["errors"] > 0,
        "the disk's file ends",
    ),
    "removed": Fault(removed, FOUND, aside_for("were removed"), "were removed"),
}


class Bystander:
    """A prompt whose blocks stay in memory, whatever the disk does."""

    def __init__(self, llm: LLM, model: Any) -> None:
        self._llm = llm
        self._tokens = prompt(TOKENS)
        self._expected = without_cache(model, [self._tokens])
        serve(llm, [self._tokens])

    def is_served_from_memory(self) -> bool:
        forget_local(self._llm)
        [answer] = serve(self._llm, [counting(self._tokens)])
        hit = answer.metrics.external_cached_tokens
        return [answer.token_ids] == self._expected and hit == FOUND


def burden(llm: LLM, server: FaultyServer, model: Any, prompts: int) -> None:
    """Prompts that are to be written to the disk. Queues stay short meanwhile."""
    for _ in range(prompts):
        tokens = prompt(TOKENS)
        assert tokens_of(serve(llm, [tokens])) == without_cache(model, [tokens])
        tier = tiers(server)[-1]
        assert tier["in_flight_bytes"] <= MOST_IN_FLIGHT
        assert tier["promotions"] <= 4 and tier["to_write_chains"] <= 2 * prompts + 8


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_disk_is_a_miss_that_operators_see(
    name: str, tmp_path: Path, kvkeep: Callable[..., Any]
) -> None:
    fault, model, lost = FAULTS[name], oracle(), prompt(TOKENS)
    expected = without_cache(model, [lost])
    with FaultyServer(tmp_path / "tier", *POOL) as server:
        with engine(server, model) as one:
            serve(one, [lost])
        assert is_written(server)
        restart_cold(server)
        with engine(server, model, extra=WAITS) as llm:
            bystander = Bystander(llm, model)
            assert is_written(server)
            with fault.begin(server, tmp_path / "tier"):
                [answer] = serve(llm, [counting(lost)])
                assert [answer.token_ids] == expected and answer.metrics.failed_loads == 0
                assert fault.disk_hit in (None, answer.metrics.external_cached_tokens)
                burden(llm, server, model, 10)
                assert bystander.is_served_from_memory()
                before = server.resident_bytes()
                burden(llm, server, model, 10)
                assert server.resident_bytes() < before + MOST_GROWTH
                assert eventually(lambda: fault.is_shown(tiers(server)[-1])), tiers(server)[-1]
                assert bystander.is_served_from_memory()
                assert eventually(
                    lambda: fault.text in kvkeep("tiers", "--http", server.http).stdout
                ), kvkeep("tiers", "--http", server.http).stdout
        assert at_rest(server), "a lease or a write outlived the fault"


def test_half_of_what_was_written_is_missing(tmp_path: Path) -> None:
    """The disk said nothing of it, so only checksums tell."""
    model, lost = oracle(), prompt(TOKENS)
    expected = without_cache(model, [lost])
    with FaultyServer(tmp_path / "tier", *POOL) as server:
        with server.fault(half_write=""), engine(server, model) as one:
            serve(one, [lost])
            assert is_written(server)
        restart_cold(server)
        with engine(server, model, extra=WAITS) as llm:
            [answer] = serve(llm, [counting(lost)])
            assert [answer.token_ids] == expected and answer.metrics.failed_loads == 0
            assert answer.metrics.external_cached_tokens < FOUND
            assert tiers(server)[-1]["counts"]["bad_blocks"] > 0
            # What was missing is stored again, and then the disk has all of it.
            assert eventually(lambda: tiers(server)[-1]["blocks"] >= BLOCKS)
        restart_cold(server)
        assert hit(server, model, lost) == FOUND
