"""The workers: ranks with their shards of the KV, and the model that runs over them.

All ranks live in this process and share the model's weights, which keeps the engine small. What is really spread over
them, as in a large engine, is the KV: each has tensors of its own with its layers and its heads, and its own side of
the cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kvkeep.client.worker import Finished
from kvkeep.connector.step import StepMetadata, TransferSide, begin
from kvkeep.engine.backends import CacheBackend
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.models.model import Model, Rank
from kvkeep.engine.models.sampling import sample
from kvkeep.engine.recovery import spread
from kvkeep.engine.scheduler import Step, StepOutput
from kvkeep.errors import SettingsError
from kvkeep.kv.shape import BlockShape

NO_TOKEN = -1
_SYNC_LOAD_POLL_S = 0.0001


class Workers:
    """Runs steps. `ranks` hold the KV."""

    def __init__(self, model: Model, config: EngineConfig, backend: CacheBackend | None = None) -> None:
        self.model = model
        self._config = config
        tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
        strategies = [model.strategy(tp_size, pp_size, rank) for rank in range(config.world_size)]
        try:
            self.ranks = [
                Rank(strategy, model.allocate_kv(strategy, config.num_blocks, config.block_tokens))
                for strategy in strategies
            ]
        except (RuntimeError, MemoryError, TypeError, OverflowError) as error:  # torch's words for too much
            problem = f"there is no memory for num_blocks = {config.num_blocks:.6g}: {error}"
            raise SettingsError(problem.partition("\n")[0], "lower num_blocks") from None
        shard_bytes = {
            rank.strategy.kv_rank: sum(kv.nbytes for kv in rank.kv.values()) // config.num_blocks for rank in self.ranks
        }
        self.shape = BlockShape(
            model.identity(strategies[0], config.block_tokens), tuple(shard_bytes[r] for r in sorted(shard_bytes))
        )
        self._reports: list[Finished] = []
        self._caches: list[TransferSide] = []
        if backend is not None:
            self._caches = [backend.transfer_side(self.shape, rank.strategy) for rank in self.ranks]
            for cache, rank in zip(self._caches, self.ranks, strict=True):
                cache.register_kv_caches(rank.kv)
            self._reports = self._no_reports()

    def run(self, step: Step) -> StepOutput:
        """Begins the step's jobs, computes its segments, and reports the jobs that have ended by now."""
        for cache in self._caches:
            begin(step.metadata, cache)
        if self._config.sync_loads:
            self._wait_for_loads(step.metadata)
        bad = {block for report in self._reports for block_ids in report.failed.values() for block in block_ids}
        tokens = self._compute(step, bad)
        self._poll()
        # Taken only now: a worker says it once, and the reports of a step that fails belong to the next one.
        reports, self._reports = self._reports, self._no_reports()
        return StepOutput(tokens, reports)

    def _compute(self, step: Step, bad_blocks: set[int]) -> list[int]:
        """A token for each segment. One that stands on blocks which failed to load just now is not computed: the
        scheduler will not take its token."""
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

    def _no_reports(self) -> list[Finished]:
        return [Finished(rank) for rank in range(len(self._caches))]

    def close(self) -> None:
        for cache in self._caches:
            cache.close()

    def _wait_for_loads(self, metadata: StepMetadata) -> None:
        """Workers report every load, sooner or later: each has its deadlines."""
        while any(not metadata.loads.keys() <= set(report.loaded) for report in self._reports):
            self._poll()
            time.sleep(_SYNC_LOAD_POLL_S)

    def _poll(self) -> None:
        for cache, report in zip(self._caches, self._reports, strict=True):
            finished = cache.poll()
            report.stored.update(finished.stored)
            report.incomplete.extend(finished.incomplete)
            report.loaded.extend(finished.loaded)
            for job, block_ids in finished.failed.items():
                report.failed.setdefault(job, []).extend(block_ids)
