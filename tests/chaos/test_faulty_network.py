"""Clients over a network that loses, delays and corrupts: right or missing, and nothing leaks.

A block's bytes are a function of its tenant and its whole prefix, so one wrong byte anywhere fails
the run."""

from __future__ import annotations

import hashlib
import os
import random

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


def make_cache(network: SimulatedNetwork) -> Cache:
    identity = ModelIdentity(
        model="sim", revision="1", kv_dtype="|u1", block_tokens=BLOCK_TOKENS, content="sim"
    )
    connection = Connection(
        BlockShape(identity, (BLOCK_BYTES,)),
        OPTIONS,
        transport=network.transport(),
        clock=network.clock,
    )
    return Cache(connection, identity, (BLOCK_BYTES,), np.dtype(np.uint8))


def random_prompt(rng: random.Random) -> tuple[list[int], str | None]:
    """Conversations that begin and branch alike, so that prefixes are shared all the time."""
    tokens = [token for _ in range(rng.randrange(1, 5)) for token in [rng.randrange(2)] * 8]
    return tokens[: rng.randrange(4, 40)], rng.choice([None, "a", "b"])


def drive(
    network: SimulatedNetwork, server: SimulatedServer, caches: list[Cache], rng: random.Random
) -> int:
    """Random puts and gets; checks every byte that comes back. Returns how many blocks did."""
    got = 0
    for _ in range(60):
        cache = rng.choice(caches)
        tokens, salt = random_prompt(rng)
        expected = oracle_blocks(tokens, salt)
        if rng.random() < 0.5:
            cache.put(tokens, expected, salt=salt)
        else:
            blocks = cache.get(tokens, salt=salt)
            assert (blocks == expected[: len(blocks)]).all()
            got += len(blocks)
        for each in caches:
            each.connection.poll()
        server.check_integrity()
    return got


def settle(network: SimulatedNetwork, caches: list[Cache], for_ms: int = 5_000) -> None:
    """Lets a now faultless network deliver everything, and clients give back what they lost track
    of."""
    network.faults = Faults()
    for _ in range(for_ms // 50):
        network.run_until(network.clock.now_ms + 50)
        for cache in caches:
            cache.connection.poll()


def assert_nothing_leaked(server: SimulatedServer) -> None:
    for number, session in server.store.sessions.items():
        assert not session.leases, f"session {number} still holds leases"
        assert not session.writes, f"session {number} still holds slots"
    server.check_integrity()


@pytest.mark.parametrize("seed", SEEDS)
def test_right_or_missing_under_faults(seed: int) -> None:
    rng = random.Random(seed)
    faults = Faults(
        loss=rng.choice([0.0, 0.05, 0.2]),
        corruption=rng.choice([0.0, 0.02, 0.1]),
        delay_ms=(0, rng.choice([0, 20, 150, 400])),
    )
    network = SimulatedNetwork(seed, faults)
    server = SimulatedServer(64 * 4096, 4 * 4096)
    network.serve(server.service)
    caches = [make_cache(network) for _ in range(3)]
    for cache in caches:
        cache.connection.wait_until_up(2_000)
    drive(network, server, caches, rng)
    settle(network, caches)
    assert_nothing_leaked(server)


def test_a_faultless_network_gives_hits() -> None:
    """The oracle above would pass if nothing ever hit; without faults plenty does."""
    network = SimulatedNetwork(1, Faults(delay_ms=(0, 5)))
    server = SimulatedServer(256 * 4096, 4 * 4096)
    network.serve(server.service)
    caches = [make_cache(network) for _ in range(2)]
    for cache in caches:
        assert cache.connection.wait_until_up(2_000)
    assert drive(network, server, caches, random.Random(1)) > 40


@pytest.mark.parametrize("seed", range(10))
def test_a_server_that_is_replaced_is_found_again(seed: int) -> None:
    rng = random.Random(seed)
    network = SimulatedNetwork(seed, Faults(delay_ms=(0, 20)))
    first = SimulatedServer(64 * 4096, 4 * 4096, epoch=1)
    network.serve(first.service)
    cache = make_cache(network)
    assert cache.connection.wait_until_up(2_000)
    drive(network, first, [cache], rng)
    network.serve(None)  # it is gone: everything misses, nothing raises
    tokens = list(range(16))
    assert cache.put(tokens, oracle_blocks(tokens, None)) == 0
    assert len(cache.get(tokens)) == 0
    second = SimulatedServer(64 * 4096, 4 * 4096, epoch=2)
    network.serve(second.service)
    settle(network, [cache])
    assert cache.connected
    assert cache.connection.epoch == 2
    assert cache.put(tokens, oracle_blocks(tokens, None)) == 4
    assert (cache.get(tokens) == oracle_blocks(tokens, None)).all()


def test_the_breaker_answers_at_once_and_closes_again() -> None:
    network = SimulatedNetwork(1)
    server = SimulatedServer(64 * 4096, 4 * 4096)
    network.serve(server.service)
    cache = make_cache(network)
    assert cache.connection.wait_until_up(2_000)
    network.faults = Faults(loss=1.0)
    cache.get(list(range(8)))
    before_ms = network.clock.now_ms
    assert len(cache.get(list(range(8)))) == 0
    assert network.clock.now_ms == before_ms, "an open breaker does not wait"
    assert cache.connection.counters.failures["breaker_open"] >= 1
    settle(network, [cache])
    assert not cache.connection.breaker.is_open
    tokens = list(range(8))
    assert cache.put(tokens, oracle_blocks(tokens, None)) == 2


def test_a_silent_client_elsewhere_is_ended_and_its_leases_with_it() -> None:
    network = SimulatedNetwork(1)
    server = SimulatedServer(64 * 4096, 4 * 4096, network_timeout_ms=1_000)
    network.serve(server.service)
    cache = make_cache(network)
    assert cache.connection.wait_until_up(2_000)
    assert len(server.store.sessions) == 1
    network.run_until(network.clock.now_ms + 5_000)
    assert server.service.end_dead_sessions(network.clock.now_ms) == 1
    assert not server.store.sessions
    settle(network, [cache])
    assert cache.connected, "a client that was only slow comes back by itself"
