"""The target of the decoders: it is quiet on the code as it is, and not when a bug is planted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvkeep.wire import frames as framing
from kvkeep.wire.frames import Header, decode_header, decode_request, seal
from kvkeep.wire.stream import Stream
from kvkeep_lab.chaos.mutants import planted
from kvkeep_lab.fuzz import wire as fuzz_wire
from kvkeep_lab.fuzz.choices import Choices, Leak, random_inputs
from kvkeep_lab.fuzz.wire import (
    REQUESTS,
    Fields,
    damaged,
    flood_decoder,
    messages_in,
    pack,
    read_stream,
    run_decoder,
    spoiled,
)


def run_all(count: int = 400) -> int:
    return sum(run_decoder(data).messages for data in random_inputs(11, count))


def test_it_is_quiet_and_counts_messages() -> None:
    assert run_decoder(b"") == (0, 0)
    assert run_all() > 1000


@pytest.mark.parametrize(
    ("message", "is_malformed"),
    [
        (seal(Header(1, 2), pack({"type": "Ping"}), []), False),
        (seal(Header(1, 2), pack({"type": "Done", "count": 1}), []), False),  # a reply
        (seal(Header(1, 2, version=9), b"nonsense", []), False),  # of another version: who knows
        (seal(Header(1, 2), pack({"type": "Pong"}), []), True),
        (seal(Header(1, 2), pack({"type": "Ping", "unknown": 1}), []), True),
        (seal(Header(1, 2), pack({"type": "Release", "leases": "x"}), []), True),
        (seal(Header(1, 2), b"", []), True),
        (seal(Header(1, 2), pack({"type": "Ping"}), [])[:1], True),
        ([b"KVKP", b"x"], True),
        ([b"GET / HTTP/1.1"], True),
        ([], False),
    ],
)
def test_what_neither_side_can_read_is_malformed(
    message: list[bytes], is_malformed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz_wire, "_MOST_MESSAGES", 1)
    monkeypatch.setattr(fuzz_wire, "frames_of", lambda choices, fields, number: message)
    assert run_decoder(bytes(30)) == (1, is_malformed)


def test_right_messages_are_among_what_it_makes() -> None:
    read = set()
    for data in random_inputs(5, 300):
        for kind in REQUESTS:
            frames = seal(Header(1, 2), pack(Fields(Choices(data)).message(kind)), [])
            try:
                read.add(type(decode_request(decode_header(frames), frames, 1 << 20)))
            except framing.RequestError:
                continue
    assert read == set(REQUESTS)


def test_spoiled_and_damaged_ones_differ_from_right_ones() -> None:
    fields: dict[str, Any] = {"type": "Ping"}
    assert len({spoiled(Choices(data), fields) for data in random_inputs(6, 200)}) > 100
    whole = seal(Header(1, 2), pack(fields), [])
    assert len({tuple(damaged(Choices(data), whole)) for data in random_inputs(7, 200)}) > 100


@pytest.mark.parametrize("text", ["\ud800", "é", "x", ""])
def test_text_of_any_kind_can_be_packed(text: str) -> None:
    packed = pack([text, {"a": text}])
    if text != "\ud800":
        assert msgspec.msgpack.decode(packed) == [text, {"a": text}]


def test_an_error_that_is_not_ours_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def clumsy(error: Exception) -> str:
        return str(error).split("`")[3]

    monkeypatch.setattr(framing, "_field", clumsy)
    with pytest.raises(IndexError):
        run_all()


def test_an_error_that_echoes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "_field", lambda error: "x" * 5_000)
    with pytest.raises(AssertionError, match="no echo"):
        run_all()


def test_a_decoder_that_changes_what_it_reads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful:
        def __init__(self, real: Any) -> None:
            self.real = real

        def decode(self, data: bytes) -> Any:
            message = self.real.decode(data)
            return (
                msgspec.structs.replace(message, pid=message.pid + 1)
                if hasattr(message, "pid")
                else message
            )

    monkeypatch.setattr(framing, "_requests", Forgetful(framing._requests))
    with pytest.raises(AssertionError, match="not what would be sent"):
        run_all()


# -- the framing


def test_a_flood_refuses_most_of_what_it_sends() -> None:
    ran = flood_decoder(bytes(range(256)) * 20)
    assert ran == flood_decoder(bytes(range(256)) * 20)
    assert ran.messages / 2 < ran.malformed_frames < ran.messages
    assert flood_decoder(b"") == (0, 0)


def test_messages_are_found_in_the_bytes_of_a_connection() -> None:
    one, other = seal(Header(1, 2), b"body"), seal(Header(1, 3), b"x", [b"ab", b"cd"])
    data = b"".join((*one, *other))
    assert messages_in(data) == ([one, other], False)
    assert messages_in(data + b"K") == ([one, other], True)
    assert messages_in(data[:-1]) == ([one], True)
    assert messages_in(b"") == ([], False)


@pytest.mark.parametrize("mutant", ["half-is-whole", "greedy", "swapped"])
def test_a_stream_that_is_wrong_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(seal(Header(1, 2), b"x" * 100)) * 2
    if mutant == "half-is-whole":
        with planted(mutant):
            assert read_stream(data, [50]) != messages_in(data)[0]
    elif mutant == "greedy":
        monkeypatch.setattr("kvkeep.wire.stream._READ_BYTES", 1 << 20)
        with pytest.raises(Leak):
            read_stream(data * 500, [1 << 20])
    else:
        right = Stream.next
        monkeypatch.setattr(
            Stream, "next", lambda self: [*reversed(found)] if (found := right(self)) else None
        )
        with pytest.raises(AssertionError, match="other messages"):
            run_all()
