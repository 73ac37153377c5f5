"""A real daemon and several real client processes, with real signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess

sys.path.insert(0, str(Path(__file__).parent))
import clients

CLIENTS = str(Path(__file__).with_name("clients.py"))
SMALL_POOL = ("--pool-size", "1MiB", "--slab-size", "64KiB", "--session-check-interval", "50ms")
SMALL_POOL_BLOCKS = (1 << 20) // clients.BLOCK_BYTES


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*SMALL_POOL) as running:
        yield running


class Client:
    """One client process: what it says, and its end."""

    def __init__(self, name: str, *arguments: object, hash_seed: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, CLIENTS, name, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
        )

    def hears(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the client ended with {self.process.wait()}"
        return json.loads(line)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self.process.wait(timeout=60)


def ask(name: str, *arguments: object, hash_seed: int = 0) -> Any:
    client = Client(name, *arguments, hash_seed=hash_seed)
    said = client.hears()
    client.close()
    return said


def test_two_processes_share_blocks_whatever_their_hash_seed(server: ServerProcess) -> None:
    assert ask("put", server.address, 40, hash_seed=1) == {"stored": 10}
    assert ask("get", server.address, 40, hash_seed=2) == {"blocks": 10, "right": True}
    assert ask("put", server.address, 40, hash_seed=3) == {"stored": 0}, (
        "what is there is not stored again"
    )


def test_two_tenants_never_share(server: ServerProcess) -> None:
    assert ask("put", server.address, 40, "alice") == {"stored": 10}
    assert ask("get", server.address, 40, "bob")["blocks"] == 0
    assert ask("get", server.address, 40)["blocks"] == 0
    assert ask("get", server.address, 40, "alice") == {"blocks": 10, "right": True}


def test_slots_of_a_killed_writer_come_back_and_none_before(server: ServerProcess) -> None:
    writer = Client("store_half", server.address, SMALL_POOL_BLOCKS * clients.BLOCK_TOKENS)
    assert writer.hears() == {"slots": SMALL_POOL_BLOCKS}
    with clients.connect(server.address) as cache:
        tokens = list(range(8))
        assert cache.put(tokens, clients.oracle(tokens)) == 0, "every slot belongs to the writer"
        writer.process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)  # ten looks for dead sessions: a paused process is not a dead one
        assert cache.put(tokens, clients.oracle(tokens)) == 0
        written = list(range(1_000_000, 1_000_000 + SMALL_POOL_BLOCKS * clients.BLOCK_TOKENS))
        assert cache.contains(written) == 0, "nothing half written is visible"
        writer.kill()
        assert eventually(lambda: cache.put(tokens, clients.oracle(tokens)) == 2)
        assert cache.contains(written) == 0
        assert clients.same(cache.get(tokens), clients.oracle(tokens))


def test_a_reader_keeps_its_blocks_until_it_is_dead(server: ServerProcess) -> None:
    held = 40
    assert ask("put", server.address, held) == {"stored": 10}
    reader = Client("hold_lease", server.address, held)
    assert reader.hears() == {"blocks": 10}
    with clients.connect(server.address) as cache:
        flood = list(range(5_000, 5_000 + 2 * SMALL_POOL_BLOCKS * clients.BLOCK_TOKENS))
        assert cache.put(flood, clients.oracle(flood)) == SMALL_POOL_BLOCKS - 10
        assert cache.contains(list(range(held))) == 10
        reader.go_on()
        assert reader.hears() == {"right": True}
        reader.close()
        again = list(range(9_000, 9_000 + SMALL_POOL_BLOCKS * clients.BLOCK_TOKENS))
        assert eventually(
            lambda: cache.put(again, clients.oracle(again)) > 0 and cache.contains(again) > 100
        )


def test_a_reader_killed_in_the_middle_of_a_load_gives_its_lease_back(
    server: ServerProcess,
) -> None:
    whole = list(range(SMALL_POOL_BLOCKS * clients.BLOCK_TOKENS))
    with clients.connect(server.address) as cache:
        assert cache.put(whole, clients.oracle(whole)) == SMALL_POOL_BLOCKS
        reader = Client("hold_lease", server.address, len(whole))
        assert reader.hears() == {"blocks": SMALL_POOL_BLOCKS}
        other = list(range(7_000, 7_008))
        assert cache.put(other, clients.oracle(other)) == 0, "everything is leased"
        reader.kill()
        assert eventually(lambda: cache.put(other, clients.oracle(other)) == 2)


def test_several_processes_at_once_never_see_a_wrong_byte() -> None:
    with ServerProcess(*SMALL_POOL) as server:
        workers = [Client("work", server.address, seed, 60) for seed in range(4)]
        said = [worker.hears() for worker in workers]
        for worker in workers:
            worker.close()
    assert [each["wrong"] for each in said] == [0, 0, 0, 0]
    assert sum(each["got"] for each in said) > 0


def test_processes_on_the_network_plane_share_with_those_in_shared_memory(
    server: ServerProcess,
) -> None:
    tokens = list(range(40))
    with (
        clients.connect(server.address, shared_memory=False) as far,
        clients.connect(server.address) as near,
    ):
        assert far.connection.segments is None
        assert near.connection.segments is not None
        assert far.put(tokens, clients.oracle(tokens)) == 10
        assert (
            clients.same(near.get(tokens), clients.oracle(tokens)) and near.contains(tokens) == 10
        )
        assert clients.same(far.get(tokens), clients.oracle(tokens)) and len(far.get(tokens)) == 10


def test_a_paused_server_costs_a_deadline_and_then_nothing(server: ServerProcess) -> None:
    tokens = list(range(40))
    with clients.connect(server.address, lookup_deadline_ms=100, ping_interval_ms=100) as cache:
        assert cache.put(tokens, clients.oracle(tokens)) == 10
        server.send(signal.SIGSTOP)
        for _ in range(5):
            assert len(cache.get(tokens)) == 0
        assert cache.connection.breaker.is_open
        server.send(signal.SIGCONT)
        assert eventually(lambda: len(cache.get(tokens)) == 10)
        assert clients.same(cache.get(tokens), clients.oracle(tokens))


def test_a_restarted_server_is_found_again() -> None:
    server = ServerProcess(*SMALL_POOL)
    with server:
        tokens = list(range(40))
        with clients.connect(server.address, ping_interval_ms=100) as cache:
            assert cache.put(tokens, clients.oracle(tokens)) == 10
            first_epoch = cache.connection.epoch
            server.stop(signal.SIGKILL)
            assert len(cache.get(tokens)) == 0
            server.start()
            assert eventually(
                lambda: cache.connected and cache.connection.epoch not in (0, first_epoch)
            )
            assert clients.same(cache.get(tokens), clients.oracle(tokens))
            assert cache.put(tokens, clients.oracle(tokens)) == 0, "it is all still there"


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_does_not_keep_anybody_waiting(end: signal.Signals) -> None:
    """No deadline is waited for: the connection is gone, and the client knows. The deadlines here
    would show."""
    server = ServerProcess(*SMALL_POOL)
    with (
        server,
        clients.connect(
            server.address, lookup_deadline_ms=100_000, store_deadline_ms=100_000
        ) as cache,
    ):
        started = threading.Event()
        ended: list[int] = []

        def store() -> None:
            for count in range(4, 4_000, 4):
                tokens = list(range(count * 1000, count * 1000 + 8))
                cache.put(tokens, clients.oracle(tokens))
                started.set()
                if not cache.connected:
                    break
            ended.append(1)

        thread = threading.Thread(target=store)
        thread.start()
        started.wait()
        server.stop(end)
        thread.join(timeout=60)
        assert ended == [1]
        assert not cache.connected


def test_a_flipped_byte_in_the_pool_is_never_loaded(server: ServerProcess) -> None:
    tokens = list(range(40))
    with clients.connect(server.address) as cache:
        assert cache.put(tokens, clients.oracle(tokens)) == 10
        segment = Path("/dev/shm") / f"kvkeep-{server.name}" / "segment-00000"
        content = segment.read_bytes()
        at = content.index(clients.oracle(tokens)[6].tobytes()) + 1234
        with open(segment, "r+b") as file:
            file.seek(at)
            file.write(bytes([content[at] ^ 0x10]))
        blocks = cache.get(tokens)
        assert len(blocks) == 6
        assert clients.same(blocks, clients.oracle(tokens))
        assert eventually(lambda: cache.contains(tokens) == 6), (
            "the bad block and all after it are gone"
        )
        assert cache.put(tokens, clients.oracle(tokens)) == 4
        assert (
            clients.same(cache.get(tokens), clients.oracle(tokens)) and cache.contains(tokens) == 10
        )
    assert "does not match its checksum" in server.log()
