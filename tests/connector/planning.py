"""A cache that answers as the test says, and a planner whose requests the test names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.hints import Hints
from kvkeep.client.scheduler import Answer, Lookup
from kvkeep.connector.cost_model import CostModel
from kvkeep.connector.group_layout import CacheGroup, GroupLayout
from kvkeep.connector.planner import CachePlanner
from kvkeep.connector.request_state import RequestState
from kvkeep.connector.step import Job
from kvkeep.kv.checksum import ABSENT
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.wire.messages import RequestReport

BLOCK_TOKENS = 4
LAYOUT = GroupLayout([CacheGroup("full", BLOCK_TOKENS)])


class ScriptedCache:
    """A LookupSide that has the first `blocks` of every prompt, without the parts that `absent`
    says: [block, part]. While `silent`, its answers are on their way."""

    def __init__(self) -> None:
        self.blocks = 0
        self.absent: NDArray[np.bool_] | None = None
        self.silent = False
        self.surely_lacking: set[bytes] = set()
        self.closed = 0
        self.asked: list[tuple[str | None, int, int]] = []  # salt, number of keys, skip
        self.looked_at = 0  # calls of `answer`
        self.lookups: list[Lookup] = []
        self.loaded_tokens = 0
        self.reports: list[RequestReport] = []
        self.finished: list[tuple[str | None, bytes]] = []
        self.coming = 0  # blocks that a tier brings up
        self.waits = False  # for them
        self.waited: list[float | None] = []  # how long at most, each time
        self.prefetched: list[tuple[str | None, int]] = []  # salt, number of keys

    @property
    def released(self) -> int:
        return sum(lookup.is_released for lookup in self.lookups)

    @property
    def leases(self) -> int:
        return len(self.lookups) - self.released

    def lookup(self, salt: str | None, keys: bytes, skip: int = 0, trace: str = "") -> Lookup:
        self.asked.append((salt, len(keys) // KEY_BYTES, skip))
        self.lookups.append(Lookup(salt, keys, skip, trace=trace))
        return self.lookups[-1]

    def answer(self, lookup: Lookup) -> Answer | None:
        self.looked_at += 1
        if lookup.answer is None and not self.silent:
            lookup.answer = self.found(lookup.keys, lookup.skip)
        return lookup.answer

    def found(self, keys: bytes, skip: int) -> Answer:
        blocks = min(self.blocks, len(keys) // KEY_BYTES)
        described = max(0, blocks - skip)
        slots = 1000 + np.arange(skip, skip + described, dtype=np.int64)
        checksums = np.arange(described, dtype=np.uint64).reshape(-1, 1)
        if self.absent is not None:
            numbers = np.arange(self.absent.size, dtype=np.uint64).reshape(self.absent.shape)
            checksums = np.where(self.absent, np.uint64(ABSENT), numbers)[skip:blocks]
        return Answer(blocks, skip, 7, slots, checksums, coming=self.coming, again_ms=5)

    def lacks(self, key: bytes) -> bool:
        return key in self.surely_lacking

    def wait(self, lookup: Lookup, milliseconds: int) -> None:
        """Time does not pass here."""

    def release(self, lookup: Lookup, loaded_tokens: int = 0) -> None:
        assert not lookup.is_released, "each lease is given back once"
        lookup.is_released = True
        self.loaded_tokens += loaded_tokens

    def wait_for_tier(self, lookup: Lookup, most_ms: float | None = None) -> bool:
        self.waited.append(most_ms)
        return self.waits

    def prefetch(self, salt: str | None, keys: bytes) -> None:
        self.prefetched.append((salt, len(keys) // KEY_BYTES))

    def report(self, report: RequestReport, lacked_by: object) -> None:
        self.reports.append(report)

    def finish_conversation(self, salt: str | None, last_key: bytes) -> None:
        self.finished.append((salt, last_key))

    def close(self) -> None:
        self.closed += 1


class Side:
    """A planner and its requests, by the names that a test gives them."""

    def __init__(
        self,
        cache: Any,
        layout: GroupLayout = LAYOUT,
        world_size: int = 1,
        costs: CostModel | None = None,
    ) -> None:
        self.planner = CachePlanner(cache, layout, world_size, costs)
        self.states: dict[str, RequestState] = {}

    def arrive(
        self,
        name: str,
        salt: str | None,
        params: object,
        keys: bytes,
        local_blocks: int = 0,
        *,
        reads: bool = True,
        prompt_blocks: int | None = None,
    ) -> RequestState:
        blocks = len(keys) // KEY_BYTES if prompt_blocks is None else prompt_blocks
        state = RequestState(name, salt, Hints.of(params), bytearray(keys), blocks, reads)
        self.states[name] = state
        self.planner.arrive(state, local_blocks)
        return state

    def extend(self, name: str, keys: bytes) -> None:
        self.states[name].keys += keys

    def lookup(self, name: str, local_blocks: int, limit_blocks: int) -> int | None:
        return self.planner.lookup(self.states[name], local_blocks, limit_blocks)

    def prepare_load(self, name: str, local_blocks: int, block_ids: Any) -> Job:
        return self.planner.prepare_load(self.states[name], local_blocks, block_ids)

    def no_load(self, name: str) -> None:
        self.planner.start_without_load(self.states[name])

    def knows_stored(self, name: str) -> bool:
        return self.planner.knows_stored(self.states[name])

    def prepare_store(
        self, name: str, block_ids: Sequence[int] | Callable[..., Any], blocks: int, **how: bool
    ) -> Job | None:
        return self.planner.prepare_store(self.states[name], block_ids, blocks, **how)

    def hold(self, name: str, blocks: int) -> None:
        self.states[name].hold(blocks)

    def forget(self, name: str) -> None:
        self.planner.forget(self.states[name])

    def end(self, name: str) -> dict[str, int] | None:
        return self.planner.finish_request(self.states.pop(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.planner, name)  # build_step, complete and whatever names no request
