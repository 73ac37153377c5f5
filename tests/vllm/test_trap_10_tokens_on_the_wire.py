"""Trap 10, with vLLM: tokens in every message, and preempted requests that do not load."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from replicas import Replica, Since, at_rest, counting, eventually, prompt, request, tokens_of

from kvkeep.kv.keys import KEY_BYTES
from kvkeep.testing.process import ServerProcess
from kvkeep.wire.messages import ReportRequests
from kvkeep_lab.simulation.relay import Relay

REPORT = ReportRequests.__name__.encode()  # sent in a moment, after a request has ended
NEVER = {"kvkeep.ping_interval_ms": 86_400_000}


@pytest.fixture(scope="module")
def wire(server: ServerProcess) -> Iterator[Relay]:
    with Relay(server.address) as passing:
        yield passing


@pytest.fixture(scope="module")
def engine(one: Replica, wire: Relay, server: ServerProcess) -> Iterator[Replica]:
    engine = one.use("llama", wire.address, extra=NEVER)
    one.wait_for(server)
    yield engine
    engine.close_engine()


def bytes_of_a_hit(
    engine: Replica, wire: Relay, server: ServerProcess, blocks: int, steps: int
) -> int:
    """How much one request says to the server that finds all its blocks there and then computes
    `steps` tokens."""
    tokens = prompt(32 * blocks + 1)
    reported = wire.sent.count(REPORT)
    engine.serve([request(tokens, max_tokens=1)])
    engine.fresh()
    assert at_rest(server)
    assert eventually(lambda: wire.sent.count(REPORT) == reported + 1)
    before = len(wire.sent)
    [answer] = engine.serve([counting(tokens, max_tokens=steps)])
    assert answer.extra == 32 * blocks
    assert at_rest(server)
    assert eventually(lambda: wire.sent.count(REPORT) == reported + 2), "its last message"
    return len(wire.sent) - before


def test_what_is_sent_grows_by_a_key_for_a_block_and_not_with_steps(
    engine: Replica, wire: Relay, server: ServerProcess
) -> None:
    few, many = (bytes_of_a_hit(engine, wire, server, blocks, steps=1) for blocks in (20, 40))
    assert 20 * KEY_BYTES <= many - few < 20 * KEY_BYTES + 200, (
        "640 tokens would be 640 bytes at the very least"
    )
    often = bytes_of_a_hit(engine, wire, server, 20, steps=25)
    assert abs(often - few) < 200, "25 steps say no more than one"


def test_a_preempted_request_loads_what_it_had(
    plain: Replica, engine: Replica, server: ServerProcess
) -> None:
    tokens = prompt(100)
    expected = tokens_of(plain.use("llama").serve([request(tokens, max_tokens=40)]))
    since = Since(server)
    [name] = engine.submit([counting(tokens, max_tokens=40)])
    engine.step_until(lambda: len(engine.answers([name])[0].tokens) >= 2)
    assert eventually(lambda: since("stored_blocks") == 3), "all that it has computed is stored"
    assert engine.call("preempt")
    engine.call("zero")
    [answer] = engine.run([name])
    assert [answer.tokens] == expected
    assert since("hit_blocks") == 3, "and was loaded from there"
    engine.settle()
    assert at_rest(server)
