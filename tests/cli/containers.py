"""Small worlds for real servers: a /dev/shm of the size that Docker gives, and memory limits of
control groups.

Run as a script it serves and fills a pool in the world it is in, and says in a line of JSON how
that went:

    python containers.py WORDS FOR KVKEEP SERVE …
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import caches
import numpy as np
import pytest

import kvkeep
from kvkeep.cli.remote import ask
from kvkeep.errors import Unavailable
from kvkeep.testing.process import ServerProcess
from kvkeep.tiers.free_memory import Mount, read_mounts
from kvkeep.units import KIB

BLOCK_BYTES = 64 * KIB
BLOCK_TOKENS = 4
PROMPT_BLOCKS = 32
_NOISE = np.random.default_rng(7).integers(0, 256, (PROMPT_BLOCKS, BLOCK_BYTES), dtype=np.uint8)

# -- a small /dev/shm


def _can_mount() -> bool:
    command = [*in_small_shm("1m"), "true"]
    return (
        os.getuid() == 0
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


def in_small_shm(size: str) -> list[str]:
    """What goes before a command that is to have a /dev/shm of that size, which nobody else
    sees."""
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"]


needs_mounts = pytest.mark.skipif(
    not _can_mount(), reason="a /dev/shm of its own needs the right to mount"
)

# -- memory limits

_numbers = itertools.count()


class MemoryGroup:
    """A control group with a memory limit, below or beside that of this process: its limits apply
    as well."""

    def __init__(self, directory: Path, version: int) -> None:
        self.directory = directory
        self._version = version
        self._limit, self._usage = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if version == 1
            else ("memory.max", "memory.current")
        )

    def limit_to(self, nbytes: int) -> None:
        (self.directory / self._limit).write_text(str(nbytes))
        if self._version == 2:
            with contextlib.suppress(OSError):
                (self.directory / "memory.swap.max").write_text("0")

    def used_bytes(self) -> int:
        return int((self.directory / self._usage).read_text())

    def kills(self) -> int:
        """How often the kernel has ended a process here because of the limit."""
        events = self.directory / ("memory.oom_control" if self._version == 1 else "memory.events")
        return int(dict(line.split() for line in events.read_text().splitlines())["oom_kill"])

    def inside(self, *command: str) -> list[str]:
        """A command that runs in this group."""
        join = f'echo $$ > {shlex.quote(str(self.directory))}/cgroup.procs && exec "$@"'
        return ["sh", "-c", join, "sh", *command]

    @contextlib.contextmanager
    def child(self) -> Iterator[MemoryGroup]:
        """A group below it that has no limit of its own."""
        if self._version == 2:
            (self.directory / "cgroup.subtree_control").write_text("+memory")
        with _made(self.directory, self._version) as group:
            yield group


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Skips the test where none can be made."""
    try:
        parent, version = _parent()
        made = _made(parent, version)
        group = made.__enter__()
    except (OSError, LookupError) as error:
        pytest.skip(f"a memory limit needs a control group that may be changed: {error}")
    try:
        group.limit_to(limit_bytes)
        yield group
    finally:
        made.__exit__(None, None, None)


@contextlib.contextmanager
def _made(parent: Path, version: int) -> Iterator[MemoryGroup]:
    directory = parent / f"kvkeep-test-{os.getpid()}-{next(_numbers)}"
    directory.mkdir()
    try:
        yield MemoryGroup(directory, version)
    finally:
        until = time.monotonic() + 30
        while directory.exists():  # processes that have just ended may still be in it
            try:
                directory.rmdir()
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


def _parent() -> tuple[Path, int]:
    """Where a group can be made: in version 2 a group with processes has none below it, so beside
    this one."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    groups = {
        1 if names else 2: group
        for _, names, group in lines
        if not names or "memory" in names.split(",")
    }
    for mount in read_mounts():
        if 1 in groups and mount.kind == "cgroup" and "memory" in mount.options:
            return _inside(mount, groups[1]), 1
    for mount in read_mounts():
        own = _inside(mount, groups[2]) if 2 in groups and mount.kind == "cgroup2" else Path()
        if (own / "memory.max").exists():
            return own.parent, 2
    raise LookupError("this process is in none that limits memory")


def _inside(mount: Mount, group: str) -> Path:
    return Path(mount.point) / os.path.relpath(group, mount.root)


class LimitedServer(ServerProcess):
    """A server in a memory group."""

    def __init__(self, group: MemoryGroup, *flags: str, name: str | None = None) -> None:
        super().__init__(*flags, name=name)
        self.group = group

    def command(self) -> Sequence[str]:
        return self.group.inside(*super().command())


# -- what is done there


def connect(server: ServerProcess) -> kvkeep.Cache:
    return caches.connect(server, BLOCK_TOKENS, (BLOCK_BYTES,), "uint8")


def prompt(number: int) -> tuple[list[int], Any]:
    """Its tokens, and blocks that no other prompt has."""
    blocks = _NOISE.copy()
    blocks[:, :8] = np.frombuffer(number.to_bytes(8, "little"), dtype=np.uint8)
    return [number, *range(1, PROMPT_BLOCKS * BLOCK_TOKENS)], blocks


def found(cache: kvkeep.Cache, number: int) -> int:
    """How many blocks of the prompt are there, byte for byte."""
    tokens, blocks = prompt(number)
    got = cache.get(tokens)
    assert np.array_equal(got, blocks[: len(got)])
    return len(got)


def finds(server: ServerProcess, number: int) -> int:
    with connect(server) as cache:
        return found(cache, number)


def all_there(server: ServerProcess) -> dict[str, Any]:
    """The pool as status shows it, when the server has filled it."""
    while not (status := ask(server.http, "/v1/status"))["ready"]:
        time.sleep(0.02)
    pool: dict[str, Any] = status["pool"]
    return pool


def fill(server: ServerProcess) -> dict[str, Any]:
    """Waits until all of the pool's memory is there, stores more than fits, and reads the last of
    it."""
    pool = all_there(server)
    prompts = pool["pool_bytes"] * 5 // 4 // (PROMPT_BLOCKS * BLOCK_BYTES) + 2
    with connect(server) as cache:
        for number in range(prompts):
            tokens, blocks = prompt(number)
            cache.put(tokens, blocks)  # a server that has adopted some of them has no need of all
            assert found(cache, number) == PROMPT_BLOCKS
        first = found(cache, 0)
    status = ask(server.http, "/v1/status")
    return {
        "last": prompts - 1,
        "pool_bytes": pool["pool_bytes"],
        "filled_bytes": status["pool"]["filled_bytes"],
        "stored_bytes": status["pool"]["used_bytes"]["ready"],
        "unused_slabs": status["pool"]["unused_slabs"],
        "first": first,
        "degraded": status["pool"]["degraded"],
    }


def advice(said: str) -> list[str]:
    """The words of a hint that says what to use instead."""
    words = re.search(r"hint: use (--.*?), or ", said)
    assert words is not None, said
    return words[1].split(" ")


def _serve_and_fill(*words: str) -> dict[str, Any]:
    """Twice, with a restart between. A refused start is told with what was said."""
    server = ServerProcess(*words)
    try:
        server.start()
    except Unavailable as error:
        return {"refused": str(error)}
    with contextlib.ExitStack() as stack:
        stack.push(server)
        report = fill(server)
        report["log"] = server.stop()
        server.start()
        report["adopted"] = finds(server, report["last"])
    return report


if __name__ == "__main__":
    print(json.dumps(_serve_and_fill(*sys.argv[1:])))
