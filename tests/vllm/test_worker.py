"""A rank's side: what it begins when, and that each load is told to vLLM once, whatever became of
it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

import torch
from engine_parts import cache_config, cpu_layer, full, one_rank, vllm_config

import kvkeep.vllm.worker
from kvkeep.client.options import ClientOptions
from kvkeep.client.outage import Outage
from kvkeep.client.requests import Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.connector.checkpoint import CheckpointDigest
from kvkeep.connector.group_layout import CacheGroup, GroupLayout
from kvkeep.connector.step import StepMetadata
from kvkeep.errors import RequestError, SettingsError
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.vllm import versions
from kvkeep.vllm.messages import Reports, Step
from kvkeep.vllm.worker import WorkerSide, find_here

WHOLE = GroupLayout([CacheGroup("full", 4)])
SEVERAL = GroupLayout([CacheGroup("full", 4), CacheGroup("window", 4, 8)])


class Recording:
    """A WorkerAdapter that remembers what it was asked, and finishes what it is told."""

    def __init__(self) -> None:
        self.engine_busy: bool | None = None
        self.calls: list[tuple[str, Any]] = []
        self.finished = Finished(3)
        self.raises: set[str] = set()
        self.strategy = SimpleNamespace(rank=3)
        outage = Outage("tcp://nobody:1")
        self.connection = SimpleNamespace(
            answering=True, wait_until_up=lambda timeout_ms: True, outage=outage
        )

    def store_all(self, requests: Mapping[Any, StoreRequest]) -> None:
        for job, request in requests.items():
            self.store(job, request)

    def store(self, job: int, request: StoreRequest) -> None:
        self._note("store", job)

    def load(self, job: int, request: LoadRequest) -> None:
        self._note("load", job)

    def withdraw(self, block_ids: Any) -> None:
        self._note("withdraw", block_ids)

    def register_groups(self, pieces: Any) -> None:
        self._note("register", len(pieces))

    def set_engine_busy(self, busy: bool) -> None:
        self.engine_busy = busy

    def wait_for_load(self, seconds: float) -> None:
        self._note("wait", seconds)

    def poll(self) -> Finished:
        finished, self.finished = self.finished, Finished(3)
        return finished

    def close(self) -> None:
        self._note("close", None)

    def _note(self, what: str, which: Any) -> None:
        self.calls.append((what, which))
        if what in self.raises:
            raise RequestError("bad_request", "as the test says")


def load(*blocks: int) -> LoadRequest:
    ids = np.array(blocks, dtype=np.int64)
    checksums = np.zeros((len(blocks), 1), dtype=np.uint64)
    return LoadRequest("default", bytes(len(blocks) * KEY_BYTES), 0, ids, 1, ids, checksums)


STORE = StoreRequest("default", b"", bytes(KEY_BYTES), np.array([1]))


def side(pieces: GroupLayout = WHOLE) -> tuple[WorkerSide, Recording]:
    made, adapter = WorkerSide(None, None, ClientOptions()), Recording()
    made.adapter, made._pieces = adapter, pieces  # type: ignore[assignment]
    return made, adapter


def loading(worker: WorkerSide, **requests: int) -> None:
    worker.begin(
        Step(
            StepMetadata(
                {job: load(job) for job in requests.values()},
                requests={v: k for k, v in requests.items()},
            )
        )
    )


# --- order ----------------------------------------------------------------------------------------


def test_what_must_be_read_is_read_before_anything_is_overwritten() -> None:
    worker, adapter = side()
    step = Step(StepMetadata({1: load(5)}, {2: STORE}, {3: STORE}, [7, 8], {1: "a"}))
    worker.begin(step)
    assert adapter.calls == [("store", 2), ("withdraw", [7, 8]), ("load", 1)]
    worker.wait_for_save()
    assert adapter.calls[3:] == [("store", 3)]
    worker.begin(Step())
    worker.wait_for_save()
    assert len(adapter.calls) == 4
    worker.close()
    assert adapter.calls[4:] == [("close", None)]


def test_vllm_writes_between_the_saving_of_blocks_and_the_loads() -> None:
    worker, adapter = side()
    step = Step(StepMetadata({1: load(5)}, {2: STORE}, {}, [7, 8], {1: "a"}))
    worker.handle_preemptions(step)
    assert adapter.calls == [("store", 2), ("withdraw", [7, 8])]
    worker.begin(step)
    assert adapter.calls[2:] == [("load", 1)], (
        "what was saved is not saved again: it may be overwritten by now"
    )


def test_a_step_whose_end_nobody_told_ends_with_the_next() -> None:
    worker, adapter = side()
    worker.begin(Step(StepMetadata(stores_after={3: STORE})))
    worker.begin(Step(StepMetadata(stores_after={4: STORE}, withdrawn=[7])))
    assert adapter.calls == [("store", 3), ("withdraw", [7])]


def test_a_step_that_knows_nothing_takes_everything_back() -> None:
    worker, adapter = side()
    worker.begin(Step(all_withdrawn=True))
    assert ("withdraw", None) in adapter.calls


# --- loads ----------------------------------------------------------------------------------------


def test_a_load_is_told_once_when_it_has_ended() -> None:
    worker, adapter = side()
    loading(worker, a=1, b=2)
    worker.collect()
    assert worker.take_received() == (set(), set())
    adapter.finished = Finished(3, loads={1: LoadOutcome()})
    worker.collect()
    assert worker.take_received() == ({"a"}, set())
    worker.collect()
    assert worker.take_received() == (set(), set())
    adapter.finished = Finished(3, loads={2: LoadOutcome()})
    worker.collect()
    assert (worker.take_received(), worker.get_block_ids_with_load_errors()) == (
        ({"b"}, set()),
        set(),
    )
    assert "loading=[]" in repr(worker)


@pytest.mark.parametrize("pieces", [WHOLE, SEVERAL])
def test_a_failed_load_is_told_by_blocks_or_by_request(pieces: GroupLayout) -> None:
    worker, adapter = side(pieces)
    loading(worker, a=1, b=2)
    adapter.finished = Finished(3, loads={1: LoadOutcome(frozenset({5, 6})), 2: LoadOutcome()})
    worker.collect()
    assert worker.take_received() == ({"a", "b"}, set() if pieces.whole else {"a"})
    assert worker.get_block_ids_with_load_errors() == ({5, 6} if pieces.whole else set())
    assert (
        worker.take_received() == (set(), set())
        and worker.get_block_ids_with_load_errors() == set()
    )


@pytest.mark.parametrize("pieces", [WHOLE, SEVERAL])
def test_a_load_that_could_not_be_prepared_has_failed(pieces: GroupLayout) -> None:
    worker, _ = side(pieces)
    worker.begin(Step(lost={"a": LoadOutcome(frozenset({3, 4}))}))
    assert worker.take_received() == ({"a"}, set() if pieces.whole else {"a"})
    assert worker.get_block_ids_with_load_errors() == ({3, 4} if pieces.whole else set())


@pytest.mark.parametrize("pieces", [WHOLE, SEVERAL])
def test_loads_of_a_step_that_cannot_be_begun_have_failed(pieces: GroupLayout) -> None:
    worker, adapter = side(pieces)
    adapter.raises = {"load"}
    worker.begin(Step(StepMetadata({1: load(5, 6)}, {2: STORE}, {}, [], {1: "a"})))
    assert ("withdraw", None) not in adapter.calls and worker.faults == 1
    assert worker.take_received() == ({"a"}, set() if pieces.whole else {"a"})
    assert worker.get_block_ids_with_load_errors() == ({5, 6} if pieces.whole else set())


def test_the_scheduler_hears_of_jobs_that_were_not_begun() -> None:
    worker, adapter = side()
    adapter.raises = {"store", "load"}
    worker.begin(Step(StepMetadata({1: load(5, 6)}, {2: STORE}, {3: STORE}, [], {1: "a"})))
    assert ("withdraw", None) in adapter.calls
    worker.wait_for_save()
    worker.collect()
    reports = worker.build_connector_worker_meta()
    assert reports is not None, "or the scheduler waits for these jobs for ever"
    loads = {job: end for report in reports.finished for job, end in report.loads.items()}
    assert loads == {1: LoadOutcome(frozenset({5, 6}))}
    assert {job for report in reports.finished for job in (*report.stored, *report.incomplete)} == {
        2,
        3,
    }
    assert worker.faults == 3


def test_stores_of_a_step_that_had_begun_when_another_could_not_read_no_further() -> None:
    """The scheduler hears that all of them are over, so it will not withdraw their blocks any
    more."""
    worker, adapter = side()

    def store(job: int, request: StoreRequest) -> None:
        adapter.calls.append(("store", job))
        if job == 4:
            raise RuntimeError("CUDA error: out of memory")

    adapter.store = store  # type: ignore[method-assign]
    worker.begin(Step(StepMetadata(stores_after={3: STORE, 4: STORE, 5: STORE})))
    worker.wait_for_save()
    assert adapter.calls == [("store", 3), ("store", 4), ("withdraw", None)]
    reports = worker.build_connector_worker_meta()
    assert reports is not None
    assert [(report.stored, report.incomplete) for report in reports.finished] == [
        ({3: 0, 4: 0, 5: 0}, [3, 4, 5])
    ]
    assert worker.faults == 1


# --- reports --------------------------------------------------------------------------------------


def test_reports_and_stats_are_what_has_ended_since() -> None:
    worker, adapter = side()
    assert worker.build_connector_worker_meta() is None and worker.stats() is None
    loading(worker, a=1)
    adapter.finished = Finished(3, {4: 2, 5: 0}, [5], {1: LoadOutcome(frozenset({9}))}, 6)
    worker.collect()
    worker.collect()
    stats = worker.stats()
    assert stats is not None
    expected = {
        "failed_blocks": 1,
        "stored_blocks": 2,
        "incomplete_stores": 1,
        "withdrawn_blocks": 6,
        "connected": 1,
    }
    assert stats.data == expected
    reports = worker.build_connector_worker_meta()
    assert reports is not None and len(reports.finished) == 1 and reports.finished[0].rank == 3
    assert worker.build_connector_worker_meta() is None and worker.stats() is None


# --- a scheduler in the same process --------------------------------------------------------------


def test_what_went_well_is_handed_over_once_and_not_with_a_steps_results() -> None:
    worker, adapter = side()
    worker.join()
    loading(worker, a=1, b=2)
    adapter.finished = Finished(3, {4: 2}, [], {1: LoadOutcome()})
    worker.collect()
    assert worker.take_received() == (set(), set()), "it waits for whoever asks"
    assert worker.hand_over() == [Finished(3, {4: 2}, [], {1: LoadOutcome()})]
    assert worker.hand_over() == []
    worker.collect()
    assert worker.take_received() == (set(), set()) and worker.stats() is None
    adapter.finished = Finished(3, loads={2: LoadOutcome()})
    assert worker.hand_over() == [Finished(3, loads={2: LoadOutcome()})]


@pytest.mark.parametrize("pieces", [WHOLE, SEVERAL])
def test_what_failed_is_told_with_the_next_steps_results_as_a_whole(pieces: GroupLayout) -> None:
    worker, adapter = side(pieces)
    worker.join()
    loading(worker, a=1, b=2)
    ended = Finished(3, {4: 2}, [], {1: LoadOutcome(), 2: LoadOutcome(frozenset({2}))})
    adapter.finished = ended
    assert worker.hand_over() == []
    worker.collect()
    stats = worker.stats()
    assert stats is not None and stats.data == {
        "failed_blocks": 1,
        "stored_blocks": 2,
        "connected": 1,
    }
    whole = pieces is WHOLE
    assert worker.take_received() == ({"a", "b"}, set() if whole else {"b"})
    assert worker.get_block_ids_with_load_errors() == ({2} if whole else set())
    reports = worker.build_connector_worker_meta()
    assert reports is not None and reports.finished == [ended]
    assert worker.hand_over() == []


def test_results_are_never_empty_for_a_scheduler_that_is_to_ask() -> None:
    worker, _ = side()
    assert worker.build_connector_worker_meta() is None
    worker.join()
    assert worker.build_connector_worker_meta() == Reports([])


def test_a_handshake_that_was_not_told_at_start_up_comes_with_the_first_reports_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MultiConnector gives the first handshake of any child to all of them, so it gets none of
    ours."""
    alone, child = registered(full()), registered(full(), siblings=("NixlConnector",))
    assert alone.handshake is not None and alone.first_handshake() is alone.handshake
    assert alone.build_connector_worker_meta() is None
    monkeypatch.setattr(kvkeep.vllm.worker, "is_child", lambda worker: worker is child)
    assert child.first_handshake() is None
    reports = child.build_connector_worker_meta()
    assert reports is not None and reports.finished == []
    [told] = reports.handshakes
    assert told.shape == alone.handshake.shape and told.siblings == ("NixlConnector",)
    assert child.build_connector_worker_meta() is None


