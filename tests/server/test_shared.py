"""When a tier that was set aside is tried again. Time is simulated, its processes are stand-ins."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvkeep.server import movement as server_movement
from kvkeep.server.lower_tier import Promotion
from kvkeep.server.movement import Movement
from kvkeep.server.shared import Shared, tenant_digest
from kvkeep.server.startup import SharedFiles
from kvkeep.store.layouts import Layout
from kvkeep.store.store import Store
from kvkeep.tiers.clear_log import START, Entry, chained
from kvkeep.tiers.mover import Find, Job, Mover, Result, SyncClears
from kvkeep.tiers.opening import SharedPlace
from kvkeep.tiers.summaries import Shown
from kvkeep.wire.pool_files import Watch


class Process:
    """Lives on for a while after it was killed, if it hangs."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.sent: list[Job] = []
        self.is_alive = True
        self.hangs = False
        self.is_closed = False
        self.oldest_s = 0.0
        self.problem = ""
        self.can_read = self.can_write = True
        self.job_bytes = 1 << 20
        self.answer: Callable[[Job], Result] | None = None  # if it answers

    def results(self) -> list[Result]:
        if self.answer is None:
            return []
        answers = [self.answer(job) for job in self.jobs]
        self.jobs.clear()
        return answers

    def send(self, job: Job) -> bool:
        self.jobs.append(job)
        self.sent.append(job)
        return True

    def kill(self, problem: str) -> None:
        self.is_alive = self.hangs

    @property
    def in_flight_bytes(self) -> int:
        return 0

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
    assert read_log(World(tmp_path), Entry("c", "3"), Entry("b", "2"))[1] == ["c"]
    assert read_log(World(tmp_path), Entry("c", "3"))[1] == ["c"], "a shorter one"
    job, _ = read_log(World(tmp_path))
    assert (job.after, job.carried_out) == (0, 0), "nothing is confirmed before it was read"


BEGIN, ONE, TWO, THREE = Entry(START, "0"), Entry("a", "1"), Entry("b", "2"), Entry("c", "3")
OTHERS = ["two", "three"]


@pytest.fixture
def returning(world: World) -> World:
    """A host that knows three entries and two other hosts, and was away for a minute."""
    assert read_log(world, BEGIN, ONE, TWO, hosts=OTHERS)[1] == ["a", "b"]
    read_log(world, after=3, hosts=OTHERS)
    assert world.tier.state == "ok"
    world.now_s += 60
    assert world.tier.state == "starting"
    return world


def test_a_host_that_was_away_goes_on_if_the_log_has_lost_nothing(returning: World) -> None:
    job, heard = read_log(returning, THREE, after=3, hosts=OTHERS)
    assert job.was_away and heard == ["c"] and returning.tier.state == "ok"
    job, _ = read_log(returning, after=4, hosts=OTHERS)
    assert not job.was_away and job.clears == [] and job.others == []


