"""The client library of a shared tier alone: calls with contiguous memory, from as many threads as the
tier's process has, and as niced; nothing is verified. Objects have the size of a block.

file       made in one directory, written with one call and not synchronised, as by the tier; read
           where the kernel has them in memory
valkey     SET of memory that is not copied before, and GET, in pipelines of 1 MiB or one block
s3         16 requests side by side
mooncake   memory that is registered, in calls of 4 MiB

A process that reads and writes lines of JSON; {"direction": "end"} removes its files.

python -m kvkeep.bench.shared_floor ADDRESS PLACE"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvkeep.tiers.checked_tier import CheckedTier
from kvkeep.tiers.mover import JOB_BYTES, Fetch, Share
from kvkeep.tiers.mover_process import NICE
from kvkeep.tiers.opening import open_tier
from kvkeep.tiers.shared_process import THREADS
from kvkeep.tiers.tier_address import TierAddress, parse_tier
from kvkeep.units import MIB

_MEMORY_BYTES = 32 * MIB
_S3_REQUESTS = 16  # side by side, as the tier has


class Library:
    """Writes and reads objects as fast as the library does with a tier's threads."""

    def __init__(self, address: TierAddress, place: str) -> None:
        tier = open_tier(address)
        assert isinstance(tier, CheckedTier)
        medium: Any = tier.medium
        self._place = place
        self._nbytes = 1
        self._source = np.frombuffer(secrets.token_bytes(_MEMORY_BYTES), np.uint8)
        self._target = np.empty(_MEMORY_BYTES, np.uint8)
        self._round = 0
        self._medium = medium
        scheme = address.scheme
        self._is_s3 = scheme == "s3"
        self._write, self._read = {
            "file": (self._write_files, self._read_files),
            "s3": (self._put_objects, self._get_objects),
            "mooncake": (self._put_from, self._get_into),
        }.get(scheme, (self._set, self._get))
        if scheme == "mooncake":
            for memory in (self._source, self._target):
                medium.client.register_buffer(memory.ctypes.data, memory.nbytes)
        self._directory = address.directory / "tmp" / f"bench-{secrets.token_hex(8)}"

    def move(self, direction: str, nbytes: int, total_bytes: int) -> float:
        """Writes new objects, or reads those that were written last. GB/s."""
        self._nbytes = nbytes
        is_write = direction == "write"
        if is_write:
            self._round += 1
            self.close()
        blocks = -(-total_bytes // JOB_BYTES) * (JOB_BYTES // self._nbytes)
        many = 1 if self._is_s3 else max(1, min(64, self._medium.best_bytes // nbytes))
        calls = [range(at, min(at + many, blocks)) for at in range(0, blocks, many)]
        move = self._write if is_write else self._read
        started = time.perf_counter()
        count = THREADS[Share if is_write else Fetch]
        count = _S3_REQUESTS if self._is_s3 else count
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(move, calls))
        return blocks * self._nbytes / (time.perf_counter() - started) / 1e9

    def close(self) -> None:
        """Removes the files of a round. Objects of services are under a place that the caller
        removes."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _name(self, number: int) -> str:
        return f"{self._place}{self._round}/{number:032x}"

    def _at(self, memory: Any, number: int) -> Any:
        first = number % (len(memory) // self._nbytes) * self._nbytes
        return memory[first : first + self._nbytes]

    def _write_files(self, numbers: Sequence[int]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for number in numbers:
            path = self._directory / f"{self._round}-{number}"
            path.write_bytes(self._at(self._source, number))

    def _read_files(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            with (self._directory / f"{self._round}-{number}").open("rb", buffering=0) as file:
                file.readinto(self._at(self._target, number))

    def _set(self, numbers: Sequence[int]) -> None:
        pipeline = self._medium.client.pipeline(transaction=False)
        for number in numbers:
            pipeline.set(self._name(number), self._at(self._source, number).data)
        pipeline.execute()

    def _get(self, numbers: Sequence[int]) -> None:
        pipeline = self._medium.client.pipeline(transaction=False)
        for number in numbers:
            pipeline.get(self._name(number))
        assert all(len(each) == self._nbytes for each in pipeline.execute())

    def _put_objects(self, numbers: Sequence[int]) -> None:
        obstore = importlib.import_module("obstore")
        for number in numbers:
            data = self._at(self._source, number).tobytes()
            obstore.put(self._medium.store, self._name(number), data)

    def _get_objects(self, numbers: Sequence[int]) -> None:
        obstore = importlib.import_module("obstore")
        for number in numbers:
            found = obstore.get_range(
                self._medium.store, self._name(number), start=0, length=self._nbytes
            )
            assert len(found) == self._nbytes

    def _put_from(self, numbers: Sequence[int]) -> None:
        codes = self._medium.client.batch_put_from(
            [self._name(number) for number in numbers],
            [self._at(self._source, number).ctypes.data for number in numbers],
            [self._nbytes] * len(numbers),
        )
        assert not any(codes), codes

    def _get_into(self, numbers: Sequence[int]) -> None:
        sizes = self._medium.client.batch_get_into(
            [self._name(number) for number in numbers],
            [self._at(self._target, number).ctypes.data for number in numbers],
            [self._nbytes] * len(numbers),
        )
        assert set(sizes) == {self._nbytes}, sizes


def main() -> None:
    os.nice(NICE)
    library = Library(parse_tier(sys.argv[1]), sys.argv[2])
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["direction"] == "end":
            library.close()
            print(json.dumps({}), flush=True)
            return
        gbps = library.move(asked["direction"], asked["nbytes"], asked["total"])
        print(json.dumps({"gbps": gbps}), flush=True)


if __name__ == "__main__":
    main()
