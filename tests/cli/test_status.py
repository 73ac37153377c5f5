from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from typing import Any

from kvkeep.cli.status import facts, time_since
from kvkeep.server.snapshot import RestartShown
from kvkeep.testing.process import ServerProcess

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_status_for_people_and_for_programs(kvkeep: Run, server: ServerProcess) -> None:
    said = json.loads(kvkeep("status", "--http", server.http, "--json").stdout)
    assert said["pid"] == server.pid
    assert said["address"] == server.address and said["http_address"] == server.http
    text = kvkeep("status", env={"KVKEEP_HTTP": server.http}).stdout
    assert server.address in text and f"pid {server.pid}" in text and "64MiB" in text


def status(**changes: Any) -> dict[str, Any]:
    zero = ["lookups", "lookup_blocks", "hit_blocks", "stored_blocks", "stored_bytes", "evictions"]
    counters = dict.fromkeys([*zero, "bad_blocks", "internal_errors", "sessions_died", "scrubbed_blocks"], 0)
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
        "quotas": {"promised_bytes": 0, "in_force_bytes": 1 << 31, "overcommitted": True},
        "sessions": [],
        "leases": 0,
        "writes": 0,
        "tenants": 2,
        "auth_failures": {"unknown_key": 3, "mechanism": 1},
        "restart": dataclasses.asdict(RestartShown()),
    } | changes


def test_facts_say_what_is_wrong() -> None:
    lines = dict(facts(status()))
    assert lines["server"].endswith("ready")
    assert lines["pool"] == "256MiB of 1GiB in use, 512MiB filled"
    assert lines["blocks"] == "1,234 ready"
    assert lines["lookups"] == "2, 6 of 8 blocks found (75.0%)"
    assert lines["degraded"] == "no more memory"
    assert "2GiB" in lines["warning"]
    assert lines["bad blocks"] == "3"
    assert lines["turned away"] == "1 mechanism, 3 unknown_key"
    assert "internal errors" not in lines


def test_facts_of_a_server_that_took_over() -> None:
    assert not {"adopted", "held"} & dict(facts(status())).keys()
    restart = RestartShown(2000, 1 << 20, 0.25, 3, old_sessions=1, held_by_old_sessions=4)
    lines = dict(facts(status(restart=dataclasses.asdict(restart))))
    assert lines["adopted"] == "2,000 blocks in 0.25 s, 3 dropped; 0 looked through"
    assert lines["held"] == "4 blocks for 1 process of the server before"


def test_facts_of_a_server_that_is_not_ready() -> None:
    assert dict(facts(status(ready=False)))["server"].endswith("filling its pool")
    assert dict(facts(status(stopping=True)))["server"].endswith("stopping")


def test_facts_count_in_words() -> None:
    lines = dict(facts(status(leases=1, writes=2)))
    assert lines["sessions"] == "0, 1 lease, 2 stores under way"
    assert lines["up"] == "1m 30s"


def test_how_long_it_is_up() -> None:
    times = {0.4: "0s", 12: "12s", 60: "1m", 103: "1m 43s", 7500: "2h 5m", 86400: "1d", 90061: "1d 1h"}
    assert {seconds: time_since(seconds) for seconds in times} == times