def test_a_worker_is_found_by_its_name_in_its_own_process_as_long_as_it_lives() -> None:
    worker = registered(full())
    assert worker.handshake is not None
    name = worker.handshake.name
    assert find_here(name) is worker and find_here("") is None
    assert registered(full()).handshake.name != name  # type: ignore[union-attr]
    del worker
    gc.collect()
    assert find_here(name) is None


def test_a_rank_that_others_wait_for_waits_for_nobody() -> None:
    for size in (1, 2):
        worker = registered(full(), engines=size)
        adapter: Any = worker.adapter
        loading(worker, a=1)
        for _ in range(2):
            worker.begin(Step(idle=True))
        worker.collect()
        assert ("wait" in [what for what, _ in adapter.calls]) == (size == 1)


@pytest.mark.parametrize("joined", [False, True])
def test_an_engine_waits_for_a_load_only_if_it_has_had_nothing_to_compute_for_two_steps(
    joined: bool,
) -> None:
    worker, adapter = side()
    if joined:
        worker.join()
    ask = worker.hand_over if joined else worker.collect
    waits = []
    for idle in (True, False, True, True):  # before the first there was none that is known of
        if not waits:
            worker.begin(Step(StepMetadata({1: load(5)}, requests={1: "a"}), idle=idle))
        else:
            worker.begin(Step(idle=idle))
        ask()
        waits.append(any(what == "wait" for what, _ in adapter.calls))
        adapter.calls.clear()
    assert waits == [False, False, False, True], "the tokens of the last step go out first"
    adapter.finished = Finished(3, loads={1: LoadOutcome()})
    ask()
    adapter.calls.clear()
    worker.begin(Step(idle=True))
    ask()
    assert not adapter.calls, "nothing is being loaded"


