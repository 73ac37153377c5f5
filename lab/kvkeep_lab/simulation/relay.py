"""The wire between clients and a server, for tests that read it, slow it down or hold it up."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

_PIECE_BYTES = 1 << 16
_BLOCKS = 4096  # bytes: what arrives from a server in pieces larger than this are blocks


class Relay:
    """Clients connect to `address`, and all is passed on to the server; `sent` is what they said to
    it. With `bytes_a_second`, each direction of each connection is that slow."""

    def __init__(self, server: str, bytes_a_second: int | None = None) -> None:
        host, _, port = server.removeprefix("tcp://").rpartition(":")
        self._pace_s = 1 / bytes_a_second if bytes_a_second else 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = bytearray()
        self.held_up = 0  # connections on which blocks do not go on
        self._free = threading.Event()
        self._free.set()
        self._ends: list[socket.socket] = [self._listener]
        self._accept(self._listener, lambda: socket.create_connection((host, int(port))))

    def hold_blocks(self) -> None:
        """From now on a connection on which blocks come from the server is stuck; the others are
        not."""
        self._free.clear()

    def let_go(self) -> None:
        self._free.set()

    def close(self) -> None:
        self.let_go()
        for end in self._ends:
            # or who waits in one of our threads would keep the connection
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    far = connect()
                    self._ends += [near, far]
                    for args in ((near, far, self._note), (far, near, self._hold_up)):
                        threading.Thread(target=self._pass, args=args, daemon=True).start()

        threading.Thread(target=run, daemon=True).start()

    def _pass(
        self, source: socket.socket, to: socket.socket, look: Callable[[bytes], None]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                look(data)
                time.sleep(len(data) * self._pace_s)
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def _note(self, data: bytes) -> None:
        self.sent += data

    def _hold_up(self, data: bytes) -> None:
        if len(data) > _BLOCKS and not self._free.is_set():
            self.held_up += 1
            self._free.wait()
