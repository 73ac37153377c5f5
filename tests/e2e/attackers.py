"""What attackers have: raw connections, a relay that records, any certificate. And a server to
attack."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import clients
from engines import eventually

import kvkeep
from kvkeep.cli.certificates import Issued
from kvkeep.cli.keygen import make
from kvkeep.cli.remote import ask
from kvkeep.testing.process import ServerProcess, wait_for
from kvkeep.wire.stream import Stream
from kvkeep.wire.tls import TlsFiles, client_context
from kvkeep_lab.simulation.peer import Peer

_PATIENCE_S = 10.0  # ends a test that has failed
# An address of this host at which the server has no Unix socket.
HOST = "127.0.0.2"

# The first 64 bytes of a ZMTP 3.1 connection: signature, version, mechanism, as-server, filler.
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


def greeting(mechanism: bytes) -> bytes:
    return SIGNATURE + b"\x03\x01" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


@dataclass
class Fortress:
    """A server with certificates and a token, and the files of its operator."""

    server: ServerProcess
    keys: Path
    token_file: Path

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = ask(self.server.http, "/v1/status", token_file=self.token_file)
        return answer

    def failures(self) -> dict[str, int]:
        counted: dict[str, int] = self.status()["auth_failures"]
        return counted

    def turned_away(self) -> int:
        return sum(self.failures().values())

    def add_client(self, name: str, tenants: str = "") -> None:
        """Authorizes one more client, and waits until the server knows."""
        make(self.keys, [name], tenants)
        count = len(list((self.keys / "authorized").glob("*.client")))
        assert eventually(lambda: f"{count} names" in self.server.log())

    def authority(self) -> Issued:
        """The operator's own CA."""
        return Issued((self.keys / "ca.pem").read_text(), (self.keys / "ca.key").read_text())

    def files(self, name: str = "engine") -> TlsFiles:
        return TlsFiles(self.keys / f"{name}.pem", self.keys / f"{name}.key", self.keys / "ca.pem")

    def tls(self, name: str = "engine") -> dict[str, str]:
        """The options of a client of that name."""
        files = self.files(name)
        return {"tls_cert": str(files.cert), "tls_key": str(files.key), "tls_ca": str(files.ca)}

    def cache(self, name: str = "engine", **more: Any) -> kvkeep.Cache:
        address = more.pop("address", None) or self.address
        return clients.connect(address, **self.tls(name), **more)

    def knock(self, name: str = "engine") -> Knock:
        """A connection with the certificate of that client."""
        return Knock(self.host_and_port, client_context(self.files(name)))

    @property
    def address(self) -> str:
        """Where engines of other hosts connect."""
        return f"tcp://{HOST}:{self.host_and_port[1]}"

    @property
    def host_and_port(self) -> tuple[str, int]:
        return HOST, int(self.server.address.rpartition(":")[2])


@contextlib.contextmanager
def fortress(directory: Path, *flags: str) -> Iterator[Fortress]:
    made = make(directory, ["engine"], "", True, (HOST,))
    own = ("--session-check-interval", "50ms", "--address", "tcp://0.0.0.0:0")
    with ServerProcess("--pool-size", "16MiB", *own, *flags_of(made["server"]), *flags) as server:
        yield Fortress(server, directory, Path(made["server"]["admin_token"]))


def flags_of(settings: dict[str, str]) -> list[str]:
    """Settings as flags of `kvkeep serve`."""
    named = {"--" + name.replace("_", "-"): value for name, value in settings.items()}
    return [word for pair in named.items() for word in pair]


def resident_kib(server: ServerProcess) -> int:
    """The server's own memory, without the pool."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Knock:
    """A connection that speaks our protocol and reads only when it is told to: over TLS with the
    certificate of the context, or in the clear. SSLError if the context refuses the server."""

    def __init__(self, target: tuple[str, int], context: ssl.SSLContext | None = None) -> None:
        connected = socket.create_connection(target, timeout=_PATIENCE_S)
        if context is not None:
            connected = context.wrap_socket(connected, server_hostname=target[0])
        self.stream = Stream(connected, 1 << 30)

    def say(self, frames: list[bytes]) -> None:
        """Sends a message, as far as the other side takes it."""
        self.stream.send(frames)
        until_s = time.monotonic() + _PATIENCE_S
        while self.stream.unsent_bytes and not self.stream.is_over and time.monotonic() < until_s:
            wait_for(self.stream, 100, readable=False, writable=True)
            self.stream.flush()

    def hear(self, patience_s: float = _PATIENCE_S) -> list[bytes] | None:
        """The next message; None if the connection ends first, or none comes in time."""
        until_s = time.monotonic() + patience_s
        while time.monotonic() < until_s:
            self.stream.read()
            if (frames := self.stream.next()) is not None:
                return frames
            if self.stream.is_over:
                return None
            wait_for(self.stream, 10)
        return None

    def peer(self) -> Peer:
        """Says what it is told over this connection."""

        def exchange(frames: list[bytes]) -> list[bytes] | None:
            self.say(frames)
            return self.hear()

        return Peer(exchange)

    def close(self) -> None:
        self.stream.close()

    def __enter__(self) -> Knock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass
class Relay:
    """Passes one connection on to a server and keeps what went each way, piece by piece."""

    target: tuple[str, int]
    sent: list[bytes] = field(default_factory=list)
    answered: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            with client, socket.create_connection(self.target) as server:
                back = threading.Thread(target=self._pass_on, args=(server, client, self.answered))
                back.start()
                self._pass_on(client, server, self.sent)
                back.join()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket, kept: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                kept.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """After the client is gone."""
        self._thread.join()
        self._listener.close()


def say_raw(target: tuple[str, int], *pieces: bytes, patience_s: float = 10.0) -> bytes:
    """Sends bytes, each piece after the answer to the one before it, and returns all that came
    until the end."""
    heard = b""
    with (
        socket.create_connection(target, timeout=patience_s) as connection,
        contextlib.suppress(OSError),
    ):
        for piece in pieces:
            connection.sendall(piece)
            connection.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                heard += connection.recv(65536)
        connection.settimeout(patience_s)
        while data := connection.recv(65536):
            heard += data
    return heard
