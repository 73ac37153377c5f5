"""A session with the server: made, kept alive, and made again when the server is another one.

    down ── Hello ──► greeting ── Attach ──► attaching ── OpenLayout ──► opening ──► up
      ▲                                                                              │
      └──────────────── refused, no answer in time, unknown_session ─────────────────┘

`poll` does all the work and never blocks; whoever owns the connection calls it often (an engine in each step, a worker
thread in its loop, a Keeper otherwise). Only when up do calls go out; at all other times they fail at once, which the
callers count as misses.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvkeep.client.calls import Breaker, Call, ClientCounters
from kvkeep.client.options import ClientOptions
from kvkeep.client.transport import Transport, ZmqTransport
from kvkeep.errors import ProtocolError
from kvkeep.kv.shape import BlockShape
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, decode_reply, encode
from kvkeep.wire.liveness import hold
from kvkeep.wire.segments import Segments, is_same_pool

log = logging.getLogger(__name__)

_UNDO_INTERVAL_MS = 1_000
_FIRST_RETRY_MS = 5
_WAIT_SLICE_MS = 20


def monotonic_ms() -> int:
    return int(time.monotonic() * 1000)


class Connection:
    """See the module's docstring. Safe to use from several threads: one lock guards it all."""

    def __init__(
        self,
        shape: BlockShape,
        options: ClientOptions,
        transport: Transport | None = None,
        clock: Callable[[], int] = monotonic_ms,
    ) -> None:
        self.shape = shape
        self.options = options
        self.counters = ClientCounters()
        self.breaker = Breaker(options.failures_to_open)
        self.state = "down"
        self.welcome: m.Welcome | None = None
        self.layout: m.LayoutOpened | None = None
        self.segments: Segments | None = None
        self.refusal = ""  # why the server would not have us, in its words
        self._transport = transport or ZmqTransport(options.address)
        self._clock = clock
        self._lock = threading.RLock()
        self._calls: dict[int, Call] = {}
        self._next_number = 1
        self._handshake: Call | None = None
        self._ping: Call | None = None
        self._attempts = 0
        self._next_attempt_ms = 0
        self._next_ping_ms = 0
        self._next_undo_ms = 0
        self._lost_leases: set[int] = set()
        self._lost_writes: set[int] = set()
        self._undo: list[tuple[Call, set[int], set[int]]] = []
        self._fence = -1
        self._warned = False
        self._closed = False

    # -- what callers see

    @property
    def up(self) -> bool:
        return self.state == "up"

    @property
    def epoch(self) -> int:
        """The server process that slots belong to; 0 while there is none."""
        return self.welcome.epoch if self.welcome and self.up else 0

    @property
    def verify(self) -> bool:
        if self.options.verify is not None:
            return self.options.verify
        return self.welcome.verify if self.welcome else True

    def call(self, message: m.Message, deadline_ms: int, payload: Sequence[Any] = ()) -> Call:
        """Sends a request. Never blocks, never raises: what cannot go out has failed when this returns."""
        with self._lock:
            if not self.up:
                return self._failed("not_connected")
            if self.breaker.is_open:
                return self._failed("breaker_open")
            return self._send(message, deadline_ms, payload)

    def give_up(self, call: Call) -> None:
        """Gives back what a call gave, or will have given: a lookup's lease, a store's slots. Said again until the
        server has confirmed it. Copies to or from those slots must have ended."""
        with self._lock:
            if self._calls.pop(call.number, None) is not None:
                call.failure = "given_up"
            self._lose(call)

    def poll(self) -> None:
        """Takes in what has arrived, ends what is overdue, keeps the session alive."""
        with self._lock:
            if self._closed:
                return
            now_ms = self._clock()
            self._receive(now_ms)
            self._expire(now_ms)
            self._keep_session(now_ms)

    def wait(self, call: Call) -> m.Reply | None:
        """Waits for a call to end, at most until its deadline. For callers that may block."""
        while not call.done:
            with self._lock:
                self.poll()
                if not call.done:
                    self._transport.wait(min(_WAIT_SLICE_MS, max(1, call.deadline_ms - self._clock())))
        return call.reply

    def wait_until_up(self, timeout_ms: int) -> bool:
        """Waits for the session, for those who may block."""
        deadline_ms = self._clock() + timeout_ms
        while not self.up and self._clock() < deadline_ms and not self._closed:
            with self._lock:
                self.poll()
                if not self.up:
                    self._transport.wait(_WAIT_SLICE_MS)
        return self.up

    def close(self) -> None:
        """Says goodbye if somebody listens, and lets go of everything."""
        with self._lock:
            if self._closed:
                return
            if self.welcome is not None:
                self.wait(self._send(m.Goodbye(), self.options.lookup_deadline_ms))
            self._go_down("closed")
            self._closed = True
            self._transport.close()

    # -- messages

    def _send(self, message: m.Message, deadline_ms: int, payload: Sequence[Any] = ()) -> Call:
        gives = "lease" if isinstance(message, m.Lookup) else "write" if isinstance(message, m.PrepareStore) else ""
        call = Call(self._next_number, self._clock() + deadline_ms, gives)
        self._next_number += 1
        session = self.welcome.session if self.welcome else 0
        frames = encode(Header(session, call.number), message, payload)
        limit = self.welcome.limits.frame_bytes if self.welcome else len(frames[1])
        if len(frames[1]) > limit:
            call.failure = "frame_too_large"
        elif not self._transport.send(frames):
            call.failure = "unreachable"
            self.breaker.fail()
        if call.failure:
            self.counters.fail(call.failure)
        else:
            self.counters.sent += 1
            self._calls[call.number] = call
        return call

    def _failed(self, reason: str) -> Call:
        self.counters.fail(reason)
        call = Call(self._next_number, 0, failure=reason)
        self._next_number += 1
        return call

    def _receive(self, now_ms: int) -> None:
        while (frames := self._transport.receive()) is not None:
            try:
                header = decode_header(frames)
                call = self._calls.pop(header.number, None)
                if call is None:
                    self.counters.late_replies += 1
                    continue
                call.reply = decode_reply(header, frames)
                call.payload = frames[2:]
            except ProtocolError as error:
                self.refusal = str(error)
                self.counters.fail("protocol")
                continue
            self.counters.answered += 1
            self.breaker.succeed()
            if isinstance(call.reply, m.Refused):
                self._refused(call, call.reply)

    def _refused(self, call: Call, refusal: m.Refused) -> None:
        self.counters.fail(refusal.code)
        self.refusal = f"{refusal.message} ({refusal.hint})" if refusal.hint else refusal.message
        call.failure, call.reply = refusal.code, None
        if refusal.code == "unknown_session":
            self._go_down("the server does not know this session any more")

    def _expire(self, now_ms: int) -> None:
        overdue = [call for call in self._calls.values() if call.deadline_ms <= now_ms]
        for call in overdue:
            del self._calls[call.number]
            call.failure = "deadline"
            self.counters.fail("deadline")
            self.breaker.fail()
            self._lose(call)

    def _lose(self, call: Call) -> None:
        """Notes what to give back. Giving back what was never given is no error."""
        if call.gives and self.up:
            (self._lost_leases if call.gives == "lease" else self._lost_writes).add(call.number)
            self._next_undo_ms = 0

    # -- the session

    def _keep_session(self, now_ms: int) -> None:
        if self.state == "down":
            if now_ms >= self._next_attempt_ms:
                self._start_handshake(now_ms)
        elif self.state == "up":
            if self._ping is not None and self._ping.done:
                self._ping = None
            if self._ping is None and now_ms >= self._next_ping_ms:
                self._next_ping_ms = now_ms + self.options.ping_interval_ms
                self._ping = self._send(m.Ping(), self.options.ping_interval_ms)
            self._give_back(now_ms)
        else:
            self._advance_handshake()

    def _start_handshake(self, now_ms: int) -> None:
        # The first attempts come quickly: a socket that was only just made is not connected yet.
        patience_ms = min(self.options.reconnect_interval_ms, _FIRST_RETRY_MS << min(self._attempts, 16))
        self._next_attempt_ms = now_ms + patience_ms
        self._attempts += 1
        self._handshake = self._send(m.Hello(self.options.client, os.getpid()), self.options.handshake_deadline_ms)
        if self._handshake.failure:
            self._warn_once()
        else:
            self.state = "greeting"

    def _advance_handshake(self) -> None:
        step = self._handshake
        assert step is not None
        if not step.done:
            return
        if step.failure:
            self._go_down(step.failure)
            self._warn_once()
            return
        deadline_ms = self.options.handshake_deadline_ms
        if isinstance(step.reply, m.Welcome):
            self.welcome = step.reply
            self.state = "attaching"
            self._handshake = self._send(m.Attach(self._choose_plane(step.reply)), deadline_ms)
        elif self.state == "attaching":
            self.state = "opening"
            opening = m.OpenLayout(self.shape.fingerprint, list(self.shape.shard_bytes))
            self._handshake = self._send(opening, deadline_ms)
        elif isinstance(step.reply, m.LayoutOpened):
            self.layout = step.reply
            self._come_up()

    def _choose_plane(self, welcome: m.Welcome) -> str:
        """Shared memory if the pool is really here and its lock can be had, else the network."""
        place = welcome.pool
        directory = Path(place.directory)
        if self.options.shared_memory and place.lock and is_same_pool(directory, welcome.epoch):
            try:
                self._fence = hold(Path(place.lock))
            except OSError as error:
                log.warning("kvkeep: shared memory cannot be used (%s); blocks go through the socket", error)
            else:
                self.segments = Segments(directory, place.segment_bytes, place.pool_bytes)
                return m.SHARED_MEMORY
        return m.NETWORK

    def _come_up(self) -> None:
        self.state = "up"
        self._attempts = 0
        self.breaker.succeed()
        self.counters.sessions += 1
        self._next_ping_ms = self._clock() + self.options.ping_interval_ms
        self.refusal = ""
        if self._warned or self.counters.sessions > 1:
            log.warning("kvkeep: connected to %s", self.options.address)
        self._warned = False

    def _go_down(self, reason: str) -> None:
        """Forgets the session. Calls on their way fail; memory of the old pool is let go of."""
        for call in self._calls.values():
            call.failure = "session_lost"
        self._calls.clear()
        self._lost_leases.clear()
        self._lost_writes.clear()
        self._undo.clear()
        self.state = "down"
        self.welcome = self.layout = self._handshake = self._ping = None
        self.segments = None  # copies still under way keep their mapping alive
        if self._fence >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fence)
            self._fence = -1
        log.debug("kvkeep: session ended: %s", reason)

    def _give_back(self, now_ms: int) -> None:
        """Says Release and AbandonStore for what is not needed; what was not confirmed is said again."""
        waiting = []
        for call, leases, writes in self._undo:
            if call.reply is None and call.failure:
                self._lost_leases |= leases
                self._lost_writes |= writes
            elif not call.done:
                waiting.append((call, leases, writes))
        self._undo = waiting
        if now_ms < self._next_undo_ms:
            return
        self._next_undo_ms = now_ms + _UNDO_INTERVAL_MS
        if self._lost_leases:
            leases, self._lost_leases = self._lost_leases, set()
            self._undo.append((self._send(m.Release(sorted(leases)), _UNDO_INTERVAL_MS), leases, set()))
        if self._lost_writes:
            writes, self._lost_writes = self._lost_writes, set()
            self._undo.append((self._send(m.AbandonStore(sorted(writes)), _UNDO_INTERVAL_MS), set(), writes))

    def _warn_once(self) -> None:
        """One clear message an outage, once it is one: what was tried, what it means, what to do."""
        if not self._warned and self._next_attempt_ms >= self._clock() + self.options.reconnect_interval_ms:
            self._warned = True
            why = f": {self.refusal}" if self.refusal else ""
            log.warning(
                "kvkeep: no server at %s%s. Serving without the cache; it will be used as soon as the server is there. "
                "Start one with `kvkeep serve`.",
                self.options.address,
                why,
            )
