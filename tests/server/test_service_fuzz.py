"""Hostile clients against the service: well-formed messages with values nobody would send, beside a
client that behaves. The store stays sound, every request is answered, and the good client always
gets its own bytes or a miss."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvkeep.kv.identity import tenant_of
from kvkeep.store.plans import Limits
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, decode_reply, encode
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.server import SimulatedServer
from kvkeep_lab.simulation.store_integrity import check_integrity

MESSAGES = 10_000
NUMBERS = [
    -(2**63),
    -(2**31),
    -1,
    0,
    1,
    2,
    3,
    7,
    50,
    100,
    101,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
TENANTS = ["default", tenant_of("a"), tenant_of("b"), "", "salt", "t-" + "0" * 31, "x" * 5_000]
KEY_RUNS = [chain(name, length) for name in "abc" for length in (0, 1, 2, 5, 9, 33)]
KEY_RUNS += [
    KEY_RUNS[2][:-1],
    KEY_RUNS[3] * 2,
    KEY_RUNS[4][::-1],
    b"k",
    bytes(16 * 4),
    chain("a", 5)[16:],
]
LIMITS = Limits(
    blocks_per_request=32,
    leases_per_session=16,
    writing_blocks_per_session=24,
    sessions=12,
    layouts=8,
    tenants=64,
)


class Attacker:
    """Several sessions that say anything at all, often about things that exist, theirs or not."""

    def __init__(self, server: SimulatedServer, seed: int) -> None:
        self.rng = random.Random(seed)
        self.server = server
        self.sessions = [0]
        self.used = [0]  # numbers of earlier requests, of any session
        self.open_writes: list[
            tuple[int, m.CompleteStore]
        ] = []  # what an honest client would say next, and to whom
        self.now_ms = 0

    def number(self) -> int:
        return (
            self.rng.choice(self.used[-40:])
            if self.rng.random() < 0.5
            else self.rng.choice(NUMBERS)
        )

    def numbers(self) -> list[int]:
        return [self.number() for _ in range(self.rng.randrange(6))]

    def small(self) -> int:
        return self.rng.randrange(4) if self.rng.random() < 0.8 else self.rng.choice(NUMBERS)

    def layout(self) -> int:
        return 1 if self.rng.random() < 0.8 else self.small()

    def keys(self) -> bytes:
        return self.rng.choice(KEY_RUNS)

    def key(self) -> bytes:
        return (
            self.keys()[-16:]
            if self.rng.random() < 0.9
            else self.rng.randbytes(self.rng.randrange(40))
        )

    def tenant(self) -> str:
        return self.rng.choice(TENANTS[:3] if self.rng.random() < 0.9 else TENANTS)

    def texts(self) -> list[bytes]:
        return [self.rng.randbytes(self.rng.randrange(9)) for _ in range(self.rng.randrange(7))]

    def message(self) -> tuple[m.Message, list[bytes]]:
        rng = self.rng
        payload = [bytes(rng.choice([64, 64, 0, 63, 100])) for _ in range(rng.randrange(6))]
        sizes = [rng.choice([64, 64, 100, 4096, *NUMBERS]) for _ in range(rng.randrange(5))]
        prepare = m.PrepareStore(
            self.tenant(),
            self.layout(),
            rng.choice([0, 0, 0, self.small()]),
            rng.choice([b"", b"", self.key()]),
            self.keys(),
            rng.choice([50, rng.choice(NUMBERS)]),
            rng.choice([0, 10, rng.choice(NUMBERS)]),
        )
        choices: list[tuple[int, m.Message]] = [
            (1, m.Hello("x" * rng.randrange(300), rng.choice(NUMBERS))),
            (2, m.Attach(rng.choice([m.NETWORK, m.SHARED_MEMORY, "", "x" * 5_000]))),
            (1, m.Ping()),
            (2, m.OpenLayout(rng.choice([b"a" * 16, b"b" * 16, rng.randbytes(16), b""]), sizes)),
            (8, m.Lookup(self.tenant(), self.layout(), self.keys(), self.small())),
            (
                2,
                m.Lookup(self.tenant(), self.layout(), self.keys(), 0, self.number(), self.small()),
            ),
            (2, m.Prefetch(self.tenant(), self.layout(), self.keys())),
            (3, m.Release(self.numbers())),
            (2, m.Finish(self.tenant(), self.layout(), self.key())),
            (8, prepare),
            (
                5,
                m.CompleteStore(
                    self.number(), rng.randbytes(8 * rng.randrange(6) + rng.choice([0, 0, 0, 3]))
                ),
            ),
            (2, m.AbandonStore(self.numbers())),
            (1, m.ReportBad(self.tenant(), self.layout(), self.key())),
            (3, m.Fetch(self.number(), self.small(), self.small(), self.small())),
            (4, m.Put(self.number(), self.small())),
            (2, m.DescribeBlocks(self.tenant(), self.layout(), self.keys(), self.texts())),
            (2, m.PoolEvents(self.layout(), self.number(), rng.choice([-1, 0, self.number()]))),
            (1, m.Goodbye()),
        ]
        weights, messages = zip(*choices, strict=True)
        return rng.choices(messages, weights)[0], payload

    def attack(self) -> None:
        """Says one thing. Asserts that the answer is an answer."""
        rng = self.rng
        message, payload = self.message()
        session = rng.choice(self.sessions) if rng.random() < 0.95 else rng.choice(NUMBERS[3:])
        if self.open_writes and rng.random() < 0.1:
            session, message = self.open_writes.pop(rng.randrange(len(self.open_writes)))
        number = rng.choice(self.used[-20:]) if rng.random() < 0.05 else rng.randrange(1, 2**64)
        header = Header(session, number)
        frames = [bytes(frame) for frame in encode(header, message, payload)]
        if rng.random() < 0.2:
            frames = seal(header, self.spoiled(frames[1]), frames[2:])
        self.now_ms += rng.choice([0, 0, 1, 50])
        reply = self.server.service.handle(frames, self.now_ms)
        self.used.append(number)
        if reply is not None:
            self.learn(header, message, decode_reply(decode_header(reply), reply))

    def learn(self, header: Header, message: m.Message, answer: m.Reply) -> None:
        assert not (isinstance(answer, m.Refused) and answer.code == "internal_error"), (
            f"{message}: {answer}"
        )
        if isinstance(answer, m.Welcome):
            self.sessions.append(answer.session)
            for first in (
                m.Attach(self.rng.choice([m.SHARED_MEMORY, m.NETWORK])),
                m.OpenLayout(b"a" * 16, [64]),
            ):
                number = self.rng.randrange(1, 2**64)
                self.server.service.handle(
                    encode(Header(answer.session, number), first), self.now_ms
                )
        if (
            isinstance(answer, m.Refused)
            and answer.code == "unknown_session"
            and header.session in self.sessions[1:]
        ):
            self.sessions.remove(header.session)
        if isinstance(answer, m.Prepared) and answer.positions:
            checksums = self.rng.randbytes(2 * len(answer.positions))
            self.open_writes.append((header.session, m.CompleteStore(header.number, checksums)))

    def spoiled(self, body: bytes) -> bytes:
        """The same message with fields of other types, doubled, missing, unknown; or bytes
        changed."""
        rng = self.rng
        fields = msgspec.msgpack.decode(body)
        name = rng.choice(list(fields))
        match rng.randrange(5):
            case 0:
                fields[name] = rng.choice(
                    [None, True, 1.5, float("nan"), "x", b"x", [[]], {}, -1, 2**64 - 1]
                )
            case 1:
                del fields[name]
            case 2:
                fields["unknown"] = 1
            case 3:
                packed = msgspec.msgpack.encode(fields)
                again = msgspec.msgpack.encode(
                    {name: rng.choice([fields[name], 0, b"", "default"])}
                )
                return bytes([packed[0] + 1]) + packed[1:] + again[1:]
            case _:
                changed = bytearray(body)
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
                return bytes(changed)
        return msgspec.msgpack.encode(fields)


class AlwaysHeld:
    """The lock of a process that lives for ever."""

    path = Path("session.lock")

    def is_held(self) -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SimulatedServer:
    server = SimulatedServer(64 * 4096, 4 * 4096, limits=LIMITS, network_timeout_ms=60_000)
    monkeypatch.setattr(server.service, "_make_watch", lambda number: AlwaysHeld())
    return server


def seal(header: Header, body: bytes, payload: list[bytes]) -> list[Any]:
    """A body of any bytes under a right header and CRC, which `encode` gives only to messages."""
    frames = encode(header, msgspec.Raw(body))  # type: ignore[arg-type]
    return [*frames, *payload]


@pytest.mark.parametrize("seed", range(3))
def test_the_store_stays_sound_and_a_good_client_is_served(
    server: SimulatedServer, seed: int
) -> None:
    attacker = Attacker(server, seed)
    good = Peer(lambda frames: server.service.handle(frames, attacker.now_ms)).attach()
    layout = good.open_layout(64)
    tenant = tenant_of("a good client's salt")
    hits = stored = 0
    for step in range(1, MESSAGES + 1):
        attacker.attack()
        if step % 20 == 0:
            name = f"good {step // 100}"
            keys, blocks = chain(name, 4), [f"{name}/{at}".encode().ljust(64) for at in range(4)]
            if step % 40:
                stored += good.store(layout, keys, blocks, tenant=tenant)
            loaded = good.load(layout, keys, tenant=tenant)
            assert loaded == blocks[: len(loaded)]
            hits += len(loaded)
        if step % 100 == 0:
            server.service.end_dead_sessions(attacker.now_ms)
            check_integrity(server.store)
    check_integrity(server.store)
    counters = server.service.counters
    assert counters.internal_errors == 0
    assert hits > 500, "the good client hit often"
    assert counters.stored_blocks - stored > 100, "attacks went deep enough to store"
    assert counters.hit_blocks - hits > 100, "and to load"
    assert len(counters.refusals) > 20, "and were refused in many ways"


def test_a_hostile_client_that_leaves_leaves_nothing_behind(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacker = Attacker(server, 99)
    for _ in range(2_000):
        attacker.attack()
    assert any(session.leases for session in server.store.sessions.values())
    assert server.store.writers
    monkeypatch.setattr(AlwaysHeld, "is_held", lambda self: False)
    server.service.end_dead_sessions(attacker.now_ms + 70_000)
    assert not server.store.sessions and not server.store.writers
    assert not len(server.service.sessions)
    table = server.store.blocks.table
    assert all(table.pins[row] == 0 for row in table.live_rows().tolist())
    check_integrity(server.store)
