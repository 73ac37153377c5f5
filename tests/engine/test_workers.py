from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pytest

from kvkeep.client.hints import Hints
from kvkeep.client.requests import Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.connector.cost_model import LoadWhen
from kvkeep.connector.request_state import RequestState
from kvkeep.connector.step import Job, StepMetadata
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.models.model import Segment
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.request import Request
from kvkeep.engine.step import Step
from kvkeep.engine.workers import NO_TOKEN, Workers
from kvkeep.kv.keys import KeyChain, root_key
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.shape import BlockShape
from kvkeep_lab.simulation.oracle import OracleModel

BLOCK_TOKENS = 4
NONE = np.empty(0, dtype=np.int64)
LOAD = LoadRequest("default", b"", 0, NONE, 1, NONE, np.empty((0, 1), dtype=np.uint64))
STORE = StoreRequest("default", b"", b"", NONE)


class FakeCache:
    """One worker's side of a cache. `polls` are its reports, one a poll; then it reports nothing."""

    def __init__(self, strategy: ParallelStrategy) -> None:
        self.strategy = strategy
        self.layers: list[str] = []
        self.begun: list[tuple[str, Hashable]] = []
        self.polls: list[Finished] = []
        self.polled = self.closed = 0

    def register_kv_caches(self, layers: Mapping[str, Any], block_dim: int = 0) -> None:
        self.layers = list(layers)

    def load(self, job: Hashable, request: LoadRequest) -> None:
        self.begun.append(("load", job))

    def store_all(self, requests: Mapping[Any, StoreRequest]) -> None:
        for job, request in requests.items():
            self.store(job, request)

    def store(self, job: Hashable, request: StoreRequest) -> None:
        self.begun.append(("store", job))

    def poll(self) -> Finished:
        self.polled += 1
        return self.polls.pop(0) if self.polls else Finished()

    def close(self) -> None:
        self.closed += 1


class FakeBackend:
    def __init__(self) -> None:
        self.load_when: LoadWhen = "always"
        self.tp_shards: int | None = None
        self.tracing = False
        self.caches: list[FakeCache] = []
        self.shapes: set[BlockShape] = set()

    def lookup_side(self, shape: BlockShape) -> Any:
        raise AssertionError("that is the scheduler's")

    def transfer_side(self, shape: BlockShape, strategy: ParallelStrategy) -> Any:
        self.shapes.add(shape)
        self.caches.append(FakeCache(strategy))
        return self.caches[-1]

    def connect(self) -> None: ...

    def close(self) -> None: ...


REQUEST = RequestState("r", None, Hints(), bytearray(), 0)


def make(model: OracleModel | None = None, **options: Any) -> tuple[Workers, list[FakeCache]]:
    backend = FakeBackend()
    config = EngineConfig(**{"block_tokens": BLOCK_TOKENS, "num_blocks": 16, **options})
    return Workers(model or OracleModel(), config, backend), backend.caches


def step_of(workers: Workers, *blocks: list[int], metadata: StepMetadata | None = None) -> Step:
    """A step that computes the whole prompt of as many requests, each in these blocks."""
    requests, segments = [], []
    for number, block_ids in enumerate(blocks):
        chain = KeyChain(root_key(workers.shape.identity, None), BLOCK_TOKENS)
        request = Request(
            request_id=f"r{number}", tokens=[5 + number] * 6, sampling=SamplingParams(), chain=chain
        )
        requests.append(request)
        segments.append(Segment(request.request_id, None, request.tokens, 0, 6, block_ids))
    return Step(
        segments, requests, {each.request_id: 6 for each in requests}, metadata or StepMetadata()
    )


def test_each_rank_has_its_layers_and_heads_and_its_own_side_of_the_cache() -> None:
    model = OracleModel(num_layers=4, num_kv_heads=4, words=2)
    workers, caches = make(model, tensor_parallel_size=2, pipeline_parallel_size=2)
    layers = [list(rank.kv) for rank in workers.ranks]
    assert layers == [["layers.0", "layers.1"]] * 2 + [["layers.2", "layers.3"]] * 2
    assert [cache.layers for cache in caches] == [list(rank.kv) for rank in workers.ranks]
    assert [cache.strategy for cache in caches] == [rank.strategy for rank in workers.ranks]
    assert [cache.strategy.rank for cache in caches] == [0, 1, 2, 3]
    for rank in workers.ranks:
        for kv in rank.kv.values():
            assert kv.shape == (16, BLOCK_TOKENS, 2, 2) and not kv.any()
    assert workers.shape.shard_bytes == (2 * BLOCK_TOKENS * 2 * 2 * 8,) * 4


