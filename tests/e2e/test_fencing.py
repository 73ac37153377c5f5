"""A process that is stopped at a point that matters, and goes on later, shows no other process a
wrong block.

Clients are stopped by SIGSTOP at each of `fenced.POINTS`, all at once, each in a process of its
own. Meanwhile either the server is killed and the next one adopts the pool, or the sessions are
silent for longer than any time-out and an operator clears all blocks; then others fill every slot
that is free. Then one after the other goes on. Readers do not verify checksums: nothing but the
fence protects them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import clients
import fenced
import pytest
from clients import SMALL_POOL, SMALL_POOL_BLOCKS
from engines import at_rest, eventually, status

from kvkeep.cli.remote import ask as ask_http
from kvkeep.testing.process import JsonProcess, ServerProcess

FENCED = str(Path(__file__).with_name("fenced.py"))
SILENCE_S = 1.0
SERVER_POINTS = tuple(fenced.SERVER_POINTS)
POOL = (*SMALL_POOL, "--network-session-timeout", f"{SILENCE_S}s")
MEANWHILE = ("the server is killed", "silence, and all is cleared")
MOVES_ON = {"the server is killed": True, "silence, and all is cleared": False}


class FencedServer(ServerProcess):
    """A server that stops itself at a point, once, after `arm`; or that has a bug."""

    def __init__(self, folder: Path, point: str = "", bug: str = "") -> None:
        super().__init__(*POOL, "--no-verify")  # so that the readers' own choice holds
        self._how = (point, str(folder / "armed"), bug)

    def command(self) -> Sequence[str]:
        return [sys.executable, FENCED, "server", *self._how, *super().command()[3:]]

    def arm(self) -> None:
        Path(self._how[1]).touch()


class Paused(JsonProcess):
    """A client process that stops itself at a point."""

    def __init__(self, point: str, address: str, number: int, bug: str = "") -> None:
        self.point, self.number = point, number
        super().__init__(point, [FENCED, "client", point, address, str(number), bug])

    def waits(self) -> None:
        """Until it is stopped; or, where it is to meet the next server, has slots of this one."""
        if self.point.endswith(fenced.STALE):
            assert self.receive() == {"slots": fenced.BLOCKS}
        else:
            self.is_stopped()

    def meets(self, *, another: bool) -> None:
        """Where it is to meet the next server: until it has, and is stopped."""
        if self.point.endswith(fenced.STALE):
            self.send({})
            assert self.receive() == {"moved": another}
            self.is_stopped()

    def is_stopped(self) -> None:
        assert self.receive() == {"stops": True}
        assert eventually(lambda: is_stopped(self.pid))

    def goes_on(self) -> Any:
        """What came of it."""
        self.signal(signal.SIGCONT)
        return self.receive()

    def __enter__(self) -> Paused:
        return self

    def __exit__(self, *exc: object) -> None:
        self.signal(signal.SIGCONT)
        self.end(60 if exc[0] is None else 0)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class Others:
    """Clients that use the server meanwhile: they fill it, and read without verifying."""

    def __init__(self, address: str, stack: ExitStack) -> None:
        self._writer = stack.enter_context(fenced.connect(address))
        self._reader = stack.enter_context(fenced.connect(address, verify=False))
        # Twice the blocks of the pool.
        last = 50_000_000 + 2 * SMALL_POOL_BLOCKS * clients.BLOCK_TOKENS
        self._flood = list(range(50_000_000, last))
        self._expected = clients.oracle(self._flood)

    def put(self, number: int) -> None:
        assert clients.stores(self._writer, fenced.tokens_of(number)) == fenced.BLOCKS

    def restart(self, server: ServerProcess, start: Callable[[], object]) -> None:
        """Kills the server, starts the next one, and waits until both clients use it."""
        epoch = self._writer.connection.epoch
        server.stop(signal.SIGKILL)
        start()
        for cache in (self._writer, self._reader):
            assert eventually(lambda cache=cache: cache.connection.epoch not in (0, epoch))  # type: ignore[misc]

    def fill(self) -> int:
        """Every slot that can be had. Returns how many."""
        self._writer.put(self._flood, self._expected)
        return self._writer.contains(self._flood)

    def damaged(self) -> int:
        """How many of those blocks are not what was stored for them, of all that are found."""
        blocks = self._reader.get(self._flood)
        assert len(blocks), "they are all gone"
        both = zip(blocks, self._expected, strict=False)
        return sum(found.tobytes() != right.tobytes() for found, right in both)

    def sees_wrong(self, number: int) -> bool:
        """Whether blocks of a number are found that are not its own."""
        tokens = fenced.tokens_of(number)
        return not clients.same(self._reader.get(tokens), clients.oracle(tokens))


def happens(server: FencedServer, others: Others, meanwhile: str) -> None:
    if meanwhile == "the server is killed":
        others.restart(server, server.start)
    else:
        time.sleep(2.5 * SILENCE_S)  # many looks for dead sessions, long after the time-out
        ask_http(server.http, "/v1/blocks?confirm=everything", "DELETE")


def run(
    folder: Path, meanwhile: str, points: Sequence[str], *, bug: str = ""
) -> dict[str, list[str]]:
    """Stops a client at each point, lets that happen, fills the pool, lets them go on. Returns what
    was wrong."""
    problems: dict[str, list[str]] = {}
    in_server = "" if bug == "ignore-epoch" else bug
    with FencedServer(folder, bug=in_server) as server, ExitStack() as stack:
        others = Others(server.address, stack)
        for number, point in enumerate(points):
            if point.startswith("load"):
                others.put(number)
        in_client = bug if bug == "ignore-epoch" else ""
        paused = [
            stack.enter_context(Paused(point, server.address, number, in_client))
            for number, point in enumerate(points)
        ]
        for each in paused:
            each.waits()
        happens(server, others, meanwhile)
        for each in paused:
            each.meets(another=MOVES_ON[meanwhile])
        free = SMALL_POOL_BLOCKS - fenced.BLOCKS * len(points)
        assert others.fill() >= free, "every slot that is free is reused"
        assert not others.damaged()
        for each in paused:
            said = each.goes_on()
            found = problems[each.point] = []
            if not said["right"]:
                found.append(f"it read what is not its own: {said}")
            if damaged := others.damaged():
                found.append(f"{damaged} blocks of others are damaged")
            if others.sees_wrong(each.number):
                found.append("its blocks are visible and not right")
            used = said.get("wrote") or said.get("loaded")
            if used and each.point.endswith(fenced.STALE) and MOVES_ON[meanwhile]:
                found.append(f"it used slots that an earlier server gave: {said}")
        stack.pop_all().close()
        assert eventually(lambda: holds_nothing(server))
    return problems


def holds_nothing(server: ServerProcess) -> bool:
    now = status(server)
    held = (now["leases"], now["writes"], now["restart"]["held_by_old_sessions"])
    return not any(held) and not now["sessions"]


# -- clients


@pytest.fixture(scope="module", params=MEANWHILE)
def problems(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    return run(tmp_path_factory.mktemp("fenced"), request.param, tuple(fenced.POINTS))


@pytest.mark.parametrize("point", fenced.POINTS)
def test_a_client_that_was_stopped_harms_nobody(problems: dict[str, list[str]], point: str) -> None:
    assert problems[point] == []


COPIES = ("store: in the middle of the copy", "load: in the middle of the copy")


@pytest.mark.parametrize(
    ("bug", "meanwhile", "points"),
    [
        ("free-on-timeout", MEANWHILE[1], COPIES),
        ("skip-ghost", MEANWHILE[0], COPIES),
        ("ignore-epoch", MEANWHILE[0], (f"store: {fenced.STALE}", f"load: {fenced.STALE}")),
    ],
)
def test_without_the_fence_the_same_is_noticed(
    tmp_path: Path, bug: str, meanwhile: str, points: tuple[str, str]
) -> None:
    found = run(tmp_path, meanwhile, points, bug=bug)
    store, load = (" ".join(found[point]) for point in points)
    assert "blocks of others are damaged" in store, found
    assert "it read what is not its own" in load, found


# -- the server


def adopting(server: FencedServer) -> subprocess.Popen[str]:
    """The next server, as far as the point at which it stops."""
    server.arm()
    process = subprocess.Popen(
        server.command(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert eventually(lambda: is_stopped(process.pid))
    return process


def end_of(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=60)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as all_of_it:
        yield all_of_it


@pytest.mark.parametrize("is_killed", [False, True], ids=["goes on", "is killed there"])
@pytest.mark.parametrize("point", SERVER_POINTS[:2])
def test_a_server_that_was_stopped_in_a_store_mixes_nothing_up(
    tmp_path: Path, stack: ExitStack, point: str, is_killed: bool
) -> None:
    server = stack.enter_context(FencedServer(tmp_path, point))
    others = Others(server.address, stack)
    late = stack.enter_context(fenced.connect(server.address, store_deadline_ms=300))
    others.put(1)
    if point == "a slot was freed":
        assert others.fill()
    server.arm()
    tokens = fenced.tokens_of(2)
    assert eventually(lambda: not clients.stores(late, tokens) and is_stopped(server.pid))
    if is_killed:
        others.restart(server, server.start)
    else:
        server.send(signal.SIGCONT)
    assert eventually(lambda: others.fill() > SMALL_POOL_BLOCKS - 3 * fenced.BLOCKS)
    assert not others.damaged() and not others.sees_wrong(1) and not others.sees_wrong(2)
    assert eventually(lambda: clients.stores(late, tokens) == fenced.BLOCKS)
    assert late.contains(tokens) == fenced.BLOCKS
    assert not others.damaged() and not others.sees_wrong(2)
    assert at_rest(server)
    stack.pop_all().close()


@pytest.mark.parametrize("is_killed", [False, True], ids=["goes on", "is killed there"])
@pytest.mark.parametrize("point", SERVER_POINTS[2:])
def test_a_server_that_was_stopped_in_adoption_gives_nothing_away(
    tmp_path: Path, stack: ExitStack, point: str, is_killed: bool
) -> None:
    """Two writers and two readers of the old server: one of each goes on meanwhile, the others when
    all is full."""
    server = stack.enter_context(FencedServer(tmp_path, point))
    others = Others(server.address, stack)
    paused = []
    for number in range(4):
        if number % 2:
            others.put(number)
        paused.append(stack.enter_context(Paused(COPIES[number % 2], server.address, number)))
    for each in paused:
        each.waits()
    said: list[Any] = []

    def start_in_two_steps() -> None:
        """Two of the clients go on while the next server is stopped in its adoption."""
        stopped = adopting(server)
        stack.callback(end_of, stopped)
        said.extend(each.goes_on() for each in paused[:2])
        if is_killed:
            end_of(stopped)
            server.start()
        else:
            stopped.send_signal(signal.SIGCONT)
            assert stopped.stdout is not None
            server.http = json.loads(stopped.stdout.readline())["http"]

    others.restart(server, start_in_two_steps)
    assert others.fill() >= SMALL_POOL_BLOCKS - 4 * fenced.BLOCKS
    said += [each.goes_on() for each in paused[2:]]
    assert [each["right"] for each in said] == [True] * 4
    loaded = [said[number]["loaded"] for number in (1, 3)]
    assert loaded == [fenced.BLOCKS] * 2, "what was leased stays, whichever server serves"
    assert not others.damaged() and not any(others.sees_wrong(number) for number in range(4))
