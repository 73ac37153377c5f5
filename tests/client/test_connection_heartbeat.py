"""The keeper's thread keeps connections alive that nobody polls, and none that nobody holds."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from kvkeep.client.connection import Connection, Heartbeat
from kvkeep.client.options import ClientOptions
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.shape import BlockShape
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m

Make = Callable[..., Any]
SHAPE = BlockShape(
    ModelIdentity(model="k", revision="1", kv_dtype="|u1", block_tokens=4, content="l"), (64,)
)


def test_a_server_that_comes_late_and_one_that_comes_back_are_found_without_anyone_polling() -> (
    None
):
    server = ServerProcess("--pool-size", "1MiB", "--slab-size", "64KiB")
    with server:
        address = server.address
        server.stop()
        connection = Connection(
            SHAPE, ClientOptions(address=address, ping_interval_ms=50, reconnect_interval_ms=50)
        )
        Heartbeat.keep(connection)
        assert not connection.up
        epochs = []
        for _ in range(2):
            server.start()
            assert eventually(lambda: connection.up and connection.epoch not in epochs)
            epochs.append(connection.epoch)
            server.stop()
        connection.close()
    assert connection.counters.sessions == 2


def test_who_waits_for_nothing_need_not_be_polled_often(simulation: Make) -> None:
    connection = simulation().connection()
    short_s, up = connection.rest_s, connection.wait_until_up(1_000)
    assert up and connection.rest_s > short_s
    call = connection.call(m.Ping(), 200)
    assert connection.rest_s == short_s and connection.wait(call) and connection.rest_s > short_s
    connection.close()
    assert connection.rest_s > short_s


def test_one_thread_keeps_all_connections() -> None:
    polled: list[str] = []
    kept = [Polled(polled, name) for name in "abc"]
    for each in kept:
        Heartbeat.keep(each)  # type: ignore[arg-type]
    assert eventually(lambda: {"a", "b", "c"} <= set(polled))
    assert sum(thread.name == "kvkeep-heartbeat" for thread in threading.enumerate()) == 1


class Polled:
    rest_s = 0.0

    def __init__(self, polled: list[str], name: str) -> None:
        self.polled, self.name = polled, name

    def poll(self) -> None:
        self.polled.append(self.name)


def test_a_dropped_connection_is_not_kept_alive_and_its_lock_falls(simulation: Make) -> None:
    sim = simulation(shared_memory=True)
    sim.connected()
    connection = weakref.ref(sim.connections[-1])
    Heartbeat.keep(sim.connections.pop())
    (session,) = sim.server.service.sessions.all()
    assert session.watch.is_held() or connection() is None
    gc.collect()
    assert eventually(lambda: connection() is None)
    assert not session.watch.is_held()
    assert sim.server.service.end_dead_sessions(sim.network.clock.now_ms) == 1
    assert not sim.store.sessions


AFTER_A_FORK = """
import os, threading
from kvkeep.client.connection import Heartbeat

class Polled:
    rest_s = 0.0
    def __init__(self): self.seen = threading.Event()
    def poll(self): self.seen.set()

before = Polled()
Heartbeat.keep(before)
assert before.seen.wait(30)
child = os.fork()
if not child:
    after = Polled()
    Heartbeat.keep(after)
    os._exit(0 if after.seen.wait(30) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_gets_a_keeper_of_its_own() -> None:
    assert (
        subprocess.run([sys.executable, "-W", "ignore", "-c", AFTER_A_FORK], check=False).returncode
        == 0
    )
