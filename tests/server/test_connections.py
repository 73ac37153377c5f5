"""Connections of engines: who is let in, what each may cost, and that nobody keeps the others from
being served."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import resource
import select
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.cli.keygen import make
from kvkeep.server import connections as module
from kvkeep.server.auth import ANYONE, Authority, Caller
from kvkeep.server.connections import Connections
from kvkeep.server.counters import Counters
from kvkeep.server.listeners import Listeners
from kvkeep.units import KIB, MIB
from kvkeep.wire import messages as m
from kvkeep.wire import stream as streams
from kvkeep.wire.address import tcp_host, unix_name
from kvkeep.wire.frames import HEADER_BYTES, Header, encode, seal
from kvkeep.wire.stream import Stream
from kvkeep.wire.tls import TlsFiles, client_context

FRAME_BYTES = 2 * MIB
MOST_BYTES = 2 * FRAME_BYTES + MIB
PATIENCE_S = 60  # ends a test that has failed; nothing is measured by it
KINDS = ["unix", "tcp", "tls"]

OpenDoor = Callable[..., "Door"]
Knock = Callable[[], Stream]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of a server and of the clients `engine` and `other`."""
    where = tmp_path_factory.mktemp("keys") / "keys"
    make(where, ["engine", "other"])
    return where


def files_of(keys: Path, name: str) -> TlsFiles:
    return TlsFiles(keys / f"{name}.pem", keys / f"{name}.key", keys / "ca.pem")


class Epoll:
    """A real epoll that counts what it watches, and can be full."""

    def __init__(self) -> None:
        self._real = select.epoll()
        self.registered = 0
        self.is_full = False
        self.was_idle = False  # the last poll might wait, and found nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def register(self, descriptor: int, events: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._real.register(descriptor, events)
        self.registered += 1

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        found = self._real.poll(timeout_s)
        self.was_idle = timeout_s > 0 and not found
        return found


class Door:
    """Connections whose answers are echoes, and those who knock at them."""

    def __init__(
        self, most: int = 8, authority: Authority | None = None, trusted_users: tuple[int, ...] = ()
    ) -> None:
        self.listeners = Listeners("tcp://127.0.0.1:0")
        self.counters = Counters()
        self.later_s = 0.0  # how far the server's wall clock is ahead
        self.clock: Callable[[], float] = time.monotonic
        self.epoll = Epoll()
        self.connections = Connections(
            *(self.listeners, most, FRAME_BYTES),
            authority=authority,
            trusted_users=trusted_users,
            counters=self.counters,
            clock=lambda: self.clock(),
            wall_clock=lambda: time.time() + self.later_s,
            epoll=self.epoll,
        )
        self.asked: list[tuple[int, list[bytes]]] = []
        self.callers: list[Caller] = []
        self.reply: Callable[[list[bytes]], list[Any] | None] = lambda frames: frames
        self._knocked: list[Stream] = []

    def answer(self, frames: list[bytes], caller: Caller, peer: int) -> list[Any] | None:
        self.asked.append((peer, frames))
        self.callers.append(caller)
        return self.reply(frames)

    def connect(self, kind: str) -> socket.socket:
        """A socket that the server has not seen yet."""
        tcp, name = tcp_host(self.listeners.address), unix_name(self.listeners.address)
        assert tcp is not None and name is not None
        connecting = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
        connecting.connect(name if kind == "unix" else tcp)
        return connecting

    def knock(self, kind: str, files: TlsFiles | None = None) -> Stream:
        """A connection that the server has accepted, and proved if it is one of TLS."""
        connected, before = self.connect(kind), self.epoll.registered
        if kind == "tls":
            assert files is not None
            connected = client_context(files).wrap_socket(
                connected, server_hostname="127.0.0.1", do_handshake_on_connect=False
            )
        stream = Stream(connected, 1 << 30)
        self._knocked.append(stream)
        self.until(
            lambda: self.epoll.registered > before and (stream.shake_hands() or stream.is_over)
        )
        if kind == "tls":
            self.serve()  # the client's side is done first
        return stream

    def turn(self, timeout_s: float = 0.0) -> None:
        self.connections.wait(timeout_s)
        self.connections.serve(self.answer)

    def until(self, happens: Callable[[], bool]) -> None:
        """Serves until something happens that must."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not happens():
            self.turn(0.01)
            assert time.monotonic() < give_up_s, "it did not happen"

    @property
    def is_idle(self) -> bool:
        self.turn(0.02)
        return self.epoll.was_idle

    def serve(self) -> None:
        """As long as there is something to do."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not self.is_idle:
            assert time.monotonic() < give_up_s, "there is something to do without end"

    def held_bytes(self) -> int:
        return self.connections.held_bytes

    def answers(self, stream: Stream, count: int) -> list[list[bytes]]:
        """So many answers, or as many as come before the connection ends."""
        came: list[list[bytes]] = []

        def take() -> bool:
            stream.flush()
            stream.read()
            while (one := stream.next()) is not None:
                came.append(one)
                stream.read()
            return len(came) >= count or stream.is_over

        self.until(take)
        return came

    def serves(self, stream: Stream, sent: list[bytes] | None = None) -> bool:
        """Sends one message, and waits for its answer."""
        stream.send(sent or message())
        return len(self.answers(stream, 1)) == 1

    def ends(self, stream: Stream) -> bool:
        """Waits until the connection has ended without an answer."""
        return self.answers(stream, 1) == [] and stream.is_over

    def close(self) -> None:
        for stream in self._knocked:
            stream.close()
        self.connections.close()
        self.listeners.close()


