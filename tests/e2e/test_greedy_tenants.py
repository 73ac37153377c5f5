"""Tenants that take all they can: by network sessions, against a real server. Others get what
their quotas promise, and no turn of the server's loop does more than its share of the work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from attackers import Knock
from engines import eventually

from kvkeep.cli.remote import ask
from kvkeep.kv.identity import tenant_of
from kvkeep.server.daemon import Daemon
from kvkeep.store.blocks import BLOCKS_A_TURN
from kvkeep.store.operators import set_quota
from kvkeep.store.table import NO_ROW
from kvkeep.testing.process import ServerProcess
from kvkeep.units import KIB, MIB
from kvkeep.wire import messages as m
from kvkeep.wire.address import tcp_host
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.strange import daemon_in_thread

ANN, BOB = tenant_of("ann"), tenant_of("bob")
BLOCK, SMALL = bytes(16 * KIB), bytes(64)
SLOT_BYTES = 4 * KIB  # the least that a block takes
# A request frees at most a turn's blocks itself, and then the turn continues what is left.
MOST_FREED = 2 * BLOCKS_A_TURN


@pytest.fixture
def peers() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as connections:
        yield connections


def attached(address: str, connections: contextlib.ExitStack) -> Peer:
    """A network session on a connection of its own."""
    where = tcp_host(address)
    assert where is not None
    return connections.enter_context(Knock(where)).peer().attach()


# -- leases


@pytest.mark.parametrize("promised", ["before", "while all is leased"])
def test_one_lease_does_not_keep_a_tenant_from_its_quota(
    peers: contextlib.ExitStack, promised: str
) -> None:
    """Ann's chain fills the pool, and one lookup names all of it. Half of the pool is promised to
    bob: if it was before, ann's lease leaves it free; if not, the lease ends when it is too old,
    however often ann uses it."""
    flags = ("--pool-size", "2MiB", "--slab-size", "256KiB", "--session-check-interval", "50ms")
    blocks = 2 * MIB // len(BLOCK)
    with ServerProcess(*flags, "--network-lease-timeout", "2s") as server:
        assert server.state_dir is not None
        token = server.state_dir / server.name / "admin.token"

        def promise() -> None:
            path, asked = f"/v1/tenants/{BOB}/quota", {"quota_bytes": MIB}
            ask(server.http, path, "PUT", asked, token_file=token)

        ann, bob = attached(server.address, peers), attached(server.address, peers)
        layout = ann.open_layout(len(BLOCK))
        bob.open_layout(len(BLOCK))
        keys = chain("a", blocks)
        assert ann.store(layout, keys, [BLOCK] * blocks, tenant=ANN) == blocks
        if promised == "before":
            promise()
        leased = ann.ask(m.Found, m.Lookup(ANN, layout, keys)).blocks
        lease = ann.number
        assert leased == (blocks // 2 if promised == "before" else blocks)
        promise()
        stored = 0

        def bob_has_all() -> bool:
            nonlocal stored
            ann.say(m.Fetch(lease, 0, 0, 1))
            bob.ask(m.Done, m.Ping())
            while stored < blocks // 2:
                if not bob.store(layout, chain(f"b{stored}", 1), [BLOCK], tenant=BOB):
                    return False
                stored += 1
            return True

        assert bob_has_all() or (promised != "before" and eventually(bob_has_all, 60))
        for at in range(stored):
            assert bob.load(layout, chain(f"b{at}", 1), tenant=BOB) == [BLOCK]


# -- work in pieces


def store_chain(peer: Peer, layout: int, name: str, blocks: int, tenant: str) -> bytes:
    """Stores a chain of small blocks, as many requests as it takes. Returns its keys."""
    keys, piece = chain(name, blocks), 16 * 256
    for at in range(0, len(keys), piece):
        parent, some = keys[max(0, at - 16) : at], keys[at : at + piece]
        count = len(some) // 16
        assert peer.store(layout, some, [SMALL] * count, tenant=tenant, parent=parent) == count
    return keys


class Freed:
    """Blocks that the server has freed in each turn of its loop so far."""

    def __init__(self, daemon: Daemon) -> None:
        self.in_turns: list[int] = []
        self._daemon, self._before = daemon, daemon.store.blocks.freed
        self._next: Future[None] = daemon.run_in_loop(self._look)

    def _look(self) -> None:
        freed = self._daemon.store.blocks.freed
        self.in_turns.append(freed - self._before)
        self._before = freed
        self._next = self._daemon.run_in_loop(self._look)  # what comes now waits for the next turn

    @property
    def total(self) -> int:
        return sum(list(self.in_turns))


def test_tenants_without_end_are_served_and_make_way_in_pieces(
    tmp_path: Path, peers: contextlib.ExitStack
) -> None:
    """200 new names beyond `max_tenants`, each of which replaces another tenant."""
    flags = ("--pool-size", "32MiB", "--max-tenants", "4")
    with daemon_in_thread(tmp_path, *flags) as daemon:
        daemon.run_in_loop(
            lambda: set_quota(daemon.store, BOB, 8 * SLOT_BYTES, daemon.now_ms())
        ).result(60)
        peer = attached(daemon.address, peers)
        layout = peer.open_layout(64)
        promised = store_chain(peer, layout, "bob", 8, BOB)
        for at in range(3):
            store_chain(peer, layout, f"big{at}", 2_000, tenant_of(f"big{at}"))
        freed = Freed(daemon)
        for at in range(200):
            tenant = tenant_of(f"new{at}")
            keys = store_chain(peer, layout, "new", 2, tenant)
            assert peer.ask(m.Found, m.Lookup(tenant, layout, keys)).blocks == 2
            peer.ask(m.Done, m.Release([peer.number]))
        assert peer.ask(m.Found, m.Lookup(BOB, layout, promised)).blocks == 8
        assert eventually(lambda: freed.total == 3 * 2_000 + (200 - 3) * 2)
        assert max(freed.in_turns) <= MOST_FREED
        assert daemon.service.counters.internal_errors == 0


def test_a_bad_block_drops_a_big_tree_in_pieces(
    tmp_path: Path, peers: contextlib.ExitStack
) -> None:
    blocks = 6_000
    with daemon_in_thread(tmp_path, "--pool-size", "32MiB") as daemon:
        peer = attached(daemon.address, peers)
        layout = peer.open_layout(64)
        keys = store_chain(peer, layout, "a", blocks, ANN)

        def spoil_root() -> None:
            table = daemon.store.blocks.table
            [root] = [row for row in range(blocks) if table.parent[row] == NO_ROW]
            daemon.pool.segments.view(table.slot[root], 1)[0] ^= 1

        daemon.run_in_loop(spoil_root).result(60)
        freed = Freed(daemon)
        assert peer.ask(m.Done, m.ReportBad(ANN, layout, keys[:16])).count >= 1
        assert peer.ask(m.Found, m.Lookup(ANN, layout, keys)).blocks == 0, "at once"
        assert eventually(lambda: freed.total == blocks)
        assert max(freed.in_turns) <= MOST_FREED
