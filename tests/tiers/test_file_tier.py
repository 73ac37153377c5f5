"""A shared directory as a tier. Faults are those of its files, or of the calls that move them."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvkeep.errors import TierError
from kvkeep.testing.tiers import PLACE, check_tier
from kvkeep.tiers.checked_tier import CheckedTier
from kvkeep.tiers.encryption import Encryption
from kvkeep.tiers.file_tier import FileTier
from kvkeep.tiers.tier import Part
from kvkeep.tiers.tier_keys import TierKeys
from kvkeep.units import MIB

NAME = f"{PLACE}/{'ab' * 16}"


class StallingTier(FileTier):
    """Waits in each read and write while it is stalled."""

    go_on = threading.Event()

    def read(self, parts: Sequence[Part]) -> list[int]:
        self.go_on.wait()
        return super().read(parts)

    def write(self, parts: Sequence[Part]) -> list[bool]:
        self.go_on.wait()
        return super().write(parts)


class FileFaults:
    def __init__(self, tier: StallingTier) -> None:
        self._tier = tier
        tier.go_on.set()

    @contextmanager
    def during(self, fault: str) -> Iterator[None]:
        if fault == "half":
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4500, before[1]))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
        elif fault == "full":
            size_bytes = self._tier.sweeper.size_bytes
            self._tier.sweeper.size_bytes = self._tier.usage().used_bytes
            yield
            self._tier.sweeper.size_bytes = size_bytes
        else:
            self._tier.go_on.clear()
            try:
                yield
            finally:
                self._tier.go_on.set()

    def garble(self) -> None:
        for path in blocks_in(self._tier.directory):
            content = bytearray(path.read_bytes())
            content[-7] ^= 4
            path.write_bytes(content)


def blocks_in(directory: Path) -> list[Path]:
    return [path for path in (directory / "v1").rglob("*") if path.is_file()]


def part(data: bytes, name: str = NAME) -> Part:
    return Part(name, [memoryview(data)])


def read(tier: FileTier | CheckedTier, nbytes: int, name: str = NAME) -> bytes | None:
    view = memoryview(bytearray(nbytes))
    (found,) = tier.read([Part(name, [view])])
    return None if found < 0 else view[:found].tobytes()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_directory_is_a_tier(tmp_path: Path, encrypted: bool) -> None:
    made = iter(range(100))
    keys = TierKeys(os.urandom(32), (os.urandom(32), os.urandom(32)))
    proofs = Encryption(lambda: keys) if encrypted else None

    def make() -> tuple[CheckedTier, FileFaults]:
        tier = StallingTier(tmp_path / str(next(made)), 64 * MIB)
        return CheckedTier(tier, proofs), FileFaults(tier)

    check_tier(make)


def test_two_hosts_share_it_and_the_first_write_stays(tmp_path: Path) -> None:
    with (
        closing(FileTier(tmp_path / "kv", MIB)) as one,
        closing(FileTier(tmp_path / "kv", MIB)) as two,
    ):
        assert one.write([part(b"first")]) == [True]
        assert two.leading([NAME]) == 1
        assert two.write([part(b"other")]) == [True]
        assert read(one, 5) == read(two, 5) == b"first"
        assert two.delete("v1/tenant/") == 1
        assert one.leading([NAME]) == 0


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links")

    with closing(FileTier(tmp_path / "kv", MIB)) as tier:
        monkeypatch.setattr(os, "link", no_link)
        assert tier.write([part(b"one")]) == [True]
        assert read(tier, 3) == b"one" and not list((tmp_path / "kv" / "tmp").iterdir())


@pytest.mark.parametrize(("mode", "file_mode"), [(0o700, 0o600), (0o770, 0o660)])
def test_files_are_as_open_as_the_directory(tmp_path: Path, mode: int, file_mode: int) -> None:
    directory = tmp_path / "kv"
    directory.mkdir()
    directory.chmod(mode)
    before = os.umask(0)
    try:
        with closing(FileTier(directory, MIB)) as tier:
            tier.write([part(b"block")])
    finally:
        os.umask(before)
    (path,) = blocks_in(directory)
    assert stat.S_IMODE(path.stat().st_mode) == file_mode
    assert stat.S_IMODE(path.parent.stat().st_mode) == mode


def test_a_new_directory_is_the_servers_own(tmp_path: Path) -> None:
    with closing(FileTier(tmp_path / "kv", MIB)):
        assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


def test_a_directory_that_every_user_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(TierError, match="every user may write"):
        FileTier(tmp_path / "kv", MIB)
    with pytest.raises(TierError, match="cannot be used"):
        FileTier(tmp_path / "no" / "kv", MIB)


@pytest.mark.parametrize("name", ["v1/../../etc/passwd", "v1//a", "/v1/a", "v2/a/b", "v1/.a/b"])
def test_names_stay_inside(tmp_path: Path, name: str) -> None:
    with closing(FileTier(tmp_path / "kv", MIB)) as tier, pytest.raises(TierError):
        tier.write([part(b"x", name)])


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    with closing(FileTier(tmp_path / "kv", MIB)) as tier:
        tier.write([part(b"block")])
        (path,) = blocks_in(tmp_path / "kv")
        path.unlink()
        (tmp_path / "secret").write_bytes(b"secret")
        path.symlink_to(tmp_path / "secret")
        assert tier.leading([NAME]) == 0
        with pytest.raises(TierError):
            read(tier, 6)


def test_a_read_renews_the_time_of_use(tmp_path: Path) -> None:
    with closing(FileTier(tmp_path / "kv", MIB)) as tier:
        tier.write([part(b"block")])
        (path,) = blocks_in(tmp_path / "kv")
        long_ago = time.time() - 86_400
        os.utime(path, (long_ago, long_ago))
        assert read(tier, 5) == b"block"
        assert path.stat().st_mtime > long_ago + 80_000


def test_a_directory_that_is_gone_is_no_miss(tmp_path: Path) -> None:
    with closing(FileTier(tmp_path / "kv", MIB)) as tier:
        assert tier.leading([NAME]) == 0
        (tmp_path / "kv").rename(tmp_path / "away")
        with pytest.raises(TierError, match="ENOENT"):
            tier.leading([NAME])
        with pytest.raises(TierError, match="ENOENT"):
            tier.write([part(b"block")])
