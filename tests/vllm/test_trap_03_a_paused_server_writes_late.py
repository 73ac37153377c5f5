"""Trap 3, with vLLM: a server that was paused and resumed writes into engine blocks that were given
to others.

Through the socket: with shared memory no server is asked for bytes, so that none can come late.
"""

from __future__ import annotations

from collections.abc import Iterator
from signal import SIGCONT, SIGSTOP

import pytest
from replicas import (
    BRISK,
    POOL,
    Replica,
    Server,
    Since,
    at_rest,
    counting,
    eventually,
    prompt,
    request,
    status,
    tokens_of,
)

from kvkeep.testing.process import ServerProcess
from kvkeep_lab.simulation.relay import Relay

EXTRA = {**BRISK, "kvkeep.shared_memory": False}
FEW = {"num_gpu_blocks_override": 24, "max_model_len": 512}


@pytest.fixture(scope="module")
def paused() -> Iterator[ServerProcess]:
    with Server(*POOL) as running:
        yield running


@pytest.fixture(scope="module")
def wire(paused: ServerProcess) -> Iterator[Relay]:
    with Relay(paused.address) as passing:
        yield passing


@pytest.fixture(scope="module")
def engine(one: Replica, wire: Relay, paused: ServerProcess) -> Iterator[Replica]:
    one.use("llama", wire.address, extra=EXTRA, **FEW).wait_for(paused)
    yield one
    one.close_engine()


@pytest.fixture
def first(engine: Replica, paused: ServerProcess) -> list[int]:
    """A prompt that the server has, and the engine has not."""
    since, tokens = Since(paused), prompt(300)
    engine.serve([request(tokens)])
    assert eventually(lambda: since("stored_blocks") == 9) and at_rest(paused)
    engine.fresh()
    return tokens


def reuse_all(plain: Replica, engine: Replica) -> None:
    """Serves what needs several times the blocks that there are."""
    later = [request(prompt(300)) for _ in range(4)]
    assert tokens_of(engine.serve(later)) == tokens_of(plain.use("llama").serve(later))


def test_a_load_that_the_server_hears_of_too_late_is_not_carried_out(
    plain: Replica, engine: Replica, paused: ServerProcess, first: list[int]
) -> None:
    [name] = engine.submit([counting(first)])
    assert eventually(lambda: status(paused)["leases"] == 1), (
        "its blocks are found, and are to be loaded"
    )
    paused.send(SIGSTOP)
    try:
        [answer] = engine.run([name])
        reuse_all(plain, engine)
        before = engine.call("memory")
    finally:
        paused.send(SIGCONT)
    assert [answer.tokens] == tokens_of(plain.serve([request(first)]))
    assert at_rest(paused), (
        "the connection that was silent was given up, and with it what comes late"
    )
    assert engine.call("memory") == before, "nobody but the engine writes into the engine"
    assert eventually(lambda: engine.fresh().serve([counting(first)])[0].extra == 288), (
        "and it is of use again"
    )


def test_blocks_that_come_too_late_are_not_written_where_others_are_now(
    plain: Replica, engine: Replica, wire: Relay, paused: ServerProcess, first: list[int]
) -> None:
    wire.hold_blocks()
    [name] = engine.submit([counting(first)])
    engine.step_until(lambda: wire.held_up == 1)
    [answer] = engine.run([name])
    reuse_all(plain, engine)
    before = engine.call("memory")
    wire.let_go()
    assert [answer.tokens] == tokens_of(plain.serve([request(first)]))
    assert at_rest(paused), (
        "the connection that was silent was given up, and with it what comes late"
    )
    assert engine.call("memory") == before, "nobody but the engine writes into the engine"
    assert eventually(lambda: engine.fresh().serve([counting(first)])[0].extra == 288), (
        "and it is of use again"
    )
