"""A server that ends, in whatever way, and the next one of the same name: real processes, real
signals, real memory."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.cli.remote import ask as ask_http
from kvkeep.client.cache import Cache
from kvkeep.client.transport import StreamTransport
from kvkeep.errors import PoolError
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, encode
from kvkeep.wire.pool_files import PoolFiles
from kvkeep.wire.segments import Segments
from kvkeep_lab.simulation.strange import server_of_version

sys.path.insert(0, str(Path(__file__).parent))
import clients
import engines
from test_processes import SMALL_POOL, SMALL_POOL_BLOCKS, Client, eventually

TOKENS = list(range(40))
OTHERS = list(range(5_000, 5_040))


def pool_of(server: ServerProcess) -> Path:
    return Path("/dev/shm") / f"kvkeep-{server.name}"


def restart_of(server: ServerProcess) -> Any:
    return ask_http(server.http, "/v1/status")["restart"]


def quick(server: ServerProcess) -> Cache:
    return clients.connect(server.address, ping_interval_ms=100, reconnect_interval_ms=50)


def fill(server: ServerProcess, tokens: list[int] = TOKENS) -> None:
    with clients.connect(server.address) as cache:
        assert cache.put(tokens, clients.oracle(tokens)) == len(tokens) // clients.BLOCK_TOKENS


def finds(server: ServerProcess, tokens: list[int] = TOKENS) -> int:
    with clients.connect(server.address) as cache:
        blocks = cache.get(tokens)
        assert clients.same(blocks, clients.oracle(tokens))
        return len(blocks)


# -- ways to end


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_what_was_stored_is_found_by_the_next_server(end: signal.Signals) -> None:
    with ServerProcess(*SMALL_POOL) as server:
        fill(server)
        for _ in range(2):
            process = server.process
            said = server.stop(end)
            assert process is not None and process.returncode == (
                -signal.SIGKILL if end == signal.SIGKILL else 0
            )
            if end == signal.SIGTERM:
                assert (
                    f"10 blocks stay in {pool_of(server)} for the next server; `rm -r"
                    in said.splitlines()[-1]
                )
            server.start()
            assert finds(server) == 10
            restart = restart_of(server)
            assert (restart["adopted_blocks"], restart["dropped_at_adoption"]) == (10, 0)
            assert (
                restart["adopted_bytes"] == 10 * clients.BLOCK_BYTES
                and restart["adoption_seconds"] > 0
            )
            assert restart["warm"] and not restart["why_cold"]
    assert not pool_of(server).exists()


def test_a_client_that_stays_goes_on_hitting() -> None:
    with ServerProcess(*SMALL_POOL) as server, quick(server) as cache:
        assert cache.put(TOKENS, clients.oracle(TOKENS)) == 10
        for _ in range(3):
            epoch = cache.connection.epoch
            server.stop(signal.SIGKILL)
            server.start()
            assert eventually(lambda epoch=epoch: cache.connection.epoch not in (0, epoch))  # type: ignore[misc]
            assert (
                clients.same(cache.get(TOKENS), clients.oracle(TOKENS))
                and cache.contains(TOKENS) == 10
            )


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGHUP])
def test_from_a_terminal_it_takes_its_pool_along(end: signal.Signals) -> None:
    if signal.getsignal(end) is signal.SIG_IGN:
        pytest.skip("these tests run behind nohup, and so do their servers")
    with ServerProcess(*SMALL_POOL) as server:
        fill(server)
        server.stop(end)
        assert not pool_of(server).exists()


def test_an_empty_pool_is_not_worth_keeping() -> None:
    with ServerProcess(*SMALL_POOL) as server:
        server.stop(signal.SIGTERM)
        assert not pool_of(server).exists()


def test_without_keep_pool_nothing_is_left_and_nothing_taken() -> None:
    with ServerProcess(*SMALL_POOL) as server:
        fill(server)
        server.stop(signal.SIGKILL)
        server._flags = (*SMALL_POOL, "--no-keep-pool")
        server.start()
        assert finds(server) == 0
        fill(server)
        assert not list(pool_of(server).glob("index-*"))
        server.stop(signal.SIGTERM)
        assert not pool_of(server).exists()


def test_fresh_starts_empty() -> None:
    with ServerProcess(*SMALL_POOL) as server:
        fill(server)
        server.stop(signal.SIGTERM)
        server._flags = (*SMALL_POOL, "--fresh")
        server.start()
        assert finds(server) == 0
        fill(server)


def test_a_server_that_cannot_start_leaves_what_it_found() -> None:
    with ServerProcess(*SMALL_POOL) as server, ServerProcess(*SMALL_POOL) as other:
        fill(server)
        server.stop(signal.SIGTERM)
        address, server.address = server.address, other.address
        process = engines.subprocess.run(
            server.command(), capture_output=True, text=True, timeout=60, check=False
        )
        assert process.returncode == 2 and "cannot listen" in process.stderr
        server.address = address
        server.start()
        assert finds(server) == 10


def test_the_automatic_size_is_that_of_the_server_before() -> None:
    flags = ("--slab-size", "64KiB", "--shm-dir", "/dev/shm")
    with ServerProcess("--pool-size", "3MiB", *flags) as server:
        fill(server)
        server.stop(signal.SIGTERM)
        server._flags = flags
        server.start()
        assert (
            finds(server) == 10
            and ask_http(server.http, "/v1/status")["pool"]["pool_bytes"] == 3 << 20
        )


# -- pools that are not what they should be


def other_size(server: ServerProcess, pool: Path) -> None:
    server._flags = ("--pool-size", "2MiB", *SMALL_POOL[2:])


def damaged_header(server: ServerProcess, pool: Path) -> None:
    path = pool / "index-header"
    path.write_bytes(path.read_bytes()[:20] + b"x" + path.read_bytes()[21:])


def no_header(server: ServerProcess, pool: Path) -> None:
    (pool / "index-header").unlink()


def longer_header(server: ServerProcess, pool: Path) -> None:
    (pool / "index-header").write_bytes(bytes(100))


def short_column(server: ServerProcess, pool: Path) -> None:
    os.truncate(pool / "index-slot", 64)


def column_with_a_hole(server: ServerProcess, pool: Path) -> None:
    os.truncate(pool / "index-state", 1 << 30)


def link(server: ServerProcess, pool: Path) -> None:
    (pool / "index-used").rename(pool / "elsewhere")
    (pool / "index-used").symlink_to(pool / "elsewhere")


def hard_link(server: ServerProcess, pool: Path) -> None:
    (pool / "elsewhere").hardlink_to(pool / "index-used")


def pipe(server: ServerProcess, pool: Path) -> None:
    (pool / "index-keys").unlink()
    os.mkfifo(pool / "index-keys")


def foreign(server: ServerProcess, pool: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a file away")
    os.chown(pool / "index-slot", 12345, -1)


def folder(server: ServerProcess, pool: Path) -> None:
    (pool / "session-1.lock").mkdir()


NOT_ADOPTED = {
    other_size: "its pool size is 1MiB, not 2MiB",
    damaged_header: "its index has a damaged header",
    no_header: "its index has no header",
    longer_header: "its index has a header of another length",
    short_column: "a column of its index is missing or too short",
    column_with_a_hole: "index-state has holes",
    link: "index-used is no plain file of ours",
    hard_link: "index-used is no plain file of ours",
    pipe: "index-keys is no plain file of ours",
    foreign: "index-slot is no plain file of ours",
    folder: "it cannot be read",
}


@pytest.mark.parametrize("harm", NOT_ADOPTED, ids=lambda harm: harm.__name__)
def test_what_is_no_index_is_not_adopted_and_the_log_says_why(
    harm: Callable[[ServerProcess, Path], None],
) -> None:
    with ServerProcess(*SMALL_POOL) as server:
        fill(server)
        server.stop(signal.SIGTERM)
        harm(server, pool_of(server))
        server.start()
        assert finds(server) == 0
        fill(server)
        assert finds(server) == 10
        warnings = [
            line for line in server.log().splitlines() if "not reusing the old pool" in line
        ]
        assert len(warnings) == 1 and NOT_ADOPTED[harm] in warnings[0]
        restart = restart_of(server)
        assert not restart["warm"] and NOT_ADOPTED[harm] in restart["why_cold"]


@pytest.mark.parametrize("seed", range(2))
def test_random_bytes_everywhere_do_not_keep_a_server_from_serving(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with ServerProcess(*SMALL_POOL) as server:
        for _ in range(3):
            fill(server, rng.integers(0, 1 << 30, 40).tolist())
            server.stop(signal.SIGKILL)
            for path in pool_of(server).glob("index-*"):
                if path.name != "index-header" and rng.random() < 0.5:
                    size = path.stat().st_size
                    with open(path, "r+b") as file:
                        file.write(
                            rng.integers(
                                0, 256 if rng.random() < 0.5 else 4, size, np.uint8
                            ).tobytes()
                        )
            server.start()
            fill(server, rng.integers(0, 1 << 30, 40).tolist())
        assert "Traceback" not in server.log()


def test_a_segment_that_is_gone_takes_its_blocks_along() -> None:
    with ServerProcess(*SMALL_POOL) as server:
        fill(server)
        server.stop(signal.SIGTERM)
        (pool_of(server) / "segment-00000").unlink()
        (pool_of(server) / "segment-00001").write_bytes(b"of somebody")
        server.start()
        assert finds(server) == 0
        fill(server)


def test_a_byte_that_changed_meanwhile_is_found_in_the_background() -> None:
    with ServerProcess(*SMALL_POOL) as server:
        fill(server)
        server.stop(signal.SIGTERM)
        segment = pool_of(server) / "segment-00000"
        content = bytearray(segment.read_bytes())
        content[content.index(clients.oracle(TOKENS)[6].tobytes()) + 99] ^= 1
        segment.write_bytes(content)
        server.start()
        assert eventually(
            lambda: ask_http(server.http, "/v1/status")["counters"]["scrubbed_blocks"] == 10
        )
        assert eventually(
            lambda: ask_http(server.http, "/v1/status")["pool"]["blocks"]["ready"] == 6
        )
        assert (
            "an adopted block of tenant default does not match its checksum; it is dropped"
            in server.log()
        )
        assert finds(server) == 6


def test_a_second_server_never_adopts_the_pool_of_one_that_lives() -> None:
    """Somebody removes the lock file: the second one is refused, the first one stops and is red,
    the third begins."""
    with ServerProcess(*SMALL_POOL) as server, quick(server) as cache:
        assert cache.put(TOKENS, clients.oracle(TOKENS)) == 10
        (pool_of(server) / "daemon.lock").unlink()
        process = engines.subprocess.run(
            server.command(), capture_output=True, text=True, timeout=60, check=False
        )
        assert process.returncode == 2 and "in use by another kvkeep server" in process.stderr
        assert eventually(lambda: "restart it" in server.log())
        assert cache.contains(TOKENS) == 0
        server.stop(signal.SIGTERM)
        assert not pool_of(server).exists(), "whose it was could not be told any more"
        server.start()
        fill(server)
        assert finds(server) == 10


# -- processes that were at work when their server ended


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_an_old_writer_that_goes_on_writes_into_nobodys_block(end: signal.Signals) -> None:
    with ServerProcess(*SMALL_POOL, "--shutdown-grace", "100ms") as server:
        half = SMALL_POOL_BLOCKS // 2
        writer = Client("in_the_middle", server.address, "store", half * clients.BLOCK_TOKENS)
        assert writer.hears() == {"slots": half}
        writer.process.send_signal(signal.SIGSTOP)
        for _ in range(2):  # the server after the next one knows, too
            server.stop(end)
            server.start()
            restart = restart_of(server)
            assert (restart["old_sessions"], restart["held_by_old_sessions"]) == (1, half)
        flood = list(range(9_000, 9_000 + SMALL_POOL_BLOCKS * clients.BLOCK_TOKENS))
        with clients.connect(server.address) as cache:
            assert cache.put(flood, clients.oracle(flood)) == SMALL_POOL_BLOCKS - half
            writer.process.send_signal(signal.SIGCONT)
            writer.go_on()
            assert writer.hears() == {"written": half}
            blocks = cache.get(flood)
            assert len(blocks) == SMALL_POOL_BLOCKS - half and clients.same(
                blocks, clients.oracle(flood)
            )
            writer.kill()
            assert eventually(lambda: restart_of(server)["held_by_old_sessions"] == 0)
            assert cache.put(flood, clients.oracle(flood)) == half
            assert (
                clients.same(cache.get(flood), clients.oracle(flood))
                and cache.contains(flood) == SMALL_POOL_BLOCKS
            )


def test_an_old_reader_that_goes_on_reads_what_it_leased() -> None:
    with ServerProcess(*SMALL_POOL) as server:
        fill(server)
        reader = Client("in_the_middle", server.address, "load", len(TOKENS))
        assert reader.hears() == {"slots": 10}
        server.stop(signal.SIGKILL)
        server.start()
        assert restart_of(server)["old_sessions"] == 1
        flood = list(range(9_000, 9_000 + 2 * SMALL_POOL_BLOCKS * clients.BLOCK_TOKENS))
        with clients.connect(server.address) as cache:
            assert cache.put(flood, clients.oracle(flood)) == SMALL_POOL_BLOCKS - 10
            assert cache.contains(TOKENS) == 10, "and others may read it as well"
            reader.go_on()
            assert reader.hears() == {"right": True}
            reader.kill()
            assert eventually(lambda: restart_of(server)["old_sessions"] == 0)


def test_who_maps_the_pool_for_the_old_server_is_refused() -> None:
    with ServerProcess(*SMALL_POOL) as server:
        fill(server)
        with quick(server) as cache:
            assert cache.connection.welcome is not None
            epoch, place = cache.connection.welcome.epoch, cache.connection.welcome.pool
        late = Segments(PoolFiles(pool_of(server)), place.segment_bytes, place.pool_bytes, epoch)
        server.stop(signal.SIGKILL)
        server.start()
        with pytest.raises(PoolError, match="belongs to another server by now"):
            late.view(0, 64)


def test_clients_at_work_while_servers_are_killed_never_see_a_wrong_byte() -> None:
    pick = random.Random(1)
    with ServerProcess(*SMALL_POOL) as server:
        workers = [Client("work", server.address, seed, 400) for seed in range(3)]
        for _ in range(5):
            time.sleep(pick.uniform(0.1, 0.5))
            server.stop(signal.SIGKILL)
            server.start()
        said = [worker.hears() for worker in workers]
        for worker in workers:
            worker.close()
        assert server.log().count("Traceback") == 0
    assert [each["wrong"] for each in said] == [0, 0, 0]
    assert sum(each["got"] for each in said) > 0


def test_an_engine_goes_on_hitting_and_every_byte_is_right() -> None:
    with ServerProcess(*engines.POOL) as server:
        model, prompts = engines.oracle(), [engines.prompt(22) for _ in range(4)]
        expected = engines.without_cache(model, prompts)
        with engines.engine(server, model, extra=engines.BRISK) as llm:
            assert engines.tokens_of(engines.serve(llm, prompts)) == expected
            server.stop(signal.SIGKILL)
            server.start()
            assert eventually(lambda: len(ask_http(server.http, "/v1/status")["sessions"]) > 0)
            engines.forget_local(llm)
            asked = [engines.counting(each) for each in prompts]
            assert eventually(lambda: _hits(engines.serve(llm, asked), llm) >= 4 * 20)
            assert engines.tokens_of(engines.serve(llm, prompts)) == expected


def _hits(answers: list[Any], llm: Any) -> int:
    engines.forget_local(llm)
    return sum(answer.kv_transfer_params.get(engines.KEY, 0) for answer in answers)


# -- releases that do not speak the same protocol


@pytest.mark.parametrize("version", [m.PROTOCOL_VERSION - 1, m.PROTOCOL_VERSION + 1])
def test_a_client_of_another_release_is_told(version: int) -> None:
    with ServerProcess(*SMALL_POOL) as server:
        peer = StreamTransport(server.address)
        assert eventually(lambda: peer.send(encode(Header(0, 7, version), m.Hello("other", 1))))
        peer.wait(10_000)
        frames = peer.receive()
        peer.close()
        assert frames is not None
        assert decode_header(frames) == Header(0, 7)
        told = json.dumps(clients.m.msgspec.msgpack.decode(frames[1]))
        assert f"this server speaks protocol version {m.PROTOCOL_VERSION}, not {version}" in told
        assert "install the same kvkeep release on both sides" in told
        fill(server)


def test_a_client_of_a_server_of_another_release_misses_and_says_why() -> None:
    with server_of_version(m.PROTOCOL_VERSION + 1) as address:
        connection = clients.kvkeep.connect(
            model="tiny",
            revision="1",
            block_tokens=4,
            block_shape=(4,),
            dtype="uint8",
            wait_ms=1,
            options=clients.ClientOptions(address=address),
        )
        with connection as cache:
            assert eventually(lambda: "speaks protocol version" in cache.connection.refusal)
            assert (
                cache.contains(TOKENS) == 0 and cache.put(TOKENS, np.zeros((10, 4), np.uint8)) == 0
            )
