"""Old sessions are there as long as somebody holds their locks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvkeep.tiers.old_sessions import OldSessions
from kvkeep.wire.pool_files import hold


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
