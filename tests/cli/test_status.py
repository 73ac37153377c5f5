from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.cli.keygen import make as make_keys
from kvkeep.cli.status import facts, time_since
from kvkeep.client.cache import connect
from kvkeep.client.options import ClientOptions
from kvkeep.server.status import RestartShown
from kvkeep.testing.process import ServerProcess

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
    options = ClientOptions(**{name: client[name] for name in ("tls_cert", "tls_key", "tls_ca")})
    block = {
        "block_tokens": 1,
        "block_shape": (512,),
        "dtype": "uint64",
        "required": True,
        "wait_ms": 10_000,
    }
    with ServerProcess("--pool-size", "1MiB", *flags) as server:
        with connect(server.address, model="m", revision="1", options=options, **block) as cache:
            assert cache.put([1, 2, 3], np.ones((3, 512), "uint64")) == 3
        server.stop(signal.SIGKILL)
        server.start()
        words = ["status", "--http", server.http, "--token-file", keys["server"]["admin_token"]]
        said = json.loads(kvkeep(*words, "--json").stdout)
        assert said["security"] == {"tls": True, "admin_token": True}
        assert said["restart"]["warm"] and said["restart"]["adopted_blocks"] == 3
        text = kvkeep(*words).stdout
        assert (
            "engines need a certificate (TLS), the admin API needs a token" in text
            and "warm: 3 blocks adopted in" in text
        )
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
        "sessions": [],
        "leases": 0,
        "writes": 0,
        "tenants": 2,
        "auth_failures": {"unknown_key": 3, "mechanism": 1},
        "restart": dataclasses.asdict(RestartShown(why_cold="--fresh was given")),
        "security": {"tls": True, "admin_token": False},
    } | changes


def test_facts_say_what_is_wrong() -> None:
    lines = dict(facts(status()))
    assert lines["server"].endswith("ready")
    assert lines["pool"] == "256MiB of 1GiB in use, 512MiB filled"
    assert lines["blocks"] == "1,234 ready"
    assert lines["lookups"] == "2, 6 of 8 blocks found (75.0%)"
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
    assert lines["start"] == "warm: 2,000 blocks adopted in 0.25 s, 3 dropped; 0 looked through"
    assert lines["held"] == "4 blocks for 1 process of the server before"


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
