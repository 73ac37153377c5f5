"""Trap 10: tokens in every message, hits of 256 tokens, generated ones not stored, preempted
requests not loaded."""

from __future__ import annotations

from engines import (
    KEY,
    Since,
    counting,
    eventually,
    forget_local,
    oracle,
    prompt,
    serve,
    without_cache,
)
from patience import patient_engine

from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.testing.process import ServerProcess
from kvkeep_lab.simulation.relay import Relay


def bytes_of_a_hit(
    server: ServerProcess, block_tokens: int, blocks: int, steps: int
) -> tuple[int, bytes]:
    """What one request says to the server that finds all its blocks there and then computes `steps`
    tokens."""
    model, tokens = oracle(), [at * 31 % 97 for at in range(block_tokens * blocks + 1)]
    never = {"kvkeep.ping_interval_ms": 86_400_000}
    with Relay(server.address) as wire:
        options = {
            "block_tokens": block_tokens,
            "num_blocks": 4 * blocks + 64,
            "max_num_batched_tokens": 4096,
        }
        with patient_engine(wire.address, model, never, **options) as llm:
            serve(llm, [tokens], max_tokens=1)
            forget_local(llm)
            before = len(wire.sent)
            [answer] = serve(llm, [counting(tokens)], max_tokens=steps)
            assert eventually(lambda: b"Release" in wire.sent[before:]), (
                "the last that it says, in the background"
            )
            said = bytes(wire.sent[before:])
    assert answer.kv_transfer_params == {KEY: block_tokens * blocks}
    return len(said), said


def test_what_is_sent_grows_with_blocks_and_not_with_tokens(server: ServerProcess) -> None:
    few, _ = bytes_of_a_hit(server, block_tokens=4, blocks=100, steps=1)
    many, _ = bytes_of_a_hit(server, block_tokens=32, blocks=100, steps=1)
    assert abs(many - few) < 200, "eight times the tokens, the same bytes"
    double, _ = bytes_of_a_hit(server, block_tokens=4, blocks=200, steps=1)
    assert abs(double - few - 100 * KEY_BYTES) < 200, "16 bytes more for each block"


def test_keys_are_sent_once_and_nothing_for_tokens_that_fill_no_block(
    server: ServerProcess,
) -> None:
    once, _ = bytes_of_a_hit(server, block_tokens=32, blocks=20, steps=1)
    often, _ = bytes_of_a_hit(server, block_tokens=32, blocks=20, steps=25)
    assert once > 20 * KEY_BYTES and abs(often - once) < 200, "25 steps say no more than one"


def test_hits_have_the_grain_of_a_block(server: ServerProcess) -> None:
    model, tokens = oracle(), prompt(90)
    with patient_engine(server, model) as one:
        serve(one, [tokens])
    for length in (5, 9, 13, 50, 90):
        with patient_engine(server, model) as two:
            [answer] = serve(two, [counting(tokens[:length])])
        assert answer.kv_transfer_params == {KEY: (length - 1) // 4 * 4}


def test_generated_tokens_are_stored(server: ServerProcess) -> None:
    model, tokens = oracle(), prompt(10)
    with patient_engine(server, model) as one:
        [answer] = serve(one, [tokens], max_tokens=31)
    following = [*tokens, *answer.token_ids, 5]
    with patient_engine(server, model) as two:
        [later] = serve(two, [counting(following)])
    assert later.kv_transfer_params == {KEY: 40}, "10 of the prompt and 30 that were generated"
    assert [later.token_ids] == without_cache(model, [following])


def test_a_preempted_request_loads_what_it_had(server: ServerProcess) -> None:
    model, tokens = oracle(), prompt(22)
    with patient_engine(server, model) as llm:
        since = Since(server)
        request = llm.engine.add(tokens, SamplingParams(max_tokens=6))
        while not request.output_tokens:
            llm.engine.step()
        # takes the store to the workers; no other, or the request ends before it is preempted
        llm.engine.step()
        assert eventually(lambda: since("stored_blocks") == 5), "all that it has computed is stored"
        llm.engine.scheduler.preempt(request)
        forget_local(llm)
        while llm.engine.busy:
            llm.engine.step()
        assert since("hit_blocks") == 5
    assert request.metrics.preemptions == 1
    assert [request.output_tokens] == without_cache(model, [tokens], max_tokens=6)
