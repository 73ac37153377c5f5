"""What an engine's scheduler needs: how much of a prompt the server has. Nothing here blocks or
raises.

    lookup ──► answer: None (not known yet) ──► Answer ──► workers load ──► release
                  │                                └── wait_for_tier: more blocks are coming, ask again
                  └── release, at any time, for example because the request was aborted

`answer` may be called in every step: it sends nothing unless the question has to be repeated."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.calls import FIRST_PAUSE_MS, Call, read_found
from kvkeep.client.connection import Connection, Heartbeat
from kvkeep.client.options import ClientOptions
from kvkeep.errors import KVKeepError
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import KEY_BYTES, addresses
from kvkeep.kv.shape import BlockShape
from kvkeep.wire import messages as m

log = logging.getLogger(__name__)

_PREFETCH_AGAIN_MS = 1_000
_MOST_PREFETCHED = 1_024
OUTAGE = ("deadline", "breaker_open", "unreachable", "not_connected", "session_lost")


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
    coming: int = 0  # blocks after these that are on their way from a tier
    again_ms: int = 0  # when the server expects the last of them
    late: int = 0  # blocks that are coming, and that the request does not wait for


@dataclass(eq=False)
class Lookup:
    """A question about one prompt: made by `SchedulerAdapter.lookup`, ended by `release`. Its lease
    keeps the blocks of its answer in place.

    earlier      the call and its answer that count if the question, asked again, is not answered
    trace        the span that waits for the answer; "" if there is none
    sent_ms      when `call` was sent
    until_ms     when patience with a tier ends; None: the request does not wait yet
    pause_ms     after how long the server is asked again at the latest
    """

    salt: str | None
    keys: bytes
    skip: int
    call: Call = field(default_factory=lambda: Call(0, 0, failure="not_sent"))
    answer: Answer | None = None
    is_repeated: bool = False  # after an outage; that happens once
    is_released: bool = False
    earlier: tuple[Call, Answer] | None = None
    trace: str = ""
    sent_ms: int = 0
    until_ms: int | None = None
    pause_ms: int = FIRST_PAUSE_MS


class SchedulerAdapter:
    """Lookups and leases of one engine's scheduler."""

    def __init__(
        self,
        shape: BlockShape,
        options: ClientOptions | None = None,
        connection: Connection | None = None,
    ) -> None:
        self.connection = connection or Connection(shape, options or ClientOptions())
        self.connection.role = m.SCHEDULER
        if connection is None:
            Heartbeat.keep(self.connection)
        self._shards = len(shape.shard_bytes)
        self._prefetched: dict[bytes, int] = {}  # last key of a prompt -> when to ask again

    def lookup(self, salt: str | None, keys: bytes, skip: int = 0, trace: str = "") -> Lookup:
        """Asks how many of these blocks the server has, and for the slots of those after the first
        `skip`. A server that exports spans puts its own below `trace`."""
        self.connection.poll()
        lookup = Lookup(salt, keys, skip, trace=trace)
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
            lookup.answer = self._later_of(lookup, self._read(lookup))
        return lookup.answer

    def wait_for_tier(self, lookup: Lookup, most_ms: float | None = None) -> bool:
        """Whether an answered lookup waits for the blocks that are coming from a tier: no longer
        than the options' patience and `most_ms`, and not at all if the last of them is expected
        later than `most_ms`. That is weighed once: a busy moment later on would waste the wait.
        Asks the server again (FIRST_PAUSE_MS), and when patience ends. Once False, the answer
        counts."""
        answer, now_ms = lookup.answer, self.connection.now_ms
        if answer is None or not answer.coming:
            return False
        if lookup.until_ms is None:
            expected_ms = lookup.sent_ms + answer.again_ms
            if most_ms is not None and expected_ms - now_ms >= most_ms:
                lookup.answer = replace(answer, coming=0, late=answer.coming)
                return False
            patience_ms = self.connection.patience_ms
            most_ms = patience_ms if most_ms is None else most_ms
            lookup.until_ms = now_ms + int(min(patience_ms, most_ms))
        if now_ms >= min(lookup.sent_ms + min(answer.again_ms, lookup.pause_ms), lookup.until_ms):
            # The earlier lease lasts until the new answer is there: nothing can be evicted between.
            kept = replace(answer, coming=0, late=answer.coming)
            lookup.earlier, lookup.answer = (lookup.call, kept), None
            lookup.pause_ms *= 2
            self._send(lookup)
        return True

    def prefetch(self, salt: str | None, keys: bytes) -> None:
        """Asks the server to bring the blocks of a prompt up from its tiers. A prompt that was
        asked for a moment ago is not asked for again."""
        connection = self.connection
        if not connection.has_tiers or not keys or not (salt is None or isinstance(salt, str)):
            return
        last, now_ms = keys[-KEY_BYTES:], connection.now_ms  # it stands for all keys before it
        if now_ms < self._prefetched.get(last, now_ms):
            return
        if len(self._prefetched) >= _MOST_PREFETCHED:
            self._prefetched.clear()
        self._prefetched[last] = now_ms + _PREFETCH_AGAIN_MS
        message = m.Prefetch(tenant_of(salt), connection.layout_number, keys)
        connection.call(message, connection.options.lookup_deadline_ms)

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

    def report(self, report: m.RequestReport, lacked_by: Sequence[Call]) -> None:
        """Tells the server, some time later, what a request that has finished was served from."""
        self.connection.report(report, lacked_by)

    def close(self) -> None:
        self.connection.close()

    def _send(self, lookup: Lookup) -> None:
        connection = self.connection
        try:
            tenant = tenant_of(lookup.salt)
            lookup.sent_ms, patience_ms = connection.now_ms, connection.patience_ms
            if lookup.until_ms is not None:
                patience_ms = min(patience_ms, max(0, lookup.until_ms - lookup.sent_ms))
            message = m.Lookup(
                tenant,
                connection.layout_number,
                lookup.keys,
                lookup.skip,
                patience_ms,
                lookup.earlier[1].blocks if lookup.earlier else -1,
                connection.carried(lookup.trace),
            )
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
        if lookup.earlier is not None:
            self.connection.give_up(lookup.earlier[0])
            lookup.earlier = None
        self.connection.poll()

    def _is_stale(self, lookup: Lookup) -> bool:
        """Whether to ask again: the slots are of another server or session, whose leases are gone,
        or there was no answer and the outage is over. The latter only once, so that no request
        waits for a slow server again and again."""
        call, connection = lookup.call, self.connection
        if call.failure:
            is_outage = lookup.answer is not None and call.failure in OUTAGE
            return is_outage and not lookup.is_repeated and connection.answering
        return call.done and not self._is_current(call)

    def _is_current(self, call: Call) -> bool:
        """Whether the server and session that answered the call are still ours."""
        connection, welcome = self.connection, self.connection.welcome
        return (
            connection.epoch == call.epoch
            and welcome is not None
            and welcome.session == call.session
        )

    def _later_of(self, lookup: Lookup, answer: Answer) -> Answer:
        """This answer, or the earlier one, if a question that was asked again got none. The lease
        of the other one is released."""
        if lookup.earlier is None:
            return answer
        call, before = lookup.earlier
        if answer.failure and self._is_current(call):
            lookup.call, call, answer = call, lookup.call, before
        lookup.earlier = None
        self.connection.give_up(call)
        return answer

    def _read(self, lookup: Lookup) -> Answer:
        call, skip = lookup.call, lookup.skip
        hit = read_found(call.reply, lookup.keys, skip, self._shards)
        if hit is None:
            checksums = np.empty((0, self._shards), dtype=np.uint64)
            failure = call.failure or "protocol"
            return Answer(0, skip, 0, np.empty(0, dtype=np.int64), checksums, failure)
        # The epoch of the server that answered; the connection may have another one by now.
        found = Answer(hit.blocks, skip, call.epoch, hit.slots, hit.checksums)
        if not hit.coming:
            return found
        if lookup.until_ms is not None and lookup.sent_ms >= lookup.until_ms:
            return replace(found, late=hit.coming)
        return replace(found, coming=hit.coming, again_ms=hit.again_ms)
