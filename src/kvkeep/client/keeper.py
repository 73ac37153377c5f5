"""A thread that keeps connections alive while their owners do something else: pings, reconnects,
gives back."""

from __future__ import annotations

import atexit
import threading
import weakref

from kvkeep.client.connection import Connection
from kvkeep.client.threads import Threads

_INTERVAL_S = 0.05


class Keeper:
    """Polls connections for as long as somebody else holds them. One thread for the whole
    process."""

    _instance: Keeper | None = None
    _instance_lock = threading.Lock()

    def __init__(self, threads: Threads = threading) -> None:
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._threads = threads
        self._lock = threads.Lock()
        self._thread = threads.Thread(target=self._run, name="kvkeep-keeper", daemon=True)
        self._thread.start()

    @classmethod
    def keep(cls, connection: Connection) -> None:
        """Polls this connection from now on."""
        with cls._instance_lock:
            if (
                cls._instance is None or not cls._instance._thread.is_alive()
            ):  # a fork leaves the thread behind
                cls._instance = Keeper()
                atexit.register(cls._instance._say_goodbye)
        cls._instance.add(connection)

    def add(self, connection: Connection) -> None:
        with self._lock:
            self._connections.add(connection)

    def _run(self) -> None:
        pause = self._threads.Event()
        while True:
            with self._lock:
                connections = list(self._connections)
            rests_s = [_keep(connections.pop()) for _ in range(len(connections))]
            pause.wait(max(_INTERVAL_S, min(rests_s, default=0.0)))

    def _say_goodbye(self) -> None:
        """At exit, for owners who did not: a session that ends in order is no dead process in the
        server's log."""
        for connection in list(self._connections):
            connection.close()


def _keep(connection: Connection) -> float:
    """How long it can do without."""
    connection.poll()
    return connection.rest_s
