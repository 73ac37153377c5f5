"""Fuzz target of framing and decoders, and how messages are made from an input: right, nearly
right, or damaged."""

from __future__ import annotations

import itertools
import socket
import struct
from collections.abc import Sequence
from random import Random
from typing import Any, get_args

import msgspec

from kvkeep.errors import ProtocolError, RequestError
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.outcomes import NAMES
from kvkeep.wire import messages as m
from kvkeep.wire.frames import (
    HEADER_BYTES,
    MAGIC,
    Header,
    decode_header,
    decode_reply,
    decode_request,
    decode_sizes,
    encode,
    seal,
)
from kvkeep.wire.stream import Stream
from kvkeep_lab.fuzz.choices import Choices, Leak, Ran
from kvkeep_lab.simulation.peer import chain

FRAME_BYTES = 1 << 16
MOST_MESSAGE_BYTES = 2 * FRAME_BYTES
_READ_AHEAD_BYTES = 1 << 14  # what one read takes beyond the message that it is for
_MOST_PIECES = 50
_BASES_OF_A_FLOOD, _CONNECTIONS_OF_A_FLOOD = 20, 1_000
_MOST_MESSAGES = 40
SHARD_BYTES = 64
_LONGEST_ERROR_CHARS = 400

REQUESTS: tuple[type[Any], ...] = get_args(m.Request)
_REPLIES: tuple[type[Any], ...] = get_args(m.Reply)
_TENANTS: tuple[str, ...] = ("default", tenant_of("a"), tenant_of("b"), tenant_of("c"))
_TENANTS += ("", "salt", "t-" + "0" * 31, "x" * 3000)
_KEY_RUNS = [chain(name, length) for name in "ab" for length in (1, 2, 5, 9, 33, 0)]
_KEY_RUNS += [_KEY_RUNS[1][:-1], _KEY_RUNS[1] * 2, chain("a", 5)[16:], b"k", bytes(64)]
_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PLANES = (m.NETWORK, m.SHARED_MEMORY, "", "x" * 2000)


def pack(value: Any) -> bytes:
    """MessagePack of anything, text that is no UTF-8 included."""
    return msgspec.msgpack.encode(_packable(value))


def _packable(value: Any) -> Any:
    match value:
        case str():
            encoded = value.encode(errors="surrogatepass")
            return (
                value
                if value.isascii()
                else msgspec.Raw(b"\xda" + len(encoded).to_bytes(2, "big") + encoded)
            )
        case dict():
            return {
                key.encode(errors="replace").decode(): _packable(each)
                for key, each in value.items()
            }
        case list():
            return [_packable(each) for each in value]
        case _:
            return value


