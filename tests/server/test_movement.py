"""Blocks between memory and a disk, with a real server, a real mover and real files.

A block's content follows from its tokens, so each test compares every byte that it gets."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvkeep
from kvkeep.client.options import ClientOptions
from kvkeep.errors import Unavailable
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess

SHAPE = (64, 256)  # 64 KiB a block
BLOCKS = 48


class World:
    """A server with 8 MiB of memory and a disk, or several, and a client."""

    def __init__(self, *disks: Path, size: str = "64MiB") -> None:
        self.disk = disks[0]
        tiers = [("--tier", f"disk://{disk}?size={size}") for disk in disks]
        self.server = ServerProcess(
            *("--pool-size", "8MiB", "--slab-size", "1MiB"),
            *(flag for tier in tiers for flag in tier),
        )
        self.server.start()
        self._cache: kvkeep.Cache | None = None

    @property
    def cache(self) -> kvkeep.Cache:
        if self._cache is None:
            self._cache = kvkeep.connect(
                self.server.address,
                model="m",
                revision="1",
                block_tokens=4,
                block_shape=SHAPE,
                dtype="float32",
                required=True,
                wait_ms=20_000,
                options=ClientOptions(lookup_deadline_ms=20_000),
            )
        return self._cache

    def put(
        self, conversation: int, salt: str | None = None, new: int = BLOCKS, ttl_ms: int = 0
    ) -> None:
        """Stores a conversation, of which the server lacks `new` blocks."""
        tokens, given = tokens_of(conversation, BLOCKS), blocks_of(conversation, BLOCKS)
        assert self.cache.put(tokens, given, salt=salt, ttl_ms=ttl_ms) == new

    def get(self, conversation: int, count: int = BLOCKS, salt: str | None = None) -> int:
        """How many blocks come back. All of them are right."""
        found = self.cache.get(tokens_of(conversation, count), salt=salt)
        assert (found == blocks_of(conversation, count)[: len(found)]).all()
        return len(found)

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.server.http}{path}") as answer:
            return json.load(answer)

    def tiers(self) -> list[dict[str, Any]]:
        tiers: list[dict[str, Any]] = self.ask("/v1/tiers")
        return tiers

    def tier(self) -> dict[str, Any]:
        (tier,) = self.tiers()
        return tier

    def admin(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        token = (self.server.state_dir / self.server.name / "admin.token").read_text().strip()
        request = urllib.request.Request(
            f"http://{self.server.http}{path}",
            method=method,
            data=json.dumps(body).encode() if body is not None else None,
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        urllib.request.urlopen(request).close()

    def written(self, blocks: int) -> bool:
        return bool(self.tier()["counts"]["written_blocks"] >= blocks)

    def restart(self, number: signal.Signals = signal.SIGTERM, keep: bool = False) -> None:
        """Another server, without what this one had in memory."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None
        self.server.stop(number)
        if not keep:
            shutil.rmtree(self.server.pool, ignore_errors=True)
        self.server.start()

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
        self.server.__exit__(None, None, None)


def tokens_of(conversation: int, count: int) -> list[int]:
    return list(range(conversation * 10_000, conversation * 10_000 + 4 * count))


def blocks_of(conversation: int, count: int) -> NDArray[np.float32]:
    blocks = np.random.default_rng(conversation).random((count, *SHAPE))
    return blocks.astype(np.float32)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "disk")
    yield made
    made.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_blocks_survive_the_loss_of_memory(world: World, number: signal.Signals) -> None:
    world.put(1)
    assert eventually(lambda: world.written(BLOCKS))
    world.restart(number)
    assert eventually(lambda: world.get(1) == BLOCKS)
    assert world.tier()["counts"]["promoted_blocks"] == BLOCKS


def test_what_memory_has_evicted_comes_back_from_disk(world: World) -> None:
    """Eight conversations of 3 MiB, of which memory holds two."""
    for conversation in range(8):
        world.put(conversation)
        assert eventually(lambda: world.written(BLOCKS * (conversation + 1)))  # noqa: B023
    for conversation in range(8):
        assert eventually(lambda: world.get(conversation) == BLOCKS)  # noqa: B023
    assert world.tier()["evicted_unwritten"] == 0


def test_a_prefix_comes_back_without_its_end(world: World) -> None:
    world.put(1)
    assert eventually(lambda: world.written(BLOCKS))
    world.restart()
    assert eventually(lambda: world.get(1, 7) == 7)
    assert world.tier()["counts"]["promoted_blocks"] == 7


