"""Keeps a tier that never evicts within its size: one host at a time removes what was not used longest.

    sweep/lease            which host sweeps: another one if it has not changed for 40 seconds
    sweep/counted          what there is, and how much of each host's writes that includes
    sweep/written/<host>   what a host has written since it began

Every ten seconds each host publishes what it wrote, and the host whose turn it is adds that up. All
blocks are listed only if the sum says that the tier is full, and now and then to correct it: a
service may charge for lists. What is written during a list may count twice until the next one: the
sum is rather too high.

The clocks of hosts do not matter: ages are those of the medium, and a lease is over when another host
has seen it unchanged for long enough. If two hosts should sweep at once, for example after one was
suspended, they remove the same oldest blocks."""

from __future__ import annotations

import contextlib
import heapq
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvkeep.errors import TierError
from kvkeep.tiers.tier import Usage

SWEEP = "sweep"
MOST_NOTE_BYTES = 1 << 20
INTERVAL_S = 10.0
LEASE_S = 40.0  # with the interval, less than a minute
_LEASE, _COUNTED, _WRITTEN = f"{SWEEP}/lease", f"{SWEEP}/counted", f"{SWEEP}/written"
_FULL = 0.95  # of the size, by the sum: then all blocks are listed
_REMOVE_FROM = 0.94  # of the size, by the list: then the oldest blocks are removed
_EMPTIED = 0.9
_SAME_TIME_S = 60.0  # what was used within a minute goes in reverse order: tails before heads
_MOST_REMOVED = 1 << 18  # by one sweep: what it remembers of each takes about 250 bytes
_AT_ONCE = 1000
_SHARE_OF_TIME = 20  # a list that takes a minute is made every 20 minutes at most
_PUBLISH_S = 3600.0  # also if nothing was written
_ABANDONED_S = 86_400.0  # a host that has published nothing for so long is forgotten


@dataclass(frozen=True)
class Note:
    """What hosts tell each other. `version` differs whenever it was written again; times are the
    medium's."""

    version: str
    changed_s: float
    content: bytes = b""


@dataclass(frozen=True)
class Stored:
    """One block. `path` is what the medium calls it."""

    used_s: float
    nbytes: int
    path: str


class Sweepable(Protocol):
    """What the sweeper needs of a medium. All calls may raise OSError or TierError."""

    recount_s: float  # how often all blocks are listed at least

    def stored(self) -> Iterator[Stored]:
        """All blocks, in any order; not what hosts tell each other."""

    def remove(self, blocks: Sequence[Stored]) -> None: ...

    def note(self, name: str) -> Note | None: ...

    def notes(self, folder: str) -> dict[str, Note]:
        """Name -> note, without content."""

    def put_note(self, name: str, content: bytes, over: Note | None) -> bool:
        """False if the note is not as in `over` any more (None: it is there)."""

    def remove_note(self, name: str) -> None: ...

    def tidy(self, now_s: float) -> None:
        """Removes what writers have left that are gone."""


class Written(msgspec.Struct, frozen=True, array_like=True):
    """By one host, less what it has deleted. `deletions`: how often it deleted something."""

    files: int = 0
    nbytes: int = 0
    deletions: int = 0


class Counted(msgspec.Struct, frozen=True):
    """What there is. `included`: what of each host's writes. `at`: when all blocks were listed, by
    the medium's clock, which took `took_s`. `removed_s`: the age of what was removed last."""

    files: int
    nbytes: int
    at: float
    took_s: float = 0.0
    removed_s: float = 0.0
    included: dict[str, Written] = {}


class _LostTurnError(Exception):
    """Another host sweeps."""