@pytest.fixture
def open_door(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenDoor]:
    monkeypatch.setattr(
        streams, "_BUFFER_BYTES", 64 * KIB
    )  # or on some hosts all that is sent here goes into it
    with contextlib.ExitStack() as opened:

        def begin(*args: Any, **more: Any) -> Door:
            door = Door(*args, **more)
            opened.callback(door.close)
            return door

        yield begin


@pytest.fixture
def door(open_door: OpenDoor) -> Door:
    return open_door()


@pytest.fixture
def secure(open_door: OpenDoor, keys: Path) -> Door:
    """One that asks for a certificate, except on its Unix socket."""
    return open_door(authority=Authority(files_of(keys, "server"), keys / "authorized"))


@pytest.fixture
def knock(request: pytest.FixtureRequest, kind: str, keys: Path) -> Knock:
    """Makes connections of that kind to `own_door`."""
    own: Door = request.getfixturevalue("own_door")
    return lambda: own.knock(kind, files_of(keys, "engine"))


@pytest.fixture
def own_door(request: pytest.FixtureRequest, kind: str) -> Door:
    chosen: Door = request.getfixturevalue("secure" if kind == "tls" else "door")
    return chosen


def message(session: int = 7, number: int = 1, nbytes: int = 10) -> list[bytes]:
    return [
        bytes(frame)
        for frame in encode(Header(session, number), m.Lookup("default", 1, os.urandom(nbytes)))
    ]


def head(body_bytes: int, payload_frames: int = 0, payload_frame_bytes: int = 0) -> bytes:
    """A header that says so, whatever follows."""
    sizes = struct.pack("<III", body_bytes, payload_frames, payload_frame_bytes)
    return struct.pack("<4sHHQQ", b"KVKP", m.PROTOCOL_VERSION, 0, 7, 1) + sizes + bytes(4)


def is_closed(connected: socket.socket) -> bool:
    """Waits until the other side closes it; False if it says anything before."""
    connected.settimeout(PATIENCE_S)
    try:
        return connected.recv(1) == b""
    except ConnectionResetError:  # it was closed with something unread
        return True


