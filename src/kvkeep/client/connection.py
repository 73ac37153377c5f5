"""A session with the server: made, kept alive, and made again when the server is another one.

    down ── Hello ──► greeting ── Attach ──► attaching ── OpenLayout ──► opening ──► up
      ▲                                                                              │
      └────────── refused, no or no sound answer in time, unknown_session ───────────┘

`poll` does all the work and never blocks; whoever owns the connection calls it often (an engine in
each step, a worker thread in its loop, a Heartbeat otherwise). Only when up do calls go out; at all
other times they fail at once, which the callers count as misses."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

from msgspec import structs

from kvkeep.client.calls import (
    Breaker,
    Call,
    Calls,
    ClientCounters,
    Debts,
    gives,
    is_sound_layout,
    is_sound_welcome,
)
from kvkeep.client.options import ClientOptions
from kvkeep.client.outage import SILENT, UNTRUSTED, Outage
from kvkeep.client.shared_pool import SharedPool
from kvkeep.client.threads import FairLock, Threads, monotonic_ms
from kvkeep.client.transport import StreamTransport, Transport
from kvkeep.errors import ProtocolError, UntrustedPool
from kvkeep.kv.shape import BlockShape
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, decode_reply, encode
from kvkeep.wire.segments import Segments
from kvkeep.wire.tls import tls_files

log = logging.getLogger(__name__)

_FIRST_RETRY_MS = 5  # a socket that was only just made is not connected yet
# some 300 ms after the first attempt: a server that is there has answered by then
_LAST_QUICK_RETRY_MS = 160
_TOO_OLD = (
    "it is of a release that knows no ranks with several shards (upgrade it before the engines, or"
    " leave out kvkeep.tp_shards)"
)
_WAIT_SLICE_MS = 5  # then others have their turn
_REST_S, _SHORT_REST_S = 0.1, 0.02  # with nothing on its way, and otherwise
_HEARTBEAT_S = 0.05
MOST_REPORTS = 4_096  # kept while no server takes them
_REPORT_EVERY_MS = 200
_MOST_KEY_BYTES = 256 << 10  # of a message's reports, and one report more
_REPORTS_A_MESSAGE = 32  # the server explains each in a fraction of a millisecond
_NAMES_LAYOUT = m.Lookup | m.Prefetch | m.PrepareStore | m.DescribeBlocks | m.PoolEvents
_MESSAGES_A_POLL = 1024  # a server that floods us does not keep the engine


class Connection:
    """See the module's docstring. Safe to use from several threads: one lock guards it all. Only
    `pool` does without: who copies does not wait for those who wait for a reply."""

    def __init__(
        self,
        shape: BlockShape,
        options: ClientOptions,
        transport: Transport | None = None,
        clock: Callable[[], int] = monotonic_ms,
        threads: Threads = threading,
    ) -> None:
        self.shape, self.options, self.threads = shape, options, threads
        self.counters, self.breaker = ClientCounters(), Breaker()
        self.state, self.refusal = "down", ""  # why the server would not have us, in its words
        self.welcome: m.Welcome | None = None
        self.layout: m.LayoutOpened | None = None
        self._transport = transport or StreamTransport(
            options.address, tls_files(options), options.trusted_users
        )
        self._pid, self._clock = os.getpid(), clock
        self.lock, self.outage = FairLock(threads), Outage(options.address)
        self._calls, self._debts = Calls(), Debts()
        self._handshake: Call | None = None  # its step that is under way
        self._ping: Call | None = None
        self._next_number, self._attempts, self._next_attempt_ms, self._next_ping_ms = 1, 0, 0, 0
        self.shared_pool: SharedPool | None = None
        self.physical = (-1, b"")  # a worker's shard, and how its tensors lie in memory
        self.further_shards: list[int] = []  # of a worker that has several
        self.role = "client"  # what this session is for, as operators see it
        self._told_differences = False
        # Of requests that have finished, until the server is told: the oldest are dropped first.
        self._reports: deque[tuple[m.RequestReport, Sequence[Call]]] = deque(maxlen=MOST_REPORTS)
        self._next_report_ms = 0
        # Work of the owner's that a Heartbeat does after each poll, in its thread. It does not refer
        # to this connection: one that is dropped is closed at once.
        self.background: Callable[[Connection], None] | None = None
        self._closing = self._closed = False

    def __repr__(self) -> str:
        return (
            f"Connection({self.state}, {self._transport}, calls={len(self._calls)},"
            f" owed={self._debts.count})"
        )

    def __del__(self) -> None:
        # Dropped without `close`: with the lock and the socket gone, the server takes back what the
        # session held.
        if hasattr(self, "_closed") and not self._closed and os and os.getpid() == self._pid:
            if self.shared_pool is not None:
                self.shared_pool.let_go()
            self._transport.close()

    # -- what callers see

    @property
    def up(self) -> bool:
        return self.state == "up"

    @property
    def answering(self) -> bool:  # a session, and a server that was there when last heard of
        return self.up and self.breaker.heard and not self.breaker.is_open

    @property
    def coming_up(self) -> bool:  # in a moment, as far as anybody knows: either way it is over soon
        return not (self.up or self._closing or self.outage.told)

    @property
    def rest_s(self) -> float:
        """So long nobody need poll it; each time takes an engine's interpreter."""
        rests = self._closed or (self.up and not self._calls and not self._debts)
        return (
            max(_SHORT_REST_S, min(_REST_S, self.options.ping_interval_ms / 1000))
            if rests
            else _SHORT_REST_S
        )

    @property
    def now_ms(self) -> int:
        return self._clock()

    @property
    def patience_ms(self) -> int:
        """How long a lookup waits at most for blocks from a tier; 0 with a server that has none."""
        return self.options.patience_ms if self.has_tiers else 0

    @property
    def has_tiers(self) -> bool:
        welcome = self.welcome
        return welcome is not None and m.TIERS in welcome.capabilities

    def carried(self, trace: str) -> str:
        """The place of a span as messages carry it: not to a server that exports none."""
        welcome = self.welcome
        return trace if trace and welcome is not None and m.TRACES in welcome.capabilities else ""

    @property
    def epoch(self) -> int:  # of the server process that slots belong to; 0 while there is none
        welcome = self.welcome  # read once: another thread may end the session meanwhile
        return welcome.epoch if welcome and self.up else 0

    @property
    def verify(self) -> bool:
        """Off only where both sides say so: a server may ask for more checks, never for fewer."""
        welcome = self.welcome
        return self.options.verify or welcome is None or welcome.verify

    @property
    def layout_number(self) -> int:
        """How requests name the layout; 0, which the server refuses, while there is none."""
        layout = self.layout
        return layout.layout if layout else 0

    @property
    def segments(self) -> Segments | None:  # the pool's memory, if it is on this host
        return shared.segments if (shared := self.shared_pool) else None

    @contextlib.contextmanager
    def pool(
        self, epoch: int, session: int = 0
    ) -> Iterator[tuple[Segments, m.LayoutOpened] | None]:
        """The pool's memory and where blocks lie in it, if `epoch` (and `session`, if named) is
        still ours: slots of another are somebody else's. Inside the block memory and lock stay
        ours, whatever happens."""
        shared, layout, welcome = self.shared_pool, self.layout, self.welcome
        current = welcome is not None and self.epoch == epoch and session in (0, welcome.session)
        # A session lets go of its pool last, so all three are of one session.
        if shared is None or not current or not shared.hold():
            yield None
            return
        try:
            yield (shared.segments, layout) if layout else None
        finally:
            shared.unhold()

    def map_pool_ahead(self) -> bool:
        """Maps a little more of the pool before its first use. False if nothing is left to map."""
        with self.pool(self.epoch) as pool:
            return pool is not None and pool[0].populate_next()

    def call(self, message: m.Message, deadline_ms: int, payload: Sequence[Any] = ()) -> Call:
        """Sends a request. Never blocks, never raises: what cannot go out has failed when this
        returns."""
        if os.getpid() != self._pid:
            return Call(0, 0, failure="forked")
        with self.lock:
            if not self.up:
                return self._failed("not_connected")
            if self.breaker.is_open:
                return self._failed("breaker_open")
            if (
                isinstance(message, _NAMES_LAYOUT)
                and self.layout
                and message.layout != self.layout.layout
            ):
                return self._failed("session_lost")  # made for a server before this one
            return self._send(message, deadline_ms, payload)

    def give_up(self, call: Call, *, when_answered: bool = False, loaded_tokens: int = 0) -> None:
        """Gives back what a call gave, or will have given: a lease, or slots. Said again until the
        server has confirmed it. Copies to or from those slots must have ended. One that will give
        nothing need not be said to anybody. `loaded_tokens` were loaded under the lease and are
        used; a server that counts them is told."""
        if os.getpid() != self._pid:
            return
        with self.lock:
            if self.welcome is not None and m.LOADED_TOKENS in self.welcome.capabilities:
                call.loaded_tokens = loaded_tokens
            if when_answered and not call.done:
                call.unwanted = True
                return
            if self._calls.get(call.number) is call:
                call.failure = "given_up"
                self._calls.remove(call)
            self._owe(call)

    def report(self, report: m.RequestReport, lacked_by: Sequence[Call]) -> None:
        """Tells the server in a moment, together with others, how a request was served. A server
        that takes no reports is told nothing; what is lost on the way is not said again."""
        self._reports.append((report, lacked_by))

    def poll(self) -> None:
        """Takes in what has arrived, ends what is overdue, keeps the session alive."""
        if os.getpid() != self._pid:
            # a forked child has no use of the socket, nor perhaps of the lock: it needs its own
            # connection
            return
        with self.lock:
            if self._closed:
                return
            now_ms = self._clock()
            try:
                self._receive()
                self._expire(now_ms)
                if not self._closing:
                    self._keep_session(now_ms)
            except Exception:  # guard: whatever a server made us stumble over, the engine serves on
                self.counters.fail("internal_error")
                self.outage.stumble()
                self._go_down()

    def wait(self, call: Call, milliseconds: int | None = None) -> m.Reply | None:
        """Waits for a call to end, at most until its deadline, or so long. May block."""
        until_ms = call.deadline_ms + 1 if milliseconds is None else self._clock() + milliseconds
        while not call.done and (milliseconds is None or self._clock() < until_ms):
            if os.getpid() != self._pid:
                call.failure = "forked"
                break
            with self.lock:
                if not call.done:
                    self._transport.wait(min(_WAIT_SLICE_MS, max(1, until_ms - self._clock())))
                self.poll()
        return call.reply

    def pause(self, milliseconds: int) -> None:
        """Lets time pass, polling. May block."""
        self.wait(Call(0, 0), milliseconds)

    def wait_until_up(self, timeout_ms: int) -> bool:
        """Waits for the session, for those who may block."""
        deadline_ms = self._clock() + timeout_ms
        while (
            not (self.up or self._closed)
            and self._clock() < deadline_ms
            and os.getpid() == self._pid
        ):
            with self.lock:
                self.poll()
                if not (self.up or self._closed):
                    self._transport.wait(_WAIT_SLICE_MS)
        return self.up

    def start_over(self) -> None:
        """Ends the session; the next poll makes another one."""
        with self.lock:
            if self.welcome is not None:
                self._send(m.Goodbye(), self.options.handshake_deadline_ms)
            self._go_down()

    def close(self) -> None:
        """Says goodbye if somebody listens, and lets go of everything. A forked child's copy lets
        go of nothing."""
        if os.getpid() != self._pid:
            return
        with self.lock:
            if self._closed:
                return
            self._closing = True
            if self.answering:
                self._send_reports()
            goodbye = (
                self._send(m.Goodbye(), self.options.lookup_deadline_ms)
                if self.welcome is not None
                else None
            )
        if goodbye is not None:
            self.wait(goodbye)
        with self.lock:
            if not self._closed:  # another thread closes it, too
                self._go_down()
                self._closed = True
                self._transport.close()

    # -- messages

    def _send(self, message: m.Message, deadline_ms: int, payload: Sequence[Any] = ()) -> Call:
        if (call := self._post(message, deadline_ms, payload)).failure:
            self.counters.fail(call.failure)
        return call

    def _post(self, message: m.Message, deadline_ms: int, payload: Sequence[Any] = ()) -> Call:
        call = Call(
            self._next_number, self._clock() + deadline_ms, gives(message), words=self.breaker.words
        )
        call.bulk = bool(payload) or isinstance(message, m.Fetch)
        if self.welcome is not None:
            call.session, call.epoch = self.welcome.session, self.welcome.epoch
        self._next_number += 1
        frames = encode(Header(call.session, call.number), message, payload)
        limit = self.welcome.limits.frame_bytes if self.welcome else len(frames[1])
        if len(frames[1]) > limit:
            call.failure = "frame_too_large"
        elif not self._transport.send(frames):
            call.failure = "unreachable"
        else:
            self.counters.sent += 1
            self._calls.add(call)
        return call

    def _failed(self, reason: str) -> Call:
        self.counters.fail(reason)
        return Call(0, 0, failure=reason)

    def _receive(self) -> None:
        for _ in range(_MESSAGES_A_POLL):
            frames = self._transport.receive()
            if frames is None:
                if self._transport.lost():
                    self._lose_all()
                return
            call: Call | None = None
            try:
                header = decode_header(frames)
                if (call := self._calls.get(header.number)) is not None:
                    self._answered(call, decode_reply(header, frames), frames[2:])
                    if not self._calls:
                        return  # nothing else is on its way
                    continue
            except ProtocolError as error:
                self.refusal = str(error)
                if call is not None:
                    self._end(call, "protocol")
                else:  # whose reply it was, nobody can tell: that call's deadline will end it
                    self.counters.fail("protocol")
                continue
            self.counters.late_replies += 1
            self.breaker.hear()

    def _lose_all(self) -> None:
        """What was on its way is gone. Whether the session is, only the server can tell: till then
        its lock is ours."""
        self.breaker.heard = False
        for call in self._calls.all():
            self._end(call, "unreachable")
        self._tell_outage()

    def _answered(self, call: Call, reply: m.Reply, payload: Sequence[bytes]) -> None:
        self._calls.remove(call)
        self.counters.answered += 1
        self.breaker.hear()
        if (
            self.outage.told
            and self.up
            and not (isinstance(reply, m.Refused) and reply.code == "unknown_session")
        ):
            self.outage.end()
        if not isinstance(reply, m.Refused):
            call.payload = payload  # first: another thread may wait for the reply
            call.reply = reply
            if call.unwanted:
                self._owe(call)
            return
        code = reply.code or "refused"
        self.counters.fail(code)
        self.refusal = f"{reply.message} ({reply.hint})" if reply.hint else reply.message
        call.failure = code
        if code == "unknown_session":
            self._go_down()

    def _expire(self, now_ms: int) -> None:
        overdue, explained = self._calls.overdue(now_ms), self._calls.awaits_bulk(now_ms)
        for call in overdue:
            if not explained:
                self.breaker.expire(call)
            self._end(call, "deadline")
        if self.up and overdue and self.breaker.is_open:
            # What else is on its way would wait as long for nothing. Pings go on.
            for call in self._calls.all(but=self._ping):
                self._end(call, "breaker_open")
            if self._ping in overdue:  # a moment's silence is counted; one of seconds is told
                self._tell_outage()
                self._reconnect()

    def _reconnect(self) -> None:
        """If the connection is what is silent, the next one may not be. No call is on its way, so
        nothing was lost with the old one."""
        self._transport.reconnect()
        self._transport.lost()

    def _end(self, call: Call, failure: str) -> None:
        call.failure = failure
        self._calls.remove(call)
        self.counters.fail(failure)
        self._owe(call)

    def _tell_outage(self) -> None:
        if self.up:  # so the server has refused us nothing
            self.outage.begin(SILENT if self.breaker.heard else "its connection is gone", "")

    def _owe(self, call: Call) -> None:
        if self.up and self.welcome is not None and call.session == self.welcome.session:
            self._debts.add(call)

    # -- the session

    def _keep_session(self, now_ms: int) -> None:
        if self.state == "down":
            if now_ms >= self._next_attempt_ms:
                self._start_handshake(now_ms)
        elif self.state == "up":
            if (self._ping is None or self._ping.done) and now_ms >= self._next_ping_ms:
                self._next_ping_ms = now_ms + self.options.ping_interval_ms
                self._ping = self._send(
                    m.Ping(), max(self.options.ping_interval_ms, self.options.lookup_deadline_ms)
                )
                if (
                    not self.answering
                    and self.shared_pool is not None
                    and self.shared_pool.server_is_gone()
                ):
                    self._go_down()
                    return
            self._debts.pay(now_ms, self._send)
            if self._reports and now_ms >= self._next_report_ms and self.answering:
                self._next_report_ms = now_ms + _REPORT_EVERY_MS
                self._send_reports()
        else:
            self._advance_handshake()

    def _send_reports(self) -> None:
        welcome, reports = self.welcome, self._reports
        if welcome is None:
            return
        if m.REPORTS not in welcome.capabilities:
            reports.clear()
            return
        while reports:
            some = [reports.popleft()]
            nbytes = len(some[0][0].keys)
            while reports and len(some) < _REPORTS_A_MESSAGE and nbytes < _MOST_KEY_BYTES:
                some.append(reports.popleft())
                nbytes += len(some[-1][0].keys)
            # The server knows its own lookups only, and those of this session.
            told = [
                structs.replace(each, lookups=here) if here else each
                for each, calls in some
                for here in ([call.number for call in calls if call.session == welcome.session],)
            ]
            self._send(m.ReportRequests(told), self.options.store_deadline_ms)

    def _start_handshake(self, now_ms: int) -> None:
        patience_ms = min(
            self.options.reconnect_interval_ms, _FIRST_RETRY_MS << min(self._attempts, 16)
        )
        self._next_attempt_ms = now_ms + patience_ms
        self._attempts += 1
        self._handshake = self._post(
            m.Hello(self.options.client, os.getpid()), self.options.handshake_deadline_ms
        )
        if not self._handshake.failure:
            self.refusal = ""
            self.state = "greeting"
        elif patience_ms >= min(_LAST_QUICK_RETRY_MS, self.options.reconnect_interval_ms):
            self.counters.fail(self._handshake.failure)
            self.outage.begin(
                "no connection could be made", self.refusal or self._transport.refusal()
            )

    def _advance_handshake(self) -> None:
        step, deadline_ms = self._handshake, self.options.handshake_deadline_ms
        assert step is not None
        if not step.done:
            return
        match self.state, step.reply:
            case "greeting", m.Welcome() as welcome if is_sound_welcome(welcome):
                self.welcome = welcome
                if self.further_shards and m.SEVERAL_SHARDS not in welcome.capabilities:
                    self._refuse("old_server", _TOO_OLD, _TOO_OLD)
                    return
                self.state = "attaching"
                try:
                    may, users = self.options.shared_memory, self.options.trusted_users
                    self.shared_pool = (
                        SharedPool.attach(welcome, self.threads, users) if may else None
                    )
                except UntrustedPool as error:
                    self._refuse("untrusted_pool", UNTRUSTED, f"{error.message} ({error.hint})")
                    return
                plane = m.SHARED_MEMORY if self.shared_pool else m.NETWORK
                self._handshake = self._send(m.Attach(plane), deadline_ms)
            case "attaching", m.Done():
                self.state = "opening"
                self._handshake = self._send(self._opening(), deadline_ms)
            case "opening", m.LayoutOpened() as opened if is_sound_layout(
                opened, self.shape.shard_bytes
            ):
                self.layout = opened
                self._come_up()
                self._tell_differences(opened.differs)
            case state, reply:
                self._break_off(step, state, reply)

    def _refuse(self, counted: str, why: str, refusal: str) -> None:
        """This server cannot be used: the session that it has opened is ended."""
        self.counters.fail(counted)
        self.refusal = refusal
        self.start_over()
        self.outage.begin(why, refusal)

    def _opening(self) -> m.OpenLayout:
        shape, (shard, physical) = self.shape, self.physical
        parts = {name: _shortened(text) for name, text in shape.parts.items()}
        return m.OpenLayout(
            shape.fingerprint,
            list(shape.shard_bytes),
            shard,
            physical,
            parts,
            self.role,
            self.further_shards,
        )

    def _break_off(self, step: Call, state: str, reply: m.Reply | None) -> None:
        """The handshake has failed. A session that was opened is ended: the server has a limited
        number of them."""
        if reply is not None:
            self.counters.fail("protocol")
            self.refusal = (
                f"it sent {type(reply).__name__}, or nonsense in it, while we were {state}"
            )
        if step.failure == "deadline":
            self._reconnect()
        refusal = self.refusal or self._transport.refusal()
        why = refusal or ("it does not answer" if step.failure == "deadline" else step.failure)
        self.start_over()
        self.outage.begin(why, refusal)

    def _come_up(self) -> None:
        self.state, self._attempts, self.refusal = "up", 0, ""
        self.counters.sessions += 1
        self._next_ping_ms = self._clock() + self.options.ping_interval_ms
        if self.outage.told or self.counters.sessions > 1:
            self.outage.end()

    def _tell_differences(self, differs: list[str]) -> None:
        """Says once why an engine does not share with another one of its model. Its workers would
        say the same."""
        if differs and not self._told_differences and not self.role.startswith("worker"):
            self._told_differences = True
            log.info(
                "kvkeep: this engine (identity %s) does not share blocks with another one of model"
                " %s: they differ in %s; `kvkeep status` shows how",
                *(self.shape.digest, self.shape.identity.model),
                ", ".join(name for name in differs if name in self.shape.parts)
                or "what only the other one says",
            )

    def _go_down(self) -> None:
        """Forgets the session. Calls on their way fail; memory of the old pool is let go of."""
        self._calls.end_all("session_lost")
        self._debts.clear()
        self.state = "down"
        self.welcome = self.layout = self._handshake = self._ping = None
        # last: who got hold of it before has read what was this session's
        if self.shared_pool is not None:
            self.shared_pool.let_go()
            self.shared_pool = None


