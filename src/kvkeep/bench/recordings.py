"""Recordings of a server's requests (server/recording.py): what they say, and their replay.

A replay carries out the recorded requests, in their order and at their times, in a service and a
store of this process: the real ones, with the recorded pool, quotas and limits, but without sockets,
memory for blocks, or tiers. What came from a tier is a miss, and what operators changed while the
server was recorded is not known.

Blocks that the recording finds without having stored them were in the pool when it began. They are
stored first, so far as they fit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import RequestError, SettingsError
from kvkeep.kv.checksum import mix64
from kvkeep.server.recording import VERSION, Line, Started
from kvkeep.server.service import FINGERPRINT_BYTES, Service
from kvkeep.store.operators import restore
from kvkeep.store.plans import Limits
from kvkeep.store.store import BLOCKS_PER_STORE, Store
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, decode_reply, encode
from kvkeep.wire.pool_files import Watch

_BEFORE = 0  # the session that stores what was in the pool
_FRAME_BYTES = 1 << 26
_HINT = "name a file that `kvkeep record` has written"
# Refused requests that are asked again: what became of them depends on what the store holds.
_ASKED_AGAIN = frozenset(
    {"", "too_many_leases", "too_many_writes", "too_many_blocks", "too_many_tenants"}
)


class Recording:
    """A file of lines. Each pass reads it again: it may have gigabytes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._decoder = msgspec.json.Decoder(Line)
        with self._open() as lines:
            first = lines.readline()
        try:
            self.started = msgspec.json.decode(first, type=Started)
        except msgspec.DecodeError:
            raise SettingsError(f"{path} is no recording of requests", _HINT) from None
        if self.started.kvkeep_recording != VERSION:
            raise SettingsError(
                f"{path} is a recording of version {self.started.kvkeep_recording}, this kvkeep "
                f"reads version {VERSION}",
                f"use kvkeep {self.started.version}, which wrote it",
            )

    def __iter__(self) -> Iterator[Line]:
        with self._open() as lines:
            lines.readline()
            for number, line in enumerate(lines, start=2):
                try:
                    yield self._decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise SettingsError(f"{self.path}, line {number}: {error}", _HINT) from None

    def _open(self) -> Any:
        try:
            return Path(self.path).open("rb")
        except OSError as error:
            raise SettingsError(f"cannot read {self.path}: {error.strerror}", _HINT) from None


@dataclass
class Sums:
    """What a server did with the requests. `evictions` is None where a recording has no end."""

    lookups: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    stored_blocks: int = 0
    without_room_blocks: int = 0
    evictions: int | None = None
    longest_turn_ms: float = 0.0
    refusals: Counter[str] = field(default_factory=Counter)
    _times_us: dict[str, list[float]] = field(default_factory=dict)

    def count(self, line: Line, us: float) -> None:
        """Counts a line as a recording has it."""
        if us:
            self._times_us.setdefault(line.op, []).append(us)
            self.longest_turn_ms = max(self.longest_turn_ms, round(us / 1000, 3))
        if line.refused:
            self.refusals[line.refused] += 1
        elif line.op == "lookup":
            if not line.again:
                self.lookups += 1
                self.lookup_blocks += len(line.hash_ids or ())
            self.hit_blocks += max(0, line.found - line.found_before)
        elif line.op == "store":
            self.without_room_blocks += line.without_room
        elif line.op == "complete":
            self.stored_blocks += line.count
        elif line.op == "end":
            self.evictions = line.evictions

    def as_json(self) -> dict[str, Any]:
        shown = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        times = {op: _spread(each) for op, each in sorted(self._times_us.items()) if op != "turn"}
        return shown | {"refusals": dict(self.refusals), "times": times}


def _spread(times_us: Sequence[float]) -> dict[str, float | int]:
    p50, p99, longest = np.percentile(times_us, (50, 99, 100)) / 1000
    return {
        "requests": len(times_us),
        "p50_ms": round(float(p50), 4),
        "p99_ms": round(float(p99), 4),
        "longest_ms": round(float(longest), 4),
    }


@dataclass
class Summary:
    """A recording, and its replay if there was one."""

    seconds: float
    sessions: int
    tenants: int
    reason: str
    recorded: Sums
    replayed: Sums | None = None
    stored_before_blocks: int = 0

    def as_json(self) -> dict[str, Any]:
        shown = {name: value for name, value in vars(self).items() if name != "replayed"}
        shown["recorded"] = self.recorded.as_json()
        if self.replayed is None:
            del shown["stored_before_blocks"]
            return shown
        return shown | {"replayed": self.replayed.as_json()}


