"""Sleep mode: vLLM takes the memory of its KV away and gives it again, elsewhere. vLLM's scheduler
with both sides of the connector and a real server; before every step the model checks each number
of KV that it reads.

Where the release has sleep mode for connectors (0.33), its own engine core says what is called
when."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

import torch
from engine_parts import BLOCK, Engine, answer_to, full, one_rank, request, vllm_config, window
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import kvkeep.vllm.worker
from kvkeep.client.copier import HostCopier
from kvkeep.client.requests import Finished
from kvkeep.testing.process import ServerProcess
from kvkeep.vllm import versions
from kvkeep.vllm.connector import KVKeepConnector

KEY = "num_kvkeep_extra_cached_tokens"
GARBAGE, TAKEN = -7, -9
PROMPT = list(range(5 * BLOCK))

_names = itertools.count()

needs_sleep = pytest.mark.skipif(
    not versions.tells_of_sleep(), reason="before 0.33 connectors do not hear of sleep"
)


class SleepyEngine(Engine):
    """With a real server, and memory that goes away while it sleeps."""

    def __init__(self, server: ServerProcess, *specs: Any, **options: Any) -> None:
        extra = {"kvkeep.address": server.address, "kvkeep.revision": f"sleepy {next(_names)}"}
        extra |= {"kvkeep.lookup_deadline_ms": 5_000}
        self.is_sleeping = False
        self.old: list[torch.Tensor] = []  # memory that was taken away
        cache: Any = SimpleNamespace(
            pass_time=lambda steps: time.sleep(0.001), check_nothing_held=lambda: None
        )
        super().__init__(cache, *specs, extra=extra, **options)

    def _start(self) -> None:
        self.worker: Any = SimpleNamespace(ahead=None)
        with one_rank():
            self.rank = KVKeepConnector(self.config, KVConnectorRole.WORKER, self.kv_cache_config)
            self.rank.register_kv_caches(self.kv)
        self.shake_hands()
        assert self.adapter.connection.up

    @property
    def adapter(self) -> Any:
        assert self.rank.half.adapter is not None
        return self.rank.half.adapter

    @property
    def handshake(self) -> Any:
        handshake = self.rank.get_handshake_metadata()
        return replace(handshake, name="") if self.apart and handshake is not None else handshake

    def shake_hands(self) -> None:
        with (
            mock.patch.object(kvkeep.vllm.worker, "has_kv_transfer_group", return_value=True),
            mock.patch.object(kvkeep.vllm.worker, "get_kv_transfer_group", return_value=self.rank),
        ):
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self.handshake})

    def ask(self, prompt: list[int] = PROMPT) -> int:
        """Serves it. Whatever happened before, the answer is right; how many of its tokens came
        from the server."""
        asked = request(prompt, params={KEY: True})
        self.run(asked, most=20_000)
        assert self.answers[asked.request_id] == answer_to(prompt)
        return int(self.params[asked.request_id][KEY])

    # -- what vLLM's workers do

    def take_memory(self) -> None:
        self.rank.unregister_kv_caches()
        self.is_sleeping = True
        for layer in self.kv.values():
            layer.fill_(TAKEN)
            self.old.append(layer.detach())
            layer.data = torch.empty(0, dtype=layer.dtype)

    def give_memory(self) -> None:
        for layer, old in zip(self.kv.values(), self.old[-len(self.kv) :], strict=True):
            layer.data = torch.full_like(old, GARBAGE)
        self.rank.restore_kv_caches()
        self.is_sleeping = False

    def sleep_and_wake(self, level: int = 1) -> None:
        if versions.tells_of_sleep():
            core = engine_core(self)
            core.sleep(level, "abort")
            assert self.is_sleeping
            assert core.wake_up() and not self.is_sleeping
            return
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.take_memory()
        self.give_memory()
        self.shake_hands()

    def check_old_memory(self) -> None:
        """Nothing was copied to where the KV was."""
        assert all((layer == TAKEN).all() for layer in self.old)


def engine_core(engine: SleepyEngine) -> Any:
    """vLLM's, with its own scheduler and these workers."""
    from vllm.v1.engine.core import EngineCore

    class Executor(mock.Mock):
        @property
        def is_sleeping(self) -> bool:
            return engine.is_sleeping

        def sleep(self, level: int) -> None:
            engine.take_memory()

        def wake_up(self, tags: list[str] | None) -> None:
            engine.give_memory()

        def get_kv_connector_handshake_metadata(self) -> list[dict[tuple[int, int], Any]]:
            return [{(0, 0): engine.handshake}]

    core = EngineCore.__new__(EngineCore)
    core.scheduler, core.model_executor, core.mm_receiver_cache = engine.scheduler, Executor(), None
    return core


