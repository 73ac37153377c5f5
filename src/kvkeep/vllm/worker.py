"""The worker's side in vLLM: moves this rank's blocks, and says in vLLM's words what came of it.

    save       before vLLM writes anything: stores read, or set aside, what may be overwritten
    begin      before the forward pass: loads
    finish     after it: stores of what it computed
    collect    what has ended meanwhile; `received`, `failed` and `invalid` are what vLLM asks for then

A failed load is told by its blocks, where vLLM can take a prefix of a load as it is, and otherwise by its request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvkeep.client.options import CONNECT_PATIENCE_MS, ClientOptions
from kvkeep.client.sources import Piece
from kvkeep.client.worker import Finished, WorkerAdapter
from kvkeep.connector.pieces import Pieces
from kvkeep.connector.step import finish, save
from kvkeep.errors import KVKeepError
from kvkeep.vllm.groups import locate, pieces_of
from kvkeep.vllm.identity import parts_of_all_ranks, shape_of, strategy_of
from kvkeep.vllm.messages import Handshake, Reports, Step
from kvkeep.vllm.stats import KVKeepStats

log = logging.getLogger(__name__)

# vLLM polls an engine that has nothing to compute once a millisecond or two, and hears of a load two polls later.
_IDLE_WAIT_S = 0.008  # a load that ends while vLLM sleeps between two looks is heard of a millisecond late


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
        self._saved: Step | None = None  # the step whose blocks are saved
        self._unfinished: Step | None = None  # the step that is being computed
        self._is_idle = False  # the step computes nothing
        self._rank = 0
        self.faults = 0
        self.handshake: Handshake | None = None
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.invalid: set[int] = set()

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """vLLM has made the KV memory. From here on blocks move, unless this is no engine that can be cached."""
        located: list[Piece] | KVKeepError
        try:
            pieces = pieces_of(self._vllm_config, self._kv_cache_config)
            located = locate(pieces, self._kv_cache_config, kv_caches)
        except KVKeepError as error:
            located = error
        try:
            parts = parts_of_all_ranks(located)  # refused or not: the other ranks wait for us here
            if isinstance(located, KVKeepError):
                raise located
            strategy = strategy_of(self._vllm_config, self._kv_cache_config, pieces)
            shape = shape_of(self._vllm_config, pieces, strategy, parts)
            adapter = WorkerAdapter(shape, strategy, self._options)
            try:
                adapter.register_pieces(located)
            except KVKeepError:
                adapter.close()
                raise
            adapter.connection.wait_until_up(CONNECT_PATIENCE_MS)
        except KVKeepError as error:
            self.handshake = Handshake(None, f"{error.message} ({error.hint})" if error.hint else error.message)
            return
        self._pieces, self._adapter, self._rank = pieces, adapter, strategy.rank
        self.handshake = Handshake(shape)

    def save(self, step: Step) -> None:
        """Before vLLM writes anything: blocks that stores still have to read are saved. Once for each step."""
        if self._adapter is None or self._saved is step:
            return
        self._saved = step
        self.finish()  # not every rank is told by vLLM that a step is over
        try:
            save(step.step, self._adapter)
            if step.all_withdrawn:
                self._adapter.withdraw(None)
        except Exception:  # guard: stores must not read what is written, and the scheduler must hear of them
            log.exception("kvkeep: a step could not be begun")
            self.faults += 1
            self._never_began(step.step.stores)
            self._adapter.withdraw(None)

    def begin(self, step: Step) -> None:
        """Loads begin. `save` comes first, where vLLM has not called for it already."""
        for request_id, block_ids in step.lost.items():
            self.received.add(request_id)
            self._tell_failed(request_id, block_ids)
        if self._adapter is None:
            return
        self.save(step)
        self._unfinished = step
        self._is_idle = step.idle
        for job, load in step.step.loads.items():
            request_id = step.step.requests[job]
            try:
                self._adapter.load(job, load)
                self._loading[job] = request_id
            except Exception:  # guard: vLLM waits for this load; it hears that it failed
                log.exception("kvkeep: a load could not be begun")
                self.faults += 1
                block_ids = load.ids_of(slice(None))
                self.received.add(request_id)
                self._tell_failed(request_id, block_ids)
                self._reports.append(Finished(self._rank, loaded=[job], failed={job: block_ids}))

    def finish(self) -> None:
        """The step is computed: what it computed is stored from now on."""
        step, self._unfinished = self._unfinished, None
        if self._adapter is None or step is None:
            return
        try:
            finish(step.step, self._adapter)
        except Exception:  # guard: the scheduler must hear of these stores, and those that have begun must not read on
            log.exception("kvkeep: stores could not be begun")
            self.faults += 1
            self._never_began(step.step.stores_after)
            self._adapter.withdraw(None)

    def _never_began(self, stores: Mapping[int, Any]) -> None:
        self._reports.append(Finished(self._rank, dict.fromkeys(stores, 0), list(stores)))

    def collect(self) -> None:
        """Takes in what has ended. Each load is told once."""
        if self._adapter is None:
            return
        if self._is_idle and self._loading:
            self._adapter.wait_for_load(_IDLE_WAIT_S)
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
