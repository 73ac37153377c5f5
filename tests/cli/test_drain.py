"""`kvkeep drain`: the server ends in order, and the command says when it has."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import kvkeep as package
from kvkeep.client.cache import Cache
from kvkeep.client.options import ClientOptions
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m

Run = Callable[..., "subprocess.CompletedProcess[str]"]
POOL = ("--pool-size", "4MiB")


def connect(server: ServerProcess) -> Cache:
    return package.connect(
        model="m",
        revision="1",
        block_tokens=4,
        block_shape=(4096,),
        dtype="uint8",
        required=True,
        wait_ms=10_000,
        options=ClientOptions(address=server.address, lookup_deadline_ms=10_000),
    )


def test_drain_ends_the_server_and_keeps_its_blocks(kvkeep: Run) -> None:
    with ServerProcess(*POOL) as server:
        with connect(server) as cache:
            cache.put(range(8), [[7] * 4096] * 2)  # type: ignore[arg-type]
        said = kvkeep("drain", "--http", server.http, "--json")
        assert said.returncode == 0
        answer = json.loads(said.stdout)
        assert (answer["drained"], answer["blocks"], answer["kept"]) == (True, 2, True) and answer[
            "seconds"
        ] >= 0
        assert server.process is not None and server.process.wait(60) == 0
        assert "an operator asked for it" in server.stop()
        server.start()
        with connect(server) as cache:
            assert cache.contains(range(8)) == 2  # type: ignore[arg-type]
        text = kvkeep("drain", "--http", server.http).stdout
        assert "the server has ended after" in text and "2 blocks kept for the next one" in text


def test_drain_lets_a_store_end_and_admits_nothing_more(kvkeep: Run) -> None:
    with ServerProcess(*POOL, "--shutdown-grace", "1h") as server, connect(server) as cache:
        connection = cache.connection
        assert connection.layout is not None
        cache.put(range(4), [[7] * 4096])  # type: ignore[arg-type]
        layout = connection.layout.layout
        write = connection.call(m.PrepareStore("default", layout, 0, b"", b"k" * 16), 10_000)
        assert isinstance(connection.wait(write), m.Prepared)

        late = kvkeep("drain", "--http", server.http, "--wait-s", "0.3")
        assert late.returncode == 1 and "0 leases, 1 store under way" in late.stderr
        assert "hint: it will end by itself" in late.stderr
        assert cache.contains(range(4)) == 0, "a lookup is a miss"  # type: ignore[arg-type]
        refused = connection.call(m.PrepareStore("default", layout, 0, b"", b"l" * 16), 10_000)
        assert connection.wait(refused) is None and refused.failure == "shutting_down"

        ended: list[subprocess.CompletedProcess[str]] = []
        waiting = threading.Thread(
            target=lambda: ended.append(kvkeep("drain", "--http", server.http))
        )
        waiting.start()
        done = connection.wait(
            connection.call(m.CompleteStore(write.number, (5).to_bytes(8, "little")), 10_000)
        )
        assert done == m.Done(1), "what was begun may end"
        waiting.join(60)
        assert ended[0].returncode in (0, 3), "it may have ended before it was asked once more"
        assert server.process is not None and server.process.wait(60) == 0
        assert (Path("/dev/shm") / f"kvkeep-{server.name}" / "index-header").exists()


def test_without_keep_pool_the_blocks_go(kvkeep: Run) -> None:
    with ServerProcess(*POOL, "--no-keep-pool") as server:
        assert "0 blocks removed" in kvkeep("drain", "--http", server.http).stdout


def test_nobody_to_drain(kvkeep: Run) -> None:
    said = kvkeep("drain", "--http", "127.0.0.1:1")
    assert said.returncode == 3 and "no kvkeep server answers" in said.stderr
