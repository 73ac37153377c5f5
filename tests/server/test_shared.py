"""When a tier that was set aside is tried again. Time is simulated, its processes are stand-ins."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest

from kvkeep.server.lower_tier import Promotion
from kvkeep.server.shared import Shared, tenant_digest
from kvkeep.server.startup import SharedFiles
from kvkeep.store.layouts import Layout
from kvkeep.store.store import Store
from kvkeep.tiers.clear_log import ALL, START, Entry, chained
from kvkeep.tiers.mover import Find, Job, Mover, Result, SyncClears
from kvkeep.tiers.opening import SharedPlace
from kvkeep.tiers.summaries import Shown
from kvkeep.wire.pool_files import Watch


class Process:
    """Lives on for a while after it was killed, if it hangs."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.is_alive = True
        self.hangs = False
        self.is_closed = False
        self.oldest_s = 0.0

    def send(self, job: Job) -> bool:
        self.jobs.append(job)
        return True

    def kill(self, problem: str) -> None:
        self.is_alive = self.hangs

    def close(self) -> None:
        """Of its lock file."""
        assert not self.is_closed
        self.is_closed = True


class World:
    def __init__(self, directory: Path, shown: Shown | None = None) -> None:
        self.now_s = 1000.0
        self.failures = 0
        self.processes: list[Process] = []
        self.tier = Shared("tier", 0, self.start, directory / "kept", shown)

    def start(self) -> tuple[Mover, Watch]:
        if self.failures:
            self.failures -= 1
            raise OSError(11, "no processes left")
        self.processes.append(Process())
        return cast(Mover, self.processes[-1]), cast(Watch, self.processes[-1])

    def waited_s(self) -> int:
        """How long it takes until a new process is asked something."""
        began_s = self.now_s
        while not self.tier.revive(7):
            self.now_s += 1
        assert [type(job) for job in self.processes[-1].jobs] == [Find]
        return round(self.now_s - began_s)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    monkeypatch.setattr(time, "monotonic", lambda: made.now_s)
    return made


def test_it_is_tried_once_after_pauses_that_grow_and_used_when_it_answers(world: World) -> None:
    world.tier.put_aside("it does not answer")
    waited = []
    for number in range(1, 9):
        waited.append(world.waited_s())
        for _ in range(200):
            world.now_s += 1
            assert not world.tier.revive(8), "one question at a time"
        assert len(world.processes) == number + 1 and world.tier.state == "set aside"
        world.tier.tried("no answer")
    assert waited == [1, 2, 4, 8, 16, 32, 60, 60]
    world.waited_s()
    assert world.tier.set_aside
    world.tier.tried("")
    assert world.tier.state == "starting" and not world.tier.set_aside
    world.tier.put_aside("again")
    assert world.waited_s() == 1, "the pauses begin anew"


def test_no_new_process_while_the_old_one_may_still_write(world: World) -> None:
    world.processes[0].hangs = True
    world.tier.put_aside("it does not answer")
    world.now_s += 1000
    assert not world.tier.revive(7) and len(world.processes) == 1
    world.processes[0].is_alive = False
    assert world.tier.revive(7) and len(world.processes) == 2


def test_a_process_that_cannot_be_started_is_tried_again(world: World) -> None:
    world.tier.put_aside("it does not answer")
    world.failures = 3
    for _ in range(3):
        world.now_s += 100
        assert not world.tier.revive(7) and "no processes left" in world.tier.set_aside
        assert not world.tier.revive(7) and len(world.processes) == 1
    world.now_s += 100
    assert world.tier.revive(7)


def read_log(
    world: World, *entries: Entry, after: int = 0, **more: Any
) -> tuple[SyncClears, list[str]]:
    """The job that reads the log of clears, and the tenants that are heard of when it answers."""
    taken = world.tier.take_records(1)
    assert taken is not None
    job, planned = taken
    assert isinstance(job, SyncClears)
    world.tier.wrote(planned, Result(1, clears=list(entries), after=after, **more))
    heard = world.tier.take_heard()
    world.tier.heard_is_cleared()
    return job, heard


