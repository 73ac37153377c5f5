"""Files are hashed once a user and host, and a remembered hash is that of the file as it is now."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvkeep.connector import file_hashes
from kvkeep.connector.file_hashes import FileChanged, FileHashes, FileIdentity, hashes_of_user

ANOTHER_USER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")


@pytest.fixture(autouse=True)
def timestamps_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hashes, "SETTLED_NS", 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(os.urandom(100_000))
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kvkeep"


def identity_of(path: Path) -> FileIdentity:
    return FileIdentity.of(path.stat())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hashed(hashes: FileHashes, path: Path) -> str:
    return hashes.hash(str(path), identity_of(path))


@contextlib.contextmanager
def lock_held(cache: Path) -> Iterator[None]:
    """As by a process that hashes a file."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(cache / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- remembered -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4 << 20, (4 << 20) + 1, 17 << 20])
def test_the_hash_is_of_the_whole_file(tmp_path: Path, cache: Path, size: int) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(os.urandom(size))
    assert hashed(FileHashes(str(cache)), path) == sha256(path)


def test_a_file_is_read_once_by_all_processes_of_a_user(file: Path, cache: Path) -> None:
    first, second = FileHashes(str(cache)), FileHashes(str(cache))
    assert first.known(identity_of(file)) is None
    assert hashed(first, file) == sha256(file)
    assert second.known(identity_of(file)) == hashed(second, file) == sha256(file)
    assert (first.hashed_bytes, second.hashed_bytes) == (100_000, 0)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE((cache / "file-hashes").stat().st_mode) == 0o600
    assert sorted(each.name for each in cache.iterdir()) == ["file-hashes", "lock"]


def test_a_change_that_keeps_size_and_mtime_is_hashed_again(file: Path, cache: Path) -> None:
    hashes = FileHashes(str(cache))
    before, found = hashed(hashes, file), file.stat()
    content = bytearray(file.read_bytes())
    content[50_000] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (found.st_size, found.st_mtime_ns)
    assert hashes.known(identity_of(file)) is None
    assert hashed(hashes, file) == sha256(file) != before


def test_a_file_that_has_just_changed_is_hashed_but_not_remembered(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashes, "SETTLED_NS", 3600 * 10**9)
    hashes = FileHashes(str(cache))
    assert hashed(hashes, file) == sha256(file)
    assert hashes.known(identity_of(file)) is None, (
        "it may change once more within one step of the clock"
    )


def test_the_number_of_remembered_files_is_limited(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashes, "MAX_REMEMBERED", 3)
    hashes, paths = FileHashes(str(cache)), [tmp_path / f"{number}.bin" for number in range(5)]
    for path in paths:
        path.write_text(path.name)
        hashed(hashes, path)
    again = FileHashes(str(cache))
    assert [again.known(identity_of(path)) is not None for path in paths] == [
        False,
        False,
        True,
        True,
        True,
    ]


# --- what must not be believed --------------------------------------------------------------------

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[:-10],
    "another format": lambda content: b"kvkeep file hashes 2\n" + content,
    "garbage": lambda content: os.urandom(1000),
    "endless": lambda content: content + b"\n" * file_hashes.MAX_REMEMBERED * 200,
    "a hash that is none": lambda content: content[:-11] + b"zzzzzzzzzz\n",
    "a line of nothing": lambda content: b"kvkeep file hashes 1\n\n",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_ignored_and_written_anew(file: Path, cache: Path, damage: str) -> None:
    hashed(FileHashes(str(cache)), file)
    remembered = cache / "file-hashes"
    remembered.write_bytes(DAMAGE[damage](remembered.read_bytes()))
    hashes = FileHashes(str(cache))
    assert hashes.known(identity_of(file)) is None
    assert hashed(hashes, file) == sha256(file)
    assert FileHashes(str(cache)).known(identity_of(file)) == sha256(file)


def test_a_good_line_beside_a_bad_one_is_used(tmp_path: Path, file: Path, cache: Path) -> None:
    hashed(FileHashes(str(cache)), file)
    with (cache / "file-hashes").open("ab") as remembered:
        remembered.write(b"1 2 3 nonsense\n")
    assert FileHashes(str(cache)).known(identity_of(file)) == sha256(file)


def plant(cache: Path, file: Path, *, user: int, mode: int) -> None:
    """A directory with a wrong hash of that file, made by that user."""
    above = cache.parent
    above.mkdir()
    above.chmod(0o777)
    line = identity_of(file).line + b"0" * 64
    child = os.fork()
    if not child:
        try:
            os.chdir(above)
            os.umask(0)
            os.setgid(user)
            os.setuid(user)
            os.mkdir("kvkeep", mode)
            Path("kvkeep/file-hashes").write_bytes(b"kvkeep file hashes 1\n" + line + b"\n")
            Path("kvkeep/file-hashes").chmod(0o644)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (cache / "file-hashes").stat().st_uid == user


