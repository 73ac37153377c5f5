"""A recording: the requests that the service carries out, without what tells whose they are.

    service ── note ──► waiting notes ── take ──► JSON lines ──► `kvkeep record` writes the file
    (the loop's thread)                 (a thread of HTTP)

A note costs the loop a tuple; without a recording it costs a comparison. What waits is bounded in
bytes, what is taken in all by `most_bytes`, and the recording in time. It ends as well when no
program takes its lines.

A line has numbers only, and words of ours. Keys of blocks become keyed hashes: the same block has
the same number in one recording and another in the next, since the key of the hash is made for one
recording and forgotten with it. Tenants, sessions and layouts are numbered. Descriptions of blocks, which alone
hold prompts and salts, are not recorded; names of requests, engines, models and tenants,
identities, checksums and tokens of sessions are left out. The lookups of a recording are a trace (bench/traces.py)."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec.json import encode

from kvkeep import __version__
from kvkeep.errors import RequestError
from kvkeep.kv.identity import is_tenant
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.server.quotas import KeptQuotas
from kvkeep.server.sessions import ServerSession
from kvkeep.store.store import Store
from kvkeep.units import KIB, MIB
from kvkeep.wire import messages as m

Number = Annotated[int, msgspec.Meta(ge=0)]  # any that a message can have
Signed = int

VERSION: Final = 1
MOST_SECONDS: Final = 3600
MOST_BYTES: Final = 1 << 32
LONG_TURN_US: Final = 1000.0  # turns of the loop that are recorded
_WAITING_BYTES = 64 * MIB  # of notes that are not taken
_TAKE_BYTES = 4 * MIB  # of notes, at a time: an answer must be read within seconds
_TAKEN_WITHIN_MS = 10_000
_NOTE_BYTES = 512  # of a note without what the messages carry
_HASH_BYTES = 6  # numbers that every reader of JSON keeps
_ROLES = frozenset({"scheduler", "worker", "client"})
_GONE = "gone"

# What ended a recording.
TIME_OVER: Final = "the time is over"
STOPPED: Final = "stopped"
FULL: Final = "it has its most bytes"
TOO_FAST: Final = "requests came faster than their lines were taken"
DESERTED: Final = "no program took its lines"


class Started(msgspec.Struct, omit_defaults=True):
    """The first line: what decides about blocks, beside the requests. Quotas and limits are those
    that tenants have of their own, by the tenant's number. `blocks` were in the pool."""

    kvkeep_recording: Number
    version: str
    pool_bytes: Number
    slab_bytes: Number
    blocks: Number
    limits: dict[str, Number]
    default_quota_bytes: Number | None = None
    default_limit_bytes: Number | None = None
    quotas: dict[Number, Number] = {}
    tenant_limits: dict[Number, Number] = {}


class Line(msgspec.Struct, omit_defaults=True):
    """One request, or what else has happened (`op`). `timestamp` is in milliseconds since the
    recording began. `number` is the request's number in its session, by which leases and writes
    are named. `us` is the time that the server took. `refused` is the code of a refusal.

    layout    block_bytes, shard_bytes, shard, further_shards, role, block_tokens
    lookup    hash_ids, skip, patience_ms; found, coming; again and found_before of a question that
              is asked again; input_length if the tokens of a block are known
    store     hash_ids, parent, shard, further_shards, priority, ttl_ms; to_write, without_room
    others    hash_ids of finish, prefetch and bad; numbers of release and abandon; number of
              complete's write in numbers; count of what Done counts; evictions and reason of end"""

    timestamp: Number
    op: str
    session: Number = 0
    number: Number = 0
    tenant: Number = 0
    layout: Signed = 0
    hash_ids: list[Number] | None = None
    parent: Number | None = None
    input_length: Number = 0
    skip: Signed = 0
    patience_ms: Signed = 0
    again: bool = False
    found_before: Signed = 0
    found: Number = 0
    coming: Number = 0
    priority: Signed = 50
    ttl_ms: Signed = 0
    to_write: Number = 0
    without_room: Number = 0
    shard: Signed = 0
    further_shards: list[Signed] = []
    shard_bytes: list[Signed] = []
    block_bytes: Number = 0
    block_tokens: Number = 0
    plane: str = ""
    role: str = ""
    numbers: list[Signed] = []
    count: Number = 0
    evictions: Number = 0
    refused: str = ""
    reason: str = ""
    us: float = 0.0