def summarize(recording: Recording) -> Summary:
    sums, sessions, tenants, last_ms, reason = Sums(), set(), set(), 0, ""
    for line in recording:
        sums.count(line, line.us)
        last_ms, reason = line.timestamp, line.reason or reason
        sessions.add(line.session)
        tenants.add(line.tenant)
    counts = len(sessions - {0}), len(tenants - {0})
    return Summary(last_ms / 1000, *counts, reason or "it was cut off", sums)


def replay(recording: Recording) -> Summary:
    """Carries out the recording and adds what came of it to its summary."""
    summary = summarize(recording)
    server = _Server(recording)
    summary.stored_before_blocks = server.store_before(_found_unstored(recording))
    evicted_before = server.store.eviction.evictions
    summary.replayed = Sums()
    for line in recording:
        for done, us in server.carry_out(line):
            summary.replayed.count(done, us)
    summary.replayed.evictions = server.store.eviction.evictions - evicted_before
    return summary


def _found_unstored(recording: Recording) -> list[Line]:
    """The lookups that find blocks which the recording did not store, each with what it found."""
    stored, lookups = set[tuple[int, int]](), []
    for line in recording:
        if line.op not in ("store", "lookup") or line.refused or not line.hash_ids:
            continue
        there = line.hash_ids if line.op == "store" else line.hash_ids[: line.found]
        keys = {(line.tenant, each) for each in there}
        if line.op == "lookup" and not keys <= stored:
            lookups.append(msgspec.structs.replace(line, hash_ids=there))
        stored |= keys
    return lookups


class _Alive(Watch):
    """Of a session that only its requests end."""

    def __init__(self) -> None:
        self.path = Path()

    def is_held(self) -> bool:
        return True

    def close(self) -> None: ...


class _NoMemory:
    """The pool of a replay has no bytes, so no block matches its checksum."""

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return np.zeros(1, np.uint8)


