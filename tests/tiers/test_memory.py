"""Tests for the memory tier: a pool made, filled, guarded and removed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.errors import PoolError
from kvkeep.store.store import Store
from kvkeep.tiers import memory
from kvkeep.tiers.free_memory import Room
from kvkeep.tiers.memory import Pool, auto_size, pool_left, slab_bytes_for
from kvkeep.units import GIB, KIB, MIB, format_size, parse_size
from kvkeep.wire.pool_files import PoolFiles, hold

Make = Callable[..., Pool]
SLAB = 64 * KIB
SEGMENT = 4 * SLAB


def small_pool(*given: Any, **named: Any) -> Pool:
    """With segments of four slabs."""
    return Pool(*given, segment_bytes=SEGMENT, **named)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    """Makes pools with segments of four slabs."""
    made: list[Pool] = []

    def make_pool(
        pool_bytes: int = 10 * SLAB, name: str = "test", slab_bytes: int = SLAB, epoch: int = 77
    ) -> Pool:
        made.append(small_pool(tmp_path, name, pool_bytes, slab_bytes, epoch))
        return made[-1]

    yield make_pool
    for pool in made:
        pool.close()


def fill(pool: Pool) -> list[tuple[int, int]]:
    filled = []
    while (part := pool.fill_next()) != (0, 0):
        filled.append(part)
    return filled


def left_pool(tmp_path: Path, epoch: int = 1) -> Pool:
    pool = small_pool(tmp_path, "test", 10 * SLAB, SLAB, epoch, keep=True)
    Store(pool.pool_bytes, SLAB, columns=pool.columns)
    fill(pool)
    return pool


# -- on disk


def test_a_pool_is_a_directory_of_these_files(make: Make, tmp_path: Path) -> None:
    pool = make()
    fill(pool)
    watch = pool.watch(3)
    assert pool.directory == tmp_path / "kvkeep-test"
    assert {path.name: path.stat().st_size for path in pool.directory.iterdir()} == {
        "daemon.lock": len(f"{os.getpid()}\n"),
        "epoch": 16,
        "segment-00000": SEGMENT,
        "segment-00001": SEGMENT,
        "segment-00002": 2 * SLAB,
        "session-000000000000004d-3.lock": 0,
    }
    watch.close()


def test_only_the_owner_may_touch_it(make: Make) -> None:
    before = os.umask(0)
    try:
        pool = make()
        fill(pool)
        watch = pool.watch(3)
        modes = {path.name: path.stat().st_mode & 0o777 for path in pool.directory.iterdir()}
    finally:
        os.umask(before)
    watch.close()
    assert pool.directory.stat().st_mode & 0o777 == 0o700
    assert {name for name, mode in modes.items() if mode != 0o600} <= {"epoch"}, (
        "epoch is no secret"
    )


def test_a_directory_left_open_to_others_is_closed_to_them(make: Make, tmp_path: Path) -> None:
    (tmp_path / "kvkeep-test").mkdir(mode=0o777)
    assert make().directory.stat().st_mode & 0o777 == 0o700


def test_a_client_can_tell_that_the_pool_is_here(make: Make) -> None:
    assert PoolFiles(make(epoch=2**63 - 1).directory).is_of(2**63 - 1)


def test_closing_removes_everything(make: Make, tmp_path: Path) -> None:
    pool = make()
    fill(pool)
    pool.segments.view(0, 16)
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_closing_twice_is_no_error(make: Make) -> None:
    pool = make()
    pool.close()
    pool.close()


def test_closing_when_somebody_removed_the_directory_is_no_error(
    make: Make, tmp_path: Path
) -> None:
    pool = make()
    for path in pool.directory.iterdir():
        path.unlink()
    pool.directory.rmdir()
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_closing_leaves_a_directory_alone_that_another_server_has_taken(make: Make) -> None:
    first = make()
    shutil.rmtree(first.directory)
    assert not first.is_in_place()
    second = make(epoch=78)
    fill(second)
    with pytest.raises(PoolError, match="was removed"):
        first.fill_next()
    with pytest.raises(OSError, match="was removed"):
        first.watch(1)
    before = sorted(second.directory.iterdir())
    first.close()
    assert sorted(second.directory.iterdir()) == before and PoolFiles(second.directory).is_of(78)
    assert second.is_in_place() and not first.is_in_place()


def test_closing_survives_whatever_is_in_the_way(make: Make, tmp_path: Path) -> None:
    pool = make()
    fill(pool)
    for name in ("epoch", "segment-00000", "daemon.lock"):
        (pool.directory / name).unlink()
        (pool.directory / name / "deep").mkdir(parents=True)
    (pool.directory / "session-1.lock").mkdir()
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_removed_does_not_keep_the_rest(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "kvkeep-test"
    left.mkdir()
    for name in ("a", "b", "c"):
        (left / name).write_text("x")
    unlink = Path.unlink

    def stubborn(path: Path, missing_ok: bool = False) -> None:
        if path.name == "b":
            raise PermissionError
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", stubborn)
    with pytest.raises(PoolError, match="b cannot be removed"):
        make()
    assert not (left / "a").exists() and not (left / "c").exists()


def test_a_filled_segment_is_served_though_its_file_is_gone(make: Make) -> None:
    pool = make()
    fill(pool)
    shutil.rmtree(pool.directory)
    pool.segments.view(9 * SLAB, SLAB)[:] = 7
    assert (pool.segments.view(9 * SLAB, SLAB) == 7).all()


def test_closing_leaves_other_pools_alone(make: Make) -> None:
    first, second = make(name="first"), make(name="second")
    first.close()
    assert fill(second)


# -- one owner


def test_a_second_server_is_told_who_has_the_pool(make: Make) -> None:
    pool = make()
    fill(pool)
    with pytest.raises(
        PoolError, match=rf"in use by another kvkeep server \(process {os.getpid()}\)"
    ) as caught:
        make()
    assert "--name" in caught.value.hint
    assert len(list(pool.directory.iterdir())) == 5, "the first one lost nothing"


def test_a_closed_pool_can_be_made_again(make: Make) -> None:
    make().close()
    assert fill(make())


KILLED = """
import os, signal, sys
from pathlib import Path
from kvkeep.tiers.memory import Pool
pool = Pool(Path(sys.argv[1]), "test", 1 << 20, 1 << 16, 5)
pool.fill_next()
pool.watch(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_server_left_is_cleaned(make: Make, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert (tmp_path / "kvkeep-test" / "segment-00000").exists(), (
        "it was killed before it could clean up"
    )
    assert (tmp_path / "kvkeep-test" / "session-0000000000000005-1.lock").exists()
    pool = make(epoch=6)
    assert sorted(path.name for path in pool.directory.iterdir()) == ["daemon.lock", "epoch"]
    assert PoolFiles(pool.directory).is_of(6)


def test_leftovers_of_any_kind_are_cleaned(make: Make, tmp_path: Path) -> None:
    left = tmp_path / "kvkeep-test"
    (left / "folder").mkdir(parents=True)
    (left / "folder" / "file").write_text("x")
    (left / "link").symlink_to(tmp_path / "nowhere")
    assert sorted(path.name for path in make().directory.iterdir()) == ["daemon.lock", "epoch"]


def test_a_symbolic_link_is_not_followed(make: Make, tmp_path: Path) -> None:
    """Shared memory is writable to all: who follows a link there empties what it points at."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep me")
    (tmp_path / "kvkeep-test").symlink_to(precious)
    with pytest.raises(PoolError, match="symbolic link"):
        make()
    assert [path.name for path in precious.iterdir()] == ["file"]


def test_a_file_in_the_way_is_an_error_that_says_so(make: Make, tmp_path: Path) -> None:
    (tmp_path / "kvkeep-test").write_text("in the way")
    with pytest.raises(PoolError, match="File exists"):
        make()


def test_a_directory_that_is_not_there_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="No such file") as caught:
        small_pool(tmp_path / "nowhere", "test", MIB, SLAB, 1)
    assert "--shm-dir" in caught.value.hint


# -- sizes


def test_a_pool_larger_than_the_file_system_is_refused_with_a_size_that_fits(
    make: Make, tmp_path: Path
) -> None:
    space = os.statvfs(tmp_path)
    free_bytes = space.f_bavail * space.f_frsize
    with pytest.raises(PoolError, match="does not fit") as caught:
        make(pool_bytes=free_bytes + 64 * GIB)
    assert format_size(free_bytes + 64 * GIB) in caught.value.message, "the size that was asked for"
    said = caught.value.hint.split("--pool-size ")[1].split(",")[0]
    assert 0 < parse_size(said) <= free_bytes
    assert list(tmp_path.iterdir()) == [], "nothing is left of a pool that was not made"


def test_leftovers_do_not_count_as_used(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is started again after a crash gets the memory that its predecessor had."""
    seen: list[list[str]] = []
    pool = make()
    left = pool.directory
    pool.close()
    left.mkdir()
    (left / "segment-00000").write_bytes(bytes(SLAB))
    measure = memory.pool_room

    def look(shm_dir: Path) -> Room:
        seen.append(sorted(path.name for path in left.iterdir()))
        return measure(shm_dir)

    monkeypatch.setattr(memory, "pool_room", look)
    make()
    assert seen == [["daemon.lock"]]


# -- less memory than asked for


def scarce(monkeypatch: pytest.MonkeyPatch, nbytes: int, auto_bytes: int = 0) -> None:
    """Room for a pool of so many bytes, of which auto would take some."""
    room = Room(nbytes, nbytes, "the memory limit leaves little", "raise the memory limit")
    monkeypatch.setattr(memory, "pool_room", lambda shm_dir, freed_bytes=0: room)
    monkeypatch.setattr(memory, "room_to_fill", lambda shm_dir: room)
    monkeypatch.setattr(memory, "auto_pool_bytes", lambda shm_dir, freed_bytes=0: auto_bytes)


def test_a_pool_beyond_a_memory_limit_is_refused_with_a_size_that_fits(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce(monkeypatch, 100 * MIB)
    with pytest.raises(PoolError) as caught:
        make(pool_bytes=101 * MIB)
    assert (
        caught.value.message
        == "a pool of 101MiB does not fit: the memory limit leaves little, room for 100MiB"
    )
    assert caught.value.hint == "use --pool-size 90MiB, or raise the memory limit"
    assert list(tmp_path.iterdir()) == []
    assert make(pool_bytes=100 * MIB).pool_bytes == 100 * MIB


def test_the_advice_names_a_slab_size_where_the_one_given_does_not_fit(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce(monkeypatch, 40 * MIB)
    with pytest.raises(PoolError) as caught:
        make(pool_bytes=GIB, slab_bytes=64 * MIB)
    assert caught.value.hint == "use --pool-size 36MiB --slab-size 2MiB, or raise the memory limit"


def test_where_no_pool_fits_the_advice_names_no_size(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce(monkeypatch, MIB)
    with pytest.raises(PoolError) as caught:
        make(pool_bytes=GIB)
    assert caught.value.hint == "raise the memory limit"


def test_an_automatic_size_that_does_not_fit_shrinks(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce(monkeypatch, 40 * MIB, auto_bytes=32 * MIB)
    pool = small_pool(tmp_path, "test", GIB, 64 * MIB, 1, may_shrink=True)
    assert (pool.pool_bytes, pool.slab_bytes) == (32 * MIB, 2 * MIB)
    pool.close()
    scarce(monkeypatch, 0)
    with pytest.raises(PoolError, match="a pool of 1GiB does not fit"):
        small_pool(tmp_path, "test", GIB, 64 * MIB, 1, may_shrink=True)


def test_filling_stops_before_a_memory_limit_ends_the_server(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make()
    pool.fill_next()
    with monkeypatch.context() as patched:
        scarce(patched, SEGMENT - 1)
        with pytest.raises(
            PoolError, match="could not be had: the memory limit leaves little"
        ) as caught:
            pool.fill_next()
    assert "the pool stays at 256KiB" in caught.value.hint
    assert not (pool.directory / "segment-00001").exists()
    assert pool.fill_next() == (4, 4), "with memory back it goes on"


def test_segments_are_filled_in_order(make: Make) -> None:
    pool = make(pool_bytes=10 * SLAB)
    assert pool.slabs == 10
    steps = []
    while (part := pool.fill_next()) != (0, 0):
        steps.append((part, pool.filled_bytes))
    assert steps == [((0, 4), 4 * SLAB), ((4, 4), 8 * SLAB), ((8, 2), 10 * SLAB)]
    assert pool.fill_next() == (0, 0)


def test_a_pool_of_whole_segments_fills_them(make: Make) -> None:
    assert fill(make(pool_bytes=2 * SEGMENT)) == [(0, 4), (4, 4)]


def test_what_is_less_than_a_slab_is_left_out(make: Make) -> None:
    pool = make(pool_bytes=5 * SLAB + SLAB // 2)
    assert pool.pool_bytes == 5 * SLAB
    assert fill(pool) == [(0, 4), (4, 1)]


def test_a_slab_larger_than_a_segment_makes_segments_of_one_slab(make: Make) -> None:
    pool = make(pool_bytes=2 * MIB, slab_bytes=MIB)
    assert pool.segment_bytes == MIB
    assert fill(pool) == [(0, 1), (1, 1)]


def test_every_byte_of_a_filled_pool_can_be_written(make: Make) -> None:
    pool = make()
    for first, count in fill(pool):
        pool.segments.view(first * SLAB, count * SLAB)[:] = 255


def test_memory_that_cannot_be_had_leaves_the_pool_as_it_was(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make()
    assert pool.fill_next() == (0, 4)

    def no_space(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(
            PoolError, match="256KiB more of shared memory could not be had: No space left"
        ) as caught:
            pool.fill_next()
    assert "stays at 256KiB" in caught.value.hint and "--pool-size" in caught.value.hint
    assert not (pool.directory / "segment-00001").exists()
    assert pool.filled_bytes == SEGMENT
    assert pool.fill_next() == (4, 4), "with memory back it goes on"


@pytest.mark.parametrize(
    ("pool_bytes", "slab_bytes"),
    [
        (MIB, MIB),
        (16 * MIB, MIB),
        (31 * MIB, MIB),
        (32 * MIB, 2 * MIB),
        (GIB, 64 * MIB),
        (GIB - 1, 63 * MIB),
        (1024 * GIB, 64 * MIB),
    ],
)
def test_a_small_pool_has_small_slabs(pool_bytes: int, slab_bytes: int) -> None:
    assert slab_bytes_for(pool_bytes) == slab_bytes


# -- left to the next server


def test_a_pool_that_is_kept_is_found_with_its_memory(make: Make, tmp_path: Path) -> None:
    first = left_pool(tmp_path)
    first.segments.view(5 * SLAB, 4)[:] = [1, 2, 3, 4]
    assert first.is_kept and not first.is_left
    first.close(keep=True)
    assert not first.is_kept
    second = small_pool(tmp_path, "test", 10 * SLAB, SLAB, 2, keep=True)
    assert second.is_left and second.not_adopted == "" and second.filled_bytes == second.pool_bytes
    assert second.segments.view(5 * SLAB, 4).tolist() == [1, 2, 3, 4] and PoolFiles(
        second.directory
    ).is_of(2)
    assert second.fill_next() == (0, 0)
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_of_a_pool_is_made_again(make: Make, tmp_path: Path) -> None:
    first = left_pool(tmp_path)
    first.close(keep=True)
    (tmp_path / "kvkeep-test" / "segment-00001").unlink()
    second = small_pool(tmp_path, "test", 10 * SLAB, SLAB, 2, keep=True)
    assert second.filled_bytes == SEGMENT and not (second.directory / "segment-00002").exists()
    assert fill(second) == [(4, 4), (8, 2)]
    second.close()


def test_without_keep_nothing_is_taken_over(make: Make, tmp_path: Path) -> None:
    first = left_pool(tmp_path)
    first.close(keep=True)
    second = make()
    assert not second.is_left and second.filled_bytes == 0 and not second.is_kept
    assert not list(second.directory.glob("index-*")) and not list(
        second.directory.glob("segment-*")
    )


def test_the_index_goes_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal that is cut off leaves nothing to adopt: the locks that say who is at work may be
    gone by then."""
    first = left_pool(tmp_path)
    removed: list[str] = []
    unlink = Path.unlink

    def note(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", note)
    first.close()
    assert removed[0] == "index-header" and len(removed) > 10


# -- left by a server that was killed while it filled its pool


def half_filled(tmp_path: Path) -> None:
    """Leaves the first of three segments, as a kill in the middle does."""
    pool = small_pool(tmp_path, "test", 10 * SLAB, SLAB, 1, keep=True)
    Store(pool.pool_bytes, SLAB, columns=pool.columns)
    pool.fill_next()
    pool.close(keep=True)


def test_what_a_server_left_is_measured(tmp_path: Path) -> None:
    assert pool_left(tmp_path, "test") == (0, 0, 0)
    half_filled(tmp_path)
    left = pool_left(tmp_path, "test")
    assert (left.pool_bytes, left.filled_bytes) == (10 * SLAB, SEGMENT)
    assert left.held_bytes == sum(
        path.stat().st_blocks * 512 for path in (tmp_path / "kvkeep-test").iterdir()
    )
    (tmp_path / "kvkeep-test" / "index-header").unlink()
    assert pool_left(tmp_path, "test").pool_bytes == 0 < pool_left(tmp_path, "test").held_bytes


def test_auto_takes_the_size_that_was_left_only_if_the_rest_of_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_filled(tmp_path)
    scarce(monkeypatch, 6 * SLAB, auto_bytes=5 * SLAB)
    assert auto_size(tmp_path, "test", adopt=True) == (10 * SLAB, True)
    assert auto_size(tmp_path, "test", adopt=False) == (5 * SLAB, False)
    scarce(monkeypatch, 6 * SLAB - 1, auto_bytes=5 * SLAB)
    assert auto_size(tmp_path, "test", adopt=True) == (5 * SLAB, False), (
        "to fill it would end the server again"
    )
    assert auto_size(tmp_path, "other", adopt=True) == (5 * SLAB, False)


def test_auto_takes_a_whole_pool_unless_no_server_can_run_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_pool(tmp_path).close(keep=True)
    scarce(monkeypatch, 0, auto_bytes=5 * SLAB)
    assert auto_size(tmp_path, "test", adopt=True) == (10 * SLAB, True), (
        "it takes no more memory than it has"
    )
    monkeypatch.setattr(memory, "can_stay", lambda shm_dir: False)
    assert auto_size(tmp_path, "test", adopt=True) == (5 * SLAB, False)


def test_the_memory_of_an_old_pool_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_filled(tmp_path)
    freed: list[int] = []
    monkeypatch.setattr(
        memory, "auto_pool_bytes", lambda shm_dir, freed_bytes: freed.append(freed_bytes)
    )
    auto_size(tmp_path, "test", adopt=False)
    assert freed == [pool_left(tmp_path, "test").held_bytes] and freed[0] > SEGMENT


@pytest.mark.parametrize("may_shrink", [True, False])
def test_a_pool_whose_rest_does_not_fit_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_shrink: bool
) -> None:
    half_filled(tmp_path)
    scarce(monkeypatch, 5 * SLAB, auto_bytes=4 * SLAB)
    if may_shrink:
        pool = small_pool(tmp_path, "test", 10 * SLAB, SLAB, 2, keep=True, may_shrink=True)
        assert not pool.is_left and pool.pool_bytes == 4 * SLAB
        assert pool.not_adopted.startswith(
            "384KiB of it are missing and do not fit: the memory limit leaves little"
        )
        assert fill(pool) == [(0, 4)]
        pool.close()
    else:
        with pytest.raises(PoolError, match="a pool of 640KiB does not fit"):
            small_pool(tmp_path, "test", 10 * SLAB, SLAB, 2, keep=True)
    assert list(tmp_path.iterdir()) == [], "its memory is free"


# -- files that somebody removes under a living server


def test_a_living_servers_pool_is_not_adopted_without_its_lock_file(tmp_path: Path) -> None:
    first = left_pool(tmp_path)
    assert not first.is_unlocked()
    (first.directory / "daemon.lock").unlink()
    assert first.is_unlocked() and not first.is_in_place() and not first.is_kept
    before = sorted(first.directory.iterdir())
    with pytest.raises(PoolError, match="in use by another kvkeep server"):
        small_pool(tmp_path, "test", 10 * SLAB, SLAB, 2, keep=True)
    assert sorted(first.directory.iterdir()) == before and PoolFiles(first.directory).is_of(1)
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_files_moved_away_from_a_living_server_are_not_adopted(tmp_path: Path) -> None:
    first = left_pool(tmp_path)
    (tmp_path / "kvkeep-other").mkdir()
    for path in first.directory.iterdir():
        path.rename(tmp_path / "kvkeep-other" / path.name)
    (tmp_path / "kvkeep-other" / "daemon.lock").unlink()
    second = small_pool(tmp_path, "other", 10 * SLAB, SLAB, 2, keep=True)
    assert not second.is_left and second.not_adopted.startswith("it cannot be read")
    fill(second)
    second.segments.view(0, 4)[:] = 9
    assert first.segments.view(0, 4).tolist() == [0, 0, 0, 0]
    second.close()
    first.close()


def removed(path: Path) -> None:
    path.unlink()


def made_anew(path: Path) -> None:
    path.unlink()
    path.touch()


def record_removed(path: Path) -> None:
    path.unlink()
    (path.parent / "index-sessions").unlink()


@pytest.mark.parametrize("harm", [removed, made_anew, record_removed])
def test_without_the_lock_file_of_a_session_nothing_is_adopted(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    first = left_pool(tmp_path)
    watch = first.watch(1)
    at_work = hold(watch.path)
    harm(watch.path)
    watch.leave()
    first.close(keep=True)
    second = small_pool(tmp_path, "test", 10 * SLAB, SLAB, 2, keep=True)
    assert not second.is_left and second.filled_bytes == 0
    missing = harm is record_removed
    assert second.not_adopted == (
        "a column of its index is missing or too short"
        if missing
        else f"{watch.path.name} is not the file that it was, and its process may still be at work"
    )
    second.close()
    os.close(at_work)


def test_the_server_after_the_next_one_misses_it_too(tmp_path: Path) -> None:
    first = left_pool(tmp_path)
    dead, watch = first.watch(1), first.watch(2)
    at_work = hold(watch.path)
    dead.leave()
    watch.leave()
    first.let_go()
    second = small_pool(tmp_path, "test", 10 * SLAB, SLAB, 2, keep=True)
    assert second.is_left and second.old_sessions() == 1 and not dead.path.exists()
    second.close(keep=True)
    third = small_pool(tmp_path, "test", 10 * SLAB, SLAB, 3, keep=True)
    assert third.is_left and third.old_sessions() == 1, "who died in order is not missed"
    watch.path.unlink()
    assert third.old_sessions() == 1
    third.close(keep=True)
    fourth = small_pool(tmp_path, "test", 10 * SLAB, SLAB, 4, keep=True)
    assert not fourth.is_left and watch.path.name in fourth.not_adopted
    fourth.close()
    os.close(at_work)
