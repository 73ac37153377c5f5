"""The daemon's end of a mover: the process that does all input and output of one tier below memory.

    daemon                                      mover (`mover_process`)
    Mover.send(job)    ── socket pair ──►       threads copy between the pool's slots and the disk
    Mover.results()    ◄── socket pair ──       one Result for each job, in any order

A tier may stall for minutes, and a thread that waits for it cannot be cancelled. So the daemon never
touches a tier: it sends jobs to a process, which it can kill. The process of a disk
(`mover_process`) takes Write, Read, Append and Compact, that of a shared tier (`shared_process`)
takes Find, Fetch, Share and SyncClears. No method of `Mover` blocks, except
`close`.

Each job that `send` accepted gets exactly one Result, after which its slots may be reused. If the
mover ends early, its jobs fail only when the process has been reaped: until then it might still read
and write their slots.

A frame is its length, 4 bytes, little-endian, and then a message in MessagePack. The first frame to
the mover is `Start`, the first frame from it a Result with the number 0. Arrays travel as bytes:
int64 offsets, uint64 checksums, uint8 flags."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import deque
from typing import Final, NamedTuple, Protocol

import msgspec

from kvkeep.tiers.clear_log import Entry
from kvkeep.units import MIB
from kvkeep.wire.messages import PoolPlace

STARTED: Final = 0  # the number of the Result that says whether the mover could start
PROGRAM: Final = "kvkeep.tiers.mover_process"
SHARED_PROGRAM: Final = "kvkeep.tiers.shared_process"
MOST_BYTES: Final = 64 * MIB
MOST_CLEARS: Final = 1024  # of one Result
JOB_BYTES: Final = 8 * MIB  # of one job; less if less may be in flight
_LEAST_JOB_BYTES: Final = 4096  # counted for a job that moves nothing
_MOST_RESULT_BYTES: Final = MIB
_RECEIVE_BYTES: Final = 256 << 10
_RECEIVES_A_CALL: Final = 8
_LENGTH_BYTES: Final = 4


class Write(msgspec.Struct, frozen=True, tag=True):
    """Copies slots to the disk, then appends `record` to the log. Its Result is sent when both are
    durable. `slots` are offsets in the pool, `offsets` on the disk, `nbytes` the size of a slot."""

    number: int
    slots: bytes
    offsets: bytes
    nbytes: int
    record: bytes


class Read(msgspec.Struct, frozen=True, tag=True):
    """Copies blocks from the disk into slots, and compares each shard with its checksum.
    `checksums` has a row for each block and a column for each shard."""

    number: int
    slots: bytes
    offsets: bytes
    nbytes: int
    shard_offsets: list[int]
    shard_bytes: list[int]
    checksums: bytes


class Check(msgspec.Struct, frozen=True, tag=True):
    """Reads blocks from the disk and compares their shards as `Read` does, and puts them nowhere. It
    is done when no read and no write waits, one piece at a time."""

    number: int
    offsets: bytes
    nbytes: int
    shard_offsets: list[int]
    shard_bytes: list[int]
    checksums: bytes


class Append(msgspec.Struct, frozen=True, tag=True):
    """Appends a record to the log."""

    number: int
    record: bytes


class Compact(msgspec.Struct, frozen=True, tag=True):
    """Shortens the log to what is still true."""

    number: int


class Find(msgspec.Struct, frozen=True, tag=True):
    """Asks a shared tier how many leading blocks it has under `place`. If it keeps `parcel_blocks` in
    an object, `before` has the keys of blocks before these, from where a parcel may begin."""

    number: int
    place: str
    keys: bytes
    before: bytes = b""
    parcel_blocks: int = 1


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Copies blocks from a shared tier into slots. Its Result brings their checksums. `before` and
    `parcel_blocks` as in Find."""

    number: int
    slots: bytes
    place: str
    keys: bytes
    nbytes: int
    shard_offsets: list[int]
    shard_bytes: list[int]
    before: bytes = b""
    parcel_blocks: int = 1


class Share(msgspec.Struct, frozen=True, tag=True):
    """Copies blocks from slots to a shared tier, unless it has them. `first`: how many blocks of the
    chain come before them; `parcel_blocks` as in Find."""

    number: int
    slots: bytes
    place: str
    keys: bytes
    nbytes: int
    shard_offsets: list[int]
    shard_bytes: list[int]
    checksums: bytes
    first: int = 0
    parcel_blocks: int = 1


