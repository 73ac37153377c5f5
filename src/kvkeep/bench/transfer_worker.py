"""What an engine has of kvkeep, a scheduler and a worker, and how long its stores and loads take.

A store's time begins when the worker is given the blocks, a load's with the scheduler's question,
and each ends when a poll tells so. What did not come through whole raises: a part of a transfer has
no speed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.options import ClientOptions
from kvkeep.client.requests import LoadRequest, StoreRequest
from kvkeep.client.scheduler import Lookup, SchedulerAdapter
from kvkeep.client.worker import WorkerAdapter
from kvkeep.errors import Unavailable
from kvkeep.kv.identity import DEFAULT_TENANT, ModelIdentity
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.shape import BlockShape

BlockIds = NDArray[np.int64]

_CONNECT_S = 20
_LOOK_S = 0.01


@dataclass(frozen=True)
class LoadTime:
    """The question's part of it is in `seconds` too."""

    seconds: float
    lookup_seconds: float


@dataclass
class _Ended:
    """What polls have told so far: job -> blocks written, and job -> blocks that failed."""

    stored: dict[Any, int] = field(default_factory=dict)
    loaded: dict[Any, int] = field(default_factory=dict)


class EngineSide:
    """A scheduler and a worker with sessions of their own, and the KV in `layers`: block_bytes a
    block in all of them together. An engine polls once a step; `poll_s` is how long a step takes
    here. `request_blocks` is how many blocks a request has; 0: all are one request's."""

    def __init__(
        self,
        address: str,
        layers: Mapping[str, Any],
        block_bytes: int,
        verify: bool,
        poll_s: float,
        dtype: str = "uint8",
        request_blocks: int = 0,
    ) -> None:
        layout = f"bench {block_bytes}"
        identity = ModelIdentity(
            model="bench", revision="1", kv_dtype=dtype, block_tokens=16, content=layout
        )
        shape = BlockShape(identity, (block_bytes,))
        options = ClientOptions(
            address=address, verify=verify, lookup_deadline_ms=10_000, store_deadline_ms=60_000
        )
        self._poll_s = poll_s
        self._request_blocks = request_blocks
        self.scheduler = SchedulerAdapter(shape, options)
        self._lookups: dict[str, Lookup] = {}  # by job
        self.worker = WorkerAdapter(shape, ParallelStrategy.of(), options)
        try:
            self.worker.register_kv_caches(layers)
            self._wait_for_sessions(address)
        except BaseException:  # guard: whatever it is, no thread and no session stays behind
            self.close()
            raise

    def _wait_for_sessions(self, address: str) -> None:
        deadline = time.monotonic() + _CONNECT_S
        while not (self.scheduler.connection.up and self.worker.connection.up):
            if time.monotonic() > deadline:
                why = self.worker.connection.refusal or "nobody answers there"
                raise Unavailable(f"no session with {address}: {why}")
            time.sleep(0.01)

    def store(self, keys: bytes, block_ids: BlockIds) -> float:
        """Seconds until all blocks are stored."""
        stores = self._stores(keys, block_ids)
        started = time.perf_counter()
        jobs = self._begin_stores(stores)
        ended = self._wait(_Ended(), stores=len(jobs))
        seconds = time.perf_counter() - started
        self._check_stored(ended, jobs)
        return seconds

    def load(self, keys: bytes, block_ids: BlockIds) -> LoadTime:
        """The time until all blocks are found and loaded."""
        started = time.perf_counter()
        first_found, jobs = self._find_and_load(keys, block_ids)
        ended = self._wait(_Ended(), loads=len(jobs))
        done = time.perf_counter()
        self._check_loaded(ended, jobs)
        return LoadTime(done - started, first_found - started)

    def both(
        self, store_keys: bytes, store_ids: BlockIds, load_keys: bytes, load_ids: BlockIds
    ) -> float:
        """Seconds until a store and a load of the same worker have both ended, begun together."""
        requests = self._stores(store_keys, store_ids)
        started = time.perf_counter()
        stores = self._begin_stores(requests)
        _, loads = self._find_and_load(load_keys, load_ids)
        ended = self._wait(_Ended(), stores=len(stores), loads=len(loads))
        seconds = time.perf_counter() - started
        self._check_stored(ended, stores)
        self._check_loaded(ended, loads)
        return seconds

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()

    # -- the steps of it

    def _requests(self, keys: bytes, block_ids: BlockIds) -> dict[str, tuple[bytes, BlockIds]]:
        """Job -> keys and blocks; every request begins a prompt of its own."""
        each = self._request_blocks or len(block_ids)
        return {
            f"request {start}": (
                keys[start * KEY_BYTES : (start + each) * KEY_BYTES],
                block_ids[start : start + each],
            )
            for start in range(0, len(block_ids), each)
        }

    def _stores(self, keys: bytes, block_ids: BlockIds) -> dict[str, StoreRequest]:
        """As an engine's scheduler makes them, before its worker is given any."""
        requests = self._requests(keys, block_ids)
        return {
            job: StoreRequest(DEFAULT_TENANT, b"", some, ids)
            for job, (some, ids) in requests.items()
        }

    def _begin_stores(self, stores: Mapping[str, StoreRequest]) -> dict[str, int]:
        """Job -> blocks."""
        self.worker.store_all(stores)
        return {job: store.blocks for job, store in stores.items()}

    def _find_and_load(self, keys: bytes, block_ids: BlockIds) -> tuple[float, dict[str, int]]:
        """Asks for all at once and begins each load when its answer is there. When the first one
        was; job -> blocks."""
        requests = self._requests(keys, block_ids)
        asked: list[str] = []
        first_found = 0.0
        to_ask = list(requests)
        while to_ask or asked:
            if to_ask:
                job = to_ask.pop(0)
                asked.append(job)
                self._lookups[job] = self.scheduler.lookup(None, requests[job][0])
            else:
                self.scheduler.wait(self._lookups[asked[0]], 1)
            for job in list(asked):
                some, ids = requests[job]
                answer = self.scheduler.answer(self._lookups[job])
                if answer is None:
                    break
                first_found = first_found or time.perf_counter()
                if answer.blocks != len(ids):
                    self._release(requests)
                    raise Unavailable(
                        f"{answer.blocks} of {len(ids)} blocks found: {answer.failure or 'no room'}"
                    )
                load = LoadRequest(
                    DEFAULT_TENANT, some, 0, ids, answer.epoch, answer.slots, answer.checksums
                )
                self.worker.load(job, load)
                asked.remove(job)
        return first_found, {job: len(ids) for job, (_, ids) in requests.items()}

    def _wait(self, ended: _Ended, stores: int = 0, loads: int = 0) -> _Ended:
        while True:
            finished = self.worker.poll()
            ended.stored.update(finished.stored)
            ended.loaded.update({job: len(end.failed) for job, end in finished.loads.items()})
            if len(ended.stored) >= stores and len(ended.loaded) >= loads:
                return ended
            if len(ended.stored) >= stores:
                self.worker.wait_for_load(_LOOK_S)  # as an engine does that has nothing to compute
            else:
                time.sleep(self._poll_s)

    def _release(self, jobs: Iterable[str]) -> None:
        for job in jobs:
            if lookup := self._lookups.pop(job, None):
                self.scheduler.release(lookup)

    def _check_stored(self, ended: _Ended, jobs: Mapping[str, int]) -> None:
        stored, blocks = sum(ended.stored.values()), sum(jobs.values())
        if stored != blocks:
            raise Unavailable(f"{stored} of {blocks} blocks stored: {self._why()}")

    def _check_loaded(self, ended: _Ended, jobs: Mapping[str, int]) -> None:
        self._release(jobs)
        failed = sum(ended.loaded.values())
        if failed:
            raise Unavailable(
                f"{failed} of {sum(jobs.values())} blocks could not be loaded: {self._why()}"
            )

    def _why(self) -> str:
        return f"{self.worker.connection.counters.failures} {self.worker.connection.refusal}"
