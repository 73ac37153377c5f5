"""What must not follow from a step that fails, a signal, a slow answer, or a request that is wrong
in itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from kvkeep.engine.config import EngineConfig
from kvkeep.engine.engine import Engine
from kvkeep.engine.llm import LLM
from kvkeep.engine.models.model import Rank, Segment
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.request import Request
from kvkeep.errors import RequestError
from kvkeep_lab.simulation.cache import CacheFaults, SimulatedCache
from kvkeep_lab.simulation.oracle import OracleModel
from kvkeep_lab.simulation.wire import Faults

PREFIX = list(range(60))
ONE = SamplingParams(max_tokens=1)


class Failing(OracleModel):
    fails = False

    def forward(
        self, segments: Sequence[Segment], ranks: Sequence[Rank], block_tokens: int
    ) -> torch.Tensor:
        if self.fails:
            self.fails = False
            raise MemoryError("no memory")
        return super().forward(segments, ranks, block_tokens)


def alone(tokens: list[int], sampling: SamplingParams = ONE) -> list[int]:
    engine = Engine(OracleModel(), EngineConfig(block_tokens=4, num_blocks=100))
    request = engine.add(tokens, sampling)
    while engine.busy:
        engine.step()
    return request.output_tokens


def run(engine: Engine, cache: SimulatedCache, steps: int = 60) -> None:
    for _ in range(steps):
        engine.step()
        engine.check_integrity()
        cache.pass_time(5)


@pytest.mark.parametrize("aborted", [True, False])
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_who_found_blocks_that_a_failed_step_was_to_fill_begins_again(
    sync: bool, aborted: bool
) -> None:
    cache = SimulatedCache(1, CacheFaults(delay=(3, 3)), pool_bytes=1 << 21)
    model = Failing()
    options = {"num_blocks": 30, "max_num_batched_tokens": 64, "sync_loads": sync}
    engine = Engine(model, EngineConfig(block_tokens=4, **options), cache)
    other = Engine(OracleModel(), EngineConfig(block_tokens=4, num_blocks=100), cache)
    first = engine.add(PREFIX[:36], ONE)
    cache.pass_time(5)  # the server has nothing of it yet
    other.add([*PREFIX, 60, 60, 60], ONE)
    run(other, cache, 30)  # now it has
    tokens = [*PREFIX, *[70] * (50 if sync else 3)]
    second = engine.add(tokens, ONE)  # finds the first one's blocks, and more of them at the server
    cache.pass_time(5)
    model.fails = True
    with pytest.raises(MemoryError):
        engine.step()
    if aborted:
        engine.abort(first.id)
    run(engine, cache)
    assert second.output_tokens == alone(tokens)
    assert aborted or first.output_tokens == alone(PREFIX[:36])


def test_a_large_request_is_not_passed_by_for_ever() -> None:
    """The answer to its lookup comes a step later than asked. It asks once, and then others wait
    behind it."""
    cache = SimulatedCache(1, CacheFaults(network=Faults(delay_ms=(1, 3))))
    config = EngineConfig(block_tokens=4, num_blocks=24, enable_prefix_caching=False)
    engine = Engine(OracleModel(), config, cache)
    small = [engine.add([7] * 30, SamplingParams(max_tokens=9)) for _ in range(2)]
    run(engine, cache, 2)
    large = engine.add([5] * 70, ONE)
    later: list[Request] = []
    for _ in range(60):
        later.append(engine.add([7] * 20, SamplingParams(max_tokens=5)))
        run(engine, cache, 1)
        if large.finish_reason:
            break
    assert large.finish_reason == "length" and all(each.finish_reason for each in small)
    assert sum(bool(each.finish_reason) for each in later) <= 3


def test_an_answer_of_a_server_that_is_gone_is_asked_anew() -> None:
    cache = SimulatedCache(1)
    config = EngineConfig(
        block_tokens=4, max_num_seqs=1, kv_load_failure_policy="fail", enable_prefix_caching=False
    )
    engine = Engine(OracleModel(), config, cache)
    engine.add([*PREFIX, 1], ONE)
    run(engine, cache, 10)
    busy = engine.add(
        [9] * 8, SamplingParams(max_tokens=150)
    )  # long enough for the client to notice
    waits = engine.add([*PREFIX, 2], ONE)  # its answer is there long before its turn
    run(engine, cache, 5)
    cache.restart_server()
    run(engine, cache, 200)
    assert (busy.finish_reason, waits.finish_reason) == ("length", "length")
    assert waits.metrics.failed_loads == 0 and waits.output_tokens == alone([*PREFIX, 2])


def test_what_a_lost_store_left_out_is_offered_again() -> None:
    """A new server in the middle of a long answer has nothing of it. At the end it has all."""
    cache = SimulatedCache(1, pool_bytes=1 << 21)
    engine = Engine(OracleModel(), EngineConfig(block_tokens=4), cache)
    request = engine.add(PREFIX, SamplingParams(max_tokens=200))
    run(engine, cache, 40)
    cache.restart_server()
    run(engine, cache, 200)
    assert request.finish_reason == "length" and not engine.has_jobs
    other = Engine(OracleModel(), EngineConfig(block_tokens=4), cache)
    again = other.add(request.tokens, ONE)
    run(other, cache, 20)
    assert again.metrics.external_cached_tokens == 256
    cache.check_nothing_held()


class Raising(Mapping[str, Any]):
    def __contains__(self, key: object) -> bool:
        raise RuntimeError("no")

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_params_that_cannot_be_read_are_ignored() -> None:
    cache = SimulatedCache(1)
    engine = Engine(OracleModel(), EngineConfig(block_tokens=4), cache)
    request = engine.add(PREFIX, ONE, kv_transfer_params=Raising())
    run(engine, cache, 10)
    assert request.output_tokens == alone(PREFIX) and request.reply_params is None


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 10**400},
        {"max_tokens": 10**5000},
        {"top_k": 10**30},
        {"stop_token_ids": [10**5000]},
    ],
)
def test_numbers_without_end_are_refused(sampling: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**sampling)
    assert refusal.value.field == next(iter(sampling))


@pytest.mark.parametrize("request_id", [[], 7, b"x"])
def test_an_id_that_is_no_text_is_refused(request_id: Any) -> None:
    with pytest.raises(RequestError, match="id"):
        Engine(OracleModel(), EngineConfig()).add(PREFIX, request_id=request_id)


@pytest.fixture
def heeded_interrupts() -> Iterator[None]:
    """Whoever runs tests behind a shell runs them with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_interrupts")