@as_root
@pytest.mark.parametrize(
    ("user", "mode"), [(ANOTHER_USER, 0o755), (ANOTHER_USER, 0o700), (0, 0o777), (0, 0o770)]
)
def test_a_directory_that_another_user_can_write_to_is_not_used(
    file: Path, cache: Path, user: int, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    plant(cache, file, user=user, mode=mode)
    hashes = FileHashes(str(cache))
    assert hashes.known(identity_of(file)) is None
    assert hashed(hashes, file) == hashes.known(identity_of(file)) == sha256(file)
    assert hashes.hashed_bytes == 100_000, "this process remembers it"
    [warning] = caplog.messages
    assert str(cache) in warning and "XDG_CACHE_HOME" in warning
    assert ("belongs to another user" if user else "other users may write") in warning


@as_root
def test_a_file_that_another_user_can_write_to_is_replaced(
    file: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plant(cache, file, user=0, mode=0o700)
    (cache / "file-hashes").chmod(0o666)
    hashes = FileHashes(str(cache))
    assert hashes.known(identity_of(file)) is None
    assert hashed(hashes, file) == sha256(file)
    assert stat.S_IMODE((cache / "file-hashes").stat().st_mode) == 0o600
    assert FileHashes(str(cache)).known(identity_of(file)) == sha256(file)
    assert [each.levelno for each in caplog.records] == [logging.WARNING]


def test_a_link_in_the_place_of_the_directory_is_not_followed(
    file: Path, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.parent.mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    assert hashed(FileHashes(str(cache)), file) == sha256(file)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("call", ["mkdir", "replace"])
def test_without_a_place_to_write_each_process_hashes_for_itself(
    file: Path,
    cache: Path,
    call: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    cache.parent.mkdir()
    monkeypatch.setattr(file_hashes.os, call, refuse)
    hashes = FileHashes(str(cache))
    assert hashed(hashes, file) == hashed(hashes, file) == sha256(file)
    assert hashes.hashed_bytes == 100_000
    [warning] = caplog.messages  # once
    assert "Read-only file system" in warning


def test_the_place_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hashes_of_user().directory == str(tmp_path / "kvkeep")
    assert hashes_of_user() is hashes_of_user()
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert hashes_of_user().directory == str(tmp_path / ".cache" / "kvkeep")


# --- files that change ----------------------------------------------------------------------------


def test_a_file_that_changes_while_it_is_hashed_has_no_hash(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Writer:
        """Writes to the file in the middle of it."""

        def update(self, _: memoryview) -> None:
            with file.open("ab") as more:
                more.write(b"x")

        def hexdigest(self) -> str:
            return "0" * 64

    hashes = FileHashes(str(cache))
    with monkeypatch.context() as patch:
        patch.setattr(file_hashes, "hashlib", SimpleNamespace(sha256=Writer))
        with pytest.raises(FileChanged, match="has changed"):
            hashed(hashes, file)
    assert hashed(hashes, file) == sha256(file)


def test_a_file_that_changed_before_it_is_hashed_has_no_hash(file: Path, cache: Path) -> None:
    before = identity_of(file)
    file.rename(file.with_suffix(".old"))
    file.write_bytes(b"another")
    with pytest.raises(FileChanged):
        FileHashes(str(cache)).hash(str(file), before)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        FileHashes(str(cache)).hash(str(file), before)
    os.mkfifo(file)
    with pytest.raises(FileChanged):
        FileHashes(str(cache)).hash(str(file), before)


# --- one hasher a host ----------------------------------------------------------------------------


def test_a_waiting_process_takes_the_hash_of_the_one_that_had_its_turn(
    file: Path, cache: Path, tmp_path: Path
) -> None:
    found: list[str] = []
    waiting, made = FileHashes(str(cache)), tmp_path / "made"
    thread = threading.Thread(target=lambda: found.append(hashed(waiting, file)))
    with lock_held(cache):
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        hashed(FileHashes(str(made)), file)
        (made / "file-hashes").rename(cache / "file-hashes")  # as the holder of the lock makes it
        thread.join()
    assert found == [sha256(file)] and not waiting.hashed_bytes


def test_a_process_that_was_stopped_in_its_turn_is_not_waited_for_forever(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashes, "LOCK_PATIENCE_S", 0.1)
    hashes = FileHashes(str(cache))
    with lock_held(cache):
        assert hashed(hashes, file) == sha256(file)
        assert not (cache / "file-hashes").exists(), "only the holder of the lock writes"
    assert hashes.hashed_bytes == 100_000


ONE_OF_EIGHT = """
import sys
from pathlib import Path
from kvkeep.connector import file_hashes
file_hashes.SETTLED_NS = 0
hashes = file_hashes.FileHashes(sys.argv[1])
paths = [Path(each) for each in sys.argv[2:]]
print("ready", flush=True)
sys.stdin.readline()
found = [hashes.hash(str(path), file_hashes.FileIdentity.of(path.stat())) for path in paths]
print(hashes.hashed_bytes, *found)
"""


def test_eight_processes_read_each_file_once_in_all(tmp_path: Path, cache: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(4)]
    for path in paths:
        path.write_bytes(os.urandom(1 << 20) * 16)
    command = [sys.executable, "-c", ONE_OF_EIGHT, str(cache), *map(str, paths)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate()[0].split() for process in processes]
    assert [answer[1:] for answer in answers] == [[sha256(path) for path in paths]] * 8
    assert sum(int(answer[0]) for answer in answers) == 4 * 16 << 20
