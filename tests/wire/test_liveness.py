"""Tests for the lock by which the kernel tells that a process is gone."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.wire.liveness import Watch, hold, is_owned, own

HOLDER = """
import sys
from pathlib import Path
from kvkeep.wire.liveness import hold
hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    watch = Watch(tmp_path / "session-1.lock")
    yield watch
    if watch.path.exists():
        watch.close()


@pytest.fixture
def holder(watch: Watch) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLDER, str(watch.path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_lock_nobody_took_is_not_held(watch: Watch) -> None:
    assert not watch.is_held()


def test_a_lock_is_held_until_it_is_let_go_of(watch: Watch) -> None:
    descriptor = hold(watch.path)
    assert watch.is_held()
    os.close(descriptor)
    assert not watch.is_held()


def test_looking_does_not_take_the_lock(watch: Watch) -> None:
    assert not watch.is_held()
    os.close(hold(watch.path))


def test_a_lock_has_one_holder(watch: Watch) -> None:
    descriptor = hold(watch.path)
    with pytest.raises(BlockingIOError):
        hold(watch.path)
    assert watch.is_held(), "the attempt took nothing from the holder"
    os.close(descriptor)


def test_a_failed_attempt_leaves_no_descriptor_open(watch: Watch) -> None:
    descriptor = hold(watch.path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError):
        hold(watch.path)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(descriptor)


def test_a_lock_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hold(tmp_path / "nothing")


def test_another_process_holds_the_lock(watch: Watch, holder: subprocess.Popen[str]) -> None:
    assert watch.is_held()


def test_a_killed_process_lets_go(watch: Watch, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert not watch.is_held()


def test_a_stopped_process_still_holds(watch: Watch, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGSTOP)
    os.waitpid(holder.pid, os.WUNTRACED)
    assert watch.is_held()


def test_a_process_that_ends_by_itself_lets_go(watch: Watch, holder: subprocess.Popen[str]) -> None:
    holder.communicate("\n")
    assert not watch.is_held()


FORKER = """
import os, sys, time
from pathlib import Path
from kvkeep.wire.liveness import hold
hold(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    sys.stdin.readline()
    os._exit(0)
print(child, flush=True)
os._exit(0)
"""


def test_a_forked_child_holds_on_after_its_parent(watch: Watch) -> None:
    """It has the pool mapped as its parent had, and may be in the middle of a copy."""
    command = [sys.executable, "-c", FORKER, str(watch.path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert int(parent.stdout.readline()) > 0
        parent.wait()
        assert watch.is_held()
        parent.stdin.close()
        assert parent.stdout.read() == "", "the child has ended and closed its side"
    assert not watch.is_held()


def test_a_program_that_the_holder_starts_does_not_hold(watch: Watch) -> None:
    descriptor = hold(watch.path)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as started:
        os.close(descriptor)
        assert not watch.is_held()
        started.kill()


def test_the_lock_file_is_for_its_owner_only(watch: Watch) -> None:
    assert watch.path.stat().st_mode & 0o777 == 0o600


def test_a_lock_file_is_never_taken_over(watch: Watch) -> None:
    with pytest.raises(FileExistsError):
        Watch(watch.path)


def test_closing_removes_the_file(watch: Watch) -> None:
    watch.close()
    assert not watch.path.exists()


def test_closing_when_the_file_is_gone_is_no_error(watch: Watch) -> None:
    watch.path.unlink()
    watch.close()


def test_closing_leaves_alone_what_took_the_place_of_the_file(watch: Watch) -> None:
    watch.path.unlink()
    watch.path.mkdir()
    watch.close()
    assert watch.path.is_dir()
    watch.path.rmdir()


def test_closing_leaves_another_servers_file_alone(watch: Watch) -> None:
    watch.path.rename(watch.path.with_name("old"))
    other = Watch(watch.path)
    watch.close()
    assert other.path.exists()
    other.close()
    assert not other.path.exists()


def test_closing_in_a_directory_that_is_gone_is_no_error(tmp_path: Path) -> None:
    directory = tmp_path / "pool"
    directory.mkdir()
    watch = Watch(directory / "session-1.lock")
    watch.path.unlink()
    directory.rmdir()
    watch.close()


# -- owning a file, which others may ask about


def test_a_file_is_owned_until_its_owner_closes_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    owner, asker = os.open(path, os.O_RDWR), os.open(path, os.O_RDONLY)
    assert not is_owned(asker)
    own(owner)
    assert is_owned(asker) and not is_owned(owner)
    other = os.open(path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        own(other)
    os.close(owner)
    assert not is_owned(asker)
    own(other)
    os.close(other)
    os.close(asker)


def test_who_asks_is_in_nobodys_way(tmp_path: Path) -> None:
    """A client may be paused at any moment, also while it asks whether its server is there."""
    path = tmp_path / "lock"
    path.touch()
    asker = os.open(path, os.O_RDONLY)
    assert not is_owned(asker)
    owner = os.open(path, os.O_RDWR)
    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    own(owner)
    os.close(owner)
    os.close(asker)