@pytest.mark.parametrize("sync", ["async", "sync"])
def test_ctrl_c_comes_between_steps(sync: str) -> None:
    """Real signals, at any moment. Afterwards nothing is held, and the same prompts get the same
    answers."""
    extra = {"kv_connector_extra_config": {"kvkeep.load": sync}}
    options = {
        "kv_offloading_backend": "native",
        "kv_offloading_size": 1 / 64,
        "kv_transfer_config": extra,
    }
    prompts = [[*PREFIX[: 40 + at], 99] for at in range(6)]
    expected = [alone(prompt, SamplingParams(max_tokens=20)) for prompt in prompts]
    with LLM(
        OracleModel(), block_tokens=4, num_blocks=100, tensor_parallel_size=2, **options
    ) as llm:
        interrupted = 0
        for at in range(12):
            timer = threading.Timer(0.001 + 0.002 * at, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                try:
                    llm.generate(prompts, SamplingParams(max_tokens=20))
                finally:
                    timer.cancel()
                    timer.join()
                    time.sleep(0.01)  # a signal on its way arrives here, and not in the next test
            except KeyboardInterrupt:
                interrupted += 1
            llm.engine.scheduler.pool.forget_all()
        assert interrupted > 0
        done = llm.generate(prompts, SamplingParams(max_tokens=20))
        assert [each.token_ids for each in done] == expected
        assert llm.engine.flush() and llm.engine.scheduler.pool.num_free == 99
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
