"""What a peer seems to be that does not speak our protocol, by the first that it sent. Pure functions of bytes.

    recognise          the first bytes of a connection
    recognise_frames   a ZMQ message; ZMQ itself cuts some of what is no ZMQ into such messages

None means that it is one of ours, of our own protocol version. What a peer sent is never quoted.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvkeep.wire.frames import MAGIC
from kvkeep.wire.messages import PROTOCOL_VERSION

LOOKED_AT_BYTES: Final = 256
_VERSION = struct.Struct("<H")
_INTEGER_BYTES = 9  # at most, of one in MessagePack
_SERVER = "this is a kvkeep server"


@dataclass(frozen=True)
class Stranger:
    """`kind` says what it seems to be, `hint` what to do about it."""

    kind: str
    hint: str


HTTP = Stranger("an HTTP client", "the HTTP API is at http_address, 127.0.0.1:5556 unless set otherwise")
TLS = Stranger("a TLS client", f"{_SERVER}, and its engines authenticate with CURVE keys instead")
REDIS = Stranger("a Redis client", f"{_SERVER}: see which address that client was given")
SSH = Stranger("an SSH client", f"{_SERVER}: see which address that client was given")
LMCACHE = Stranger(
    "an LMCache client",
    "give LMCache's server another port, or set KVKEEP_AS_LMCACHE=1 where that engine runs to have it use kvkeep",
)
ZMQ = Stranger("a ZMQ client of other software", f"{_SERVER}: see which address that client was given")
ZMQ_ELSEWHERE = Stranger("a ZMQ client", "engines connect to the server's address, tcp://localhost:5555 by default")
UNKNOWN = Stranger("something unknown", f"{_SERVER}: see which address that peer was given")

_BEGINNINGS: Final = [
    (re.compile(rb"(?:[A-Z]{3,7} [^\r\n]* HTTP/\d|[A-Z]{3,7} /|PRI \* HTTP/2)"), HTTP),
    (re.compile(rb"\x16\x03[\x00-\x04]"), TLS),
    (re.compile(rb"\*\d+\r\n\$\d+\r\n|(?:PING|HELLO|AUTH|INFO|COMMAND)\b[^\r\n]*\r\n", re.IGNORECASE), REDIS),
    (re.compile(rb"SSH-"), SSH),
    (re.compile(rb"\xff.{8}[\x7f\x01]", re.DOTALL), ZMQ_ELSEWHERE),
]
# Of what is no ZMQ, ZMQ takes the first byte for a length: the beginning is missing, and more bytes here and there.
_ANYWHERE: Final = [(re.compile(rb" HTTP/\d"), HTTP), (re.compile(rb"\r\n\$\d+\r\n"), REDIS)]


def recognise(first: bytes) -> Stranger | None:
    """By the first bytes of a connection, as many as came. A stream of ours has a length before the header."""
    first = first[:LOOKED_AT_BYTES]
    for at in (0, 4):
        if first[at : at + len(MAGIC)] == MAGIC:
            return _by_version(first[at:])
    return next((stranger for pattern, stranger in _BEGINNINGS if pattern.match(first)), UNKNOWN)


def recognise_frames(frames: Sequence[bytes], peer: bytes = b"") -> Stranger | None:
    """By a ZMQ message; `peer` is ZMQ's name of the connection, which other software can choose."""
    if frames and frames[0][: len(MAGIC)] == MAGIC:
        return _by_version(frames[0])
    if len(frames) >= 2 and _is_integer(frames[0]) and _is_integer(frames[1]):
        return LMCACHE  # the number of a request, and of its kind
    text = b"".join(each[:LOOKED_AT_BYTES] for each in (peer, *frames[:4]))
    return next((stranger for pattern, stranger in _ANYWHERE if pattern.search(text)), ZMQ)


def _by_version(header: bytes) -> Stranger | None:
    if len(header) < len(MAGIC) + _VERSION.size:
        return None
    [version] = _VERSION.unpack_from(header, len(MAGIC))
    if version == PROTOCOL_VERSION:
        return None
    hint = f"this server speaks version {PROTOCOL_VERSION}: install the same kvkeep release on both sides"
    return Stranger(f"a kvkeep of protocol version {version}", hint)


def _is_integer(frame: bytes) -> bool:
    if not 0 < len(frame) <= _INTEGER_BYTES:
        return False
    try:
        return type(msgspec.msgpack.decode(frame)) is int
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
