"""Clients over a network that loses, delays and corrupts: right or missing, and nothing leaks.

A block's bytes are a function of its tenant and its whole prefix, so one wrong byte anywhere fails
the run."""

from __future__ import annotations

import hashlib
import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvkeep.client.cache import Cache
from kvkeep.client.connection import Connection
from kvkeep.client.options import ClientOptions
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.shape import BlockShape
from kvkeep_lab.simulation.server import SimulatedServer
from kvkeep_lab.simulation.wire import Faults, SimulatedNetwork

BLOCK_TOKENS = 4
BLOCK_BYTES = 3000  # no multiple of anything
SEEDS = range(int(os.environ.get("KVKEEP_TEST_SEEDS", "60")))

OPTIONS = ClientOptions(
    lookup_deadline_ms=200,
    store_deadline_ms=300,
    handshake_deadline_ms=200,
    ping_interval_ms=500,
    reconnect_interval_ms=100,
)


def oracle_blocks(tokens: list[int], salt: str | None) -> np.ndarray:
    """The bytes of each full block: a pure function of tenant and prefix."""
    rows = []
    for stop in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        seed = hashlib.sha256(repr((salt or "", tokens[:stop])).encode()).digest()
        rows.append(np.frombuffer(hashlib.shake_128(seed).digest(BLOCK_BYTES), dtype=np.uint8))
    return np.array(rows).reshape(-1, BLOCK_BYTES)


@dataclass
class World:
    """Clients and a server on a simulated network."""

    network: SimulatedNetwork
    server: SimulatedServer
    caches: list[Cache]

    @classmethod
    def of(
        cls, seed: int = 1, faults: Faults | None = None, clients: int = 1, **options: Any
    ) -> World:
        network = SimulatedNetwork(seed, faults or Faults())
        server = SimulatedServer(options.pop("slots", 64) * 4096, 4 * 4096, **options)
        network.serve(server.service)
        caches = [make_cache(network) for _ in range(clients)]
        for cache in caches:
            assert cache.connection.wait_until_up(2_000) or faults is not None
        return cls(network, server, caches)

    def drive(self, rng: random.Random) -> int:
        """Random puts and gets; checks every byte that comes back. Returns how many blocks did."""
        got = 0
        for _ in range(60):
            cache = rng.choice(self.caches)
            tokens, salt = random_prompt(rng)
            expected = oracle_blocks(tokens, salt)
            if rng.random() < 0.5:
                cache.put(tokens, expected, salt=salt)
            else:
                blocks = cache.get(tokens, salt=salt)
                assert (blocks == expected[: len(blocks)]).all()
                got += len(blocks)
            for each in self.caches:
                each.connection.poll()
            self.server.check_integrity()
        return got

    def settle(self) -> None:
        """Five seconds without faults: all is delivered, and clients give back what they hold."""
        self.network.faults = Faults()
        for _ in range(100):
            self.network.run_until(self.network.clock.now_ms + 50)
            for cache in self.caches:
                cache.connection.poll()


def make_cache(network: SimulatedNetwork) -> Cache:
    identity = ModelIdentity(
        model="sim", revision="1", kv_dtype="|u1", block_tokens=BLOCK_TOKENS, content="sim"
    )
    shape = BlockShape(identity, (BLOCK_BYTES,))
    connection = Connection(shape, OPTIONS, transport=network.transport(), clock=network.clock)
    return Cache(connection, identity, (BLOCK_BYTES,), np.dtype(np.uint8))


def random_prompt(rng: random.Random) -> tuple[list[int], str | None]:
    """Conversations that begin and branch alike, so that prefixes are shared all the time."""
    tokens = [token for _ in range(rng.randrange(1, 5)) for token in [rng.randrange(2)] * 8]
    return tokens[: rng.randrange(4, 40)], rng.choice([None, "a", "b"])


@pytest.mark.parametrize("seed", SEEDS)
def test_right_or_missing_under_faults(seed: int) -> None:
    rng = random.Random(seed)
    faults = Faults(
        loss=rng.choice([0.0, 0.05, 0.2]),
        corruption=rng.choice([0.0, 0.02, 0.1]),
        delay_ms=(0, rng.choice([0, 20, 150, 400])),
    )
    world = World.of(seed, faults, clients=3)
    world.drive(rng)
    world.settle()
    for number, session in world.server.store.sessions.items():
        assert not session.leases, f"session {number} still holds leases"
        assert not session.writes, f"session {number} still holds slots"
    world.server.check_integrity()


def test_a_faultless_network_gives_hits() -> None:
    """Without this the test above would pass if nothing ever hit."""
    world = World.of(faults=Faults(delay_ms=(0, 5)), clients=2, slots=256)
    assert world.drive(random.Random(1)) > 40


@pytest.mark.parametrize("seed", range(10))
def test_a_server_that_is_replaced_is_found_again(seed: int) -> None:
    world = World.of(seed, Faults(delay_ms=(0, 20)), epoch=1)
    [cache] = world.caches
    world.drive(random.Random(seed))
    world.network.serve(None)  # it is gone: everything misses, nothing raises
    tokens = list(range(16))
    assert cache.put(tokens, oracle_blocks(tokens, None)) == 0
    assert len(cache.get(tokens)) == 0
    world.network.serve(SimulatedServer(64 * 4096, 4 * 4096, epoch=2).service)
    world.settle()
    assert cache.connected and cache.connection.epoch == 2
    assert cache.put(tokens, oracle_blocks(tokens, None)) == 4
    assert (cache.get(tokens) == oracle_blocks(tokens, None)).all()


def test_the_breaker_answers_at_once_and_closes_again() -> None:
    world, tokens = World.of(), list(range(8))
    [cache] = world.caches
    world.network.faults = Faults(loss=1.0)
    cache.get(tokens)
    before_ms = world.network.clock.now_ms
    assert len(cache.get(tokens)) == 0
    assert world.network.clock.now_ms == before_ms, "an open breaker does not wait"
    assert cache.connection.counters.failures["breaker_open"] >= 1
    world.settle()
    assert not cache.connection.breaker.is_open
    assert cache.put(tokens, oracle_blocks(tokens, None)) == 2


def test_a_silent_client_elsewhere_is_ended_and_its_leases_with_it() -> None:
    world = World.of(network_timeout_ms=1_000)
    clock, server = world.network.clock, world.server
    assert len(server.store.sessions) == 1
    world.network.run_until(clock.now_ms + 5_000)
    assert server.service.end_dead_sessions(clock.now_ms) == 1
    assert not server.store.sessions
    world.settle()
    assert world.caches[0].connected, "a client that was only slow comes back by itself"
