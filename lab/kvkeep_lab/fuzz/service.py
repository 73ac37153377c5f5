"""Fuzz target of the server: a whole service with hostile sessions beside a good one. After every
message limits hold; in the end the good client gets its own bytes or a miss, everybody leaves, and
nothing stays behind."""

from __future__ import annotations

from typing import Any

from kvkeep.kv.checksum import checksum
from kvkeep.kv.identity import tenant_of
from kvkeep.server.auth import ANYONE, Caller
from kvkeep.server.counters import Counters
from kvkeep.server.sessions import ServerSession
from kvkeep.store.plans import Limits
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, decode_reply, encode, seal
from kvkeep_lab.fuzz.choices import Choices, Leak, Ran
from kvkeep_lab.fuzz.wire import (
    FRAME_BYTES,
    PLANES,
    REQUESTS,
    SHARD_BYTES,
    Fields,
    damaged,
    pack,
    spoiled,
)
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.server import SimulatedServer
from kvkeep_lab.simulation.store_integrity import check_integrity

LIMITS = Limits(
    blocks_per_request=32,
    leases_per_session=8,
    writing_blocks_per_session=24,
    sessions=6,
    layouts=6,
    tenants=16,
)
MOST_MESSAGES, MOST_MESSAGES_OF_A_FLOOD = 40, 1_000  # of an input
# Refusals of the decoder. Input without a header gets no answer.
_MALFORMED = ("bad_frame", "frame_too_large", "bad_message")
_SLAB_BYTES, _POOL_BYTES = 4 * 4096, 24 * 4096
_NETWORK_TIMEOUT_MS = 10_000
_CALLERS = (
    ANYONE,
    Caller("k" * 40, "one", ("default",)),
    Caller("j" * 40, "two", ()),
    Caller("i" * 40, revoked=True),
)
# What goes deep is said more often than what ends a session.
_OFTEN = (m.PrepareStore, m.Lookup, m.CompleteStore, m.Put, m.Fetch, m.Release, m.AbandonStore)
_KINDS: tuple[type[Any], ...] = (
    *(kind for kind in REQUESTS if kind is not m.Goodbye),
    *_OFTEN * 2,
    m.Goodbye,
)
_GOOD_TENANT = tenant_of("a good client's salt")


class Held:
    """The lock of a process on the server's host: held until somebody kills it."""

    path = "session.lock"

    def __init__(self) -> None:
        self.alive = True

    def is_held(self) -> bool:
        return self.alive

    def close(self) -> None:
        pass

    def leave(self) -> None:
        pass


