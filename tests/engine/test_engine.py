"""Requests in, tokens out; and what must not follow from a step that fails, a signal, a slow answer
or a request that is wrong in itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from kvkeep.engine.backends import NativeBackend
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.engine import Engine
from kvkeep.engine.llm import LLM
from kvkeep.engine.models.model import Model
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.request import Request
from kvkeep.errors import RequestError
from kvkeep_lab.simulation.cache import CacheFaults, SimulatedCache
from kvkeep_lab.simulation.oracle import OracleModel
from kvkeep_lab.simulation.wire import Faults

Rigs = Callable[..., Any]

TOKENS = list(range(1, 23))
PREFIX = list(range(60))
ONE, FOUR = SamplingParams(max_tokens=1), SamplingParams(max_tokens=4)
both_modes = pytest.mark.parametrize("sync_loads", [False, True], ids=["async", "sync"])


def engine_with(backend: Any = None, model: Model | None = None, **options: Any) -> Engine:
    config = EngineConfig(**{"block_tokens": 4, "num_blocks": 100, **options})
    return Engine(model or OracleModel(), config, backend)


def native(model: Model | None = None, **options: Any) -> Engine:
    return engine_with(NativeBackend(4 << 20), model, **options)


def finish(engine: Engine) -> list[Request]:
    done = []
    while engine.busy:
        done += engine.step()
        engine.check_integrity()
    return done


def alone(tokens: list[int], sampling: SamplingParams = ONE) -> list[int]:
    """The answer of an engine without any cache."""
    engine = engine_with(enable_prefix_caching=False)
    request = engine.add(tokens, sampling)
    finish(engine)
    return request.output_tokens


# -- names and refusals ----------------------------------------------------------------------------


def test_a_name_is_given_once_at_a_time(rig: Rigs) -> None:
    r = rig(cache=False)
    first = r.add(TOKENS, "mine")
    with pytest.raises(RequestError, match="mine") as refusal:
        r.engine.add([1], request_id="mine")
    assert (refusal.value.code, refusal.value.field) == ("duplicate", "request_id")
    assert r.scheduler.unfinished == [first], "nothing has changed"
    r.run()
    again = r.add(TOKENS, "mine", max_tokens=4)
    r.engine.abort("mine")
    after_abort = r.add(TOKENS, "mine", max_tokens=4)
    assert again in r.step() and r.engine.busy
    r.run()
    reasons = [each.finish_reason for each in (first, again, after_abort)]
    assert reasons == ["length", "abort", "length"]


def test_a_name_that_a_user_chose_is_not_given_to_another(rig: Rigs) -> None:
    r = rig(cache=False)
    r.add(TOKENS, "request-0")
    assert r.add(TOKENS).request_id != "request-0"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tokens": []}, "prompt"),
        ({"tokens": [1, 999]}, "prompt"),
        ({"tokens": None}, "prompt"),
        ({"salt": 5}, "salt"),
        ({"salt": b"x"}, "salt"),
        *(({"priority": priority}, "priority") for priority in ("1", 1.5, True, None)),
        *(({"request_id": name}, "request_id") for name in ([], 7, b"x")),
        ({"sampling": SamplingParams(max_tokens=10_000)}, "prompt"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_served_changes_nothing(
    rig: Rigs, given: dict[str, Any], field: str
) -> None:
    r = rig()
    with pytest.raises(RequestError) as refusal:
        r.engine.add(**{"tokens": TOKENS, "request_id": "bad", **given})
    assert refusal.value.field == field
    assert not r.engine.busy and r.scheduler.unfinished == [] and not r.cache.leases
    r.add(TOKENS, "bad")
    assert r.run() == {"length"}, "its name is free"


class Raising(Mapping[str, Any]):
    def __contains__(self, key: object) -> bool:
        raise RuntimeError("no")

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_params_that_cannot_be_read_are_ignored(rig: Rigs) -> None:
    r = rig()
    request = r.add(TOKENS, kv_transfer_params=Raising())
    assert r.run() == {"length"} and request.reply_params is None


# -- endings ---------------------------------------------------------------------------------------


def test_abort_at_every_step_gives_everything_back() -> None:
    engine = native()
    for steps in range(12):
        request = engine.add(TOKENS, FOUR)
        for _ in range(steps):
            engine.step()
        engine.abort(request.request_id)
        if request.finish_reason == "abort":
            assert engine.step() == [request]
        assert not engine.busy
        engine.scheduler.pool.forget_all()
        engine.check_integrity()
    request = engine.add(TOKENS, FOUR)
    finish(engine)
    assert request.output_tokens == alone(TOKENS, FOUR)
    assert engine.flush() and engine.scheduler.pool.num_free == 99
    engine.close()


def test_flush_says_whether_everything_is_stored(rig: Rigs) -> None:
    assert rig(cache=False).engine.flush(timeout_s=0), "without a cache there is nothing to do"
    r = rig()
    r.cache.hold_stores = None
    r.add(TOKENS, max_tokens=1)
    r.run()
    assert not r.engine.flush(timeout_s=0.1) and r.engine.has_jobs
    r.cache.release_stores()
    assert r.engine.flush() and not r.engine.has_jobs


def test_close_stores_what_was_computed_and_ends_what_is_unfinished() -> None:
    backend = NativeBackend(4 << 20)
    engine = engine_with(backend)
    engine.add(TOKENS, ONE)
    finish(engine)
    requests = [engine.add([9, *TOKENS]), engine.add(TOKENS[:5])]
    for _ in range(2):
        engine.close()
        assert [request.finish_reason for request in requests] == ["abort", "abort"]
    assert backend.server.service.counters.stored_blocks == 5


# -- steps that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(4))
@both_modes
def test_requests_go_on_after_a_step_that_failed(
    failing_model: Any, at: int, sync_loads: bool
) -> None:
    """Neither the request nor others find what the step would have computed."""
    engine = native(failing_model, max_num_batched_tokens=9, sync_loads=sync_loads)
    engine.add([*TOKENS[:8], 200], ONE)
    finish(engine)
    assert engine.flush()
    engine.scheduler.pool.forget_all()  # two blocks can be loaded
    prompts = [TOKENS, [*TOKENS[:13], 99], [7]]
    requests = [engine.add(tokens, FOUR) for tokens in prompts]
    for _ in range(at):
        engine.step()
    failing_model.fail_at = 1
    with pytest.raises(RuntimeError):
        finish(engine)
    finish(engine)
    assert [each.output_tokens for each in requests] == [alone(each, FOUR) for each in prompts]
    assert engine.flush()
    engine.close()


def run(engine: Engine, cache: SimulatedCache, steps: int = 60) -> None:
    for _ in range(steps):
        engine.step()
        engine.check_integrity()
        cache.pass_time(5)


@pytest.mark.parametrize("aborted", [True, False])
@both_modes
def test_a_request_that_found_blocks_which_a_failed_step_was_to_fill_begins_again(
    failing_model: Any, sync_loads: bool, aborted: bool
) -> None:
    cache = SimulatedCache(1, CacheFaults(delay=(3, 3)), pool_bytes=1 << 21)
    options = {"num_blocks": 30, "max_num_batched_tokens": 64, "sync_loads": sync_loads}
    engine, other = engine_with(cache, failing_model, **options), engine_with(cache)
    first = engine.add(PREFIX[:36], ONE)
    cache.pass_time(5)  # the server has nothing of it yet
    other.add([*PREFIX, 60, 60, 60], ONE)
    run(other, cache, 30)  # now it has
    tokens = [*PREFIX, *[70] * (50 if sync_loads else 3)]
    second = engine.add(tokens, ONE)  # finds the first one's blocks, and more at the server
    cache.pass_time(5)
    failing_model.fail_at, failing_model.error = 1, MemoryError("no memory")
    with pytest.raises(MemoryError):
        engine.step()
    if aborted:
        engine.abort(first.request_id)
    run(engine, cache)
    assert second.output_tokens == alone(tokens)
    assert aborted or first.output_tokens == alone(PREFIX[:36])


# -- slow answers and lost servers -----------------------------------------------------------------


def test_later_requests_do_not_pass_a_large_one_by_for_ever() -> None:
    """The answer to its lookup comes a step late. It asks once, and then others wait behind it."""
    cache = SimulatedCache(1, CacheFaults(network=Faults(delay_ms=(1, 3))))
    engine = engine_with(cache, num_blocks=24, enable_prefix_caching=False)
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
    options = {"kv_load_failure_policy": "fail", "enable_prefix_caching": False}
    engine = engine_with(cache, max_num_seqs=1, **options)
    engine.add([*PREFIX, 1], ONE)
    run(engine, cache, 10)
    long_enough_to_notice = SamplingParams(max_tokens=150)
    busy = engine.add([9] * 8, long_enough_to_notice)
    waits = engine.add([*PREFIX, 2], ONE)  # its answer is there long before its turn
    run(engine, cache, 5)
    cache.restart_server()
    run(engine, cache, 200)
    assert (busy.finish_reason, waits.finish_reason) == ("length", "length")
    assert waits.metrics.failed_loads == 0 and waits.output_tokens == alone([*PREFIX, 2])


def test_blocks_of_a_lost_store_are_offered_again() -> None:
    """A new server in the middle of a long answer has nothing of it. At the end it has all."""
    cache = SimulatedCache(1, pool_bytes=1 << 21)
    engine, other = engine_with(cache, num_blocks=512), engine_with(cache, num_blocks=512)
    request = engine.add(PREFIX, SamplingParams(max_tokens=200))
    run(engine, cache, 40)
    cache.restart_server()
    run(engine, cache, 200)
    assert request.finish_reason == "length" and not engine.has_jobs
    again = other.add(request.tokens, ONE)
    run(other, cache, 20)
    assert again.metrics.external_cached_tokens == 256
    cache.check_nothing_held()


# -- signals ---------------------------------------------------------------------------------------


@pytest.fixture
def heeded_interrupts() -> Iterator[None]:
    """Tests behind a shell run with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_interrupts")
