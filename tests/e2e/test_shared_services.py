"""Two hosts and each kind of shared tier, with the real service below: one host stores and vanishes,
the other starts from what it has computed; and the service's faults. The oracle model: one wrong
byte gives a wrong token."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
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
from shared_services import KINDS, SharedService, service

from kvkeep.cli.remote import ask
from kvkeep.engine.llm import LLM
from kvkeep.testing.process import ServerProcess
from kvkeep_lab.simulation.oracle import OracleModel

WAITS = {"kvkeep.tier_patience": "wait"}
TOKENS, BLOCKS = 203, 50
TRIES = 5


@pytest.fixture(params=KINDS)
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedService]:
    with service(request.param, tmp_path) as started:
        yield started


def host(running: SharedService) -> ServerProcess:
    """A server with memory of its own."""
    return ServerProcess(*POOL, "--tier", running.address, environment=running.environment)


def shared(server: ServerProcess) -> dict[str, Any]:
    return dict(ask(server.http, "/v1/tiers")[-1])


def written(server: ServerProcess) -> int:
    return int(shared(server)["counts"]["written_blocks"])


def test_one_host_starts_from_what_another_has_computed(running: SharedService) -> None:
    model, tokens = oracle(), prompt(TOKENS)
    expected = without_cache(model, [tokens])
    with host(running) as first:
        with engine(first, model) as one:
            assert tokens_of(serve(one, [tokens])) == expected
        assert eventually(lambda: written(first) >= BLOCKS)
        first.stop(signal.SIGKILL)
    # While a job of the tier takes long, requests do not wait for it: a busy machine has further
    # tries, each with a host that has nothing in its memory.
    tries = (loaded(running, model, tokens, expected) for _ in range(TRIES))
    assert BLOCKS * 4 in tries


def loaded(
    running: SharedService, model: OracleModel, tokens: list[int], expected: list[list[int]]
) -> int:
    """How many tokens an engine on a new host loads. Its answer is right in any case."""
    with host(running) as other:
        assert eventually(lambda: shared(other)["state"] == "ok")
        with engine(other, model, extra=WAITS) as two:
            [answer] = serve(two, [counting(tokens)])
        assert [answer.token_ids] == expected
        assert answer.metrics.failed_loads == 0
        assert (
            shared(other)["counts"]["promoted_blocks"] * 4 == answer.metrics.external_cached_tokens
        )
        assert at_rest(other), "a lease or a write outlived its request"
        return int(answer.metrics.external_cached_tokens)


# How blocks in the tier are damaged: their number and bytes give what is there instead.
DAMAGES: dict[str, Callable[[int, bytes], bytes]] = {
    "garbage": lambda number, data: b"\xa5" * len(data),
    "half": lambda number, data: data[: len(data) // 2],
    "one bit": lambda number, data: data[:70] + bytes([data[70] ^ 1]) + data[71:],
    "older header": lambda number, data: data[:4] + b"\0" + data[5:],
}


def test_damaged_blocks_are_misses(running: SharedService) -> None:
    """Those of an older version stay as they are: another release of kvkeep reads them."""
    model = oracle()
    prompts = {damage: prompt(TOKENS) for damage in DAMAGES}
    stored: dict[str, dict[str, bytes]] = {}
    with host(running) as first, engine(first, model) as one:
        for turn, (damage, tokens) in enumerate(prompts.items(), start=1):
            before = running.objects()
            serve(one, [tokens])
            # With what was generated a prompt has one block more.
            assert eventually(lambda turn=turn: written(first) >= turn * (BLOCKS + 1))
            stored[damage] = {
                name: data for name, data in running.objects().items() if name not in before
            }
            if running.address.startswith("s3:"):  # parcels of several blocks
                assert 0 < len(stored[damage]) < BLOCKS + 1
            else:
                assert len(stored[damage]) == BLOCKS + 1
        for damage, change in DAMAGES.items():
            for number, (name, data) in enumerate(stored[damage].items()):
                running.replace(name, change(number, data))
        with host(running) as other, engine(other, model, extra=WAITS) as two:
            for damage, tokens in prompts.items():
                [answer] = serve(two, [counting(tokens)])
                assert [answer.token_ids] == without_cache(model, [tokens]), damage
                assert answer.metrics.external_cached_tokens == 0, damage
                assert answer.metrics.failed_loads == 0, "a bad block is not brought up at all"
        for tokens in prompts.values():
            hit_in_memory(one, tokens, without_cache(model, [tokens])[0])
        now = running.objects()
        assert all(now[name][4] == 0 for name in stored["older header"])


def test_a_stalled_and_then_killed_service_costs_its_hits_only(running: SharedService) -> None:
    model, lost, kept = oracle(), prompt(TOKENS), prompt(TOKENS)
    expected = without_cache(model, [lost, kept])
    with host(running) as first, host(running) as other:
        with engine(first, model) as one:
            serve(one, [lost])
            assert eventually(lambda: written(first) >= BLOCKS)
        with engine(other, model, extra=WAITS) as two:
            serve(two, [kept])
            assert eventually(lambda: written(other) >= BLOCKS)

            def works_without(tokens: list[int], right: list[int]) -> None:
                """Right tokens for what only the tier has, and hits for what memory has."""
                [answer] = serve(two, [counting(tokens)])
                assert answer.token_ids == right and answer.metrics.failed_loads == 0
                hit_in_memory(two, kept, expected[1])

            if running.can_pause:
                with running.paused():
                    works_without(lost, expected[0])
                    more = prompt(TOKENS)
                    works_without(more, without_cache(model, [more])[0])
            running.kill()
            for _ in range(3):
                more = prompt(TOKENS)
                works_without(more, without_cache(model, [more])[0])
            running.start()
            assert eventually(lambda: shared(other)["state"] == "ok", limit_s=60)
            before, after = written(other), prompt(TOKENS)
            serve(two, [after])
            assert eventually(lambda: written(other) >= before + BLOCKS, limit_s=60)
        assert at_rest(other), "a lease or a write outlived the fault"


def hit_in_memory(llm: LLM, tokens: list[int], expected: list[int]) -> None:
    forget_local(llm)
    [answer] = serve(llm, [counting(tokens)])
    assert answer.token_ids == expected
    assert answer.metrics.external_cached_tokens == BLOCKS * 4
