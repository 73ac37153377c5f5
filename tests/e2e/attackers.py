"""What attackers have: raw connections, a relay that listens in, sockets with any keys. And a server to attack."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvkeep.cli.keygen import make
from kvkeep.cli.remote import ask
from kvkeep.client.options import ClientOptions
from kvkeep.testing.peer import Peer
from kvkeep.testing.process import ServerProcess
from kvkeep.wire.auth import new_pair, read_pair

_PATIENCE_MS = 10_000  # ends a test that has failed

# The first 64 bytes of a ZMTP 3.1 connection: signature, version, mechanism, as-server, filler.
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


def greeting(mechanism: bytes) -> bytes:
    return SIGNATURE + b"\x03\x01" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


@dataclass
class Fortress:
    """A server with keys and a token, and all that its operator has."""

    server: ServerProcess
    keys: Path
    public_key: str
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
        make(self.keys, [name], tenants, False)

    def options(self, name: str = "engine", **more: Any) -> ClientOptions:
        """What a client of that name is told."""
        key_file = str(self.keys / f"{name}.key")
        return ClientOptions(address=self.server.address, curve_key=key_file, server_key=self.public_key, **more)

    def pair(self, name: str = "engine") -> tuple[str, str]:
        return read_pair(self.keys / f"{name}.key")

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.server.address.removeprefix("tcp://").rpartition(":")
        return host, int(port)


@contextlib.contextmanager
def fortress(directory: Path, *flags: str) -> Iterator[Fortress]:
    made = make(directory, ["engine"], "", True)
    secure = [word for name, value in made["server"].items() for word in ("--" + name.replace("_", "-"), value)]
    with ServerProcess("--pool-size", "16MiB", "--session-check-interval", "50ms", *secure, *flags) as server:
        yield Fortress(server, directory, made["clients"][0]["server_key"], Path(made["server"]["admin_token"]))


class Knock:
    """A DEALER socket with whatever security it is given."""

    def __init__(self, address: str, **security: Any) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for name, value in security.items():
            setattr(self.socket, name, value)
        self.socket.connect(address)

    @classmethod
    def curve(cls, address: str, server_key: str, pair: tuple[str, str] | None = None) -> Knock:
        public, secret = pair or new_pair()
        return cls(
            address,
            curve_serverkey=server_key.encode(),
            curve_publickey=public.encode(),
            curve_secretkey=secret.encode(),
        )

    def peer(self, patience_ms: int = _PATIENCE_MS) -> Peer:
        """Says what it is told over this socket. No reply within so long is none."""

        def exchange(frames: list[bytes]) -> list[bytes] | None:
            self.socket.send_multipart(frames)
            return self.socket.recv_multipart() if self.socket.poll(patience_ms) else None

        return Peer(exchange)

    def close(self) -> None:
        self._context.destroy(linger=0)

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
    """Sends bytes, each piece after the answer to the one before it, and returns all that came until the end."""
    heard = b""
    with socket.create_connection(target, timeout=patience_s) as connection, contextlib.suppress(OSError):
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
    become = ["setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups", "--inh-caps=-all"]
    if subprocess.run([*become, command[0], "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"a second user cannot run {command[0]}")
    return subprocess.run([*become, *command], capture_output=True, text=True, timeout=120, check=False)


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