def test_a_bad_block_on_disk_is_a_miss(world: World) -> None:
    world.put(1)
    assert eventually(lambda: world.written(BLOCKS))
    world.restart()
    content = (world.disk / "data").read_bytes()
    place = content.index(blocks_of(1, BLOCKS)[20].tobytes())
    with open(world.disk / "data", "r+b") as data:
        data.seek(place)
        data.write(b"wrong")
        os.fsync(data.fileno())
    assert eventually(lambda: world.get(1) >= 0 and world.tier()["counts"]["bad_blocks"] == 1)
    assert eventually(lambda: world.get(1) == 20)
    world.put(1, new=BLOCKS - 20)
    assert world.get(1) == BLOCKS


def test_cleared_blocks_stay_cleared(world: World) -> None:
    world.put(1)
    world.put(2, salt="blue")
    assert eventually(lambda: world.written(2 * BLOCKS))
    world.admin("DELETE", "/v1/tenants/default/blocks")
    assert world.get(1) == 0
    assert eventually(
        lambda: world.tier()["in_flight_bytes"] == 0 and world.tier()["blocks"] == BLOCKS
    )
    world.restart()
    assert eventually(lambda: world.get(2, salt="blue") == BLOCKS)
    assert world.get(1) == 0


def test_a_tenant_with_blocks_on_disk_only_is_cleared_for_good(world: World) -> None:
    """Also if the server is killed as soon as the command has returned."""
    world.put(1)
    world.put(2, salt="blue")
    assert eventually(lambda: world.written(2 * BLOCKS))
    world.restart()
    assert world.ask("/v1/status")["pool"]["blocks"]["ready"] == 0
    world.admin("DELETE", "/v1/tenants/default/blocks")
    world.restart(signal.SIGKILL)
    assert world.tier()["blocks"] == BLOCKS
    assert world.get(1) == 0
    assert eventually(lambda: world.get(2, salt="blue") == BLOCKS)


def test_what_was_cleared_in_memory_and_on_disk_is_gone_after_a_kill(world: World) -> None:
    world.put(1)
    assert eventually(lambda: world.written(BLOCKS))
    world.admin("DELETE", "/v1/blocks?confirm=everything")
    world.restart(signal.SIGKILL, keep=True)
    assert world.tier()["blocks"] == 0 and world.get(1) == 0


def test_a_time_to_live_goes_on_over_a_restart(world: World) -> None:
    world.put(1, ttl_ms=1)
    world.put(2, ttl_ms=3_600_000)
    assert eventually(lambda: world.written(2 * BLOCKS))
    world.restart()
    assert world.tier()["blocks"] == BLOCKS and world.get(1) == 0
    assert eventually(lambda: world.get(2) == BLOCKS)


def test_a_clear_that_a_disk_cannot_note_is_not_confirmed(world: World) -> None:
    """The next server uses the disk again, and finds what was on it."""
    world.put(1)
    assert eventually(lambda: world.written(BLOCKS))
    (mover,) = children_of(world.server.pid)
    os.kill(mover, signal.SIGKILL)
    assert eventually(lambda: world.tier()["state"] == "set aside")
    with pytest.raises(urllib.error.HTTPError) as refused:
        world.admin("DELETE", "/v1/tenants/default/blocks")
    assert json.load(refused.value)["error"] == "outcome_unknown"
    assert world.get(1) == 0
    world.restart()
    world.admin("DELETE", "/v1/tenants/default/blocks")
    world.restart()
    assert world.tier()["blocks"] == 0 and world.get(1) == 0


def test_a_tenant_that_may_use_nothing_has_nothing_on_disk(world: World) -> None:
    world.put(1)
    world.put(2, salt="blue")
    assert eventually(lambda: world.written(2 * BLOCKS))
    world.admin("PUT", "/v1/tenants/default/limit", {"limit_bytes": 0})
    assert eventually(lambda: world.tier()["blocks"] == BLOCKS)
    world.restart()
    assert world.get(1) == 0
    assert eventually(lambda: world.get(2, salt="blue") == BLOCKS)


def test_what_was_stored_just_before_the_end_is_on_disk(world: World) -> None:
    for conversation in range(2):
        world.put(conversation)
    world.restart()
    for conversation in range(2):
        assert eventually(lambda: world.get(conversation) == BLOCKS)  # noqa: B023


def test_a_full_disk_evicts_and_never_takes_more_than_its_size(tmp_path: Path) -> None:
    """20 conversations of 3 MiB on a disk of 16 MiB, each used twice so that it is admitted. Its size
    is looked at all the time, also while the server makes and opens its files."""
    with watching(tmp_path / "disk") as seen:
        fill_and_restart(tmp_path / "disk")
    assert len(seen) > 100 and 15 << 20 < max(seen) <= 16 << 20


