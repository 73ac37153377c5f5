"""Trap 8, with vLLM: eviction lags, what does not fit is reported as stored, a quota ends its own
eviction.

A block of this model has 48 KiB, so that a slab of 256 KiB has room for 5, and the pool for 20.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from replicas import Replica, Server, Since, at_rest, counting, prompt, request, tokens_of, usage

import kvkeep
from kvkeep.cli.remote import ask
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m

POOL_BLOCKS = 20
BLOCK_BYTES = 48 << 10
STORED = "vllm:kvkeep_stored_blocks"


@pytest.fixture(scope="module")
def small() -> Iterator[ServerProcess]:
    with Server(
        "--pool-size", "1MiB", "--slab-size", "256KiB", "--session-check-interval", "50ms"
    ) as running:
        yield running


@pytest.fixture
def engine(one: Replica, small: ServerProcess) -> Replica:
    return one.use("llama", small)


@pytest.fixture(scope="module", autouse=True)
def _engine_lets_go(small: ServerProcess, one: Replica) -> Iterator[None]:
    yield
    one.close_engine()


def said_to_be_stored(engine: Replica) -> int:
    return int(engine.call("metrics").get(STORED, 0))


def test_what_is_reported_as_stored_is_there_at_once(engine: Replica, small: ServerProcess) -> None:
    """Five times the pool, as quickly as it goes: nothing waits for an evictor's turn."""
    since, before = Since(small), said_to_be_stored(engine)
    for number in range(1, 21):
        tokens = prompt(170)
        [first] = engine.serve([request(tokens)])
        [again] = engine.fresh().serve([counting(tokens)])
        assert (again.extra, again.tokens) == (160, first.tokens)
        assert usage(small)["default"] <= POOL_BLOCKS
        assert said_to_be_stored(engine) - before == since("stored_blocks") == 5 * number
    assert usage(small)["default"] == POOL_BLOCKS, "full, to the last block, and no fuller"
    assert since("evictions") == 100 - POOL_BLOCKS


def test_what_finds_no_room_is_not_reported_as_stored(
    plain: Replica, engine: Replica, small: ServerProcess
) -> None:
    tokens = prompt(170)
    expected = tokens_of(plain.use("llama").serve([request(tokens)]))
    before, since = said_to_be_stored(engine), Since(small)
    shape: dict[str, Any] = {"block_tokens": 16, "block_shape": (256 << 10,), "dtype": "uint8"}
    with kvkeep.connect(
        small.address, model="m", revision="1", required=True, wait_ms=20_000, **shape
    ) as holder:
        connection, keys = holder.connection, b"".join(bytes([number]) * 16 for number in range(4))
        assert connection.layout is not None
        call = connection.call(
            m.PrepareStore("default", connection.layout.layout, 0, b"", keys), 20_000
        )
        held = connection.wait(call)
        assert isinstance(held, m.Prepared) and len(held.positions), (
            "somebody else takes every slab, and writes"
        )
        [answer] = engine.fresh().serve([counting(tokens)])
        assert [answer.tokens] == expected
        assert said_to_be_stored(engine) == before and since("refused_blocks") >= 5, (
            "offered once or twice"
        )
        [missed] = engine.fresh().serve([counting(tokens)])
        assert (missed.extra, [missed.tokens]) == (0, expected)
    assert at_rest(small)
    engine.fresh().serve([request(tokens)])
    [found] = engine.fresh().serve([counting(tokens)])
    assert (found.extra, [found.tokens]) == (160, expected)


def test_a_quota_is_kept_and_ends_nothing(engine: Replica, small: ServerProcess) -> None:
    tenant, modest = tenant_of("greedy"), prompt(170)
    ask(
        small.http,
        f"/v1/tenants/{tenant_of('modest')}/quota",
        "PUT",
        {"quota_bytes": 5 * BLOCK_BYTES},
    )
    engine.serve([request(modest, "modest")])
    for quota_blocks in (5, 0, 1):
        ask(
            small.http,
            f"/v1/tenants/{tenant}/quota",
            "PUT",
            {"quota_bytes": quota_blocks * BLOCK_BYTES},
        )
        for _ in range(5):
            tokens = prompt(170)
            [first] = engine.serve([request(tokens, "greedy")])
            [again] = engine.fresh().serve([counting(tokens, "greedy")])
            assert (again.extra, again.tokens) == (160, first.tokens)
            assert sum(usage(small).values()) <= POOL_BLOCKS
    [kept] = engine.fresh().serve([counting(modest, "modest")])
    assert kept.extra == 160, "what was promised to others stays theirs"
    for salt in ("greedy", "modest"):
        ask(small.http, f"/v1/tenants/{tenant_of(salt)}/quota", "PUT", {"quota_bytes": None})
    for _ in range(5):  # whatever evicts is still alive
        tokens = prompt(170)
        engine.serve([request(tokens)])
        [answer] = engine.fresh().serve([counting(tokens)])
        assert answer.extra == 160
