"""The record of lock files: what it names must be there, and be what it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvkeep.store.table import PlainColumns
from kvkeep.tiers.session_locks import COLUMN, OldSessions, SessionLocks
from kvkeep.wire.pool_files import hold

LARGEST_EPOCH = 2**63 - 1


def test_a_file_that_went_in_order_is_not_missed(tmp_path: Path) -> None:
    columns = PlainColumns()
    locks = SessionLocks(tmp_path, columns)
    one, two = locks.watch(LARGEST_EPOCH, 1), locks.watch(LARGEST_EPOCH, 2)
    assert locks.missing() == ""
    one.close()
    again = SessionLocks(tmp_path, columns)
    assert again.missing() == "" and [path.name for path in tmp_path.iterdir()] == [two.path.name]
    two.path.unlink()
    assert again.missing() == two.path.name
    again.forget(two.path)
    assert again.missing() == ""
    two.leave()


def test_a_file_made_anew_is_not_the_one_it_was(tmp_path: Path) -> None:
    locks = SessionLocks(tmp_path, PlainColumns())
    watch = locks.watch(7, 1)
    watch.path.unlink()
    watch.path.touch()
    assert locks.missing() == watch.path.name
    watch.leave()


def test_it_is_there_before_it_is_noted_and_forgotten_before_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off anywhere there is a file too many, and never one too few."""
    columns = PlainColumns()
    locks = SessionLocks(tmp_path, columns)
    watch = locks.watch(7, 1)

    def killed(path: Path, missing_ok: bool = False) -> None:
        assert locks.missing() == "" and not columns.grow(COLUMN, "u8", 3, 1)[:, 0].any()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            watch.close()
    assert watch.path.exists() and SessionLocks(tmp_path, columns).missing() == ""
    with pytest.raises(FileExistsError):
        locks.watch(7, 1)
    assert not columns.grow(COLUMN, "u8", 3, 1)[:, 0].any()
    watch.leave()


def test_there_is_room_for_any_number(tmp_path: Path) -> None:
    columns = PlainColumns()
    locks = SessionLocks(tmp_path, columns)
    watches = [locks.watch(7, number) for number in range(200)]
    watches[150].path.unlink()
    assert SessionLocks(tmp_path, columns).missing() == watches[150].path.name
    for watch in watches:
        watch.close()
    assert locks.missing() == "" and not list(tmp_path.iterdir())
    locks.watch(7, 200).close()
    assert len(columns.grow(COLUMN, "u8", 3, 1)) == 256, "rows are used again"


def test_names_of_others_mean_nothing(tmp_path: Path) -> None:
    locks = SessionLocks(tmp_path, PlainColumns())
    watch = locks.watch(7, 1)
    for name in (
        "session-1.lock",
        "session-.lock",
        "session-0000000000000007-99999999999999999999.lock",
        "x",
    ):
        locks.forget(tmp_path / name)
    watch.path.unlink()
    assert locks.missing() == watch.path.name
    watch.leave()


def test_only_held_locks_count_and_the_others_are_removed(tmp_path: Path) -> None:
    for name in ("session-1.lock", "session-2.lock", "session-3.lock"):
        (tmp_path / name).touch()
    one, two = hold(tmp_path / "session-1.lock"), hold(tmp_path / "session-3.lock")
    old = OldSessions(tmp_path)
    assert old.alive() == 2
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "session-1.lock",
        "session-3.lock",
    ]
    os.close(one)
    assert old.alive() == 1
    again = OldSessions(tmp_path)
    assert again.alive() == 1, "it does not take the lock of who lives"
    again.close()
    assert (tmp_path / "session-3.lock").exists()
    os.close(two)
    assert old.alive() == old.alive() == 0 and not list(tmp_path.iterdir())


def test_what_cannot_be_looked_at_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "session-1.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"session-1\.lock"):
        OldSessions(tmp_path)