# -- messages and answers


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_answered_on_its_own_connection(own_door: Door, knock: Knock) -> None:
    one, two = knock(), knock()
    first, second = message(1), message(2, nbytes=1_000_000)
    one.send(first)
    two.send(second)
    assert own_door.answers(one, 1) == [first] and own_door.answers(two, 1) == [second]
    assert len({peer for peer, _ in own_door.asked}) == len(own_door.connections) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_go_both_ways_up_to_the_limit(own_door: Door, knock: Knock) -> None:
    one, block = knock(), os.urandom(FRAME_BYTES // 4)
    sent = seal(Header(7, 1), bytes(FRAME_BYTES), [block] * 4)
    one.send(sent)
    assert own_door.answers(one, 1) == [sent]


def test_no_answer_is_silence(door: Door) -> None:
    one = door.knock("unix")
    door.reply = lambda frames: None
    one.send(message())
    door.serve()
    door.reply = lambda frames: frames
    assert door.serves(one, message(number=2)) and len(door.asked) == 2


def test_a_goodbye_is_heard_of_one_who_does_not_wait_for_the_answer(door: Door) -> None:
    one = door.knock("tcp")
    one.send(message())
    one.close()
    door.until(lambda: len(door.connections) == 0)
    assert len(door.asked) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_may_come_byte_by_byte(own_door: Door, knock: Knock) -> None:
    slow, other, sent = knock(), knock(), message()
    for byte in b"".join(sent)[:-1]:
        slow.socket.send(bytes([byte]))
        own_door.turn()
    assert own_door.serves(other, message(8)) and len(own_door.asked) == 1, (
        "others do not wait for it"
    )
    slow.socket.send(b"".join(sent)[-1:])
    assert own_door.answers(slow, 1) == [sent]


# -- what is no message of ours


STRANGERS = {
    "an HTTP client": b"POST /KVKP HTTP/1.1\r\nHost: localhost:5555\r\nContent-Length: 40\r\n\r\n"
    + b"".join(message()),
    "a ZMQ client: LMCache, or a kvkeep of an earlier release": b"\xff"
    + bytes(7)
    + b"\x01\x7f"
    + bytes(54),
    "a TLS client": b"\x16\x03\x01\x02\x00\x01\x00",
    "a Redis client": b"*1\r\n$4\r\nPING\r\n",
    "something unknown": b"KVKX" + b"".join(message()),
}


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("what", STRANGERS)
def test_who_begins_with_other_bytes_is_closed_at_once_and_named_once(
    door: Door, caplog: pytest.LogCaptureFixture, kind: str, what: str
) -> None:
    other = door.knock("unix")
    for _ in range(3):
        stranger = door.knock(kind)
        stranger.socket.send(STRANGERS[what])
        assert door.ends(stranger)
    assert door.serves(other) and len(door.asked) == 1 and len(door.connections) == 1
    [line] = [record.getMessage() for record in caplog.records]
    assert f"seems to be {what}: " in line


@pytest.mark.parametrize("first", [b"G", b"KVKp", b"\0"])
def test_the_first_byte_that_is_not_ours_is_enough(door: Door, first: bytes) -> None:
    stranger = door.knock("tcp")
    stranger.socket.send(first)
    assert door.ends(stranger) and door.asked == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "first",
    [
        head(0),
        head(MOST_BYTES + 1),
        head(0xFFFF_FFFF),
        head(1, 2, (MOST_BYTES + 1) // 2),
        head(1, 0xFFFF_FFFF, 0xFFFF_FFFF),
        head(1, 0, 1),
        head(1, 1, 0),
    ],
)
def test_a_header_that_says_too_much_ends_the_connection_before_anything_is_held(
    own_door: Door, knock: Knock, first: bytes
) -> None:
    other, greedy = knock(), knock()
    greedy.socket.send(first)
    assert own_door.ends(greedy) and own_door.held_bytes() == 0 and len(own_door.connections) == 1
    assert own_door.serves(other)


def test_a_second_message_that_is_none_ends_the_connection_after_the_first_was_answered(
    door: Door,
) -> None:
    one, sent = door.knock("tcp"), message()
    one.socket.send(b"".join(sent) + b"GET / HTTP/1.1\r\n\r\n")
    assert door.answers(one, 2) in ([sent], []) and one.is_over and len(door.asked) == 1


# -- those who do not read, and those who never finish


@pytest.mark.parametrize("kind", KINDS)
def test_of_one_that_does_not_read_its_replies_nothing_more_is_read(
    own_door: Door, knock: Knock
) -> None:
    """It costs the server one reply at most. Others are served, and when it reads, it has them
    all."""
    deaf, other = knock(), knock()
    sent = [message(number=number, nbytes=MIB) for number in range(20)]
    for each in sent:
        deaf.send(each)
    unsent = -1
    while deaf.unsent_bytes != unsent:  # as long as anybody takes anything
        unsent = deaf.unsent_bytes
        own_door.serve()
        deaf.flush()
    assert len(own_door.asked) < 10 and unsent > 5 * MIB, "it has to wait"
    assert own_door.held_bytes() < 3 * MIB
    assert own_door.serves(other)
    assert own_door.answers(deaf, 20) == sent


@pytest.mark.parametrize("kind", KINDS)
def test_small_requests_with_large_replies_are_answered_one_at_a_time(
    own_door: Door, knock: Knock
) -> None:
    """All of them have come with one read. Each is answered when the reply before it has left."""
    deaf = knock()
    own_door.reply = lambda frames: seal(Header(7, 1), bytes(8 * MIB))
    deaf.socket.send(b"".join(message(nbytes=0)) * 20)
    own_door.serve()
    assert len(own_door.asked) == 1 and own_door.held_bytes() < 9 * MIB
    assert len(own_door.answers(deaf, 20)) == 20


def test_half_messages_of_all_take_no_more_than_so_much_memory(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many, and however short. The connection that holds most is closed."""
    monkeypatch.setattr(module, "MOST_BYTES_HELD", MIB)
    knocks = [door.knock("unix") for _ in range(4)]
    for number, stream in enumerate(knocks):
        stream.socket.setblocking(True)
        stream.socket.settimeout(5)
        data = head(FRAME_BYTES) + bytes((1 << 18) + (number == 1) * 1000)
        for at in range(0, len(data), 1 << 14):
            try:
                stream.socket.send(data[at : at + (1 << 14)])
            except OSError:
                break
            door.serve()
    assert (1 << 18) * 3 <= door.held_bytes() <= MIB, "what the closed one held is not counted"
    for stream in knocks:
        stream.socket.setblocking(False)
        stream.read()
    assert [stream.is_over for stream in knocks] == [False, True, False, False]
    assert door.counters.connection_resets == 1


@pytest.mark.parametrize("kind", KINDS)
def test_replies_that_nobody_takes_count_as_well(
    own_door: Door, knock: Knock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES_HELD", 12 * MIB)
    own_door.reply = lambda frames: [frames[0], bytes(10 * MIB)]
    knocks = [knock() for _ in range(3)]
    for stream in knocks:
        stream.send(message())
        own_door.serve()
    assert len(own_door.asked) == 3 and own_door.counters.connection_resets == 2
    assert own_door.held_bytes() <= 12 * MIB and len(own_door.connections) == 1
    for stream in knocks:
        stream.close()
    own_door.until(lambda: len(own_door.connections) == 0)
    assert own_door.held_bytes() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_half_senders_and_one_who_is_served(
    open_door: OpenDoor, keys: Path, kind: str
) -> None:
    authority = Authority(files_of(keys, "server"), keys / "authorized") if kind == "tls" else None
    door = open_door(300, authority)
    slow = [door.knock(kind, files_of(keys, "engine")) for _ in range(100)]
    for number, stream in enumerate(slow):
        stream.socket.send((head(FRAME_BYTES) + bytes(1000))[: 1 + number * 9])
    one = door.knock(kind, files_of(keys, "engine"))
    for number in range(5):
        assert door.serves(one, message(number=number))
    assert len(door.connections) == 101 and door.held_bytes() < MIB


# -- turns


def test_many_small_messages_of_one_do_not_keep_the_others(door: Door) -> None:
    """However little time they take."""
    busy, other = door.knock("unix"), door.knock("unix")
    small = message(nbytes=0)
    busy.socket.send(b"".join(small) * 500)
    other.send(message(session=8))
    door.clock = lambda: 0.0
    door.turn()
    assert Counter(frames[0] == small[0] for _, frames in door.asked) == {True: 32, False: 1}
    assert len(door.answers(busy, 500)) == 500 and len(door.asked) == 501


def test_a_turn_ends_and_who_had_none_comes_first(door: Door) -> None:
    """However many wait, and however much each of them has sent."""
    knocks = [door.knock("unix") for _ in range(8)]
    for number, stream in enumerate(knocks):
        stream.socket.send(b"".join(message(session=number + 1, nbytes=0)) * 100)
    milliseconds = itertools.count()
    door.clock = lambda: next(milliseconds) * 8e-3  # of a turn's 20 ms each look at it takes 8
    turns = []
    for _ in range(16):
        before = len(door.asked)
        door.turn()
        turns.append([peer for peer, _ in door.asked[before:]])
    assert all(len(turn) == 2 and len(set(turn)) == 1 for turn in turns), (
        "two messages, and its time is over"
    )
    assert len({turn[0] for turn in turns[:8]}) == 8 and turns[8:] == turns[:8]


def test_one_that_makes_the_server_stumble_is_closed_and_no_other(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good, poison = door.knock("unix"), door.knock("tcp"), message(1)

    def stumble(frames: list[bytes]) -> list[bytes]:
        if frames == poison:
            raise MemoryError
        return frames

    door.reply = stumble
    bad.send(poison)
    good.send(message(2))
    assert door.ends(bad) and len(door.answers(good, 1)) == 1
    assert door.counters.internal_errors == 1 and "MemoryError" in caplog.text


# -- how many


def test_there_are_no_more_than_so_many(open_door: OpenDoor) -> None:
    door = open_door(4)
    knocks = [door.knock("unix") for _ in range(4)]
    with door.connect("unix") as late:
        door.serve()
        assert is_closed(late) and len(door.connections) == 4
    knocks[0].close()
    door.until(lambda: len(door.connections) == 3)
    again = door.knock("unix")
    assert door.serves(again)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """None is left while this lasts."""
    taken = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard)
        )
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_without_descriptors_it_serves_those_it_has_and_the_others_later(
    door: Door, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """It does not spin meanwhile: there is nothing to do until somebody tends it."""
    known = door.knock(kind)
    late = Stream(door.connect(kind), MIB)
    late.send(message(2))
    with no_descriptors():
        for _ in range(3):
            door.turn()
        assert door.is_idle and len(door.connections) == 1
        assert door.serves(known, message(1))
        door.connections.tend(lambda token, name: True)
        door.turn()
        assert door.is_idle and len(door.connections) == 1
    assert caplog.text.count("Too many open files") == 1
    door.connections.tend(lambda token, name: True)
    assert len(door.answers(late, 1)) == 1
    late.close()


def test_who_cannot_be_watched_is_turned_away(door: Door) -> None:
    door.epoll.is_full = True
    with door.connect("tcp") as one:
        door.serve()
        door.epoll.is_full = False
        assert is_closed(one) and len(door.connections) == 0
    again = door.knock("tcp")
    assert door.serves(again)


# -- those who say nothing


def test_those_who_say_nothing_and_those_whose_session_is_over_go(door: Door) -> None:
    silent, half, known, over = (door.knock("unix") for _ in range(4))
    half.socket.send(b"".join(message(3))[:20])
    known.send(message(session=1))
    over.send(message(session=2))
    assert len(door.answers(known, 1)) == len(door.answers(over, 1)) == 1
    names = {frames[0][8]: peer for peer, frames in door.asked}
    is_on = lambda token, name: token == 1 and name == names[1]  # noqa: E731
    door.connections.tend(is_on)
    assert len(door.connections) == 4, "they have just come"
    for later_s, left in ((9, 4), (11, 1)):
        door.clock = lambda later_s=later_s: time.monotonic() + later_s  # type: ignore[misc]
        door.connections.tend(is_on)
        assert len(door.connections) == left
    door.clock = time.monotonic
    assert all(door.ends(stream) for stream in (silent, half, over))
    assert door.serves(known, message(session=1)) and len(door.connections) == 1


def test_who_does_not_finish_the_handshake_in_time_goes(secure: Door) -> None:
    with secure.connect("tcp") as silent, secure.connect("tcp") as half:
        half.send(b"\x16\x03\x01\x02\x00\x01\x00")
        secure.until(lambda: len(secure.connections) == 2)
        secure.connections.tend(lambda token, name: False)
        assert len(secure.connections) == 2
        secure.clock = lambda: time.monotonic() + 3
        secure.connections.tend(lambda token, name: False)
        assert len(secure.connections) == 0
        assert secure.counters.auth_failures == {"handshake_timeout": 2}
        assert is_closed(silent) and is_closed(half)


# -- which users


def as_user(monkeypatch: pytest.MonkeyPatch, uid: int | None) -> None:
    monkeypatch.setattr(module, "peer_uid", lambda connected: uid)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize(
    ("uid", "words"), [(4711, "another user (uid 4711)"), (None, "does not say which user")]
)
def test_another_user_is_closed_before_anything_is_read(
    door: Door,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    uid: int | None,
    words: str,
) -> None:
    as_user(monkeypatch, uid)
    for _ in range(3):
        with door.connect(kind) as stranger:
            stranger.sendall(b"".join(message()))
            door.serve()
            assert is_closed(stranger)
    assert door.asked == [] and len(door.connections) == 0
    assert door.counters.auth_failures == {"other_user": 3} and caplog.text.count(words) == 1


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("uid", [4711, 0])
def test_a_user_that_was_named_and_root_are_let_in(
    open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch, kind: str, uid: int
) -> None:
    as_user(monkeypatch, uid)
    door = open_door(trusted_users=(4711,))
    one = door.knock(kind)
    assert door.serves(one) and door.callers == [ANYONE]


# -- which certificates


def test_a_certificate_says_who_asks_and_the_unix_socket_needs_none(
    secure: Door, keys: Path
) -> None:
    for name in ("engine", "other"):
        one = secure.knock("tls", files_of(keys, name))
        assert secure.serves(one)
    near = secure.knock("unix")
    assert secure.serves(near)
    assert [caller.key for caller in secure.callers] == ["engine", "other", ""]


def test_in_the_clear_nothing_is_answered_where_certificates_are_asked_for(
    secure: Door, caplog: pytest.LogCaptureFixture
) -> None:
    plain = secure.knock("tcp")
    plain.send(message())
    secure.until(lambda: len(secure.connections) == 0)
    plain.read()
    assert plain.next() is None and secure.asked == []
    assert secure.counters.auth_failures == {"handshake": 1}
    assert "it does not speak TLS" in caplog.text


@pytest.fixture
def listed(keys: Path, tmp_path: Path) -> Path:
    path = tmp_path / "authorized"
    path.write_text("engine\nother\n")
    path.chmod(0o600)
    return path


def test_who_is_not_in_the_list_gets_no_answer(
    open_door: OpenDoor, keys: Path, listed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listed.write_text("other\n")
    door = open_door(authority=Authority(files_of(keys, "server"), listed))
    stranger = door.knock("tls", files_of(keys, "engine"))
    stranger.send(message())
    assert door.ends(stranger)
    assert door.asked == []
    assert door.counters.auth_failures == {"unknown_client": 1}
    der = ssl.PEM_cert_to_DER_cert((keys / "engine.pem").read_text())
    shown = f"its certificate engine (sha256:{hashlib.sha256(der).hexdigest()[:16]}…) is not in authorized_clients"
    assert shown in caplog.text


MOST_UNPROVED = 64


def test_a_flood_of_connections_that_prove_nothing_makes_room_for_those_that_do(
    open_door: OpenDoor, keys: Path, listed: Path
) -> None:
    door = open_door(2 * MOST_UNPROVED, Authority(files_of(keys, "server"), listed))
    known = door.knock("tls", files_of(keys, "engine"))
    crowd, before = [], door.epoll.registered
    for number in range(1, 3 * MOST_UNPROVED + 1):
        crowd.append(door.connect("tcp"))
        door.until(lambda number=number: door.epoll.registered == before + number)  # type: ignore[misc]
        assert len(door.connections) <= MOST_UNPROVED + 1
    another = door.knock("tls", files_of(keys, "other"))
    for stream in (known, another):
        assert door.serves(stream), "who has proved it stays, and who can prove it comes in"
    for each in crowd:
        each.close()


def test_where_all_places_are_taken_the_unproved_make_way(
    open_door: OpenDoor, keys: Path, listed: Path
) -> None:
    door = open_door(3, Authority(files_of(keys, "server"), listed))
    with door.connect("tcp") as first, door.connect("tcp") as second:
        door.until(lambda: len(door.connections) == 2)
        knocks = [door.knock("tls", files_of(keys, "engine")) for _ in range(3)]
        assert len(door.connections) == 3
        assert is_closed(first) and is_closed(second)
        with door.connect("unix") as late:  # there is nobody left to make way
            door.serve()
            assert is_closed(late)
        knocks[0].send(message())
        assert len(door.answers(knocks[0], 1)) == 1


def test_a_revoked_client_gets_nothing_more_and_the_others_lose_nothing(
    open_door: OpenDoor, keys: Path, listed: Path
) -> None:
    authority = Authority(files_of(keys, "server"), listed)
    door = open_door(authority=authority)
    bad, good, near = (door.knock(*each) for each in (
        ("tls", files_of(keys, "engine")), ("tls", files_of(keys, "other")), ("unix",)
    ))  # fmt: skip
    for stream in (bad, good, near):
        assert door.serves(stream)
    listed.write_text("other\n# without the one that was first\n")
    assert authority.reload()
    door.connections.check_certificates()
    for stream in (bad, good, near):
        stream.send(message())
    assert len(door.answers(good, 1)) == len(door.answers(near, 1)) == 1
    if not door.ends(bad):
        assert any(caller.revoked for caller in door.callers), (
            "or the service is told that it was revoked"
        )
    again = door.knock("tls", files_of(keys, "engine"))
    again.send(message())
    assert door.ends(again)


def test_where_a_ca_was_removed_all_certificates_are_verified_again(
    open_door: OpenDoor, keys: Path, listed: Path, tmp_path: Path
) -> None:
    """Those of the CA that stays, too: nobody can tell which one a connection was verified by."""
    foreign = tmp_path / "foreign"
    make(foreign, ["engine"])
    both = tmp_path / "both.pem"
    both.write_text((keys / "ca.pem").read_text() + (foreign / "ca.pem").read_text())
    both.chmod(0o600)
    server = TlsFiles(keys / "server.pem", keys / "server.key", both)
    authority = Authority(server, listed)
    door = open_door(authority=authority)
    of_foreign = TlsFiles(foreign / "engine.pem", foreign / "engine.key", keys / "ca.pem")
    bad, good, near = (
        door.knock("tls", of_foreign),
        door.knock("tls", files_of(keys, "other")),
        door.knock("unix"),
    )
    with door.connect("tcp") as in_the_middle:
        door.until(lambda: len(door.connections) == 4)
        both.write_text((keys / "ca.pem").read_text())
        assert authority.reload()
        door.connections.check_certificates()
        assert door.ends(bad) and door.ends(good)
        assert is_closed(in_the_middle), "its handshake would end with what was trusted before"
    assert door.serves(near) and len(door.connections) == 1
    stranger = door.knock("tls", of_foreign)
    stranger.send(message())
    assert door.ends(stranger)
    again = door.knock("tls", files_of(keys, "other"))
    assert door.serves(again)


def test_a_connection_ends_when_its_certificate_expires(
    open_door: OpenDoor, tmp_path: Path
) -> None:
    keys, day_s = tmp_path / "keys", 86_400
    make(keys, ["engine"], days=1)
    make(keys, ["other"], days=30)
    door = open_door(authority=Authority(files_of(keys, "server"), keys / "authorized"))
    short, long, near = (
        door.knock(*each)
        for each in (("tls", files_of(keys, "engine")), ("tls", files_of(keys, "other")), ("unix",))
    )
    for later_s, left in ((day_s - 600, 3), (day_s + 600, 2)):
        door.later_s = later_s
        door.connections.tend(lambda token, peer: True)
        assert len(door.connections) == left
    assert door.ends(short)
    for stream in (long, near):
        assert door.serves(stream)


def test_header_bytes_are_what_this_file_takes_them_for() -> None:
    assert len(head(1)) == HEADER_BYTES
