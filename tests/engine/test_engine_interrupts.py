"""A step may break off anywhere. No wrong KV, lost block or job without an end follows from it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvkeep.connector.planner import CachePlanner
from kvkeep.engine import blocks, recovery, scheduler
from kvkeep.engine import engine as engine_module
from kvkeep.engine.backends import NativeBackend
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.engine import Engine
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.request import Request
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.workers import Workers
from kvkeep.kv.keys import KeyChain
from kvkeep_lab.simulation.cache import CacheFaults, SimulatedCache
from kvkeep_lab.simulation.oracle import OracleModel

FOUR = SamplingParams(max_tokens=4)
PREFIX = list(range(1, 25))
PROMPTS = [
    [*PREFIX, 60],
    [*PREFIX[:16], *range(70, 80)],
    [*PREFIX, *range(40, 50)],
    list(range(50, 75)),
]
TRACED = {module.__file__ for module in (blocks, recovery, scheduler, engine_module)}
Fault = type[BaseException]
modes = pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
ranks = pytest.mark.parametrize("tp_size", [1, 2])
faults = pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError])


def model() -> OracleModel:
    return OracleModel(vocab_size=97, num_layers=2, num_kv_heads=2, words=1)


@functools.cache
def answers() -> list[list[int]]:
    engine = Engine(model(), EngineConfig(block_tokens=4, enable_prefix_caching=False))
    requests = [engine.add(prompt, FOUR) for prompt in PROMPTS]
    while engine.busy:
        engine.step()
    return [request.output_tokens for request in requests]


class Driven:
    """An engine with so few blocks that they change hands. When a step fails, it goes on."""

    def __init__(
        self, *, sync: bool, tp_size: int = 1, real: bool = False, aborts: bool = False
    ) -> None:
        simulated = SimulatedCache(1, CacheFaults(delay=(0, 5)), pool_bytes=1 << 21)
        self.simulation = None if real else simulated
        options = {"num_blocks": 14, "max_num_batched_tokens": 40, "tensor_parallel_size": tp_size}
        config = EngineConfig(block_tokens=4, sync_loads=sync, **options)  # type: ignore[arg-type]
        backend: Any = NativeBackend(4 << 20, load_when="always") if real else simulated
        self.worker_sides: list[Any] = []  # of the cache, one for each rank
        make_side = backend.transfer_side

        def transfer_side(*args: Any) -> Any:
            self.worker_sides.append(make_side(*args))
            return self.worker_sides[-1]

        backend.transfer_side = transfer_side
        self.engine = Engine(model(), config, backend)
        self.step: Callable[[], object] = self.engine.step
        self.faults = 0
        self._aborts = aborts
        self._answers = answers()

    def serve(self, limit: int = 5000) -> None:
        """Every prompt gets its right answer. After a failed step the engine goes on with the same
        requests, or is asked all prompts again."""
        self.rest_of(self._add(), limit)

    def serve_and_rest(self) -> None:
        self.serve()
        self.rest()

    def rest_of(self, requests: list[Request], limit: int = 5000) -> None:
        for _ in range(limit):
            if all(request.finish_reason for request in requests) and not self.engine.busy:
                break
            if not self._try_step() and self._aborts:
                for request in requests:
                    self.engine.abort(request.request_id)
                requests = self._add()
        assert [request.output_tokens for request in requests] == self._answers
        assert {request.finish_reason for request in requests} == {"length"}

    def rest(self, limit: int = 5000) -> None:
        """Every job ends, and every block is free."""
        for _ in range(limit):
            if not self.engine.has_jobs:
                break
            self._try_step()
        assert not self.engine.has_jobs, "a job never ends"
        assert self.engine.scheduler.pool.num_free == 13, "blocks are lost"

    def check(self) -> None:
        """The content of both caches is right: the oracle model reads it."""
        self.step = self.engine.step
        self.serve_and_rest()
        self.engine.scheduler.pool.forget_all()
        self.serve_and_rest()
        if self.simulation is not None:
            self.simulation.check_nothing_held()
        self.engine.close()

    def _add(self) -> list[Request]:
        return [self.engine.add(prompt, FOUR) for prompt in PROMPTS]

    def _try_step(self) -> bool:
        try:
            self.step()
        except (KeyboardInterrupt, MemoryError):
            self.faults += 1
            self.engine.check_integrity()
            return False
        finally:
            if self.simulation is not None:
                self.simulation.pass_time(1)
        self.engine.check_integrity()
        self.engine.pause() if self.simulation is None else None
        return True


class LineCounter:
    """Runs steps, and interrupts them at line number `at` of all that the engine's own code
    executes in them."""

    def __init__(self, engine: Engine, at: int) -> None:
        self._engine, self._left = engine, at

    def __call__(self) -> None:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            self._engine.step()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename in TRACED else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("aborts", [False, True], ids=["go on", "come again"])
@modes
def test_an_interrupt_at_any_line(sync: bool, aborts: bool) -> None:
    at, stride = 1, 149
    while True:
        driven = Driven(sync=sync, aborts=aborts)
        driven.serve_and_rest()
        driven.engine.scheduler.pool.forget_all()  # now there is something to load
        driven.step = LineCounter(driven.engine, at)
        driven.serve_and_rest()
        if not driven.faults:
            break
        driven.check()
        at += stride
    assert at > 10 * stride


def fails_at(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    fault: Fault,
    *,
    call: int = 1,
    after: bool = False,
) -> None:
    """The call number `call` from now on fails, before or after it did its work; those behind it do
    not."""
    original, left = getattr(owner, name), [call]

    def replaced(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not after:
            raise fault
        result = original(*args, **options)
        if left[0] == 0:
            raise fault
        return result

    monkeypatch.setattr(owner, name, replaced)


PLACES = [
    (CachePlanner, "build_step", False),
    (CachePlanner, "build_step", True),  # its jobs have left the planner, and reach no worker
    (Scheduler, "schedule", True),
    (Workers, "run", False),
    (OracleModel, "forward", True),
    (Workers, "run", True),
    (CachePlanner, "complete", False),
    (CachePlanner, "complete", True),  # jobs have ended, and the scheduler does not know which
    (CachePlanner, "prepare_store", False),  # a token has been taken
    (Scheduler, "update_from_output", True),
]


@pytest.mark.parametrize("real", [False, True], ids=["simulated", "real"])
@pytest.mark.parametrize(("owner", "name", "after"), PLACES)
@faults
@modes
@ranks
def test_a_step_that_breaks_off(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    after: bool,
    fault: Fault,
    sync: bool,
    tp_size: int,
    real: bool,
) -> None:
    driven = Driven(sync=sync, tp_size=tp_size, real=real, aborts=fault is KeyboardInterrupt)
    driven.serve_and_rest()
    for call in (1, 2, 3, 5):
        driven.engine.scheduler.pool.forget_all()
        with monkeypatch.context() as patch:
            fails_at(patch, owner, name, fault, call=call, after=after)
            driven.serve_and_rest()
    assert driven.faults >= 3
    driven.check()


@pytest.mark.parametrize("real", [False, True], ids=["simulated", "real"])
@pytest.mark.parametrize("what", ["load", "store_all", "withdraw"])
@modes
@ranks
def test_a_job_that_cannot_begin_ends_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, what: str, sync: bool, tp_size: int, real: bool
) -> None:
    driven = Driven(sync=sync, tp_size=tp_size, real=real)
    if what == "load":
        driven.serve_and_rest()
        driven.engine.scheduler.pool.forget_all()
    for side in driven.worker_sides:
        with monkeypatch.context() as patch:
            for call in (1, 3):
                fails_at(patch, side, what, MemoryError, call=call)
            driven.serve_and_rest()
        if what == "load":
            driven.engine.scheduler.pool.forget_all()
    assert driven.faults > 0
    driven.check()


@faults
@modes
def test_what_follows_from_a_fault_may_fail_too(
    monkeypatch: pytest.MonkeyPatch, sync: bool, fault: Fault
) -> None:
    driven = Driven(sync=sync)
    engine, seen = driven.engine, []
    requests = [engine.add(prompt, FOUR) for prompt in PROMPTS]
    fails_at(monkeypatch, OracleModel, "forward", fault)
    fails_at(monkeypatch, Scheduler, "preempt", fault, call=2)
    for _ in range(200):
        try:
            engine.step()
        except fault as error:
            seen.append(type(error.__context__))
        driven.simulation.pass_time(1)  # type: ignore[union-attr]
    assert seen == [fault] and [request.output_tokens for request in requests] == answers()
    driven.rest()
    driven.check()


@pytest.mark.parametrize(
    ("owner", "name", "after", "calls"),
    [
        (KeyChain, "extend", False, 16),  # the token is there, and its key is not
        (KeyChain, "extend", True, 16),  # its key is there, and the planner does not know it
        (CachePlanner, "prepare_store", False, 16),  # perhaps it was the last one
        (CachePlanner, "finish_request", True, 4),
    ],
)
def test_a_token_that_is_half_taken(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: bool, calls: int
) -> None:
    """The request has it once, under the right keys, and gets none after its last."""
    for call in range(1, calls + 1):
        driven = Driven(sync=False)
        requests = [driven.engine.add(prompt, FOUR) for prompt in PROMPTS]
        with monkeypatch.context() as patch:
            fails_at(patch, owner, name, MemoryError, call=call, after=after)
            driven.rest_of(requests)
        assert driven.faults == 1
        chains = [request.chain.num_tokens for request in requests]
        assert chains == [request.num_tokens for request in requests], "keys of other tokens"
        driven.rest()
        driven.check()


def test_blocks_that_a_lost_step_gave_away_are_announced(
    monkeypatch: pytest.MonkeyPatch, rig: Callable[..., Any]
) -> None:
    """A store that has not read them yet must not read what a load has written since."""
    r = rig(num_blocks=8)
    r.seed(r.prompt(5, which="b"))
    r.cache.hold_stores = None
    r.add(r.prompt(5, which="a"))
    r.run()
    r.add(r.prompt(5, which="b"))
    with monkeypatch.context() as patch:
        fails_at(patch, CachePlanner, "build_step", MemoryError)
        with pytest.raises(MemoryError):
            r.step()
    assert set(r.cache.stores[0].block_ids.tolist()) & set(r.scheduler.planner.jobs[-1].block_ids)
    r.step()
    assert len(r.cache.loads) == 1 and r.cache.ranks[0].held_stores