def fill_and_restart(disk: Path) -> None:
    world = World(disk, size="16MiB")
    try:
        for conversation in range(20):
            world.put(conversation)
            assert world.get(conversation) == BLOCKS
            assert eventually(lambda: world.tier()["in_flight_bytes"] == 0)
        tier = world.tier()
        assert tier["used_bytes"] <= tier["capacity_bytes"] < 16 << 20
        assert tier["counts"]["written_blocks"] > tier["blocks"] > 0 and tier["state"] == "ok"
        world.restart()
        assert world.tier()["blocks"] == tier["blocks"]
    finally:
        world.close()


def written(world: World) -> int:
    return sum(tier["counts"]["written_blocks"] for tier in world.tiers())


def test_several_disks_share_the_conversations(tmp_path: Path) -> None:
    world = World(tmp_path / "one", tmp_path / "two")
    try:
        for conversation in range(12):
            world.put(conversation)
            # what is being written keeps its memory, so the next one might have no room
            assert eventually(lambda: written(world) == BLOCKS * (conversation + 1))  # noqa: B023
        assert all(tier["blocks"] for tier in world.tiers())
        world.restart()
        for conversation in range(12):
            assert eventually(lambda: world.get(conversation) == BLOCKS)  # noqa: B023
    finally:
        world.close()


def test_a_directory_has_one_server_at_a_time(world: World) -> None:
    with pytest.raises(Unavailable, match="disk tier"):
        World(world.disk)


def test_a_mover_that_is_killed_costs_the_disk_and_nothing_else(world: World) -> None:
    world.put(1)
    assert eventually(lambda: world.written(BLOCKS))
    (mover,) = children_of(world.server.pid)
    os.kill(mover, signal.SIGKILL)
    assert eventually(lambda: world.tier()["state"] == "set aside")
    assert world.get(1) == BLOCKS
    world.put(2)
    assert world.get(2) == BLOCKS
    assert "is set aside" in world.server.log()
    world.restart()
    assert eventually(lambda: world.get(1) == BLOCKS)


def test_a_stopped_mover_holds_nothing_up(world: World) -> None:
    world.put(1)
    assert eventually(lambda: world.written(BLOCKS))
    (mover,) = children_of(world.server.pid)
    os.kill(mover, signal.SIGSTOP)
    try:
        for conversation in range(2, 8):
            world.put(conversation)
            assert world.get(conversation) == BLOCKS
        assert world.tier()["in_flight_bytes"] <= 64 << 20
    finally:
        os.kill(mover, signal.SIGCONT)


def test_the_mover_ends_with_its_server(world: World) -> None:
    (mover,) = children_of(world.server.pid)
    world.server.stop(signal.SIGKILL)
    assert eventually(lambda: not Path(f"/proc/{mover}").exists())


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_server_loses_nothing_that_was_on_disk(
    world: World, seed: int, request: pytest.FixtureRequest
) -> None:
    """SIGKILL at any moment of writing, again and again; memory is lost each time."""
    chance, found = random.Random(seed), 0
    conversations = 18 if request.config.getoption("--tier") == "nightly" else 6
    for conversation in range(conversations):
        world.put(conversation)
        time.sleep(chance.random() * 0.05)
        acknowledged = found + world.tier()["counts"]["written_blocks"]
        world.restart(signal.SIGKILL)
        found = world.tier()["blocks"]
        assert acknowledged <= found <= BLOCKS * (conversation + 1)
    world.put(conversations)
    assert eventually(lambda: world.written(BLOCKS))
    world.restart(signal.SIGKILL)
    assert world.tier()["blocks"] >= found + BLOCKS
    # `get` compares every byte. Of a conversation that was being written there may be a part.
    for conversation in range(conversations):
        world.get(conversation)
    assert eventually(lambda: world.get(conversations) == BLOCKS)


@contextmanager
def watching(directory: Path) -> Iterator[list[int]]:
    """Allocated bytes of a directory, as often as a thread can look."""
    seen: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.0005):
            seen.append(allocated_bytes(directory))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def allocated_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a draft that has its name by now
            found = path.stat()
            total += 512 * found.st_blocks if stat.S_ISREG(found.st_mode) else 0
    return total


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_a_clear_of_everything_leaves_nothing_that_lookups_could_bring_back(world: World) -> None:
    salts = [f"salt {number}" for number in range(40)]
    for salt in salts:
        world.put(1, salt=salt, new=BLOCKS)
    assert eventually(lambda: world.tier()["to_write_chains"] == 0)
    stopped = threading.Event()

    def look_up() -> None:
        chance = random.Random(1)
        while not stopped.is_set():
            world.get(1, salt=chance.choice(salts))

    reader = threading.Thread(target=look_up)
    reader.start()
    try:
        world.admin("DELETE", "/v1/blocks?confirm=everything")
    finally:
        stopped.set()
        reader.join(60)
    time.sleep(0.2)  # a promotion that was under way would end now
    assert [world.get(1, salt=salt) for salt in salts] == [0] * len(salts)