def test_copies_give_way_to_an_engine_until_it_has_computed_nothing_for_two_steps() -> None:
    worker, adapter = side()
    gave_way = []
    for idle in (False, True, True, True, False, True):
        worker.begin(Step(idle=idle))
        gave_way.append(adapter.engine_busy)
    assert gave_way == [True, True, False, False, True, True], (
        "the tokens of the last step go out first"
    )


# --- start-up -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server, and no model that vLLM knows: also in steps after the start."""
    monkeypatch.setattr(kvkeep.vllm.worker, "WorkerAdapter", lambda *about: Recording())
    monkeypatch.setattr(versions, "is_own_model", lambda model: True)


def registered(
    *specs: Any,
    kv: Any = None,
    engines: int = 1,
    layer: Any = None,
    extra: dict[str, Any] | None = None,
    yield_to: Callable[[WorkerSide], None] = lambda worker: None,
    siblings: tuple[str, ...] = (),
    **model: Any,
) -> WorkerSide:
    config = vllm_config(**model)
    config.parallel_config.data_parallel_size = engines
    cache = cache_config(*specs, num_blocks=6)
    worker = WorkerSide(config, cache, ClientOptions(), siblings)
    layers = {
        name: torch.zeros(6, 4) for group in cache.kv_cache_groups for name in group.layer_names
    }
    config.compilation_config.static_forward_context.update(
        {name: layer or cpu_layer() for name in layers}
    )
    config.kv_transfer_config.kv_connector_extra_config |= extra or {}
    with one_rank():
        worker.register_kv_caches(layers if kv is None else kv)
        yield_to(worker)
    return worker


