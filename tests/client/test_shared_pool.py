"""The lock and the memory of a session on the server's host: taken, held, and let go of by the
kernel's rules."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvkeep.cli.remote import ask as ask_http
from kvkeep.client.cache import connect
from kvkeep.client.options import ClientOptions
from kvkeep.client.shared_pool import SharedPool
from kvkeep.errors import UntrustedPool
from kvkeep.kv.keys import KeyChain, root_key
from kvkeep.testing.process import ServerProcess
from kvkeep.tiers.memory import Pool
from kvkeep.wire import messages as m
from kvkeep.wire import peers
from kvkeep.wire.messages import PoolPlace, Welcome, WireLimits
from kvkeep.wire.pool_files import Watch

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
    fence = SharedPool.attach(welcome(pool, watch))
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
    fence = SharedPool.attach(welcome(pool, watch))
    assert fence is not None and fence.hold()
    fence.let_go()
    assert not fence.hold() and watch.is_held()
    fence.unhold()
    assert not fence.hold() and not watch.is_held()
    watch.close()


def test_memory_is_unmapped_when_the_last_copy_has_ended_and_unpinned_before_that(
    pool: Pool,
) -> None:
    watch = pool.watch(1)
    fence = SharedPool.attach(welcome(pool, watch))
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
    fence = SharedPool.attach(welcome(pool, watch))
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
    assert fence.holders == 0 and not watch.is_held()
    watch.close()


def test_there_is_no_fence_around_a_pool_that_is_not_here(pool: Pool) -> None:
    watch = pool.watch(1)
    assert SharedPool.attach(welcome(pool, None)) is None
    assert SharedPool.attach(welcome(pool, watch, epoch=8)) is None
    assert not watch.is_held()
    watch.close()


@pytest.mark.parametrize("name", ["", "session", "daemon.lock", "segment-00000"])
@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_pool_that_others_may_write_is_not_mapped(pool: Pool, name: str, mode: int) -> None:
    before, fds = mapped(pool), len(os.listdir("/proc/self/fd"))
    watch = pool.watch(1)
    path = watch.path if name == "session" else pool.directory / name
    was = path.stat().st_mode
    path.chmod(mode)
    with pytest.raises(UntrustedPool, match=f"{path} can be written by other users"):
        SharedPool.attach(welcome(pool, watch))
    assert mapped(pool) == before and not watch.is_held()
    path.chmod(was)
    fence = SharedPool.attach(welcome(pool, watch))
    assert fence is not None, "as soon as it is not so"
    fence.let_go()
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == fds, "nothing stays open"


def test_a_pool_of_another_user_is_mapped_by_those_who_trust_that_user(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, owner = pool.watch(1), os.geteuid()
    monkeypatch.setattr(peers.os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(peers, "OVERFLOW_UID", owner + 2)
    if owner != 0:  # root is trusted by all
        with pytest.raises(UntrustedPool, match=rf"belongs to another user \(uid {owner}\)"):
            SharedPool.attach(welcome(pool, watch))
    fence = SharedPool.attach(welcome(pool, watch), trusted_users=(owner,))
    assert fence is not None and fence.segments.view(0, 16).tolist() == [0] * 16
    fence.let_go()
    watch.close()


def test_a_segment_that_others_may_write_is_not_mapped_later_either(pool: Pool) -> None:
    watch = pool.watch(1)
    fence = SharedPool.attach(welcome(pool, watch))
    assert fence is not None
    (pool.directory / "segment-00000").chmod(0o666)
    with pytest.raises(UntrustedPool, match="segment-00000 can be written"):
        fence.segments.view(0, 16)
    fence.let_go()
    watch.close()


def test_a_directory_that_is_not_the_pool_need_not_be_trusted(pool: Pool) -> None:
    """Any user of an engine's host can make one of the name that a server on another host has."""
    watch = pool.watch(1)
    pool.directory.chmod(0o777)
    assert SharedPool.attach(welcome(pool, watch, epoch=8)) is None
    watch.close()


