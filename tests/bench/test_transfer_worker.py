"""An engine's side stores and loads through a real server, and takes no part for the whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kvkeep.bench.transfer_worker import EngineSide
from kvkeep.errors import RequestError, Unavailable
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.testing.process import ServerProcess

BLOCKS = 8
LAYER_BYTES = 4096
FIRST, SECOND = np.arange(0, BLOCKS), np.arange(BLOCKS, 2 * BLOCKS)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--pool-size", "16MiB", "--slab-size", "1MiB") as server:
        yield server


def engine_memory() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    rng = np.random.default_rng(1)
    return {name: rng.integers(0, 256, (2 * BLOCKS, LAYER_BYTES), dtype=np.uint8) for name in "ab"}


def test_what_is_stored_is_loaded_alone_and_both_at_once(server: ServerProcess) -> None:
    layers = engine_memory()
    keys = [os.urandom(BLOCKS * KEY_BYTES) for _ in range(2)]
    with closing(EngineSide(server.address, layers, 2 * LAYER_BYTES, True, 0.0002)) as side:
        assert side.store(keys[0], FIRST) > 0
        took = side.load(keys[0], SECOND)
        assert 0 < took.lookup_seconds < took.seconds
        for layer in layers.values():
            assert (layer[FIRST] == layer[SECOND]).all()
            layer[SECOND] = 0
        assert side.both(keys[1], FIRST, keys[0], SECOND) > 0
        assert all((layer[FIRST] == layer[SECOND]).all() for layer in layers.values())
        assert side.load(keys[1][: 3 * KEY_BYTES], SECOND[:3]).seconds > 0


def test_what_does_not_come_through_whole_has_no_time(server: ServerProcess) -> None:
    with closing(
        EngineSide(server.address, engine_memory(), 2 * LAYER_BYTES, True, 0.0002)
    ) as side:
        keys = os.urandom(BLOCKS * KEY_BYTES)
        with pytest.raises(Unavailable, match="0 of 8 blocks found"):
            side.load(keys, FIRST)
        side.store(keys, FIRST)
        with pytest.raises(Unavailable, match="0 of 8 blocks stored"):
            side.store(keys, FIRST)  # the server has them already: nothing moved


def test_memory_that_does_not_fit_ends_at_once(server: ServerProcess) -> None:
    with pytest.raises(RequestError, match="bytes a block"):
        EngineSide(server.address, engine_memory(), LAYER_BYTES, True, 0.0002)