def _shortened(text: str) -> str:
    """A part of the identity as it is sent: a long one by its beginning and its digest."""
    if len(text) <= m.MAX_PART_CHARS:
        return text
    return f"{text[: m.MAX_PART_CHARS // 2]}… {blake2b(text.encode(), digest_size=8).hexdigest()}"


class Heartbeat:
    """A thread that polls connections while their owners do something else: it pings, reconnects
    and gives back. It polls a connection for as long as somebody else refers to it. There is one
    for the whole process."""

    _instance: Heartbeat | None = None
    _instance_lock = threading.Lock()

    def __init__(self, threads: Threads = threading) -> None:
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._threads = threads
        self._lock = threads.Lock()
        self._thread = threads.Thread(target=self._run, name="kvkeep-heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def keep(cls, connection: Connection) -> None:
        """Polls this connection from now on."""
        with cls._instance_lock:
            # A fork leaves the thread behind.
            if cls._instance is None or not cls._instance._thread.is_alive():
                cls._instance = Heartbeat()
                atexit.register(cls._instance._say_goodbye)
        cls._instance.add(connection)

    def add(self, connection: Connection) -> None:
        with self._lock:
            self._connections.add(connection)

    def _run(self) -> None:
        pause = self._threads.Event()
        while True:
            with self._lock:
                connections = list(self._connections)
            rests_s = [_poll(connections.pop()) for _ in range(len(connections))]
            pause.wait(max(_HEARTBEAT_S, min(rests_s, default=0.0)))

    def _say_goodbye(self) -> None:
        """At exit, for owners that did not: the server's log then shows no dead process."""
        for connection in list(self._connections):
            connection.close()


def _poll(connection: Connection) -> float:
    """Polls it once. Returns how many seconds it can do without."""
    connection.poll()
    if connection.background is not None:
        connection.background(connection)
    return connection.rest_s
