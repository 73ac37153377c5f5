"""What knocks at our ports, told by the first that it sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, encode
from kvkeep.wire.strangers import (
    HTTP,
    REDIS,
    SSH,
    TLS,
    UNKNOWN,
    ZMQ,
    Stranger,
    recognise,
    recognise_server,
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
        (b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE", ZMQ),
        (b"\xff" + bytes(7) + b"\x01\x7f", ZMQ),
        (b"\x00\x01\x02", UNKNOWN),
        (b"", UNKNOWN),
    ],
)
def test_a_stream_is_told_by_its_first_bytes(first: bytes, expected: Stranger) -> None:
    assert recognise(first) == expected


def test_our_own_are_no_strangers_unless_they_are_of_another_version() -> None:
    same = encode(Header(3, 4), m.Ping())
    other = encode(Header(3, 4, m.PROTOCOL_VERSION + 1), m.Ping())
    assert recognise(same[0]) is None
    assert recognise(b"KVKP") is None, "the rest has not come"
    found = recognise(other[0])
    assert (
        found is not None and found.kind == f"a kvkeep of protocol version {m.PROTOCOL_VERSION + 1}"
    )
    assert "install the same kvkeep release on both sides" in found.hint


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (b"", ""),
        (b"KVKP", ""),
        (b"\xff" + bytes(8) + b"\x7f", "a kvkeep of an earlier release"),
        (b"HTTP/1.1 400 Bad Request\r\n", "something other than a kvkeep server"),
    ],
)
def test_a_server_is_told_by_what_it_answers(first: bytes, expected: str) -> None:
    assert expected in recognise_server(first) and bool(expected) == bool(recognise_server(first))


@given(st.binary(max_size=300))
def test_nothing_that_comes_raises_or_is_quoted(first: bytes) -> None:
    found = recognise(first)
    assert found is None or (found.kind + found.hint).isprintable()
    assert recognise_server(first) == "" or recognise_server(first).isprintable()