@pytest.fixture(params=["one process", "two processes"])
def start(
    request: pytest.FixtureRequest, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., SleepyEngine]]:
    monkeypatch.setattr(Engine, "apart", request.param == "two processes")
    made: list[SleepyEngine] = []

    def engine(*specs: Any, **options: Any) -> SleepyEngine:
        made.append(SleepyEngine(server, *specs, **options))
        return made[-1]

    yield engine
    for each in made:
        each.settle()
        each.check_old_memory()
        each.check_nothing_left()
        each.rank.shutdown()
        each.scheduler.shutdown()


Start = Callable[..., SleepyEngine]


@pytest.mark.parametrize("specs", [(full(),), (full(), window())], ids=["full", "full and window"])
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_has_slept_stores_and_hits_in_its_new_memory(
    start: Start, specs: tuple[Any, ...], level: int
) -> None:
    if len(specs) > 1 and not versions.names_failed_requests():
        pytest.skip("before 0.30 a model with several groups is served without the cache")
    engine = start(*specs)
    assert engine.ask() == 0
    assert engine.forget().ask() > 0, "this is what is there to be found"
    for _ in range(2):
        engine.sleep_and_wake(level)
        assert engine.ask() == 0, "the weights may be others now"
        assert engine.forget().ask() > 0


def test_what_sleeps_without_a_reset_does_not_find_what_it_stored_either(start: Start) -> None:
    engine = start()
    assert engine.ask() == 0
    assert engine.forget().ask() > 0
    engine.forget().take_memory()
    engine.give_memory()
    engine.shake_hands()
    assert engine.ask() == 0, "nobody has said that the weights are the same"
    assert engine.forget().ask() > 0


def test_an_engine_that_is_woken_up_without_having_slept_finds_what_it_stored(start: Start) -> None:
    """At level 0 vLLM only pauses, and hands over the handshakes all the same."""
    engine = start()
    assert engine.ask() == 0
    engine.shake_hands()
    assert engine.forget().ask() > 0


def test_requests_that_come_while_it_sleeps_are_stored_when_it_is_awake(start: Start) -> None:
    engine = start()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.take_memory()
    asked = request(PROMPT)
    engine.add(asked)
    engine.give_memory()
    engine.shake_hands()
    engine.run(most=20_000)
    assert engine.answers[asked.request_id] == answer_to(PROMPT)
    assert engine.forget().ask() > 0


def gated(name: str, gate: threading.Event, arrived: threading.Event) -> Any:
    """Copies wait until the gate is open."""
    real = getattr(HostCopier, name)

    def wait(*given: Any, **more: Any) -> Any:
        arrived.set()
        assert gate.wait(30)
        return real(*given, **more)

    return mock.patch.object(HostCopier, name, wait)


def sleep_while(engine: SleepyEngine, gate: threading.Event) -> None:
    """Sleeps and wakes up, with a copy under way that goes on when vLLM has said that it takes the
    memory."""
    opener = threading.Thread(
        target=lambda: (wait_until(lambda: not engine.adapter.is_registered), gate.set())
    )
    opener.start()
    engine.take_memory()
    opener.join(30)
    assert gate.is_set()
    engine.give_memory()
    engine.shake_hands()


def wait_until(happens: Callable[[], bool]) -> None:
    """The limit only ends a test that has failed."""
    deadline = time.monotonic() + 30
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.001)


def test_a_store_under_way_is_withdrawn(start: Start) -> None:
    engine, gate, arrived = start(), threading.Event(), threading.Event()
    with gated("begin_store", gate, arrived):
        asked = request(PROMPT)
        engine.add(asked)
        while engine.scheduler.requests:
            engine.step()
        assert arrived.wait(30)
        sleep_while(engine, gate)
        engine.run(most=20_000)
    assert engine.answers[asked.request_id] == answer_to(PROMPT)
    assert engine.forget().ask() == 0, "nothing of it was stored"
    assert engine.forget().ask() > 0


def test_a_load_under_way_has_failed_and_is_computed(start: Start) -> None:
    """vLLM says that there is none when it sleeps. If there is, what it brought is gone with the
    memory."""
    engine, gate, arrived = start(), threading.Event(), threading.Event()
    engine.ask()
    engine.forget()
    with gated("begin_load", gate, arrived):
        asked = request(PROMPT, params={KEY: True})
        engine.add(asked)
        while not arrived.is_set():
            engine.step()
        sleep_while(engine, gate)
        engine.run(most=20_000)
    assert engine.answers[asked.request_id] == answer_to(PROMPT)
    assert engine.params[asked.request_id][KEY] == 0


def test_a_load_that_has_ended_and_was_not_told_has_failed_too(start: Start) -> None:
    engine = start()
    engine.ask()
    engine.forget()
    asked = request(PROMPT, params={KEY: True})
    engine.add(asked)
    while "loading=[]" in repr(engine.rank.half):
        with mock.patch.object(engine.adapter, "poll", side_effect=Finished):
            engine.step()
    wait_until(lambda: not engine.adapter.jobs.loads)
    engine.take_memory()
    engine.give_memory()
    engine.shake_hands()
    engine.run(most=20_000)
    assert engine.answers[asked.request_id] == answer_to(PROMPT)
    assert engine.params[asked.request_id][KEY] == 0


