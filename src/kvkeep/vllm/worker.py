"""The worker's side in vLLM: moves this rank's blocks, and says in vLLM's words what came of it.

    begin      before the forward pass: what must be read before it is overwritten, then loads
    finish     after it: stores of what it computed
    collect    what has ended meanwhile; `received`, `failed` and `invalid` are what vLLM asks for then

A failed load is told by its blocks, where vLLM can take a prefix of a load as it is, and otherwise by its request.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from typing import Any

from kvkeep.client.options import CONNECT_PATIENCE_MS, ClientOptions
from kvkeep.client.worker import Finished, WorkerAdapter
from kvkeep.connector.pieces import Pieces
from kvkeep.connector.step import begin, finish
from kvkeep.errors import KVKeepError
from kvkeep.vllm.groups import locate, pieces_of
from kvkeep.vllm.identity import parts_of_all_ranks, shape_of, strategy_of
from kvkeep.vllm.messages import Handshake, Reports, Step
from kvkeep.vllm.stats import KVKeepStats

log = logging.getLogger(__name__)


class WorkerSide:
    """One for each rank."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: ClientOptions) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._adapter: WorkerAdapter | None = None
        self._pieces: Pieces | None = None
        self._loading: dict[Any, str] = {}  # jobs under way, and whose they are
        self._reports: list[Finished] = []
        self.handshake: Handshake | None = None
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.invalid: set[int] = set()

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """vLLM has made the KV memory. From here on blocks move, unless this is no engine that can be cached."""
        try:
            pieces = pieces_of(self._vllm_config, self._kv_cache_config)
            located = locate(pieces, self._kv_cache_config, kv_caches)
            strategy = strategy_of(self._vllm_config, self._kv_cache_config, pieces)
            shape = shape_of(self._vllm_config, pieces, strategy, parts_of_all_ranks(located))
            adapter = WorkerAdapter(shape, strategy, self._options)
            adapter.register_pieces(located)
            adapter.connection.wait_until_up(CONNECT_PATIENCE_MS)
        except KVKeepError as error:
            self.handshake = Handshake(None, f"{error.message} ({error.hint})" if error.hint else error.message)
            return
        self._pieces, self._adapter = pieces, adapter
        self.handshake = Handshake(shape)

    def begin(self, step: Step) -> None:
        for request_id, block_ids in step.lost.items():
            self.received.add(request_id)
            self._tell_failed(request_id, block_ids)
        if self._adapter is None:
            return
        self._loading.update(step.step.requests)
        try:
            begin(step.step, self._adapter)
            if step.all_withdrawn:
                self._adapter.withdraw(None)
        except Exception:  # guard: vLLM waits for loads that were not begun, and stores must not read what is written
            log.exception("kvkeep: a step could not be begun")
            self._adapter.withdraw(None)
            failed: dict[Hashable, list[int]] = {job: load.ids_of(slice(None)) for job, load in step.step.loads.items()}
            for job, block_ids in failed.items():
                request_id = self._loading.pop(job)
                self.received.add(request_id)
                self._tell_failed(request_id, block_ids)
            stores, rank = step.step.stores, self._adapter.strategy.rank
            self._reports.append(Finished(rank, dict.fromkeys(stores, 0), list(stores), list(failed), failed))

    def finish(self, step: Step) -> None:
        if self._adapter is not None:
            finish(step.step, self._adapter)

    def collect(self) -> None:
        """Takes in what has ended. Each load is told once."""
        if self._adapter is None:
            return
        finished = self._adapter.poll()
        for job, block_ids in finished.failed.items():
            if job in self._loading:
                self._tell_failed(self._loading[job], block_ids)
        self.received.update(self._loading.pop(job) for job in finished.loaded if job in self._loading)
        if finished != Finished(finished.rank):
            self._reports.append(finished)

    def take_received(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those of them that failed as a whole."""
        received, failed = self.received, self.failed
        self.received, self.failed = set(), set()
        return received, failed

    def take_invalid(self) -> set[int]:
        invalid, self.invalid = self.invalid, set()
        return invalid

    def take_reports(self) -> Reports | None:
        reports, self._reports = self._reports, []
        return Reports(reports) if reports else None

    def stats(self) -> KVKeepStats | None:
        """What the reports that wait say, in numbers. Before `take_reports`."""
        if self._adapter is None or not self._reports:
            return None
        failed = sum(len(ids) for report in self._reports for ids in report.failed.values())
        return KVKeepStats.of(
            failed_blocks=failed,
            stored_blocks=sum(sum(report.stored.values()) for report in self._reports),
            incomplete_stores=sum(len(report.incomplete) for report in self._reports),
            withdrawn_blocks=sum(report.withdrawn for report in self._reports),
            connected=int(self._adapter.connection.answering),
        )

    def close(self) -> None:
        if self._adapter is not None:
            self._adapter.close()

    def _tell_failed(self, request_id: str, block_ids: list[int]) -> None:
        if self._pieces is None or self._pieces.whole:
            self.invalid.update(block_ids)
        else:
            self.failed.add(request_id)
