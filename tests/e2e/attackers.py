"""What attackers have: raw connections, a relay that listens in, any certificate. And a server to
attack."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvkeep.cli.certificates import Issued
from kvkeep.cli.keygen import make
from kvkeep.cli.remote import ask
from kvkeep.client.options import ClientOptions
from kvkeep.testing.process import ServerProcess, wait_for
from kvkeep.wire.stream import Stream
from kvkeep.wire.tls import TlsFiles, client_context
from kvkeep_lab.simulation.peer import Peer

_PATIENCE_S = 10.0  # ends a test that has failed
# of this host, and without the Unix socket by which its engines reach the server otherwise
HOST = "127.0.0.2"

# The first 64 bytes of a ZMTP 3.1 connection: signature, version, mechanism, as-server, filler.
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


def greeting(mechanism: bytes) -> bytes:
    return SIGNATURE + b"\x03\x01" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


@dataclass
class Fortress:
    """A server with certificates and a token, and all that its operator has."""

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
        make(self.keys, [name], tenants)

    def authority(self) -> Issued:
        """The operator's own CA."""
        return Issued((self.keys / "ca.pem").read_text(), (self.keys / "ca.key").read_text())

    def files(self, name: str = "engine") -> TlsFiles:
        return TlsFiles(self.keys / f"{name}.pem", self.keys / f"{name}.key", self.keys / "ca.pem")

    def options(self, name: str = "engine", **more: Any) -> ClientOptions:
        """What a client of that name is told."""
        files = self.files(name)
        tls = {"tls_cert": str(files.cert), "tls_key": str(files.key), "tls_ca": str(files.ca)}
        return ClientOptions(address=more.pop("address", None) or self.address, **tls, **more)

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
    secure = [
        word
        for name, value in made["server"].items()
        for word in ("--" + name.replace("_", "-"), value)
    ]
    own = (
        "--pool-size",
        "16MiB",
        "--session-check-interval",
        "50ms",
        "--address",
        "tcp://0.0.0.0:0",
    )
    with ServerProcess(*own, *secure, *flags) as server:
        yield Fortress(server, directory, Path(made["server"]["admin_token"]))


class Knock:
    """A connection of our protocol: over TLS with whatever certificate is in the context, or in the
    clear. An SSLError if the server's certificate is not to the context's taste."""

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


OTHER_USER = 65534


def as_another_user(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as a user who is neither root nor the server's."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root, with setpriv, can act as a second user")
    become = [
        "setpriv",
        f"--reuid={OTHER_USER}",
        f"--regid={OTHER_USER}",
        "--clear-groups",
        "--inh-caps=-all",
    ]
    if subprocess.run([*become, command[0], "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"a second user cannot run {command[0]}")
    return subprocess.run(
        [*become, *command], capture_output=True, text=True, timeout=120, check=False
    )


def keep_tenants(server: ServerProcess, count: int) -> None:
    """Gives a server that has not started yet so many tenants, for long answers."""
    assert server.state_dir is not None
    directory = server.state_dir / server.name
    directory.mkdir(mode=0o700)
    kept = {"version": 1, "tenants": {f"t-{number:032x}": 1 for number in range(count)}}
    (directory / "quotas.json").write_text(json.dumps(kept))


def ask_and_never_read(target: tuple[str, int], path: str) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(target)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return connection
