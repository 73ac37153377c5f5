"""What a peer seems to be that does not speak our protocol, by the first bytes that it sent. Pure
functions of bytes.

    recognise          a client, by a server of ours
    recognise_server   a server, by a client of ours

What a peer sent is never quoted.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Final

from kvkeep.wire.frames import MAGIC
from kvkeep.wire.messages import PROTOCOL_VERSION

_VERSION = struct.Struct("<H")
_SERVER = "this is a kvkeep server"


@dataclass(frozen=True)
class Stranger:
    """`kind` says what it seems to be, `hint` what to do about it."""

    kind: str
    hint: str


HTTP = Stranger(
    "an HTTP client", "the HTTP API is at http_address, 127.0.0.1:5556 unless set otherwise"
)
TLS = Stranger("a TLS client", f"{_SERVER} without TLS: set tls_cert, tls_key and tls_ca on it")
REDIS = Stranger("a Redis client", f"{_SERVER}: see which address that client was given")
SSH = Stranger("an SSH client", f"{_SERVER}: see which address that client was given")
ZMQ = Stranger(
    "a ZMQ client: LMCache, or a kvkeep of an earlier release",
    "install the same kvkeep release on both sides; "
    "set KVKEEP_AS_LMCACHE=1 where an engine that is set up for LMCache is to use kvkeep",
)
UNKNOWN = Stranger("something unknown", f"{_SERVER}: see which address that peer was given")

_BEGINNINGS: Final = [
    (re.compile(rb"(?:[A-Z]{3,7} [^\r\n]* HTTP/\d|[A-Z]{3,7} /|PRI \* HTTP/2)"), HTTP),
    (re.compile(rb"\x16\x03[\x00-\x04]"), TLS),
    (
        re.compile(
            rb"\*\d+\r\n\$\d+\r\n|(?:PING|HELLO|AUTH|INFO|COMMAND)\b[^\r\n]*\r\n", re.IGNORECASE
        ),
        REDIS,
    ),
    (re.compile(rb"SSH-"), SSH),
    (re.compile(rb"\xff.{8}[\x7f\x01]", re.DOTALL), ZMQ),
]


def recognise(first: bytes) -> Stranger | None:
    """By the first bytes of a connection, as many as came. None for a client of ours and of our
    protocol version."""
    if first.startswith(MAGIC):
        return _by_version(first)
    return next((stranger for pattern, stranger in _BEGINNINGS if pattern.match(first)), UNKNOWN)


def recognise_server(first: bytes) -> str:
    """What a server is that answered with these bytes; "" if that does not show."""
    if recognise(first) is ZMQ:
        return "it is a kvkeep of an earlier release, or other software that speaks ZMQ (install the same release)"
    if not first or first.startswith(MAGIC):
        return ""
    return "it is something other than a kvkeep server (see which address this engine was given)"


def _by_version(header: bytes) -> Stranger | None:
    if len(header) < len(MAGIC) + _VERSION.size:
        return None
    [version] = _VERSION.unpack_from(header, len(MAGIC))
    if version == PROTOCOL_VERSION:
        return None
    hint = f"this server speaks version {PROTOCOL_VERSION}: install the same kvkeep release on both sides"
    return Stranger(f"a kvkeep of protocol version {version}", hint)
