"""The mover: a niced process that does all input and output of one disk tier (`mover`).

    socket ──► reads  ──┐                                     ┌──► Result
               writes ──┴──► 4 threads: preadv, pwritev ──────┤
                                                              └──► commit: fdatasync, log, fdatasync ──► Result

It maps the pool as an engine does and holds the lock of a session, so that the server after a
crashed one knows that this process may still write to slots. It ends with its parent: by a signal of
the kernel, and when the socket is closed.

Bytes go between the slots and the file without a copy in between. Blocks that lie side by side on
the disk are moved with one call. Reads go first, except in one thread, so that constant reads do not
stop writes. Checks go last, one piece at a time: three threads stay free.

One thread commits. While it waits for the disk, the data of further writes is written; the next
commit is for all of them. Records are appended in the order in which their jobs came."""

from __future__ import annotations

import ctypes
import errno
import importlib
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final, Protocol, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import KVKeepError
from kvkeep.kv.checksum import ABSENT, checksum_at
from kvkeep.tiers.mover import (
    STARTED,
    Append,
    Cancel,
    Check,
    Compact,
    Job,
    Order,
    Read,
    Result,
    SetRate,
    Start,
    Write,
    frame_of,
    take_frame,
)
from kvkeep.units import MIB
from kvkeep.wire.messages import PoolPlace
from kvkeep.wire.pool_files import PoolFiles, hold
from kvkeep.wire.segments import Segments

THREADS: Final = 4
NICE: Final = 10
_PIECE_BYTES: Final = 2 * MIB  # moved with one call; the threads share a job of 8 MiB
_PIECE_BLOCKS: Final = 256
_PR_SET_PDEATHSIG: Final = 1
_orders: Final = msgspec.msgpack.Decoder(Order)


class Disk(Protocol):
    """The files of a disk tier (`disk_files.DiskFiles`). All raise OSError. `read` and `write` are
    called by several threads, the others by one."""

    def read(self, offset: int, views: list[memoryview]) -> int: ...

    def write(self, offset: int, views: list[memoryview]) -> None: ...

    def sync_data(self) -> None: ...

    def append(self, records: bytes) -> None: ...

    def sync_log(self) -> None: ...

    def compact(self) -> None: ...


class Worker(Protocol):
    """What runs in a mover's process: it sends a Result for each job."""

    def start(self) -> None: ...

    def take(self, order: Order) -> None: ...


class MappedPool:
    """The pool, as a session maps it. Holds the session's lock until the process ends. OSError or
    PoolError if that fails."""

    def __init__(self, place: PoolPlace, epoch: int) -> None:
        files = PoolFiles(Path(place.directory))
        files.check()
        self.lock = hold(Path(Path(place.lock).name), files.open)
        self.segments = Segments(files, place.segment_bytes, place.pool_bytes, epoch)
        self._place = place
        self._mapped: dict[int, memoryview] = {}  # by the number of the segment

    def views(self, slots: NDArray[np.int64], nbytes: int) -> list[memoryview]:
        """The memory of these slots, which `segments.addresses` has checked. Slices of one view of
        a segment take a hundredth of the time of `Segments.view`."""
        views = []
        for slot in slots.tolist():
            number, within = divmod(slot, self._place.segment_bytes)
            mapped = self._mapped.get(number)
            if mapped is None:
                first = number * self._place.segment_bytes
                size = min(self._place.segment_bytes, self._place.pool_bytes - first)
                mapped = self._mapped[number] = self.segments.view(first, size).data
            views.append(mapped[within : within + nbytes])
        return views


@dataclass(eq=False)
class _Moving:
    """A job under way. `left`: how many of its pieces have not been moved."""

    job: Job
    slots: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    offsets: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    addresses: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    good: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    pieces: list[slice] = field(default_factory=list)
    left: int = 0
    error: str = ""
    began_s: float = 0.0

    def fail(self, error: str) -> None:
        """Keeps the first error."""
        self.error = self.error or error


