"""What is known of one request: the engine makes it and shares it with the planner.

    blocks of the request   |0 1 2 3|4 5 6 7 8|9 10 11|12 …
                             local   extra     computed here
                             └─ in the engine's own prefix cache
                                     └─ in the server as well: loaded

What the cache gave a request (`extra_cached_tokens`) is counted in full blocks of its prompt. A
block counts if it was loaded from the server before the request had it from anywhere else. It does
not count if

- the engine's own prefix cache had the block, now or before a preemption;
- the request computed the block, and loaded it again after a preemption;
- its load failed, so that it was computed;
- it holds generated tokens, or the last token of the prompt, which is always computed.

Without failures that is `max(0, external hits - local hits)` blocks.

Every full block before the prompt's last token has one outcome (kvkeep.kv.outcomes): it was in
the engine's own cache, was loaded, or was computed for a reason. A block that the request had at
some time keeps its outcome."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.calls import Call
from kvkeep.client.hints import Hints
from kvkeep.client.requests import LoadRequest
from kvkeep.client.scheduler import Answer, Lookup
from kvkeep.connector.request_trace import UNTRACED, RequestTrace
from kvkeep.errors import RequestError
from kvkeep.kv import outcomes
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.wire.messages import MAX_LOOKUPS

log = logging.getLogger(__name__)


@dataclass(eq=False)
class RequestState:
    """Lives from the request's arrival until it has finished and its last job has ended.

    keys            of all full blocks known so far; the engine appends those of new blocks
    prompt_blocks   full blocks before the last token of the prompt: what the server can give
    reads           False if nothing is loaded: the request must not read from a cache, a load has
                    failed, or its salt is invalid
    writes          False if nothing is stored (any more)
    stored          leading blocks that the server has, as far as known: they need no store
    retry_from      a store was incomplete: all blocks are offered again once this many are computed
    held            leading blocks that the request has had at some time: found, loaded or computed
    loaded          prompt blocks that it had from the server before it had them otherwise
    outcomes        the outcome of each of its prompt blocks, by number
    lacked_by       the first lookups whose answers lacked some of its blocks
    arrived_s       when it came, by the process's clock
    prompt_s        how long it took until it had all blocks of its prompt; None: it has not yet
    load_s          how long its loads took; None: one of them was not measured
    prompt_tokens, tokens, adapter
                    of the prompt, for reports: its length, its tokens, the name of its adapter
    trace_headers   the trace that the engine's request is part of, as HTTP headers name it
    trace           the request's spans
    accepted_after  a load of what follows this many blocks was decided on
    declined_after  a load of what follows this many blocks was decided against
    skipped         blocks that the server has and that are computed for that reason
    """

    request_id: str
    salt: str | None
    hints: Hints
    keys: bytearray
    prompt_blocks: int
    reads: bool = True
    writes: bool = True
    lookup: Lookup | None = None
    accepted_after: int | None = None
    declined_after: int | None = None
    skipped: int = 0
    held: int = 0
    loaded: int = 0
    stored: int = 0
    retry_from: int = 0
    jobs: int = 0  # loads and stores that workers have not reported yet
    loads: int = 0  # of those; they read under the lease of `lookup`
    finished: bool = False
    lacked_by: list[Call] = field(default_factory=list)
    prompt_s: float | None = None
    load_s: float | None = 0.0
    prompt_tokens: int = 0
    tokens: Sequence[int] = ()
    adapter: str = ""
    trace_headers: Mapping[str, str] | None = None
    trace: RequestTrace = UNTRACED
    tenant: str = field(init=False)  # "" if the salt is invalid
    outcomes: bytearray = field(init=False)
    arrived_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.outcomes = bytearray(self.prompt_blocks)
        self.arrived_s = time.monotonic()
        try:
            self.tenant = tenant_of(self.salt)
        except RequestError as error:
            log.warning("kvkeep: a request is served without the cache: %s", error)
            self.tenant = ""
            self.reads = self.writes = False

    @property
    def num_blocks(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.arrived_s

    @property
    def answer(self) -> Answer | None:
        """What the planner has taken in of the lookup's answer."""
        return self.lookup.answer if self.lookup is not None else None

    def key(self, block: int) -> bytes:
        """The key of one block; b"" for the one before the first."""
        return self.keys_of(block, block + 1) if block >= 0 else b""

    def keys_of(self, start: int, stop: int) -> bytes:
        return bytes(self.keys[start * KEY_BYTES : stop * KEY_BYTES])

    def load_request(self, start: int, table: NDArray[np.int64]) -> LoadRequest:
        """Loads what the answer describes from block `start` on, into the blocks of the table."""
        stop, answer = start + table.shape[1], self.answer
        assert answer is not None and stop <= answer.blocks
        described = slice(start - answer.skip, stop - answer.skip)
        return LoadRequest(
            self.tenant,
            self.keys_of(0, stop),
            start,
            table.squeeze(0) if len(table) == 1 else table,
            answer.epoch,
            answer.slots[described],
            answer.checksums[described],
        )

    def slots(self, start: int, count: int) -> tuple[int, NDArray[np.int64]]:
        """Where the server has `count` blocks from `start` on: its epoch and their slots."""
        assert self.answer is not None
        return self.answer.epoch, self.answer.slots[start - self.answer.skip :][:count]

    def hold(self, blocks: int) -> None:
        """The request has its first `blocks` blocks, from the engine's own cache or computed. Both
        engines call this when a request begins and whenever more of its prompt is computed: a load
        of these blocks after a preemption counts as nothing given."""
        self.held = max(self.held, blocks)
        if self.prompt_s is None and self.held >= self.prompt_blocks:
            self.prompt_s = self.age_s

    def hold_local(self, blocks: int) -> None:
        """The request begins, and the engine's own cache has its first `blocks` blocks."""
        self.settle(0, blocks, outcomes.LOCAL)
        self.hold(blocks)

    def count_loaded(self, stop: int) -> None:
        """The request has its blocks before `stop`; those that it did not have came from the
        server."""
        self.loaded += max(0, min(stop, self.prompt_blocks) - self.held)
        self.settle(0, stop, outcomes.LOADED)
        self.hold(stop)

    def settle(self, start: int, stop: int, outcome: int) -> None:
        """Notes the outcome of blocks start..stop-1, but for those that the request had before."""
        start, stop = max(start, self.held), min(stop, self.prompt_blocks)
        if start < stop:
            self.outcomes[start:stop] = bytes((outcome,)) * (stop - start)

    def lack(self, start: int) -> None:
        """The server lacks the blocks from `start` on, by its answer to the lookup."""
        self.settle(start, self.prompt_blocks, outcomes.LACKED)
        lookup, most = self.lookup, MAX_LOOKUPS
        if lookup is not None and lookup.call not in self.lacked_by and len(self.lacked_by) < most:
            self.lacked_by.append(lookup.call)
