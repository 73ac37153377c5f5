"""Messages over a plain Unix socket, for sessions on the server's host: nobody in between wakes threads of their own.

    length of the body u32 │ frame 0, the header │ frame 1, the body         one message; there are no payload frames

The socket lies in the pool's directory, which is the owner's alone: who can connect to it can read the pool anyway.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvkeep.wire.frames import HEADER_BYTES
from kvkeep.wire.strangers import LOOKED_AT_BYTES

SOCKET_FILE: Final = "direct.sock"
_LENGTH = struct.Struct("<I")
_HEAD_BYTES = _LENGTH.size + HEADER_BYTES
_BYTES_AT_A_TIME = 16 << 10  # of small messages: a few hundred at most
_MOST_BYTES_AT_A_TIME, _READS = 1 << 20, 8
_BUFFER_BYTES = 4 << 20  # the kernel's, as far as it lets us: a message that fits into it goes in one


@contextlib.contextmanager
def socket_path(directory: Path) -> Iterator[str]:
    """The socket's path, short enough for one whatever the directory is called. OSError if that is not there."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_FILE}"
    finally:
        os.close(descriptor)


class Stream:
    """One end of a connection. Nothing here blocks. Not safe for several threads."""

    def __init__(self, connected: socket.socket, most_body_bytes: int) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._socket = connected
        self._most_body_bytes = most_body_bytes
        self._read = bytearray()
        self.first = b""  # bytes that came, by which to tell what is no peer of ours
        self._unsent = bytearray()
        self.is_over = False  # the other side is gone, or has sent what is no message

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent)

    @property
    def read_bytes(self) -> int:
        """Of messages that are not whole, or that nobody has asked for."""
        return len(self._read)

    @property
    def is_half(self) -> bool:
        """Whether a part of a message has gone or come, and the rest has not."""
        return bool(self._unsent) or (bool(self._read) and not self.has_next)

    def send(self, frames: Sequence[Any]) -> None:
        """What does not go now goes with `flush`."""
        if self.is_over:
            return
        head, body = frames
        self._unsent += b"".join((_LENGTH.pack(len(body)), head, body))
        self.flush()

    def flush(self) -> None:
        if not self._unsent or self.is_over:
            return
        try:
            del self._unsent[: self._socket.send(self._unsent, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        except OSError:
            self._lose()

    def read(self) -> None:
        """What has come: no more than belongs to one message, or a few small ones, and of a long one no more than a few
        MiB: who sends faster than anybody reads must not keep us."""
        try:
            for _ in range(_READS):
                missing = self._missing_bytes()
                if self.is_over or not missing:
                    return
                data = self._socket.recv(min(max(missing, _BYTES_AT_A_TIME), _MOST_BYTES_AT_A_TIME))
                if not data:
                    self._lose()
                self._read += data
                if len(self.first) < LOOKED_AT_BYTES:
                    self.first += data[: LOOKED_AT_BYTES - len(self.first)]
        except BlockingIOError:
            pass
        except OSError:
            self._lose()

    @property
    def has_next(self) -> bool:
        """Whether a message is whole."""
        return not self._missing_bytes()

    def next(self) -> list[bytes] | None:
        """The next message of those that were read, if one is whole."""
        if self._missing_bytes():
            return None
        end = _HEAD_BYTES + _LENGTH.unpack_from(self._read)[0]
        message = [bytes(self._read[_LENGTH.size : _HEAD_BYTES]), bytes(self._read[_HEAD_BYTES:end])]
        del self._read[:end]
        return message

    def close(self) -> None:
        self.end()
        self._socket.close()

    def end(self) -> None:
        """Nothing more is read or sent; what was read and not asked for is forgotten."""
        self._lose()
        self._read.clear()

    def _lose(self) -> None:
        """The other side is gone: what it has said is there, and nobody takes what was to be sent."""
        self.is_over = True
        self._unsent.clear()

    def _missing_bytes(self) -> int:
        """So many at least until a message is whole; 0: one is. One that nobody would send ends all."""
        if len(self._read) < _HEAD_BYTES:
            return _HEAD_BYTES - len(self._read)
        length: int = _LENGTH.unpack_from(self._read)[0]
        if length > self._most_body_bytes:
            self.end()
            return _HEAD_BYTES
        return max(0, _HEAD_BYTES + length - len(self._read))
