"""A message as frames and back. The only place that reads bytes a peer sent.

    frame 0   header, 40 bytes, little-endian:
              magic "KVKP" | version u16 | 0 u16 | session u64 | number u64
              | bytes of frame 1 u32 | payload frames u32 | bytes of each u32 | crc u32
    frame 1   the message, MessagePack
    frame 2…  payload, on the network plane only: blocks of one size, each covered by its own checksum

On a connection the frames follow each other without gaps (stream.py): the header comes first and
tells the size of the rest, so a receiver knows how much memory a message takes before any of it is
taken.

The CRC is CRC-32 of the header before it and of frame 1. A flipped bit in a list of slots would put
a block's bytes under another block's key, and TCP's own 16-bit sum is too weak to rule that out.

The header keeps its shape from version 3 on, so that peers of different versions can tell each
other so."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import msgspec

from kvkeep.errors import ProtocolError, RequestError
from kvkeep.wire.messages import MAX_LIST_ITEMS, PROTOCOL_VERSION, Message, Reply, Request

MAGIC = b"KVKP"
_HEADER = struct.Struct("<4sHHQQIII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size

# Where msgspec names a field: "Expected `int`, got `str` - at `$.layout`", "Object missing required
# field `pid`".
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_NAME = re.compile(r" field `([^`]*)`")
_QUOTED_CHARS = 200  # at most, of what a peer sent

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


@dataclass(frozen=True, slots=True)
class Header:
    """Which session and which of its requests a message belongs to."""

    session: int
    number: int
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Sizes:
    """What follows a header."""

    body_bytes: int
    payload_frames: int
    payload_frame_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.body_bytes + self.payload_frames * self.payload_frame_bytes


def encode(header: Header, message: Message, payload: Sequence[Any] = ()) -> list[Any]:
    """The frames of a message. Payload frames have a buffer each, all of one size, and are not
    copied here."""
    return seal(header, _encoder.encode(message), payload)


def seal(header: Header, body: bytes, payload: Sequence[Any] = ()) -> list[Any]:
    """The frames of a message whose body is encoded already."""
    sizes = (len(body), len(payload), len(payload[0]) if payload else 0)
    head = _HEADER.pack(MAGIC, header.version, 0, header.session, header.number, *sizes)
    return [head + _CRC.pack(crc32(body, crc32(head))), body, *payload]


def decode_sizes(head: bytes | bytearray) -> Sizes | None:
    """The sizes of what follows this header, before its CRC can be checked. None if this is not a
    header of ours."""
    magic, *_, body_bytes, payload_frames, payload_frame_bytes = _HEADER.unpack_from(head)
    if magic != MAGIC or not body_bytes or payload_frames > MAX_LIST_ITEMS:
        return None
    if bool(payload_frames) != bool(payload_frame_bytes):
        return None
    return Sizes(body_bytes, payload_frames, payload_frame_bytes)


def decode_header(frames: Sequence[bytes]) -> Header:
    """Reads frame 0 and checks the CRC. Raises ProtocolError if this is not a message of ours: there
    is no request to answer."""
    if not frames or len(frames[0]) != HEADER_BYTES or frames[0][: len(MAGIC)] != MAGIC:
        raise ProtocolError(
            "a message without a kvkeep header", "does other software use this port?"
        )
    head = frames[0][: _HEADER.size]
    _, version, _, session, number, *_ = _HEADER.unpack(head)
    (crc,) = _CRC.unpack(frames[0][_HEADER.size :])
    if crc32(frames[1] if len(frames) > 1 else b"", crc32(head)) != crc:
        raise ProtocolError("a message was damaged in transit")
    return Header(session, number, version)


def session_of(head: bytes) -> int:
    """The session that a message names in its frame 0, unchecked."""
    session: int = _HEADER.unpack_from(head)[3]
    return session


def decode_request(header: Header, frames: Sequence[bytes], frame_bytes: int) -> Request:
    """Reads frame 1 of a request. Raises RequestError, naming the field, if it is invalid."""
    if header.version != PROTOCOL_VERSION:
        raise RequestError(
            "protocol_version",
            f"this server speaks protocol version {PROTOCOL_VERSION}, not {header.version}",
            hint="install the same kvkeep release on both sides",
        )
    if len(frames) < 2:
        raise RequestError("bad_frame", "the message frame is missing")
    for frame in frames:
        if len(frame) > frame_bytes:
            raise RequestError(
                "frame_too_large",
                f"a frame of {len(frame)} bytes; {frame_bytes} are allowed",
                hint="send fewer blocks at a time, or raise --max-frame-size",
            )
    try:
        return _requests.decode(frames[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"the message cannot be read: {str(error)[:_QUOTED_CHARS]}"
        raise RequestError("bad_message", text, field=_field(error)) from None


def decode_reply(header: Header, frames: Sequence[bytes]) -> Reply:
    """Reads frame 1 of a reply. Raises ProtocolError if it is invalid."""
    if header.version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the server speaks protocol version {header.version}, this client {PROTOCOL_VERSION}",
            "install the same kvkeep release on both sides",
        )
    if len(frames) < 2:
        raise ProtocolError("the reply's message frame is missing")
    try:
        return _replies.decode(frames[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"the server's reply cannot be read: {str(error)[:_QUOTED_CHARS]}"
        ) from None


def _field(error: Exception) -> str:
    """The field that msgspec names, with the path to it; empty where the bytes are no message."""
    found = [pattern.search(str(error)) for pattern in (_PATH, _NAME)]
    return ".".join(match[1] for match in found if match and match[1])[:_QUOTED_CHARS]
