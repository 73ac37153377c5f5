"""Memory of the pool that goes away under a copy: the copy fails, and every other fault is
whoever's it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvkeep.kv import native

pytestmark = pytest.mark.skipif(not native.available, reason="the C kernel is not built")

# A child process, because it is to die at the end, of a fault that is not in a copy. Its arguments
# say what happens in which order. "copies" goes through all that touches slots, with a part of
# their memory gone, in several threads.
CHILD = """
import faulthandler, mmap, os, signal, sys, threading
import numpy as np
from kvkeep.errors import PoolError
from kvkeep.kv.checksum import checksum, checksum_at
from kvkeep.kv.copy import gather, move_rows, scatter
from kvkeep.kv.runs import BlockRuns

COUNT, NBYTES, GOOD = 8, 65536, 3
file = os.memfd_create("pool")
os.ftruncate(file, COUNT * NBYTES)
pool = np.frombuffer(mmap.mmap(file, COUNT * NBYTES), np.uint8)
engine = np.random.default_rng(0).integers(0, 256, (COUNT, NBYTES), dtype=np.uint8)
runs, ids = BlockRuns.of([engine]), np.arange(COUNT)
slots = np.uint64(pool.ctypes.data) + np.arange(COUNT, dtype=np.uint64) * np.uint64(NBYTES)
sums = gather(runs, ids, slots, verify=True)

COPIES = [
    lambda slots, ids: gather(runs, ids, slots, verify=True),
    lambda slots, ids: gather(runs, ids, slots, verify=False),
    lambda slots, ids: scatter(runs, ids, slots, sums[ids]),
    lambda slots, ids: scatter(runs, ids, slots, None),
    lambda slots, ids: move_rows(engine.ctypes.data, NBYTES, slots, NBYTES, to_slots=True),
    lambda slots, ids: move_rows(engine.ctypes.data, NBYTES, slots, NBYTES, to_slots=False),
    lambda slots, ids: checksum(pool[: len(slots) * NBYTES]),
    lambda slots, ids: checksum_at(slots, NBYTES),
    lambda slots, ids: checksum_at(slots + np.uint64(3), NBYTES - 3),
]

def faults(copy):
    copy(slots[:GOOD], ids[:GOOD])
    try:
        copy(slots, ids)
    except PoolError as error:
        return "was cut off" in str(error)
    return False

def copies():
    os.ftruncate(file, GOOD * NBYTES + 100)
    failed = []
    work = lambda: failed.append(all(faults(copy) for _ in range(20) for copy in COPIES))
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    print(*failed, flush=True)

def of_the_user(number, frame):
    print("of the user", flush=True)

for word in sys.argv[1:]:
    match word:
        case "enable":
            faulthandler.enable()
        case "disable":
            faulthandler.disable()
        case "copies":
            copies()
        case "python":
            signal.signal(signal.SIGBUS, of_the_user)
        case "ignore":
            signal.signal(signal.SIGBUS, signal.SIG_IGN)
        case "default":
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
        case "fault":
            pool[-1]
        case "signal":
            os.kill(os.getpid(), signal.SIGBUS)
print("the end", flush=True)
"""


def child(words: str) -> subprocess.CompletedProcess[str]:
    command = [
        "sh",
        "-c",
        'ulimit -c 0; exec "$0" "$@"',
        sys.executable,
        "-c",
        CHILD,
        *words.split(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)


@pytest.mark.parametrize(
    "words",
    [
        "copies",
        "enable copies",
        "copies enable copies",
        "copies enable copies disable copies",
        "default copies",
        "ignore copies",
    ],
)
def test_a_copy_of_memory_that_is_gone_fails_and_ends_nobody(words: str) -> None:
    done = child(words)
    times = words.split().count("copies")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["True True True True"] * times + ["the end"]


@pytest.mark.parametrize("last", ["fault", "signal"])
@pytest.mark.parametrize(
    ("words", "tells"),
    [
        ("copies", False),
        ("enable copies", True),
        ("copies enable copies", True),
        ("copies enable", True),
        ("copies enable copies disable", False),
        ("copies enable copies disable enable copies", True),
        ("enable copies default copies", False),
    ],
)
def test_every_other_fault_is_told_once_and_ends_the_process(
    words: str, tells: bool, last: str
) -> None:
    """As if we were not there: by faulthandler, if that is on, and then by the kernel."""
    if words.endswith("disable") and last == "signal":
        pytest.skip("nobody can see that faulthandler is off, and it ignores the signal")
    done = child(f"{words} {last}")
    assert done.returncode == -signal.SIGBUS and "the end" not in done.stdout
    assert done.stderr.count("Fatal Python error: Bus error") == tells
    assert bool(done.stderr) is tells


def test_a_signal_that_a_process_sends_goes_to_the_handler_that_was_there() -> None:
    done = child("python copies signal signal")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "True True True True",
        "of the user",
        "of the user",
        "the end",
    ]
    assert child("ignore copies signal").returncode == 0
