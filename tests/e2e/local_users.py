"""Processes of other users of this host, and of other user namespaces, for tests that root runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.testing.process import ServerProcess
from kvkeep.wire.address import unix_name

OTHER_UID = 54321
PROGRAM = str(Path(__file__).with_name("other_user.py"))
AS_OTHER = ("setpriv", "--reuid", str(OTHER_UID), "--regid", str(OTHER_UID), "--clear-groups")
AS_ROOT_INSIDE = (
    "unshare",
    "--user",
    "--map-root-user",
)  # root of a namespace that maps no other user


def can(*command: str) -> bool:
    return (
        shutil.which(command[0]) is not None
        and not subprocess.run([*command, "true"], capture_output=True).returncode
    )


needs_two_users = pytest.mark.skipif(
    os.geteuid() != 0 or not can(*AS_OTHER, sys.executable, "-S", "-c", ""),
    reason="only root can be another user, by setpriv, where that user may run this Python",
)
needs_namespaces = pytest.mark.skipif(
    not can(*AS_ROOT_INSIDE), reason="user namespaces cannot be made here"
)


class OtherUser:
    """A process of the other user that runs until the block ends."""

    def __init__(self, *words: str) -> None:
        self._process = subprocess.Popen(
            [*AS_OTHER, sys.executable, "-S", PROGRAM, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={},
        )

    def hears(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the other user's process ended with {self._process.wait()}"
        return json.loads(line)

    def ask(self) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.hears()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def false_server(welcome: bytes, pool: Path, port: int = 0, name: str = "") -> Iterator[OtherUser]:
    """The other user, listening at that port and that Unix name, with a pool that everybody can
    write."""
    other = OtherUser("be_the_server", str(port or ""), name, str(pool), welcome.hex())
    try:
        assert other.hears() == {"ready": True}
        yield other
    finally:
        other.close()
        shutil.rmtree(pool, ignore_errors=True)


def say_as_other(where: str, data: bytes) -> dict[str, Any]:
    """What the other user hears who connects to `host:port`, `@name` or a path and says that."""
    command = [*AS_OTHER, sys.executable, "-S", PROGRAM, "say", where, data.hex()]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env={})
    heard: dict[str, Any] = json.loads(ended.stdout)
    return heard


def doors(server: ServerProcess) -> tuple[str, str]:
    """Its TCP port and its Unix socket, as `say_as_other` takes them."""
    name = unix_name(server.address)
    assert name is not None
    return server.address.removeprefix("tcp://"), f"@{name[1:]}"


class ServerInNamespace(ServerProcess):
    """A server that is root in a user namespace of its own."""

    def command(self) -> list[str]:
        return [*AS_ROOT_INSIDE, *super().command()]