class _Server:
    """A service with the recorded pool, quotas and limits, which is asked what the recording says.
    Sessions and layouts that were open before the recording began are opened at their first use."""

    def __init__(self, recording: Recording) -> None:
        self._recording, started = recording, recording.started
        try:
            limits = Limits(**started.limits)
            self.store = Store(started.pool_bytes, started.slab_bytes, limits)
            self.store.add_slabs(0, started.pool_bytes // started.slab_bytes)
            restore(
                self.store,
                {_tenant(number): nbytes for number, nbytes in started.quotas.items()},
                {_tenant(number): nbytes for number, nbytes in started.tenant_limits.items()},
                started.default_quota_bytes,
                started.default_limit_bytes,
                0,
            )
        except (TypeError, ValueError, ZeroDivisionError, RequestError) as error:
            raise SettingsError(f"{recording.path}, line 1: {error}", _HINT) from None
        place = m.PoolPlace("", "", started.slab_bytes, started.pool_bytes)
        wire = m.WireLimits(
            _FRAME_BYTES,
            limits.blocks_per_request,
            limits.leases_per_session,
            limits.writing_blocks_per_session,
        )
        self._service = Service(self.store, _NoMemory(), place, wire, 1, lambda number: _Alive())
        self._shapes = dict[int, list[int]]()
        self._tokens = dict[int, int]()
        self._layouts = dict[tuple[int, int], int]()  # by session and recorded number
        self._to_write = dict[tuple[int, int], int]()  # checksums that a write needs
        self._us = 0.0

    def store_before(self, lookups: Sequence[Line]) -> int:
        """Stores what these lookups found, the one that is needed first last. Returns how many
        blocks were stored."""
        for line in self._recording:
            if line.timestamp:
                break
            if line.op == "layout":
                self._shapes[line.layout] = line.shard_bytes
        number = stored = 0
        for line in reversed(lookups):
            ids = line.hash_ids or []
            for at in range(0, len(ids), BLOCKS_PER_STORE):
                number += 1
                parent = ids[at - 1] if at else None
                some = ids[at : at + BLOCKS_PER_STORE]
                stored += self._store_whole(line, number, parent, some)
        list(self.carry_out(Line(0, "gone", _BEFORE)))
        return stored

    def carry_out(self, line: Line) -> Iterator[tuple[Line, float]]:
        """Asks what the line says. Yields it with what came of it now, and the time; nothing for a
        line that is not replayed."""
        if line.op == "layout":
            self._shapes[line.layout] = line.shard_bytes
            return
        if line.op == "gone" and line.session in self._tokens:
            self._ask(line, m.Goodbye())
            del self._tokens[line.session]
            self._layouts = {at: n for at, n in self._layouts.items() if at[0] != line.session}
            return
        request = self._request(line) if line.refused in _ASKED_AGAIN else None
        if request is None:
            return
        reply = self._ask(line, request)
        took_us = self._us
        done = msgspec.structs.replace(line, refused="")
        match reply:
            case m.Refused():
                done.refused = reply.code
            case m.Found():
                done.found = reply.blocks
                if line.found <= line.skip < reply.blocks:  # the client has no lease to release
                    self._ask(line, m.Release([line.number]))
            case m.Prepared():
                self._finish_prepare(line, done, reply)
            case m.Done():
                done.count = reply.count
        yield done, took_us

    def _request(self, line: Line) -> m.Request | None:
        """What is asked; None for what does not concern the store."""
        match line.op:
            case "lookup":
                tenant, layout, keys = self._named(line)
                before = line.found_before if line.again else -1
                return m.Lookup(tenant, layout, keys, line.skip, found_before=before)
            case "release":
                return m.Release(line.numbers)
            case "store":
                tenant, layout, keys = self._named(line)
                parent = _keys([] if line.parent is None else [line.parent])
                hints = line.priority, line.ttl_ms, line.further_shards
                return m.PrepareStore(tenant, layout, line.shard, parent, keys, *hints)
            case "complete":
                needs = [self._to_write.pop((line.session, each), 0) for each in line.numbers]
                return m.CompleteStore(line.numbers[0], bytes(8 * needs[0])) if any(needs) else None
            case "abandon":
                return m.AbandonStore(line.numbers)
            case "finish":
                return m.Finish(*self._named(line))
            case "bad" if line.count:  # which only the server that has the bytes can tell
                return m.ReportBad(*self._named(line))
            case _:
                return None

    def _finish_prepare(self, line: Line, done: Line, reply: m.Prepared) -> None:
        done.to_write, done.without_room = len(reply.positions) // 4, reply.refused
        if not done.to_write:
            return
        self._to_write[line.session, line.number] = done.to_write * (1 + len(line.further_shards))
        if not line.to_write:  # the client had nothing to complete
            needs = self._to_write.pop((line.session, line.number))
            self._ask(line, m.CompleteStore(line.number, bytes(8 * needs)))

    def _store_whole(self, line: Line, number: int, parent: int | None, ids: list[int]) -> int:
        """All shards of some blocks."""
        shards = list(range(len(self._shapes.get(line.layout, [1]))))
        store = Line(0, "store", _BEFORE, number, line.tenant, line.layout, ids, parent)
        store.further_shards = shards[1:]
        return sum(done.to_write for done, _ in self.carry_out(store))

    def _named(self, line: Line) -> tuple[str, int, bytes]:
        key = line.session, line.layout
        if key not in self._layouts:
            fingerprint = line.layout.to_bytes(FINGERPRINT_BYTES, "little", signed=True)
            shape = self._shapes.get(line.layout, [1])
            reply = self._ask(line, m.OpenLayout(fingerprint, shape))
            # A refused one is refused again where it is named.
            self._layouts[key] = reply.layout if isinstance(reply, m.LayoutOpened) else -1
        return _tenant(line.tenant), self._layouts[key], _keys(line.hash_ids or [])

    def _ask(self, line: Line, request: m.Request) -> m.Reply:
        """Also completes what the request has begun. The time of both is in `_us`."""
        if line.session not in self._tokens:
            welcome = self._send(0, line, m.Hello("replay", 0))
            if not isinstance(welcome, m.Welcome):
                return welcome
            self._tokens[line.session] = welcome.session
            self._send(welcome.session, line, m.Attach(m.SHARED_MEMORY))
        return self._send(self._tokens[line.session], line, request)

    def _send(self, token: int, line: Line, request: m.Request) -> m.Reply:
        frames = [bytes(each) for each in encode(Header(token, line.number), request)]
        began = time.perf_counter()
        reply = self._service.handle(frames, line.timestamp)
        self._us = (time.perf_counter() - began) * 1e6
        while self.store.has_to_tidy:
            began = time.perf_counter()
            self.store.tidy(line.timestamp)
            self._us = max(self._us, (time.perf_counter() - began) * 1e6)
        assert reply is not None
        return decode_reply(decode_header(reply), reply)


def _tenant(number: int) -> str:
    return f"t-{number:032x}"


def _keys(ids: Sequence[int]) -> bytes:
    """Keys as random as hashes are."""
    words = np.array(ids, np.uint64)
    return mix64(np.stack((words, words ^ np.uint64(1 << 63)), axis=1)).tobytes()
