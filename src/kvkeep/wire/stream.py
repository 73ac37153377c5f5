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

SOCKET_FILE: Final = "direct.sock"
_LENGTH = struct.Struct("<I")
_HEAD_BYTES = _LENGTH.size + HEADER_BYTES
_BYTES_AT_A_TIME = 16 << 10  # of small messages: a few hundred at most


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
        self._socket = connected
        self._most_body_bytes = most_body_bytes
        self._read = bytearray()
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
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.is_over = True

    def read(self) -> None:
        """What has come: no more than belongs to one message, or a few small ones."""
        try:
            while not self.is_over and (missing := self._missing_bytes()):
                data = self._socket.recv(max(missing, _BYTES_AT_A_TIME))
                self._read += data
                self.is_over = not data
        except BlockingIOError:
            pass
        except OSError:
            self.is_over = True

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
        self.is_over = True
        self._read.clear()
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