class Sweeper:
    """One host's part. Without `size_bytes` it only counts, without `max_age_s` age does not
    matter."""

    def __init__(
        self,
        medium: Sweepable,
        size_bytes: int,
        max_age_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._medium = medium
        self.size_bytes = size_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._owner = f"{socket.gethostname()[:48]}-{os.getpid()}-{secrets.token_hex(4)}"
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._written = Written()
        self._published, self._published_s = Written(), clock()
        self._counted = Counted(0, 0, 0.0)
        self._lease: Note | None = None  # ours
        self._renewed_s = 0.0
        self._seen = "", 0.0  # the version of another host's lease, and since when we see it
        self._others: dict[str, tuple[str, Written]] = {}  # host -> version, content

    # -- what this host knows

    def add(self, files: int, nbytes: int) -> None:
        """Counts what this host wrote, or deleted."""
        with self._lock:
            before = self._written
            self._written = Written(
                before.files + files, before.nbytes + nbytes, before.deletions + (files < 0)
            )

    def usage(self) -> Usage:
        """What there is, as far as this host knows."""
        with self._lock:
            counted, mine = self._counted, self._written
        known = counted.included.get(self._owner, Written())
        files = counted.files + mine.files - known.files
        nbytes = counted.nbytes + mine.nbytes - known.nbytes
        return Usage(max(0, files), max(0, nbytes), self.size_bytes)

    def has_room(self, nbytes: int) -> bool:
        return not self.size_bytes or self.usage().used_bytes + nbytes <= self.size_bytes

    @property
    def removed_s(self) -> float:
        """The age of what the last sweep removed; 0: none has removed anything."""
        return self._counted.removed_s

    # -- turns

    def run(self) -> None:
        """Takes turns until `stop` is called."""
        self.turn()
        while not self._stopped.wait(INTERVAL_S):
            self.turn()

    def stop(self) -> None:
        self._stopped.set()

    def turn(self) -> bool:
        """Publishes what this host wrote, and counts and sweeps if it is its turn. Returns whether it
        was. What fails is tried again in the next turn, perhaps another host's."""
        with contextlib.suppress(OSError, TierError, _LostTurnError):
            self._publish()
            if self._elect():
                self._count()
                return True
            self.look()
        return False

    def look(self) -> None:
        """Reads what was counted, whichever host did it."""
        note = self._medium.note(_COUNTED)
        with contextlib.suppress(msgspec.DecodeError):
            if note is not None:
                self._take(msgspec.json.decode(note.content, type=Counted))

    def _publish(self) -> None:
        with self._lock:
            written = self._written
        if written != self._published or self._clock() > self._published_s + _PUBLISH_S:
            name = f"{_WRITTEN}/{self._owner}"
            self._medium.put_note(name, msgspec.json.encode(written), self._medium.note(name))
            self._published, self._published_s = written, self._clock()

    def _elect(self) -> bool:
        """Whether this host sweeps now; renews its lease."""
        lease = self._medium.note(_LEASE)
        if lease is not None and (self._lease is None or lease.version != self._lease.version):
            self._lease = None
            if lease.version != self._seen[0]:
                self._seen = lease.version, self._clock()
            if self._clock() < self._seen[1] + LEASE_S:
                return False
        return self._renew(lease)

    def _renew(self, before: Note | None) -> bool:
        content = f"{self._owner} {secrets.token_hex(4)}".encode()
        is_ours = self._medium.put_note(_LEASE, content, before)
        self._lease = self._medium.note(_LEASE) if is_ours else None
        if self._lease is not None and self._lease.content != content:
            self._lease = None
        self._renewed_s = self._clock()
        return self._lease is not None

    def _keep_turn(self) -> None:
        """Renews the lease during long work. _LostTurnError if another host has it."""
        if self._stopped.is_set():
            raise _LostTurnError
        if self._clock() > self._renewed_s + INTERVAL_S and not self._renew(self._lease):
            raise _LostTurnError

    # -- counting and sweeping, on the host whose turn it is

    def _count(self) -> None:
        assert self._lease is not None
        self.look()
        now_s = self._lease.changed_s
        written = self._read_written(now_s)
        before = self._counted
        files, nbytes = before.files, before.nbytes
        is_deleted = False
        for host, each in written.items():
            known = before.included.get(host, Written())
            files, nbytes = files + each.files - known.files, nbytes + each.nbytes - known.nbytes
            is_deleted |= each.deletions != known.deletions
        pause_s = max(self._medium.recount_s, _SHARE_OF_TIME * before.took_s)
        is_full = self.size_bytes > 0 and nbytes > _FULL * self.size_bytes
        if is_full or is_deleted or not before.at or now_s > before.at + pause_s:
            self._put_counted(self.sweep(now_s, written))
        elif written != before.included:
            summed = msgspec.structs.replace(before, files=files, nbytes=nbytes, included=written)
            self._put_counted(summed)

    def sweep(self, now_s: float, written: dict[str, Written]) -> Counted:
        """Lists all blocks, and removes those that are too many or too old."""
        began_s = self._clock()
        self._medium.tidy(now_s)
        files = nbytes = 0
        oldest: list[tuple[float, float, int, str]] = []  # the last to be removed first
        for each in self._medium.stored():
            files, nbytes = files + 1, nbytes + each.nbytes
            if files % _AT_ONCE == 0:
                self._keep_turn()
            if self.size_bytes or self._max_age_s:
                entry = -(each.used_s // _SAME_TIME_S), each.used_s, each.nbytes, each.path
                push = heapq.heappush if len(oldest) < _MOST_REMOVED else heapq.heappushpop
                push(oldest, entry)
        goal = nbytes
        if self.size_bytes and nbytes > _REMOVE_FROM * self.size_bytes:
            goal = int(_EMPTIED * self.size_bytes)
        least_used_s = now_s - self._max_age_s if self._max_age_s else float("-inf")
        victims: list[Stored] = []
        removed_s = self._counted.removed_s
        for _, used_s, size, path in sorted(oldest, key=lambda entry: (-entry[0], -entry[1])):
            if nbytes <= goal and used_s >= least_used_s:
                break
            victims.append(Stored(used_s, size, path))
            files, nbytes, removed_s = files - 1, nbytes - size, now_s - used_s
        for at in range(0, len(victims), _AT_ONCE):
            self._keep_turn()
            self._medium.remove(victims[at : at + _AT_ONCE])
        return Counted(files, nbytes, now_s, self._clock() - began_s, removed_s, written)

    def _read_written(self, now_s: float) -> dict[str, Written]:
        notes = self._medium.notes(_WRITTEN)
        for host, note in notes.items():
            if now_s > note.changed_s + _ABANDONED_S:
                self._medium.remove_note(f"{_WRITTEN}/{host}")
            elif self._others.get(host, ("", None))[0] != note.version:
                read = self._medium.note(f"{_WRITTEN}/{host}")
                with contextlib.suppress(msgspec.DecodeError):
                    if read is not None:
                        written = msgspec.json.decode(read.content, type=Written)
                        self._others[host] = read.version, written
        self._others = {host: each for host, each in self._others.items() if host in notes}
        return {host: written for host, (_, written) in self._others.items()}

    def _put_counted(self, counted: Counted) -> None:
        content = msgspec.json.encode(counted)
        self._medium.put_note(_COUNTED, content, self._medium.note(_COUNTED))
        self._take(counted)

    def _take(self, counted: Counted) -> None:
        with self._lock:
            self._counted = counted
