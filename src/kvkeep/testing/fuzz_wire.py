"""Fuzz target of the decoders, and how messages are made from an input: right ones, nearly right ones, and damaged."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from kvkeep.errors import ProtocolError, RequestError
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.fuzz_bytes import Choices, Ran
from kvkeep.testing.peer import chain
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, decode_reply, decode_request, encode

FRAME_BYTES = 1 << 16
_MOST_MESSAGES = 40
SHARD_BYTES = 64
_LONGEST_ERROR_CHARS = 400

REQUESTS: tuple[type[Any], ...] = get_args(m.Request)
_REPLIES: tuple[type[Any], ...] = get_args(m.Reply)
_TENANTS = ("default", tenant_of("a"), tenant_of("b"), tenant_of("c"), "", "salt", "t-" + "0" * 31, "x" * 3000)
_KEY_RUNS = [chain(name, length) for name in "ab" for length in (1, 2, 5, 9, 33, 0)]
_KEY_RUNS += [_KEY_RUNS[1][:-1], _KEY_RUNS[1] * 2, chain("a", 5)[16:], b"k", bytes(64)]
PLANES = (m.NETWORK, m.SHARED_MEMORY, "", "x" * 2000)


def seal(header: Header, body: bytes, payload: list[bytes]) -> list[bytes]:
    """A body of any bytes under a right header and CRC, which `encode` gives only to messages."""
    frames = encode(header, msgspec.Raw(body))  # type: ignore[arg-type]
    return [*(bytes(frame) for frame in frames), *payload]


def pack(value: Any) -> bytes:
    """MessagePack of anything, text that is no UTF-8 included."""
    return msgspec.msgpack.encode(_packable(value))


def _packable(value: Any) -> Any:
    match value:
        case str():
            encoded = value.encode(errors="surrogatepass")
            return value if value.isascii() else msgspec.Raw(b"\xda" + len(encoded).to_bytes(2, "big") + encoded)
        case dict():
            return {key.encode(errors="replace").decode(): _packable(each) for key, each in value.items()}
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
            case "keys":
                return choices.pick(_KEY_RUNS)
            case "parent" if choices.byte() % 4:
                return b""
            case "shard" | "skip" | "start" | "ttl_ms":
                return choices.pick((0, 0, 0, 0, 1, 10, self.number()))
            case "count":
                return choices.pick((1, 1, 2, self.number()))
            case "key" | "parent":
                return choices.pick([b"", *(run[-16:] for run in _KEY_RUNS[:5]), b"short", choices.take(16)])
            case "plane":
                return choices.pick(PLANES)
            case "fingerprint":
                return choices.pick((b"a" * 16, b"b" * 16, choices.take(16), b""))
            case "shard_bytes":
                return [choices.pick((SHARD_BYTES, 64, 100, 4096, self.number())) for _ in range(choices.byte() % 5)]
            case "lease" | "write":
                return self.earlier()
            case "leases" | "writes":
                return [self.earlier() for _ in range(choices.byte() % 6)]
            case "loaded_tokens":
                return [self.number() for _ in range(choices.byte() % 4)]
            case "checksums" | "physical" | "slots" | "positions":
                return choices.take(choices.pick((0, 8, 16, 24, 40, 3)))
            case "layout":
                return choices.pick((*[self.layout] * 6, 1, 2, self.number()))
            case "priority":
                return choices.pick((50, 0, 100, self.number()))
            case "client" | "server" | "code" | "message" | "field" | "hint" | "directory" | "lock":
                return choices.text()
            case "role":
                return choices.text()[: m.MAX_ROLE_CHARS]
            case "parts":
                return {choices.text()[: m.MAX_PART_NAME_CHARS]: choices.text() for _ in range(choices.byte() % 4)}
            case "pool" | "limits":
                return self.message(m.PoolPlace if name == "pool" else m.WireLimits)
            case "capabilities" | "shard_offsets":
                return [choices.value() for _ in range(choices.byte() % 4)]
            case "orphan" | "verify":
                return choices.byte() % 2 == 1
            case _:
                return self.number()

    def number(self) -> int:
        return self._choices.number()

    def earlier(self) -> int:
        """The number of an earlier request, the youngest first, or any."""
        at = self._choices.byte()
        return self.used[-1 - at % min(len(self.used), 8)] if at < 224 else self.number()


def spoiled(choices: Choices, fields: dict[str, Any]) -> bytes:
    """A message with a field of another type, missing, unknown or doubled; or with bytes changed."""
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


def run_decoder(data: bytes) -> Ran:
    """Requests and replies from one input: each is read or refused, and what is read is what was meant."""
    choices, messages, malformed = Choices(data), 0, 0
    fields = Fields(choices)
    while choices.left and messages < _MOST_MESSAGES:
        messages += 1
        kind = choices.pick((*REQUESTS, *_REPLIES))
        message = fields.message(kind)
        body = spoiled(choices, message) if choices.byte() % 2 else pack(message)
        frames = seal(Header(choices.below(1 << 64), messages), body, [])
        if choices.byte() >= 192:
            frames = damaged(choices, frames)
        malformed += not _decode(frames)
    return Ran(messages, malformed)


def _decode(frames: list[bytes]) -> bool:
    """Whatever it is: a message that says the same when it is sent again, or one of our own errors. False if neither
    server nor client could read it: then it is malformed, unless it is of another version."""
    try:
        header = decode_header(frames)
    except ProtocolError:
        return False
    is_read = header.version != m.PROTOCOL_VERSION
    for read in (lambda given: decode_request(header, given, FRAME_BYTES), lambda given: decode_reply(header, given)):
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
