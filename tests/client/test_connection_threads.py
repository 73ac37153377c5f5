"""One connection in several threads: who waits for a reply keeps nobody from calling, copying or
closing."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.client.calls import Call
from kvkeep.client.connection import Connection
from kvkeep.testing.clock import eventually
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, encode

Make = Callable[..., Any]
NEVER_MS = 1_000_000_000_000  # in simulated time, which passes as fast as a thread can wait


def look_up(connection: Connection, deadline_ms: int = NEVER_MS) -> Call:
    assert connection.layout is not None
    return connection.call(m.Lookup("default", connection.layout.layout, bytes(16)), deadline_ms)


class Waiting:
    """A thread that waits for a reply that does not come."""

    def __init__(self, connection: Connection) -> None:
        self.call = look_up(connection)
        self.thread = threading.Thread(target=connection.wait, args=(self.call,), daemon=True)
        self.thread.start()

    @property
    def over(self) -> bool:
        self.thread.join(30)
        return not self.thread.is_alive()


@pytest.fixture
def silent(sim: Any, passing: object) -> Any:
    """A server that answers no lookup."""
    sim.recorder.instead = lambda header, request: (
        None if isinstance(request, m.Lookup) else passing
    )
    return sim


def held_in_wait(sim: Any) -> tuple[threading.Event, threading.Event]:
    """Makes the next wait for the transport last until told otherwise; the connection's lock is
    held meanwhile."""
    inside, go_on = threading.Event(), threading.Event()
    transport = sim.transports[-1]
    wait = transport.wait

    def wait_long(timeout_ms: int) -> None:
        if not inside.is_set():
            inside.set()
            assert go_on.wait(30)
        wait(timeout_ms)

    transport.wait = wait_long
    return inside, go_on


# -- calls


def test_calls_are_made_and_answered_while_another_thread_waits(silent: Any) -> None:
    connection = silent.connected()
    waiting = Waiting(connection)
    for _ in range(200):
        assert connection.wait(connection.call(m.Ping(), NEVER_MS)) is not None
        connection.poll()
    assert not waiting.call.done
    connection.give_up(waiting.call)
    assert waiting.over and waiting.call.failure == "given_up"


def test_many_threads_get_each_its_own_reply(silent: Any) -> None:
    connection = silent.connected()
    waiting = [Waiting(connection) for _ in range(3)]
    wrong: list[Any] = []

    def ask() -> None:
        for _ in range(50):
            call = connection.call(m.Ping(), NEVER_MS)
            if not isinstance(connection.wait(call), m.Done):
                wrong.append(call)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []
    for each in waiting:
        connection.give_up(each.call)
        assert each.over


def test_a_reply_that_one_thread_takes_in_reaches_the_other_that_waits_for_it(silent: Any) -> None:
    connection = silent.connected()
    waiting = [Waiting(connection) for _ in range(3)]
    with connection.lock:
        for blocks, each in enumerate(reversed(waiting)):
            frames = encode(Header(each.call.session, each.call.number), m.Found(blocks, b"", b""))
            silent.transports[-1].inbox.append([bytes(frame) for frame in frames])
    for blocks, each in enumerate(reversed(waiting)):
        assert each.over and each.call.reply == m.Found(blocks, b"", b"")


def test_a_session_that_ends_ends_the_wait_of_every_thread(silent: Any) -> None:
    connection = silent.connected()
    waiting = [Waiting(connection) for _ in range(3)]
    connection.start_over()
    assert [(each.over, each.call.failure) for each in waiting] == [(True, "session_lost")] * 3
    assert connection.wait_until_up(2_000)


# -- the pool


def test_who_copies_does_not_wait_for_who_waits_for_a_reply(simulation: Make) -> None:
    sim = simulation(shared_memory=True)
    connection = sim.connected()
    inside, go_on = held_in_wait(sim)
    call = connection.call(m.Ping(), NEVER_MS)
    thread = threading.Thread(target=connection.wait, args=(call,), daemon=True)
    thread.start()
    assert inside.wait(30)
    with connection.pool(1) as pool:  # the lock is held for as long as this takes
        assert pool is not None and len(pool[0].view(0, 64)) == 64
    go_on.set()
    thread.join(30)
    assert call.reply is not None


def test_whoever_has_the_pool_has_the_memory_of_that_session_however_often_it_ends(
    simulation: Make,
) -> None:
    sim = simulation(shared_memory=True)
    connection = sim.connected()
    stop, seen, wrong = threading.Event(), [0], []

    def touch() -> None:
        while not stop.is_set():
            epoch = connection.epoch
            with connection.pool(epoch) as pool:
                if pool is None:
                    continue
                seen[0] += 1
                if pool[1].layout < 1 or epoch != 1:
                    wrong.append(pool)
                address = int(pool[0].addresses(np.array([0]), 64)[0])
                ctypes.memset(
                    address, 7, 64
                )  # were it not mapped any longer, this would be the end

    threads = [threading.Thread(target=touch, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        before = seen[0]
        assert eventually(lambda before=before: seen[0] > before)  # type: ignore[misc]
        connection.start_over()
        assert connection.wait_until_up(2_000)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert wrong == [] and connection.shared_pool.holders == 1
    connection.close()
    pool = sim.pools[0]
    mapped = Path("/proc/self/maps").read_text().count(f"{pool.directory}/segment-")
    assert mapped == -(-pool.pool_bytes // pool.segment_bytes), (
        "only the server's own mapping is left"
    )


# -- the end


def test_close_ends_the_wait_of_another_thread(silent: Any) -> None:
    connection = silent.connected()
    waiting = Waiting(connection)
    connection.close()
    assert waiting.over and waiting.call.failure == "session_lost"
    assert silent.recorder.count(m.Goodbye) == 1
    assert connection.call(m.Ping(), 100).failure == "not_connected"


def test_close_in_two_threads_at_once_lets_go_once(silent: Any) -> None:
    connection = silent.connected()
    waiting = Waiting(connection)
    transport = silent.transports[-1]
    closed, close = [0], transport.close

    def count() -> None:
        closed[0] += 1
        close()

    transport.close = count
    begin = threading.Barrier(2)

    def end() -> None:
        begin.wait()
        connection.close()

    threads = [threading.Thread(target=end, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert closed == [1] and waiting.over


def test_a_second_close_that_waited_for_its_goodbye_finds_all_done(silent: Any) -> None:
    """The order that two threads need some luck for."""
    connection = silent.connected()
    closed: list[str] = []
    transport = silent.transports[-1]
    close, wait = transport.close, connection.wait
    transport.close = lambda: (closed.append("transport"), close())

    def wait_while_another_closes(call: Call) -> Any:
        connection.wait = wait  # type: ignore[method-assign]
        connection.close()
        return wait(call)

    connection.wait = wait_while_another_closes  # type: ignore[method-assign]
    connection.close()
    assert closed == ["transport"]
