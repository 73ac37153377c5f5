"""Messages over a connection: whole however they come, and nothing that comes can hurt."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.wire import messages as m
from kvkeep.wire.frames import HEADER_BYTES, MAGIC, Header, encode, seal, session_of
from kvkeep.wire.stream import FIRST_BYTES_KEPT, Stream
from kvkeep_lab.fuzz.wire import MOST_MESSAGE_BYTES, messages_in, read_stream

MOST = 1 << 20
READ_AHEAD = 16 << 10

Ends = tuple[Stream, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    stream = Stream(ours, MOST)
    yield stream, theirs
    stream.close()
    theirs.close()


def raw(body: bytes, *payload: bytes) -> bytes:
    return b"".join(seal(Header(7, 1), body, payload))


def all_of(stream: Stream) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    while True:
        stream.read()
        if (message := stream.next()) is None:
            return messages
        messages.append(message)


# -- what comes out is what went in

payloads = st.integers(0, 4).flatmap(
    lambda count: st.integers(1, 40).flatmap(
        lambda size: st.lists(
            st.binary(min_size=size, max_size=size), min_size=count, max_size=count
        )
    )
)
messages = st.builds(
    lambda header, body, payload: seal(Header(*header), body, payload),
    st.tuples(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1)),
    st.binary(min_size=1, max_size=60),
    payloads,
)
pieces = st.lists(st.integers(0, 90), min_size=1, max_size=6).filter(any)
families = st.sampled_from((socket.AF_UNIX, socket.AF_INET))


@settings(deadline=None)
@given(sent=st.lists(messages, max_size=6), sizes=pieces, family=families)
def test_whatever_the_pieces_the_same_messages_come_out(
    sent: list[list[bytes]], sizes: list[int], family: int
) -> None:
    data = b"".join(b"".join(frames) for frames in sent)
    assert read_stream(data, sizes, family) == sent


@settings(deadline=None)
@given(
    data=st.binary(max_size=300) | st.binary(max_size=300).map(lambda rest: MAGIC + rest),
    sizes=pieces,
)
def test_arbitrary_bytes_raise_nothing_and_hold_no_more_than_they_announce(
    data: bytes, sizes: list[int]
) -> None:
    assert read_stream(data, sizes) == messages_in(data)[0]


@settings(deadline=None)
@given(
    sent=st.lists(messages, min_size=1, max_size=3),
    at=st.integers(0),
    bit=st.integers(0, 7),
    sizes=pieces,
)
def test_nor_do_messages_with_a_flipped_bit(
    sent: list[list[bytes]], at: int, bit: int, sizes: list[int]
) -> None:
    data = bytearray(b"".join(b"".join(frames) for frames in sent))
    data[at % len(data)] ^= 1 << bit
    assert read_stream(bytes(data), sizes) == messages_in(bytes(data))[0]


class Narrow:
    """A socket that takes so many bytes at a time, over and over; 0: none."""

    family = socket.AF_UNIX

    def __init__(self, sizes: list[int]) -> None:
        self.took = bytearray()
        self._sizes, self._calls = sizes, 0

    def setblocking(self, flag: bool) -> None: ...

    def setsockopt(self, *_: int) -> None: ...

    def send(self, data: memoryview, flags: int) -> int:
        size = min(self._sizes[self._calls % len(self._sizes)], len(data))
        self._calls += 1
        if not size:
            raise BlockingIOError
        self.took += data[:size]
        return size


@settings(deadline=None)
@given(sent=st.lists(messages, min_size=1, max_size=5), sizes=pieces, flushes=st.integers(0, 3))
def test_however_little_a_socket_takes_all_of_it_goes(
    sent: list[list[bytes]], sizes: list[int], flushes: int
) -> None:
    narrow = Narrow(sizes)
    stream = Stream(narrow, MOST)  # type: ignore[arg-type]
    for head, body, *payload in sent:
        buffers = [bytearray(frame) for frame in payload]
        stream.send([head, body, *buffers])
        for buffer in buffers:
            buffer[:] = bytes(len(buffer))  # the caller uses it for something else
        for _ in range(flushes):
            stream.flush()
    expected = b"".join(b"".join(frames) for frames in sent)
    assert stream.unsent_bytes == stream.held_bytes == len(expected) - len(narrow.took)
    while stream.unsent_bytes:
        stream.flush()
    assert bytes(narrow.took) == expected and not stream.is_half


def test_what_is_sent_is_what_comes(ends: Ends) -> None:
    stream, other_end = ends
    other = Stream(other_end, MOST)
    for number, message in enumerate(
        [m.Ping(), m.Lookup("default", 1, os.urandom(70_000)), m.Ping()]
    ):
        frames = encode(Header(7, number), message)
        other.send(frames)
        assert all_of(stream) == [frames]
        assert session_of(frames[0]) == 7


# -- what cannot hurt


def test_a_message_that_is_too_long_ends_it_before_it_is_read(ends: Ends) -> None:
    stream, other = ends
    other.sendall(raw(bytes(MOST + 1))[: 100 << 10])
    for _ in range(3):
        stream.read()
        assert (
            stream.is_over
            and stream.held_bytes == 0
            and stream.next() is None
            and not stream.has_next
        )


@pytest.mark.parametrize(
    "first", [b"G", b"GET / HTTP/1.1\r\n", b"\xff\x00\x00\x00", b"KVKp", b"KVKP" + bytes(36)]
)
def test_first_bytes_that_are_not_ours_end_it_at_once_and_are_kept_for_the_log(
    ends: Ends, first: bytes
) -> None:
    stream, other = ends
    other.sendall(first)
    stream.read()
    assert stream.next() is None and stream.is_over
    assert stream.first == first and stream.held_bytes == 0


def test_only_so_many_of_the_first_bytes_are_kept(ends: Ends) -> None:
    stream, other = ends
    other.sendall(raw(b"x" * 10_000))
    all_of(stream)
    assert stream.first == raw(b"x" * 10_000)[:FIRST_BYTES_KEPT]


def test_one_that_sends_without_end_is_read_for_a_moment_only() -> None:
    received = []

    class Endless(Narrow):
        def recv(self, most: int) -> bytes:
            received.append(most)
            assert most <= 1 << 20, "nobody makes us take more memory than that at once"
            return raw(bytes(MOST))[:HEADER_BYTES] if len(received) == 1 else bytes(min(most, 1000))

    stream = Stream(Endless([1]), MOST)  # type: ignore[arg-type]
    stream.read()
    assert 1 < len(received) < 20 and not stream.is_over


def test_no_more_is_read_than_one_message_and_a_few_small_ones(ends: Ends) -> None:
    stream, other = ends
    other.sendall(raw(b"x") * 2_000)
    for _ in range(2):
        stream.read()
        assert 0 < stream.held_bytes <= READ_AHEAD, "while there is a whole one, no more is read"
    assert len(all_of(stream)) == 2_000


def test_a_header_tells_sizes_and_they_are_held_against_the_limit() -> None:
    assert read_stream(raw(b"x", *[bytes(1 << 12)] * 31), [1 << 20]) != []
    assert read_stream(raw(bytes(MOST_MESSAGE_BYTES + 1)), [1 << 20]) == []
    assert read_stream(raw(b"x", *[bytes(1 << 12)] * 32), [1 << 20]) == []


# -- the end of a connection


def test_what_came_before_the_end_is_there(ends: Ends) -> None:
    """As a Goodbye, after which nobody waits."""
    stream, other = ends
    other.sendall(raw(b"last words") + raw(b"half")[:-1])
    other.close()
    assert [body for _, body in all_of(stream)] == [b"last words"]
    stream.read()
    assert stream.is_over and stream.next() is None and not stream.has_next


def test_a_peer_that_is_gone_ends_it_without_an_error(ends: Ends) -> None:
    stream, other = ends
    other.close()
    for _ in range(2):
        stream.send(seal(Header(1, 1), b"x"))
        stream.flush()
        stream.read()
        assert stream.is_over and stream.unsent_bytes == 0, "nothing is kept for it"


def test_nor_with_a_signal(ends: Ends) -> None:
    """Hosts of engines need not ignore SIGPIPE as Python does."""
    stream, other = ends
    other.close()
    came = []
    before = signal.signal(signal.SIGPIPE, lambda *_: came.append(True))
    try:
        stream.send(seal(Header(1, 1), b"x"))
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert stream.is_over and not came


def test_one_that_is_closed_holds_nothing(ends: Ends) -> None:
    stream, other = ends
    other.sendall(raw(b"unread") * 3)
    stream.read()
    stream.send(seal(Header(1, 1), bytes(32 << 20)))
    assert stream.held_bytes > 1 << 20
    stream.close()
    assert stream.held_bytes == 0 and stream.fileno() == -1


def test_a_header_that_begins_at_the_end_of_a_large_message(ends: Ends) -> None:
    """Wherever it is cut."""
    stream, other = ends
    large, small = raw(b"large", bytes(100_000), bytes(100_000)), raw(b"small")
    for cut in range(1, len(small)):
        other.sendall(large + small[:cut])
        while not stream.has_next:
            stream.read()
        assert [len(frame) for frame in stream.next() or ()][1:] == [5, 100_000, 100_000]
        other.sendall(small[cut:] + small)
        assert [message[1] for message in all_of(stream)] == [b"small", b"small"]
        assert stream.held_bytes == 0


def test_half_a_message_is_one_that_has_gone_or_come_in_part(ends: Ends) -> None:
    stream, other = ends
    assert not stream.is_half
    other.sendall(raw(b"abc")[:-1])
    stream.read()
    assert stream.is_half and not stream.has_next
    other.sendall(raw(b"abc")[-1:])
    stream.read()
    assert not stream.is_half and stream.has_next
    stream.next()
    stream.send(seal(Header(1, 1), bytes(32 << 20)))
    assert stream.is_half
