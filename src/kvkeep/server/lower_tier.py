"""One tier below memory, as the server's loop sees it: what it has, its process, its jobs.

`Movement` and `WriteBehind` decide what moves; a `LowerTier` knows how. No method waits for I/O:
that is left to the tier's process (`Mover`), which gets jobs and sends results. A `Disk` knows at
once what it has (`find`); a `Shared` tier has to ask (`ask`, `answered`)."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.keys import KEY_BYTES
from kvkeep.server.counters import Latency
from kvkeep.server.promotions import PromotionQueue
from kvkeep.server.verification import Verification
from kvkeep.store.layouts import Layout
from kvkeep.store.tree import key_at
from kvkeep.tiers.mover import Job, Mover, Result

if TYPE_CHECKING:  # imported where tracing is switched on, and nowhere else
    from kvkeep.wire.tracing import Span

# Before a job, which makes the rest: so stores that keep taking the room stop no job.
MOST_ROOM_PIECES = 32
_BLOCKS_A_JOB = 128
_FIRST_RATE = 500e6  # bytes a second, before any was measured
_KEPT = 0.95  # of earlier jobs with each that ends: some 20 jobs count
_SLOW_S = 2.0  # a job that takes longer: nothing is promised of that tier


class Throughput:
    """Of the last jobs, while the tier was busy: jobs that run side by side share the time. It
    begins as if the assumed speed had been measured for a second, so that one slow job at the start
    says little."""

    def __init__(self) -> None:
        self._nbytes, self._seconds = _FIRST_RATE, 1.0
        self._ended_s = float("-inf")  # the last job

    @property
    def bytes_per_s(self) -> float:
        return self._nbytes / self._seconds

    def add(self, nbytes: int, seconds: float, now_s: float) -> None:
        """A job that has ended now and took so long."""
        busy_s = max(0.0, min(seconds, now_s - self._ended_s))
        self._ended_s = now_s
        self._nbytes = _KEPT * self._nbytes + nbytes
        self._seconds = _KEPT * self._seconds + busy_s


class Hit(Protocol):
    """Blocks that a tier has, until `LowerTier.release`. `blocks`: how many leading ones of all
    that were asked for."""

    @property
    def blocks(self) -> int: ...


class Planned(Protocol):
    """Blocks that a tier is to write. `positions`: which of those that it was offered."""

    @property
    def positions(self) -> NDArray[np.int32]: ...


@dataclass
class Promotion:
    """Blocks of one prefix, on their way from a tier to memory. While the tier is asked what it has
    of them, `is_asked`."""

    tenant: str
    layout: Layout
    keys: bytes  # from the root on
    hit: Hit | None  # None before the tier was asked
    start: int  # the first block that memory lacks
    next: int  # the first block that no job reads yet
    room_pieces: int = 0  # made for the next job
    reading: int = 0  # jobs
    complete: int = 0  # the first block that is not READY
    is_asked: bool = False
    has_ended: bool = False  # before all was read
    is_prefetch: bool = False  # no request waits for it
    insists: bool = False  # it asks, although the tier seems to have nothing
    is_doubtful: bool = False  # the tier is asked, and seems to have nothing: no request waits
    owners: set[int] = field(default_factory=set)  # of a prefetch: sessions, and Prefetches' own
    spans: list[Span] = field(default_factory=list)  # of requests that are traced
    # Jobs that have ended before an earlier one, by their first block. Their blocks become READY in
    # order: what hangs below a block that cannot be read would be of no use.
    arrived: dict[int, tuple[int, ReadJob, NDArray[np.uint64]]] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.hit.blocks if self.hit is not None else self.start

    @property
    def parent(self) -> bytes:
        """The key above the next block; b"" at a root."""
        return key_at(self.keys, self.next - 1) if self.next else b""

    @property
    def reach(self) -> int:
        """How many leading blocks it brings; at most, while the tier is asked."""
        may_bring_all = self.is_asked and not self.has_ended
        return len(self.keys) // KEY_BYTES if may_bring_all else self.stop

    @property
    def left_bytes(self) -> int:
        return max(0, self.stop - self.next) * self.layout.slot_bytes

    @property
    def is_over(self) -> bool:
        is_read = self.next >= self.stop and not self.reading and not self.is_asked
        return is_read and self.complete not in self.arrived

    def end(self) -> None:
        """Reads nothing more, whatever the tier answers."""
        self.has_ended = True
        self.next = self.stop

    def end_spans(self) -> None:
        """Ends the spans of the requests that wait for it."""
        failure = "blocks are missing" if self.complete < self.stop else ""
        for span in self.spans:
            span.end(failure=failure, blocks=max(0, self.complete - self.start))
        self.spans.clear()


@dataclass(frozen=True)
class WriteJob:
    """Blocks that go to a tier. They are leased in memory under the job's number."""

    planned: object  # of `LowerTier.plan` or `LowerTier.take_records`
    blocks: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class ReadJob:
    """Blocks of a promotion that go to memory: a write under the job's number."""

    promotion: Promotion
    start: int
    blocks: int


