"""The keeper's thread keeps connections alive that nobody polls, and none that nobody holds."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

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


POLLED = """
import os, threading
from kvkeep.client.connection import Heartbeat

class Polled:
    rest_s, background = 0.0, None
    def __init__(self): self.seen = threading.Event()
    def poll(self): self.seen.set()
    def close(self): pass

"""
SEVERAL = """
kept = [Polled() for _ in range(3)]
for each in kept:
    Heartbeat.keep(each)
assert all(each.seen.wait(30) for each in kept)
assert [each.name for each in threading.enumerate()].count("kvkeep-heartbeat") == 1
"""
AFTER_A_FORK = """
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


@pytest.mark.parametrize(
    "program", [SEVERAL, AFTER_A_FORK], ids=["one for all connections", "one of its own in a fork"]
)
def test_a_process_has_one_keeper(program: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", POLLED + program]
    assert subprocess.run(command, check=False).returncode == 0
