"""Messages over a Unix socket: whole however they come, and nothing that comes can hurt."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.wire import messages as m
from kvkeep.wire.frames import HEADER_BYTES, Header, encode, session_of
from kvkeep.wire.stream import Stream, socket_path

MOST = 1 << 20


@pytest.fixture
def ends() -> Iterator[tuple[Stream, socket.socket]]:
    ours, theirs = socket.socketpair()
    stream = Stream(ours, MOST)
    yield stream, theirs
    stream.close()
    theirs.close()


def raw(body: bytes, head: bytes = b"h" * HEADER_BYTES) -> bytes:
    return struct.pack("<I", len(body)) + head + body


def all_of(stream: Stream) -> list[list[bytes]]:
    messages = []
    while not stream.is_over:
        before = stream.read_bytes
        stream.read()
        while (message := stream.next()) is not None:
            messages.append(message)
        if stream.read_bytes == before:
            break
    return messages


def test_what_is_sent_is_what_comes(ends: tuple[Stream, socket.socket]) -> None:
    stream, other_end = ends
    other = Stream(other_end, MOST)
    for number, message in enumerate([m.Ping(), m.Lookup("default", 1, os.urandom(70_000)), m.Ping()]):
        frames = encode(Header(7, number), message)
        other.send(frames)
        stream.read()
        assert stream.next() == frames and stream.next() is None
        assert session_of(frames[0]) == 7


@settings(deadline=None)
@given(bodies=st.lists(st.binary(max_size=60), max_size=8), cuts=st.lists(st.integers(1, 50), min_size=1))
def test_messages_are_whole_wherever_they_were_cut(bodies: list[bytes], cuts: list[int]) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        stream, came, at = Stream(ours, MOST), [], 0
        data = b"".join(map(raw, bodies))
        while at < len(data):
            step = cuts[at % len(cuts)]
            theirs.sendall(data[at : at + step])
            at += step
            came += all_of(stream)
        assert [body for _, body in came] == bodies and not stream.is_over and not stream.read_bytes
        stream.close()


@settings(deadline=None)
@given(data=st.binary(max_size=400))
def test_bytes_that_are_no_messages_end_it_or_are_messages_of_their_length(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    stream = Stream(ours, 300)
    theirs.sendall(data)
    theirs.close()
    came = all_of(stream)
    assert stream.is_over and sum(4 + HEADER_BYTES + len(body) for _, body in came) <= len(data)
    assert all(len(body) <= 300 for _, body in came)
    assert stream.next() is None
    stream.close()


def test_one_that_is_too_long_ends_it_before_it_is_read(ends: tuple[Stream, socket.socket]) -> None:
    stream, other = ends
    other.sendall(struct.pack("<I", MOST + 1) + b"x" * (16 * 1024 - 4) + raw(b"not this"))
    for _ in range(3):
        stream.read()
        assert stream.is_over and stream.read_bytes == 0 and stream.next() is None and not stream.has_next


def test_who_sends_without_end_is_read_for_a_moment_only(ends: tuple[Stream, socket.socket]) -> None:
    stream, _ = ends
    received = []

    class Endless:
        def recv(self, most: int) -> bytes:
            received.append(most)
            assert most <= 1 << 20, "nobody makes us take more memory than that at once"
            return bytes(min(most, 1000))

        def close(self) -> None: ...

    stream._socket.close()
    stream._socket = Endless()  # type: ignore[assignment]
    stream._read += struct.pack("<I", MOST) + bytes(HEADER_BYTES)
    stream.read()
    assert 0 < len(received) < 20 and not stream.is_over


def test_what_came_before_the_end_is_there(ends: tuple[Stream, socket.socket]) -> None:
    """As a Goodbye, after which nobody waits."""
    stream, other = ends
    other.sendall(raw(b"last words") + b"half")
    other.close()
    stream.read()
    stream.read()
    assert stream.next() == [b"h" * HEADER_BYTES, b"last words"]
    stream.read()
    assert stream.is_over and stream.next() is None


def test_no_more_is_read_than_one_message_and_a_few_small_ones(ends: tuple[Stream, socket.socket]) -> None:
    stream, other = ends
    other.sendall(raw(b"") * 2_000)
    stream.read()
    assert 0 < stream.read_bytes <= 16 << 10
    stream.read()
    assert stream.read_bytes <= 16 << 10, "while there is a whole one, no more is read"


def test_what_does_not_go_at_once_goes_later(ends: tuple[Stream, socket.socket]) -> None:
    stream, other = ends
    body = os.urandom(MOST)
    for _ in range(20):  # more than any buffer
        stream.send([b"h" * HEADER_BYTES, body])
    assert stream.unsent_bytes > 0
    came = bytearray()
    other.setblocking(False)
    while len(came) < 20 * len(raw(body)):
        came += other.recv(1 << 20)
        stream.flush()
    assert came == raw(body) * 20 and not stream.unsent_bytes


def test_a_peer_that_is_gone_ends_it_without_an_error(ends: tuple[Stream, socket.socket]) -> None:
    stream, other = ends
    other.close()
    stream.send([b"h" * HEADER_BYTES, b"x"])
    assert stream.is_over
    stream.send([b"h" * HEADER_BYTES, b"x"])
    stream.flush()
    stream.read()
    assert stream.unsent_bytes == 0, "nothing is kept for it"


def test_nor_with_a_signal(ends: tuple[Stream, socket.socket]) -> None:
    """Hosts of engines need not ignore SIGPIPE as Python does."""
    stream, other = ends
    other.close()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        stream.send([b"h" * HEADER_BYTES, b"x"])
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert stream.is_over


def test_half_a_message_is_one_that_has_gone_or_come_in_part(ends: tuple[Stream, socket.socket]) -> None:
    stream, other = ends
    assert not stream.is_half
    other.sendall(raw(b"abc")[:-1])
    stream.read()
    assert stream.is_half and not stream.has_next
    other.sendall(raw(b"abc")[-1:])
    stream.read()
    assert not stream.is_half and stream.has_next
    stream.next()
    stream.send([b"h" * HEADER_BYTES, bytes(32 << 20)])
    assert stream.is_half


def test_a_directory_may_have_any_name(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 200)
    deep.mkdir()
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as connecting:
        with socket_path(deep) as path:
            listening.bind(path)
        listening.listen()
        with socket_path(deep) as path:
            connecting.connect(path)
    assert [file.name for file in deep.iterdir()] == ["direct.sock"]


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), socket_path(tmp_path / "none"):
        pass


def test_whose_a_message_is_can_be_read_of_its_header_alone() -> None:
    assert session_of(encode(Header(2**63 + 5, 1), m.Ping())[0]) == 2**63 + 5
    assert session_of(b"") is None and session_of(b"x" * HEADER_BYTES) is None
