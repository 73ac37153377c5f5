"""A real server and several real client processes, with real signals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import clients
import pytest
from clients import BLOCK_TOKENS, SMALL_POOL, SMALL_POOL_BLOCKS, Client, ask, holds, stores
from engines import eventually, status

from kvkeep.testing.process import ServerProcess

TOKENS = list(range(40))
WHOLE_POOL = SMALL_POOL_BLOCKS * BLOCK_TOKENS


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*SMALL_POOL) as running:
        yield running


def test_processes_share_blocks_by_salt_whatever_their_hash_seed(server: ServerProcess) -> None:
    for salt in ("", "alice"):
        assert ask("put", server.address, 40, salt, hash_seed=1) == {"stored": 10}
        assert ask("get", server.address, 40, salt, hash_seed=2) == {"blocks": 10}
        assert ask("put", server.address, 40, salt, hash_seed=3) == {"stored": 0}
    assert ask("get", server.address, 40, "bob") == {"blocks": 0}


def test_slots_of_a_killed_writer_come_back_and_none_before(server: ServerProcess) -> None:
    writer = Client("store_half", server.address, WHOLE_POOL)
    assert writer.receive() == {"slots": SMALL_POOL_BLOCKS}
    written = clients.later_tokens(WHOLE_POOL)
    with clients.connect(server.address) as cache:
        assert stores(cache, TOKENS) == 0, "every slot belongs to the writer"
        writer.signal(signal.SIGSTOP)
        time.sleep(0.5)  # ten looks for dead sessions: a paused process is not a dead one
        assert stores(cache, TOKENS) == 0
        assert cache.contains(written) == 0, "nothing half written is visible"
        writer.end()
        assert eventually(lambda: stores(cache, TOKENS) == 10)
        assert holds(cache, TOKENS) == 10 and cache.contains(written) == 0
        assert stores(cache, written[:40]) == holds(cache, written[:40]) == 10


def test_a_reader_keeps_its_blocks_until_it_is_dead(server: ServerProcess) -> None:
    assert ask("put", server.address, 40) == {"stored": 10}
    reader = Client("hold_lease", server.address, 40)
    assert reader.receive() == {"blocks": 10}
    with clients.connect(server.address) as cache:
        assert stores(cache, range(5_000, 5_000 + 2 * WHOLE_POOL)) == SMALL_POOL_BLOCKS - 10
        assert cache.contains(TOKENS) == 10
        reader.send({})
        assert reader.receive() == {"right": True}
        reader.end(60)
        again = range(9_000, 9_000 + WHOLE_POOL)
        assert eventually(lambda: stores(cache, again) > 0 and cache.contains(again) > 100)


def test_a_reader_killed_in_the_middle_of_a_load_gives_its_lease_back(
    server: ServerProcess,
) -> None:
    with clients.connect(server.address) as cache:
        assert stores(cache, range(WHOLE_POOL)) == SMALL_POOL_BLOCKS
        reader = Client("hold_lease", server.address, WHOLE_POOL)
        assert reader.receive() == {"blocks": SMALL_POOL_BLOCKS}
        other = range(7_000, 7_008)
        assert stores(cache, other) == 0, "everything is leased"
        reader.end()
        assert eventually(lambda: stores(cache, other) == 2)
    assert eventually(lambda: status(server)["sessions"] == [])
    assert not list(server.pool.glob("session-*"))


def test_a_paused_server_costs_a_deadline_and_then_nothing(server: ServerProcess) -> None:
    with clients.connect(server.address, lookup_deadline_ms=100, ping_interval_ms=100) as cache:
        assert stores(cache, TOKENS) == 10
        server.send(signal.SIGSTOP)
        for _ in range(5):
            assert len(cache.get(TOKENS)) == 0
        assert cache.connection.breaker.is_open
        server.send(signal.SIGCONT)
        assert eventually(lambda: len(cache.get(TOKENS)) == 10)
        assert clients.same(cache.get(TOKENS), clients.oracle(TOKENS))


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_keeps_no_client_waiting(
    server: ServerProcess, end: signal.Signals
) -> None:
    """The client sees the connection close: it does not wait for its deadline of minutes."""
    patient = {"lookup_deadline_ms": 1_000_000, "store_deadline_ms": 1_000_000}
    with clients.connect(server.address, **patient) as cache:
        started = threading.Event()

        def store() -> None:
            for count in range(4, 4_000, 4):
                stores(cache, range(count * 1000, count * 1000 + 8))
                started.set()
                if not cache.connected:
                    break

        thread = threading.Thread(target=store)
        thread.start()
        started.wait()
        server.stop(end)
        thread.join(timeout=60)
        assert not thread.is_alive() and not cache.connected


def test_a_flipped_byte_in_the_pool_is_never_loaded(server: ServerProcess) -> None:
    with clients.connect(server.address) as cache:
        assert stores(cache, TOKENS) == 10
        segment = server.pool / "segment-00000"
        content = segment.read_bytes()
        at = content.index(clients.oracle(TOKENS)[6].tobytes()) + 1234
        with open(segment, "r+b") as file:
            file.seek(at)
            file.write(bytes([content[at] ^ 0x10]))
        blocks = cache.get(TOKENS)
        assert len(blocks) == 6 and clients.same(blocks, clients.oracle(TOKENS))
        assert eventually(lambda: cache.contains(TOKENS) == 6), "the server drops what follows it"
        assert stores(cache, TOKENS) == 4 and holds(cache, TOKENS) == 10
    assert "does not match its checksum" in server.log()
