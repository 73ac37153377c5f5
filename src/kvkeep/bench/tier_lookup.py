"""How long lookups of blocks in memory take while a tier moves blocks, against a server without
a tier.

Two servers, measured in turns. A client looks up the same 512 blocks, which stay in memory; another
asks for one prefix after the other that only the tier has, so that the tier is busy. The server
without a tier gets the same requests: alone, and beside a disk also while fio reads from it as fast
as the tier did. What that costs on a host with few processors no tier can avoid."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.bench import tier_floor
from kvkeep.bench.progress import say
from kvkeep.bench.shared_tier import own_salt
from kvkeep.client.cache import Cache, connect
from kvkeep.client.options import ClientOptions
from kvkeep.errors import KVKeepError
from kvkeep.testing.process import JsonProcess, ServerProcess
from kvkeep.tiers.service_address import given_credentials
from kvkeep.tiers.tier_address import TierAddress
from kvkeep.units import KIB, MIB

PROBED_BLOCK_BYTES = 64 * KIB
LEAST_POOL_BYTES = 64 * MIB
_MOST_POOL_BYTES = 256 * MIB
_FLOOR_BYTES = 256 * MIB
_PROBED_BLOCKS = 512
_CHAIN_BLOCKS = 64
_ASK_EVERY_S = 0.002
_GIVE_UP_S = 120.0


def lookup_times(
    tier: TierAddress, samples: int, turns: int = 8, most_gbps: float = 0.0
) -> dict[str, Any]:
    """The 99th percentile of a lookup with and without the tier, and how fast the tier moved
    meanwhile: at most `most_gbps`, unless that is 0. For a disk also the 99th percentile without
    the tier, beside fio (`p99_ms_floor`; None if there is no fio or no disk). The tier must have at least four
    times LEAST_POOL_BYTES."""
    pool_bytes = min(tier.size_bytes // 4 or LEAST_POOL_BYTES, _MOST_POOL_BYTES) // MIB * MIB
    took: dict[str, list[float]] = {"without": [], "with": [], "floor": []}
    moved, read = _Moved(), _Moved()
    with ExitStack() as ends:
        salt = ends.enter_context(own_salt(tier))
        plain = ends.enter_context(_Server("without", salt, pool_bytes))
        tiered = ends.enter_context(_Server("with", salt, pool_bytes, "--tier", str(tier)))
        for server in (plain, tiered):
            server.fill()
        data = None
        if not tier.is_shared and tier_floor.has_fio():
            data = ends.enter_context(_written_file(tier.directory.parent))
        for turn in range(turns):
            say(f"lookups beside the tier, {turn + 1} of {turns}")
            for server in (plain, tiered) if turn % 2 else (tiered, plain):
                before = server.moved_bytes()
                with server.moving(most_gbps):
                    started = time.perf_counter()
                    took[server.name] += server.lookups(samples // turns)
                    if server is tiered:
                        moved.add(server.moved_bytes() - before, time.perf_counter() - started)
            if data is not None:
                with tier_floor.reading(data, moved.bytes_per_s) as fio, plain.moving(most_gbps):
                    fio.again()
                    took["floor"] += plain.lookups(samples // turns)
                    read.add(*fio.moved())
    p99_ms = {
        name: round(float(np.percentile(times, 99)) * 1e3, 3)
        for name, times in took.items()
        if times
    }
    return {
        "p99_ms_without": p99_ms["without"],
        "p99_ms_with": p99_ms["with"],
        "moved_gbps": round(moved.bytes_per_s / 1e9, 3),
        "samples": len(took["with"]),
        "p99_ms_floor": p99_ms.get("floor"),
        "floor_gbps": round(read.bytes_per_s / 1e9, 3) if took["floor"] else None,
    }


@contextmanager
def _written_file(directory: Path) -> Iterator[Path]:
    """A file for fio. In that of the tier it would read what was never written, which takes no
    input."""
    with tempfile.NamedTemporaryFile(prefix="kvkeep-bench-", dir=directory) as file:
        noise = secrets.token_bytes(MIB)
        for _ in range(_FLOOR_BYTES // MIB):
            file.write(noise)
        file.flush()
        os.fsync(file.fileno())
        yield Path(file.name)


@dataclass
class _Moved:
    nbytes: int = 0
    seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        self.nbytes += nbytes
        self.seconds += seconds

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds if self.seconds else 0.0


class _Server:
    """A server, and a client that looks up. The client that keeps the tier busy is a process."""

    def __init__(self, name: str, salt: str, pool_bytes: int, *flags: str) -> None:
        self.name = name
        self._salt = salt
        self._flags = ("--pool-size", f"{pool_bytes // MIB}MiB", *flags)
        self._chains = 2 * pool_bytes // PROBED_BLOCK_BYTES // _CHAIN_BLOCKS
        self._turn = 0
        self._noise = np.random.default_rng(1).integers(
            0, 1 << 63, (_PROBED_BLOCKS, PROBED_BLOCK_BYTES // 8), dtype=np.uint64
        )

    def __enter__(self) -> _Server:
        with ExitStack() as ends:
            self._process = ends.enter_context(
                ServerProcess(*self._flags, environment=given_credentials())
            )
            address = self._process.address
            self._prober = ends.enter_context(_client(address))
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def fill(self) -> None:
        """Stores twice what memory holds, and waits until the tier has it."""
        until = time.monotonic() + _GIVE_UP_S
        for chain in range(self._chains):
            wanted = (chain + 1) * _CHAIN_BLOCKS
            self._prober.put(_tokens(chain), self._noise[:_CHAIN_BLOCKS], salt=self._salt)
            while self.name == "with" and self._written() < wanted - 8 * _CHAIN_BLOCKS:
                if time.monotonic() > until:
                    raise KVKeepError(
                        "the tier did not take what was stored", "is it large enough?"
                    )
                time.sleep(_ASK_EVERY_S)

    def lookups(self, count: int) -> list[float]:
        """Seconds of each lookup."""
        took = []
        for _ in range(count):
            started = time.perf_counter()
            found = self._prober.contains(_probed(), salt=self._salt)
            took.append(time.perf_counter() - started)
            if found != _PROBED_BLOCKS:
                raise KVKeepError(f"{found} of {_PROBED_BLOCKS} blocks were in memory")
            time.sleep(_ASK_EVERY_S / 2)
        return took

    @contextmanager
    def moving(self, most_gbps: float) -> Iterator[None]:
        """Asks for prefixes that are not in memory meanwhile, and waits for the last of them. The
        blocks that are looked up are in memory when it begins."""
        self._prober.put(_probed(), self._noise, salt=self._salt)
        self._turn += 1
        figures = str(self._chains), str(self._turn), str(most_gbps)
        program = "-m", __spec__.name, self._process.address, self._salt, *figures
        asker = JsonProcess("the client that keeps the tier busy", program)
        try:
            asker.receive(_GIVE_UP_S)
            yield
        finally:
            asker.end(within_s=_GIVE_UP_S)
            while self.name == "with" and self._tier()["promotions"]:
                time.sleep(_ASK_EVERY_S)

    def moved_bytes(self) -> int:
        if self.name == "without":
            return 0
        counts = self._tier()["counts"]
        return int(counts["promoted_bytes"] + counts["written_bytes"])

    def _written(self) -> int:
        """Blocks. A shared tier counts those of all hosts, so what this one has written counts."""
        tier = self._tier()
        return int(tier["counts"]["written_blocks"] if tier["is_shared"] else tier["blocks"])

    def _tier(self) -> dict[str, Any]:
        (tier,) = self._process.ask("/v1/tiers")
        return dict(tier)


def _client(address: str) -> Cache:
    return connect(
        model="bench",
        revision="1",
        block_tokens=1,
        block_shape=(PROBED_BLOCK_BYTES // 8,),
        dtype="uint64",
        required=True,
        wait_ms=10_000,
        options=ClientOptions(address, lookup_deadline_ms=10_000, tier_patience="best_effort"),
    )


def _tokens(chain: int) -> list[int]:
    return list(range(chain * _CHAIN_BLOCKS, (chain + 1) * _CHAIN_BLOCKS))


def _probed() -> list[int]:
    return list(range(1 << 20, (1 << 20) + _PROBED_BLOCKS))


def main() -> None:
    """Asks for one prefix after the other until stdin ends."""
    address, salt, chains, turn = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4])
    most_gbps = float(sys.argv[5])
    chain_s = _CHAIN_BLOCKS * PROBED_BLOCK_BYTES / 1e9 / most_gbps if most_gbps else 0.0
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    with _client(address) as cache:
        print(json.dumps({"ready": True}), flush=True)
        chain = turn * chains // 3
        due_s = time.monotonic()
        while not over.wait(max(0.0 if most_gbps else _ASK_EVERY_S, due_s - time.monotonic())):
            due_s += chain_s
            chain = (chain + 1) % chains
            cache.contains(_tokens(chain), salt=salt)


if __name__ == "__main__":
    main()