@pytest.mark.parametrize(
    ("sizes", "tp", "shards"),
    [({"use_mla": True}, 4, 1), ({"num_kv_heads": 2}, 4, 2), ({"num_kv_heads": 4}, 4, 4)],
)
def test_replicas_are_one_shard_of_the_shape(sizes: dict[str, Any], tp: int, shards: int) -> None:
    workers, caches = make(OracleModel(**sizes), tensor_parallel_size=tp)
    assert len(workers.shape.shard_bytes) == shards
    assert len(caches) == tp and sum(cache.strategy.stores for cache in caches) == shards


def test_uneven_layers_give_each_shard_its_own_size() -> None:
    workers, _ = make(OracleModel(num_layers=3), pipeline_parallel_size=2)
    one_layer = BLOCK_TOKENS * 4 * 2 * 8
    assert workers.shape.shard_bytes == (one_layer, 2 * one_layer)


def test_jobs_begin_on_every_rank_and_every_rank_reports_for_itself() -> None:
    workers, caches = make(tensor_parallel_size=2)
    caches[0].polls = [Finished(stored={2: 1})]
    caches[1].polls = [Finished(loads={1: LoadOutcome(frozenset({3}), seconds=0.5)})]
    output = workers.run(step_of(workers, metadata=StepMetadata({1: LOAD}, {2: STORE})))
    assert [cache.begun for cache in caches] == [[("store", 2), ("load", 1)]] * 2
    assert list(output.reports) == [
        Finished(0, stored={2: 1}),
        Finished(1, loads={1: LoadOutcome(frozenset({3}))}),
    ]
    assert output.reports[1].loads[1].seconds == 0.5, "which makes no report another one"
    assert output.tokens == []


def test_a_step_without_a_cache_reports_nothing() -> None:
    workers = Workers(OracleModel(), EngineConfig(block_tokens=BLOCK_TOKENS, num_blocks=16))
    output = workers.run(step_of(workers, [1, 2]))
    assert len(output.tokens) == 1 and list(output.reports) == []
    workers.close()


def test_tokens_are_those_of_the_model_in_the_order_of_the_segments() -> None:
    workers, _ = make()
    [one], [two] = (workers.run(step_of(workers, blocks)).tokens for blocks in ([1, 2], [3, 4]))
    assert one == two, "the same prompt in other blocks"
    both = workers.run(step_of(workers, [5, 6], [7, 8])).tokens
    assert both[0] == one and len(both) == 2


def test_an_asynchronous_load_is_not_waited_for() -> None:
    workers, caches = make()
    output = workers.run(step_of(workers, metadata=StepMetadata({1: LOAD})))
    assert caches[0].polled == 1 and list(output.reports) == [Finished()]


def test_a_synchronous_load_is_waited_for_on_every_rank() -> None:
    workers, caches = make(tensor_parallel_size=2, sync_loads=True)
    done, other, none = (
        Finished(loads={1: LoadOutcome()}),
        Finished(loads={7: LoadOutcome()}),
        Finished(),
    )
    caches[0].polls = [done, none, none, Finished(stored={9: 1})]
    caches[1].polls = [none, Finished(stored={8: 2}), done, other]
    output = workers.run(step_of(workers, metadata=StepMetadata({1: LOAD})))
    assert list(output.reports) == [
        Finished(0, loads={1: LoadOutcome()}, stored={9: 1}),
        Finished(1, loads={1: LoadOutcome(), 7: LoadOutcome()}, stored={8: 2}),
    ], "nothing that was said meanwhile is lost"