class SyncClears(msgspec.Struct, frozen=True, tag=True):
    """Appends these clears to a shared tier's log, unless they are there, and asks for all entries
    after number `after`; for all entries if the log up to there has another `digest`. Tells other
    hosts that this `host` has carried out the clears up to a number, and asks which ones have not
    carried out number `awaited`, unless that is 0. `hosts` are those that are known: the tier may
    have lost its list."""

    number: int
    after: int
    clears: list[Entry]
    host: str
    carried_out: int
    awaited: int = 0
    digest: str = ""
    hosts: list[str] = []


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Ends the job of that number, if it has not begun."""

    number: int


class SetRate(msgspec.Struct, frozen=True, tag=True):
    """How many bytes a second may be moved; 0: no limit."""

    bytes_per_s: int


class Start(msgspec.Struct, frozen=True, tag=True):
    """Where the mover finds pool and disk. `opener` is module:class of the disk's files, which
    opens them from `description` and the inherited `descriptors`."""

    parent: int
    pool: PoolPlace
    epoch: int
    opener: str
    description: bytes
    descriptors: list[int]


class Result(msgspec.Struct, frozen=True):
    """How a job ended. `good` has a byte for each block: 1 if it was moved, and verified if it was
    read. A block that was read and does not match its checksum is no error. A Result with an error
    may still have good blocks if the job was a Read; it promises nothing about the record of a
    Write or Append. `seconds`: since its first byte was moved. `found` answers a Find, `checksums`
    a Fetch: a row for each block, a column for each shard; `clears` a SyncClears, from the one behind
    number `after` on, together with the hosts that are `lacking`, all `hosts` that are known by now,
    and the tier's `usage`: blocks, bytes that they take, bytes that there is room for."""

    number: int
    error: str = ""
    good: bytes = b""
    seconds: float = 0.0
    found: int = 0
    checksums: bytes = b""
    clears: list[Entry] = []
    lacking: list[str] = []
    usage: tuple[int, int, int] = (0, 0, 0)
    after: int = 0
    hosts: list[str] = []


Job = Write | Read | Check | Append | Compact | Find | Fetch | Share | SyncClears
Order = Job | Cancel | SetRate | Start

_encoder: Final = msgspec.msgpack.Encoder()
_results: Final = msgspec.msgpack.Decoder(Result)


