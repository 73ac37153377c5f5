"""What hosts tell each other about what they wrote, through a tier in memory."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from dictionary_medium import Dictionary
from numpy.typing import NDArray

from kvkeep.errors import TierError
from kvkeep.tiers import summaries
from kvkeep.tiers.checked_tier import CheckedTier
from kvkeep.tiers.summaries import HOLDS_S, SHOWN_BYTES, Shown, Summaries, words_of
from kvkeep.tiers.tier import Part

HOSTS = ["one", "two"]


def shown() -> Shown:
    descriptor = os.memfd_create("test")
    os.truncate(descriptor, SHOWN_BYTES)
    made = Shown(descriptor)
    os.close(descriptor)
    return made


class Hosts:
    """Two hosts with one tier."""

    def __init__(self, medium: Dictionary) -> None:
        self.medium = medium
        self.maps = [shown(), shown()]
        self.one, self.two = (self.start(number) for number in (0, 1))

    def start(self, number: int) -> Summaries:
        return Summaries(CheckedTier(self.medium), HOSTS[number], self.maps[number])

    def lacks(self, words: NDArray[np.uint64]) -> bool:
        """What the second host thinks after the next reading."""
        self.two.read(HOSTS)
        return self.maps[1].lacks(words)


@pytest.fixture
def hosts() -> Hosts:
    made = Hosts(Dictionary())
    made.one.publish()
    made.two.publish()
    return made


def words(number: int, count: int = 10) -> NDArray[np.uint64]:
    return np.random.default_rng(number).integers(0, 1 << 63, count, np.uint64)


def test_what_a_host_wrote_that_is_gone_is_known_as_long_as_it_is_there(hosts: Hosts) -> None:
    hosts.one.wrote(words(1))
    hosts.one.publish()
    hosts.two.read(["two"], ["one"])
    assert not hosts.maps[1].lacks(words(1)) and hosts.maps[1].lacks(words(2))
    hosts.medium.delete("v1/control/summaries/one/")
    again = Hosts(hosts.medium)
    again.two.publish()
    again.medium.delete("v1/control/summaries/one/")
    again.two.read(["two"], ["one"])
    assert again.maps[1].lacks(words(1)), "a host that is gone holds nobody up"


def test_what_one_host_wrote_the_other_does_not_call_absent(hosts: Hosts) -> None:
    assert hosts.lacks(words(1)) and hosts.lacks(words(2))
    hosts.one.wrote(words(1))
    hosts.one.publish()
    assert not hosts.lacks(words(1)[:1]) and not hosts.lacks(words(1)[9:])
    assert hosts.lacks(words(2))
    hosts.two.wrote(words(3))
    assert not hosts.maps[1].lacks(words(3)), "its own at once"


def test_many_blocks_are_published_as_bits_and_a_new_host_knows_them(hosts: Hosts) -> None:
    for number in range(30):
        hosts.one.wrote(words(number, 1000))
        hosts.one.publish()
        assert not hosts.lacks(words(number, 1000)[999:])
    hosts.two = hosts.start(1)
    hosts.two.publish()
    assert hosts.lacks(words(99, 1))
    assert not any(hosts.lacks(words(number, 1000)[:1]) for number in range(30))
    assert len(hosts.medium.values) <= 8, "the older ones are removed"
    assert sum(map(len, hosts.medium.values.values())) < 5 << 20


def test_a_host_that_was_started_again_goes_on(hosts: Hosts) -> None:
    for number in range(8):
        hosts.one.wrote(words(number, 1000))
    hosts.one.publish()
    hosts.one = hosts.start(0)
    hosts.one.wrote(words(50))
    hosts.one.publish()
    hosts.two = hosts.start(1)
    hosts.two.publish()
    assert not hosts.lacks(words(50)) and not hosts.lacks(words(7, 1000)[:1])


def test_nothing_is_absent_while_a_host_cannot_be_read(hosts: Hosts) -> None:
    assert hosts.lacks(words(1))
    heads = [name for name in hosts.medium.values if "/one/" in name]
    hosts.medium.drop(heads)
    hosts.two = hosts.start(1)
    assert not hosts.lacks(words(1)), "the map begins anew"
    hosts.one.read(HOSTS)
    hosts.one.publish()
    assert hosts.lacks(words(1)), "what a service has evicted is published again"


def test_what_was_read_holds_for_some_seconds(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hosts.lacks(words(1))
    later = time.monotonic() + HOLDS_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert not hosts.maps[1].lacks(words(1))


@pytest.mark.parametrize("harm", ["garbage", "half", "empty"])
def test_what_was_changed_on_the_tier_is_not_believed(hosts: Hosts, harm: str) -> None:
    assert hosts.lacks(words(1))
    hosts.one.wrote(words(2, 5000))
    hosts.one.publish()
    for name, value in hosts.medium.values.items():
        if "/one/" in name:
            changed = {"garbage": os.urandom(len(value)), "half": value[: len(value) // 2]}
            hosts.medium.values[name] = changed.get(harm, b"")
    hosts.two = hosts.start(1)
    assert not hosts.lacks(words(1))


def test_a_tier_without_room_is_no_error(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    write = hosts.medium.write
    full: list[bool] = []

    def refuse(parts: list[Part]) -> list[bool]:
        full.append(True)
        return [False] * len(parts)

    monkeypatch.setattr(hosts.medium, "write", refuse)
    hosts.one.wrote(words(1))
    hosts.one.publish()
    assert full
    monkeypatch.setattr(hosts.medium, "write", write)
    hosts.one.publish()
    assert not hosts.lacks(words(1))


def test_a_failure_is_told_and_nothing_is_lost(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(parts: list[Part]) -> list[bool]:
        raise TierError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(hosts.medium, "write", fail)
        for number in range(8):
            hosts.one.wrote(words(number, 1000))
            with pytest.raises(TierError):
                hosts.one.publish()
    hosts.one.publish()
    assert not any(hosts.lacks(words(number, 1000)[:1]) for number in range(8))


def test_a_map_that_is_too_full_is_read_anew(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.one.wrote(words(1))
    hosts.one.publish()
    hosts.maps[1].bits[:] = 0xFF
    assert hosts.lacks(words(2)) and not hosts.lacks(words(1))


def test_what_was_found_is_published_once(hosts: Hosts) -> None:
    hosts.two.found(words(1))
    hosts.two.publish()
    before = dict(hosts.medium.values)
    hosts.two.found(words(1))
    hosts.two.publish()
    assert hosts.medium.values == before
    hosts.one.read(HOSTS)
    assert not hosts.maps[0].lacks(words(1))


def test_old_generations_are_forgotten(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries, "_MOST_OF_A_GENERATION", 20_000)
    for number in range(12):
        hosts.one.wrote(words(number, 10_000))
        hosts.one.publish()
    hosts.two = hosts.start(1)
    hosts.two.publish()
    assert hosts.lacks(words(0, 10_000)[:1]) and not hosts.lacks(words(11, 10_000)[:1])


def test_words_depend_on_the_place() -> None:
    keys = os.urandom(160)
    assert len(words_of("v1/a", keys)) == 10
    assert not (words_of("v1/a", keys) == words_of("v1/b", keys)).any()
