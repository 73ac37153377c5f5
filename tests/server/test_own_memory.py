"""Tests for the server's own memory: what is measured, and what of it counts as messages that nobody can read yet."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest

from kvkeep.server import own_memory
from kvkeep.server.own_memory import INCOMING_BYTES, OwnMemory, give_back, own_bytes
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


def test_memory_of_the_process_counts_and_what_it_shares_does_not(tmp_path: object) -> None:
    give_back()
    before = own_bytes()
    with mmap.mmap(-1, 64 * MIB, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as shared:
        shared[:] = b"x" * len(shared)
        assert own_bytes() - before < 32 * MIB
    kept = bytearray(b"x") * (64 * MIB)
    assert own_bytes() - before > 48 * MIB
    del kept
    assert own_bytes() - before < 32 * MIB


def test_what_was_there_at_first_is_the_servers_own() -> None:
    process = Process(500 * MIB)
    memory = OwnMemory(measure=process)
    assert memory.incoming_bytes(0, never) == 0
    process.measured = [507 * MIB]
    assert memory.incoming_bytes(0, never) == 7 * MIB


def test_blocks_explain_some_of_it() -> None:
    memory = OwnMemory(1000, Process(0, 400 * MIB))
    assert memory.incoming_bytes(1000 + MIB, never) == 0
    assert memory.incoming_bytes(1000, never) == memory.incoming_bytes(0, never) == 400 * MIB


@pytest.mark.parametrize(("replies_bytes", "is_over"), [(0, True), (2 * MIB, False), (MIB, True)])
def test_replies_that_wait_explain_some_of_it(replies_bytes: int, is_over: bool) -> None:
    memory = OwnMemory(measure=Process(0, INCOMING_BYTES + 2 * MIB))
    assert (memory.incoming_bytes(0, lambda: replies_bytes) > INCOMING_BYTES) == is_over


def test_what_was_freed_and_not_given_back_does_not_count() -> None:
    """As it is after a message of many small parts has gone."""
    process = Process(0, INCOMING_BYTES + MIB, 5 * MIB)
    assert OwnMemory(measure=process).incoming_bytes(0, no_replies) == 5 * MIB


def test_it_waits_until_memory_is_free_and_counts_as_before() -> None:
    process = Process(100 * MIB, 2000 * MIB, 1500 * MIB, 200 * MIB)
    memory = OwnMemory(measure=process)
    memory.settle(0)
    assert process.measured == [200 * MIB], "it waited for the last one"
    assert memory.incoming_bytes(0, never) == 100 * MIB, "what little is left may be a connection's"


def test_what_is_never_freed_was_the_servers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise connections would be closed again and again, to no end."""
    monkeypatch.setattr(own_memory, "_SETTLE_S", 0.05)
    memory = OwnMemory(measure=Process(0, INCOMING_BYTES + MIB))
    assert memory.incoming_bytes(0, no_replies) > INCOMING_BYTES
    memory.settle(0)
    assert memory.incoming_bytes(0, never) == 0


def test_freed_memory_is_asked_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Callable[[], None]] = []
    monkeypatch.setattr(own_memory, "give_back", lambda: asked.append(give_back))
    OwnMemory(measure=Process(0, INCOMING_BYTES, 0)).settle(0)
    assert asked
