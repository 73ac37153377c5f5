"""Processes of other users of this host, and of other user namespaces, for tests that root runs."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvkeep.testing.process import JsonProcess, ServerProcess
from kvkeep.wire.address import unix_name

ATTACKER, VICTIM = 54_321, 54_322
PROGRAM = str(Path(__file__).with_name("other_user.py"))
# Root of a namespace that maps no other user.
AS_ROOT_INSIDE = ("unshare", "--user", "--map-root-user")
NO_CAPS = ("setpriv", "--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all")


@functools.cache
def can(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True).returncode == 0


def become(uid: int) -> tuple[str, ...]:
    return ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")


def rights_of(uid: int) -> tuple[str, ...]:
    """Capabilities with which that user can run kvkeep. Where other users cannot read this
    interpreter (in root's home, say), the user may read all files, but write and own none."""
    reads = (f"--{of}=-all,+dac_read_search" for of in ("inh-caps", "ambient-caps", "bounding-set"))
    for rights in (("--inh-caps=-all",), tuple(reads)):
        if can(*become(uid), *rights, sys.executable, "-c", "import kvkeep.cli.main"):
            return rights
    pytest.skip("no other user can run this interpreter")


# Runs a command as root of a user namespace with these lines as its map of users.
_IN_NAMESPACE = """
import ctypes, os, sys
users, *command = sys.argv[1:]
(ready, tell_ready), (mapped, tell_mapped) = os.pipe(), os.pipe()
child = os.fork()
if not child:
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):  # CLONE_NEWUSER
        raise OSError(ctypes.get_errno(), "unshare")
    os.write(tell_ready, b"1")
    os.read(mapped, 1)
    os.execvp(command[0], command)
os.read(ready, 1)
for kind in ("uid_map", "gid_map"):
    with open(f"/proc/{child}/{kind}", "w") as file:
        file.write(users)
os.write(tell_mapped, b"1")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def in_namespace(uid: int, shown_as: int) -> tuple[str, ...]:
    """Begins a command that runs as root of a user namespace which also maps that user."""
    users = f"0 0 1\n{shown_as} {uid} 1\n"
    return sys.executable, "-c", _IN_NAMESPACE, users


def kvkeep_as(uid: int) -> list[str]:
    """Begins a command that imports kvkeep as that user."""
    return [*become(uid), *rights_of(uid)]


def as_another_user(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python as a user who is neither root nor the server's, and has no capability."""
    if os.geteuid() != 0 or rights_of(ATTACKER) != ("--inh-caps=-all",):
        pytest.skip("only root can act as a second user, who must be able to run this Python")
    command = [*kvkeep_as(ATTACKER), sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


needs_two_users = pytest.mark.skipif(
    os.geteuid() != 0 or not can(*become(ATTACKER), sys.executable, "-S", "-c", ""),
    reason="only root can be another user, by setpriv, where that user may run this Python",
)
needs_namespaces = pytest.mark.skipif(
    not can(*AS_ROOT_INSIDE, "true"), reason="user namespaces cannot be made here"
)


class OtherUser(JsonProcess):
    """A process of the attacker that runs until the block ends."""

    def __init__(self, *words: str) -> None:
        become_and_run = "import os, sys; os.chdir('/'); os.execvp(sys.argv[1], sys.argv[1:])"
        command = [*become(ATTACKER), sys.executable, "-S", PROGRAM, *words]
        super().__init__("the other user", ["-c", become_and_run, *command], {"PATH": os.defpath})

    def ask(self) -> dict[str, Any]:
        self.send({})
        return self.receive()


@contextlib.contextmanager
def false_server(welcome: bytes, pool: Path, port: int = 0, name: str = "") -> Iterator[OtherUser]:
    """The attacker listens at that port and that Unix name, with a pool that all can write."""
    other = OtherUser("be_the_server", str(port or ""), name, str(pool), welcome.hex())
    try:
        assert other.receive() == {"ready": True}
        yield other
    finally:
        other.end()
        shutil.rmtree(pool, ignore_errors=True)


def say_as_other(where: str, data: bytes) -> dict[str, Any]:
    """What the attacker gets who connects to `host:port`, `@name` or a path and says that."""
    other = OtherUser("say", where, data.hex())
    heard = other.receive()
    assert other.end(60) == 0
    return heard


def doors(server: ServerProcess) -> tuple[str, str]:
    """Its TCP port and its Unix socket, as `say_as_other` takes them."""
    name = unix_name(server.address)
    assert name is not None
    return server.address.removeprefix("tcp://"), f"@{name[1:]}"


class ServerAs(ServerProcess):
    """A server behind a command that makes it another user, or root of a namespace of its own."""

    def __init__(self, become: Sequence[str], *flags: str, **options: Any) -> None:
        super().__init__(*flags, **options)
        self._become = become

    def command(self) -> list[str]:
        return [*self._become, *super().command()]
