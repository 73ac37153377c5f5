"""A link that is slow, and a server that is not: what takes long to cross is no outage."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvkeep
from kvkeep.client.options import ClientOptions
from kvkeep.testing.process import ServerProcess
from kvkeep_lab.simulation.relay import Relay

BYTES_A_SECOND = 4 << 20
BLOCK = (1 << 20,)


@pytest.mark.parametrize("looks", [False, True], ids=["alone", "with lookups beside"])
def test_blocks_cross_a_slow_link_however_long_that_takes(looks: bool) -> None:
    tokens, blocks = (
        list(range(8)),
        np.random.default_rng(7).integers(0, 255, (8, *BLOCK), dtype=np.uint8),
    )
    with (
        ServerProcess("--pool-size", "64MiB", "--slab-size", "2MiB") as server,
        Relay(server.address, BYTES_A_SECOND) as link,
    ):
        # Both are much shorter than the message of 8 MiB is on its way.
        options = ClientOptions(
            link.address,
            shared_memory=False,
            lookup_deadline_ms=300,
            ping_interval_ms=300,
            store_deadline_ms=60_000,
        )
        with kvkeep.connect(
            model="slow",
            revision="1",
            block_tokens=1,
            block_shape=BLOCK,
            dtype="uint8",
            wait_ms=30_000,
            options=options,
        ) as cache:
            assert cache.connected
            over = threading.Event()

            def look() -> None:
                while not over.wait(0.02):
                    cache.contains([99])

            beside = threading.Thread(target=look)
            if looks:
                beside.start()
            try:
                assert cache.put(tokens, blocks) == 8
            finally:
                over.set()
                if looks:
                    beside.join()
            found = next((found for _ in range(5) if len(found := cache.get(tokens)) == 8), None)
            assert found is not None and (found == blocks).all()