def test_what_a_log_had_twice_is_noted_again_once(world: World) -> None:
    """The service did a write that it had not acknowledged, after the entry was written again."""
    first, second = Entry("a", "1"), Entry("b", "2")
    read_log(world, first, first, second)
    read_log(world)
    assert read_log(world)[0].clears == [first, second]
    read_log(world, first, second)
    job, _ = read_log(world, after=2)
    assert job.clears == [] and not world.tier.is_clearing


def test_a_log_that_the_tier_has_lost_is_noted_again_and_heard_once(world: World) -> None:
    first, second, third = Entry("a", "1"), Entry("b", "2"), Entry("c", "3")
    assert read_log(world, first, second)[1] == ["a", "b"]
    job, heard = read_log(world, after=2)
    assert (job.after, job.carried_out, heard) == (2, 2, [])
    assert job.digest == chained(chained("", first), second)
    assert read_log(world, third)[1] == ["c"], "another log: the tier was started again, empty"
    job, heard = read_log(world, first, second, after=1)
    assert job.clears == [first, second] and heard == [], "they were carried out here"
    job, _ = read_log(world, after=3)
    assert job.carried_out == 3 and job.clears == []


def test_the_next_server_carries_out_a_log_that_is_not_the_one_it_knows(tmp_path: Path) -> None:
    before = World(tmp_path)
    read_log(before, Entry("a", "1"), Entry("b", "2"))
    before.tier.take_records(1)  # notes that both were carried out
    assert read_log(World(tmp_path), Entry("a", "1"), Entry("b", "2"))[1] == []
    assert read_log(World(tmp_path), Entry("c", "3"), Entry("b", "2"))[1] == ["c", "b"]
    assert read_log(World(tmp_path), Entry("c", "3"))[1] == ["c"], "a shorter one"
    job, _ = read_log(World(tmp_path))
    assert (job.after, job.carried_out) == (0, 0), "nothing is confirmed before it was read"


def test_the_next_server_uses_no_generation_of_a_log_that_is_not_the_one_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log may have lost a clear, and with it the end of a generation. It is not forgotten if the
    server ends before START is in the log."""
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    begin, one, two = Entry(START, "0"), Entry("a", "1"), Entry("b", "2")
    before = World(tmp_path)
    read_log(before, begin, one, two)
    read_log(before, after=3)  # notes that all were carried out
    for _ in range(2):
        after = World(tmp_path)
        read_log(after, begin, one)
        layout = layout_of()
        assert not asks(after, layout), "its own generation is not known yet"
        (start,) = read_log(after, after=2)[0].clears
        assert start.name == START and start != begin
    read_log(after, start, after=2)
    assert asks(after, layout) and read_log(after, after=3)[0].clears == []
    read_log(after, after=3)
    again = World(tmp_path)
    read_log(again, begin, one, start)
    assert read_log(again, after=3)[0].clears == [], "this log is known now"


def test_a_start_clears_no_memory(world: World) -> None:
    assert read_log(world, Entry(START, "0"), Entry("a", "1"), Entry(START, "2"))[1] == ["a"]


def test_a_clear_is_waited_for_in_the_log_that_the_tier_has_now(world: World) -> None:
    """The tier has lost its log before another host heard: the process cannot tell who lacks the
    clear, and that does not mean that nobody does."""
    begin = Entry(START, "0")
    read_log(world, begin)
    world.tier.clear("tenant")
    (clear,) = read_log(world, after=1)[0].clears
    read_log(world, clear, after=1)
    assert read_log(world, after=2, lacking=["two"])[0].awaited == 2
    assert world.tier.is_clearing and world.tier.unreached() == ["two"]
    other = Entry(START, "of another log")
    read_log(world, other)
    assert world.tier.is_clearing
    assert read_log(world, begin, clear, after=1)[0].clears == [begin, clear]
    assert read_log(world, after=3, lacking=["two"])[0].awaited == 3
    assert world.tier.is_clearing and world.tier.unreached() == ["two"]
    read_log(world, after=3)
    assert not world.tier.is_clearing


def test_hosts_that_are_known_are_told_to_every_process_and_the_next_server(
    world: World, tmp_path: Path
) -> None:
    assert read_log(world, Entry(START, "0"), hosts=["one", "two"])[0].hosts == []
    assert read_log(world, after=1, hosts=["two", "three"])[0].hosts == ["one", "two"]
    assert read_log(world, after=1, hosts=[])[0].hosts == ["one", "two", "three"]
    assert read_log(World(tmp_path), Entry(START, "0"))[0].hosts == ["one", "two", "three"]


def test_blocks_of_before_a_clear_are_not_found_if_its_number_was_given_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service has lost a clear that one host knew. The next clear, on another host, has the same
    number."""
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    clears = [Entry(name, token) for name in (ALL, tenant_digest("tenant")) for token in "12"]
    layout, places = layout_of(), []
    for at, clear in enumerate(clears):
        host = World(tmp_path / str(at))
        read_log(host, clear)
        places.append(asks(host, layout))
    assert None not in places and len(set(places)) == 4