class Siege:
    """One server, one good client, and everything else that an input says. In a flood half the
    messages are spoiled and half of all are damaged; otherwise few are, so that the others go
    deep."""

    def __init__(self, data: bytes, *, flood: bool = False) -> None:
        self._most_messages = MOST_MESSAGES_OF_A_FLOOD if flood else MOST_MESSAGES
        self._wrong_from = 128 if flood else 240  # of a byte
        self.choices = Choices(data)
        self.fields = Fields(self.choices)
        self.now_ms = 1000
        self.messages = self.malformed_frames = 0
        self.tokens: list[tuple[int, Caller]] = [(0, ANYONE)]
        self.half_stored: list[tuple[int, m.CompleteStore]] = []
        self.locks: list[Held] = []
        self.server = self._serve(None)
        self.good = self._good()
        self._hello(ANYONE)

    def run(self) -> Ran:
        """Every message is answered as it should be; then everybody leaves, and nothing stays."""
        while self.choices.left and self.messages < self._most_messages:
            what = self.choices.byte()
            if what < 200:
                self._attack(_KINDS[what % len(_KINDS)])
            elif what < 220:
                self._store()
            elif what < 240:
                self._complete()
            elif what < 246:
                self._wait()
            elif what < 250:
                self._hello(self.choices.pick(_CALLERS))
            elif what < 253:
                self.server.service.bar({_CALLERS[1].key}, self.now_ms)
            else:
                self._restart()
            self._check_limits()
        self._check_good()
        self._check_nothing_stays()
        return Ran(self.messages, self.malformed_frames)

    def _serve(self, before: SimulatedServer | None) -> SimulatedServer:
        held = before is not None and any(lock.alive for lock in self.locks)
        server = SimulatedServer(
            _POOL_BYTES,
            _SLAB_BYTES,
            limits=LIMITS,
            frame_bytes=FRAME_BYTES,
            network_timeout_ms=_NETWORK_TIMEOUT_MS,
            before=before,
            old_sessions=lambda: int(held and any(lock.alive for lock in self.locks)),
            now_ms=self.now_ms,
        )
        server.service._make_watch = self._lock  # type: ignore[assignment]
        return server

    def _lock(self, number: int) -> Held:
        self.locks.append(Held())
        return self.locks[-1]

    def _good(self) -> Peer:
        peer = Peer(lambda frames: self.server.service.handle(frames, self.now_ms)).attach()
        self.layout = peer.open_layout(SHARD_BYTES)
        peer.store(self.layout, chain("good", 2), _good_blocks(), tenant=_GOOD_TENANT)
        return peer

    def _say(self, frames: list[bytes], caller: Caller) -> m.Reply | None:
        self.messages += 1
        before = _malformed(self.server.service.counters)
        reply = self.server.service.handle(frames, self.now_ms, caller)
        self.malformed_frames += _malformed(self.server.service.counters) - before
        if reply is None:
            return None
        answer = decode_reply(decode_header(reply), [bytes(frame) for frame in reply])
        assert self.server.service.counters.internal_errors == 0, f"an internal error: {answer}"
        return answer

    def _hello(self, caller: Caller) -> None:
        """One that begins as it should, so that what follows goes deep."""
        answer = self._say(encode(Header(0, 1), m.Hello("hostile", 7)), caller)
        if isinstance(answer, m.Welcome):
            self.tokens.append((answer.session, caller))
            for number, first in (
                (2, m.Attach(self.choices.pick(PLANES[:2]))),
                (3, m.OpenLayout(b"a" * 16, [64])),
            ):
                opened = self._say(encode(Header(answer.session, number), first), caller)
                self.fields.layout = (
                    opened.layout if isinstance(opened, m.LayoutOpened) else self.fields.layout
                )
            self.fields.used.append(3)

    def _attack(self, kind: type[Any]) -> None:
        choices = self.choices
        if len(self.tokens) == 1:
            self._hello(ANYONE)
        known = self.tokens if choices.seldom() else self.tokens[1:] or self.tokens
        token, caller = known[-1 - choices.byte() % len(known)]
        message = self.fields.message(kind)
        number = self.fields.earlier() & (1 << 64) - 1 if choices.seldom() else self._next_number()
        header = Header(token, number)
        payload = (
            [bytes(choices.pick((64, 64, 63, 0)))] * (choices.byte() % 4) if kind is m.Put else []
        )
        body = spoiled(choices, message) if choices.byte() >= self._wrong_from else pack(message)
        frames = seal(header, body, payload)
        if choices.byte() >= self._wrong_from:
            frames = damaged(choices, frames)
        answer = self._say(frames, choices.pick(_CALLERS) if choices.seldom() else caller)
        self.fields.used.append(number)
        if isinstance(answer, m.Welcome):
            self.tokens.append((answer.session, caller))
        if (
            isinstance(answer, m.Refused)
            and answer.code == "unknown_session"
            and (token, caller) in self.tokens[1:]
        ):
            self.tokens.remove((token, caller))
        if isinstance(answer, m.Prepared) and answer.positions:
            self.half_stored.append(
                (token, m.CompleteStore(number, bytes(2 * len(answer.positions))))
            )

    def _next_number(self) -> int:
        return (self.fields.used[-1] + 1) % (1 << 63)

    def _store(self) -> None:
        """A store as it should be, by one who may do other things next."""
        token, caller = self.tokens[-1]
        keys = chain(self.choices.pick("ab"), 1 + self.choices.below(5))
        number = self._next_number()
        prepare = m.PrepareStore("default", self.fields.layout, 0, b"", keys)
        plan = self._say(encode(Header(token, number), prepare), caller)
        if isinstance(plan, m.Prepared) and plan.positions:
            blocks = len(plan.positions) // 4
            self._say(
                encode(Header(token, number + 1), m.Put(number, 0), [bytes(SHARD_BYTES)] * blocks),
                caller,
            )
            sums = checksum(bytes(SHARD_BYTES)).to_bytes(8, "little") * blocks
            if self.choices.seldom():
                self.half_stored.append((token, m.CompleteStore(number, sums)))
            else:
                self._say(encode(Header(token, number + 2), m.CompleteStore(number, sums)), caller)
        self.fields.used += [number, number + 2]

    def _complete(self) -> None:
        """What an honest client would say next about a store."""
        if self.half_stored:
            token, message = self.half_stored.pop()
            number = self._next_number()
            self._say(encode(Header(token, number), message), dict(self.tokens).get(token, ANYONE))
            self.fields.used.append(number)

    def _wait(self) -> None:
        self.now_ms += self.choices.pick(
            (1, 100, _NETWORK_TIMEOUT_MS // 2, _NETWORK_TIMEOUT_MS + 1)
        )
        if self.choices.seldom():
            for lock in self.locks:
                lock.alive = False
        self.server.service.end_dead_sessions(self.now_ms)

    def _restart(self) -> None:
        """The server dies here; the next one adopts what it left. Old processes may live on."""
        self.server = self._serve(self.server)
        self.server.check_integrity()
        self.half_stored.clear()
        self.good = self._good()

    def _check_limits(self) -> None:
        service, store = self.server.service, self.server.store
        if (
            len(service.sessions) > LIMITS.sessions
            or len(store.layouts._by_number) > LIMITS.layouts
        ):
            raise Leak("more sessions or layouts than are allowed")
        for session in service.sessions.all():
            held = store.sessions[session.number]
            _check_session(session, len(held.leases), held.writing_blocks)

    def _check_good(self) -> None:
        """The good client gets its own bytes or a miss. It may have been silent for too long, and
        then it says so."""
        reply = self.good.say(m.Ping())
        if isinstance(reply, m.Refused):
            assert reply.code == "unknown_session", reply
            if len(self.server.service.sessions) >= LIMITS.sessions:
                return
            self.good = self._good()
        loaded = self.good.load(self.layout, chain("good", 2), tenant=_GOOD_TENANT)
        assert loaded == _good_blocks()[: len(loaded)], "another's bytes"

    def _check_nothing_stays(self) -> None:
        check_integrity(self.server.store)
        for lock in self.locks:
            lock.alive = False
        self.server.service.end_dead_sessions(self.now_ms + _NETWORK_TIMEOUT_MS + 1)
        store, table = self.server.store, self.server.store.blocks.table
        check_integrity(store)
        if len(self.server.service.sessions) or store.sessions or store.writers:
            raise Leak("sessions or writes of processes that are gone")
        if any(table.pins[row] for row in table.live_rows().tolist()):
            raise Leak("leases of processes that are gone")


def _check_session(session: ServerSession, leases: int, writing_blocks: int) -> None:
    if leases > LIMITS.leases_per_session or len(session.network_leases) > leases:
        raise Leak("more leases than are allowed")
    if (
        writing_blocks > LIMITS.writing_blocks_per_session
        or len(session.network_writes) > writing_blocks
    ):
        raise Leak("more writes than are allowed")


def _good_blocks() -> list[bytes]:
    return [f"good/{at}".encode().ljust(SHARD_BYTES) for at in range(2)]


def _malformed(counters: Counters) -> int:
    """How many messages the service could not read, by its own count."""
    return counters.bad_frames + sum(counters.refusals.get(code, 0) for code in _MALFORMED)


def run_service(data: bytes) -> Ran:
    """One siege."""
    return Siege(data).run()


def flood_service(data: bytes) -> Ran:
    """One siege, mostly of what cannot be read."""
    return Siege(data, flood=True).run()