def test_whoever_stands_on_blocks_that_failed_just_now_is_not_computed() -> None:
    workers, caches = make(tensor_parallel_size=2, sync_loads=True)
    caches[0].polls = [Finished(loads={1: LoadOutcome()})]
    caches[1].polls = [Finished(loads={1: LoadOutcome(frozenset({4}))})]
    output = workers.run(step_of(workers, [1, 2], [3, 4], [5, 6], metadata=StepMetadata({1: LOAD})))
    assert [token == NO_TOKEN for token in output.tokens] == [False, True, False]
    for rank in workers.ranks:
        assert not rank.kv["layers.0"][3:5].any(), "nothing was written on bad ground"
    caches[0].polls = [Finished(loads={2: LoadOutcome(frozenset({1}))})]
    caches[1].polls = [Finished(loads={2: LoadOutcome()})]
    output = workers.run(step_of(workers, [1, 2], metadata=StepMetadata({2: LOAD})))
    assert output.tokens == [NO_TOKEN]


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_a_report_outlives_a_step_that_failed(failing_model: Any, sync: bool) -> None:
    """A worker reports a job once. Without the report the job would never end, nor the hold on its
    blocks."""
    workers, caches = make(failing_model, tensor_parallel_size=2, sync_loads=sync)
    failing_model.fail_at = 1
    for cache in caches:
        cache.polls = [Finished(loads={1: LoadOutcome(frozenset({9}))}, stored={5: 1})]
    with pytest.raises(RuntimeError):
        workers.run(step_of(workers, [1, 2], metadata=StepMetadata({1: LOAD})))
    output = workers.run(step_of(workers))
    expected = [
        Finished(rank, loads={1: LoadOutcome(frozenset({9}))}, stored={5: 1}) for rank in range(2)
    ]
    assert list(output.reports) == expected
    assert list(workers.run(step_of(workers)).reports) == expected, "they were not taken in yet"
    workers.forget_reports()
    assert list(workers.run(step_of(workers)).reports) == [Finished(0), Finished(1)]


def test_jobs_that_have_not_begun_are_given_up_where_they_have_not() -> None:
    workers, caches = make(tensor_parallel_size=2)
    jobs = [
        Job(1, REQUEST, 0, [3, 4], True),
        Job(2, REQUEST, 0, [5], False),
        Job(3, REQUEST, 0, [6], True, reports={0}),
    ]
    caches[0].polls = [Finished(loads={3: LoadOutcome()})]
    workers.run(step_of(workers, metadata=StepMetadata({3: LOAD})))
    workers.forget_reports()

    def no_memory(job: Hashable, request: LoadRequest) -> None:
        raise MemoryError

    caches[1].load = no_memory  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        workers.run(step_of(workers, metadata=StepMetadata({1: LOAD}, {2: STORE})))
    for _ in range(2):  # the second time there is no more to give up
        workers.give_up(jobs)
    lost = Finished(1, loads={1: LoadOutcome(frozenset({3, 4}))})
    reports = list(workers.run(step_of(workers)).reports)
    assert reports == [Finished(0), lost], "rank 1 is at jobs 2 and 3"
    workers.give_up([Job(9, REQUEST, 0, [7], False)])  # a step was lost before any rank had it
    assert [each.incomplete for each in workers.run(step_of(workers)).reports] == [[9], [9]]


def test_an_interrupted_call_counts_as_begun() -> None:
    """Nobody knows whether it was: what it may write into must not be anybody else's."""
    workers, caches = make()

    def interrupted(job: Hashable, request: LoadRequest) -> None:
        raise KeyboardInterrupt

    caches[0].load = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        workers.run(step_of(workers, metadata=StepMetadata({1: LOAD})))
    workers.give_up([Job(1, REQUEST, 0, [3], True)])
    assert list(workers.run(step_of(workers)).reports) == [Finished(0)]


def test_nothing_is_kept_of_jobs_that_have_ended() -> None:
    workers, caches = make()
    caches[0].polls = [Finished(loads={1: LoadOutcome()}, stored={2: 1})]
    workers.run(step_of(workers, metadata=StepMetadata({1: LOAD}, {2: STORE})))
    workers.forget_reports()
    workers.give_up([Job(1, REQUEST, 0, [3], True), Job(2, REQUEST, 0, [5], False)])
    [report] = workers.run(step_of(workers)).reports
    assert (report.failed_blocks, report.incomplete) == ({3}, [2]), "neither is under way"


def test_close_closes_every_side() -> None:
    workers, caches = make(tensor_parallel_size=4)
    workers.close()
    assert [cache.closed for cache in caches] == [1, 1, 1, 1]
