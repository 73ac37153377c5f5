"""What an engine's scheduler needs: how much of a prompt the server has. Never blocks, never
raises.

    lookup ──► None (not known yet) ──► Answer ──► workers load ──► release
                 └── release (the request was aborted, here or at any time)

Asking again for the same request costs nothing and changes nothing, so a scheduler may ask in every
step."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.calls import Call
from kvkeep.client.connection import Connection
from kvkeep.client.keeper import Keeper
from kvkeep.client.options import ClientOptions
from kvkeep.client.replies import read_found
from kvkeep.errors import KVKeepError
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import KEY_BYTES, addresses
from kvkeep.kv.shape import BlockShape
from kvkeep.wire import messages as m

log = logging.getLogger(__name__)

_OUTAGE = ("deadline", "breaker_open", "unreachable", "not_connected", "session_lost")


@dataclass(frozen=True)
class Answer:
    """What the server has of a prompt: leading blocks, and where those beyond `skip` lie. Goes to
    workers as it is."""

    blocks: int
    skip: int
    epoch: int
    slots: NDArray[np.int64]
    checksums: NDArray[np.uint64]  # [blocks - skip, shards]
    failure: str = ""  # why there is no answer from the server, if there is none


@dataclass
class _Asked:
    salt: str | None
    keys: bytes
    skip: int
    call: Call
    again: bool = False  # for the second time, after an outage
    answer: Answer | None = None


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
            Keeper.keep(self.connection)
        self._shards = len(shape.shard_bytes)
        self._asked: dict[Hashable, _Asked] = {}

    def lookup(
        self, request: Hashable, salt: str | None, keys: bytes, skip: int = 0
    ) -> Answer | None:
        """Asks once; None until the answer is there, then the same answer every time. A fault is an
        empty answer.

        With other keys than before (the request was preempted and has grown), when what was found
        belongs to a server or session that is gone, and when an outage is over that kept it from
        finding anything, it asks anew."""
        asked = self._asked.get(request)
        if asked is None or not asked.call.done:
            # otherwise there is nothing to wait for, and a Keeper polls anyway
            self.connection.poll()
        again = False
        if asked is not None and (
            (asked.keys, asked.skip, asked.salt) != (keys, skip, salt) or self._is_stale(asked)
        ):
            again = bool(asked.call.failure)
            self.release(request)
            asked = None
        if asked is None:
            try:
                message = m.Lookup(tenant_of(salt), self.connection.layout_number, keys, skip)
                call = self.connection.call(message, self.connection.options.lookup_deadline_ms)
            except (KVKeepError, TypeError, ValueError, OverflowError) as error:
                # A salt comes from whoever uses the engine's API. What is wrong with one request is
                # that request's miss, never the engine's end.
                self.connection.counters.fail("bad_request")
                log.warning("kvkeep: a request is served without the cache: %s", error)
                call = Call(0, 0, failure="bad_request")
            asked = self._asked[request] = _Asked(salt, keys, skip, call, again)
        if asked.answer is None and asked.call.done:
            asked.answer = self._read(asked)
        return asked.answer

    def lacks(self, key: bytes) -> bool:
        """Whether the server surely has no block of this key, without asking it."""
        segments = self.connection.segments
        return segments is not None and segments.lacks(
            addresses(key, self.connection.shape.fingerprint)
        )

    def wait(self, request: Hashable, milliseconds: int) -> None:
        """Waits for the answer, so long at most; for an engine that has nothing else to do."""
        asked = self._asked.get(request)
        if asked is not None and asked.answer is None and self.connection.answering:
            self.connection.wait(asked.call, milliseconds)

    def release(self, request: Hashable, loaded_tokens: int = 0) -> None:
        """The blocks are loaded, or will not be, answered or not: whatever was given is given back.
        The server counts how many tokens were loaded and are used."""
        asked = self._asked.pop(request, None)
        if asked is not None:
            start = asked.skip * KEY_BYTES
            is_miss = not asked.call.done and self.lacks(asked.keys[start : start + KEY_BYTES])
            # A miss costs no message more.
            self.connection.give_up(asked.call, when_answered=is_miss, loaded_tokens=loaded_tokens)
            self.connection.poll()

    def finish_request(
        self, request: Hashable, salt: str | None, last_key: bytes = b"", finished: bool = False
    ) -> None:
        """The request is over. With `finished`, the conversation too: its blocks may go early."""
        self.release(request)
        if finished and last_key and (salt is None or isinstance(salt, str)):
            message = m.Finish(tenant_of(salt), self.connection.layout_number, last_key)
            self.connection.call(message, self.connection.options.lookup_deadline_ms)

    def close(self) -> None:
        self._asked.clear()
        self.connection.close()

    def _is_stale(self, asked: _Asked) -> bool:
        """Slots of a server that is gone, or that we are not connected to: no worker could read
        them. Or of a session that is: its leases are gone with it, and the slots may be anybody's.
        Or no answer at all, and the outage is over while the request still waits for its turn;
        once, so that it never waits for a server that is slow."""
        call, welcome = asked.call, self.connection.welcome
        if call.failure:
            told = asked.answer is not None
            return (
                told and call.failure in _OUTAGE and not asked.again and self.connection.answering
            )
        current = (
            self.connection.epoch == call.epoch
            and welcome is not None
            and welcome.session == call.session
        )
        return call.done and not current

    def _read(self, asked: _Asked) -> Answer:
        hit = read_found(asked.call.reply, asked.keys, asked.skip, self._shards)
        if hit is None:
            nothing = np.empty((0, self._shards), dtype=np.uint64)
            failure = asked.call.failure or "protocol"
            return Answer(0, asked.skip, 0, np.empty(0, dtype=np.int64), nothing, failure)
        # The epoch of the server that was asked, which need not be the one that we are connected to
        # by now.
        return Answer(hit.blocks, asked.skip, asked.call.epoch, hit.slots, hit.checksums)
