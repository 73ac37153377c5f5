"""What the process of a shared tier does with the log of clears, over a tier in memory."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from dictionary_medium import Dictionary

from kvkeep.errors import TierError
from kvkeep.testing.clock import eventually
from kvkeep.tiers import shared_process
from kvkeep.tiers.checked_tier import CheckedTier
from kvkeep.tiers.clear_log import START, Entry
from kvkeep.tiers.mover import Result, SyncClears, take_frame
from kvkeep.tiers.shared_process import SharedProcess
from kvkeep.tiers.summaries import SHOWN_BYTES, Shown
from kvkeep.tiers.tier import Part


class Process:
    """The process of one host."""

    def __init__(self, medium: Watched, host: str) -> None:
        self.medium = medium
        self._host = host
        self._ours, self._theirs = socket.socketpair()
        self._received = bytearray()
        self._numbers = itertools.count(1)
        descriptor = os.memfd_create("test")
        os.truncate(descriptor, SHOWN_BYTES)
        shown = Shown(descriptor)
        os.close(descriptor)
        tier = CheckedTier(medium)
        self._process = SharedProcess(cast(Any, None), tier, shown, self._theirs)
        self._process.start()

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()

    def sync(self, *clears: Entry, **more: Any) -> Result:
        job = SyncClears(next(self._numbers), 0, list(clears), self._host, 0, **more)
        self._process.take(job)
        while (body := take_frame(self._received)) is None:
            self._received += self._ours.recv(1 << 16)
        return msgspec.msgpack.decode(body, type=Result)


class Watched(Dictionary):
    """One host's way to the service. Calls `before` ahead of what the thread does that is first."""

    def __init__(self, values: dict[str, bytes]) -> None:
        super().__init__()
        self.values = values
        self.before: Callable[[], None] = lambda: None
        self._first: threading.Thread | None = None

    def leading(self, names: Sequence[str]) -> int:
        self._call()
        return super().leading(names)

    def read(self, parts: Sequence[Part]) -> list[int]:
        self._call()
        return super().read(parts)

    def write(self, parts: Sequence[Part]) -> list[bool]:
        self._call()
        return super().write(parts)

    def _call(self) -> None:
        self._first = self._first or threading.current_thread()
        if threading.current_thread() is self._first:
            self.before()


Start = Callable[[str], Process]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts the process of a host. All have the same service."""
    has_ended = threading.Event()

    def sleep(seconds: float) -> None:
        if has_ended.wait(seconds):
            threading.Event().wait()  # idle until the tests end

    simulated = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(shared_process, "time", simulated)
    started: list[Process] = []
    values: dict[str, bytes] = {}

    def make(host: str) -> Process:
        started.append(Process(Watched(values), host))
        return started[-1]

    yield make
    has_ended.set()
    for each in started:
        each.close()


@pytest.mark.parametrize("at", range(10))
def test_a_host_that_begins_has_read_a_clear_or_is_waited_for(start: Start, at: int) -> None:
    """Whichever of its first calls the clear falls before."""
    one, two = start("one"), start("two")
    assert not one.sync().error
    calls, clear, answers = itertools.count(), Entry("a", "1"), list[Result]()

    def before() -> None:
        if next(calls) == at:
            one.sync(clear)
            answers.append(one.sync(awaited=2))

    two.medium.before = before
    result = two.sync()
    (answer,) = answers
    assert answer.lacking == ["two"] or clear in result.clears


@pytest.mark.parametrize("at", range(10))
def test_a_service_that_fails_once_keeps_no_host_from_beginning(start: Start, at: int) -> None:
    calls = itertools.count()

    def before() -> None:
        if next(calls) == at:
            raise TierError("the service fails")

    host = start("one")
    host.medium.before = before
    while (result := host.sync()).error:
        pass
    assert [each.name for each in result.clears] == [START] and next(calls) > at
    assert eventually(lambda: any("/summaries/one/" in name for name in [*host.medium.values]))
    assert result.hosts == ["one"]


def test_a_host_that_the_tier_has_lost_is_waited_for(start: Start) -> None:
    one = start("one")
    assert one.sync(hosts=["two", "one"]).hosts == ["one", "two"]
    assert one.sync(awaited=1).lacking == ["two"]
