"""What an engine has of kvkeep, a scheduler and a worker, and how long its stores and loads take.

A store's time begins when the worker is given the blocks, a load's with the scheduler's question, and each ends when a
poll tells so. What did not come through whole raises: a part of a transfer has no speed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.options import ClientOptions
from kvkeep.client.requests import LoadRequest, StoreRequest
from kvkeep.client.scheduler import Answer, SchedulerAdapter
from kvkeep.client.worker import WorkerAdapter
from kvkeep.errors import Unavailable
from kvkeep.kv.identity import DEFAULT_TENANT, ModelIdentity
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.shape import BlockShape

BlockIds = NDArray[np.int64]

_CONNECT_S = 20


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
    """A scheduler and a worker with sessions of their own, and the KV in `layers`: block_bytes a block in all of them
    together. An engine polls once a step; `poll_s` is how long a step takes here."""

    def __init__(
        self,
        address: str,
        layers: Mapping[str, Any],
        block_bytes: int,
        verify: bool,
        poll_s: float,
        dtype: str = "uint8",
    ) -> None:
        layout = f"bench {block_bytes}"
        identity = ModelIdentity(model="bench", revision="1", kv_dtype=dtype, block_tokens=16, layout=layout)
        shape = BlockShape(identity, (block_bytes,))
        options = ClientOptions(address=address, verify=verify, store_deadline_ms=60_000)
        self._poll_s = poll_s
        self.scheduler = SchedulerAdapter(shape, options)
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
                raise Unavailable(f"no session with {address}: {self.worker.connection.refusal}")
            time.sleep(0.01)

    def store(self, keys: bytes, block_ids: BlockIds) -> float:
        """Seconds until all blocks are stored."""
        started = time.perf_counter()
        self._begin_store(keys, block_ids)
        ended = self._wait(_Ended(), stores=1)
        seconds = time.perf_counter() - started
        self._check_stored(ended, len(block_ids))
        return seconds

    def load(self, keys: bytes, block_ids: BlockIds) -> LoadTime:
        """The time until all blocks are found and loaded."""
        started = time.perf_counter()
        answer = self._lookup(keys)
        asked = time.perf_counter()
        self._begin_load(keys, block_ids, answer)
        ended = self._wait(_Ended(), loads=1)
        done = time.perf_counter()
        self.scheduler.release("load")
        self._check_loaded(ended, answer, len(block_ids))
        return LoadTime(done - started, asked - started)

    def both(self, store_keys: bytes, store_ids: BlockIds, load_keys: bytes, load_ids: BlockIds) -> float:
        """Seconds until a store and a load of the same worker have both ended, begun together."""
        started = time.perf_counter()
        self._begin_store(store_keys, store_ids)
        answer = self._lookup(load_keys)
        self._begin_load(load_keys, load_ids, answer)
        ended = self._wait(_Ended(), stores=1, loads=1)
        seconds = time.perf_counter() - started
        self.scheduler.release("load")
        self._check_stored(ended, len(store_ids))
        self._check_loaded(ended, answer, len(load_ids))
        return seconds

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()

    # -- the steps of it

    def _begin_store(self, keys: bytes, block_ids: BlockIds) -> None:
        self.worker.store("store", StoreRequest(DEFAULT_TENANT, b"", keys, block_ids))

    def _lookup(self, keys: bytes) -> Answer:
        while (answer := self.scheduler.lookup("load", None, keys)) is None:
            time.sleep(self._poll_s)
        if answer.blocks != len(keys) // KEY_BYTES:
            self.scheduler.release("load")
            raise Unavailable(
                f"{answer.blocks} of {len(keys) // KEY_BYTES} blocks found: {answer.failure or 'no room'}"
            )
        return answer

    def _begin_load(self, keys: bytes, block_ids: BlockIds, answer: Answer) -> None:
        self.worker.load(
            "load", LoadRequest(DEFAULT_TENANT, keys, 0, block_ids, answer.epoch, answer.slots, answer.checksums)
        )

    def _wait(self, ended: _Ended, stores: int = 0, loads: int = 0) -> _Ended:
        while True:
            finished = self.worker.poll()
            ended.stored.update(finished.stored)
            ended.loaded.update({job: len(finished.failed.get(job, ())) for job in finished.loaded})
            if len(ended.stored) >= stores and len(ended.loaded) >= loads:
                return ended
            time.sleep(self._poll_s)

    def _check_stored(self, ended: _Ended, blocks: int) -> None:
        if ended.stored["store"] != blocks:
            raise Unavailable(f"{ended.stored['store']} of {blocks} blocks stored: {self._why()}")

    def _check_loaded(self, ended: _Ended, answer: Answer, blocks: int) -> None:
        if ended.loaded["load"] or answer.blocks != blocks:
            raise Unavailable(f"{answer.blocks} of {blocks} blocks hit, {ended.loaded['load']} failed: {self._why()}")

    def _why(self) -> str:
        return f"{self.worker.connection.counters.failures} {self.worker.connection.refusal}"
