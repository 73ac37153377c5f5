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
from kvkeep.tiers.clear_log import START, Entry, SharedLog
from kvkeep.tiers.mover import Result, SyncClears, take_frame
from kvkeep.tiers.shared_process import Removal, SharedProcess
from kvkeep.tiers.summaries import SHOWN_BYTES, Shown
from kvkeep.tiers.tier import Part


class Process:
    """The process of one host."""

    def __init__(self, tier: CheckedTier, host: str) -> None:
        self._host = host
        self._ours, self._theirs = socket.socketpair()
        self._received = bytearray()
        self._numbers = itertools.count(1)
        descriptor = os.memfd_create("test")
        os.truncate(descriptor, SHOWN_BYTES)
        shown = Shown(descriptor)
        os.close(descriptor)
        self._process = SharedProcess(cast(Any, None), tier, shown, self._theirs)
        self._process.start()

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()

    def sync(self, *clears: Entry, **more: Any) -> Result:
        result = self.try_sync(*clears, **more)
        assert not result.error, result.error
        return result

    def try_sync(self, *clears: Entry, **more: Any) -> Result:
        job = SyncClears(next(self._numbers), 0, list(clears), self._host, 0, **more)
        self._process.take(job)
        while (body := take_frame(self._received)) is None:
            self._received += self._ours.recv(1 << 16)
        return msgspec.msgpack.decode(body, type=Result)


Start = Callable[..., Process]


@pytest.fixture
def tier() -> CheckedTier:
    return CheckedTier(Dictionary())


@pytest.fixture
def start(tier: CheckedTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts the process of a host."""
    has_ended = threading.Event()

    def sleep(seconds: float) -> None:
        if has_ended.wait(seconds):
            threading.Event().wait()  # idle until the tests end

    simulated = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(shared_process, "time", simulated)
    started: list[Process] = []

    def make(host: str, own: CheckedTier | None = None) -> Process:
        started.append(Process(own or tier, host))
        return started[-1]

    yield make
    has_ended.set()
    for each in started:
        each.close()


def test_a_host_that_was_away_is_told_what_the_log_has_lost(
    tier: CheckedTier, start: Start
) -> None:
    entries = [Entry("a", str(number)) for number in range(4)]
    away = {"was_away": True}
    before = start("one").sync(*entries, **away)
    begin = before.clears[0]
    assert before.clears == [begin, *entries] and begin.name == START and not before.has_lost
    assert before.hosts == ["one"]
    for gone in (3, 5):  # an entry in the middle, and the last one
        tier.drop([f"v1/control/clears/{gone}"])
        after = start("two")
        assert after.sync(**away).has_lost, "also if it never knew them"
        assert not after.sync().has_lost, "it was not away"
        assert after.sync(**away).has_lost, "as long as nothing stands for it"
        unknown = Entry(START, str(gone))
        result = after.sync(unknown, **away)
        assert not result.has_lost and unknown in result.clears and len(result.clears) == 5
        assert not start("three").sync(**away).has_lost


@pytest.mark.parametrize("at", range(48))
def test_a_host_publishes_whenever_the_service_has_failed(start: Start, at: int) -> None:
    """Once, at any of the calls of its first job, which are fewer than 48."""
    medium = FailsOnce(at)
    host = start("one", CheckedTier(medium))
    while host.try_sync(was_away=True).error:
        pass
    assert eventually(lambda: any("/summaries/one/" in name for name in [*medium.values]))


class FailsOnce(Dictionary):
    def __init__(self, at: int) -> None:
        super().__init__()
        self._left = at

    def leading(self, names: Sequence[str]) -> int:
        self._count()
        return super().leading(names)

    def read(self, parts: Sequence[Part]) -> list[int]:
        self._count()
        return super().read(parts)

    def write(self, parts: Sequence[Part]) -> list[bool]:
        self._count()
        return super().write(parts)

    def drop(self, names: Sequence[str]) -> None:
        self._count()
        super().drop(names)

    def _count(self) -> None:
        self._left -= 1
        if self._left == -1:
            raise TierError("the service fails")


def test_a_host_leaves_the_list(start: Start) -> None:
    one, two = start("one"), start("two")
    one.sync()
    two.sync()
    assert one.sync(awaited=1).lacking == ["two"]
    two.sync(leaves=True)
    assert one.sync(awaited=1).lacking == []
    assert one.sync(awaited=1, others=["three"]).lacking == ["three"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_process, "_REMOVE_AGAIN_S", 0.3)
    monkeypatch.setattr(shared_process, "_SUMMARIES_S", 0.01)


def test_old_blocks_are_removed_until_none_is_left(
    start: Start, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service fails at first, and a write that was under way arrives after the first removal."""
    medium = Dictionary()
    tier, failures = CheckedTier(medium), iter(range(2))
    delete = medium.delete
    removed: list[int] = []

    def fail(prefix: str) -> int:
        if next(failures, None) is not None:
            raise TierError("the service fails")
        removed.append(delete(prefix))
        return removed[-1]

    monkeypatch.setattr(medium, "delete", fail)
    monkeypatch.setattr(shared_process._Removing, "pause_s", 0.01)
    log = SharedLog(tier)
    log.begin()
    removal = Removal(tier, log)
    first = log.generations("tenant")[-1]

    def block(generation: str, number: int) -> Part:
        return Part(f"v1/tenant/{generation}/layout/{number}", [memoryview(b"block")])

    tier.write([block(first, number) for number in range(3)])
    assert removal.update(["tenant"]) == [], "the clear is not in the log yet"
    log.sync([Entry("tenant", "1")], 0)
    tier.write([block(log.generations("tenant")[-1], 7)])
    assert removal.update(["tenant"]) == []
    threading.Thread(target=removal.run, daemon=True).start()
    assert eventually(lambda: 3 in removed)
    tier.write([block(first, 9)])
    assert removal.update(["tenant"]) == []
    assert eventually(lambda: removal.update(["tenant"]) == ["tenant"])
    left = [name for name in medium.values if name.startswith("v1/tenant/")]
    assert left == [f"v1/tenant/{log.generations('tenant')[-1]}/layout/7"]
    log.sync([Entry("tenant", "2")], 0)
    assert removal.update(["tenant"]) == [], "it was cleared again"
    assert eventually(lambda: removal.update(["tenant"]) == ["tenant"])
    assert not [name for name in medium.values if name.startswith("v1/tenant/")]
