"""The daemon's end of a mover, with a real process and real files: every job gets one Result, no
call blocks, and no slot is reused while the process may still touch it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvkeep.kv.checksum import checksum
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.store.layouts import Layout
from kvkeep.testing.clock import eventually
from kvkeep.testing.faulty_disk import FaultyDisk
from kvkeep.testing.process import wait_for
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_index import DiskIndex
from kvkeep.tiers.memory import Pool
from kvkeep.tiers.mover import Append, Check, Compact, Job, Mover, Read, Result, Write, frame_of
from kvkeep.tiers.session_locks import OldSessions
from kvkeep.units import KIB, MIB
from kvkeep.wire.messages import PoolPlace

EPOCH = 5
SLOT = 8 * KIB
SHARDS = (5000, 3000)  # bytes of each
SHARD_OFFSETS = (0, 5056)


def numbers(values: list[int]) -> bytes:
    return np.array(values, dtype="<i8").tobytes()


class Host:
    """A pool of 8 MiB, a disk and a mover between them. The slots and offsets of jobs are counted
    in slots of 8 KiB."""

    def __init__(self, directory: Path, most_bytes: int = 64 * MIB) -> None:
        self.directory = directory
        self.pool = Pool(directory, "test", 8 * MIB, MIB, EPOCH)
        self.pool.fill_next()
        self.watch = self.pool.watch(1)
        pool_dir, lock = str(self.pool.directory), str(self.watch.path)
        self.place = PoolPlace(pool_dir, lock, self.pool.segment_bytes, self.pool.pool_bytes)
        self.disk = FaultyDisk(directory)
        self.mover = Mover(self.place, EPOCH, self.disk, most_bytes=most_bytes)
        self.came: dict[int, Result] = {}

    def close(self) -> None:
        self.mover.close()
        self.disk.close()
        self.watch.close()
        self.pool.close()

    def slot(self, number: int) -> NDArray[np.uint8]:
        return self.pool.segments.view(number * SLOT, SLOT)

    def fill(self, slots: list[int]) -> bytes:
        """Puts noise into these slots; the checksums of their shards."""
        noise = np.random.default_rng(len(slots))
        for number in slots:
            self.slot(number)[:] = noise.integers(0, 256, SLOT, dtype=np.uint8)
        parts = [
            self.slot(number)[at : at + nbytes]
            for number in slots
            for at, nbytes in zip(SHARD_OFFSETS, SHARDS, strict=True)
        ]
        return np.array([checksum(part) for part in parts], dtype="<u8").tobytes()

    def write(self, number: int, slots: list[int], at: list[int], record: bytes = b"") -> Write:
        offsets = numbers([SLOT * each for each in at])
        return Write(number, numbers([SLOT * each for each in slots]), offsets, SLOT, record)

    def read(self, number: int, slots: list[int], at: list[int], checksums: bytes) -> Read:
        offsets = numbers([SLOT * each for each in at])
        places = numbers([SLOT * each for each in slots])
        return Read(number, places, offsets, SLOT, [*SHARD_OFFSETS], [*SHARDS], checksums)

    def do(self, *jobs: Job) -> list[Result]:
        """Sends jobs and waits for their results."""
        for job in jobs:
            assert self.mover.send(job)
        return self.wait(*[job.number for job in jobs])

    def wait(self, *numbers: int) -> list[Result]:
        return eventually(lambda: self.results(*numbers))

    def results(self, *numbers: int) -> list[Result]:
        """These results; empty if one has not come."""
        if self.mover.fileno() >= 0:
            wait_for(self.mover, 20)
        for result in self.mover.results():
            assert result.number not in self.came
            self.came[result.number] = result
        done = all(number in self.came for number in numbers)
        return [self.came[number] for number in numbers] if done else []

    def operations(self) -> list[str]:
        """The names of those that have ended."""
        return [name for name in self._noted() if name != "stall"]

    def stalls(self) -> int:
        """How many operations have begun to wait."""
        return self._noted().count("stall")

    def _noted(self) -> list[str]:
        return (self.directory / "operations").read_text().split()

    def fail(self, operation: str, error: str) -> None:
        (self.directory / f"fail-{operation}").write_text(error)

    def stall(self, operation: str) -> None:
        os.mkfifo(self.directory / f"stall-{operation}")

    def resume(self, operation: str) -> None:
        """Once the operation has begun to wait."""
        path = self.directory / f"stall-{operation}"

        def is_open() -> int:
            try:
                return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                return 0

        gate = eventually(is_open)
        path.unlink()
        os.close(gate)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Host]:
    """A host whose mover takes 16 slots in flight."""
    made = Host(tmp_path, most_bytes=16 * SLOT)
    yield made
    made.close()


def test_blocks_come_back_as_they_went(host: Host) -> None:
    """Side by side on the disk, scattered, and in another order."""
    slots, at = [3, 9, 4, 5, 20, 21], [10, 11, 12, 40, 7, 6]
    sums = host.fill(slots)
    content = [host.slot(slot).copy() for slot in slots]
    (wrote,) = host.do(host.write(1, slots, at, b"record"))
    assert (wrote.error, wrote.good) == ("", bytes([1] * 6)) and wrote.seconds > 0
    assert (host.directory / "log").read_bytes() == b"record"
    into = [100, 101, 99, 50, 51, 52]
    (read,) = host.do(host.read(2, into, at, sums))
    assert (read.error, read.good) == ("", bytes([1] * 6))
    for slot, expected in zip(into, content, strict=True):
        assert (host.slot(slot) == expected).all()
    assert not host.mover.jobs and not host.mover.in_flight_bytes


def test_a_damaged_block_is_not_good_and_the_others_are(host: Host) -> None:
    sums = host.fill([0, 1, 2])
    host.do(host.write(1, [0, 1, 2], [0, 1, 2]))
    with (host.directory / "data").open("r+b") as data:
        data.seek(SLOT + SHARD_OFFSETS[1] + 1)
        byte = data.read(1)
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte[0] ^ 1]))
    (read,) = host.do(host.read(2, [10, 11, 12], [0, 1, 2], sums))
    assert read.good == bytes([1, 0, 1]) and not read.error


def test_a_shard_that_was_never_stored_is_not_compared(host: Host) -> None:
    sums = np.frombuffer(host.fill([0]), "<u8").copy()
    host.do(host.write(1, [0], [0]))
    sums[1] = 2**64 - 1
    (read,) = host.do(host.read(2, [1], [0], sums.tobytes()))
    assert (read.error, read.good) == ("", b"\1")


def test_a_file_that_was_cut_off_gives_what_is_left(host: Host) -> None:
    sums = host.fill([0, 1, 2])
    host.do(host.write(1, [0, 1, 2], [0, 1, 2]))
    os.truncate(host.directory / "data", SLOT + 100)
    (read,) = host.do(host.read(2, [10, 11, 12], [0, 1, 2], sums))
    assert read.good == bytes([1, 0, 0]) and read.error == "the disk's file ends after 8292 bytes"


@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EROFS"])
@pytest.mark.parametrize("operation", ["write", "append"])
def test_a_write_that_fails_says_why_and_the_next_one_works(
    host: Host, operation: str, error: str
) -> None:
    host.fill([0, 1])
    host.fail(operation, error)
    (wrote,) = host.do(host.write(1, [0, 1], [0, 5], b"lost"))
    assert wrote.good == bytes(2) and f"({error})" in wrote.error
    (host.directory / f"fail-{operation}").unlink()
    (wrote,) = host.do(host.write(2, [0, 1], [0, 5], b"kept"))
    assert (wrote.error, wrote.good) == ("", bytes([1, 1]))
    assert (host.directory / "log").read_bytes() == b"kept"


@pytest.mark.parametrize("operation", ["sync_data", "sync_log"])
def test_nothing_is_committed_after_a_sync_that_failed(host: Host, operation: str) -> None:
    """The kernel may have dropped what was written, and the next sync would succeed."""
    host.fail(operation, "EIO")
    (wrote,) = host.do(host.write(1, [0], [0], b"one"))
    assert wrote.good == bytes(1) and "(EIO)" in wrote.error
    (host.directory / f"fail-{operation}").unlink()
    before = host.operations()
    wrote, appended = host.do(host.write(2, [0], [0], b"two"), Append(3, b"three"))
    assert wrote.good == bytes(1)
    assert "an earlier sync failed" in wrote.error and "an earlier sync failed" in appended.error
    assert set(host.operations()[len(before) :]) <= {"write"}


def test_a_read_that_fails_says_why(host: Host) -> None:
    sums = host.fill([0])
    host.do(host.write(1, [0], [0]))
    host.fail("read", "EIO")
    (read,) = host.do(host.read(2, [1], [0], sums))
    assert read.good == bytes(1) and "(EIO)" in read.error


def test_a_disk_that_is_full_fails_writes_alone(tmp_path: Path) -> None:
    """A real file system without room."""
    if os.geteuid():
        pytest.skip("only root may mount")
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path / "disk")]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a container without mounts")
    with ExitStack() as ends:
        ends.callback(subprocess.run, ["umount", str(tmp_path / "disk")], check=True)
        host = Host(tmp_path)
        host.disk.close()
        host.mover.close()
        host.disk = FaultyDisk(tmp_path / "disk")
        host.watch.close()
        host.watch = host.pool.watch(2)
        place = PoolPlace(host.place.directory, str(host.watch.path), MIB * 256, 8 * MIB)
        host.mover = Mover(place, EPOCH, host.disk)
        ends.callback(host.close)
        sums = host.fill([0])
        host.do(host.write(1, [0], [0], b"record"))
        blocks = list(range(100))
        (wrote,) = host.do(host.write(2, blocks, blocks[::-1]))
        assert "(ENOSPC)" in wrote.error and not any(wrote.good)
        (read,) = host.do(host.read(3, [1], [0], sums))
        assert read.good == bytes(1) or read.error == ""


def test_a_slot_outside_the_pool_fails_its_job_alone(host: Host) -> None:
    sums = host.fill([0])
    wrote, read = host.do(host.write(1, [1024], [0]), host.read(2, [-1], [0], sums))
    assert "not in the pool" in wrote.error and "not in the pool" in read.error
    assert host.do(host.write(3, [0], [0]))[0].error == ""


def test_records_follow_their_data_and_one_commit_is_for_all_that_waited(host: Host) -> None:
    host.stall("sync_data")
    assert host.mover.send(host.write(1, [0], [0], b"1"))
    eventually(lambda: host.operations() == ["write"])
    for number in range(2, 7):
        assert host.mover.send(host.write(number, [0], [number], str(number).encode()))
    assert host.mover.send(Append(7, b"7"))
    eventually(lambda: host.operations() == ["write"] * 6)
    host.resume("sync_data")
    results = host.wait(*range(1, 8))
    assert not any(result.error for result in results)
    assert host.operations()[6:] == ["sync_data", "append", "sync_log"] * 2
    assert (host.directory / "log").read_bytes() == b"1234567"


def test_a_compaction_takes_its_place_among_the_records(host: Host) -> None:
    host.stall("sync_data")
    jobs = [host.write(1, [0], [0], b"1"), Append(2, b"2"), Compact(3), Append(4, b"4")]
    for job in jobs:
        assert host.mover.send(job)
    host.resume("sync_data")
    assert not any(result.error for result in host.wait(1, 2, 3, 4))
    assert (host.directory / "log").read_bytes() == b"4"


def test_a_job_can_be_cancelled_until_it_begins(host: Host) -> None:
    host.stall("read")
    sums = host.fill([0, 1, 2, 3])
    assert host.mover.send(host.read(1, [0, 1, 2, 3], [0, 2, 4, 6], sums))
    eventually(lambda: host.stalls() == 4)  # all threads
    assert host.mover.send(host.read(2, [0, 1, 2, 3], [0, 2, 4, 6], sums))
    assert host.mover.send(host.write(3, [0], [0], b"never"))
    host.mover.cancel(2)
    host.mover.cancel(3)
    host.mover.cancel(4)  # which is not there
    read, write = host.wait(2, 3)
    assert read == Result(2, "cancelled", bytes(4)) and write == Result(3, "cancelled", bytes(1))
    host.mover.cancel(1)
    assert 1 not in host.came
    host.resume("read")
    assert host.wait(1)[0].error != "cancelled" and not (host.directory / "log").read_bytes()


def test_a_mover_that_is_stopped_blocks_nothing_and_gets_no_more_than_its_limit(
    small: Host,
) -> None:
    eventually(lambda: small.results() or small.mover.is_ready)
    os.kill(small.mover.pid, signal.SIGSTOP)
    sums = small.fill([0, 1, 2, 3])
    accepted = []
    for number in range(1, 200):
        is_write = number < 100
        job = small.write(number, [0, 1], [0, 1]) if is_write else None
        if small.mover.send(job or small.read(number, [2, 3], [0, 1], sums[:32])):
            accepted.append(number)
        assert small.mover.in_flight_bytes <= 16 * SLOT and small.mover.results() == []
    assert accepted == [1, 2, 3, 4, 5, 6, 7, 100] and small.mover.oldest_s >= 0
    assert not small.mover.can_read and not small.mover.can_write
    for number in accepted * 100:
        small.mover.cancel(number)
        small.mover.set_rate(number)
    small.mover.set_rate(0)
    os.kill(small.mover.pid, signal.SIGCONT)
    small.wait(*accepted)
    assert not small.mover.in_flight_bytes and not small.mover.wants_write
    assert small.do(small.write(500, [0], [0]))[0].error == ""


def test_a_large_record_goes_through_a_small_socket(host: Host) -> None:
    record = bytes(range(256)) * 40_000
    assert host.do(Append(1, record))[0].error == ""
    assert (host.directory / "log").read_bytes() == record


def test_jobs_of_a_killed_mover_fail_when_its_process_is_gone(host: Host) -> None:
    host.stall("read")
    sums = host.fill([0])
    assert host.mover.send(host.read(1, [0], [0], sums))
    eventually(lambda: host.results() or host.mover.is_ready)
    host.mover.kill("set aside")
    (read,) = host.wait(1)
    assert read == Result(1, "set aside", bytes(1)) and not host.mover.is_alive
    assert not host.watch.is_held() and host.mover.fileno() == -1
    assert not host.mover.send(host.read(2, [0], [0], sums)) and not host.mover.in_flight_bytes


def test_a_mover_that_somebody_kills_fails_its_jobs(host: Host) -> None:
    host.stall("write")
    assert host.mover.send(host.write(1, [0], [0]))
    eventually(lambda: host.results() or host.mover.is_ready)
    os.kill(host.mover.pid, signal.SIGKILL)
    assert host.wait(1)[0].error == "the mover ended unexpectedly"
    assert not host.mover.is_alive


def test_slots_are_fenced_while_the_mover_lives(host: Host) -> None:
    """The next server sees by the session's lock that the mover may still write."""
    eventually(lambda: host.results() or host.mover.is_ready)
    assert host.watch.is_held()
    old = OldSessions(host.pool.directory)
    assert old.alive() == 1
    host.mover.close()
    assert old.alive() == 0


