"""Tests for messages as bytes and back: what is said arrives, and nothing that a peer sends can do
more than fail."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest

from kvkeep.errors import ProtocolError, RequestError
from kvkeep.wire import messages as m
from kvkeep.wire.frames import (
    HEADER_BYTES,
    Header,
    decode_header,
    decode_reply,
    decode_request,
    decode_sizes,
    encode,
    seal,
)

LAYOUT = 1  # the first one that a server opens
FRAME_BYTES = 1 << 20
HEADER = Header(session=7, number=9)

PLACE = m.PoolPlace("/dev/shm/kvkeep-x", "/dev/shm/kvkeep-x/session-1.lock", 1 << 28, 1 << 30)
REQUESTS = [
    m.Hello("engine", 4711),
    m.Attach(m.SHARED_MEMORY),
    m.Ping(),
    m.OpenLayout(b"f" * 16, [100, 200]),
    m.Lookup("default", 1, b"k" * 32, 1),
    m.Lookup("default", 1, b"k" * 32, 1, 200, 2),
    m.Prefetch("default", 1, b"k" * 32),
    m.Release([1, 2, 2**64 - 1]),
    m.ReportRequests([m.RequestReport("r", "default", [("loaded", 2), ("last", 1)], 40, 0, 8)]),
    m.Finish("default", LAYOUT, b"k" * 16),
    m.PrepareStore("default", 1, 0, b"p" * 16, b"k" * 32, 70, 5_000),
    m.CompleteStore(5, b"c" * 8),
    m.AbandonStore([5]),
    m.ReportBad("default", LAYOUT, b"k" * 16),
    m.Fetch(5, 0, 1, 2),
    m.Put(5, 3),
    m.DescribeBlocks("default", 1, b"k" * 32, [b"one", b"two"]),
    m.PoolEvents(1, 7, 9),
    m.Goodbye(),
]
REPLIES = [
    m.Welcome(1, 2, "kvkeep", PLACE, m.WireLimits(1, 2, 3, 4), ["network"], True),
    m.Done(3),
    m.LayoutOpened(1, 4096, [0, 128]),
    m.Found(2, b"s" * 16, b"c" * 16),
    m.Found(2, b"s" * 16, b"c" * 16, 3, 40),
    m.Prepared(b"p" * 4, b"s" * 8, 1, False),
    m.PoolChanges(9, b"k" * 32, b"\x01\x00", [b"one", b""], 1 << 40),
    m.Refused("bad_keys", "no keys", "keys", "send some"),
]


def sealed(
    body: bytes, *, session: int = 7, number: int = 9, version: int = m.PROTOCOL_VERSION
) -> list[bytes]:
    """Any bytes as the body of a message whose header and CRC are right."""
    return [bytes(frame) for frame in seal(Header(session, number, version), body)]


def packed(**fields: Any) -> list[bytes]:
    return sealed(msgspec.msgpack.encode(fields))


def refusal_of(frames: list[bytes]) -> RequestError:
    header = decode_header(frames)
    with pytest.raises(RequestError) as caught:
        decode_request(header, frames, FRAME_BYTES)
    return caught.value


# -- round trips


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_a_request_arrives_as_it_was_sent(message: Any) -> None:
    frames = encode(HEADER, message, [b"payload"])
    assert decode_header(frames) == HEADER
    assert decode_request(HEADER, frames, FRAME_BYTES) == message
    assert frames[2:] == [b"payload"]


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_a_reply_arrives_as_it_was_sent(message: Any) -> None:
    frames = encode(HEADER, message)
    assert decode_header(frames) == HEADER
    assert decode_reply(HEADER, frames) == message


def test_every_message_is_in_the_round_trips() -> None:
    assert {type(message) for message in REQUESTS} == set(get_args(m.Request))
    assert {type(message) for message in REPLIES} == set(get_args(m.Reply))


def test_a_payload_is_not_copied() -> None:
    block = bytearray(b"block")
    assert encode(HEADER, m.Put(1, 0), [block])[2] is block


# -- the header


def test_the_bytes_of_a_message_are_these() -> None:
    """A known answer: what other versions and other languages rely on."""
    header, body = encode(Header(session=0x0102030405060708, number=0x11), m.Ping())
    assert body == b"\x81\xa4type\xa4Ping"
    assert (
        header.hex()
        == "4b564b5003000000080706050403020111000000000000000b0000000000000000000000149b5769"
    )
    assert len(header) == HEADER_BYTES == 40


def test_the_header_tells_what_follows() -> None:
    head, body, *_ = encode(HEADER, m.Put(5, 3), [b"one block", b"and other"])
    sizes = decode_sizes(head)
    assert sizes is not None and sizes.total_bytes == len(body) + 18
    assert (sizes.body_bytes, sizes.payload_frames, sizes.payload_frame_bytes) == (len(body), 2, 9)


@pytest.mark.parametrize(
    "sizes",
    [(0, 0, 0), (1, 1, 0), (1, 0, 1), (1, m.MAX_LIST_ITEMS + 1, 1)],
    ids=["no body", "empty payload", "payload in no frames", "too many frames"],
)
def test_sizes_that_no_message_has_are_none(sizes: tuple[int, int, int]) -> None:
    head = bytearray(encode(HEADER, m.Ping())[0])
    head[24:36] = b"".join(size.to_bytes(4, "little") for size in sizes)
    assert decode_sizes(head) is None
    head = bytearray(b"KVKQ" + encode(HEADER, m.Ping())[0][4:])
    assert decode_sizes(head) is None


def test_the_largest_numbers_fit_the_header() -> None:
    header = Header(2**64 - 1, 2**64 - 1)
    assert decode_header(encode(header, m.Ping())) == header


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"", b"\x81\xa4type\xa4Ping"],
        [b"KVKP"],
        [b"KVKQ" + encode(HEADER, m.Ping())[0][4:], b"\x81\xa4type\xa4Ping"],
        [encode(HEADER, m.Ping())[0][:-1], b"\x81\xa4type\xa4Ping"],
        [encode(HEADER, m.Ping())[0] + b"\0", b"\x81\xa4type\xa4Ping"],
        [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"],
    ],
)
def test_what_has_no_header_of_ours_is_no_message(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError, match="without a kvkeep header"):
        decode_header(frames)


def test_any_flipped_bit_of_header_or_body_is_seen() -> None:
    frames = encode(HEADER, m.Lookup("default", 1, b"k" * 16))
    for at in range(2):
        for bit in range(8 * len(frames[at])):
            damaged = list(frames)
            flipped = bytearray(frames[at])
            flipped[bit // 8] ^= 1 << bit % 8
            damaged[at] = bytes(flipped)
            with pytest.raises(ProtocolError):
                decode_header(damaged)


def test_a_body_of_another_message_is_seen() -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        decode_header([encode(HEADER, m.Ping())[0], encode(HEADER, m.Goodbye())[1]])


# -- requests that are refused


def test_another_version_is_refused_by_name() -> None:
    error = refusal_of(sealed(b"whatever version 3 sends", version=m.PROTOCOL_VERSION + 1))
    assert error.code == "protocol_version"
    assert f"version {m.PROTOCOL_VERSION}, not {m.PROTOCOL_VERSION + 1}" in error.message
    assert "same kvkeep release" in error.hint


def test_a_frame_too_large_is_refused_with_both_sizes() -> None:
    error = refusal_of(encode(HEADER, m.Put(1, 0), [bytes(FRAME_BYTES + 1)]))
    assert error.code == "frame_too_large"
    assert str(FRAME_BYTES) in error.message and str(FRAME_BYTES + 1) in error.message
    assert "--max-frame-size" in error.hint


def test_a_frame_of_exactly_the_limit_is_taken() -> None:
    frames = encode(HEADER, m.Put(1, 0), [bytes(FRAME_BYTES)])
    assert decode_request(HEADER, frames, FRAME_BYTES) == m.Put(1, 0)


def test_a_message_without_its_body_is_refused() -> None:
    assert refusal_of(sealed(b"")[:1]).code == "bad_frame"


@pytest.mark.parametrize(
    ("frames", "field"),
    [
        (packed(type="Nobody"), "type"),
        (packed(type=5), "type"),
        (packed(client="a", pid=1), "type"),
        (packed(type="Hello", client="a"), "pid"),
        (packed(type="Hello", client=1, pid=1), "client"),
        (packed(type="Hello", client="a", pid="1"), "pid"),
        (packed(type="Hello", client="a", pid=1.5), "pid"),
        (packed(type="Hello", client="a", pid=None), "pid"),
        (packed(type="Hello", client="a", pid=1, extra=2), "extra"),
        (packed(type="Release", leases=[1, "two"]), "leases[1]"),
        (packed(type="Release", leases=[0] * (m.MAX_LIST_ITEMS + 1)), "leases"),
        (packed(type="AbandonStore", writes=[0] * (m.MAX_LIST_ITEMS + 1)), "writes"),
        (packed(type="OpenLayout", fingerprint="text", shard_bytes=[1]), "fingerprint"),
        (
            packed(type="OpenLayout", fingerprint=b"f", shard_bytes=[1] * (m.MAX_LIST_ITEMS + 1)),
            "shard_bytes",
        ),
        (packed(type="Lookup", tenant="default", layout=1, keys="text"), "keys"),
        (packed(type="Welcome", session=1), "type"),
    ],
)
def test_a_bad_field_is_named(frames: list[bytes], field: str) -> None:
    error = refusal_of(frames)
    assert (error.code, error.field) == ("bad_message", field)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80\x80", b"\x93\x01\x02\x03", b"\x81\xa4type\xa4\xff\xff\xff\xff"]
)
def test_bytes_that_are_no_message_name_no_field(body: bytes) -> None:
    error = refusal_of(sealed(body))
    assert error.code == "bad_message"
    assert error.field in ("", "type")


def test_an_error_is_no_echo_of_what_was_sent() -> None:
    error = refusal_of(packed(type="x" * 100_000))
    assert len(error.message) < 300
    error = refusal_of(packed(type="Hello", client="a", pid=1, **{"y" * 100_000: 1}))
    assert len(error.message) < 300 and len(error.field) <= 200


def test_deep_nesting_is_refused_and_not_followed() -> None:
    deep = b"\x82\xa4type\xa7Release\xa6leases" + b"\x91" * 100_000 + b"\x01"
    assert refusal_of(sealed(deep)).code == "bad_message"


def test_a_length_that_is_not_there_reserves_no_memory() -> None:
    four_gigabytes = b"\x82\xa4type\xa6Finish\xa3key\xc6\xff\xff\xff\xff"
    assert refusal_of(sealed(four_gigabytes)).code == "bad_message"
    many_items = b"\x82\xa4type\xa7Release\xa6leases\xdd\xff\xff\xff\xff"
    assert refusal_of(sealed(many_items)).code == "bad_message"


# -- replies that cannot be read


def test_a_reply_of_another_version_says_so() -> None:
    with pytest.raises(
        ProtocolError,
        match=f"protocol version {m.PROTOCOL_VERSION + 1}, this client {m.PROTOCOL_VERSION}",
    ):
        decode_reply(
            Header(1, 1, version=m.PROTOCOL_VERSION + 1),
            sealed(b"", version=m.PROTOCOL_VERSION + 1),
        )


def test_a_reply_without_its_body_says_so() -> None:
    with pytest.raises(ProtocolError, match="missing"):
        decode_reply(HEADER, sealed(b"")[:1])


def test_a_request_is_no_reply() -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode_reply(HEADER, encode(HEADER, m.Ping()))


# -- fuzz


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut out, put in, doubled: as a broken or hostile peer might."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 1 if changed:
                changed[at % len(changed)] = rng.choice(
                    [0x00, 0x7F, 0x80, 0xC0, 0xC1, 0xC6, 0xDD, 0xDF, 0xFF]
                )
            case 2:
                del changed[at : at + rng.randrange(8)]
            case 3:
                changed[at:at] = rng.randbytes(rng.randrange(8))
            case _:
                changed[at:at] = changed[: rng.randrange(16)]
    return bytes(changed)


def hostile_frames(seed: int, count: int) -> Iterator[list[bytes]]:
    """Some damaged after they were sealed, which the CRC sees; most before, so that decoding has
    to."""
    rng = random.Random(seed)
    for _ in range(count):
        frames = [bytes(frame) for frame in encode(HEADER, rng.choice([*REQUESTS, *REPLIES]))]
        match rng.randrange(6):
            case 0:
                at = rng.randrange(2)
                frames[at] = mutated(rng, frames[at])
                yield frames
            case 1:
                yield [rng.randbytes(rng.randrange(64)) for _ in range(rng.randrange(4))]
            case 2:
                yield sealed(
                    rng.randbytes(rng.randrange(64)), version=rng.choice([0, 2, 2, 1, 65535])
                )
            case _:
                yield sealed(mutated(rng, frames[1]))


def outcome(frames: list[bytes]) -> set[str]:
    """What becomes of frames: "read" or the code of a refusal, as a request and as a reply."""
    try:
        header = decode_header(frames)
    except ProtocolError:
        return {"no message"}
    outcomes = set()
    try:
        decode_request(header, frames, FRAME_BYTES)
        outcomes.add("read")
    except RequestError as error:
        outcomes.add(error.code)
    try:
        decode_reply(header, frames)
        outcomes.add("read")
    except ProtocolError:
        outcomes.add("no reply")
    return outcomes


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_peer_sends_is_read_or_refused(seed: int) -> None:
    counts: dict[str, int] = {}
    for frames in hostile_frames(seed, 10_000):
        for each in outcome(frames):
            counts[each] = counts.get(each, 0) + 1
    assert set(counts) == {"read", "no message", "bad_message", "protocol_version", "no reply"}
    assert min(counts.values()) > 100, "each way was taken often"
