"""The socket beside the pool: whoever comes is served a little at a time, and nobody keeps the others from it."""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.server import direct
from kvkeep.server.direct import DirectSocket, open_direct
from kvkeep.wire import messages as m
from kvkeep.wire import stream as streams
from kvkeep.wire.frames import HEADER_BYTES, Header, encode
from kvkeep.wire.stream import Stream, socket_path

MOST_BODY = 4 << 20


class Door:
    """A DirectSocket whose answers are echoes, and those who knock at it."""

    def __init__(self, directory: Path, connections: int = 4) -> None:
        self.directory = directory
        self.socket = DirectSocket(directory, connections, MOST_BODY)
        self.asked: list[tuple[bytes, list[bytes]]] = []
        self.reply: Callable[[list[bytes]], list[Any] | None] = lambda frames: frames
        self._knocked: list[Stream] = []

    def answer(self, frames: list[bytes], peer: bytes) -> list[Any] | None:
        self.asked.append((peer, frames))
        return self.reply(frames)

    def knock(self) -> Stream:
        connecting = socket.socket(socket.AF_UNIX)
        with socket_path(self.directory) as path:
            connecting.connect(path)
        self._knocked.append(Stream(connecting, MOST_BODY))
        return self._knocked[-1]

    def is_readable(self) -> bool:
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """As long as there is something to do, or until then."""
        give_up_s = time.monotonic() + 60
        while (self.socket.has_more or self.is_readable()) and not until():
            self.socket.serve(self.answer)
            assert time.monotonic() < give_up_s, "there is something to do without end"

    def close(self) -> None:
        for stream in self._knocked:
            stream.close()
        self.socket.close()


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setattr(streams, "_BUFFER_BYTES", 64 << 10)  # or on some hosts all that is sent here goes into it
    one = Door(tmp_path)
    yield one
    one.close()


def message(session: int = 7, number: int = 1, nbytes: int = 10) -> list[bytes]:
    return encode(Header(session, number), m.Lookup("default", 1, os.urandom(nbytes)))


def answers(stream: Stream) -> list[list[bytes]]:
    came = []
    stream.read()
    while (one := stream.next()) is not None:
        came.append(one)
        stream.read()
    return came


def test_each_is_answered_on_its_own_connection(door: Door) -> None:
    one, two = door.knock(), door.knock()
    first, second = message(1), message(2, nbytes=100_000)
    one.send(first)
    two.send(second)
    door.serve()
    assert answers(one) == [first] and answers(two) == [second]
    assert len({peer for peer, _ in door.asked}) == 2 and len(door.socket) == 2


def test_no_answer_and_an_answer_of_blocks_are_both_silence(door: Door) -> None:
    one = door.knock()
    door.reply = lambda frames: None
    one.send(message())
    door.serve()
    door.reply = lambda frames: [*frames, b"a block"]
    one.send(message(number=2))
    door.serve()
    assert len(door.asked) == 2 and answers(one) == [] and not one.is_over


def test_a_goodbye_is_heard_of_one_who_does_not_wait_for_the_answer(door: Door) -> None:
    one = door.knock()
    one.send(message())
    one.close()
    door.serve()
    assert len(door.asked) == 1 and len(door.socket) == 0


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3, struct.pack("<I", 0) + b"x" * HEADER_BYTES])
def test_what_is_no_message_ends_the_connection_and_no_other(door: Door, said: bytes) -> None:
    stranger, other = door.knock(), door.knock()
    stranger._socket.send(said)
    other.send(message())
    door.serve()
    stranger.read()
    assert stranger.is_over and len(answers(other)) == 1 and len(door.socket) == 1


