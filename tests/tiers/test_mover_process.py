"""What runs in the mover's process. How it answers is in test_mover.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

from kvkeep.testing.clock import eventually
from kvkeep.tiers.mover import PROGRAM, Start, frame_of
from kvkeep.tiers.mover_process import Pace
from kvkeep.wire.messages import PoolPlace


def test_moves_begin_one_after_the_other_at_the_rate() -> None:
    pace = Pace()
    assert [pace.reserve(100, 5.0) for _ in range(3)] == [5.0, 5.0, 5.0]
    pace.set_rate(50)
    assert [pace.reserve(100, 5.0) for _ in range(3)] == [5.0, 7.0, 9.0]
    assert pace.reserve(100, 30.0) == 30.0  # idle time is not made up for
    assert pace.reserve(100, 30.0) == 32.0


def test_a_new_rate_lets_those_go_that_wait() -> None:
    pace = Pace()
    pace.set_rate(1)
    moved: list[int] = []

    def move() -> None:
        for number in range(2):
            pace.wait(1 << 40)
            moved.append(number)

    thread = threading.Thread(target=move, daemon=True)
    thread.start()
    assert eventually(lambda: moved == [0])
    pace.set_rate(0)
    thread.join()
    assert moved == [0, 1]


def test_it_ends_with_the_socket_and_when_its_parent_ended_before_it_began() -> None:
    """Neither opens a pool or a disk."""
    place = PoolPlace("/nowhere", "/nowhere/lock", 1, 1)
    late = frame_of(Start(os.getpid() + 1, place, 1, "no.such:Files", b"", []))
    for sent in (b"", b"\1", late):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = [sys.executable, "-m", PROGRAM, str(theirs.fileno())]
            with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
                theirs.close()
                ours.sendall(sent)
                ours.shutdown(socket.SHUT_WR)
                assert ours.recv(1000) == b"" and process.wait() == 0