def layout_of() -> Layout:
    store = Store(1 << 20, 1 << 20)
    store.open_session(1)
    return store.open_layout(1, b"layout", (4096,))


def asks(world: World, layout: Layout) -> str | None:
    """Where blocks of a tenant are looked for, if at all."""
    promotion = Promotion("tenant", layout, bytes(16), None, 0, 0, insists=True)
    job = world.tier.ask(5, promotion)
    return job.place if isinstance(job, Find) else None


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[World, Layout, Shown]:
    """A tier whose map is known, and has nothing."""
    files = SharedFiles(SharedPlace("file:///srv/kv?size=1GiB"))
    made = World(tmp_path, files.shown)
    monkeypatch.setattr(time, "monotonic", lambda: made.now_s)
    store = Store(1 << 20, 1 << 20)
    store.open_session(1)
    taken = made.tier.take_records(1)
    assert taken is not None
    made.tier.wrote(taken[1], Result(1))  # it has read the log of clears
    files.shown.set_as_of(made.now_s)
    return made, store.open_layout(1, b"layout", (4096,)), files.shown


def test_no_request_waits_for_what_the_tier_surely_lacks(
    known: tuple[World, Layout, Shown],
) -> None:
    world, layout, shown = known

    def asks(number: int, insists: bool = False) -> Promotion | None:
        keys = bytes([number]) * 16
        promotion = Promotion("tenant", layout, keys, None, 0, 0, insists=insists)
        return promotion if world.tier.ask(5, promotion) else None

    first = asks(1)
    assert first is not None and first.is_doubtful, "it is asked, and no request waits"
    assert asks(2) is None, "not for every prompt"
    world.now_s += 0.06
    checked = asks(2)
    assert checked is not None and checked.is_doubtful
    insisting = asks(3, insists=True)
    assert insisting is not None and not insisting.is_doubtful
    world.tier.answered(checked, Result(5, found=1))
    assert not checked.is_doubtful and checked.stop == 1, "it was there all the same"
    shown.bits[:] = 0xFF
    waits = asks(4)
    assert waits is not None and not waits.is_doubtful
    shown.clear()
    unknown = asks(5)
    assert unknown is not None and not unknown.is_doubtful, "nothing is known of other hosts"


def test_what_the_tier_has_lost_is_to_be_written_again(known: tuple[World, Layout, Shown]) -> None:
    world, layout, shown = known
    shown.bits[:] = 0xFF
    keys = b"".join(bytes([number]) * 16 for number in range(1, 5))
    for found, is_known in ((4, 4), (1, 1), (4, 4)):
        promotion = Promotion("tenant", layout, keys, None, 0, 0)
        assert world.tier.ask(5, promotion) is not None
        setbacks = world.tier.setbacks
        world.tier.answered(promotion, Result(5, found=found))
        assert world.tier.known("tenant", layout, keys) == is_known
        assert world.tier.setbacks - setbacks == (found < 4), "chains are looked at again"
