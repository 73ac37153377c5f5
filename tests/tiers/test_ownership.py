"""One owner, whatever becomes of the files; and never of a directory that a link leads to."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kvkeep.errors import PoolError
from kvkeep.tiers import ownership
from kvkeep.tiers.ownership import Ownership


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    first = Ownership(tmp_path / "pool")
    with pytest.raises(
        PoolError, match=rf"in use by another kvkeep server \(process {os.getpid()}\)"
    ):
        Ownership(tmp_path / "pool")
    assert first.has_directory() and first.has_lock_file()
    first.close()
    assert not first.has_directory() and not first.has_lock_file()
    Ownership(tmp_path / "pool").close()


def test_without_its_lock_file_the_directory_has_the_same_owner(tmp_path: Path) -> None:
    first = Ownership(tmp_path / "pool")
    (tmp_path / "pool" / "daemon.lock").unlink()
    with pytest.raises(PoolError, match=r"in use by another kvkeep server \(process unknown\)"):
        Ownership(tmp_path / "pool")
    assert not list((tmp_path / "pool").iterdir()), "who is refused leaves nothing"
    (tmp_path / "pool" / "daemon.lock").touch()
    assert first.has_directory() and not first.has_lock_file()
    first.close()


def test_under_another_name_it_has_the_same_owner(tmp_path: Path) -> None:
    first = Ownership(tmp_path / "pool")
    (tmp_path / "pool").rename(tmp_path / "other")
    assert not first.has_directory() and not first.has_lock_file()
    with pytest.raises(PoolError, match="in use"):
        Ownership(tmp_path / "other")
    second = Ownership(tmp_path / "pool")
    assert second.has_lock_file()
    second.close()
    first.close()


def test_the_lock_file_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    (tmp_path / "precious").write_text("keep me")
    (tmp_path / "pool" / "daemon.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(PoolError, match="cannot make"):
        Ownership(tmp_path / "pool")
    assert (tmp_path / "precious").read_text() == "keep me"


def test_another_users_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: uid)
    with pytest.raises(PoolError, match="belongs to another user"):
        Ownership(tmp_path / "pool")
    assert not list((tmp_path / "pool").iterdir())


def test_another_users_closed_directory_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Any, *given: Any, **named: Any) -> Any:
            if Path(path) in (tmp_path, tmp_path / "pool"):
                raise PermissionError(13, "Permission denied")
            return function(path, *given, **named)

        return refuse

    monkeypatch.setattr(os, "mkdir", refusing(os.mkdir))
    monkeypatch.setattr(os, "open", refusing(os.open))
    for name, remedy in (
        ("pool", "--shm-dir"),
        (".", "--name"),
    ):  # one that is not there, and one that is
        with pytest.raises(PoolError, match="Permission denied") as caught:
            Ownership(tmp_path / name)
        assert remedy in caught.value.hint


def swapped_after(lines: int, directory: Path, precious: Path) -> bool:
    """Owns the directory while somebody puts a link in its place after so many lines. False if
    there are fewer."""
    left = lines

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != ownership.__file__:
            return None
        if event == "line":
            left -= 1
            if left == -1:
                directory.rename(
                    directory.with_name(f"away-{lines}")
                ) if directory.exists() else None
                directory.symlink_to(precious)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        Ownership(directory).close()
    except PoolError:
        pass
    finally:
        sys.settrace(before)
    return left < 0


def test_a_link_put_there_at_any_moment_is_not_followed(tmp_path: Path) -> None:
    precious, directory = tmp_path / "precious", tmp_path / "pool"
    precious.mkdir(mode=0o755)
    (precious / "file").write_text("keep me")
    lines = 0
    while swapped_after(lines, directory, precious):
        assert [path.name for path in precious.iterdir()] == ["file"], f"after {lines} lines"
        assert precious.stat().st_mode & 0o777 == 0o755, f"after {lines} lines"
        directory.unlink()
        lines += 1
    assert lines > 15
