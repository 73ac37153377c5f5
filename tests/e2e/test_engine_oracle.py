"""Faults planted in the server's memory under a running engine.

With verification off nothing of ours stands between the fault and the model, and the oracle model
must see it: a test bed that is blind proves nothing. With verification on the same faults never
reach a model.

    engine `one` stores ──► pool ◄── the test does harm        engine `two`, same model, loads
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from engines import (
    KEY,
    POOL,
    PoolMemory,
    Since,
    at_rest,
    content,
    counting,
    engine,
    eventually,
    forget_local,
    local_blocks,
    oracle,
    prompt,
    serve,
    without_cache,
)

from kvkeep.engine.llm import LLM, Prompt
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.process import ServerProcess
from kvkeep_lab.simulation.oracle import OracleModel, WrongBytes

BLIND = {"kvkeep.verify": False}
BAD = 2  # the block of the prompt that is harmed


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    # engines verify all the same, unless they are BLIND
    with ServerProcess(*POOL, "--no-verify") as running:
        yield running


@dataclass
class Scene:
    """An engine that has stored three prompts: alice's, the same tokens of bob, and another one of
    alice."""

    server: ServerProcess
    model: OracleModel
    one: LLM
    tokens: list[int]
    other: list[int]

    @classmethod
    def of(cls, server: ServerProcess, model: OracleModel, one: LLM) -> Scene:
        scene = cls(server, model, one, prompt(22), prompt(22))
        serve(
            one, [scene.prompt, Prompt(scene.tokens, salt="bob"), Prompt(scene.other, salt="alice")]
        )
        return scene

    @property
    def prompt(self) -> Prompt:
        return counting(self.tokens, "alice")

    @property
    def expected(self) -> list[list[int]]:
        return without_cache(self.model, [self.prompt])

    def held(self, tokens: list[int], salt: str, rank: int = 0) -> bytes:
        return content(self.one, local_blocks(self.one, tokens, salt)[BAD], rank)


def flipped(scene: Scene) -> str:
    PoolMemory(scene.server).flip(scene.held(scene.tokens, "alice"))
    return "1 flipped bits"


def swapped(scene: Scene) -> str:
    """The first layer of two shards of a block change places."""
    PoolMemory(scene.server).swap(*(scene.held(scene.tokens, "alice", rank) for rank in (0, 1)))
    return "swapped, bytes of the same request"


def stale(scene: Scene) -> str:
    old = scene.held(scene.other, "alice")
    PoolMemory(scene.server).overwrite(scene.held(scene.tokens, "alice"), old)
    return "stale or swapped, bytes of request"


def tenant(scene: Scene) -> str:
    PoolMemory(scene.server).overwrite(
        scene.held(scene.tokens, "alice"), scene.held(scene.tokens, "bob")
    )
    return f"bytes of another tenant, {tenant_of('bob')}"


FAULTS: list[Callable[[Scene], str]] = [flipped, swapped, stale, tenant]
faults = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
modes = pytest.mark.parametrize("mode", ["async", "sync"])


@faults
def test_without_verification_the_oracle_sees_it_and_says_what_it_is(
    server: ServerProcess, fault: Callable[[Scene], str]
) -> None:
    model = oracle()
    with engine(server, model, extra=BLIND, tensor_parallel_size=2) as one:
        scene = Scene.of(server, model, one)
        with engine(server, model, extra=BLIND, tensor_parallel_size=2) as sound:
            [answer] = serve(sound, [scene.prompt])
            assert ([answer.token_ids], answer.kv_transfer_params) == (scene.expected, {KEY: 20}), (
                "no fault, no alarm"
            )
        diagnosis = fault(scene)
        two = engine(server, model, extra=BLIND, tensor_parallel_size=2)
        with pytest.raises(WrongBytes) as alarm:
            two.generate([scene.prompt])
        said = str(alarm.value)
        assert diagnosis in said
        assert (
            f"tenant {tenant_of('alice')}, position {BAD * 4}, " in said
            and "layers.0, rank 0" in said
        )
        two.close()
    assert at_rest(server)


@faults
@modes
def test_with_verification_it_never_reaches_the_model(
    server: ServerProcess, fault: Callable[[Scene], str], mode: str
) -> None:
    model = oracle()
    with engine(server, model, tensor_parallel_size=2) as one:
        scene = Scene.of(server, model, one)
        fault(scene)
        since = Since(server)
        with engine(server, model, extra={"kvkeep.load": mode}, tensor_parallel_size=2) as two:
            [answer] = serve(two, [scene.prompt])
            assert [answer.token_ids] == scene.expected
            assert answer.metrics.failed_loads >= 1
            assert answer.kv_transfer_params == {KEY: BAD * 4}, "the blocks before it are good"
            assert eventually(lambda: since("bad_blocks") == 1)
            forget_local(two)
            [again] = serve(two, [scene.prompt])
            assert ([again.token_ids], again.kv_transfer_params) == (scene.expected, {KEY: 20}), (
                "it was mended"
            )
    assert at_rest(server)


def test_with_verification_and_the_policy_fail_the_request_ends_with_an_error(
    server: ServerProcess,
) -> None:
    model = oracle()
    with engine(server, model, tensor_parallel_size=2) as one:
        scene = Scene.of(server, model, one)
        flipped(scene)
        with engine(server, model, policy="fail", tensor_parallel_size=2) as two:
            [bad, good] = serve(two, [scene.prompt, counting(scene.other, "alice")])
            assert (bad.finish_reason, bad.token_ids) == ("error", [])
            assert f"block {BAD} of its prefix could not be loaded" in bad.error
            assert good.finish_reason == "length", "only that one"
            [again] = serve(two, [scene.prompt])
            assert [again.token_ids] == scene.expected, "and the next one is computed"


@modes
def test_the_engine_is_of_use_after_an_alarm(server: ServerProcess, mode: str) -> None:
    """WrongBytes is a bug of ours, but the process may have other things to finish: no block, no
    lease is lost."""
    model = oracle()
    with engine(server, model, extra=BLIND, tensor_parallel_size=2) as one:
        scene = Scene.of(server, model, one)
        flipped(scene)
        with engine(
            server, model, extra={**BLIND, "kvkeep.load": mode}, tensor_parallel_size=2
        ) as two:
            with pytest.raises(WrongBytes, match="1 flipped bits"):
                two.generate([scene.prompt])
            assert two.engine.flush(timeout_s=2), "a load that was reported is never forgotten"
            two.engine.check_integrity()
            own = counting(scene.other, "alice")
            assert [serve(two, [own])[0].token_ids] == without_cache(model, [own])