def test_a_worker_says_what_its_blocks_are_like() -> None:
    worker = registered(full())
    assert worker.handshake is not None and worker.handshake.shape is not None
    assert worker.handshake.shape.shard_bytes == (16,) and worker.handshake.refusal == ""
    assert registered(full()).handshake == worker.handshake


def test_a_refusal_becomes_a_handshake_without_a_shape() -> None:
    cases = [
        registered(full(non_causal=True)),
        registered(full(), is_encoder_decoder=True),
        registered(full(), kv={}),
        registered(full(), kv={"layer.0": torch.zeros(5, 4)}),
    ]
    for worker in cases:
        assert worker.handshake is not None and worker.handshake.shape is None
        assert worker.handshake.refusal


def test_a_worker_that_refused_does_nothing_and_answers_all_the_same() -> None:
    worker = registered(full(non_causal=True))
    assert worker.first_handshake() is worker.handshake is not None
    worker.begin(Step(StepMetadata({1: load(5)}, {2: STORE}, {3: STORE}, [7], {1: "a"})))
    worker.wait_for_save()
    worker.collect()
    assert (
        worker.take_received() == (set(), set())
        and worker.get_block_ids_with_load_errors() == set()
    )
    assert worker.build_connector_worker_meta() is None and worker.stats() is None
    worker.close()


