from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvkeep_lab.simulation.simulation import Killed, Process, Simulation


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    simulation = Simulation(seed=1)
    yield simulation
    simulation.close()


def race(seed: int) -> list[tuple[str, int]]:
    """Who of three threads had its turn when."""
    simulation = Simulation(seed)
    process = Process(simulation, "p")
    turns: list[tuple[str, int]] = []

    def run(name: str) -> None:
        for _ in range(20):
            turns.append((name, simulation.now_us))
            simulation.step()

    for name in "abc":
        process.begin(lambda name=name: run(name))  # type: ignore[misc]
    simulation.run(1_000_000)
    simulation.close()
    return turns


def test_a_seed_decides_who_is_next() -> None:
    assert race(1) == race(1)
    assert race(1) != race(2)
    assert [name for name, _ in race(1)] != sorted(name for name, _ in race(1)), "they take turns"


def test_a_thread_may_be_stopped_at_any_line_of_a_file() -> None:
    """Between reading and writing, here: without that nobody gets in between."""

    def count(stops_in: frozenset[str]) -> int:
        simulation = Simulation(1, stops_in=stops_in)
        process, total = Process(simulation, "p"), [0]

        def run() -> None:
            for _ in range(200):
                read = total[0]
                total[0] = read + 1

        for _ in range(3):
            process.begin(run)
        simulation.run(1_000_000)
        simulation.close()
        return total[0]

    assert count(frozenset()) == 600
    assert count(frozenset({__file__})) < 600


def test_time_passes_only_in_the_simulation(simulation: Simulation) -> None:
    process = Process(simulation, "p")
    woke_us: list[int] = []

    def run() -> None:
        simulation.sleep(3_600_000_000)
        woke_us.append(simulation.now_us)

    process.begin(run)
    simulation.run(3_599_000_000)
    assert not woke_us
    simulation.run(2_000_000)
    assert woke_us == [3_600_000_000]
    assert simulation.now_us == 3_601_000_000


def test_events_happen_in_their_order(simulation: Simulation) -> None:
    order: list[str] = []
    simulation.after(20, lambda: order.append("second"))
    simulation.after(10, lambda: order.append("first"))
    simulation.after(20, lambda: order.append("third"))
    simulation.run(15)
    assert order == ["first"]
    simulation.run(15)
    assert order == ["first", "second", "third"]


def test_a_paused_process_stays_where_it_is(simulation: Simulation) -> None:
    process, counted = Process(simulation, "p"), [0]

    def run() -> None:
        while True:
            counted[0] += 1
            simulation.sleep(10)

    process.begin(run)
    simulation.run(100)
    process.paused = True
    before = counted[0]
    simulation.run(1_000)
    assert counted[0] == before
    process.paused = False
    simulation.run(100)
    assert counted[0] > before


def test_a_killed_process_ends_where_it_is_and_reaches_nobody(simulation: Simulation) -> None:
    process, seen = Process(simulation, "p"), list[str]()

    def run() -> None:
        try:
            simulation.sleep(100)
            seen.append("went on")
        except Killed:
            seen.append("killed")
            raise
        finally:
            with pytest.raises(Killed):
                simulation.sleep(1)
            with pytest.raises(Killed):
                simulation.step()

    task = process.begin(run)
    simulation.run(50)
    process.kill()
    simulation.run(200)
    assert seen == ["killed"]
    assert not task.alive


def test_a_process_may_be_killed_by_its_own_thread_and_by_an_event(simulation: Simulation) -> None:
    suicide, victim = Process(simulation, "s"), Process(simulation, "v")
    went_on: list[str] = []

    def run() -> None:
        suicide.kill()
        simulation.step()
        went_on.append("s")

    def wait() -> None:
        simulation.block()
        went_on.append("v")

    suicide.begin(run)
    victim.begin(wait)
    simulation.after(10, victim.kill)
    simulation.run(100)
    assert not went_on


def test_what_is_raised_in_an_event_or_leaves_a_thread_ends_the_run() -> None:
    def fail() -> None:
        raise ValueError("here")

    for begin in (
        lambda simulation: simulation.after(5, fail),
        lambda simulation: Process(simulation, "p").begin(fail),
    ):
        simulation = Simulation(1)
        begin(simulation)
        with pytest.raises(ValueError, match="here"):
            simulation.run(100)
        simulation.close()


def test_an_event_that_fails_is_not_met_by_whoever_has_the_baton() -> None:
    simulation, met = Simulation(1), list[str]()

    def run() -> None:
        while True:
            try:
                simulation.step()
            except Exception as error:  # guard: the test looks at what is met here
                met.append(str(error))

    def fail() -> None:
        raise ValueError("not yours")

    Process(simulation, "p").begin(run)
    simulation.after(20, fail)
    with pytest.raises(ValueError):
        simulation.run(1_000)
    simulation.close()
    assert not met


def test_each_process_has_a_clock_of_its_own(simulation: Simulation) -> None:
    one, other = Process(simulation, "one"), Process(simulation, "other")
    simulation.run(5_000)
    one.jump(60_000_000)
    assert (one.now_ms(), other.now_ms()) == (60_005, 5)


def test_close_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    simulation = Simulation(1)
    for _ in range(5):
        Process(simulation, "p").begin(simulation.block)
    simulation.run(100)
    simulation.close()
    assert simulation.over
    assert threading.active_count() == before
