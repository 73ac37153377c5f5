"""A store over what is left: adopted, or other memory, but always a store."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvkeep.errors import PoolError
from kvkeep.server import startup as module
from kvkeep.server.startup import open_store, warn_of_small_pool
from kvkeep.store.plans import Limits
from kvkeep.store.store import Store
from kvkeep.tiers.free_memory import Room
from kvkeep.tiers.memory import Pool
from kvkeep.units import MIB
from kvkeep.wire.pool_files import hold
from kvkeep_lab.simulation.store_integrity import check_integrity

SLAB = 1 << 16
KEYS = bytes(range(48))


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(epoch: int, **options: bool) -> Pool:
        made.append(Pool(tmp_path, "test", 4 * SLAB, SLAB, epoch, keep=True, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def leave_three_blocks(pool: Pool) -> None:
    """What a server that was killed leaves: two blocks that are ready, one being written."""
    store, _ = open_store(pool, Limits(), 0)
    store.add_slabs(*pool.fill_next())
    store.open_session(1)
    layout = store.open_layout(1, b"f", (64,)).number
    store.prepare_store(1, 1, "default", layout, 0, b"", KEYS[:32], 0)
    store.complete_store(1, 1, np.array([1, 2], np.uint64), 0)
    store.prepare_store(1, 2, "default", layout, 0, KEYS[16:32], KEYS[32:], 0)


def hit(store: Store) -> int:
    store.open_session(1)
    return store.lookup(
        1, 9, "default", store.open_layout(1, b"f", (64,)).number, KEYS, 0, 0
    ).blocks


def test_blocks_are_adopted(pools: Callable[..., Pool], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = pools(1)
    leave_three_blocks(first)
    first.close(keep=True)
    second = pools(2)
    store, start = open_store(second, Limits(), 0)
    assert (start.adoption.blocks, start.adoption.dropped, start.adoption.held) == (
        2,
        1,
        0,
    ) and start.seconds > 0
    assert start.why_cold == ""
    assert "adopted 2 blocks, 8KiB, in" in caplog.text
    assert "dropped 1 that could not be proven" in caplog.text
    assert hit(store) == 2
    check_integrity(store)


def reopened(folder: Path, slabs: int, epoch: int) -> Pool:
    return Pool(folder, "test", slabs * SLAB, SLAB, epoch, keep=True)


def bytes_of(store: Store, pool: Pool) -> dict[bytes, bytes]:
    """What lies in the slot of each block."""
    table, [owner] = store.blocks.table, [*store.tenants]
    return {
        key: pool.segments.view(table.slot[row], 4096).tobytes() for key, row in owner.index.items()
    }


@pytest.mark.parametrize("killed", [False, True])
def test_a_pool_is_resized_with_what_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, killed: bool
) -> None:
    """4 slabs of 16 blocks, all in use, become 7 and then 2: the blocks used last stay, with their
    bytes."""
    caplog.set_level(logging.INFO)
    pool = reopened(tmp_path, 4, 1)
    store, _ = open_store(pool, Limits(), 0)
    store.add_slabs(*pool.fill_next())
    store.open_session(1)
    layout = store.open_layout(1, b"f", (64,)).number
    keys = [number.to_bytes(16, "big") for number in range(64)]
    written = {}
    for number, key in enumerate(keys):
        plan = store.prepare_store(1, number, "default", layout, 0, b"", key, number)
        pool.segments.view(int(plan.slots[0]), 4096)[:] = number
        written[key] = bytes([number]) * 4096
        store.complete_store(1, number, np.array([number + 1], np.uint64), number)

    for epoch, slabs in ((2, 7), (3, 2), (4, 2), (5, 3)):
        pool.let_go() if killed else pool.close(keep=True)
        pool = reopened(tmp_path, slabs, epoch)
        store, start = open_store(pool, Limits(), 0)
        assert start.why_cold == "" and pool.filled_bytes == slabs * SLAB
        assert store.slabs.slabs == slabs
        check_integrity(store)
        kept = keys if slabs == 7 else keys[-32:]
        assert bytes_of(store, pool) == {key: written[key] for key in kept}
        held = sum(each.stat().st_blocks * 512 for each in pool.directory.glob("segment-*"))
        assert held <= slabs * SLAB, "the rest is free memory"
    assert "32 that the smaller pool has no room for" in caplog.text
    pool.close()


def test_a_pool_that_cannot_be_that_large_loses_nothing(
    tmp_path: Path, pools: Callable[..., Pool]
) -> None:
    first = pools(1)
    leave_three_blocks(first)
    first.close(keep=True)
    with pytest.raises(PoolError, match="a pool of 60TiB does not fit"):
        reopened(tmp_path, (60 << 40) // SLAB, 2)
    store, start = open_store(pools(3), Limits(), 0)
    assert start.adoption.blocks == 2 and hit(store) == 2


def test_a_fresh_pool_is_empty(pools: Callable[..., Pool]) -> None:
    first = pools(1)
    leave_three_blocks(first)
    first.close(keep=True)
    second = pools(2, fresh=True)
    store, start = open_store(second, Limits(), 0)
    assert start.adoption.blocks == 0 and hit(store) == 0 and not second.not_adopted
    assert start.why_cold == "--fresh was given"


def test_why_a_server_starts_empty(pools: Callable[..., Pool], tmp_path: Path) -> None:
    first = pools(1)
    assert open_store(first, Limits(), 0)[1].why_cold == "no server before it has left anything"
    first.fill_next()
    first.close(keep=True)
    (first.directory / "index-header").unlink()
    assert open_store(pools(2), Limits(), 0)[1].why_cold == "its index has no header"
    other = Pool(tmp_path, "other", 4 * SLAB, SLAB, 3, keep=False)
    assert open_store(other, Limits(), 0)[1].why_cold == "keep_pool is off"
    other.close()


@pytest.mark.parametrize("fault", ["contradiction", "raises"])
def test_when_it_cannot_be_adopted_other_memory_is_used(
    fault: str,
    pools: Callable[..., Pool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = pools(1)
    leave_three_blocks(first)
    watch = first.watch(1)
    writer = hold(watch.path)
    watch.leave()
    first.columns.grow("layout", np.int32, 0, 0)[2] = 5
    first.close(keep=True)
    if fault == "raises":
        monkeypatch.setattr(module, "adopt", lambda *_: 1 // 0)
    second = pools(2)
    old = os.open(second.directory / "segment-00000", os.O_RDONLY)  # or its number is used again
    before = os.fstat(old).st_ino
    store, start = open_store(second, Limits(), 0)
    assert start.adoption.blocks == 0 and "the server starts empty" in caplog.text
    assert start.why_cold.startswith(
        "processes of the old" if fault == "contradiction" else "adopting the old pool failed"
    )
    store.add_slabs(*second.fill_next())
    assert (second.directory / "segment-00000").stat().st_ino != before, (
        "whose memory the old is, nobody knows"
    )
    os.close(old)
    assert hit(store) == 0 and second.old_sessions() == 0
    check_integrity(store)
    os.close(writer)


@pytest.fixture(autouse=True)
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(62 * MIB, 64 * MIB, "/dev/shm has 64MiB free", "make /dev/shm larger")
    monkeypatch.setattr(module, "pool_room", lambda directory: room)


def pool(pool_bytes: int, is_left: bool = False) -> Any:
    return cast(
        Any, SimpleNamespace(directory=Path("/dev/shm/x"), pool_bytes=pool_bytes, is_left=is_left)
    )


def test_a_small_pool_is_warned_of_with_the_reason_and_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_small_pool(pool(56 * MIB))
    assert caplog.messages == [
        "pool_size = auto came to only 56MiB: /dev/shm has 64MiB free; make /dev/shm larger, "
        "then start the server with --fresh"
    ]


def test_a_small_pool_that_was_adopted_names_the_way_to_a_larger_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_small_pool(pool(56 * MIB, is_left=True))
    assert "took only 56MiB, the size of the pool that the last server left" in caplog.text
    assert "--fresh" in caplog.text


def test_of_a_larger_pool_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_small_pool(pool(256 * MIB))
    assert not caplog.messages
