"""Registered host memory: few copies move what lies in it, and none leaves its range. The server's
pool is registered by one thread, part by part, and unregistered by the same."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.client.conftest import simulation  # noqa: F401

from kvkeep.client.connection import Connection
from kvkeep.gpu import registration as module
from kvkeep.gpu.registration import POOL_REGISTERED, PoolRegistration, RegisteredMemory
from kvkeep.testing.clock import eventually

NBYTES = 10
Make = Callable[..., Any]


def runs(pinned: RegisteredMemory, places: list[int], at_a_time: int = 100) -> list[object]:
    return list(pinned.runs(np.array(places, dtype=np.uint64), NBYTES, at_a_time))


@pytest.fixture
def pinned() -> RegisteredMemory:
    made = RegisteredMemory()
    made.add(1000, 1000)
    made.add(2000, 1000)
    return made


def test_what_is_equally_far_apart_is_one_run(pinned: RegisteredMemory) -> None:
    assert runs(pinned, [1000, 1010, 1020]) == [[(1000, 10, 0, 3)]]
    assert runs(pinned, [1000, 1050, 1100, 1110, 1120]) == [[(1000, 50, 0, 3), (1110, 10, 3, 2)]]
    assert runs(pinned, [1500]) == [[(1500, NBYTES, 0, 1)]]
    assert runs(pinned, []) == []


def test_what_lies_backwards_or_one_over_the_other_goes_one_by_one(
    pinned: RegisteredMemory,
) -> None:
    assert runs(pinned, [1100, 1000]) == [[(1100, NBYTES, 0, 1), (1000, NBYTES, 1, 1)]]
    assert runs(pinned, [1100, 1105]) == [[(1100, NBYTES, 0, 1), (1105, NBYTES, 1, 1)]]


def test_no_run_goes_from_one_range_into_the_next(pinned: RegisteredMemory) -> None:
    assert runs(pinned, [1980, 1990, 2000, 2010]) == [[(1980, 10, 0, 2), (2000, 10, 2, 2)]]


def test_so_many_at_a_time(pinned: RegisteredMemory) -> None:
    assert runs(pinned, [1000, 1010, 1020], 2) == [[(1000, 10, 0, 2)], [(1020, NBYTES, 0, 1)]]


@pytest.mark.parametrize("place", [990, 995, 2991, 5000])
def test_what_is_not_registered_is_none_and_the_others_are_not(
    pinned: RegisteredMemory, place: int
) -> None:
    assert runs(pinned, [1000, place, 2000], 1) == [
        [(1000, NBYTES, 0, 1)],
        None,
        [(2000, NBYTES, 0, 1)],
    ]


def test_what_lies_across_the_end_of_a_range_is_not_registered(pinned: RegisteredMemory) -> None:
    assert runs(pinned, [1995]) == [None], "though the next one begins there"


def test_a_range_that_was_taken_back_is_not_registered(pinned: RegisteredMemory) -> None:
    assert pinned.remove(1000) and not pinned.remove(1000)
    assert runs(pinned, [1000]) == [None]
    assert runs(pinned, [2000]) == [[(2000, NBYTES, 0, 1)]]


@pytest.mark.parametrize("seed", range(20))
def test_every_area_is_in_its_run_and_in_one_only(pinned: RegisteredMemory, seed: int) -> None:
    dice = random.Random(seed)
    places = [
        dice.choice([1000, 1010, 1020, 1040, 1980, 1990, 2000, 2010, 2030]) for _ in range(40)
    ]
    found, at_a_time = [], dice.choice([1, 3, 7, 40])
    for number, some in enumerate(
        pinned.runs(np.array(places, dtype=np.uint64), NBYTES, at_a_time)
    ):
        assert some is not None
        for address, step, at, count in some:
            assert step >= NBYTES and at == len(found) - number * at_a_time
            assert (address < 2000) == (address + (count - 1) * step + NBYTES <= 2000), (
                "within one range"
            )
            found += [address + each * step for each in range(count)]
    assert found == places


# -- the pool


class Driver:
    """Which parts are registered, and which threads registered or unregistered one."""

    def __init__(self) -> None:
        self.parts: list[int] = []
        self.threads: set[int] = set()
        self.fails = False

    def pin(self, address: int, nbytes: int) -> bool:
        self.threads.add(threading.get_ident())
        self.parts.append(address)
        if self.fails:
            raise MemoryError
        return True

    def unpin(self, address: int) -> None:
        self.threads.add(threading.get_ident())
        self.parts.remove(address)


@contextlib.contextmanager
def running(registration: PoolRegistration) -> Iterator[threading.Thread]:
    wake, closing = threading.Condition(), list[bool]()
    arguments = (wake, lambda: bool(closing))
    thread = threading.Thread(target=registration.run, args=arguments, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        closing.append(True)
        with wake:
            wake.notify_all()
        thread.join(60)


def is_mapped(connection: Connection, directory: Path) -> bool:
    """Whether this process has memory of the pool, by the kernel's account. The server's own
    mapping is there, too."""
    return Path("/proc/self/maps").read_text().count(str(directory)) > 1


def register_all(registration: PoolRegistration) -> None:
    while registration.register_next():
        pass


@pytest.fixture
def sim(simulation: Make) -> Any:  # noqa: F811
    return simulation(shared_memory=True)


@pytest.mark.parametrize("last", ["the engine", "the session"])
def test_the_thread_that_registered_a_pool_unregisters_it(
    sim: Any, last: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connection, driver = sim.connected(1000), Driver()
    with (
        caplog.at_level(logging.INFO, "kvkeep"),
        running(PoolRegistration(connection, driver)) as thread,
    ):
        assert eventually(lambda: POOL_REGISTERED in caplog.text) and driver.parts
        with connection.pool(connection.epoch) as pool:
            assert pool is not None and is_mapped(connection, tmp_path)
            if last == "the engine":
                connection.start_over()
                assert driver.parts, "it is in use"
        connection.start_over()
        assert eventually(lambda: not driver.parts) and driver.threads == {thread.ident}
        assert eventually(lambda: not is_mapped(connection, tmp_path))


def test_a_thread_that_fails_keeps_no_pool(
    sim: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connection, driver = sim.connected(1000), Driver()
    driver.fails = True
    with (
        caplog.at_level(logging.CRITICAL, "kvkeep"),
        running(PoolRegistration(connection, driver)) as thread,
    ):
        thread.join(60)
        assert not thread.is_alive() and connection.counters.failures == {"internal_error": 1}
    connection.start_over()
    assert not is_mapped(connection, tmp_path)


@pytest.mark.parametrize("closing", [False, True])
def test_the_driver_rests_four_times_as_long_as_it_took(
    monkeypatch: pytest.MonkeyPatch, closing: bool
) -> None:
    """Or an engine could hardly start kernels meanwhile. At the end nothing waits for that."""
    now_s, slept, parts = 100.0, list[float](), 3

    def sleep(seconds: float) -> None:
        nonlocal now_s
        slept.append(seconds)
        now_s += seconds

    def work(*ignored: int) -> bool:
        nonlocal now_s
        now_s += 0.25
        return False

    def populate_next(pin: Any, unpin: Any) -> bool:
        nonlocal now_s, parts
        parts -= 1
        if parts == 2:
            pin(1 << 40, 4096)
            unpin(1 << 40)
        else:
            now_s += 7.0  # mapping the next part takes a while
            pin(1 << 41, 4096)
        return parts > 1

    segments = SimpleNamespace(populate_next=populate_next, is_populated=False)
    connection = SimpleNamespace(
        epoch=1, pool=lambda epoch: contextlib.nullcontext((segments, None))
    )
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now_s))
    asked = list[int]()

    def is_closing() -> bool:
        asked.append(0)
        return (closing and len(asked) > 1) or parts == 1

    registration = PoolRegistration(connection, SimpleNamespace(pin=work, unpin=work))
    registration.run(threading.Condition(), is_closing)
    assert slept == ([] if closing else [0.0, 1.0])


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_pool_that_is_let_go_of_at_the_end_is_unregistered_all_the_same(
    sim: Any, tmp_path: Path, ends_first: bool
) -> None:
    """By that thread if it has not ended, else by the thread that lets go."""
    connection, driver = sim.connected(1000), Driver()
    registration = PoolRegistration(connection, driver)
    register_all(registration)
    assert driver.parts
    if ends_first:
        registration.run(threading.Condition(), lambda: True)
        connection.close()
    else:
        connection.close()
        assert driver.parts, "the thread will do that"
        registration.run(threading.Condition(), lambda: True)
    assert not driver.parts and not is_mapped(connection, tmp_path)


def test_the_next_servers_pool_is_registered_and_each_is_logged_once(
    sim: Any, caplog: pytest.LogCaptureFixture
) -> None:
    connection, driver = sim.connected(1000), Driver()
    registration = PoolRegistration(connection, driver)
    with caplog.at_level(logging.INFO, "kvkeep"):
        for epoch in (1, 2):
            register_all(registration)
            assert not registration.register_next() and connection.epoch == epoch
            assert len(driver.parts) == 1, "the one before was unregistered"
            assert caplog.messages.count(POOL_REGISTERED) == epoch
            if epoch == 1:
                connection.start_over()
                sim.replace_server(epoch=2)
                assert connection.wait_until_up(2_000)
