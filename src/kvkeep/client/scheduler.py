"""What an engine's scheduler needs: how much of a prompt the server has. Nothing here blocks or
raises.

    lookup ──► answer: None (not known yet) ──► Answer ──► workers load ──► release
                  └── release, at any time, for example because the request was aborted

`answer` may be called in every step: it sends nothing unless the question has to be repeated."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.calls import Call, read_found
from kvkeep.client.connection import Connection, Heartbeat
from kvkeep.client.options import ClientOptions
from kvkeep.errors import KVKeepError
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import KEY_BYTES, addresses
from kvkeep.kv.shape import BlockShape
from kvkeep.wire import messages as m

log = logging.getLogger(__name__)

_OUTAGE = ("deadline", "breaker_open", "unreachable", "not_connected", "session_lost")


@dataclass(frozen=True)
class Answer:
    """The leading blocks of a prompt that the server has, and where those after the first `skip`
    are. It goes into a LoadRequest unchanged."""

    blocks: int
    skip: int
    epoch: int
    slots: NDArray[np.int64]
    checksums: NDArray[np.uint64]  # [blocks - skip, shards]
    failure: str = ""  # why the server gave no answer, if it gave none


@dataclass(eq=False)
class Lookup:
    """A question about one prompt: made by `SchedulerAdapter.lookup`, ended by `release`. Its lease
    keeps the blocks of its answer in place."""

    salt: str | None
    keys: bytes
    skip: int
    call: Call = field(default_factory=lambda: Call(0, 0, failure="not_sent"))
    answer: Answer | None = None
    is_repeated: bool = False  # after an outage; that happens once
    is_released: bool = False


class SchedulerAdapter:
    """Lookups and leases of one engine's scheduler."""

    def __init__(
        self,
        shape: BlockShape,
        options: ClientOptions | None = None,
        connection: Connection | None = None,
    ) -> None:
        self.connection = connection or Connection(shape, options or ClientOptions())
        self.connection.role = "scheduler"
        if connection is None:
            Heartbeat.keep(self.connection)
        self._shards = len(shape.shard_bytes)

    def lookup(self, salt: str | None, keys: bytes, skip: int = 0) -> Lookup:
        """Asks how many of these blocks the server has, and for the slots of those after the first
        `skip`."""
        self.connection.poll()
        lookup = Lookup(salt, keys, skip)
        self._send(lookup)
        return lookup

    def answer(self, lookup: Lookup) -> Answer | None:
        """None until the answer is there, then the same answer every time. A fault is an empty
        answer.

        Asks again when what was found belongs to a server or session that is gone, and once when an
        outage is over that had prevented an answer."""
        if not lookup.call.done:
            self.connection.poll()
        if self._is_stale(lookup):
            lookup.is_repeated = bool(lookup.call.failure)
            self._give_up(lookup)
            lookup.answer = None
            self._send(lookup)
        if lookup.answer is None and lookup.call.done:
            lookup.answer = self._read(lookup)
        return lookup.answer

    def lacks(self, key: bytes) -> bool:
        """Whether the server certainly has no block with this key. Reads shared memory only."""
        segments = self.connection.segments
        return segments is not None and segments.lacks(
            addresses(key, self.connection.shape.fingerprint)
        )

    def wait(self, lookup: Lookup, milliseconds: int) -> None:
        """Waits for the answer, up to `milliseconds`. For an engine that has nothing to compute."""
        if lookup.answer is None and self.connection.answering:
            self.connection.wait(lookup.call, milliseconds)

    def release(self, lookup: Lookup, loaded_tokens: int = 0) -> None:
        """Gives the lease back, answered or not. The server counts `loaded_tokens` as loaded and
        used. Does nothing the second time."""
        if not lookup.is_released:
            lookup.is_released = True
            self._give_up(lookup, loaded_tokens)

    def finish_conversation(self, salt: str | None, last_key: bytes) -> None:
        """No request will continue the conversation that ends with this block: the server may evict
        its blocks early."""
        if last_key and (salt is None or isinstance(salt, str)):
            message = m.Finish(tenant_of(salt), self.connection.layout_number, last_key)
            self.connection.call(message, self.connection.options.lookup_deadline_ms)

    def close(self) -> None:
        self.connection.close()

    def _send(self, lookup: Lookup) -> None:
        connection = self.connection
        try:
            tenant = tenant_of(lookup.salt)
            message = m.Lookup(tenant, connection.layout_number, lookup.keys, lookup.skip)
            lookup.call = connection.call(message, connection.options.lookup_deadline_ms)
        except (KVKeepError, TypeError, ValueError, OverflowError) as error:
            # Salts come from users of the engine's API: a bad one is a miss of that request.
            connection.counters.fail("bad_request")
            log.warning("kvkeep: a request is served without the cache: %s", error)
            lookup.call = Call(0, 0, failure="bad_request")

    def _give_up(self, lookup: Lookup, loaded_tokens: int = 0) -> None:
        start = lookup.skip * KEY_BYTES
        is_miss = not lookup.call.done and self.lacks(lookup.keys[start : start + KEY_BYTES])
        # A miss holds nothing, so it costs no further message.
        self.connection.give_up(lookup.call, when_answered=is_miss, loaded_tokens=loaded_tokens)
        self.connection.poll()

    def _is_stale(self, lookup: Lookup) -> bool:
        """Whether to ask again: the slots are of another server or session, whose leases are gone,
        or there was no answer and the outage is over. The latter only once, so that no request
        waits for a slow server again and again."""
        call, connection = lookup.call, self.connection
        if call.failure:
            is_outage = lookup.answer is not None and call.failure in _OUTAGE
            return is_outage and not lookup.is_repeated and connection.answering
        welcome = connection.welcome
        is_current = (
            connection.epoch == call.epoch
            and welcome is not None
            and welcome.session == call.session
        )
        return call.done and not is_current

    def _read(self, lookup: Lookup) -> Answer:
        call, skip = lookup.call, lookup.skip
        hit = read_found(call.reply, lookup.keys, skip, self._shards)
        if hit is None:
            checksums = np.empty((0, self._shards), dtype=np.uint64)
            failure = call.failure or "protocol"
            return Answer(0, skip, 0, np.empty(0, dtype=np.int64), checksums, failure)
        # The epoch of the server that answered; the connection may have another one by now.
        return Answer(hit.blocks, skip, call.epoch, hit.slots, hit.checksums)
