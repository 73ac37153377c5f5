"""Servers that are not as they should be: of another version, or in this process so that they can be broken."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import zmq

from kvkeep.server.daemon import Daemon
from kvkeep.server.settings import Settings
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, encode


@contextlib.contextmanager
def server_of_version(version: int) -> Iterator[str]:
    """The address of one that speaks another version of the protocol, and answers everything in it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, ending = context.socket(zmq.ROUTER), threading.Event()
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def answer() -> None:
        while not ending.is_set():
            if router.poll(20):
                peer, *frames = router.recv_multipart()
                header = decode_header(frames)
                router.send_multipart([peer, *encode(Header(0, header.number, version=version), m.Done())])

    thread = threading.Thread(target=answer)
    thread.start()
    yield f"tcp://127.0.0.1:{port}"
    ending.set()
    thread.join()
    context.destroy(linger=0)


@contextlib.contextmanager
def daemon_in_thread(directory: Path, *flags: str) -> Iterator[Daemon]:
    """A real daemon, whose store can be broken."""
    places = ("--address", "tcp://127.0.0.1:0", "--shm-dir", str(directory), "--state-dir", str(directory / "state"))
    made = Daemon(Settings.load(None, {}, [*flags, *places, "--shutdown-grace", "0s"]))
    thread = threading.Thread(target=made.run)
    thread.start()
    assert made.ready.wait(60)
    yield made
    made.stop()
    thread.join()
    made.close()
