"""Stores on their way: nobody waits who need not, each ends once, and a fault ends that store
alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvkeep.client.calls import Call
from kvkeep.client.stores import DepartingStores


class Store:
    """A store whose copies arrive when `arrive` is set, and that the server answers when `answer`
    says so."""

    def __init__(self, job: str, fails: str = "") -> None:
        self.job, self.fails = job, fails
        self.arrived, self.call = threading.Event(), Call(1, 0)
        self.told = self.has_departed = self.has_failed = self.is_complete = False
        self.written = 0

    def answer(self) -> None:
        self.call.failure = "answered"

    def depart(self) -> None:
        assert self.arrived.wait(10)
        if self.fails == "depart":
            raise RuntimeError("the device broke")
        self.told = True

    def unanswered(self) -> Call | None:
        return self.call if self.told and not self.call.done else None

    def finish(self) -> None:
        assert self.told and self.call.done, "finished before the server has answered"
        self.written, self.is_complete = 3, True
        if self.fails == "finish":
            raise RuntimeError("the connection broke")


class Waiting:
    """The connection, of which only `wait` is used."""

    def wait(self, call: Call, milliseconds: int) -> None:
        time.sleep(0.001)


class World:
    def __init__(self) -> None:
        self.ended: list[tuple[str, tuple[int, bool]]] = []
        self.faults: list[str] = []
        connection: Any = Waiting()
        fail = self.faults.append
        self.departures = DepartingStores(connection, threading.Condition(), self._end, fail)
        self.thread = threading.Thread(target=self.departures.run, daemon=True)
        self.thread.start()

    def _end(self, store: Any) -> None:
        self.ended.append((store.job, (store.written, store.is_complete)))

    def add(self, job: str, fails: str = "") -> Store:
        store: Any = Store(job, fails)
        self.departures.add(store)
        return store  # type: ignore[no-any-return]

    def settle_until(self, ended: int) -> None:
        deadline = time.monotonic() + 10
        while len(self.ended) < ended and time.monotonic() < deadline:
            self.departures.wait()
            self.departures.settle()
        assert len(self.ended) == ended


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.departures.close()
    world.thread.join(10)
    assert not world.thread.is_alive()


def test_a_store_ends_when_it_has_arrived_and_the_server_has_answered(world: World) -> None:
    store = world.add("a")
    world.departures.settle()
    assert not world.ended and len(world.departures) == 1
    store.arrived.set()
    world.departures.wait()
    world.departures.settle()
    assert not world.ended, "the server has not answered"
    store.answer()
    world.settle_until(1)
    assert world.ended == [("a", (3, True))] and not world.departures
    world.departures.settle()
    assert len(world.ended) == 1


def test_they_end_in_order_and_another_departs_while_the_server_has_not_answered(
    world: World,
) -> None:
    first, second = world.add("a"), world.add("b")
    for store in (first, second):
        store.arrived.set()
    deadline = time.monotonic() + 10
    while not second.told and time.monotonic() < deadline:
        time.sleep(0.001)
    assert second.told and not first.call.done
    second.answer()
    world.departures.settle()
    assert not world.ended
    first.answer()
    world.settle_until(2)
    assert [job for job, _ in world.ended] == ["a", "b"]


@pytest.mark.parametrize("fails", ["depart", "finish"])
def test_a_fault_ends_that_store_alone(world: World, fails: str) -> None:
    bad, good = world.add("a", fails), world.add("b")
    for store in (bad, good):
        store.arrived.set()
        store.answer()
    world.settle_until(2)
    assert world.ended == [("a", (0, False)), ("b", (3, True))]
    assert world.faults == ["store"]


def test_who_waits_hears_of_more_to_do(world: World) -> None:
    store = world.add("a")
    asked: list[float] = []

    def more() -> bool:
        asked.append(time.monotonic())
        return True

    world.departures.wait(more)
    assert asked and not world.ended
    store.arrived.set()
    store.answer()
    world.settle_until(1)


def test_close_waits_for_all_of_them() -> None:
    world = World()
    stores = [world.add(name) for name in "abc"]
    for store in stores:
        store.answer()
        threading.Timer(0.02, store.arrived.set).start()
    world.departures.close()
    assert [job for job, _ in world.ended] == ["a", "b", "c"]
    world.thread.join(10)
    assert not world.thread.is_alive()