def test_of_one_that_does_not_read_its_answers_nothing_more_is_read(door: Door) -> None:
    deaf, other = door.knock(), door.knock()
    for number in range(20):
        deaf.send(message(number=number, nbytes=1 << 20))
    unsent = -1
    while deaf.unsent_bytes != unsent:  # as long as anybody takes anything
        unsent = deaf.unsent_bytes
        door.serve()
        deaf.flush()
    assert len(door.asked) < 5 and unsent > 10 << 20, "it has to wait"
    peers = list(door.socket._peers.values())
    assert sum(peer.stream.unsent_bytes + peer.stream.read_bytes for peer in peers) < 4 << 20
    other.send(message())
    door.serve()
    assert len(answers(other)) == 1
    got: list[list[bytes]] = []
    for _ in range(100_000):
        deaf.flush()
        door.serve()
        got += answers(deaf)
        if len(got) == 20:
            break
    assert got == [frames for peer, frames in door.asked if peer == door.asked[0][0]], "and when it reads, it has them"


def test_many_small_messages_of_one_do_not_keep_the_others(door: Door) -> None:
    busy, other = door.knock(), door.knock()
    small = message(nbytes=0)
    busy._socket.send((struct.pack("<I", len(small[1])) + b"".join(small)) * 1_000)
    other.send(message(session=8))
    door.serve(until=lambda: any(frames[0] != small[0] for _, frames in door.asked))
    assert len(door.asked) <= 100
    got = 0
    for _ in range(10_000):
        got += len(answers(busy))
        door.serve()
        if got == 1_000:
            break
    assert len(door.asked) == 1_001


def test_a_turn_ends_and_who_had_none_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door(tmp_path, connections=8)
    knocks = [door.knock() for _ in range(8)]
    door.serve()
    for number, stream in enumerate(knocks):
        small = message(session=number + 1, nbytes=0)
        stream._socket.send((struct.pack("<I", len(small[1])) + b"".join(small)) * 100)
    clock = iter(range(1_000_000))
    monkeypatch.setattr(direct.time, "monotonic", lambda: next(clock) * 1e-3)
    monkeypatch.setattr(direct, "_TURN_S", 0.0025)  # two at a time
    turns: Counter[bytes] = Counter()
    for _ in range(40):
        door.socket.serve(door.answer)
        turns = Counter(peer for peer, _ in door.asked)
        if len(turns) == 8:
            break
    assert len(turns) == 8 and door.socket.has_more
    assert max(turns.values()) < 100, "all have had a turn before anybody has had all of them"
    door.close()