class Note(NamedTuple):
    """What the loop keeps. Without a request, the session has ended or a turn was long."""

    now_ms: int
    token: int
    number: int
    request: m.Request | None
    reply: m.Reply | None
    us: float
    nbytes: int


class Collected(NamedTuple):
    """Notes, and how many blocks were evicted so far. `last`: no more wait."""

    notes: list[Note]
    evictions: int
    now_ms: int
    last: bool


class Taken(NamedTuple):
    """JSON lines, and what ended the recording; "" while it goes on or has more lines."""

    lines: list[str]
    ended: str


class Recorder:
    """One recording. Made, noted into and drained (`collect`, `end`) in the loop's thread; lines
    are made (`describe`) in another, one at a time."""

    def __init__(
        self,
        store: Store,
        sessions: Iterable[ServerSession],
        kept: KeptQuotas,
        seconds: float,
        most_bytes: int,
        now_ms: int,
    ) -> None:
        self.number = secrets.randbits(31)
        self.ended = ""
        self._store = store
        self._began_ms = self._taken_ms = now_ms
        self._until_ms = now_ms + int(seconds * 1000)
        self._left_bytes = most_bytes
        self._evictions = store.eviction.evictions
        self._notes: deque[Note] = deque()
        self._waiting_bytes = 0
        self._describing = threading.Lock()
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[int, int] = {}
        self._tenants: dict[str, int] = {}
        self._block_tokens: dict[int, int] = {}
        self._first = self._introduction(sessions, kept)

    # -- in the loop's thread

    def note(
        self,
        now_ms: int,
        token: int,
        number: int,
        request: m.Request | None,
        reply: m.Reply | None,
        us: float,
        nbytes: int = 0,
    ) -> None:
        """Keeps a request until it is taken. `nbytes` is the size of both messages."""
        if self.ended:
            return
        if now_ms >= self._until_ms:
            self.end(TIME_OVER)
        elif now_ms - self._taken_ms > _TAKEN_WITHIN_MS:
            self.end(DESERTED)
            self._notes.clear()
        elif self._waiting_bytes + nbytes > _WAITING_BYTES:
            self.end(TOO_FAST)
        else:
            nbytes += _NOTE_BYTES
            self._waiting_bytes += nbytes
            self._notes.append(Note(now_ms, token, number, request, reply, us, nbytes))

    def note_end(self, now_ms: int, token: int) -> None:
        """A session has ended, in order or not."""
        self.note(now_ms, token, 0, None, None, 0.0)

    def note_turn(self, now_ms: int, us: float) -> None:
        """The loop has turned; most turns are not worth a line."""
        if us >= LONG_TURN_US:
            self.note(now_ms, 0, 0, None, None, us)

    def end(self, reason: str) -> None:
        """Ends the recording, unless it has ended. What waits can still be taken."""
        self.ended = self.ended or reason

    def is_over(self, now_ms: int) -> bool:
        """Whether another recording may begin."""
        deserted = now_ms - self._taken_ms > _TAKEN_WITHIN_MS
        return bool(self.ended) or deserted or now_ms >= self._until_ms

    def collect(self, now_ms: int) -> Collected:
        """Takes some of the notes that wait."""
        if now_ms >= self._until_ms:
            self.end(TIME_OVER)
        self._taken_ms = now_ms
        notes, nbytes = list[Note](), 0
        while self._notes and nbytes < _TAKE_BYTES:
            notes.append(self._notes.popleft())
            nbytes += notes[-1].nbytes
        self._waiting_bytes -= nbytes
        evictions = self._store.eviction.evictions - self._evictions
        return Collected(notes, evictions, now_ms, last=not self._notes)

    # -- in the thread of who takes lines

    def describe(self, collected: Collected) -> Taken:
        """The lines of these notes. Ends the recording if they do not fit."""
        with self._describing:
            lines, self._first = self._first, []
            lines += [encode(line) for note in collected.notes if (line := self._line(note))]
            fitting, self._left_bytes = _fitting(lines, self._left_bytes)
            if is_full := fitting < len(lines):
                self.end(FULL)
            ended = self.ended if collected.last or is_full else ""
            lines = lines[:fitting]
            if ended:
                at = collected.now_ms - self._began_ms
                lines.append(encode(Line(at, "end", evictions=collected.evictions, reason=ended)))
            return Taken([line.decode() for line in lines], ended)

    def _introduction(self, sessions: Iterable[ServerSession], kept: KeptQuotas) -> list[bytes]:
        """What is known when the recording begins: the pool, its layouts and the sessions."""
        store = self._store
        started = Started(
            VERSION,
            __version__,
            store.pool_bytes,
            store.slabs.slab_bytes,
            len(store.blocks.table),
            asdict(store.limits),
            store.tenants.default_quota_bytes,
            store.tenants.default_limit_bytes,
            {self._tenant(name): nbytes for name, nbytes in kept.tenants.items()},
            {self._tenant(name): nbytes for name, nbytes in kept.limits.items()},
        )
        lines = []
        for layout in store.layouts:
            sizes = list(layout.shard_bytes)
            lines.append(
                Line(
                    0,
                    "layout",
                    layout=layout.number,
                    block_bytes=layout.slot_bytes,
                    shard_bytes=sizes,
                )
            )
        for session in sessions:
            number = self._session(session.token)
            self._block_tokens[session.layout] = _block_tokens(session.parts)
            lines.append(Line(0, "session", number, plane=session.plane, role=_role(session.role)))
        return [encode(started), *map(encode, lines)]

    def _line(self, note: Note) -> Line | None:
        """The line of one note; None for what says nothing."""
        at = note.now_ms - self._began_ms
        if note.request is None:
            if note.token:
                return Line(at, _GONE, self._session(note.token))
            return Line(at, "turn", us=note.us)
        request, reply = note.request, note.reply
        if isinstance(request, m.Goodbye) and not isinstance(reply, m.Refused):
            return None  # the session's end has a line
        token = reply.session if isinstance(reply, m.Welcome) else note.token
        line = Line(at, type(request).__name__.lower(), self._session(token), note.number)
        line.us = round(note.us, 1)
        if isinstance(reply, m.Refused):
            line.refused = reply.code
        elif isinstance(reply, m.Done):
            line.count = reply.count
        match request:
            case m.Attach():
                known = request.plane in (m.SHARED_MEMORY, m.NETWORK)
                line.plane = request.plane if known else ""
            case m.OpenLayout():
                self._describe_layout(line, request, reply)
            case m.Lookup():
                self._describe_lookup(line, request, reply)
            case m.PrepareStore():
                self._describe_store(line, request, reply)
            case m.Prefetch():
                self._name_blocks(line, request.tenant, request.layout, request.keys)
            case m.Finish() | m.ReportBad():
                line.op = "bad" if isinstance(request, m.ReportBad) else line.op
                self._name_blocks(line, request.tenant, request.layout, request.key)
            case m.Release():
                line.numbers = request.leases
            case m.AbandonStore():
                line.op, line.numbers = "abandon", request.writes
            case m.CompleteStore():
                line.op, line.numbers = "complete", [request.write]
            case m.ReportRequests():
                line.op = "report"
        return line

    def _describe_layout(self, line: Line, request: m.OpenLayout, reply: m.Reply | None) -> None:
        line.op, line.role = "layout", _role(request.role)
        line.shard, line.further_shards = request.shard, request.further_shards
        line.shard_bytes, line.block_tokens = request.shard_bytes, _block_tokens(request.parts)
        if isinstance(reply, m.LayoutOpened):
            line.layout, line.block_bytes = reply.layout, reply.slot_bytes
            self._block_tokens[reply.layout] = line.block_tokens

    def _describe_lookup(self, line: Line, request: m.Lookup, reply: m.Reply | None) -> None:
        self._name_blocks(line, request.tenant, request.layout, request.keys)
        line.input_length = len(line.hash_ids or []) * self._block_tokens.get(request.layout, 0)
        line.skip, line.patience_ms = request.skip, request.patience_ms
        if request.found_before >= 0:
            line.again, line.found_before = True, request.found_before
        if isinstance(reply, m.Found):
            line.found, line.coming = reply.blocks, reply.coming

    def _describe_store(self, line: Line, request: m.PrepareStore, reply: m.Reply | None) -> None:
        self._name_blocks(line, request.tenant, request.layout, request.keys)
        line.op, line.shard, line.further_shards = "store", request.shard, request.further_shards
        line.priority, line.ttl_ms = request.priority, request.ttl_ms
        if request.parent:
            line.parent = self._hashes(request.tenant, request.layout, request.parent)[0]
        if isinstance(reply, m.Prepared):
            line.to_write, line.without_room = len(reply.positions) // 4, reply.refused

    def _name_blocks(self, line: Line, tenant: str, layout: int, keys: bytes) -> None:
        line.tenant, line.layout = self._tenant(tenant), layout
        line.hash_ids = self._hashes(tenant, layout, keys)

    def _hashes(self, tenant: str, layout: int, keys: bytes) -> list[int]:
        """A number for each key, even if the last is not whole."""
        owner = f"{tenant} {layout} ".encode(errors="replace")
        start = blake2b(owner, key=self._secret, digest_size=_HASH_BYTES)
        numbers = []
        for at in range(0, len(keys), KEY_BYTES):
            each = start.copy()
            each.update(keys[at : at + KEY_BYTES])
            numbers.append(int.from_bytes(each.digest(), "little"))
        return numbers

    def _tenant(self, tenant: str) -> int:
        tenant = tenant if is_tenant(tenant) else ""  # refused, and as long as a message
        return self._tenants.setdefault(tenant, len(self._tenants) + 1)

    def _session(self, token: int) -> int:
        return self._sessions.setdefault(token, len(self._sessions) + 1)


def check_wanted(seconds: float, most_bytes: int) -> None:
    """Raises unless a recording may be that long and that large."""
    if not 0 < seconds <= MOST_SECONDS:
        raise RequestError(
            "bad_request",
            f"a recording takes {MOST_SECONDS} seconds at most, not {seconds:g}",
            field="seconds",
        )
    if not 64 * KIB <= most_bytes <= MOST_BYTES:
        raise RequestError(
            "bad_request",
            f"a recording has {64 * KIB} to {MOST_BYTES} bytes, not {most_bytes}",
            field="most_bytes",
        )


def _fitting(lines: Sequence[bytes], left_bytes: int) -> tuple[int, int]:
    """How many of the lines fit, and how many bytes are left then."""
    for at, line in enumerate(lines):
        if len(line) >= left_bytes:
            return at, 0
        left_bytes -= len(line) + 1
    return len(lines), left_bytes


def _role(role: str) -> str:
    """What clients of ours call themselves, and nothing else that a client may say."""
    word = role.partition(" ")[0]
    return word if word in _ROLES else ""


def _block_tokens(parts: Mapping[str, str]) -> int:
    said = parts.get("block_tokens", "")
    return int(said) if said.isascii() and said.isdecimal() and len(said) < 8 else 0
