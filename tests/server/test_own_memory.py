"""Tests for the server's own memory: what is measured, and what of it counts as messages that nobody can read yet."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator

import pytest

from kvkeep.bench.index import _Load
from kvkeep.server import own_memory
from kvkeep.server.own_memory import INCOMING_BYTES, OwnMemory, Statm, give_back
from kvkeep.store.operators import clear
from kvkeep.units import MIB


class Process:
    """One whose memory is what a test says, one value after the other, the last one for ever."""

    def __init__(self, *measured: int) -> None:
        self.measured = list(measured)

    def __call__(self) -> int:
        return self.measured.pop(0) if len(self.measured) > 1 else self.measured[0]


def no_replies() -> int:
    return 0


def never() -> int:
    raise AssertionError("nobody need ask")


@pytest.fixture
def statm() -> Iterator[Statm]:
    opened = Statm()
    yield opened
    opened.close()


def test_memory_of_the_process_counts_and_what_it_shares_does_not(statm: Statm) -> None:
    give_back()
    own_bytes = statm.own_bytes
    before = own_bytes()
    with mmap.mmap(-1, 64 * MIB, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as shared:
        shared[:] = b"x" * len(shared)
        assert own_bytes() - before < 32 * MIB
    kept = bytearray(b"x") * (64 * MIB)
    assert own_bytes() - before > 48 * MIB
    del kept
    assert own_bytes() - before < 32 * MIB


def test_it_is_measured_where_no_file_can_be_opened(statm: Statm) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/proc/self/statm", os.O_RDONLY)
        assert statm.own_bytes() > MIB
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_its_file_is_closed_once() -> None:
    """Its number may be another's when it is closed again."""
    opened = Statm()
    opened.close()
    with open("/proc/self/statm", "rb") as another:
        opened.close()
        assert another.read()


def test_what_was_there_at_first_is_the_servers_own() -> None:
    process = Process(500 * MIB)
    memory = OwnMemory(process)
    assert memory.incoming_bytes(0, never) == 0
    process.measured = [507 * MIB]
    assert memory.incoming_bytes(0, never) == 7 * MIB


def test_blocks_explain_some_of_it() -> None:
    memory = OwnMemory(Process(0, 400 * MIB), 1000)
    assert memory.incoming_bytes(1000, never) == 400 * MIB
    assert memory.incoming_bytes(1000 + MIB, never) == 0


def test_blocks_that_have_gone_explain_it_still() -> None:
    """The index keeps its size: 5,000,000 blocks took 1,697 MiB, and when all were cleared there were 1,169 MiB."""
    process = Process(20 * MIB, 1697 * MIB)
    memory = OwnMemory(process)
    assert memory.incoming_bytes(5_000_000, never) < 0
    process.measured = [1169 * MIB]
    assert memory.incoming_bytes(0, never) < 0
    process.measured = [3500 * MIB]
    assert memory.incoming_bytes(0, no_replies) > INCOMING_BYTES, "but not everything, for ever"


def test_the_real_index_raises_no_false_alarm_when_it_is_cleared(statm: Statm) -> None:
    """Most of what it took stays: less than the blocks explain, and more than may have come in for nothing."""
    load = _Load.of(300_000, 1)
    give_back()
    memory = OwnMemory(statm.own_bytes, load.resident)
    for _ in load.fill(50_000):
        memory.incoming_bytes(load.resident, never)
    clear(load.store)
    give_back()
    assert load.resident == 0 and memory.incoming_bytes(0, never) < 16 * MIB


@pytest.mark.parametrize(("replies_bytes", "is_over"), [(0, True), (2 * MIB, False), (MIB, True)])
def test_replies_that_wait_explain_some_of_it(replies_bytes: int, is_over: bool) -> None:
    memory = OwnMemory(Process(0, INCOMING_BYTES + 2 * MIB))
    assert (memory.incoming_bytes(0, lambda: replies_bytes) > INCOMING_BYTES) == is_over


def test_what_was_freed_and_not_given_back_does_not_count() -> None:
    """As it is after a message of many small parts has gone."""
    process = Process(0, INCOMING_BYTES + MIB, 5 * MIB)
    assert OwnMemory(process).incoming_bytes(0, no_replies) == 5 * MIB


def test_it_waits_until_memory_is_free_and_counts_as_before() -> None:
    process = Process(100 * MIB, 2000 * MIB, 1500 * MIB, 200 * MIB)
    memory = OwnMemory(process)
    memory.settle(0)
    assert process.measured == [200 * MIB], "it waited for the last one"
    assert memory.incoming_bytes(0, never) == 100 * MIB, "what little is left may be a connection's"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How often freed memory was asked back: once a step of waiting. Steps take no time."""
    taken: list[None] = []
    monkeypatch.setattr(own_memory, "give_back", lambda: taken.append(None))
    monkeypatch.setattr(own_memory, "_SETTLE_STEP_S", 0.0)
    return taken


def test_what_is_never_freed_was_the_servers_own(steps: list[None]) -> None:
    """Otherwise connections would be closed again and again, to no end. And the loop stands still meanwhile: it does
    not wait for what will not come."""
    memory = OwnMemory(Process(0, INCOMING_BYTES + MIB))
    assert memory.incoming_bytes(0, no_replies) > INCOMING_BYTES
    steps.clear()
    memory.settle(0)
    assert len(steps) == own_memory._STILL_STEPS
    assert memory.incoming_bytes(0, never) == 0


def test_it_waits_for_as_long_as_there_is_less_and_less(steps: list[None]) -> None:
    falling = [at * 2 * MIB for at in range(1000, 0, -1) for _ in range(5)]
    process = Process(0, *falling)
    OwnMemory(process).settle(0)
    assert process.measured[0] <= own_memory._SETTLED_BYTES and len(steps) > 40 * own_memory._STILL_STEPS


def test_what_is_freed_too_late_was_a_connections_after_all(steps: list[None]) -> None:
    """Otherwise a client could have its limit widened by what it sends, on a host that is too busy to free it soon."""
    process = Process(100 * MIB, 2000 * MIB)
    memory = OwnMemory(process)
    memory.settle(0)
    process.measured = [50 * MIB]
    assert memory.incoming_bytes(0, never) == -50 * MIB
    process.measured = [600 * MIB]
    assert memory.incoming_bytes(0, never) == 500 * MIB, "counted from the beginning, not from the least ever"


def test_freed_memory_is_asked_back(steps: list[None]) -> None:
    OwnMemory(Process(0, INCOMING_BYTES, 0)).settle(0)
    assert steps
