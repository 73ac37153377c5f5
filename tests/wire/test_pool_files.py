"""A pool's files are opened first and checked then: owner, mode and kind of what was opened."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvkeep.errors import UntrustedPool
from kvkeep.wire import pool_files as module
from kvkeep.wire.peers import OVERFLOW_UID
from kvkeep.wire.pool_files import EPOCH_FILE, PoolFiles, Watch, hold, is_owned, own

STRANGER = os.geteuid() + 4_321


@pytest.fixture(autouse=True)
def _files_are_for_their_owner() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "pool"
    directory.mkdir()
    (directory / EPOCH_FILE).write_text(f"{77:016x}")
    (directory / "segment-00000").write_bytes(b"memory")
    return directory


def belongs_to(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    """As if every file were that user's."""
    right = os.fstat
    monkeypatch.setattr(
        module.os, "fstat", lambda fd: os.stat_result([*right(fd)[:4], uid, *right(fd)[5:]])
    )


def test_a_file_of_ours_is_opened(directory: Path) -> None:
    files = PoolFiles(directory)
    files.check()
    descriptor = files.open("segment-00000", os.O_RDWR)
    assert os.read(descriptor, 100) == b"memory" and not os.get_inheritable(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o640, 0o400])
def test_others_may_read_but_not_write(directory: Path, mode: int) -> None:
    (directory / "segment-00000").chmod(mode)
    os.close(PoolFiles(directory).open("segment-00000", os.O_RDONLY))


@pytest.mark.parametrize("mode", [0o666, 0o660, 0o602, 0o620])
def test_what_others_may_write_is_not_opened(directory: Path, mode: int) -> None:
    (directory / "segment-00000").chmod(mode)
    with pytest.raises(
        UntrustedPool, match=rf"segment-00000 can be written by other users \(mode {mode:04o}\)"
    ) as told:
        PoolFiles(directory).open("segment-00000", os.O_RDWR)
    assert "chmod go-w" in told.value.hint
    directory.chmod(mode | 0o100)
    with pytest.raises(UntrustedPool, match=r"pool can be written by other users"):
        PoolFiles(directory).check()


def test_what_belongs_to_another_user_is_not_opened(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    belongs_to(monkeypatch, STRANGER)
    for attempt in (
        PoolFiles(directory).check,
        lambda: PoolFiles(directory).open("segment-00000", os.O_RDWR),
    ):
        with pytest.raises(
            UntrustedPool, match=rf"belongs to another user \(uid {STRANGER}\)"
        ) as told:
            attempt()
        assert f"name {STRANGER} in trusted_users" in told.value.hint
    trusting = PoolFiles(directory, (STRANGER,))
    trusting.check()
    os.close(trusting.open("segment-00000", os.O_RDWR))


def test_a_user_who_cannot_be_mapped_is_nobody_we_know(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    belongs_to(monkeypatch, OVERFLOW_UID)
    monkeypatch.setattr(module, "is_trusted", lambda uid, trusted: uid != OVERFLOW_UID)
    with pytest.raises(UntrustedPool) as told:
        PoolFiles(directory, (OVERFLOW_UID,)).check()
    assert "one user namespace" in told.value.hint


def link(path: Path) -> None:
    path.symlink_to(path.with_name("segment-00000"))


@pytest.mark.parametrize(
    ("make", "error"), [(os.mkfifo, UntrustedPool), (os.mkdir, UntrustedPool), (link, OSError)]
)
def test_only_a_plain_file_is_opened(
    directory: Path, make: Callable[[Path], None], error: type[Exception]
) -> None:
    make(directory / "odd")
    with pytest.raises(error):
        PoolFiles(directory).open("odd", os.O_RDONLY)


def test_a_link_to_a_directory_is_none(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(directory)
    with pytest.raises(OSError):
        PoolFiles(tmp_path / "link")


def test_what_was_checked_is_what_is_opened(directory: Path, tmp_path: Path) -> None:
    """Somebody who may rename the directory puts another in its place: the names lead to the first
    one still."""
    files = PoolFiles(directory)
    files.check()
    directory.rename(tmp_path / "away")
    directory.mkdir()
    (directory / "segment-00000").write_bytes(b"false")
    descriptor = files.open("segment-00000", os.O_RDWR)
    assert os.read(descriptor, 100) == b"memory"
    assert files.has("segment-00000", descriptor)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("content", "epoch"),
    [
        (b"000000000000004d", True),
        (b"", False),
        (b"000000000000004e", False),
        (b"4d", False),
        (b"\xff\xfe\xfd", False),
        (b"000000000000004d\n", False),
        (b"000000000000004d" * 9, False),
    ],
)
def test_the_epoch_tells_whether_the_pool_is_here(
    directory: Path, content: bytes, epoch: bool
) -> None:
    (directory / EPOCH_FILE).write_bytes(content)
    assert PoolFiles(directory).is_of(77) is epoch


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: None])
def test_an_epoch_that_cannot_be_read_is_no_epoch(
    directory: Path, make: Callable[[Path], None]
) -> None:
    (directory / EPOCH_FILE).unlink()
    make(directory / EPOCH_FILE)
    assert not PoolFiles(directory).is_of(77)


@pytest.mark.parametrize("name", ["nothing", "nul\0", "x" * 5000])
def test_a_directory_that_is_not_here_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises((OSError, ValueError)):
        PoolFiles(tmp_path / name)


def test_nothing_stays_open(directory: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    (directory / "segment-00000").chmod(0o666)
    files = PoolFiles(directory)
    with contextlib.suppress(UntrustedPool):
        files.open("segment-00000", os.O_RDWR)
    files.close()
    files.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.open(EPOCH_FILE, os.O_RDONLY)
    with contextlib.suppress(UntrustedPool):
        PoolFiles(directory).check()
    assert len(os.listdir("/proc/self/fd")) == before


HOLDER = """
import sys
from pathlib import Path
from kvkeep.wire.pool_files import hold
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
from kvkeep.wire.pool_files import hold
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