@pytest.mark.parametrize("is_told", [True, False])
def test_what_a_log_has_lost_while_a_host_was_away_counts_as_cleared(
    returning: World, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The host misses an entry itself, or other hosts have known more than the log has."""
    if is_told:
        read_log(returning, after=3, has_lost=True)
    else:
        read_log(returning, BEGIN, TWO)
    assert returning.tier.state == "starting", "the tier is not used yet"
    assert "all that it has counts as cleared" in caplog.text
    job, _ = read_log(returning, BEGIN, TWO)
    *again, start = job.clears
    assert again == ([] if is_told else [ONE]) and start.name == START and start != BEGIN
    assert job.was_away, "the log may lack more than one"
    entries = [BEGIN, ONE, TWO] if is_told else [BEGIN, TWO, ONE]
    job, heard = read_log(returning, *entries, start)
    assert heard == [] and returning.tier.state == "ok"
    job, heard = read_log(returning, after=4, lacking=["two"])
    assert job.awaited == 4 and job.others == OTHERS and heard == []
    job, heard = read_log(returning, after=4)
    assert job.awaited == 4 and heard == [], "all hosts have said what they know"
    assert read_log(returning, after=4)[0].awaited == 0


def test_a_host_that_does_not_come_back_is_waited_for_and_then_named(
    returning: World, caplog: pytest.LogCaptureFixture
) -> None:
    read_log(returning, BEGIN)
    (*_, start) = read_log(returning, BEGIN)[0].clears
    entries = [BEGIN, ONE, TWO, start]
    read_log(returning, *entries)
    for _ in range(118):
        returning.now_s += 1
        assert read_log(returning, after=4, lacking=["three"])[1] == []
    assert "did not come back" not in caplog.text
    returning.now_s += 3
    for _ in range(2):
        assert read_log(returning, after=4, lacking=["three"])[1] == [], "memory and disks stay"
    assert caplog.text.count("and three, which may know more of it, did not come back") == 1


def test_a_host_that_finds_that_others_did_not_know_asks_them_too(returning: World) -> None:
    """It has lost nothing that it knew, but the log began anew while it was away."""
    other = Entry(START, "of another host")
    assert read_log(returning, BEGIN, ONE, TWO, other)[1] == []
    job, heard = read_log(returning, after=4, lacking=["three"])
    assert job.awaited == 4 and "three" in job.others and heard == []


def test_the_next_server_asks_too_if_this_one_ends_before_it_knows(
    returning: World, tmp_path: Path
) -> None:
    other = Entry(START, "of another host")
    read_log(returning, BEGIN, ONE, TWO, other)
    read_log(returning, after=4, lacking=["three"])
    after = World(tmp_path)
    read_log(after, BEGIN, ONE, TWO, other)
    job, _ = read_log(after, after=4)
    assert job.awaited == 4 and job.others == OTHERS


def test_a_host_that_was_not_away_knows_all_that_the_log_has_lost(world: World) -> None:
    read_log(world, BEGIN, ONE, TWO, hosts=OTHERS)
    read_log(world, after=3)
    read_log(world, Entry(START, "of a new host"))
    job, _ = read_log(world, after=1)
    assert job.clears == [BEGIN, ONE, TWO]
    began = Entry(START, "of a new host")
    job, heard = read_log(world, began, BEGIN, ONE, TWO)
    assert heard == [] and not job.others


def test_what_a_log_had_twice_is_noted_again_once(world: World) -> None:
    """The service did a write that it had not acknowledged, after the entry was written again."""
    read_log(world, BEGIN, ONE, ONE, TWO)
    read_log(world, BEGIN)
    assert read_log(world, after=1)[0].clears == [ONE, TWO]
    read_log(world, ONE, TWO, after=1)
    job, _ = read_log(world, after=3)
    assert job.clears == [] and not world.tier.is_clearing


def test_a_generation_that_was_lost_is_not_used_for_another_clear(
    known: tuple[World, Layout, Shown],
) -> None:
    world, layout, _ = known
    places = []
    for number in range(3):
        world.tier._begin_log_anew([])
        read_log(world, Entry(tenant_digest("tenant"), str(number)))
        promotion = Promotion("tenant", layout, bytes(16), None, 0, 0, insists=True)
        world.tier._clears.clear()
        job = world.tier.ask(5, promotion)
        assert isinstance(job, Find)
        places.append(job.place)
    assert len(set(places)) == 3, "each is the first entry of its log"


def answering(*entries: Entry) -> Callable[[Job], Result]:
    """A process of a tier that has these clears."""

    def answer(job: Job) -> Result:
        after = getattr(job, "after", 0)
        return Result(job.number, clears=list(entries[after:]), after=after)

    return answer


@pytest.mark.parametrize("has_disk", [False, True])
def test_a_server_that_keeps_nothing_leaves_the_list_of_hosts(
    world: World, monkeypatch: pytest.MonkeyPatch, has_disk: bool
) -> None:
    def sleep(seconds: float) -> None:
        world.now_s += seconds

    simulated = SimpleNamespace(monotonic=lambda: world.now_s, sleep=sleep)
    monkeypatch.setattr(server_movement, "time", simulated)
    process = world.processes[0]
    process.answer = answering(BEGIN)
    disks: list[Any] = []
    movement = Movement(Store(1 << 20, 1 << 20), disks, [world.tier], lambda: 0)
    movement.leave()
    assert not leaving(process), "it does not know the clears yet"
    for _ in range(3):
        movement.turn(int(1000 * world.now_s))
    if has_disk:
        disks.append(None)
    movement.leave()
    assert len(leaving(process)) == (0 if has_disk else 1)


def leaving(process: Process) -> list[Job]:
    return [job for job in process.sent if isinstance(job, SyncClears) and job.leaves]


def test_what_is_to_be_removed_is_known_to_the_next_server_until_it_is_gone(
    world: World, tmp_path: Path
) -> None:
    read_log(world, BEGIN)
    world.tier.clear("tenant")
    (entry,) = read_log(world, after=1)[0].clears
    read_log(world, entry, after=1)
    digest = tenant_digest("tenant")
    assert world.tier.shown(0, 0).removing_tenants == 1
    after = World(tmp_path)
    assert read_log(after, BEGIN, entry)[0].to_remove == [digest]
    read_log(after, after=2, removed=[digest])
    assert after.tier.shown(0, 0).removing_tenants == 0
    assert read_log(after, after=2)[0].to_remove == []
    assert read_log(World(tmp_path), BEGIN, entry)[0].to_remove == []


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
