"""A pool that is registered with a GPU's driver: by one thread, part by part, and taken back by the
same."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.client.test_worker_threads import eventually

from kvkeep.client import pins as module
from kvkeep.client.pins import POOL_REGISTERED, Pins

Make = Callable[..., Any]


class Driver:
    """Which parts it has, and who gave or took one."""

    def __init__(self) -> None:
        self.parts: list[int] = []
        self.threads: set[int] = set()
        self.fails = False

    def pin(self, address: int, nbytes: int) -> bool:
        if self.fails:
            raise MemoryError
        self.threads.add(threading.get_ident())
        self.parts.append(address)
        return True

    def unpin(self, address: int) -> None:
        self.threads.add(threading.get_ident())
        self.parts.remove(address)


@contextlib.contextmanager
def running(pins: Pins) -> Iterator[threading.Thread]:
    wake, closing = threading.Condition(), list[bool]()
    thread = threading.Thread(target=pins.run, args=(wake, lambda: bool(closing)), daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        closing.append(True)
        with wake:
            wake.notify_all()
        thread.join(60)


@pytest.mark.parametrize("last", ["the engine", "the session"])
def test_whoever_lets_go_last_a_thread_of_its_own_takes_it_back(
    simulation: Make, last: str
) -> None:
    """It takes seconds for a large pool, and an engine's thread has other things to do."""
    connection, driver = simulation(shared_memory=True).connected(1000), Driver()
    pins, segments = Pins(connection, driver), connection.segments
    with running(pins) as thread:
        assert eventually(lambda: pins._told == connection.epoch) and driver.parts
        with connection.pool(connection.epoch) as pool:
            assert pool is not None
            if last == "the engine":
                connection._go_down()
                assert driver.parts, "it is in use"
        connection._go_down()
        assert eventually(lambda: not driver.parts) and driver.threads == {thread.ident}
        assert eventually(lambda: segments._maps == [None]), "and unmapped"


def test_a_thread_that_fails_keeps_no_pool(
    simulation: Make, caplog: pytest.LogCaptureFixture
) -> None:
    connection, driver = simulation(shared_memory=True).connected(1000), Driver()
    pins, segments = Pins(connection, driver), connection.segments
    while pins.go_on():
        pass
    segments._populated = 0
    driver.fails = True
    with caplog.at_level(logging.CRITICAL, "kvkeep"), running(pins) as thread:
        thread.join(60)
        assert not thread.is_alive() and connection.counters.failures == {"internal_error": 1}
    connection._go_down()
    assert not driver.parts and segments._maps == [None]


@pytest.mark.parametrize(("closing", "over"), [(False, False), (True, False), (False, True)])
def test_the_driver_is_left_alone_four_times_as_long_as_it_took(
    simulation: Make, monkeypatch: pytest.MonkeyPatch, closing: bool, over: bool
) -> None:
    """Or an engine that starts kernels meanwhile would hardly get through. At the end nobody waits
    for that, nor does an engine's thread when this one has failed."""
    now_s, slept = 100.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now_s
        slept.append(seconds)
        now_s += seconds

    def work(*ignored: int) -> bool:
        nonlocal now_s
        now_s += 0.25
        return False

    pins = Pins(simulation().connected(1000), SimpleNamespace(pin=work, unpin=work))
    pins._is_closing, pins._is_over = lambda: closing, over
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now_s))
    assert pins._pin(1 << 40, 4096) is False
    pins._unpin(1 << 40)
    now_s += 7.0  # what mapping the next part takes
    pins._pin(1 << 41, 4096)
    assert slept == ([] if closing or over else [0.0, 1.0, 0.0])


def test_what_is_let_go_of_at_the_end_is_taken_back_all_the_same(simulation: Make) -> None:
    """By that thread if it has not ended, and by whoever lets go if it has."""
    sim = simulation(shared_memory=True)
    for ends_first in (True, False):
        connection, driver = sim.connected(1000), Driver()
        pins, segments = Pins(connection, driver), connection.segments
        while pins.go_on():
            pass
        assert driver.parts
        if ends_first:
            pins.run(None, lambda: True)
            connection.close()
        else:
            connection.close()
            assert driver.parts, "it will do that"
            pins.run(None, lambda: True)
        assert not driver.parts and segments._maps == [None]


def test_the_next_servers_pool_is_registered_too_and_each_is_told_once(
    simulation: Make, caplog: pytest.LogCaptureFixture
) -> None:
    sim = simulation(shared_memory=True)
    connection, driver = sim.connected(1000), Driver()
    pins = Pins(connection, driver)
    with caplog.at_level(logging.INFO, "kvkeep"):
        for epoch in (1, 2):
            while pins.go_on():
                pass
            assert not pins.go_on() and connection.epoch == epoch
            assert len(driver.parts) == 1, "the one before was taken back"
            assert [record.getMessage() for record in caplog.records].count(
                POOL_REGISTERED
            ) == epoch
            if epoch == 1:
                connection._go_down()
                sim.replace_server(epoch=2)
                assert connection.wait_until_up(2_000)
