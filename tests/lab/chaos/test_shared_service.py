"""The service behind a shared tier: what it does with values, and how its faults look."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvkeep.errors import TierError
from kvkeep.tiers.checked_tier import CheckedTier
from kvkeep.tiers.clear_log import HOSTS, Hosts
from kvkeep.tiers.tier import Part
from kvkeep_lab.chaos.record import Record
from kvkeep_lab.chaos.shared_service import Origin, ServiceMedium, SharedService
from kvkeep_lab.simulation.simulation import Process, Simulation


class World:
    def __init__(self, **rates: float) -> None:
        self.simulation = Simulation(1)
        self.record = Record(self.simulation)
        self.service = SharedService(self.simulation, rates, self.record, 1)
        self.read: list[tuple[str, Origin]] = []
        self.media = [
            ServiceMedium(
                self.service,
                lambda name, host=host: Origin(host, 7),  # type: ignore[misc]
                lambda name, origin: self.read.append((name, origin)),
            )
            for host in (0, 1)
        ]

    def run(self, work: Callable[[], object], duration_us: int = 60_000_000) -> None:
        Process(self.simulation, "p").begin(work)
        self.simulation.run(duration_us)


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def of(**rates: float) -> World:
        worlds.append(World(**rates))
        return worlds[-1]

    yield of
    for world in worlds:
        world.simulation.close()


def part(name: str, content: bytes) -> Part:
    return Part(name, [memoryview(bytearray(content))])


def test_hosts_see_what_others_wrote_first(make: Callable[..., World]) -> None:
    world = make()
    one, two = world.media
    got = part("v1/a/b", bytes(4))

    def work() -> None:
        assert one.write([part("v1/a/b", b"mine")]) == [True]
        assert two.write([part("v1/a/b", b"late")]) == [True]
        assert two.leading(["v1/a/b", "v1/a/c"]) == 1
        assert two.read([got, part("v1/a/c", bytes(4))]) == [4, -1]
        assert one.delete("v1/a/") == 1 and two.leading(["v1/a/b"]) == 0

    world.run(work)
    assert bytes(got.views[0]) == b"mine"
    assert world.read == [("v1/a/b", Origin(0, 7))]


def test_a_host_that_is_cut_off_is_refused_and_the_other_is_not(
    make: Callable[..., World],
) -> None:
    world = make()
    world.media[0].cut_until_us = 1_000_000

    def work() -> None:
        with pytest.raises(TierError):
            world.media[0].write([part("v1/a", b"x")])
        assert world.media[1].write([part("v1/a", b"x")]) == [True]
        world.simulation.sleep(1_000_000)
        assert world.media[0].leading(["v1/a"]) == 1

    world.run(work)


@pytest.mark.parametrize(
    ("fault", "kept"), [("full_service", [False]), ("lost_write", [True]), ("late_write", None)]
)
def test_what_becomes_of_a_write(
    make: Callable[..., World], fault: str, kept: list[bool] | None
) -> None:
    world = make(**{fault: 1.0})

    def work() -> None:
        if kept is None:
            with pytest.raises(TierError):
                world.media[0].write([part("v1/a", b"x")])
        else:
            assert world.media[0].write([part("v1/a", b"x")]) == kept
        assert not world.service.values

    world.run(work)
    assert ("v1/a" in world.service.values) == (fault == "late_write")
    assert world.record.faults[fault] == 1


def test_a_restart_and_evictions_remove_blocks(make: Callable[..., World]) -> None:
    world = make()
    for number in range(40):
        world.service.put(f"v1/a/{number}", b"x", Origin(0, 7))
    world.service.put("v1/control/hosts/1", b"x", Origin(0, 7))
    world.service.evict()
    assert 20 <= len(world.service.values) < 41 and "v1/control/hosts/1" in world.service.values
    world.service.empty()
    assert not world.service.values and not world.service.origins


def test_hosts_are_listed_since_the_last_gap_before_them_was_filled(
    make: Callable[..., World],
) -> None:
    world = make()
    service, tier = world.service, CheckedTier(world.media[0])

    def work() -> None:
        Hosts(tier, "one").join()
        one_us = world.simulation.now_us
        Hosts(tier, "two").join()
        two_us = world.simulation.now_us
        assert service.listed(one_us) == {"one"} and service.listed(two_us) == {"one", "two"}
        entry = service.values[f"{HOSTS}/1"]
        service.drop([f"{HOSTS}/1"])
        assert service.listed(two_us) == set()
        service.put(f"{HOSTS}/1", entry[: len(entry) // 2], Origin(0, 7))
        assert service.listed(world.simulation.now_us) == set()
        service.drop([f"{HOSTS}/1"])
        world.simulation.sleep(1)
        service.put(f"{HOSTS}/1", entry, Origin(0, 7))
        assert service.listed(two_us) == set()
        assert service.listed(world.simulation.now_us) == {"one", "two"}

    world.run(work)
