"""The wire between an engine and a server, for tests that read it or hold it up."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from kvkeep.testing.process import ServerProcess

_BLOCKS = 4096  # bytes: what arrives from a server in pieces larger than this are blocks


class Wire:
    """Engines connect to `address`, and all is passed on to the server; `sent` is what they said to it."""

    def __init__(self, server: ServerProcess) -> None:
        host, _, port = server.address.removeprefix("tcp://").rpartition(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = bytearray()
        self.held_up = 0  # connections on which blocks do not go on
        self._free = threading.Event()
        self._free.set()
        self._ends: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def hold_blocks(self) -> None:
        """From now on a connection on which blocks come from the server is stuck; the others are not."""
        self._free.clear()

    def let_go(self) -> None:
        self._free.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                self._ends += [near, far]
                threading.Thread(target=self._pass_on, args=(near, far), daemon=True).start()
                threading.Thread(target=self._pass_back, args=(far, near), daemon=True).start()

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 16):
                self.sent += data
                far.sendall(data)
            far.shutdown(socket.SHUT_WR)

    def _pass_back(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                if len(data) > _BLOCKS and not self._free.is_set():
                    self.held_up += 1
                    self._free.wait()
                near.sendall(data)
            near.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.let_go()
        for end in self._ends:
            end.close()


@contextlib.contextmanager
def wire_to(server: ServerProcess) -> Iterator[Wire]:
    wire = Wire(server)
    try:
        yield wire
    finally:
        wire.close()
