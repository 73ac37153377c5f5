"""A flood of malformed frames over raw sockets, against a real server process: beside it a good
client is served.

    flood = ServerFlood(server.address, server.pid, seed=1)
    flood.run(seconds=10)
    flood.frames, flood.connections, flood.grown_kib

A connection brings frames under right headers whose CRC or body is wrong, and in the end bytes that
are no header: the server must close it. Others bring half a message and stay, or go away without
reading."""

from __future__ import annotations

import contextlib
import random
import socket
import time

from kvkeep.wire import messages as m
from kvkeep.wire.address import tcp_host, unix_name
from kvkeep.wire.frames import HEADER_BYTES, MAGIC, Header, decode_sizes, seal
from kvkeep_lab.fuzz.choices import Choices, Leak, own_memory_kib
from kvkeep_lab.fuzz.wire import Fields, broken, frames_of
from kvkeep_lab.simulation.peer import Peer

MOST_GROWTH_KIB = 64 << 10
_FRAMES_A_CONNECTION = 100  # what they and their replies take fits the kernel's buffers
_STAYING = 30  # connections with half a message
_BASES = 200
_WITHIN_S = 30.0
_WARM_CONNECTIONS = 200


class ServerFlood:
    """Counts malformed frames that were sent. Raises AssertionError if the server does not do as it
    should."""

    def __init__(self, address: str, pid: int, seed: int) -> None:
        self.frames = self.connections = self.pings = 0
        self.first_kib = self.most_kib = 0  # memory that the server has, and shares with nobody
        self._random = random.Random(seed)
        self._tcp, self._unix, self._pid = tcp_host(address), unix_name(address), pid
        choices = Choices(self._random.randbytes(1 << 16))
        fields = Fields(choices)
        self._bases = [b"".join(frames_of(choices, fields, number)) for number in range(_BASES)]
        self._staying: list[socket.socket] = []
        self._good = Peer(self._exchange)
        self._good_socket = self._connect()
        self._good.attach(m.NETWORK)

    @property
    def grown_kib(self) -> int:
        return self.most_kib - self.first_kib

    def run(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        try:
            while time.monotonic() < until_s:
                self._attack()
                if self.connections % 20 == 0:
                    assert isinstance(self._good.say(m.Ping()), m.Done), (
                        "a good client is not served"
                    )
                    self.pings += 1
                    self._look_at_memory()
        finally:
            for each in (*self._staying, self._good_socket):
                each.close()

    def _attack(self) -> None:
        chance, attacker = self._random, self._connect()
        self.connections += 1
        parts = [self._malformed() for _ in range(chance.randrange(_FRAMES_A_CONNECTION))]
        kind = chance.randrange(8)
        if kind == 0:
            last = seal(Header(1, 1), b"x" * 1_000)[0]  # its body does not come
        else:
            last = broken(chance, b"GET / HTTP/1.1\r\n\r\n".ljust(HEADER_BYTES))
            last = b"\0" + last if MAGIC.startswith(last[: len(MAGIC)]) else last
        self.frames += len(parts) + 1
        # closed before all was sent
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            attacker.sendall(b"".join((*parts, last)))
            while kind > 1 and attacker.recv(1 << 16):
                pass  # until the server closes it
        self._staying.append(attacker)
        if kind or len(self._staying) > _STAYING:
            self._staying.pop(-1 if kind else 0).close()

    def _malformed(self) -> bytes:
        """One that leaves the connection open: of the right length, and wrong in its CRC or its
        body."""
        chance = self._random
        whole = bytearray(chance.choice(self._bases))
        sizes = decode_sizes(whole) if len(whole) > HEADER_BYTES else None
        if (
            sizes is None
            or len(whole) != HEADER_BYTES + sizes.total_bytes
            or chance.randrange(3) == 0
        ):
            return b"".join(
                seal(Header(chance.getrandbits(64), 1), chance.randbytes(1 + chance.randrange(60)))
            )
        whole[chance.randrange(HEADER_BYTES, HEADER_BYTES + sizes.body_bytes)] ^= (
            1 << chance.randrange(8)
        )
        return bytes(whole)

    def _connect(self) -> socket.socket:
        if self._unix is not None and self._random.randrange(2):
            connected = socket.socket(socket.AF_UNIX)
            connected.settimeout(_WITHIN_S)
            connected.connect(self._unix)
            return connected
        assert self._tcp is not None
        return socket.create_connection(self._tcp, timeout=_WITHIN_S)

    def _exchange(self, frames: list[bytes]) -> list[bytes]:
        self._good_socket.sendall(b"".join(frames))
        head = self._take(HEADER_BYTES)
        sizes = decode_sizes(head)
        assert sizes is not None and not sizes.payload_frames
        return [head, self._take(sizes.body_bytes)]

    def _take(self, nbytes: int) -> bytes:
        taken = b""
        while len(taken) < nbytes:
            more = self._good_socket.recv(nbytes - len(taken))
            assert more, "the server has closed a good client's connection"
            taken += more
        return taken

    def _look_at_memory(self) -> None:
        own_kib = own_memory_kib(self._pid)
        if self.connections <= _WARM_CONNECTIONS:
            self.first_kib = own_kib
        self.most_kib = max(self.most_kib, own_kib)
        if self.grown_kib > MOST_GROWTH_KIB:
            raise Leak(f"the server has grown by {self.grown_kib} KiB")
