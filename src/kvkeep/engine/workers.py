"""The workers: ranks with their shards of the KV, and the model that runs over them.

All ranks live in this process and share the model's weights, which keeps the engine small. What is
really spread over them, as in a large engine, is the KV: each has tensors of its own with its
layers and its heads, and its own side of the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from kvkeep.client.requests import Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.connector.step import Job, StepMetadata, TransferSide, begin
from kvkeep.engine.backends import CacheBackend
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.models.model import Model, Rank
from kvkeep.engine.models.sampling import sample
from kvkeep.engine.recovery import spread
from kvkeep.engine.step import Step, StepOutput
from kvkeep.errors import SettingsError
from kvkeep.kv.shape import BlockShape

NO_TOKEN = -1
_SYNC_LOAD_POLL_S = 0.0001


class _Side:
    """One rank's side of the cache: the jobs that it is at, and what it said that nobody has taken
    in yet."""

    def __init__(self, rank: int, cache: TransferSide) -> None:
        self._cache = cache
        self._under_way: set[Hashable] = set()
        self.report = Finished(rank)

    def withdraw(self, block_ids: Sequence[int] | None) -> None:
        self._cache.withdraw(block_ids)

    def store_all(self, requests: Mapping[Any, StoreRequest]) -> None:
        self._begin(requests, lambda: self._cache.store_all(requests))

    def load(self, job: Hashable, request: LoadRequest) -> None:
        self._begin([job], lambda: self._cache.load(job, request))

    def _begin(self, jobs: Collection[Hashable], begin_jobs: Callable[[], None]) -> None:
        self._under_way.update(jobs)
        try:
            begin_jobs()
        except Exception:
            # guard: after an interrupt the jobs may have begun, so their blocks must not be given
            # to others; every other error comes before a job begins
            self._under_way.difference_update(jobs)
            raise

    def poll(self) -> None:
        finished, report = self._cache.poll(), self.report
        report.stored.update(finished.stored)
        report.incomplete.extend(finished.incomplete)
        report.loads.update(finished.loads)
        report.times.update(finished.times)
        self._under_way.difference_update(finished.stored, finished.loads)

    def give_up(self, job: Job) -> None:
        """Reports a job as undone that has not begun here."""
        report, number = self.report, job.number
        if (
            number in self._under_way
            or number in (*report.loads, *report.stored)
            or report.rank in job.reports
        ):
            return
        if job.is_load:
            report.loads[number] = LoadOutcome(frozenset(job.block_ids))
        else:
            report.incomplete.append(number)
            report.stored[number] = 0


def shape_of(model: Model, ranks: Sequence[Rank], num_blocks: int, block_tokens: int) -> BlockShape:
    """What a model's blocks are, and how these ranks, each with KV for `num_blocks`, divide
    them."""
    shard_bytes = {}
    for rank in ranks:
        nbytes = sum(kv.nbytes for kv in rank.kv.values()) // num_blocks
        shards = rank.strategy.shards
        shard_bytes.update(dict.fromkeys(shards, nbytes // len(shards)))
    sizes = tuple(shard_bytes[shard] for shard in sorted(shard_bytes))
    return BlockShape(model.identity(block_tokens), sizes, cut=ranks[0].strategy.cut)


class Workers:
    """Runs steps. `ranks` hold the KV."""

    def __init__(
        self, model: Model, config: EngineConfig, backend: CacheBackend | None = None
    ) -> None:
        self.model = model
        self._config = config
        tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
        tp_shards = None if backend is None else backend.tp_shards
        strategies = [
            model.strategy(tp_size, pp_size, rank).cut_into(tp_shards, model.num_kv_heads)
            for rank in range(config.world_size)
        ]
        try:
            self.ranks = [
                Rank(strategy, model.allocate_kv(strategy, config.num_blocks, config.block_tokens))
                for strategy in strategies
            ]
        except (RuntimeError, MemoryError, TypeError, OverflowError) as error:
            # torch's words for too much
            problem = f"there is no memory for num_blocks = {config.num_blocks:.6g}: {error}"
            raise SettingsError(problem.partition("\n")[0], "lower num_blocks") from None
        self.shape = shape_of(model, self.ranks, config.num_blocks, config.block_tokens)
        self._caches: list[TransferSide] = []
        if backend is not None:
            self._caches = [backend.transfer_side(self.shape, rank.strategy) for rank in self.ranks]
            for cache, rank in zip(self._caches, self.ranks, strict=True):
                cache.register_kv_caches(rank.kv)
        self._sides = [_Side(rank, cache) for rank, cache in enumerate(self._caches)]

    def run(self, step: Step) -> StepOutput:
        """Begins the step's jobs, computes its segments, and reports the jobs that have ended by
        now."""
        for side in self._sides:
            begin(step.metadata, side)
        if self._config.sync_loads:
            self._wait_for_loads(step.metadata)
        bad = {block for side in self._sides for block in side.report.failed_blocks}
        tokens = self._compute(step, bad)
        self._poll()
        return StepOutput(tokens, [side.report for side in self._sides])

    def forget_reports(self) -> None:
        """The reports of the last step were taken in. A worker says it once: until then they belong
        to the next one."""
        for side in self._sides:
            side.report = Finished(side.report.rank)

    def give_up(self, jobs: Iterable[Job]) -> None:
        """A step has failed, and perhaps before all of these were begun on every rank. Those that
        were not end with the next step, as failed loads and incomplete stores."""
        for job in jobs:
            for side in self._sides:
                side.give_up(job)

    def _compute(self, step: Step, bad_blocks: set[int]) -> list[int]:
        """A token for each segment. One that stands on blocks which failed to load just now is not
        computed: the scheduler will not take its token."""
        sound: Sequence[int] = range(len(step.segments))
        if bad_blocks:
            bad_blocks = spread(step.segments, bad_blocks, self._config.block_tokens)
            sound = [at for at in sound if bad_blocks.isdisjoint(step.segments[at].block_ids)]
        tokens = [NO_TOKEN] * len(step.segments)
        if not sound:
            return tokens
        with torch.inference_mode():
            segments = [step.segments[at] for at in sound]
            logits = self.model.forward(segments, self.ranks, self._config.block_tokens)
        for at, row in zip(sound, logits, strict=True):
            segment = step.segments[at]
            tokens[at] = sample(row, step.requests[at].sampling, segment.start + segment.count)
        return tokens

    def close(self) -> None:
        for cache in self._caches:
            cache.close()

    def _wait_for_loads(self, metadata: StepMetadata) -> None:
        """Workers report every load, sooner or later: each has its deadlines."""
        while any(not metadata.loads.keys() <= side.report.loads.keys() for side in self._sides):
            self._poll()
            time.sleep(_SYNC_LOAD_POLL_S)

    def _poll(self) -> None:
        for side in self._sides:
            side.poll()