def test_a_lock_outside_the_pool_is_none(
    pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server names the file; it must not be able to have us open any other."""
    outside = Watch(tmp_path / "session-outside.lock")
    assert SharedPool.attach(welcome(pool, outside)) is None and "through the socket" in caplog.text
    assert not outside.is_held()
    outside.close()


def test_a_lock_that_somebody_holds_cannot_be_had(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    watch = pool.watch(1)
    first = SharedPool.attach(welcome(pool, watch))
    assert first is not None
    assert SharedPool.attach(welcome(pool, watch)) is None
    assert "through the socket" in caplog.text
    first.let_go()
    watch.close()


def test_a_dead_server_is_told_from_a_living_one_by_its_lock(pool: Pool) -> None:
    watch = pool.watch(1)
    fence = SharedPool.attach(welcome(pool, watch))
    assert fence is not None
    assert not fence.server_is_gone()
    watch.close()
    pool.close()
    assert fence.server_is_gone()
    fence.let_go()


def test_a_server_is_alive_whatever_becomes_of_its_lock_file(pool: Pool, tmp_path: Path) -> None:
    watch = pool.watch(1)
    fence = SharedPool.attach(welcome(pool, watch))
    assert fence is not None
    lock = pool.directory / "daemon.lock"
    lock.rename(tmp_path / "away")
    assert not fence.server_is_gone(), "moved away"
    lock.touch()
    assert not fence.server_is_gone(), "another file in its place"
    lock.unlink()
    assert not fence.server_is_gone(), "removed"
    pool.directory.rename(tmp_path / "elsewhere")
    assert not fence.server_is_gone(), "the whole pool"
    other = Pool(tmp_path, "fence", 2 * SLAB, SLAB, epoch=8)
    assert not fence.server_is_gone(), "another server in its place, and ours lives on"
    pool.let_go()
    assert fence.server_is_gone(), "and then it does not"
    other.close()
    watch.close()
    fence.let_go()


def test_who_takes_the_pool_is_another_server(pool: Pool, tmp_path: Path) -> None:
    watch = pool.watch(1)
    fence = SharedPool.attach(welcome(pool, watch))
    assert fence is not None
    watch.leave()
    pool.let_go()
    next_one = Pool(tmp_path, "fence", 2 * SLAB, SLAB, epoch=8)
    assert (pool.directory / "daemon.lock").exists() and fence.server_is_gone()
    next_one.close()
    fence.let_go()


def test_a_process_that_can_open_no_file_takes_no_server_for_dead(pool: Pool) -> None:
    watch = pool.watch(1)
    fence = SharedPool.attach(welcome(pool, watch))
    assert fence is not None
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/", os.O_RDONLY)
        alive = not fence.server_is_gone()
        pool.let_go()
        dead = fence.server_is_gone()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert alive and dead
    fence.let_go()
    watch.close()


def test_nothing_stays_open(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    before = len(os.listdir("/proc/self/fd"))
    watch = pool.watch(1)
    for _ in range(2):
        fence = SharedPool.attach(welcome(pool, watch))
        assert fence is not None
        fence.let_go()
    (pool.directory / "daemon.lock").unlink()
    assert SharedPool.attach(welcome(pool, watch)) is None and "through the socket" in caplog.text
    assert not watch.is_held(), "what was taken before it failed is let go of"
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before


def settled(happens: Callable[[], bool]) -> bool:
    """Waits for something that must come; the limit only ends a test that has failed."""
    for _ in range(6_000):
        if happens():
            return True
        time.sleep(0.01)
    return False


def test_a_server_that_hangs_without_its_lock_file_keeps_what_it_has_leased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Would its client take it for dead and come back, the same server would have given the lease
    away."""
    asked: list[bool] = []
    right = SharedPool.server_is_gone

    def server_is_gone(self: SharedPool) -> bool:
        asked.append(right(self))
        return asked[-1]

    monkeypatch.setattr(SharedPool, "server_is_gone", server_is_gone)
    options = ClientOptions(lookup_deadline_ms=200, ping_interval_ms=20, reconnect_interval_ms=20)
    block = {
        "block_tokens": 1,
        "block_shape": (512,),
        "dtype": "uint64",
        "required": True,
        "wait_ms": 60_000,
    }
    with (
        ServerProcess("--pool-size", "2MiB") as server,
        connect(server.address, model="m", revision="1", options=options, **block) as cache,
    ):
        tokens = list(range(8))
        assert cache.put(tokens, np.ones((8, 512), "uint64")) == 8
        connection = cache.connection
        assert connection.welcome is not None and connection.layout is not None
        session = connection.welcome.session
        chain = KeyChain(root_key(cache.identity, None), 1)
        chain.extend(tokens)
        found = connection.wait(
            connection.call(m.Lookup("default", connection.layout.layout, chain.keys()), 60_000)
        )
        assert isinstance(found, m.Found) and found.blocks == 8
        lock = Path(connection.welcome.pool.directory) / "daemon.lock"
        server.send(signal.SIGSTOP)
        lock.rename(lock.with_name("away"))
        assert settled(lambda: len(asked) >= 5 or any(asked))
        lock.with_name("away").rename(lock)
        server.send(signal.SIGCONT)
        assert settled(lambda: connection.answering)
        assert (
            not any(asked)
            and connection.welcome is not None
            and connection.welcome.session == session
        )
        status = ask_http(server.http, "/v1/status", timeout_s=60)
        assert status["leases"] == 1 and status["counters"]["sessions_died"] == 0
