"""What the scheduler's side remembers of one request.

    blocks of the request   |0 1 2 3|4 5 6 7 8|9 10 11|12 …
                             local   extra     computed here
                             └─ what the engine's own prefix cache had
                                     └─ what the server had beyond it: loaded
    stored                  blocks that the server has, as far as we know: the first ones need no store

What the cache gave a request (`extra_cached_tokens`) is counted in full blocks of its prompt. A
block counts if it was loaded from the server before the request had it from anywhere else:

    counts          every rank loaded the block, and the checksums matched
    counts nothing  the engine's own prefix cache had the block, now or before a preemption
                    the request computed the block itself, and loaded it again after a preemption
                    the load failed, so the block was computed the block holds generated tokens,
                    whole or in part the block ends with the last token of the prompt: that token is
                    always computed, whether or not its block was loaded

Where all goes well that is `max(0, external hits - local hits)` blocks. Both engines count here,
whichever way they load."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.hints import Hints
from kvkeep.client.requests import LoadRequest
from kvkeep.client.scheduler import Answer
from kvkeep.errors import RequestError
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import KEY_BYTES

log = logging.getLogger(__name__)


@dataclass
class RequestState:
    """Lives from a request's arrival until it has ended and its last job has."""

    number: int  # its name to the cache: a request id may be used again while an old job runs
    request_id: str
    salt: str | None
    tenant: str  # "": its salt is none, so nothing of it is looked up or stored
    params: Hints
    prompt_blocks: (
        int  # full blocks before the last token of its prompt: those that the server can give it
    )
    keys: bytearray = field(default_factory=bytearray)  # of all full blocks known so far
    asked: tuple[bytes, int] | None = (
        None  # the keys and the skip of the lookup that is under way or answered
    )
    answer: Answer | None = None
    accepted_after: int | None = (
        None  # a load of what comes after so many blocks was decided on, and is not over
    )
    declined_after: int | None = (
        None  # or was decided against: it would take longer than computing them
    )
    skipped: int = 0  # blocks that the server had and that are computed for that reason
    offers: bool = (
        True  # False once a load has failed, and for requests that must not read from any cache
    )
    stores: bool = True  # False once a store left out what cannot be offered again
    held: int = 0  # its first blocks that it has had at some time: found, loaded or computed
    loaded: int = (
        0  # prompt blocks that it had from the server before it had them from anywhere else
    )
    stored: int = 0
    retry_from: int = (
        0  # a store left something out: from so many blocks on, all of them are offered again
    )
    jobs: int = 0  # loads and stores that workers have not reported yet
    loads: int = 0  # of those; they read under the lease of the answer, so that must stay
    ended: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.keys) // KEY_BYTES

    def key(self, block: int) -> bytes:
        """The key of one block; b"" for the one before the first."""
        return bytes(self.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES]) if block >= 0 else b""

    def keys_of(self, start: int, stop: int) -> bytes:
        return bytes(self.keys[start * KEY_BYTES : stop * KEY_BYTES])

    def load_of(self, start: int, table: NDArray[np.int64]) -> LoadRequest:
        """Of the blocks from `start` on that the answer tells of, into those of the table."""
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

    def hold(self, blocks: int) -> None:
        """The request has its first `blocks` blocks, from the engine's own cache or computed."""
        self.held = max(self.held, blocks)

    def count_loaded(self, stop: int) -> None:
        """The request has its blocks up to `stop`, exclusive: those that it did not have before
        came from the server."""
        self.loaded += max(0, min(stop, self.prompt_blocks) - self.held)
        self.hold(stop)

    def reply(self, block_tokens: int) -> dict[str, int] | None:
        """What the finished request's `kv_transfer_params` are."""
        return self.params.reply(self.loaded * block_tokens)


def usable_tenant(salt: str | None) -> str:
    """Whose blocks a request's are; "" if its salt is none. Such a request is served, without the
    cache."""
    try:
        return tenant_of(salt)
    except RequestError as error:
        log.warning("kvkeep: a request is served without the cache: %s", error)
        return ""
