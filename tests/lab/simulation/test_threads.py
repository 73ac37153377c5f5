from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvkeep.client.threads import FairLock
from kvkeep_lab.simulation.simulation import Process, Simulation
from kvkeep_lab.simulation.threads import SimulatedThreads


class World:
    """One process, and whatever runs in it."""

    def __init__(self, seed: int = 1) -> None:
        self.simulation = Simulation(seed, switch_chance=0.7)
        self.process = Process(self.simulation, "p")
        self.threads = SimulatedThreads(self.process)

    def run(self, *targets: Callable[[], object], duration_us: int = 1_000_000) -> None:
        for target in targets:
            self.process.begin(target)
        self.simulation.run(duration_us)


@pytest.fixture(params=range(5))
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    world.simulation.close()


@pytest.mark.parametrize("kind", ["Lock", "RLock", "Turns"])
def test_one_at_a_time(world: World, kind: str) -> None:
    lock = FairLock(world.threads) if kind == "Turns" else getattr(world.threads, kind)()
    inside, most, done = [0], [0], [0]

    def run() -> None:
        for _ in range(10):
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                world.simulation.step()
                world.simulation.sleep(3)
                inside[0] -= 1
        done[0] += 1

    world.run(run, run, run)
    assert (most[0], done[0]) == (1, 3)


def test_without_a_lock_they_would_meet() -> None:
    """The test above can fail."""
    world, inside, most = World(), [0], [0]

    def run() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        world.simulation.sleep(3)
        inside[0] -= 1

    world.run(run, run, run)
    world.simulation.close()
    assert most[0] == 3


def test_an_rlock_is_taken_again_by_its_owner(world: World) -> None:
    lock, done = world.threads.RLock(), list[int]()

    def run() -> None:
        with lock, lock:
            world.simulation.step()
        assert not lock.locked()
        done.append(1)

    world.run(run)
    assert done


def test_a_condition_wakes_those_who_wait(world: World) -> None:
    condition, items, taken = world.threads.Condition(), list[int](), list[int]()

    def take() -> None:
        with condition:
            condition.wait_for(lambda: items)
            taken.append(items.pop())

    def give() -> None:
        for item in range(3):
            world.simulation.sleep(50)
            with condition:
                items.append(item)
                condition.notify_all()

    world.run(take, take, take, give)
    assert sorted(taken) == [0, 1, 2]


def test_a_wait_ends_after_its_time(world: World) -> None:
    condition, ended = world.threads.Condition(), list[tuple[bool, int]]()

    def wait() -> None:
        with condition:
            began_us = world.simulation.now_us
            woken = condition.wait(0.02)
            ended.append((woken, (world.simulation.now_us - began_us) // 1000))
            assert not condition.wait_for(lambda: False, 0.01)

    world.run(wait)
    assert ended == [(False, 20)]


def test_an_event(world: World) -> None:
    event, seen = world.threads.Event(), list[bool]()

    def wait() -> None:
        seen.append(event.wait(0.001))
        seen.append(event.wait())

    def set_it() -> None:
        world.simulation.sleep(5_000)
        event.set()

    world.run(wait, set_it)
    assert seen == [False, True]
    assert event.is_set()


def test_join_waits_for_the_end(world: World) -> None:
    order: list[str] = []

    def work() -> None:
        world.simulation.sleep(100)
        order.append("worked")

    def run() -> None:
        thread = world.threads.Thread(target=work, name="worker")
        assert thread.ident is None and not thread.is_alive()
        thread.start()
        assert thread.ident is not None and thread.ident != world.threads.get_ident()
        thread.join()
        order.append("joined")
        assert not thread.is_alive()

    world.run(run)
    assert order == ["worked", "joined"]


def test_who_waits_for_each_other_waits_for_ever(world: World) -> None:
    """A deadlock is no hang of the test: time is over, and nobody got through."""
    one, other, through = world.threads.Lock(), world.threads.Lock(), list[int]()

    def take(first: object, second: object) -> None:
        with first:  # type: ignore[attr-defined]
            world.simulation.sleep(10)
            with second:  # type: ignore[attr-defined]
                through.append(1)

    world.run(lambda: take(one, other), lambda: take(other, one))
    assert not through