@pytest.mark.parametrize("sync", ["async", "sync"])
def test_ctrl_c_comes_between_steps(sync: str) -> None:
    """Real signals, at any moment. Afterwards nothing is held, and the same prompts get the same
    answers."""
    extra = {"kv_connector_extra_config": {"kvkeep.load": sync}}
    options: dict[str, Any] = {"kv_offloading_size": 1 / 64, "kv_transfer_config": extra}
    options |= {"block_tokens": 4, "num_blocks": 100, "tensor_parallel_size": 2}
    prompts = [[*PREFIX[: 40 + at], 99] for at in range(6)]
    sampling = SamplingParams(max_tokens=20)
    with LLM(OracleModel(), kv_offloading_backend="native", **options) as llm:
        interrupted = 0
        for at in range(12):
            timer = threading.Timer(0.001 + 0.002 * at, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                try:
                    llm.generate(prompts, sampling)
                finally:
                    timer.cancel()
                    timer.join()
                    time.sleep(0.01)  # a signal on its way arrives here, and not in the next test
            except KeyboardInterrupt:
                interrupted += 1
            llm.engine.scheduler.pool.forget_all()
        assert interrupted > 0
        done = llm.generate(prompts, sampling)
        assert [each.token_ids for each in done] == [alone(each, sampling) for each in prompts]
        assert llm.engine.flush() and llm.engine.scheduler.pool.num_free == 99
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
