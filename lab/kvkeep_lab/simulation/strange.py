"""Servers that are not as they should be: of another version, or in this process so that they can
be broken."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvkeep.server.connections import Connections
from kvkeep.server.daemon import Daemon
from kvkeep.server.listeners import Listeners
from kvkeep.server.settings import Settings
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, encode


@contextlib.contextmanager
def server_of_version(version: int) -> Iterator[str]:
    """The address of one that speaks another version of the protocol, and answers everything in
    it."""
    listeners, ending = Listeners("tcp://127.0.0.1:0"), threading.Event()
    connections = Connections(listeners, 16, 1 << 20)

    def answer(frames: list[bytes], caller: object, peer: int) -> list[Any]:
        return encode(Header(0, decode_header(frames).number, version=version), m.Done())

    def run() -> None:
        while not ending.is_set():
            connections.wait(0.02)
            connections.serve(answer)

    thread = threading.Thread(target=run)
    thread.start()
    yield listeners.address
    ending.set()
    thread.join()
    listeners.close()
    connections.close()


@contextlib.contextmanager
def daemon_in_thread(directory: Path, *flags: str) -> Iterator[Daemon]:
    """A real daemon, whose store can be broken."""
    places = (
        "--address",
        "tcp://127.0.0.1:0",
        "--shm-dir",
        str(directory),
        "--state-dir",
        str(directory / "state"),
    )
    made = Daemon(Settings.load(None, {}, [*flags, *places, "--shutdown-grace", "0s"]))
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        assert made.ready.wait(60)
        yield made
    finally:
        made.stop()
        thread.join()
        made.close()