def test_an_unknown_attention_backend_is_refused_by_name() -> None:
    class HomeMadeBackend: ...

    worker = registered(full(), layer=SimpleNamespace(get_attn_backend=lambda: HomeMadeBackend))
    assert worker.handshake is not None and worker.handshake.shape is None
    assert (
        "HomeMadeBackend" in worker.handshake.refusal
        and "--attention-backend" in worker.handshake.refusal
    )


# --- weights that were never seen on this host ----------------------------------------------------


class Hashing:
    """A CheckpointDigest of which the test says when it is known."""

    found = False
    problem = ""

    def __init__(self) -> None:
        self.value: str | None = None
        self.known = threading.Event()

    @property
    def pending(self) -> bool:
        return not self.known.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        """Whoever would wait for a while only does not wait at all."""
        return self.known.wait(0 if timeout_s else None)

    def end(self, value: str | None, problem: str = "") -> None:
        self.value, self.problem = value, problem
        self.known.set()


def starting_late(value: str | None, problem: str = "") -> WorkerSide:
    """A worker whose weights become known when it has registered."""
    hashing = Hashing()

    def go_on(worker: WorkerSide) -> None:
        assert worker.handshake is not None and worker.handshake.is_pending, (
            "the engine starts without waiting"
        )
        assert worker.first_handshake() == worker.handshake
        worker.begin(Step())
        worker.wait_for_save()
        assert worker.build_connector_worker_meta() is None and worker.handshake.shape is None
        hashing.end(value, problem)

    with mock.patch.object(CheckpointDigest, "of", return_value=hashing):
        return registered(full(), extra={"kvkeep.revision": None}, yield_to=go_on)


def test_weights_that_become_known_later_start_the_worker_with_the_next_step() -> None:
    worker = starting_late("abc")
    assert worker.handshake is not None and worker.handshake.is_pending, (
        "nothing changes between two steps"
    )
    worker.begin(Step())
    reports = worker.build_connector_worker_meta()
    assert reports is not None and len(reports.handshakes) == 1
    (handshake,) = reports.handshakes
    assert (
        handshake == worker.handshake and handshake.shape is not None and not handshake.is_pending
    )
    assert handshake.shape.identity.revision == "abc"
    worker.begin(Step())
    assert worker.build_connector_worker_meta() is None, "once"


def test_weights_that_stay_unknown_are_refused_with_the_next_step() -> None:
    worker = starting_late(None, "a file cannot be read")
    worker.begin(Step(StepMetadata({1: load(5)}, {2: STORE}, {3: STORE}, [7], {1: "a"})))
    reports = worker.build_connector_worker_meta()
    assert reports is not None and reports.handshakes[0].shape is None
    assert "a file cannot be read" in reports.handshakes[0].refusal
    assert "kvkeep.revision" in reports.handshakes[0].refusal


def test_a_worker_that_is_closed_before_its_weights_are_known_starts_nothing() -> None:
    worker = starting_late("abc")
    worker.close()
    worker.begin(Step())
    assert worker.adapter is None and worker.handshake is not None and worker.handshake.is_pending


def test_a_late_start_that_fails_is_told_and_counted() -> None:
    worker = starting_late("abc")
    with mock.patch.object(
        kvkeep.vllm.worker, "shape_of", side_effect=ValueError("as the test says")
    ):
        worker.begin(Step())
    reports = worker.build_connector_worker_meta()
    assert (
        reports is not None
        and "as the test says" in reports.handshakes[0].refusal
        and worker.faults == 1
    )


def test_a_rank_whose_kv_cannot_be_described_still_speaks_to_the_others() -> None:
    with mock.patch.object(
        kvkeep.vllm.worker, "encodings_of", side_effect=AttributeError("no such attribute")
    ):
        worker = registered(full())
    assert (
        worker.handshake is not None
        and "no such attribute" in worker.handshake.refusal
        and worker.faults == 1
    )


def test_the_refusal_has_the_hint() -> None:
    with mock.patch.object(
        kvkeep.vllm.worker, "layout_of", side_effect=SettingsError("no", "do this")
    ):
        worker = registered(full())
    assert worker.handshake is not None and worker.handshake.refusal == "no (do this)"
