"""Blocks between two servers through a shared tier: a directory, or a service that the tests start.
What the process does with a tier is seen from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from services import Service, free_port, program
from shared_hosts import BLOCKS, Host, blocks_of, host, tokens_of
from shared_services import KINDS, SharedService, service

from kvkeep.cli.remote import ask
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.clock import eventually
from kvkeep.tiers.tier_keys import new_tier_keys


@pytest.fixture(params=[kind for kind in KINDS if kind != "file"])
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedService]:
    with service(request.param, tmp_path) as started:
        yield started


@pytest.fixture(params=KINDS)
def every_kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedService]:
    with service(request.param, tmp_path) as started:
        yield started


def using(running: SharedService, **more: str) -> AbstractContextManager[Host]:
    return host(running.address, environment={**running.environment, **more})


def test_a_service_carries_blocks_from_one_host_to_the_other(running: SharedService) -> None:
    with using(running) as one, using(running) as two:
        one.put(1)
        one.put(2, salt="blue")
        assert one.written(2 * BLOCKS)
        assert two.has(1) and two.has(2, "blue")
        one.clear("default")
        assert eventually(lambda: two.get(1) == 0)
        assert two.get(2, "blue") == BLOCKS


@pytest.mark.parametrize(
    ("kind", "is_encrypted"), [*((kind, False) for kind in KINDS), ("s3", True)]
)
def test_several_blocks_are_in_an_object(tmp_path: Path, kind: str, is_encrypted: bool) -> None:
    """Two hosts store prompts that diverge; neither knows what the other has stored."""
    keys = tmp_path / "tier.keys"
    keys.touch(0o600)
    keys.write_text(new_tier_keys())
    more = ["--pool-size", "128MiB", *(("--tier-keys", str(keys)) if is_encrypted else ())]
    mixed = tokens_of(1)[:40] + tokens_of(2)[40:]
    content = np.concatenate([blocks_of(1)[:10], blocks_of(2)[10:]])
    with service(kind, tmp_path) as running:
        known = running.environment
        with (
            host(running.address, *more, environment=known) as one,
            host(running.address, *more, environment=known) as two,
        ):
            one.put(1)
            two.cache.put(mixed, content)
            assert one.written(BLOCKS) and two.written(BLOCKS)
            assert 2 <= len(running.objects()) < BLOCKS
        with host(running.address, *more, environment=known) as three:
            assert three.has(1)
            assert eventually(lambda: len(three.cache.get(mixed)) == BLOCKS)
            assert (three.cache.get(mixed) == content).all()


def test_what_a_host_stored_before_it_vanished_is_found_within_six_seconds(
    every_kind: SharedService,
) -> None:
    with using(every_kind) as one, using(every_kind) as two:
        two.put(2)
        assert two.written(BLOCKS), "it knows what the tier lacks"
        assert two.get(1) == 0
        one.put(1)
        assert one.written(BLOCKS)
        one.server.stop(signal.SIGKILL)
        assert eventually(lambda: two.get(1) == BLOCKS, limit_s=6)


def test_a_password_is_used_and_never_shown(tmp_path: Path) -> None:
    port, word = free_port(), "a-secret-word"
    command = [program("valkey-server", "redis-server"), "--port", str(port), "--save", ""]
    address, given = f"valkey://127.0.0.1:{port}/0", {"KVKEEP_VALKEY_PASSWORD": word}
    with (
        Service([*command, "--requirepass", word], tmp_path / "service", port),
        host(address, "--log-level", "debug", environment=given) as one,
        host(address, environment=given) as two,
    ):
        one.put(1)
        assert one.written(BLOCKS) and two.has(1)
        shown = [ask(one.server.http, path) for path in ("/v1/status", "/v1/tiers", "/v1/settings")]
        assert word not in json.dumps(shown) + one.server.log()


@contextmanager
def writing(one: Host, salt: str, first: int) -> Iterator[list[int]]:
    """Stores conversations, one after the other. Those that are stored so far."""
    stored: list[int] = []
    ends = threading.Event()

    def write() -> None:
        conversation = first
        while not ends.wait(0.05):
            if one.tier()["to_write_chains"] > 4:
                continue  # on a busy machine: it would leave memory before it is written
            # Some of its blocks may be cleared meanwhile.
            one.cache.put(tokens_of(conversation), blocks_of(conversation), salt=salt)
            stored.append(conversation)
            conversation += 1

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        try:
            yield stored
        finally:
            ends.set()
            writer.result()


def test_a_clear_leaves_nothing_to_reach_while_another_host_writes(
    every_kind: SharedService,
) -> None:
    """What the writer stores after the clear is new. Requests wait for the tier as long as it
    takes: nothing is missed for want of time."""

    def patient() -> AbstractContextManager[Host]:
        environment = every_kind.environment
        pool = ("--pool-size", "64MiB")
        return host(every_kind.address, *pool, environment=environment, patience="wait")

    cleared: list[int] = []
    with patient() as one, patient() as two:
        for clearing, first in ((two, 10), (one, 100)):
            with writing(one, "blue", first) as stored:
                assert eventually(lambda stored=stored: len(stored) >= 3)
                assert two.has(stored[0], "blue"), "it is in the tier, and in both memories"
                before = stored[:]
                # Again, as its answer asks for, as long as a busy host has not confirmed it.
                assert eventually(lambda by=clearing: by.clear(tenant_of("blue")) == [])
                assert not any(two.get(each, "blue") for each in before)
            assert not any(one.get(each, "blue") for each in before)
            cleared += before
        # A write that began before the clear ends after it.
        (mover,) = one.movers()
        os.kill(mover, signal.SIGSTOP)
        one.put(200, "blue")
        assert eventually(lambda: one.tier()["in_flight_bytes"] > 0)
        assert two.clear(tenant_of("blue")) == [name_of(one)]
        os.kill(mover, signal.SIGCONT)
        assert eventually(lambda: one.get(200, "blue") == 0), "it has not heard"
        assert eventually(lambda: one.tier()["in_flight_bytes"] == 0)
        assert two.get(200, "blue") == 0
        one.put(300, "blue")
        with patient() as three:
            assert three.has(300, "blue"), "what was stored after the clear"
            assert not any(three.get(each, "blue") for each in (*cleared, 200))


@pytest.mark.parametrize("kind", ["valkey", "s3"])
def test_hosts_share_over_tls_and_refuse_a_service_of_another_authority(
    kind: str, tmp_path: Path, kvkeep: Callable[..., Any]
) -> None:
    for name in ("ours", "foreign"):
        done = kvkeep("keygen", "--dir", str(tmp_path / name), "--host", "127.0.0.1")
        assert done.returncode == 0, done.stderr
    with service(kind, tmp_path, keys=tmp_path / "ours") as running:
        with using(running) as one, using(running) as two:
            one.put(1)
            assert one.written(BLOCKS) and two.has(1)
        foreign = running.address.replace(f"{tmp_path}/ours", f"{tmp_path}/foreign")
        with host(foreign, environment=running.environment) as stranger:
            stranger.put(2)
            assert stranger.get(1) == 0 and stranger.get(2) == BLOCKS, "memory"
            assert eventually(
                lambda: (
                    (shown := stranger.tier())["state"] == "set aside"
                    and "certificate" in shown["problem"]
                )
            ), stranger.tier()


def test_a_killed_service_costs_its_blocks_and_is_used_again(running: SharedService) -> None:
    with using(running) as one, using(running) as two:
        one.put(1)
        assert one.written(BLOCKS)
        running.kill()
        assert two.get(1) == 0 and one.get(1) == BLOCKS
        two.put(3)
        assert two.get(3) == BLOCKS
        assert eventually(lambda: two.tier()["state"] == "set aside", limit_s=60)
        running.start()
        assert eventually(lambda: two.tier()["state"] == "ok", limit_s=60)
        two.put(4)
        assert two.written(BLOCKS) and one.has(4)


def test_a_client_that_waits_for_half_a_minute_is_killed_with_its_process(tmp_path: Path) -> None:
    """As Mooncake's does by itself for a node that has stopped."""
    with (
        service("mooncake", tmp_path) as cluster,
        using(cluster) as one,
        using(cluster, MC_TCP_STATUS_TIMEOUT_SEC="40", MC_TCP_PROGRESS_TIMEOUT_SEC="40") as two,
    ):
        one.put(1)
        two.put(2)
        assert one.written(BLOCKS) and two.written(BLOCKS)
        (mover,) = two.movers()
        with cluster.node.paused():
            assert two.get(1) == 0 and two.get(2) == BLOCKS
            assert eventually(lambda: two.tier()["state"] == "set aside", limit_s=30)
            assert "more than 10 s" in two.tier()["problem"]
            assert eventually(lambda: mover not in two.movers())
            assert two.get(2) == BLOCKS
        assert eventually(lambda: two.tier()["state"] == "ok", limit_s=60)


