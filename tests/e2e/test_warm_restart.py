"""A server that ends, in whatever way, and the next one of the same name: real processes, real
signals, real memory."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import clients
import engines
import numpy as np
import pytest
from clients import BLOCK_TOKENS, SMALL_POOL, SMALL_POOL_BLOCKS, Client, holds, stores
from engines import eventually, status

from kvkeep.errors import PoolError
from kvkeep.testing.process import ServerProcess
from kvkeep.wire.pool_files import PoolFiles
from kvkeep.wire.segments import Segments

TOKENS = list(range(40))
NEVER_MS = 24 * 3600 * 1000


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*SMALL_POOL) as running:
        yield running


def restart_of(server: ServerProcess) -> Any:
    return status(server)["restart"]


def fill(server: ServerProcess, tokens: list[int] = TOKENS) -> None:
    with clients.connect(server.address) as cache:
        assert stores(cache, tokens) == len(tokens) // BLOCK_TOKENS


def finds(server: ServerProcess) -> int:
    with clients.connect(server.address) as cache:
        return holds(cache, TOKENS)


def refuses_to_start(server: ServerProcess, address: str = "tcp://127.0.0.1:0") -> str:
    """What another server of the same name says."""
    command = [*server.command(), "--address", address]  # the last address counts
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    return done.stderr


# -- ways to end


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_what_was_stored_is_found_by_the_next_server(
    server: ServerProcess, end: signal.Signals
) -> None:
    fill(server)
    for _ in range(2):
        process = server.process
        said = server.stop(end)
        assert process is not None
        assert process.returncode == (-signal.SIGKILL if end == signal.SIGKILL else 0)
        if end == signal.SIGTERM:
            stays = f"10 blocks stay in {server.pool} for the next server; `rm -r"
            assert stays in said.splitlines()[-1]
        server.start()
        assert finds(server) == 10
        restart = restart_of(server)
        assert (restart["adopted_blocks"], restart["dropped_at_adoption"]) == (10, 0)
        assert restart["adopted_bytes"] == 10 * clients.BLOCK_BYTES
        assert restart["adoption_seconds"] > 0
        assert restart["warm"] and not restart["why_cold"]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("ping_interval_ms", [100, NEVER_MS])
def test_a_client_notices_a_restart_and_goes_on_hitting(
    server: ServerProcess, end: signal.Signals, ping_interval_ms: int
) -> None:
    """A client that never pings learns of it by what it asks next."""
    options = {"ping_interval_ms": ping_interval_ms, "reconnect_interval_ms": 50}
    with clients.connect(server.address, **options) as cache:
        assert stores(cache, TOKENS) == 10
        for number in range(1, 4):
            epoch = cache.connection.epoch
            server.stop(end)
            server.start()
            assert eventually(lambda: cache.contains(TOKENS) == 10)
            assert cache.connection.epoch not in (0, epoch)
            assert holds(cache, TOKENS) == 10 and stores(cache, TOKENS) == 0
            assert stores(cache, range(number * 5_000, number * 5_000 + 40)) == 10


@pytest.mark.parametrize(
    ("end", "is_filled"),
    [(signal.SIGINT, True), (signal.SIGHUP, True), (signal.SIGTERM, False)],
    ids=["Ctrl-C", "its terminal closes", "empty"],
)
def test_a_pool_that_no_server_will_want_is_removed(
    server: ServerProcess, end: signal.Signals, is_filled: bool
) -> None:
    if signal.getsignal(end) is signal.SIG_IGN:
        pytest.skip("these tests run behind nohup, and so do their servers")
    if is_filled:
        fill(server)
    server.stop(end)
    assert not server.pool.exists()


def test_without_keep_pool_nothing_is_left_and_nothing_taken(server: ServerProcess) -> None:
    fill(server)
    server.stop(signal.SIGKILL)
    server.start("--no-keep-pool")
    assert finds(server) == 0
    fill(server)
    assert not list(server.pool.glob("index-*"))
    server.stop(signal.SIGTERM)
    assert not server.pool.exists()


def test_fresh_starts_empty(server: ServerProcess) -> None:
    fill(server)
    server.stop(signal.SIGTERM)
    server.start("--fresh")
    assert finds(server) == 0
    fill(server)


def test_a_server_that_cannot_start_leaves_what_it_found(server: ServerProcess) -> None:
    fill(server)
    server.stop(signal.SIGTERM)
    with ServerProcess(*SMALL_POOL) as other:
        assert "cannot listen" in refuses_to_start(server, other.address)
    server.start()
    assert finds(server) == 10


def test_the_automatic_size_is_that_of_the_server_before() -> None:
    server = ServerProcess("--slab-size", "64KiB", "--shm-dir", "/dev/shm")
    server.start("--pool-size", "3MiB")
    fill(server)
    server.stop(signal.SIGTERM)
    with server:
        assert finds(server) == 10
        assert status(server)["pool"]["pool_bytes"] == 3 << 20


# -- pools that are not what they should be


def damage_header(pool: Path) -> None:
    path = pool / "index-header"
    path.write_bytes(path.read_bytes()[:20] + b"x" + path.read_bytes()[21:])


def replace_by_link(pool: Path) -> None:
    (pool / "index-used").rename(pool / "elsewhere")
    (pool / "index-used").symlink_to(pool / "elsewhere")


Harm = Callable[[Path], object]
NOT_ADOPTED: dict[str, tuple[Harm, str]] = {
    "other slabs": (lambda pool: None, "its slab size is 64KiB, not 128KiB"),
    "damaged header": (damage_header, "its index has a damaged header"),
    "longer header": (
        lambda pool: (pool / "index-header").write_bytes(bytes(100)),
        "its index has a header of another length",
    ),
    "short column": (
        lambda pool: os.truncate(pool / "index-slot", 64),
        "a column of its index is missing or too short",
    ),
    "link": (replace_by_link, "index-used is no plain file of ours"),
    "folder": (lambda pool: (pool / "session-1.lock").mkdir(), "it cannot be read"),
}


@pytest.mark.parametrize("kind", NOT_ADOPTED)
def test_what_is_no_index_is_not_adopted_and_the_log_says_why(
    server: ServerProcess, kind: str
) -> None:
    """Some of each sort; tests/tiers/test_index_files.py has all."""
    harm, why = NOT_ADOPTED[kind]
    fill(server)
    server.stop(signal.SIGTERM)
    harm(server.pool)
    server.start(*(("--slab-size", "128KiB") if kind == "other slabs" else ()))
    assert finds(server) == 0
    fill(server)
    assert finds(server) == 10
    [warning] = [line for line in server.log().splitlines() if "not reusing the old pool" in line]
    assert why in warning
    restart = restart_of(server)
    assert not restart["warm"] and why in restart["why_cold"]


@pytest.mark.parametrize("seed", range(2))
def test_random_bytes_everywhere_do_not_keep_a_server_from_serving(
    server: ServerProcess, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(3):
        fill(server, rng.integers(0, 1 << 30, 40).tolist())
        server.stop(signal.SIGKILL)
        for path in server.pool.glob("index-*"):
            if path.name != "index-header" and rng.random() < 0.5:
                largest = 256 if rng.random() < 0.5 else 4
                noise = rng.integers(0, largest, path.stat().st_size, np.uint8)
                with open(path, "r+b") as file:
                    file.write(noise.tobytes())
        server.start()
        fill(server, rng.integers(0, 1 << 30, 40).tolist())
    assert "Traceback" not in server.log()


def test_a_segment_that_is_gone_takes_its_blocks_along(server: ServerProcess) -> None:
    fill(server)
    server.stop(signal.SIGTERM)
    (server.pool / "segment-00000").unlink()
    (server.pool / "segment-00001").write_bytes(b"of another program")
    server.start()
    assert finds(server) == 0
    fill(server)


def test_an_engine_that_reads_from_a_pool_that_shrinks_goes_on(server: ServerProcess) -> None:
    server.stop()
    server.start("--pool-size", "3MiB")
    fill(server)
    with clients.connect(server.address) as cache:
        assert holds(cache, TOKENS) == 10
        server.stop(signal.SIGKILL)
        server.start("--pool-size", "1MiB")
        assert eventually(lambda: cache.contains(TOKENS) == 10)
        assert holds(cache, TOKENS) == 10


def test_a_byte_that_changed_meanwhile_is_found_in_the_background(server: ServerProcess) -> None:
    fill(server)
    server.stop(signal.SIGTERM)
    segment = server.pool / "segment-00000"
    content = bytearray(segment.read_bytes())
    content[content.index(clients.oracle(TOKENS)[6].tobytes()) + 99] ^= 1
    segment.write_bytes(content)
    server.start()
    assert eventually(lambda: status(server)["counters"]["scrubbed_blocks"] == 10)
    assert eventually(lambda: status(server)["pool"]["blocks"]["ready"] == 6)
    dropped = "an adopted block of tenant default does not match its checksum; it is dropped"
    assert dropped in server.log()
    assert finds(server) == 6


def test_a_second_server_never_adopts_the_pool_of_one_that_lives(server: ServerProcess) -> None:
    """The lock file is removed: a second server is refused, and the first one gives nothing out
    and says so until it is restarted."""
    with clients.connect(server.address) as cache:
        assert stores(cache, TOKENS) == 10
        (server.pool / "daemon.lock").unlink()
        assert "in use by another kvkeep server" in refuses_to_start(server)
        assert eventually(lambda: "restart it" in server.log())
        assert cache.contains(TOKENS) == 0
    server.stop(signal.SIGTERM)
    assert not server.pool.exists(), "its owner could not be told any more"
    server.start()
    fill(server)
    assert finds(server) == 10


# -- processes that were at work when their server ended


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_an_old_writer_that_goes_on_writes_into_no_block_of_another(end: signal.Signals) -> None:
    with ServerProcess(*SMALL_POOL, "--shutdown-grace", "100ms") as server:
        half = SMALL_POOL_BLOCKS // 2
        writer = Client("in_the_middle", server.address, "store", half * BLOCK_TOKENS)
        assert writer.receive() == {"slots": half}
        writer.signal(signal.SIGSTOP)
        for _ in range(2):  # the server after the next one knows, too
            server.stop(end)
            server.start()
            restart = restart_of(server)
            assert (restart["old_sessions"], restart["held_by_old_sessions"]) == (1, half)
        flood = range(9_000, 9_000 + SMALL_POOL_BLOCKS * BLOCK_TOKENS)
        with clients.connect(server.address) as cache:
            assert stores(cache, flood) == SMALL_POOL_BLOCKS - half
            writer.signal(signal.SIGCONT)
            writer.send({})
            assert writer.receive() == {"written": half}
            assert holds(cache, flood) == SMALL_POOL_BLOCKS - half
            writer.end()
            assert eventually(lambda: restart_of(server)["held_by_old_sessions"] == 0)
            assert stores(cache, flood) == half
            assert holds(cache, flood) == SMALL_POOL_BLOCKS


def test_an_old_reader_that_goes_on_reads_what_it_leased(server: ServerProcess) -> None:
    fill(server)
    reader = Client("in_the_middle", server.address, "load", len(TOKENS))
    assert reader.receive() == {"slots": 10}
    server.stop(signal.SIGKILL)
    server.start()
    assert restart_of(server)["old_sessions"] == 1
    flood = range(9_000, 9_000 + 2 * SMALL_POOL_BLOCKS * BLOCK_TOKENS)
    with clients.connect(server.address) as cache:
        assert stores(cache, flood) == SMALL_POOL_BLOCKS - 10
        assert cache.contains(TOKENS) == 10, "others may read it as well"
        reader.send({})
        assert reader.receive() == {"right": True}
        reader.end()
        assert eventually(lambda: restart_of(server)["old_sessions"] == 0)


def test_a_client_that_maps_the_pool_for_the_old_server_is_refused(server: ServerProcess) -> None:
    fill(server)
    with clients.connect(server.address) as cache:
        assert cache.connection.welcome is not None
        epoch, place = cache.connection.welcome.epoch, cache.connection.welcome.pool
    late = Segments(PoolFiles(server.pool), place.segment_bytes, place.pool_bytes, epoch)
    server.stop(signal.SIGKILL)
    server.start()
    with pytest.raises(PoolError, match="belongs to another server by now"):
        late.view(0, 64)


def test_clients_at_work_while_servers_are_killed_never_see_a_wrong_byte(
    server: ServerProcess,
) -> None:
    pick = random.Random(1)
    workers = [Client("work", server.address, seed, 400) for seed in range(3)]
    for _ in range(5):
        time.sleep(pick.uniform(0.1, 0.5))
        server.stop(signal.SIGKILL)
        server.start()
    said = [worker.receive() for worker in workers]
    assert [worker.end(60) for worker in workers] == [0, 0, 0]
    assert "Traceback" not in server.log()
    assert [each["wrong"] for each in said] == [0, 0, 0]
    assert sum(each["got"] for each in said) > 0


@pytest.mark.parametrize("ping_interval_ms", [300, NEVER_MS])
def test_an_engine_notices_a_restart_and_every_byte_is_right(ping_interval_ms: int) -> None:
    extra = {**engines.BRISK, "kvkeep.ping_interval_ms": ping_interval_ms}
    with ServerProcess(*engines.POOL) as server:
        model, prompts = engines.oracle(), [engines.prompt(22) for _ in range(4)]
        expected = engines.without_cache(model, prompts)
        with engines.engine(server, model, extra=extra) as llm:
            assert engines.tokens_of(engines.serve(llm, prompts)) == expected
            server.stop(signal.SIGKILL)
            server.start()

            def hits() -> bool:
                engines.forget_local(llm)
                answers = engines.serve(llm, prompts)
                assert engines.tokens_of(answers) == expected
                return sum(each.metrics.external_cached_tokens for each in answers) >= 4 * 20

            assert eventually(hits)