def frame_of(message: Order | Result) -> bytes:
    """The frame of a message."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def take_frame(received: bytearray, most_bytes: int = 1 << 32) -> bytes | None:
    """Removes the first frame's message from what was received. None if it is incomplete;
    ValueError if it is larger than allowed."""
    size = int.from_bytes(received[:_LENGTH_BYTES], "little")
    if len(received) >= _LENGTH_BYTES and size > most_bytes:
        raise ValueError(f"a frame of {size} bytes")
    if len(received) < _LENGTH_BYTES + size or len(received) < _LENGTH_BYTES:
        return None
    body = bytes(received[_LENGTH_BYTES : _LENGTH_BYTES + size])
    del received[: _LENGTH_BYTES + size]
    return body


class Files(Protocol):
    """What the daemon hands over: a disk's files, to be opened by the class's `inherit`, or the place
    of a shared tier. It goes through the socket, and holds no secret."""

    def descriptors(self) -> tuple[int, ...]: ...

    def description(self) -> bytes: ...


class _InFlight(NamedTuple):
    kind: str
    blocks: int
    nbytes: int
    since_s: float


class Mover:
    """One mover process, started at once. The jobs in flight take at most `most_bytes`, and all
    except reads at most seven eighths of it: a read, for which a request waits, finds room. A job
    that is larger alone is accepted when no other of its kind is in flight."""

    def __init__(
        self,
        pool: PoolPlace,
        epoch: int,
        files: Files,
        *,
        most_bytes: int = MOST_BYTES,
        program: str = PROGRAM,
    ) -> None:
        self.problem = ""  # why the mover ended; empty while it runs
        self.is_ready = False  # whether it has pool and disk open; jobs may be sent before
        self.job_bytes = min(JOB_BYTES, most_bytes // 4)
        self._most_bytes = most_bytes
        self._in_flight: dict[int, _InFlight] = {}
        self._bytes = {"read": 0, "write": 0, "check": 0}
        self._cancelled: set[int] = set()
        self._new_rate: int | None = None  # not sent yet
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            inherited = files.descriptors()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", program, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *inherited),
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        opener = f"{type(files).__module__}:{type(files).__qualname__}"
        parent, description = os.getpid(), files.description()
        self._put(Start(parent, pool, epoch, opener, description, list(inherited)))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def in_flight_bytes(self) -> int:
        return sum(self._bytes.values())

    @property
    def jobs(self) -> int:
        """How many jobs are in flight."""
        return len(self._in_flight)

    @property
    def can_read(self) -> bool:
        """Whether `send` accepts a Read of `job_bytes` now."""
        return self._has_room("read", self.job_bytes)

    @property
    def can_write(self) -> bool:
        """Whether `send` accepts any other job of `job_bytes` now."""
        return self._has_room("write", self.job_bytes)

    @property
    def oldest_s(self) -> float:
        """How long the oldest job has been in flight; 0 if there is none. Checks do not count: they
        wait for all others."""
        first = next((each for each in self._in_flight.values() if each.kind != "check"), None)
        return time.monotonic() - first.since_s if first else 0.0

    @property
    def wants_write(self) -> bool:
        """Whether bytes wait until the socket is writable. Then `results` sends them."""
        return bool(self._unsent)

    @property
    def is_alive(self) -> bool:
        """Until the process has been reaped."""
        return self._process.poll() is None

    def fileno(self) -> int:
        """Of the socket; -1 once the mover has ended. From then on call `results` now and then
        until `is_alive` is false."""
        return self._socket.fileno()

    def send(self, job: Job) -> bool:
        """Sends a job, whose number is not in flight. False if too much is in flight, or the mover
        has ended."""
        assert job.number != STARTED and job.number not in self._in_flight
        flight = _flight_of(job)
        if not self._has_room(flight.kind, flight.nbytes):
            return False
        self._bytes[flight.kind] += flight.nbytes
        self._in_flight[job.number] = flight
        self._put(job)
        return True

    def cancel(self, number: int) -> None:
        """Fails a job that has not begun. Its Result comes in either case."""
        if number in self._in_flight and number not in self._cancelled:
            self._cancelled.add(number)
            self._put(Cancel(number))

    def set_rate(self, bytes_per_s: int) -> None:
        """Limits how fast bytes are moved, from the next block on; 0: no limit."""
        self._new_rate = bytes_per_s
        self._flush()

    def results(self) -> list[Result]:
        """Sends what is unsent, and returns the results that have come."""
        self._flush()
        results = self._receive()
        if self.problem and not self.is_alive:
            for number, flight in list(self._in_flight.items()):
                self._forget(number)
                results.append(Result(number, self.problem, bytes(flight.blocks)))
        return results

    def kill(self, problem: str = "the mover was killed") -> None:
        """Kills the process and does not wait for its end: `results` returns the failed jobs when
        it has ended. A process that waits for a broken disk may stay for long."""
        self.problem = self.problem or problem
        self._process.kill()
        self._socket.close()
        self._unsent.clear()
        self._received.clear()

    def close(self, within_s: float = 10.0) -> bool:
        """Kills the process and waits for its end. False if it still lives after that time."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return not self.is_alive

    def _has_room(self, kind: str, nbytes: int) -> bool:
        room = self._most_bytes - self.in_flight_bytes
        if kind == "write":
            room = min(room, self._most_bytes * 7 // 8 - self._bytes["write"])
        return not self.problem and (nbytes <= room or not self._bytes[kind])

    def _put(self, order: Order) -> None:
        self._unsent.append(memoryview(frame_of(order)))
        self._flush()

    def _flush(self) -> None:
        if not self._unsent and self._new_rate is not None:
            self._unsent.append(memoryview(frame_of(SetRate(self._new_rate))))
            self._new_rate = None
        try:
            while self._unsent and not self.problem:
                sent = self._socket.send(self._unsent[0])
                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # it has ended: what it has sent is received first
            self._unsent.clear()

    def _receive(self) -> list[Result]:
        results: list[Result] = []
        try:
            for _ in range(_RECEIVES_A_CALL if not self.problem else 0):
                received = self._socket.recv(_RECEIVE_BYTES)
                if not received:
                    self.kill("the mover ended unexpectedly")
                    break
                self._received += received
                while (body := take_frame(self._received, _MOST_RESULT_BYTES)) is not None:
                    self._accept(_results.decode(body), results)
        except BlockingIOError:
            pass
        except OSError as error:
            self.kill(f"the mover ended unexpectedly: {error.strerror}")
        except (ValueError, msgspec.DecodeError) as error:
            self.kill(f"the mover sent what is not a result: {error}")
        return results

    def _accept(self, result: Result, results: list[Result]) -> None:
        """ValueError if no such job is in flight, or it has another number of blocks."""
        if result.number == STARTED and not self.is_ready:
            self.is_ready = not result.error
            if result.error:
                self.kill(f"the mover could not start: {result.error}")
            return
        flight = self._in_flight.get(result.number)
        if flight is None or len(result.good) != flight.blocks:
            raise ValueError(f"job {result.number} with {len(result.good)} blocks")
        self._forget(result.number)
        results.append(result)

    def _forget(self, number: int) -> None:
        flight = self._in_flight.pop(number)
        self._bytes[flight.kind] -= flight.nbytes
        self._cancelled.discard(number)


def _flight_of(job: Job) -> _InFlight:
    """What the job counts for while it is in flight."""
    if isinstance(job, Check):  # its bytes are in the mover's own memory
        return _InFlight("check", len(job.offsets) // 8, 0, time.monotonic())
    kind, blocks, nbytes = "write", 0, 0
    if isinstance(job, Read | Find | Fetch | SyncClears):
        kind = "read"
    if isinstance(job, Read | Write | Fetch | Share):
        blocks = len(job.slots) // 8
        nbytes = blocks * job.nbytes
    if isinstance(job, Write | Append):
        nbytes = max(nbytes, len(job.record))
    return _InFlight(kind, blocks, max(nbytes, _LEAST_JOB_BYTES), time.monotonic())