def test_a_stalled_service_costs_its_blocks_and_is_used_again(running: SharedService) -> None:
    with using(running) as one, using(running) as two:
        one.put(1)
        assert one.written(BLOCKS)
        with running.paused():
            for conversation in (3, 4):
                two.put(conversation)
                assert two.get(conversation) == BLOCKS, "memory"
            assert two.get(1) == 0
            assert eventually(lambda: two.tier()["state"] == "set aside", limit_s=60)
            assert two.get(3) == two.get(4) == BLOCKS and two.get(1) == 0
        assert eventually(lambda: two.tier()["state"] == "ok", limit_s=120)
        assert two.has(1)
        assert eventually(lambda: one.get(3) == BLOCKS), "what was stored meanwhile is written"


def name_of(each: Host) -> str:
    """By which other hosts know it."""
    kept = each.server.state_dir / each.server.name / "shared-tier.json"
    return str(json.loads(kept.read_text())["host"])


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with host(tmp_path / "kv") as one, host(tmp_path / "kv") as two:
        yield one, two


def test_what_was_cleared_on_one_host_is_gone_on_all(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    one, two = hosts
    one.put(1)
    one.put(2, salt="blue")
    assert one.written(2 * BLOCKS)
    assert two.has(1) and two.has(2, "blue"), "both are in the other host's memory, too"
    shutil.copytree(tmp_path / "kv" / "v1", tmp_path / "before")
    one.clear("default")
    assert one.get(1) == 0
    assert eventually(lambda: two.get(1) == 0), "the other host has not heard"
    shutil.copytree(tmp_path / "before", tmp_path / "kv" / "v1", dirs_exist_ok=True)
    assert not eventually(lambda: two.get(1) > 0 or one.get(1) > 0, limit_s=4), "a late write"
    assert two.get(2, "blue") == BLOCKS, "another tenant was cleared"
    one.put(1)
    assert one.written(3 * BLOCKS)
    assert two.has(1), "what was stored after the clear"


def test_a_clear_waits_for_the_other_hosts_and_names_those_it_cannot_reach(
    hosts: tuple[Host, Host],
) -> None:
    one, two = hosts
    one.put(1)
    assert one.written(BLOCKS) and two.has(1)
    assert one.clear("default") == []
    assert two.get(1) == 0, "it has confirmed before the command has returned"
    two.cache.close()
    two.server.stop(signal.SIGKILL)
    assert one.clear("default") == [name_of(two)]
    two.server.start()
    assert eventually(lambda: one.clear("default") == [])


def test_what_the_tier_answers_after_a_clear_is_not_used(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    one.put(1)
    assert one.written(BLOCKS)
    two.put(3)
    (mover,) = two.movers()
    os.kill(mover, signal.SIGSTOP)
    assert two.get(1) == 0, "the tier was asked, and does not answer"
    with ThreadPoolExecutor(1) as pool:
        clearing = pool.submit(two.clear, "default")
        assert eventually(lambda: two.get(3) == 0), "the clear has not begun"
        os.kill(mover, signal.SIGCONT)
        clearing.result()
    assert two.get(1) == 0
    counts = two.tier()["counts"]
    assert counts["promoted_blocks"] == counts["lost_blocks"] == 0, "nothing was read"


def test_a_server_that_was_down_hears_of_a_clear_when_it_starts(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    one, two = hosts
    one.put(1)
    assert one.written(BLOCKS) and two.has(1)
    two.cache.close()
    two.server.stop(signal.SIGTERM)
    one.clear("default")
    two.server.start()
    status = lambda: ask(two.server.http, "/v1/status")  # noqa: E731
    assert eventually(lambda: status()["pool"]["blocks"].get("ready", 0) == 0)


def test_a_killed_mover_is_replaced(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    one.put(1)
    assert one.written(BLOCKS)
    (mover,) = two.movers()
    os.kill(mover, signal.SIGKILL)
    assert eventually(lambda: two.movers() not in ([], [mover]) and two.tier()["state"] == "ok")
    assert two.has(1)
    assert "answers again" in two.server.log()


def test_memory_goes_on_while_the_tier_is_gone_and_it_recovers(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    one, two = hosts
    one.put(1)
    assert one.written(BLOCKS)
    (tmp_path / "kv").rename(tmp_path / "away")
    (tmp_path / "kv").write_bytes(b"")  # so that no server makes a new one
    one.put(2)
    assert one.get(1) == one.get(2) == BLOCKS
    assert two.get(1) == 0
    assert eventually(lambda: two.tier()["state"] == "set aside", limit_s=60)
    assert one.get(1) == BLOCKS
    (tmp_path / "kv").unlink()
    (tmp_path / "away").rename(tmp_path / "kv")
    assert eventually(lambda: two.get(1) == BLOCKS, limit_s=120)


def test_a_server_starts_while_its_shared_tier_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "kv").write_bytes(b"")
    with host(tmp_path / "kv") as one:
        one.put(1)
        assert one.get(1) == BLOCKS
        assert eventually(lambda: one.tier()["state"] == "set aside")
        (tmp_path / "kv").unlink()
        assert eventually(lambda: one.tier()["state"] == "ok", limit_s=120)
        one.put(2)
        assert one.written(BLOCKS)


def test_a_stopped_mover_holds_nothing_up(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    one.put(1)
    assert one.written(BLOCKS)
    (mover,) = two.movers()
    os.kill(mover, signal.SIGSTOP)
    two.put(3)
    assert two.get(3) == BLOCKS
    assert two.get(1) == 0
    assert eventually(lambda: two.movers() not in ([], [mover]), limit_s=60)
    assert two.has(1)