def test_while_it_sleeps_loads_fail_and_stores_do_nothing(start: Start) -> None:
    """vLLM makes no steps then. If it does, nothing touches memory, and each job is told."""
    engine = start()
    engine.ask()
    engine.forget()
    counters = engine.adapter.connection.counters
    engine.rank.unregister_kv_caches()
    engine.rank.unregister_kv_caches()  # the second time there is nothing to do
    assert engine.ask() == 0, "computed, in memory that only the test knows to be there"
    assert counters.failures["unregistered"] >= 2
    engine.rank.restore_kv_caches()
    engine.rank.restore_kv_caches()
    assert engine.forget().ask() > 0, "what was stored before"


@pytest.mark.parametrize("is_child", [False, True], ids=["alone", "beside other connectors"])
def test_an_engine_whose_tensors_are_others_after_it_slept_is_served_without_the_cache(
    start: Start, caplog: pytest.LogCaptureFixture, is_child: bool
) -> None:
    """Beside others no handshake is handed over, and the worker's word comes with its reports."""
    engine = start()
    engine.ask()
    engine.take_memory()
    for layer, old in zip(engine.kv.values(), engine.old, strict=True):
        layer.data = torch.full((old.shape[0], 2 * BLOCK), GARBAGE, dtype=torch.int32)
    engine.rank.restore_kv_caches()
    assert engine.rank.half is not None and engine.rank.half.faults == 1
    for name, old in zip(engine.kv, engine.old, strict=True):
        engine.kv[name] = torch.full_like(old, GARBAGE)
    if is_child:
        engine.step()
    else:
        engine.shake_hands()
    assert (
        "from now on this engine is served without the cache: after vLLM had slept" in caplog.text
    )
    assert engine.forget().ask() == 0
    assert engine.forget().ask() == 0


def test_if_it_cannot_be_unregistered_nothing_is_copied_any_more(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    engine.ask()
    with mock.patch.object(
        engine.adapter, "withdraw", side_effect=RuntimeError("as the test says")
    ):
        engine.take_memory()
    assert "could not be unregistered" in caplog.text
    assert not engine.adapter.connection.up, "it is closed"
    assert engine.rank.half is not None and engine.rank.half.faults == 1
    engine.give_memory()
    engine.shake_hands()
    assert "from now on this engine is served without the cache" in caplog.text
    assert engine.forget().ask() == 0


# --- what vLLM asks and does ----------------------------------------------------------------------


def test_kvkeep_follows_sleep_mode() -> None:
    config = vllm_config()
    assert KVKeepConnector.supports_sleep_mode(config.kv_transfer_config)


@needs_sleep
def test_vllms_worker_tells_before_it_takes_memory_and_after_it_has_given_it() -> None:
    from vllm.v1.worker import gpu_worker

    calls = mock.Mock()
    worker: Any = SimpleNamespace(
        sleep_mode_backend=calls,
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
        _sleep_saved_parameters={},
        _sleep_saved_buffers={},
        _sleep_saved_draft_buffers={},
        synchronize_device=lambda: None,
    )
    with (
        mock.patch.object(gpu_worker, "has_kv_transfer_group", return_value=True),
        mock.patch.object(gpu_worker, "get_kv_transfer_group", return_value=calls),
        mock.patch.object(gpu_worker.torch.accelerator, "synchronize"),
        mock.patch.object(gpu_worker.torch.accelerator, "get_memory_info", return_value=(1, 2)),
    ):
        gpu_worker.Worker.sleep(worker, 1)
        gpu_worker.Worker.wake_up(worker, ["weights"])
        gpu_worker.Worker.wake_up(worker, ["kv_cache"])
        gpu_worker.Worker.discard(worker, ("kv_cache",))
        gpu_worker.Worker.wake_up(worker)
    assert [name for name, _, _ in calls.mock_calls] == [
        *("unregister_kv_caches", "suspend", "resume", "resume", "restore_kv_caches"),
        *("unregister_kv_caches", "discard", "resume", "restore_kv_caches"),
    ]


@needs_sleep
def test_vllms_other_ways_to_discard_kv_reset_the_connector_first(start: Start) -> None:
    engine = start()
    engine.ask()
    engine.settle()
    core = engine_core(engine)
    core.batch_queue = None
    discarded: list[Any] = []
    core.model_executor.discard = lambda tags: (discarded.append(tags), engine.take_memory())
    core.pause_scheduler("abort", clear_cache=False)
    core.release_kv_cache_memory()
    assert discarded == [("kv_cache",)]
    assert core.wake_up(["kv_cache"])
    assert engine.ask() == 0
    assert engine.forget().ask() > 0
