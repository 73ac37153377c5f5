"""`kvkeep drain`: the server ends in order, and the command says when it has."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from caches import connect

from kvkeep.cli.admin import facts, time_since
from kvkeep.cli.keygen import make as make_keys
from kvkeep.server.figures import FiguresShown
from kvkeep.server.status import RestartShown
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_status_for_people_and_for_programs(kvkeep: Run, server: ServerProcess) -> None:
    said = json.loads(kvkeep("status", "--http", server.http, "--json").stdout)
    assert said["pid"] == server.pid
    assert said["address"] == server.address and said["http_address"] == server.http
    text = kvkeep("status", env={"KVKEEP_HTTP": server.http}).stdout
    assert server.address in text and f"pid {server.pid}" in text and "64MiB" in text
    assert said["security"] == {"tls": False, "admin_token": False}
    assert "engines need no certificate, the admin API needs a token for changes" in text
    assert "cold: no server before it has left anything" in text


def test_a_server_with_certificates_says_so_and_how_it_started(kvkeep: Run, tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", ["engine"], "", True)
    flags = [
        word
        for name, value in keys["server"].items()
        for word in ("--" + name.replace("_", "-"), value)
    ]
    (client,) = keys["clients"]
    tls = {name: client[name] for name in ("tls_cert", "tls_key", "tls_ca")}
    with ServerProcess("--pool-size", "1MiB", *flags) as server:
        with connect(server, **tls) as cache:
            assert cache.put([1, 2, 3], np.ones((3, 512), "uint64")) == 3
        server.stop(signal.SIGKILL)
        server.start()
        words = ["status", "--http", server.http, "--token-file", keys["server"]["admin_token"]]
        said = json.loads(kvkeep(*words, "--json").stdout)
        assert said["security"] == {"tls": True, "admin_token": True}
        assert said["restart"]["warm"] and said["restart"]["adopted_blocks"] == 3
        text = kvkeep(*words).stdout
        assert "engines need a certificate (TLS), the admin API needs a token" in text
        assert "warm: 3 blocks adopted in" in text
        server.stop(signal.SIGTERM)
        server.start("--fresh")
        words[2] = server.http
        assert "cold: --fresh was given" in kvkeep(*words).stdout


def status(**changes: Any) -> dict[str, Any]:
    zero = ["lookups", "lookup_blocks", "hit_blocks", "stored_blocks", "stored_bytes", "evictions"]
    counters = dict.fromkeys(
        [*zero, "bad_blocks", "internal_errors", "sessions_died", "scrubbed_blocks"], 0
    )
    return {
        "name": "a",
        "version": "1",
        "pid": 1,
        "uptime_s": 90.0,
        "address": "tcp://127.0.0.1:1",
        "http_address": "127.0.0.1:2",
        "ready": True,
        "stopping": False,
        "pool": {
            "pool_bytes": 1 << 30,
            "filled_bytes": 1 << 29,
            "used_bytes": {"ready": 1 << 28},
            "blocks": {"ready": 1234, "writing": 0},
            "degraded": "no more memory",
        },
        "counters": counters | {"lookups": 2, "lookup_blocks": 8, "hit_blocks": 6, "bad_blocks": 3},
        "quotas": {
            "promised_bytes": 0,
            "in_force_bytes": 1 << 31,
            "overcommitted": True,
            "scaled_down": True,
        },
        "open_sessions": {"shared_memory": 0, "none": 0},
        "sessions": [],
        "leases": 0,
        "writes": 0,
        "tenants": 2,
        "auth_failures": {"unknown_key": 3, "mechanism": 1},
        "restart": dataclasses.asdict(RestartShown(why_cold="--fresh was given")),
        "security": {"tls": True, "admin_token": False},
        "tiers": [],
        "evicted_blocks": {"own": 0, "others": 7},
        "evicted_age_s": 75.0,
        "figures": dataclasses.asdict(FiguresShown(3, 600, 200, 0, 100, 1.5)),
        "prompt_blocks": {"loaded": 37, "last": 3, "evicted": 2, "never_stored": 11_000},
    } | changes


def test_facts_count_sessions_for_those_without_the_token() -> None:
    said = status() | {"open_sessions": {"shared_memory": 2, "network": 1}, "sessions": None}
    assert dict(facts(said))["sessions"].startswith("3 (the token shows which), ")


def test_facts_say_what_is_wrong() -> None:
    lines = dict(facts(status()))
    assert lines["server"].endswith("ready")
    assert lines["pool"] == "256MiB of 1GiB in use, 512MiB filled"
    assert lines["blocks"] == "1,234 ready"
    assert lines["lookups"] == "2, 6 of 8 blocks found, also those that engines had"
    assert lines["cache"] == (
        "600 tokens loaded (75.0% of what no engine had), 200 computed, 1.5 s saved"
        " (not known for 100 tokens)"
    )
    assert lines["missed"] == "11,000 never stored, 2 evicted"
    assert lines["evictions"] == "0 (7 for other tenants), 1m 15s after their last use"
    assert lines["degraded"] == "no more memory"
    assert "2GiB" in lines["warning"] and "scaled down" in lines["quotas"]
    assert lines["bad blocks"] == "3"
    assert lines["turned away"] == "1 mechanism, 3 unknown_key"
    assert "internal errors" not in lines
    assert (
        lines["security"]
        == "engines need a certificate (TLS), the admin API needs a token for changes"
    )
    over_tls = status() | {
        "http_address": "https://0.0.0.0:5556",
        "security": {"tls": True, "admin_token": True},
    }
    assert dict(facts(over_tls))["security"].endswith(
        "the admin API needs a token or an admin's certificate"
    )


def test_facts_of_a_server_that_took_over() -> None:
    lines = dict(facts(status()))
    assert "held" not in lines and lines["start"] == "cold: --fresh was given"
    restart = RestartShown(
        2000, 1 << 20, 0.25, 3, old_sessions=1, held_by_old_sessions=4, warm=True
    )
    lines = dict(facts(status(restart=dataclasses.asdict(restart))))
    assert lines["start"] == "warm: 2,000 blocks adopted in 0.25 s, 3 dropped; 0 checked"
    assert lines["held"] == "4 blocks for 1 process of the last server"


def test_facts_of_a_server_that_was_asked_nothing() -> None:
    assert dict(facts(status(prompt_blocks={})))["missed"] == "none"


def test_facts_of_a_server_that_is_not_ready() -> None:
    assert dict(facts(status(ready=False)))["server"].endswith("filling its pool")
    assert dict(facts(status(stopping=True)))["server"].endswith("stopping")


def test_facts_count_in_words() -> None:
    lines = dict(facts(status(leases=1, writes=2)))
    assert lines["sessions"] == "0, 1 lease, 2 stores under way"
    assert lines["up"] == "1m 30s"


def test_how_long_it_is_up() -> None:
    times = {
        0.4: "0s",
        12: "12s",
        60: "1m",
        103: "1m 43s",
        7500: "2h 5m",
        86400: "1d",
        90061: "1d 1h",
    }
    assert {seconds: time_since(seconds) for seconds in times} == times


POOL = ("--pool-size", "4MiB")
SHAPE = (4, (4096,), "uint8")


def test_drain_ends_the_server_and_keeps_its_blocks(kvkeep: Run) -> None:
    with ServerProcess(*POOL) as server:
        with connect(server, *SHAPE) as cache:
            cache.put(range(8), [[7] * 4096] * 2)  # type: ignore[arg-type]
        said = kvkeep("drain", "--http", server.http, "--json")
        assert said.returncode == 0
        answer = json.loads(said.stdout)
        assert (answer["drained"], answer["blocks"], answer["kept"]) == (True, 2, True)
        assert answer["seconds"] >= 0
        assert server.process is not None and server.process.wait(60) == 0
        assert "an operator asked for it" in server.stop()
        server.start()
        with connect(server, *SHAPE) as cache:
            assert cache.contains(range(8)) == 2  # type: ignore[arg-type]
        text = kvkeep("drain", "--http", server.http).stdout
        assert "the server has ended after" in text and "2 blocks kept for the next one" in text


def test_drain_lets_a_store_end_and_admits_nothing_more(kvkeep: Run) -> None:
    with ServerProcess(*POOL, "--shutdown-grace", "1h") as server, connect(server, *SHAPE) as cache:
        connection = cache.connection
        assert connection.layout is not None
        cache.put(range(4), [[7] * 4096])  # type: ignore[arg-type]
        layout = connection.layout.layout
        write = connection.call(m.PrepareStore("default", layout, 0, b"", b"k" * 16), 10_000)
        assert isinstance(connection.wait(write), m.Prepared)

        late = kvkeep("drain", "--http", server.http, "--wait-s", "0.3")
        assert late.returncode == 1 and "0 leases, 1 store under way" in late.stderr
        assert "hint: it will end later" in late.stderr
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