@dataclass(frozen=True)
class AskJob:
    """A question what a tier has of a promotion's blocks; None: whether it answers at all."""

    promotion: Promotion | None


@dataclass
class TierCounts:
    """What has happened on one tier since the server started."""

    written_blocks: int = 0
    written_bytes: int = 0
    promoted_blocks: int = 0
    promoted_bytes: int = 0
    verified_blocks: int = 0  # by `kvkeep verify`
    bad_blocks: int = 0  # that did not match their checksum
    lost_blocks: int = 0  # that a shared tier had when asked, and not when they were read
    refused_blocks: int = 0  # for which a shared tier had no room
    errors: int = 0

    @property
    def written_bytes_per_hit(self) -> int | None:
        return self.written_bytes // self.promoted_blocks if self.promoted_blocks else None


@dataclass(frozen=True)
class TierShown:
    """One tier as operators see it. Times and rates are moving averages of its jobs.

    read_ms, write_ms       that a job of up to 128 blocks takes; None: there was none
    read_rate, write_rate   bytes a second
    written_bytes_per_hit   the wear: bytes written for each block promoted; None: none was
    evicted_unwritten       chains of blocks that left memory before they were written to any tier
    """

    tier: str
    is_shared: bool  # with other hosts
    state: str  # "ok", "slow", "starting" (of a shared tier) or "set aside"
    problem: str  # why it is set aside, or the last error
    capacity_bytes: int
    used_bytes: int
    blocks: int
    to_write_chains: int
    promotions: int
    in_flight_bytes: int
    read_ms: float | None
    write_ms: float | None
    read_rate: float | None
    write_rate: float | None
    evicted_unwritten: int
    written_bytes_per_hit: int | None
    counts: TierCounts

    @property
    def is_slow(self) -> bool:
        return self.state == "slow"

    @property
    def is_set_aside(self) -> bool:
        return self.state == "set aside"

    @property
    def read_seconds(self) -> float | None:
        return None if self.read_ms is None else self.read_ms / 1000

    @property
    def write_seconds(self) -> float | None:
        return None if self.write_ms is None else self.write_ms / 1000


