"""Trap 6, with vLLM: eight stuck loads block all requests, and what is said of the cache's health
stays good."""

from __future__ import annotations

import signal

from replicas import (
    BRISK,
    POOL,
    Replica,
    Server,
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

STUCK = 8
BY_SOCKET = {"kvkeep.shared_memory": False}
WAITS = {
    "kvkeep.store_deadline_ms": 600_000,
    "kvkeep.ping_interval_ms": 86_400_000,
}  # its loads do not end by time
CONNECTED = "vllm:kvkeep_connected"


def test_eight_stuck_loads_block_nobody(
    plain: Replica, one: Replica, two: Replica, server: ServerProcess
) -> None:
    known, new = [prompt(100) for _ in range(STUCK)], [prompt(100) for _ in range(2)]
    expected = tokens_of(plain.use("llama").serve([request(tokens) for tokens in [*known, *new]]))
    with Relay(server.address) as wire:
        other = two.use("llama", server)
        other.serve([request(tokens) for tokens in known])
        engine = one.use("llama", wire.address, extra={**BY_SOCKET, **WAITS})
        assert eventually(lambda: len(status(server)["sessions"]) >= 4)
        wire.hold_blocks()
        stuck = engine.submit([counting(tokens) for tokens in known])
        engine.step_until(
            lambda: {engine.status_of(name) for name in stuck} == {"WAITING_FOR_REMOTE_KVS"}
        )
        engine.step_until(lambda: wire.held_up == 1)
        computed = engine.run(engine.submit([counting(tokens) for tokens in new]))
        assert tokens_of(computed) == expected[STUCK:], "the same engine serves who need not wait"
        found = other.fresh().serve([counting(tokens) for tokens in known])
        assert [answer.extra for answer in found] == [96] * STUCK, (
            "other engines load the very same blocks"
        )
        assert {engine.status_of(name) for name in stuck} == {"WAITING_FOR_REMOTE_KVS"}, (
            "they were stuck all the time"
        )
        wire.let_go()
        loaded = engine.run(stuck)
        engine.settle()
        assert tokens_of(loaded) == tokens_of(found) == expected[:STUCK]
        assert [answer.extra for answer in loaded] == [96] * STUCK
        assert at_rest(server)
        engine.close_engine()


def test_one_stuck_load_does_not_hold_up_the_engine_that_has_nothing_else_to_do(
    plain: Replica, one: Replica, server: ServerProcess
) -> None:
    """A request that is alone is loaded while its step is made, but not over a network."""
    known, new = prompt(100), prompt(100)
    expected = tokens_of(plain.use("llama").serve([request(tokens) for tokens in (known, new)]))
    with Relay(server.address) as wire:
        engine = one.use("llama", wire.address, extra={**BY_SOCKET, **WAITS})
        assert eventually(lambda: len(status(server)["sessions"]) >= 2)
        engine.serve([request(known)])
        engine.fresh()
        wire.hold_blocks()
        [stuck] = engine.submit([counting(known)])
        engine.step_until(lambda: engine.status_of(stuck) == "WAITING_FOR_REMOTE_KVS")
        assert tokens_of(engine.run(engine.submit([request(new)]))) == expected[1:]
        assert engine.status_of(stuck) == "WAITING_FOR_REMOTE_KVS"
        wire.let_go()
        assert tokens_of(engine.run([stuck])) == expected[:1]
        engine.settle()
        engine.close_engine()


def test_vllm_says_so_while_the_server_does_not_answer(one: Replica) -> None:
    with Server(*POOL) as server:
        engine = one.use("llama", server, extra=BRISK)

        def connected() -> int:
            engine.serve([request(prompt(40))])
            return int(engine.call("metrics")[CONNECTED])

        assert eventually(lambda: connected() == 1)
        server.send(signal.SIGSTOP)
        try:
            assert eventually(lambda: connected() == 0)
        finally:
            server.send(signal.SIGCONT)
        assert eventually(lambda: connected() == 1)
        engine.close_engine()
