"""What knocks at our ports, told by the first that it sends."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, encode
from kvkeep.wire.strangers import (
    HTTP,
    LMCACHE,
    REDIS,
    SSH,
    TLS,
    UNKNOWN,
    ZMQ,
    ZMQ_ELSEWHERE,
    Stranger,
    recognise,
    recognise_frames,
)

BROWSER = b"GET /favicon.ico HTTP/1.1\r\nHost: localhost:5555\r\nUser-Agent: Mozilla/5.0\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (BROWSER, HTTP),
        (b"POST /v1/completions HTTP/1.0\r\n", HTTP),
        (b"GET /a-path-that-has-not-come-whole", HTTP),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", HTTP),  # gRPC among others
        (bytes.fromhex("16030100c8010000c40303") + bytes(32), TLS),
        (b"*1\r\n$4\r\nPING\r\n", REDIS),
        (b"*3\r\n$5\r\nHELLO\r\n$1\r\n3\r\n", REDIS),
        (b"ping\r\n", REDIS),
        (b"SSH-2.0-OpenSSH_9.6\r\n", SSH),
        (b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE", ZMQ_ELSEWHERE),
        (b"\xff" + bytes(7) + b"\x01\x7f", ZMQ_ELSEWHERE),
        (b"\x00\x01\x02", UNKNOWN),
        (b"", UNKNOWN),
    ],
)
def test_a_stream_is_told_by_its_first_bytes(first: bytes, expected: Stranger) -> None:
    assert recognise(first) == expected


def lmcache(number: int, kind: object, *payload: object) -> list[bytes]:
    """As its client in multi-process mode sends a request: a number, a kind, and what belongs to it."""
    return [msgspec.msgpack.encode(each) for each in (number, kind, *payload)]


@pytest.mark.parametrize(
    ("frames", "peer", "expected"),
    [
        (lmcache(0, 1, {"instance_id": 7}), b"\0\x80\0A\xa7", LMCACHE),
        (lmcache(70_000, 12), b"\0\x80\0A\xa7", LMCACHE),
        ([b"4\r\nDOCS\r\n"], b"\r\n$7\r\nCOMMAND\r\n$4\r\nDOCS\r\n*2\r\n$7\r\nCOMMAND\r", REDIS),
        ([b"e */*\r\n"], b"T /metrics HTTP/1.1\r\nHost: localhost:5555\r\nUser-Agent: cu", HTTP),
        ([b"", b"hello"], b"", ZMQ),
        ([pickle.dumps({"a": 1})], b"", ZMQ),
        ([b"\x01"], b"", ZMQ),
        ([b"\xa1a", b"\xa1b"], b"", ZMQ),
        ([b"\xa1\xff", b"\xc1"], b"", ZMQ),
        ([b""], b"", ZMQ),
        ([], b"", ZMQ),
    ],
)
def test_a_zmq_message_is_told_by_its_frames(frames: list[bytes], peer: bytes, expected: Stranger) -> None:
    assert recognise_frames(frames, peer) == expected


def test_our_own_are_no_strangers_unless_they_are_of_another_version() -> None:
    same = encode(Header(3, 4), m.Ping())
    other = encode(Header(3, 4, m.PROTOCOL_VERSION + 1), m.Ping())
    for prefix in (b"", b"\x01\0\0\0"):  # a stream has a length first
        assert recognise(prefix + same[0]) is None
        assert recognise(prefix + b"KVKP") is None, "the rest has not come"
        found = recognise(prefix + other[0])
        assert found is not None and found.kind == f"a kvkeep of protocol version {m.PROTOCOL_VERSION + 1}"
        assert "install the same kvkeep release on both sides" in found.hint
    assert recognise_frames(same) is None
    assert recognise_frames([same[0][:-1] + b"?", same[1]]) is None, "damaged on its way, and ours"
    assert recognise_frames(other) == recognise(other[0])


@given(st.lists(st.binary(max_size=300), max_size=6), st.binary(max_size=300))
def test_nothing_that_comes_raises_or_is_quoted(frames: list[bytes], peer: bytes) -> None:
    for found in (recognise(b"".join(frames)), recognise_frames(frames, peer)):
        assert found is None or (found.kind + found.hint).isprintable()
