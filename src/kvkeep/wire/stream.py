"""Messages over a connected socket: a Unix socket, TCP, or TLS over TCP. Frames follow each other
without gaps.

    header (frames.py) │ body │ payload, payload, …        one message

The header tells the size of the rest. Bytes that are not a header of ours, and a message larger
than the receiver allows, end the connection before memory is taken for them."""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from kvkeep.wire.frames import HEADER_BYTES, MAGIC, Sizes, decode_sizes

FIRST_BYTES_KEPT: Final = 256  # of a connection, to recognise strangers
# A few hundred small messages; also the largest TLS record, so that OpenSSL keeps no part of one.
_READ_BYTES = 16 << 10
_MOST_READ_BYTES = 1 << 20
# A message is kept in pieces until it is whole: one buffer that grows is moved again and again, and
# leaves gaps. Only what is shorter than this is put together, so that pieces take what they hold.
_PIECE_BYTES = 64 << 10
_READS_A_CALL, _TLS_READS_A_CALL = 8, 64  # OpenSSL gives one record at a time
_BUFFER_BYTES = 4 << 20  # asked of the kernel: a message that fits is sent with one call
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Stream:
    """One end of a connection. No method blocks. Not safe for several threads."""

    def __init__(self, connected: socket.socket, most_message_bytes: int) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.first = b""  # the first bytes that came
        self.error: OSError | None = None  # why the connection ended, if the socket said why
        self.is_over = False  # the peer closed the connection, or sent what is not a message
        self.is_ready = not isinstance(connected, ssl.SSLSocket)  # TLS: when the handshake is done
        self._most_message_bytes = most_message_bytes
        self._pieces: deque[bytearray] = deque()  # that were read and not taken
        self._read_bytes = 0  # in all of them
        self._sizes: Sizes | None = None  # of the message being read, once its header is there
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._reads = _READS_A_CALL if self.is_ready else _TLS_READS_A_CALL
        # The process of an engine may not ignore SIGPIPE as Python does. (OpenSSL takes no flags.)
        self._send_flags = socket.MSG_NOSIGNAL if self.is_ready else 0

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def unsent_bytes(self) -> int:
        return self._unsent_bytes

    @property
    def held_bytes(self) -> int:
        """Memory that this connection takes: replies not sent, messages incomplete or not taken."""
        return self._unsent_bytes + self._read_bytes

    @property
    def is_half(self) -> bool:
        """Whether part of a message has been sent or received, and the rest has not."""
        return bool(self._unsent) or (bool(self._read_bytes) and not self.has_next)

    def shake_hands(self) -> bool:
        """Continues the TLS handshake, if there is one. Returns whether it is done."""
        if not self.is_ready and not self.is_over:
            assert isinstance(self.socket, ssl.SSLSocket)
            try:
                self.socket.do_handshake()
                self.is_ready = True
            except _NOT_NOW:
                pass
            except (OSError, ValueError) as error:
                self._lose(error)
        return self.is_ready and not self.is_over

    def send(self, frames: Sequence[Any]) -> None:
        """Sends what the socket accepts now; `flush` sends the rest. The caller may reuse payload
        buffers afterwards."""
        if self.is_over:
            return
        head, body, *payload = frames
        self._unsent.append(memoryview(b"".join((head, body))))
        self._unsent.extend(memoryview(frame).cast("B") for frame in payload)
        self._unsent_bytes += len(head) + len(body) + sum(map(len, payload))
        self.flush()
        if payload and self._unsent:
            self._unsent = deque(memoryview(bytes(view)) for view in self._unsent)

    def flush(self) -> None:
        if not self.is_ready and not self.shake_hands():
            return
        try:
            while self._unsent and not self.is_over:
                view = self._unsent[0]
                sent = self.socket.send(view, self._send_flags)
                self._unsent_bytes -= sent
                if sent < len(view):
                    self._unsent[0] = view[sent:]
                    return
                self._unsent.popleft()
        except _NOT_NOW:
            pass
        except OSError as error:
            self._lose(error)

    def read(self) -> None:
        """Reads what has arrived, up to one message or a few small ones, and a few MiB of a large
        one, so that a fast sender does not keep the caller busy."""
        if not self.is_ready and not self.shake_hands():
            return
        try:
            for _ in range(self._reads):
                missing = self._missing_bytes()
                if self.is_over or not missing:
                    return
                data = self.socket.recv(min(max(missing, _READ_BYTES), _MOST_READ_BYTES))
                if not data:
                    self._lose()
                    return
                self._keep(data)
                if len(self.first) < FIRST_BYTES_KEPT:
                    self.first += data[: FIRST_BYTES_KEPT - len(self.first)]
        except _NOT_NOW:
            pass
        except OSError as error:
            self._lose(error)

    @property
    def has_next(self) -> bool:
        """Whether a whole message has arrived."""
        return self._read_bytes > 0 and not self._missing_bytes()

    def next(self) -> list[bytes] | None:
        """The next whole message, if there is one: its header, its body and each frame of its
        payload."""
        if self._missing_bytes() or (sizes := self._sizes) is None:
            return None
        self._sizes = None
        if len(self._pieces) == 1 and self._read_bytes == HEADER_BYTES + sizes.body_bytes:
            whole = bytes(self._pieces.popleft())  # most messages come alone
            self._read_bytes = 0
            return [whole[:HEADER_BYTES], whole[HEADER_BYTES:]]
        payload = [sizes.payload_frame_bytes] * sizes.payload_frames
        return [self._take(length) for length in (HEADER_BYTES, sizes.body_bytes, *payload)]

    def end(self) -> None:
        """Stops reading and sending, and drops messages that were read and not taken."""
        self._lose()
        self._pieces.clear()
        self._read_bytes = 0
        self._sizes = None

    def close(self) -> None:
        self.end()
        self.socket.close()

    def _lose(self, error: OSError | ValueError | None = None) -> None:
        """Nothing more can be sent. Whole messages that arrived before can still be taken."""
        self.is_over = True
        self.error = self.error or (error if isinstance(error, OSError) else None)
        self._unsent.clear()
        self._unsent_bytes = 0

    def _keep(self, data: bytes) -> None:
        self._read_bytes += len(data)
        if self._pieces and len(self._pieces[-1]) + len(data) <= _PIECE_BYTES:
            self._pieces[-1] += data
        else:
            self._pieces.append(bytearray(data))

    def _take(self, nbytes: int) -> bytes:
        """The next bytes of those that were read; they are not kept here any longer."""
        self._read_bytes -= nbytes
        taken: list[bytes] = []
        while nbytes >= len(piece := self._pieces[0]):
            taken.append(bytes(piece))
            nbytes -= len(piece)
            del self._pieces[0]
            if not nbytes:
                return taken[0] if len(taken) == 1 else b"".join(taken)
        with memoryview(piece) as view:
            taken.append(bytes(view[:nbytes]))
        del piece[:nbytes]
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def _missing_bytes(self) -> int:
        """The least number of bytes missing until a message is whole; 0 if one is."""
        if self._sizes is None:
            if self._read_bytes and not MAGIC.startswith(self._pieces[0][: len(MAGIC)]):
                self.end()
            if self._read_bytes < HEADER_BYTES:
                return HEADER_BYTES - self._read_bytes
            # All of it is in one piece: before a header is whole, too little is read for two.
            self._sizes = decode_sizes(self._pieces[0])
            if self._sizes is None or self._sizes.total_bytes > self._most_message_bytes:
                self.end()
                return HEADER_BYTES
        return max(0, HEADER_BYTES + self._sizes.total_bytes - self._read_bytes)
