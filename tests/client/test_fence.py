"""The lock and the memory of a session on the server's host: taken, held, and let go of by the kernel's rules."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.client.fence import Fence
from kvkeep.tiers.memory import Pool
from kvkeep.wire.liveness import Watch
from kvkeep.wire.messages import PoolPlace, Welcome, WireLimits

SLAB = 1 << 20


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    pool = Pool(tmp_path, "fence", 2 * SLAB, SLAB, epoch=7)
    pool.fill_next()
    yield pool
    pool.close()


def welcome(pool: Pool, watch: Watch | None, epoch: int = 7) -> Welcome:
    lock = str(watch.path) if watch else ""
    place = PoolPlace(str(pool.directory), lock, pool.segment_bytes, pool.pool_bytes)
    return Welcome(1, epoch, "kvkeep", place, WireLimits(1, 1, 1, 1), [], True)


def test_the_lock_falls_when_the_session_is_over_and_the_last_copy_has_ended(pool: Pool) -> None:
    watch = pool.watch(1)
    fence = Fence.take(welcome(pool, watch))
    assert fence is not None and watch.is_held()
    fence.hold()
    fence.hold()
    fence.let_go()
    fence.unhold()
    assert watch.is_held(), "one copy is still under way"
    fence.unhold()
    assert not watch.is_held()
    fence.let_go()
    watch.close()


def test_who_comes_when_the_session_is_over_does_not_hold_it(pool: Pool) -> None:
    watch = pool.watch(1)
    fence = Fence.take(welcome(pool, watch))
    assert fence is not None and fence.hold()
    fence.let_go()
    assert not fence.hold() and watch.is_held()
    fence.unhold()
    assert not fence.hold() and not watch.is_held()
    watch.close()


def test_memory_is_unmapped_when_the_last_copy_has_ended_and_unpinned_before_that(pool: Pool) -> None:
    watch = pool.watch(1)
    fence = Fence.take(welcome(pool, watch))
    assert fence is not None and fence.hold()
    pinned, unpinned = [], []

    def pin(address: int, nbytes: int) -> bool:
        pinned.append(address)
        return True

    def unpin(address: int) -> None:
        assert mapped(pool) == before, "it is still there"
        unpinned.append(address)

    while fence.segments.populate_next(pin, unpin):
        pass
    before = mapped(pool)
    fence.let_go()
    assert mapped(pool) == before and not unpinned, "one copy is still under way"
    fence.unhold()
    assert mapped(pool) < before
    assert len(pinned) == 1 and unpinned == pinned
    fence.let_go()
    assert unpinned == pinned
    watch.close()


def mapped(pool: Pool) -> int:
    return Path("/proc/self/maps").read_text().count(f"{pool.directory}/segment-")


def test_threads_that_come_and_go_leave_it_to_the_last(pool: Pool) -> None:
    watch = pool.watch(1)
    fence = Fence.take(welcome(pool, watch))
    assert fence is not None
    held, over = [0, 0, 0], threading.Event()

    def come_and_go(number: int) -> None:
        while fence.hold():
            held[number] += 1
            fence.unhold()
            if min(held) >= 1_000:
                over.set()

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(len(held))]
    for thread in threads:
        thread.start()
    assert over.wait(30) and watch.is_held()
    fence.let_go()
    for thread in threads:
        thread.join()
    assert fence._holders == 0 and not watch.is_held()
    watch.close()


def test_there_is_no_fence_around_a_pool_that_is_not_here(pool: Pool) -> None:
    watch = pool.watch(1)
    assert Fence.take(welcome(pool, None)) is None
    assert Fence.take(welcome(pool, watch, epoch=8)) is None
    assert not watch.is_held()
    watch.close()


def test_a_lock_that_somebody_holds_cannot_be_had(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    watch = pool.watch(1)
    first = Fence.take(welcome(pool, watch))
    assert first is not None
    assert Fence.take(welcome(pool, watch)) is None
    assert "through the socket" in caplog.text
    first.let_go()
    watch.close()


def test_a_dead_server_is_told_from_a_living_one_by_its_lock(pool: Pool) -> None:
    watch = pool.watch(1)
    fence = Fence.take(welcome(pool, watch))
    assert fence is not None
    assert not fence.server_is_gone()
    watch.close()
    pool.close()
    assert fence.server_is_gone()
    fence.let_go()