class LowerTier(ABC):
    """What all kinds have in common, and what each must know."""

    kind: str  # for the log
    is_shared = False
    until = "until the server restarts"  # how long it stays set aside
    drop_level = logging.ERROR  # of blocks that could not be used
    ask_ms = 0.0  # that a question takes

    def __init__(self, name: str, mover: Mover) -> None:
        self.name = name
        self.mover = mover
        self.counts = TierCounts()
        self.set_aside = ""  # why the tier is not used now
        self.last_error = ""
        self.reads, self.writes = Throughput(), Throughput()
        self.times = {job: Latency() for job in ("read", "write", "ask")}
        self.read_ms = self.write_ms = 0.0  # that a job took lately; 0: none has ended
        self.jobs: dict[int, WriteJob | ReadJob | AskJob | Verification] = {}
        self.results = deque[Result]()  # of the mover, that wait for the loop's next turns
        self.promotions = PromotionQueue[Promotion]()
        self.faults = 0  # in a row
        self.setbacks = 0  # how often something that was planned was not written
        self.records_ms = 0  # when `take_records` was asked last

    def parcel_blocks(self, layout: Layout) -> int:
        """How many blocks are kept together, from each multiple of that on; 1: none are."""
        return 1

    def blocks_a_job(self, layout: Layout, first: int) -> int:
        """Of a job that begins with block `first` of a chain. It ends where a parcel does, if it can
        have one."""
        most = max(1, min(_BLOCKS_A_JOB, self.mover.job_bytes // layout.slot_bytes))
        over = (first + most) % self.parcel_blocks(layout)
        return most - over if over < most else most

    @property
    def is_slow(self) -> bool:
        return self.mover.oldest_s > _SLOW_S

    @property
    def state(self) -> str:
        return "set aside" if self.set_aside else "slow" if self.is_slow else "ok"

    @property
    def can_write(self) -> bool:
        """Whether blocks may be planned for it now."""
        return self.mover.can_write

    def note_read(self, nbytes: int, seconds: float, now_ms: int) -> None:
        self.reads.add(nbytes, seconds, now_ms / 1000)
        self.read_ms = _averaged_ms(self.read_ms, seconds)
        self.times["read"].add(seconds * 1e6)

    def note_write(self, blocks: int, nbytes: int, seconds: float, now_ms: int) -> None:
        self.counts.written_blocks += blocks
        self.counts.written_bytes += nbytes
        if nbytes:
            self.writes.add(nbytes, seconds, now_ms / 1000)
            self.write_ms = _averaged_ms(self.write_ms, seconds)
            self.times["write"].add(seconds * 1e6)

    def shown(self, to_write_chains: int, evicted_unwritten: int) -> TierShown:
        """The tier as operators see it."""
        blocks, used_bytes, capacity_bytes = self.usage()
        return TierShown(
            self.name,
            self.is_shared,
            self.state,
            self.set_aside or self.last_error,
            capacity_bytes,
            used_bytes,
            blocks,
            to_write_chains,
            len(self.promotions),
            self.mover.in_flight_bytes,
            self.read_ms or None,
            self.write_ms or None,
            self.reads.bytes_per_s if self.read_ms else None,
            self.writes.bytes_per_s if self.write_ms else None,
            evicted_unwritten,
            self.counts.written_bytes_per_hit,
            replace(self.counts),
        )

    # -- what it has

    @abstractmethod
    def find(self, tenant: str, layout: Layout, keys: bytes, skip: int) -> Hit | None:
        """The longest prefix of these blocks that it has, if it goes beyond the first `skip`."""

    def ask(self, number: int, promotion: Promotion) -> Job | None:
        """The job that asks the tier what it has of the blocks from `promotion.start` on. None if
        it is known not to have the first of them, or always known what it has."""
        return None

    def answered(self, promotion: Promotion, result: Result) -> None:
        """Sets the promotion's hit by the answer."""
        raise NotImplementedError

    @abstractmethod
    def release(self, hit: Hit) -> None:
        """The blocks of a hit need not be kept any more."""

    @abstractmethod
    def known(self, tenant: str, layout: Layout, keys: bytes) -> int:
        """How many leading blocks are there, or being written. Counts as a use."""

    @abstractmethod
    def hints(self, tenant: str, keys: bytes) -> tuple[int, int]:
        """The priority of these blocks, and the time of day when the first of them expires, in ms;
        0: never."""

    @abstractmethod
    def orders(self, fingerprint: bytes) -> dict[int, bytes]:
        """How its blocks of this layout order their bytes: shard -> digest."""

    @abstractmethod
    def usage(self) -> tuple[int, int, int]:
        """Blocks, bytes that they take, bytes that there is room for."""

    # -- to memory

    @abstractmethod
    def read_job(
        self, number: int, promotion: Promotion, start: int, slots: NDArray[np.int64]
    ) -> Job:
        """The job that reads the blocks of a promotion from block `start` on into these slots."""

    @abstractmethod
    def checksums(self, job: ReadJob, result: Result) -> NDArray[np.uint64]:
        """Of the blocks that a job has read: a row for each, a column for each shard."""

    @abstractmethod
    def drop(self, job: ReadJob, bad: NDArray[np.int64]) -> str:
        """Forgets those blocks of a job that could not be used. Returns what to log."""

    def checked(self, verification: Verification, result: Result) -> None:
        """Takes in which blocks of a job were right. Only disks are verified."""
        raise NotImplementedError

    # -- from memory

    @abstractmethod
    def free_blocks(self, layout: Layout) -> int:
        """How many blocks it takes before it evicts others."""

    def words_by_use(self) -> tuple[NDArray[np.uint64], int]:
        """The first words of the keys of the blocks that it has, as far as it knows, least recently
        used first, and the bytes of most of their slots. For admission."""
        return np.empty(0, np.uint64), 0

    def make_some_room(self, tenant: str, layout: Layout, parent: bytes, blocks: int) -> bool:
        """Evicts a few blocks so that `plan` of so many below `parent` takes less time. False if
        there is nothing to evict."""
        return False

    @abstractmethod
    def plan(
        self,
        tenant: str,
        layout: Layout,
        first: int,
        parent: bytes,
        keys: bytes,
        checksums: NDArray[np.uint64],
        priority: int,
        ttl_ms: int,
    ) -> Planned | None:
        """Plans to write those of these blocks that it lacks. None if there is nothing to write.
        `first`: how many blocks of the chain come before them."""

    @abstractmethod
    def write_job(
        self, number: int, planned: Planned, layout: Layout, slots: NDArray[np.int64]
    ) -> Job:
        """The job that writes what was planned, from these slots."""

    @abstractmethod
    def wrote(self, planned: object, result: Result) -> None:
        """What was planned is written."""

    @abstractmethod
    def failed(self, planned: object) -> None:
        """What was planned is not written, and nothing touches it any more."""

    # -- operators, and the loop's turn

    @abstractmethod
    def clear(self, tenant: str) -> int:
        """Takes all blocks of a tenant out of use. Returns how many are known."""

    def unreached(self) -> list[str]:
        """Hosts that have not confirmed this server's last clear."""
        return []

    def take_heard(self) -> list[str]:
        """Digests of tenants that other hosts have cleared (`shared.tenant_digest`), or ALL. Each
        is returned once, and `heard_is_cleared` when it is carried out."""
        return []

    def heard_is_cleared(self) -> None:  # noqa: B027 - nothing to do without `take_heard`
        """What was heard last is carried out here."""

    @property
    @abstractmethod
    def is_clearing(self) -> bool:
        """Whether something could bring back what was cleared."""

    @property
    @abstractmethod
    def has_to_tidy(self) -> bool: ...

    @abstractmethod
    def tidy(self) -> None:
        """Does a piece of the work that changes have left."""

    @abstractmethod
    def take_records(self, number: int) -> tuple[Job, object] | None:
        """A job without blocks that the tier needs at this moment, and what it is planned as."""

    def put_aside(self, why: str) -> None:
        """Does not use the tier any more. Its process is killed; its jobs end when that is gone."""
        self.set_aside = why
        self.mover.kill(why)
        for promotion in self.promotions:
            promotion.end()

    def revive(self, number: int) -> bool:
        """Tries a tier that is set aside, if it is time to. Returns whether it has a new process,
        whose result with this number goes to `tried`."""
        return False

    def tried(self, error: str) -> None:
        """What `revive` has asked was answered, or failed."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> bool:
        """Ends the mover. False if it lives on, in a tier that does not answer."""


def _averaged_ms(before_ms: float, seconds: float) -> float:
    return 0.8 * before_ms + 200 * seconds if before_ms else 1000 * seconds