def test_a_mover_that_cannot_have_the_lock_says_so(host: Host) -> None:
    eventually(lambda: host.results() or host.mover.is_ready)
    second = Mover(host.place, EPOCH, host.disk)
    assert second.send(Append(1, b"record"))
    (result,) = eventually(second.results)
    assert result.error.startswith("the mover could not start: ") and "EAGAIN" in result.error
    assert second.problem == result.error and not second.is_ready
    second.close()
    assert not (host.directory / "log").read_bytes()


class Babbler(FaultyDisk):
    """Sends frames of its own, in the mover's process."""

    @classmethod
    def inherit(cls, description: bytes, descriptors: tuple[int, ...]) -> FaultyDisk:
        disk = FaultyDisk.inherit(description, descriptors)
        os.write(int(sys.argv[1]), Path(os.fsdecode(description), "babble").read_bytes())
        return disk


@pytest.mark.parametrize(
    ("babble", "complaint"),
    [
        (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
        (b"\4\0\0\0what", "got `int`"),
        (b"\0\0\0\0", "truncated"),
        (frame_of(Result(7, "", b"\1")), "job 7 with 1 blocks"),  # which nobody sent
        (frame_of(Result(1, "", b"\1")), "job 1 with 1 blocks"),  # which has none
        (frame_of(Result(0)) * 2, "job 0 with 0 blocks"),
    ],
)
def test_a_mover_that_sends_what_is_no_result_is_ended(
    host: Host, monkeypatch: pytest.MonkeyPatch, babble: bytes, complaint: str
) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{root}")
    (host.directory / "babble").write_bytes(babble)
    watch = host.pool.watch(2)
    place = msgspec.structs.replace(host.place, lock=str(watch.path))
    mover = Mover(place, EPOCH, Babbler(host.directory, host.disk.descriptors()))
    assert mover.send(Append(1, b"record"))
    (result,) = eventually(mover.results)
    assert complaint in result.error and result.error == mover.problem
    assert not mover.is_alive and not watch.is_held()
    mover.close()
    watch.close()


class RealTier:
    """A disk tier with its real files and index, in a host."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.layout = Layout(1, b"test", SHARDS)
        self.directory = host.directory / "tier"
        self.open()

    def open(self) -> None:
        """As a server does: what the log says, and a new mover."""
        self.files = DiskFiles.open(self.directory, 16 * MIB, MIB)
        recovered = self.files.recovered()
        self.index = DiskIndex(self.files.data_bytes, MIB, None, recovered, now_ms=1)
        self.host.mover.close()
        self.host.mover = Mover(self.host.place, EPOCH, self.files)

    def write(self, keys: bytes, slots: list[int], sums: bytes) -> int:
        """Sends a chain of blocks to the disk; the number of the job."""
        checks = np.frombuffer(sums, "<u8").reshape(-1, len(SHARDS))
        plan = self.index.plan_write("tenant", self.layout, b"", keys, checks, now_ms=1)
        assert plan is not None
        places = numbers([SLOT * slot for slot in slots])
        assert self.host.mover.send(
            Write(plan.number, places, plan.offsets.tobytes(), SLOT, plan.record)
        )
        return plan.number


def test_what_was_acknowledged_outlives_a_kill_of_mover_and_server(host: Host) -> None:
    """Through the real files: each chain whose Result came is found, whole, after kill -9 in the
    middle of others."""
    tier = RealTier(host)
    slots = list(range(8))
    sums = host.fill(slots)
    noise = np.random.default_rng(1)
    keys = [noise.bytes(8 * KEY_BYTES) for _ in range(40)]
    chains = {tier.write(chain, slots, sums): chain for chain in keys}
    host.wait(10)
    os.kill(host.mover.pid, signal.SIGKILL)
    host.wait(*chains)
    done = [number for number in chains if not host.came[number].error]
    assert len(done) >= 1
    tier.files.close()
    tier.open()
    for job, number in enumerate(done, start=1000):
        hit = tier.index.find("tenant", tier.layout, chains[number], 0, now_ms=2)
        assert hit is not None and hit.blocks == 8
        places, checks = numbers([SLOT * (100 + slot) for slot in slots]), hit.checksums.tobytes()
        offsets = hit.offsets.tobytes()
        read = Read(job, places, offsets, SLOT, [*SHARD_OFFSETS], [*SHARDS], checks)
        assert host.do(read)[0] == msgspec.structs.replace(host.came[job], error="", good=b"\1" * 8)
        tier.index.release(hit.number, now_ms=2)
    host.mover.close()
    tier.files.close()


def test_writes_to_files_that_were_removed_fail(host: Host) -> None:
    """The open files would take them, and lose them at the next start."""
    tier = RealTier(host)
    sums = host.fill([0])
    host.wait(tier.write(b"a" * 16, [0], sums))
    for path in tier.directory.iterdir():
        path.unlink()
    (result,) = host.wait(tier.write(b"b" * 16, [0], sums))
    assert result.good == b"\0" and "(ENOENT)" in result.error
    host.mover.close()
    tier.files.close()


PARENT = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_mover import Host
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.store.layouts import Layout
from kvkeep.testing.clock import eventually
host = Host(Path(sys.argv[2]))
eventually(lambda: host.results() or host.mover.is_ready)
os.kill(host.mover.pid, int(sys.argv[3]))
print(host.mover.pid, host.pool.directory, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("state", [signal.SIGCONT, signal.SIGSTOP])
def test_a_mover_ends_with_its_parent(tmp_path: Path, state: signal.Signals) -> None:
    """Even one that is stopped: the kernel sends the signal."""
    command = [sys.executable, "-c", PARENT, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen([*command, str(int(state))], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        old = OldSessions(Path(directory))
        assert old.alive() == 1 and Path(f"/proc/{pid}").exists()
        parent.kill()
    eventually(lambda: not old.alive())
    old.close()


def check(number: int, at: list[int], checksums: bytes) -> Check:
    offsets = numbers([SLOT * each for each in at])
    return Check(number, offsets, SLOT, [*SHARD_OFFSETS], [*SHARDS], checksums)


def test_a_check_tells_good_blocks_from_bad_ones_and_leaves_the_pool_alone(host: Host) -> None:
    slots, at = [3, 9, 4, 5], [10, 11, 12, 40]
    sums = host.fill(slots)
    host.do(host.write(1, slots, at))
    before = bytes(host.pool.segments.view(0, 8 * MIB))
    (checked,) = host.do(check(2, at, sums))
    assert (checked.error, checked.good) == ("", bytes([1] * 4))
    wrong = bytearray(sums)
    wrong[16] ^= 1  # the first shard of the second block
    (checked,) = host.do(check(3, at, bytes(wrong)))
    assert (checked.error, checked.good) == ("", bytes([1, 0, 1, 1]))
    assert bytes(host.pool.segments.view(0, 8 * MIB)) == before
    host.fail("read", "EIO")
    (checked,) = host.do(check(4, at, sums))
    assert "EIO" in checked.error and 0 in checked.good


def test_reads_pass_a_check_that_waits_for_the_disk(host: Host) -> None:
    """A check has one piece under way at most. It takes no room of other jobs, and a mover whose
    check waits is not slow."""
    slots, at = [3, 4, 5, 6], [10, 20, 30, 40]  # four pieces
    sums = host.fill(slots)
    host.do(host.write(1, slots, at))
    host.stall("read")
    assert host.mover.send(check(2, at, sums))
    assert eventually(lambda: host.stalls() == 1)
    assert host.mover.in_flight_bytes == 0 and host.mover.oldest_s == 0.0
    assert host.mover.send(host.read(3, [50], [10], sums[:16]))
    assert eventually(lambda: host.stalls() == 2)  # another thread reads at once
    host.resume("read")
    read, checked = host.wait(3, 2)
    assert read.good == b"\1" and checked.good == bytes([1] * 4)