class Fields:
    """Values for the fields of messages, near enough to right ones that some are."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self.used = [0]  # numbers of earlier requests: leases and writes have them
        self.layout = 1  # one that is open

    def message(self, kind: type[Any]) -> dict[str, Any]:
        fields = {name: self._field(name) for name in kind.__struct_fields__}
        return {"type": kind.__name__, **fields}

    def _field(self, name: str) -> Any:
        choices = self._choices
        match name:
            case "tenant":
                return choices.pick((*_TENANTS[:3] * 4, *_TENANTS))
            case "keys" | "addresses":
                return choices.pick(_KEY_RUNS)
            case "parent" if choices.byte() % 4:
                return b""
            case "shard" | "skip" | "start" | "ttl_ms":
                return choices.pick((0, 0, 0, 0, 1, 10, self.number()))
            case "count":
                return choices.pick((1, 1, 2, self.number()))
            case "key" | "parent":
                return choices.pick(
                    [b"", *(run[-16:] for run in _KEY_RUNS[:5]), b"short", choices.take(16)]
                )
            case "plane":
                return choices.pick(PLANES)
            case "fingerprint":
                return choices.pick((b"a" * 16, b"b" * 16, choices.take(16), b""))
            case "shard_bytes":
                return [
                    choices.pick((SHARD_BYTES, 64, 100, 4096, self.number()))
                    for _ in range(choices.byte() % 5)
                ]
            case "further_shards":
                return [choices.pick((1, 2, 3, self.number())) for _ in range(choices.byte() % 3)]
            case "lease" | "write":
                return self.earlier()
            case "leases" | "writes":
                return [self.earlier() for _ in range(choices.byte() % 6)]
            case "loaded_tokens":
                return [self.number() for _ in range(choices.byte() % 4)]
            case "after" | "cursor":
                return choices.pick((-1, -1, 0, 0, 1, 9, 1 << 40, self.number()))
            case "descriptions":
                return [choices.take(choices.below(40)) for _ in range(choices.byte() % 10)]
            case "media":
                return bytes(choices.below(5) for _ in range(choices.byte() % 10))
            case "checksums" | "physical" | "slots" | "positions":
                return choices.take(choices.pick((0, 8, 16, 24, 40, 3)))
            case "layout":
                return choices.pick((*[self.layout] * 6, 1, 2, self.number()))
            case "priority":
                return choices.pick((50, 0, 100, self.number()))
            case "client" | "server" | "code" | "message" | "field" | "hint" | "directory" | "lock":
                return choices.text()
            case "trace":
                return choices.pick(("", _TRACE, _TRACE[:-1], choices.text()))
            case "role":
                return choices.text()[: m.MAX_ROLE_CHARS]
            case "parts":
                return {
                    choices.text()[: m.MAX_PART_NAME_CHARS]: choices.text()
                    for _ in range(choices.byte() % 4)
                }
            case "pool" | "limits":
                return self.message(m.PoolPlace if name == "pool" else m.WireLimits)
            case "capabilities" | "shard_offsets":
                return [choices.value() for _ in range(choices.byte() % 4)]
            case "requests":
                return [self._report() for _ in range(choices.byte() % 3)]
            case "orphan" | "apart" | "verify":
                return choices.byte() % 2 == 1
            case _:
                return self.number()

    def _report(self) -> dict[str, Any]:
        choices = self._choices
        return {
            "request": choices.text()[: m.MAX_REQUEST_CHARS],
            "tenant": self._field("tenant"),
            "runs": [
                [choices.pick((*NAMES, choices.text())), choices.pick((1, 5, self.number()))]
                for _ in range(choices.byte() % 6)
            ],
            "prompt_tokens": self.number(),
            "computed_tokens": self.number(),
            "avoided_us": self.number(),
            "lookups": [self.earlier() for _ in range(choices.byte() % 3)],
            "keys_from": choices.pick((0, 1, self.number())),
            "keys": choices.pick(_KEY_RUNS),
            "probes": choices.take(choices.pick((0, 8, 24, 5))),
        }

    def number(self) -> int:
        return self._choices.number()

    def earlier(self) -> int:
        """The number of an earlier request, the youngest first, or any."""
        at = self._choices.byte()
        return self.used[-1 - at % min(len(self.used), 8)] if at < 224 else self.number()


def spoiled(choices: Choices, fields: dict[str, Any]) -> bytes:
    """A message with a field of another type, missing, unknown or doubled; or with bytes
    changed."""
    name = choices.pick(list(fields))
    match choices.below(6):
        case 0:
            return pack(fields | {name: choices.value()})
        case 1:
            return pack({key: value for key, value in fields.items() if key != name})
        case 2:
            return pack(fields | {"unknown": choices.value()})
        case 3:
            packed, again = pack(fields), pack({name: choices.value()})
            return bytes([packed[0] + 1]) + packed[1:] + again[1:]
        case 4:
            body = bytearray(pack(fields))
            at = choices.below(len(body))
            body[at : at + choices.below(3)] = choices.take(choices.below(4))
            return bytes(body)
        case _:
            return choices.take(choices.byte())


def damaged(choices: Choices, frames: list[bytes]) -> list[bytes]:
    """Frames that no encoder would make: of another version, cut, changed, missing or too many."""
    match choices.below(7):
        case 0:
            header = Header(choices.below(4), choices.below(4), choices.below(1 << 16))
            return seal(header, frames[1], frames[2:])
        case 1:
            head = bytearray(frames[0])
            head[choices.below(len(head))] ^= 1 << choices.below(8)
            return [bytes(head), *frames[1:]]
        case 2:
            return frames[: choices.below(2)]
        case 3:
            return seal(decode_header(frames), b"", [])[:1]
        case 4:
            return [*frames, *([bytes(choices.below(256))] * choices.below(64))]
        case 5:
            return [choices.take(choices.byte()) for _ in range(choices.byte() % 4)]
        case _:
            return seal(decode_header(frames), frames[1] + bytes(FRAME_BYTES), frames[2:])


class Pieces:
    """A socket from which these bytes come, so many at a time, over and over; 0: none this time."""

    def __init__(self, data: bytes, sizes: Sequence[int], family: int = socket.AF_UNIX) -> None:
        self.family = family
        self.given = 0
        self._data, self._sizes, self._calls = data, sizes, 0
        assert any(sizes)

    def setblocking(self, flag: bool) -> None: ...

    def setsockopt(self, *_: int) -> None: ...

    def close(self) -> None: ...

    def recv(self, most: int) -> bytes:
        if self.given == len(self._data):
            return b""
        size = self._sizes[self._calls % len(self._sizes)]
        self._calls += 1
        if not size:
            raise BlockingIOError
        piece = self._data[self.given : self.given + min(size, most)]
        self.given += len(piece)
        return piece


def messages_in(data: bytes) -> tuple[list[list[bytes]], bool]:
    """The messages that follow each other in these bytes, and whether something is left that is
    none: written another way than `Stream`, which is to find the same."""
    found, at = [], 0
    while len(data) - at >= HEADER_BYTES:
        magic, body, count, each = struct.unpack_from("<4s20xIII", data, at)
        end = at + HEADER_BYTES + body + count * each
        too_many = count > m.MAX_LIST_ITEMS or body + count * each > MOST_MESSAGE_BYTES
        if magic != MAGIC or not body or too_many or (count > 0) != (each > 0) or end > len(data):
            break
        starts = [at, at + HEADER_BYTES, *range(at + HEADER_BYTES + body, end, each or 1), end]
        found.append([data[start:stop] for start, stop in itertools.pairwise(starts)])
        at = end
    return found, at < len(data)


def read_stream(
    data: bytes, sizes: Sequence[int], family: int = socket.AF_UNIX
) -> list[list[bytes]]:
    """What a Stream makes of these bytes in these pieces. It holds no more than the message under
    way has announced, and what one read takes beyond it."""
    stream = Stream(Pieces(data, sizes, family), MOST_MESSAGE_BYTES)  # type: ignore[arg-type]
    found = []
    while True:
        stream.read()
        announced = HEADER_BYTES
        if (
            stream.held_bytes >= HEADER_BYTES
            and (follows := decode_sizes(b"".join(stream._pieces))) is not None
        ):
            announced += follows.total_bytes
        if (
            stream.held_bytes
            > min(announced, HEADER_BYTES + MOST_MESSAGE_BYTES) + _READ_AHEAD_BYTES
        ):
            raise Leak(f"{stream.held_bytes} bytes are held for a message of {announced}")
        while (message := stream.next()) is not None:
            found.append(message)
        if stream.is_over:
            break
    assert not stream.has_next and not stream.unsent_bytes
    stream.close()
    assert not stream.held_bytes, "a connection that is over holds nothing"
    return found


def run_decoder(data: bytes) -> Ran:
    """Requests and replies from one input, as they come over connections: each is read or refused,
    and what is read is what was meant."""
    choices, messages, malformed = Choices(data), 0, 0
    fields = Fields(choices)
    while choices.left and messages < _MOST_MESSAGES:
        sent = b""
        for _ in range(choices.pick((1, 1, 2, 5))):
            messages += 1
            sent += b"".join(frames_of(choices, fields, messages))
        malformed += _receive(sent, choices)
    return Ran(messages, malformed)


def flood_decoder(data: bytes) -> Ran:
    """Many connections from one input, each with a few of its messages, nearly all of them spoiled
    by a bit, a cut or foreign bytes: less to choose for coverage, and ten times as fast."""
    choices, random, malformed, messages = Choices(data), Random(data), 0, 0
    fields = Fields(choices)
    bases = [b"".join(frames_of(choices, fields, number)) for number in range(_BASES_OF_A_FLOOD)]
    for _ in range(_CONNECTIONS_OF_A_FLOOD if data else 0):
        parts = [broken(random, random.choice(bases)) for _ in range(random.choice((1, 1, 3)))]
        messages += len(parts)
        sent = b"".join(parts)
        sizes = [
            random.choice((len(sent), HEADER_BYTES, HEADER_BYTES + 1, 1 + len(sent) // 3)),
            len(sent),
        ]
        malformed += _refused(sent, sizes, socket.AF_UNIX)
    return Ran(messages, malformed)


def broken(random: Random, whole: bytes) -> bytes:
    """These bytes cut, with others between or in their place, or with a flipped bit; near their
    beginning."""
    at = random.randrange(min(len(whole), 2 * HEADER_BYTES) or 1)
    match random.randrange(5):
        case 0:
            return whole[:at]
        case 1:
            return whole[:at] + random.randbytes(random.randrange(8)) + whole[at:]
        case 2:
            return random.randbytes(at)
        case _ if whole:
            broken = bytearray(whole)
            broken[at] ^= 1 << random.randrange(8)
            return bytes(broken)
    return whole


def frames_of(choices: Choices, fields: Fields, number: int) -> list[bytes]:
    """A message of this number, right or wrong."""
    message = fields.message(choices.pick((*REQUESTS, *_REPLIES)))
    body = spoiled(choices, message) if choices.byte() % 2 else pack(message)
    payload = [bytes(choices.pick((64, 1)))] * (choices.byte() % 4) if choices.seldom() else []
    frames = seal(Header(choices.below(1 << 64), number), body, payload)
    return damaged(choices, frames) if choices.byte() >= 192 else frames


def _receive(sent: bytes, choices: Choices) -> int:
    """Bytes of one connection, in pieces that the input chooses. Returns how many messages were
    refused: what ends the connection, and what is not whole when it ends, counts as one."""
    least = len(sent) // _MOST_PIECES
    sizes = [size + least for size in choices.take(1 + choices.byte() % 4)] or [least + 1]
    return _refused(
        sent, sizes if any(sizes) else [1], choices.pick((socket.AF_UNIX, socket.AF_INET))
    )


def _refused(sent: bytes, sizes: Sequence[int], family: int) -> int:
    found = read_stream(sent, sizes if any(sizes) else [1], family)
    expected, is_refused = messages_in(sent)
    assert found == expected, "other messages than were sent"
    return is_refused + sum(not _decode(message) for message in found)


def _decode(frames: list[bytes]) -> bool:
    """Whatever it is: a message that says the same when it is sent again, or one of our own errors.
    False if neither server nor client could read it: then it is malformed, unless it is of another
    version."""
    try:
        header = decode_header(frames)
    except ProtocolError:
        return False
    is_read = header.version != m.PROTOCOL_VERSION
    for read in (
        lambda given: decode_request(header, given, FRAME_BYTES),
        lambda given: decode_reply(header, given),
    ):
        try:
            message: m.Message = read(frames)
        except RequestError as error:
            if len(error.message) > _LONGEST_ERROR_CHARS or len(error.field) > _LONGEST_ERROR_CHARS:
                raise AssertionError("an error is no echo") from error
            continue
        except ProtocolError:
            continue
        assert read(encode(header, message)) == message, "what was read is not what would be sent"
        is_read = True
    return is_read