class MoverProcess:
    """Moves blocks between the pool and a disk, and sends a Result for each job."""

    def __init__(self, pool: MappedPool, disk: Disk, connected: socket.socket) -> None:
        self._pool = pool
        self._disk = disk
        self._socket = connected
        self._sending = threading.Lock()
        lock = threading.Lock()
        self._work_came = threading.Condition(lock)
        self._written = threading.Condition(lock)
        self._reads: deque[tuple[_Moving, slice]] = deque()
        self._writes: deque[tuple[_Moving, slice]] = deque()
        self._checks: deque[tuple[_Moving, slice]] = deque()
        self._is_checking = False
        self._commits: deque[_Moving] = deque()  # in the order in which the jobs came
        self._sync_error = ""
        self._pace = Pace()

    def start(self) -> None:
        """Starts the threads."""
        for number in range(THREADS):
            prefers_writes = number == 0
            threading.Thread(target=self._move_all, args=(prefers_writes,), daemon=True).start()
        threading.Thread(target=self._commit_all, daemon=True).start()

    def take(self, order: Order) -> None:
        """Begins a job, or changes how jobs are done."""
        if isinstance(order, SetRate):
            self._pace.set_rate(order.bytes_per_s)
        elif isinstance(order, Cancel):
            self._cancel(order.number)
        elif isinstance(order, Write | Read | Check | Append | Compact):
            self._begin(_Moving(order))

    def _begin(self, moving: _Moving) -> None:
        job = moving.job
        if isinstance(job, Write | Read | Check):
            try:
                self._cut(moving, job)
            except (KVKeepError, ValueError) as error:
                moving.fail(describe(error))
        with self._work_came:
            queue = self._checks if isinstance(job, Check) else self._writes
            queue = self._reads if isinstance(job, Read) else queue
            queue.extend((moving, piece) for piece in moving.pieces)
            moving.left = len(moving.pieces)
            self._work_came.notify(moving.left)
            if not isinstance(job, Read | Check):
                self._commits.append(moving)
                self._written.notify()
        if isinstance(job, Read | Check) and not moving.pieces:
            self._answer(moving)

    def _cut(self, moving: _Moving, job: Write | Read | Check) -> None:
        """Finds the addresses of the slots, and cuts the job into pieces. PoolError if a slot is
        outside the pool."""
        moving.offsets = np.frombuffer(job.offsets, "<i8")
        if isinstance(job, Check):
            moving.good = np.zeros(len(moving.offsets), np.uint8)
        else:
            moving.good = np.zeros(len(job.slots) // 8, np.uint8)
            moving.slots = np.frombuffer(job.slots, "<i8")
            if len(moving.slots) != len(moving.offsets):
                raise ValueError(f"{len(moving.slots)} slots, {len(moving.offsets)} offsets")
            moving.addresses = self._pool.segments.addresses(moving.slots, job.nbytes)
        moving.pieces = pieces_of(moving.offsets, job.nbytes)

    def _cancel(self, number: int) -> None:
        """Fails the job unless one of its pieces has begun."""
        with self._work_came:
            found = {
                moving
                for moving, _ in (*self._reads, *self._writes, *self._checks)
                if moving.job.number == number and not moving.began_s
            }
            for moving in found:
                moving.fail("cancelled")
                moving.left = 0
            self._reads = deque(each for each in self._reads if each[0] not in found)
            self._writes = deque(each for each in self._writes if each[0] not in found)
            self._checks = deque(each for each in self._checks if each[0] not in found)
            self._written.notify()
        for moving in found:
            if isinstance(moving.job, Read | Check):
                self._answer(moving)

    # -- the threads that move

    def _move_all(self, prefers_writes: bool) -> None:
        while True:
            with self._work_came:
                while not (queue := self._next_queue(prefers_writes)):
                    self._work_came.wait()
                moving, piece = queue.popleft()
                is_check = queue is self._checks
                self._is_checking |= is_check
                moving.began_s = moving.began_s or time.monotonic()
            try:
                self._move(moving, piece)
            except Exception as error:
                # guard: whatever happened to this piece, the mover goes on with the others
                moving.fail(describe(error))
            with self._written:
                moving.left -= 1
                is_last = not moving.left
                if is_last:
                    self._written.notify()
                if is_check:
                    self._is_checking = False  # this thread looks for the next piece itself
            if is_last and isinstance(moving.job, Read | Check):
                self._answer(moving)

    def _next_queue(self, prefers_writes: bool) -> deque[tuple[_Moving, slice]] | None:
        """The queue that a thread takes its next piece from; None if it has to wait."""
        first, second = self._reads, self._writes
        if prefers_writes:
            first, second = second, first
        if first or second:
            return first or second
        return self._checks if self._checks and not self._is_checking else None

    def _move(self, moving: _Moving, piece: slice) -> None:
        job, offset = moving.job, int(moving.offsets[piece.start])
        if isinstance(job, Check):
            count = piece.stop - piece.start
            self._pace.wait(count * job.nbytes)
            moving.good[piece] = check_piece(self._disk, job, piece)
            return
        assert isinstance(job, Write | Read)
        addresses = moving.addresses[piece]
        self._pace.wait(len(addresses) * job.nbytes)
        views = self._pool.views(moving.slots[piece], job.nbytes)
        if isinstance(job, Write):
            self._disk.write(offset, views)
            moving.good[piece] = 1
            return
        nbytes = self._disk.read(offset, views)
        whole = nbytes // job.nbytes
        if whole < len(addresses):
            moving.fail(f"the disk's file ends after {offset + nbytes} bytes")
        moving.good[piece.start : piece.start + whole] = _verify(
            job, addresses[:whole], piece.start
        )

    # -- the thread that commits

    def _commit_all(self) -> None:
        while True:
            with self._written:
                while not self._commits or self._commits[0].left:
                    self._written.wait()
                batch = [self._commits.popleft()]
                while self._commits and not self._commits[0].left:
                    batch.append(self._commits.popleft())
            self._commit(batch)
            for moving in batch:
                self._answer(moving)

    def _commit(self, batch: list[_Moving]) -> None:
        """Makes the batch durable: its data, then its records."""
        whole = [moving for moving in batch if not moving.error]
        try:
            if self._sync_error:
                raise OSError(errno.EIO, self._sync_error)
            if any(isinstance(moving.job, Write) for moving in whole):
                self._sync(self._disk.sync_data)
            records: list[bytes] = []
            for job in (moving.job for moving in whole):
                if isinstance(job, Compact):
                    self._append(records)
                    self._disk.compact()
                    records = []
                elif isinstance(job, Write | Append):
                    records.append(job.record)
            self._append(records)
        except Exception as error:
            # guard: the jobs fail, whatever happened, and the mover goes on
            for moving in whole:
                moving.fail(describe(error))
                moving.good[:] = 0

    def _append(self, records: list[bytes]) -> None:
        if any(records):
            self._disk.append(b"".join(records))
            self._sync(self._disk.sync_log)

    def _sync(self, sync: Callable[[], None]) -> None:
        """After a failed sync the kernel may drop what was written, and let the next one succeed. So
        this process commits nothing any more."""
        try:
            sync()
        except OSError as error:
            self._sync_error = f"an earlier sync failed: {describe(error)}"
            raise

    def _answer(self, moving: _Moving) -> None:
        seconds = time.monotonic() - moving.began_s if moving.began_s else 0.0
        if moving.error and not isinstance(moving.job, Read):
            moving.good[:] = 0
        self.answer(Result(moving.job.number, moving.error, moving.good.tobytes(), seconds))

    def answer(self, result: Result) -> None:
        """Sends a Result. Waits until the daemon takes it."""
        with self._sending:
            self._socket.sendall(frame_of(result))


class Pace:
    """Spreads moves over time, for several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._changes = 0
        self._bytes_per_s = 0
        self._free_at_s = 0.0

    def set_rate(self, bytes_per_s: int) -> None:
        """0: no limit. Moves that wait begin at once."""
        with self._changed:
            self._bytes_per_s = bytes_per_s
            self._free_at_s = 0.0
            self._changes += 1
            self._changed.notify_all()

    def wait(self, nbytes: int) -> None:
        """Waits until that many bytes may be moved."""
        with self._changed:
            now_s, changes = time.monotonic(), self._changes
            delay_s = self.reserve(nbytes, now_s) - now_s
            if delay_s > 0:
                self._changed.wait_for(
                    lambda: self._changes != changes, min(delay_s, threading.TIMEOUT_MAX)
                )

    def reserve(self, nbytes: int, now_s: float) -> float:
        """Reserves time to move that many bytes, and returns when it begins."""
        if not self._bytes_per_s:
            return now_s
        start_s = max(now_s, self._free_at_s)
        self._free_at_s = start_s + nbytes / self._bytes_per_s
        return start_s


def pieces_of(offsets: NDArray[np.int64], nbytes: int) -> list[slice]:
    """Cuts blocks of this size into pieces that are moved with one call: they lie side by side on
    the disk."""
    most = min(max(_PIECE_BYTES // nbytes, 1), _PIECE_BLOCKS)
    gaps = np.flatnonzero(np.diff(offsets) != nbytes) + 1
    return [
        slice(at, min(at + most, stop))
        for start, stop in pairwise([0, *gaps.tolist(), len(offsets)])
        for at in range(start, stop, most)
    ]


def check_piece(disk: Disk, job: Check, piece: slice) -> NDArray[np.bool_]:
    """Which blocks of a piece have their checksums. OSError if they cannot be read."""
    count, offset = piece.stop - piece.start, np.frombuffer(job.offsets, "<i8")[piece.start]
    memory = mmap.mmap(-1, count * job.nbytes)  # aligned, for O_DIRECT
    whole = disk.read(int(offset), [memoryview(memory)]) // job.nbytes
    if whole < count:
        raise OSError(errno.EIO, f"the disk's file ends after {offset + whole * job.nbytes} bytes")
    start = np.frombuffer(memory, np.uint8).ctypes.data
    addresses = np.uint64(start) + np.arange(count, dtype=np.uint64) * np.uint64(job.nbytes)
    return _verify(job, addresses, piece.start)


def _verify(job: Read | Check, addresses: NDArray[np.uint64], first: int) -> NDArray[np.bool_]:
    """Which of these blocks, the first of which is number `first` of the job, have their
    checksums."""
    shape = -1, len(job.shard_bytes)
    expected = np.frombuffer(job.checksums, "<u8").reshape(shape)[first : first + len(addresses)]
    good = np.ones(len(addresses), np.bool_)
    for shard, (offset, nbytes) in enumerate(zip(job.shard_offsets, job.shard_bytes, strict=True)):
        found = checksum_at(addresses + np.uint64(offset), nbytes)
        good &= (found == expected[:, shard]) | (expected[:, shard] == ABSENT)
    return good


def describe(error: Exception) -> str:
    """The error in one line, with the name of its number: "No space left on device (ENOSPC)"."""
    if isinstance(error, OSError) and error.errno:
        return f"{error.strerror} ({errno.errorcode.get(error.errno, error.errno)})"
    return f"{type(error).__name__}: {getattr(error, 'message', error)}"


def _open_disk(start: Start) -> Disk:
    module, _, name = start.opener.partition(":")
    kind = getattr(importlib.import_module(module), name)
    return cast(Disk, kind.inherit(start.description, tuple(start.descriptors)))


def _orders_from(connected: socket.socket) -> Iterator[Order]:
    received = bytearray()
    while more := connected.recv(MIB):
        received += more
        while (body := take_frame(received)) is not None:
            yield _orders.decode(body)


def serve(connected: socket.socket, make: Callable[[Start, socket.socket], Worker]) -> None:
    """Carries out orders until the daemon closes the socket."""
    orders = _orders_from(connected)
    start = next(orders, None)
    if not isinstance(start, Start) or os.getppid() != start.parent:
        return  # the daemon has ended already
    try:
        worker = make(start, connected)
    except (OSError, ValueError, KVKeepError) as error:
        connected.sendall(frame_of(Result(STARTED, describe(error))))
        return
    connected.sendall(frame_of(Result(STARTED)))
    worker.start()
    for order in orders:
        worker.take(order)


def run(make: Callable[[Start, socket.socket], Worker]) -> None:
    """Runs in the process that `mover.Mover` started. The daemon alone decides when it ends: Ctrl-C
    and the signals of a service manager reach all processes of a group."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(NICE)
    try:
        serve(socket.socket(fileno=int(sys.argv[1])), make)
    finally:
        sys.stderr.flush()
        os._exit(0)  # without waiting for threads that wait for the tier


def _make(start: Start, connected: socket.socket) -> MoverProcess:
    return MoverProcess(MappedPool(start.pool, start.epoch), _open_disk(start), connected)


if __name__ == "__main__":
    run(_make)