def test_one_that_makes_the_server_stumble_is_closed_and_no_other(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = door.knock(), door.knock()

    def stumble(frames: list[bytes]) -> list[bytes]:
        if frames[0] == message_of_bad[0]:
            raise MemoryError
        return frames

    message_of_bad, door.reply = message(1), stumble
    bad.send(message_of_bad)
    good.send(message(2))
    door.serve()
    assert len(answers(good)) == 1 and answers(bad) == [] and bad.is_over
    assert door.socket._counters.internal_errors == 1 and "MemoryError" in caplog.text


def test_who_cannot_be_watched_is_turned_away(door: Door) -> None:
    epoll = door.socket._epoll

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(epoll, name)

        def register(self, *_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    door.socket._epoll = Full()  # type: ignore[assignment]
    one = door.knock()
    door.serve()
    door.socket._epoll = epoll
    one.read()
    assert one.is_over and len(door.socket) == 0
    again = door.knock()
    again.send(message())
    door.serve()
    assert len(answers(again)) == 1


def test_half_messages_take_no_more_than_so_much_memory(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of however many, and however short; and it is who has most that goes."""
    monkeypatch.setattr(direct, "MOST_BYTES_HELD", 1 << 20)
    knocks = [door.knock() for _ in range(4)]
    for number, stream in enumerate(knocks):
        stream._socket.setblocking(True)
        stream._socket.settimeout(5)
        data = struct.pack("<I", MOST_BODY) + bytes(HEADER_BYTES + (1 << 18) + (number == 1) * 1000)
        for at in range(0, len(data), 1 << 16):
            try:
                stream._socket.send(data[at : at + (1 << 16)])
            except OSError:
                break
            door.serve()
    assert sum(peer.stream.read_bytes for peer in door.socket._peers.values()) <= 1 << 20
    for stream in knocks:
        stream._socket.setblocking(False)
        stream.read()
    assert [stream.is_over for stream in knocks] == [False, True, False, False]


def test_answers_that_nobody_takes_count_as_well(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MOST_BYTES_HELD", 3 << 20)
    door.reply = lambda frames: [frames[0], bytes(2 << 20)]
    knocks = [door.knock() for _ in range(3)]
    for stream in knocks:
        stream.send(message())
        door.serve()
    assert door.socket._held_bytes <= 3 << 20 and len(door.socket) < 3
    for stream in knocks:
        stream.close()
    door.serve()
    assert door.socket._held_bytes == 0 and len(door.socket) == 0


def test_there_are_no_more_than_so_many(door: Door) -> None:
    knocks = [door.knock() for _ in range(6)]
    door.serve()
    for stream in knocks:
        stream.read()
    assert [stream.is_over for stream in knocks] == [False] * 4 + [True] * 2
    knocks[0].close()
    door.serve()
    again = door.knock()
    again.send(message())
    door.serve()
    assert len(answers(again)) == 1


def test_those_who_say_nothing_and_those_whose_session_is_over_go(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, known, over = door.knock(), door.knock(), door.knock()
    known.send(message(session=1))
    over.send(message(session=2))
    door.serve()
    names = dict.fromkeys((1, 2), b"") | {int(frames[0][8]): peer for peer, frames in door.asked}
    door.socket.tend(lambda token, name: token == 1 and name == names[1])
    assert len(door.socket) == 3, "they have just come"
    monkeypatch.setattr(direct, "_SPEAK_WITHIN_S", 0.0)
    time.sleep(0.01)
    door.socket.tend(lambda token, name: token == 1 and name == names[1])
    for stream in (silent, known, over):
        answers(stream)
    assert [stream.is_over for stream in (silent, known, over)] == [True, False, True]


def test_without_descriptors_it_waits_for_better_times(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    """And does not spin: there is nothing to do until somebody tends it."""
    listening = door.socket._socket

    class Full:
        def fileno(self) -> int:
            return listening.fileno()

        def accept(self) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

        def close(self) -> None:
            listening.close()

    door.socket._socket = Full()  # type: ignore[assignment]
    one = door.knock()
    one.send(message())
    door.serve()
    assert caplog.text.count("Too many open files") == 1
    assert not door.is_readable()
    door.socket._socket = listening
    door.socket.tend(lambda token, name: True)
    door.serve()
    assert len(answers(one)) == 1


def test_its_file_is_the_owners_alone_replaces_a_dead_servers_and_goes_with_it(tmp_path: Path) -> None:
    first = DirectSocket(tmp_path, 4, MOST_BODY)
    [file] = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    first._socket.close()  # as a death leaves it
    second = Door(tmp_path)
    one = second.knock()
    one.send(message())
    second.serve()
    assert len(answers(one)) == 1
    second.close()
    assert list(tmp_path.iterdir()) == []
    first._epoll.close()


def test_where_there_can_be_none_the_server_does_without_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_direct(tmp_path / "gone", 4, MOST_BODY) is None
    assert "by a slower way" in caplog.text


def test_there_may_be_twice_as_many_as_sessions(tmp_path: Path) -> None:
    """Those of sessions that have just ended are still there when the next ones come."""
    opened = open_direct(tmp_path, 4, MOST_BODY)
    assert opened is not None and opened._most_connections == 8 and opened._most_body_bytes > MOST_BODY
    opened.close()


def test_what_lies_in_its_place_by_now_is_left_alone(tmp_path: Path) -> None:
    """Somebody removed the pool's directory, and another server has made it anew."""
    first = DirectSocket(tmp_path, 4, MOST_BODY)
    second = Door(tmp_path)
    first.close()
    one = second.knock()
    one.send(message())
    second.serve()
    assert len(answers(one)) == 1
    second.close()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost: a\r\nAccept: */*\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_foreign_client_gets_one_line_that_says_what_it_seems_to_be(
    door: Door, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    for _ in range(2):
        knocking = door.knock()
        knocking._socket.sendall(sent)
        door.serve()
        knocking.close()
        door.serve()
    assert len(door.socket) == 0 and door.asked == []
    [line] = [each.getMessage() for each in caplog.records if "seems to be" in each.getMessage()]
    assert line.startswith("a process of this host talks to the socket beside the pool and seems to be an HTTP client")
