"""Who sweeps, what is counted, and what a sweep removes: with a medium in memory, and simulated
time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from kvkeep.errors import TierError
from kvkeep.tiers.sweeper import LEASE_S, Note, Stored, Sweeper

HOUR = 3600.0


class Memory:
    """A medium in memory. Its clock is the one of the sweepers, and `ahead_s`."""

    recount_s = HOUR

    def __init__(self, ahead_s: float = 1e6) -> None:
        self.now_s = 0.0
        self.ahead_s = ahead_s
        self.blocks: dict[str, Stored] = {}
        self.kept: dict[str, Note] = {}
        self.lists = 0
        self.fails = False
        self._versions = itertools.count()

    def put(self, path: str, nbytes: int = 1, age_s: float = 0.0) -> None:
        self.blocks[path] = Stored(self.now_s + self.ahead_s - age_s, nbytes, path)

    def stored(self) -> Iterator[Stored]:
        self.lists += 1
        yield from list(self.blocks.values())

    def remove(self, blocks: Sequence[Stored]) -> None:
        if self.fails:
            raise TierError("no answer")
        for block in blocks:
            self.blocks.pop(block.path, None)

    def note(self, name: str) -> Note | None:
        return self.kept.get(name)

    def notes(self, folder: str) -> dict[str, Note]:
        found = {name: note for name, note in self.kept.items() if name.startswith(folder)}
        return {name.rpartition("/")[2]: note for name, note in found.items()}

    def put_note(self, name: str, content: bytes, over: Note | None) -> bool:
        if self.kept.get(name) != over:
            return False
        self.kept[name] = Note(str(next(self._versions)), self.now_s + self.ahead_s, content)
        return True

    def remove_note(self, name: str) -> None:
        del self.kept[name]

    def tidy(self, now_s: float) -> None: ...


@pytest.fixture
def medium() -> Memory:
    return Memory()


def host(medium: Memory, size_bytes: int = 100, max_age_s: float = 0.0) -> Sweeper:
    return Sweeper(medium, size_bytes, max_age_s, clock=lambda: medium.now_s)


def test_one_host_sweeps_and_another_takes_over_within_a_minute(medium: Memory) -> None:
    one, two = host(medium), host(medium)
    assert one.turn() and not two.turn() and one.turn()
    for _ in range(20):
        medium.now_s += 10
        assert one.turn() and not two.turn(), "a host that renews its lease keeps it"
    waited = 0
    while not two.turn():
        medium.now_s += 10
        waited += 10
    assert LEASE_S <= waited < 60
    assert not one.turn(), "it comes back, and finds that it is not its turn"


def test_what_was_not_used_for_longest_goes_first_and_tails_before_heads(medium: Memory) -> None:
    for number in range(60):
        medium.put(f"old{number}", age_s=HOUR - number / 10)  # written within six seconds
    for number in range(38):
        medium.put(f"new{number}", age_s=10)
    assert host(medium).turn()
    assert len(medium.blocks) == 90
    assert {f"old{number}" for number in range(52)} < set(medium.blocks), "heads are kept"
    assert {f"new{number}" for number in range(38)} < set(medium.blocks)


def test_blocks_are_listed_only_when_the_sum_says_that_the_tier_is_full(medium: Memory) -> None:
    one, two = host(medium), host(medium)
    assert one.turn() and medium.lists == 1
    for number in range(94):
        medium.put(f"block{number}", age_s=100 - number)
        two.add(1, 1)
        two.turn()
        one.turn()
        assert one.usage() == two.usage() and one.usage().used_bytes == number + 1
    assert medium.lists == 1
    for number in range(94, 96):
        medium.put(f"block{number}")
        two.add(1, 1)
    assert not two.has_room(5), "what it wrote itself counts at once"
    two.turn()
    one.turn()
    assert medium.lists == 2 and len(medium.blocks) == 90
    two.turn()
    assert two.has_room(10) and not two.has_room(11)
    medium.now_s += HOUR + 1
    one.turn()
    assert medium.lists == 3, "now and then, to correct the sum"


def test_what_is_old_goes_although_there_is_room(medium: Memory) -> None:
    medium.put("old", age_s=25 * HOUR)
    medium.put("new", age_s=23 * HOUR)
    assert host(medium, size_bytes=0, max_age_s=24 * HOUR).turn()
    assert list(medium.blocks) == ["new"]


def test_without_limits_it_counts(medium: Memory) -> None:
    medium.put("block", 70)
    one = host(medium, size_bytes=0)
    assert one.turn() and (one.usage().blocks, one.usage().used_bytes) == (1, 70)
    assert one.has_room(1 << 60) and list(medium.blocks) == ["block"]


def test_a_sweep_that_ends_halfway_is_finished_by_another_host(medium: Memory) -> None:
    for number in range(100):
        medium.put(f"block{number}", age_s=100 * (100 - number))
    one, two = host(medium), host(medium)
    medium.fails = True
    assert not one.turn() and len(medium.blocks) == 100
    medium.fails = False
    for _ in range(5):
        two.turn()
        medium.now_s += 10
    assert two.turn() and len(medium.blocks) == 90
    assert not one.turn() and one.usage().blocks == 90


def test_a_host_that_lost_its_lease_during_a_sweep_stops(
    medium: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3000):
        medium.put(f"block{number}", age_s=100)
    one, two = host(medium), host(medium)
    original = medium.stored

    def slow() -> Iterator[Stored]:
        for number, each in enumerate(original()):
            if number == 1500:  # it was suspended, and another host has taken over
                medium.now_s += 600
                medium.put_note("sweep/lease", b"another", medium.note("sweep/lease"))
            yield each

    monkeypatch.setattr(medium, "stored", slow)
    assert not one.turn() and len(medium.blocks) == 3000
    monkeypatch.setattr(medium, "stored", original)
    two.turn()
    medium.now_s += 60
    assert two.turn() and len(medium.blocks) == 90


def test_a_deletion_is_counted_by_a_new_list(medium: Memory) -> None:
    one, two = host(medium), host(medium)
    medium.put("a", 30)
    medium.put("b", 30)
    assert one.turn() and one.usage().used_bytes == 60
    del medium.blocks["a"]
    two.add(-1, -30)
    two.turn()
    assert one.turn() and one.usage().used_bytes == 30 and medium.lists == 2


def test_a_host_that_is_gone_is_forgotten_and_what_it_wrote_is_not(medium: Memory) -> None:
    one, two = host(medium), host(medium)
    one.turn()
    medium.put("block", 50)
    two.add(1, 50)
    two.turn()
    one.turn()
    medium.now_s += 2 * 24 * HOUR
    one.turn()
    assert len(medium.notes("sweep/written/")) == 1, "its own"
    assert one.usage().used_bytes == 50


def test_notes_of_others_that_cannot_be_read_are_no_fault(medium: Memory) -> None:
    medium.put("block", 50)
    for name in ("sweep/lease", "sweep/counted", "sweep/written/other"):
        medium.put_note(name, b"\xff{", None)
    one = host(medium)
    assert not one.turn()
    medium.now_s += 60
    assert one.turn() and one.usage().used_bytes == 50
