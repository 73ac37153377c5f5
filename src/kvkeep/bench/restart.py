"""How soon a server that was killed serves again, and how much of what it had is still there.

A real server, filled by a real client through shared memory; `kill -9`; the same command again. The
client reconnects by itself, and asks until it is answered: that is the time. Then it asks for
everything that was ready, loads all of it and compares every byte."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.cache import Cache, connect
from kvkeep.client.options import ClientOptions
from kvkeep.errors import SettingsError, Unavailable
from kvkeep.testing.process import ServerProcess
from kvkeep.units import GIB, MIB, format_size

_CHAIN_BLOCKS = 64
_SHM = "/dev/shm"
_LEFT_FREE_BYTES = GIB  # for everybody else
_ASK_EVERY_S = 0.002
_GIVE_UP_S = 120.0

# What options mean here, where it is more than their name says elsewhere.
OPTIONS = {
    "bytes": "How much is stored; less if the machine has less.",
    "block_bytes": "Size of a block.",
}


def run(bytes: int = 8 * GIB, block_bytes: int = 64 * 1024) -> dict[str, Any]:
    """Fills, kills, starts again, asks for all of it."""
    if block_bytes % 4096:
        raise SettingsError(
            f"--block-bytes {block_bytes} is no multiple of 4096", "use 64KiB or 1MiB, say"
        )
    asked, bytes = bytes, min(bytes, _room())
    chains = bytes // (_CHAIN_BLOCKS * block_bytes)
    if not chains:
        raise SettingsError(
            f"{format_size(bytes)} hold not one chain of {_CHAIN_BLOCKS} blocks", "use more --bytes"
        )
    content = _Content(block_bytes)
    pool_mib = bytes // MIB * 65 // 64 + 64
    with (
        ServerProcess("--pool-size", f"{pool_mib}MiB") as server,
        _client(server.address, block_bytes) as cache,
    ):
        _wait_until_ready(server)
        for chain in range(chains):
            cache.put(_tokens(chain), content.of(chain))
        ready = sum(cache.contains(_tokens(chain)) for chain in range(chains))
        with ThreadPoolExecutor(max_workers=1) as beside:
            killed = time.monotonic()
            answered = beside.submit(_until_answered, cache, cache.connection.epoch, killed)
            server.stop(signal.SIGKILL)
            server.start()
            started_s = time.monotonic() - killed
            serving_again_s = answered.result()
        hits = [cache.contains(_tokens(chain)) for chain in range(chains)]
        wrong = sum(
            _wrong_bytes(cache.get(_tokens(chain)), content.of(chain)) for chain in range(chains)
        )
        restart = server.ask()["restart"]
    return {
        "bytes": ready * block_bytes,
        "bytes_asked": asked,
        "blocks": ready,
        "serving_again_s": round(serving_again_s, 3),
        "process_started_s": round(started_s, 3),
        "adoption_s": restart["adoption_seconds"],
        "hit_again": sum(hits),
        "hit_fraction": round(sum(hits) / max(ready, 1), 5),
        "dropped": restart["dropped_at_adoption"],
        "wrong_bytes": wrong,
    }


class _Content:
    """What each block holds: random numbers, and its own number in all of them."""

    def __init__(self, block_bytes: int) -> None:
        words = np.random.default_rng(1).integers(
            0, 1 << 63, (1, block_bytes // 8), dtype=np.uint64
        )
        self._words = np.repeat(words, _CHAIN_BLOCKS, axis=0)

    def of(self, chain: int) -> NDArray[np.uint64]:
        numbers = np.arange(chain * _CHAIN_BLOCKS, (chain + 1) * _CHAIN_BLOCKS, dtype=np.uint64)
        return self._words + numbers[:, None]


def _room() -> int:
    """What the memory file system and the host can spare."""
    space = os.statvfs(_SHM)
    free = min(
        space.f_bavail * space.f_frsize, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    return max(free - _LEFT_FREE_BYTES, 0) * 15 // 16


def _client(address: str, block_bytes: int) -> Cache:
    return connect(
        model="bench",
        revision="1",
        block_tokens=1,
        block_shape=(block_bytes // 8,),
        dtype="uint64",
        required=True,
        wait_ms=10_000,
        options=ClientOptions(
            address, lookup_deadline_ms=10_000, ping_interval_ms=100, reconnect_interval_ms=50
        ),
    )


def _tokens(chain: int) -> list[int]:
    return list(range(chain * _CHAIN_BLOCKS, (chain + 1) * _CHAIN_BLOCKS))


def _until_answered(cache: Cache, epoch: int, killed: float) -> float:
    """Seconds since then until a lookup found something, on another server than that of this
    epoch."""
    while cache.connection.epoch in (0, epoch) or not cache.contains(_tokens(0)):
        if time.monotonic() - killed > _GIVE_UP_S:
            raise Unavailable(f"no answer within {_GIVE_UP_S:g} s: {cache.connection.refusal}")
        time.sleep(_ASK_EVERY_S)
    return time.monotonic() - killed


def _wrong_bytes(loaded: NDArray[Any], expected: NDArray[np.uint64]) -> int:
    return (
        int((loaded.view(np.uint8) != expected[: len(loaded)].view(np.uint8)).sum())
        if len(loaded)
        else 0
    )


def _wait_until_ready(server: ServerProcess) -> None:
    """Until all of the pool's memory is there: what is measured is a server that has run for a
    while."""
    while not server.ask()["ready"]:
        time.sleep(0.05)
