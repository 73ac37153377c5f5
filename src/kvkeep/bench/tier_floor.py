"""What a disk does without kvkeep: `fio`, or threads of this process where there is no fio. Both read
and write with O_DIRECT, with as many threads as the mover."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvkeep.errors import KVKeepError
from kvkeep.tiers.mover import JOB_BYTES
from kvkeep.tiers.mover_process import NICE, THREADS
from kvkeep.units import MIB

_BEGINS_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.01


def has_fio() -> bool:
    return shutil.which("fio") is not None


def fio(data: Path, direction: str, block_bytes: int, total_bytes: int) -> float:
    """GB/s of fio at random places of the file."""
    command = _command(data, direction, block_bytes)
    command += [f"--io_size={total_bytes // THREADS}", "--group_reporting", "--output-format=json"]
    if direction == "write":
        command += [f"--fdatasync={JOB_BYTES // block_bytes}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _failed(done.stderr)
    (job,) = json.loads(done.stdout)["jobs"]
    return float(job[direction]["bw_bytes"]) / 1e9


class Reading:
    """What fio has read, from when on."""

    def __init__(self, pid: int) -> None:
        self._io = Path(f"/proc/{pid}/io")
        self._before, self._since_s = self.read_bytes(), time.perf_counter()

    def read_bytes(self) -> int:
        (line,) = (line for line in self._io.read_text().splitlines() if "read_bytes" in line)
        return int(line.split()[1])

    def again(self) -> None:
        """What counts begins now."""
        self._before, self._since_s = self.read_bytes(), time.perf_counter()

    def moved(self) -> tuple[int, float]:
        """Bytes and seconds."""
        return self.read_bytes() - self._before, time.perf_counter() - self._since_s


@contextmanager
def reading(data: Path, bytes_per_s: float) -> Iterator[Reading]:
    """fio reads at random places of the file meanwhile, at this rate."""
    command = [
        *_command(data, "read", MIB),
        *("--time_based", "--runtime=1d", f"--rate={max(int(bytes_per_s / THREADS), MIB)}"),
    ]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said) as process,
    ):
        try:
            read = Reading(process.pid)
            until_s = time.monotonic() + _BEGINS_WITHIN_S
            while process.poll() is None and not read.moved()[0] and time.monotonic() < until_s:
                time.sleep(_LOOK_EVERY_S)
            if process.poll() is not None or not read.moved()[0]:
                said.seek(0)
                raise _failed(said.read())
            yield read
        finally:
            process.kill()


def _failed(said: str) -> KVKeepError:
    return KVKeepError(f"fio failed: {said.strip()}", "is O_DIRECT possible there?")


def _command(data: Path, direction: str, block_bytes: int) -> list[str]:
    return [
        *("nice", "-n", str(NICE), "fio", "--name=floor", f"--filename={data}"),
        *(f"--size={data.stat().st_size}", "--ioengine=psync", "--direct=1", "--thread"),
        *(f"--numjobs={THREADS}", f"--bs={block_bytes}", f"--rw=rand{direction}"),
        *("--norandommap", "--randrepeat=0"),
    ]


def threads(data: Path, direction: str, block_bytes: int, total_bytes: int) -> float:
    """GB/s of threads that do as fio would."""
    places = data.stat().st_size // block_bytes
    blocks = total_bytes // THREADS // block_bytes
    descriptor = os.open(data, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)

    def move(seed: int) -> None:
        at = np.random.default_rng(seed).integers(0, places, blocks) * block_bytes
        with mmap.mmap(-1, block_bytes) as memory:
            for number, offset in enumerate(at.tolist(), start=1):
                if direction == "read":
                    os.preadv(descriptor, [memory], offset)
                    continue
                os.pwritev(descriptor, [memory], offset)
                if number % (JOB_BYTES // block_bytes) == 0:
                    os.fdatasync(descriptor)

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            started = time.perf_counter()
            list(pool.map(move, range(THREADS)))
            return blocks * THREADS * block_bytes / (time.perf_counter() - started) / 1e9
    finally:
        os.close(descriptor)
