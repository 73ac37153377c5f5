"""A tier that several hosts share, below memory and disks.

    lookup ─► memory ─► disks' indexes ─► Find, answered later ─► Fetch ─► READY in memory
    stored ─► Share: each block once, the beginning of a prompt first

The server has no index of it. What the tier has of a prompt is asked by a job of the tier's process,
while the request waits within its patience (`Promotion.is_asked`). What was not there is not asked
for again for two seconds. For what the tier surely lacks (`Shown`), no request waits that is not
willing to wait at all costs; the tier is asked all the same, 20 times a second, because hosts may
have forgotten what they wrote.

Once a second the process reads which tenants were cleared, on whichever host (`SharedLog`). A server
that could not read that for five seconds neither reads nor writes blocks. One that finds another log
than the one its predecessor knew ends all generations (START): there may have been clears that the
log has lost.

A tier that stalls or fails is set aside, its process is killed, and after a pause a new process asks
it something. It is used again when it answers. Memory and disks go on meanwhile."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.checksum import ABSENT
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.server.lower_tier import Hit, LowerTier, Planned, Promotion, ReadJob
from kvkeep.store.layouts import Layout
from kvkeep.store.plans import NORMAL_PRIORITY
from kvkeep.store.tree import key_at
from kvkeep.tiers.clear_log import ALL, START, Entry, chained, mark, new_start
from kvkeep.tiers.mover import MOST_CLEARS, Fetch, Find, Job, Mover, Result, Share, SyncClears
from kvkeep.tiers.parcels import blocks_a_parcel
from kvkeep.tiers.summaries import Shown, words_of
from kvkeep.wire.pool_files import Watch

log = logging.getLogger(__name__)

MISS_LASTS_S = 2.0
_MOST_MISSES = 1 << 16
_REMEMBERED = 1 << 20  # blocks that the tier has, by our knowledge
_REMEMBERED_S = 600.0  # then the tier is asked again: it evicts without telling us
_CHECK_EVERY_S = 0.05
_CLEARS_HOLD_S = 5.0  # after the log of clears was read
_CONFIRMED_WITHIN_S = 5.0  # of a clear, by the other hosts
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_DIGEST_BYTES = 16
_MOST_HOST_CHARS = 48


@dataclass(frozen=True)
class SharedHit:
    """What the tier has under a place."""

    blocks: int
    place: str


@dataclass(frozen=True)
class SharedWrite:
    """Blocks to write under a place."""

    positions: NDArray[np.int32]
    place: str
    keys: bytes
    checksums: NDArray[np.uint64]
    first: int  # how many blocks of the chain come before


@dataclass(frozen=True)
class _Syncing:
    """The log of clears is being read, as it was at that time or later."""

    began_s: float
    awaited: int  # the number of the clear of which other hosts were asked


class Shared(LowerTier):
    """`make_mover` starts a process for the tier, with the lock that it holds in the pool. `kept`:
    the file that says which clears were carried out here, for the next server. `parcel_blocks`: how
    many blocks of a size are kept in one object."""

    kind = "shared tier"
    is_shared = True
    until = "until it answers again"
    drop_level = logging.INFO  # it evicts by its own rules

    def __init__(
        self,
        name: str,
        size_bytes: int,
        make_mover: Callable[[], tuple[Mover, Watch]],
        kept: Path,
        shown: Shown | None = None,
        parcel_blocks: Callable[[int], int] = blocks_a_parcel,
    ) -> None:
        self._parcel_blocks = parcel_blocks
        self._shown = shown
        self._checked_s = 0.0  # when it was last asked for what it surely lacks
        self._make_mover = make_mover
        mover, self._watch = make_mover()
        super().__init__(name, mover)
        self.ask_ms = 0.0  # that a question took lately
        self._usage = 0, 0, size_bytes  # as the tier says: of all hosts
        self._there = RecentKeys()
        self._misses: OrderedDict[bytes, float] = OrderedDict()  # until when
        self._pause_s = _FIRST_PAUSE_S
        self._retry_at_s = 0.0
        self._is_trying = False  # a new process has been asked something
        self._clears: list[Entry] = []  # ours, not seen in the log yet
        self._heard: list[str] = []  # tenants that others cleared, to be cleared here
        self._is_clearing_heard = False  # those that were taken
        # Number of the last entry, and digest of the log up to it; by tenant's digest, ALL or START.
        self._generations: dict[str, tuple[int, str]] = {}
        self._entries: list[Entry] = []  # of the log, as far as it was read
        self._digest = ""  # of these
        self._read_s = -_CLEARS_HOLD_S  # as of when all entries are known
        self._is_syncing = False
        self._kept_at = kept
        before = _load(kept)
        self._host = before.host
        self._hosts = before.hosts.get(name, [])  # all that ever used the tier, as far as known
        self._is_unsaved = False
        self._carried_out = before.carried_out.get(name, 0)  # entries, in memory and on disks
        self._carried_digest = before.digests.get(name, "")  # of these
        self._unproven: list[str] = []  # tenants in them, until the log proves to be the same
        self._known_before: set[Entry] = set()  # carried out, of a log that the tier has lost
        self._awaited = 0  # our last clear, unless all hosts have confirmed it
        self._await_until_s = 0.0
        self._lacking: list[str] = []  # hosts that have not confirmed it

    @property
    def can_write(self) -> bool:
        return self.mover.can_write and self._knows_clears

    @property
    def state(self) -> str:
        """`starting` until the log of clears was read, and while it cannot be read."""
        return "starting" if super().state == "ok" and not self._knows_clears else super().state

    @property
    def _knows_clears(self) -> bool:
        return time.monotonic() < self._read_s + _CLEARS_HOLD_S

    def usage(self) -> tuple[int, int, int]:
        return self._usage

    def parcel_blocks(self, layout: Layout) -> int:
        return self._parcel_blocks(layout.slot_bytes)

    # -- what it has

    def find(self, tenant: str, layout: Layout, keys: bytes, skip: int) -> Hit | None:
        return None  # only `ask` can tell

    def ask(self, number: int, promotion: Promotion) -> Job | None:
        if not self._knows_clears or self._is_cleared(promotion.tenant):
            return None
        key = key_at(promotion.keys, promotion.start)
        place = self._place(promotion.tenant, promotion.layout)
        if self._misses.get(_name(place, key), 0.0) > time.monotonic():
            return None
        if self._shown is not None and not promotion.insists:
            promotion.is_doubtful = self._shown.lacks(words_of(place, key))
        if promotion.is_doubtful:
            if time.monotonic() < self._checked_s + _CHECK_EVERY_S:
                return None
            self._checked_s = time.monotonic()
        start = promotion.start * KEY_BYTES
        before = self._before(promotion.layout, promotion.keys[:start])
        promotion.hit = SharedHit(promotion.start, place)
        parcel_blocks = self.parcel_blocks(promotion.layout)
        return Find(number, place, promotion.keys[start:], before, parcel_blocks)

    def answered(self, promotion: Promotion, result: Result) -> None:
        before = promotion.hit
        assert isinstance(before, SharedHit)
        promotion.is_doubtful = False
        promotion.hit = SharedHit(promotion.start + result.found, before.place)
        keys = promotion.keys[promotion.start * KEY_BYTES :]
        found = min(result.found, len(keys) // KEY_BYTES)
        self._there.add(before.place, keys[: found * KEY_BYTES])
        if key := key_at(keys, found):
            self._miss(before.place, key)
            if self._there.leading(before.place, key):  # it was evicted: to be written again
                self._there.remove(before.place, keys[found * KEY_BYTES :])
                self.setbacks += 1
        took_ms = 1000 * result.seconds
        self.times["ask"].add(1000 * took_ms)
        self.ask_ms = 0.8 * self.ask_ms + 0.2 * took_ms if self.ask_ms else took_ms

    def release(self, hit: Hit) -> None:
        pass

    def known(self, tenant: str, layout: Layout, keys: bytes) -> int:
        return self._there.leading(self._place(tenant, layout), keys)

    def hints(self, tenant: str, keys: bytes) -> tuple[int, int]:
        return NORMAL_PRIORITY, 0

    def orders(self, fingerprint: bytes) -> dict[int, bytes]:
        return {}  # the order is part of the place

    def _place(self, tenant: str, layout: Layout) -> str:
        """Where blocks of this tenant and meaning are. Hosts that cut or order the bytes of a block
        differently use different places."""
        meaning = repr((layout.shard_bytes, sorted(layout.physical.items()))).encode()
        means = blake2b(layout.fingerprint + meaning, digest_size=_DIGEST_BYTES).hexdigest()
        digest = tenant_digest(tenant)
        began = max(self._generations.get(name, (0, "")) for name in (digest, ALL, START))
        return f"v1/{digest}/{mark(*began)}/{means}"

    def _before(self, layout: Layout, keys: bytes) -> bytes:
        """The last of these keys, from where a parcel may begin that goes on beyond them."""
        blocks = len(keys) // KEY_BYTES
        return keys[(blocks - blocks % self.parcel_blocks(layout)) * KEY_BYTES :]

    def _is_cleared(self, tenant: str) -> bool:
        """Whether the tenant is being cleared: its next generation is not known yet."""
        ends = (tenant_digest(tenant), ALL, START)
        return any(each.name in ends for each in self._clears)

    def _forget(self) -> None:
        """What the tier has is not known any more."""
        self._there.forget()
        self.setbacks += 1

    def _miss(self, place: str, key: bytes) -> None:
        self._misses[_name(place, key)] = time.monotonic() + MISS_LASTS_S
        if len(self._misses) > _MOST_MISSES:
            self._misses.popitem(last=False)

    # -- to memory

    def read_job(
        self, number: int, promotion: Promotion, start: int, slots: NDArray[np.int64]
    ) -> Job:
        layout, hit = promotion.layout, promotion.hit
        assert isinstance(hit, SharedHit)
        return Fetch(
            number,
            slots.tobytes(),
            hit.place,
            promotion.keys[start * KEY_BYTES : (start + len(slots)) * KEY_BYTES],
            layout.slot_bytes,
            list(layout.shard_offsets),
            list(layout.shard_bytes),
            self._before(layout, promotion.keys[: start * KEY_BYTES]),
            self.parcel_blocks(layout),
        )

    def checksums(self, job: ReadJob, result: Result) -> NDArray[np.uint64]:
        shards = job.promotion.layout.shards
        return np.frombuffer(result.checksums, "<u8").reshape(-1, shards)

    def drop(self, job: ReadJob, bad: NDArray[np.int64]) -> str:
        hit = job.promotion.hit
        assert isinstance(hit, SharedHit)
        self.counts.lost_blocks += len(bad)
        self._forget()
        self._miss(hit.place, key_at(job.promotion.keys, job.start + int(bad[0])))
        return f"{len(bad)} blocks that it had are evicted, or not what was written"

    # -- from memory

    def free_blocks(self, layout: Layout) -> int:
        return 1 << 40  # it evicts by its own rules

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
    ) -> SharedWrite | None:
        if ttl_ms or self._is_cleared(tenant):
            return None  # an expiry would have to hold on every host
        place = self._place(tenant, layout)
        complete = np.append((checksums != ABSENT).all(axis=1) & checksums.all(axis=1), False)
        blocks = int(np.argmin(complete))
        if not blocks:
            return None
        positions = np.arange(blocks, dtype=np.int32)
        keys = keys[: blocks * KEY_BYTES]
        return SharedWrite(positions, place, keys, checksums[:blocks], first)

    def write_job(
        self, number: int, planned: Planned, layout: Layout, slots: NDArray[np.int64]
    ) -> Job:
        assert isinstance(planned, SharedWrite)
        # Known from now on, so that the next job of the chain begins behind this one.
        self._there.add(planned.place, planned.keys)
        return Share(
            number,
            slots.tobytes(),
            planned.place,
            planned.keys,
            layout.slot_bytes,
            list(layout.shard_offsets),
            list(layout.shard_bytes),
            np.ascontiguousarray(planned.checksums, "<u8").tobytes(),
            planned.first,
            self.parcel_blocks(layout),
        )

    def wrote(self, planned: object, result: Result) -> None:
        if isinstance(planned, _Syncing):
            self._usage = result.usage
            is_same_log = result.after == len(self._entries)
            if is_same_log and planned.awaited and planned.awaited == self._awaited:
                self._lacking = result.lacking
                self._awaited = self._awaited if self._lacking else 0
            self._take_clears(planned, result)
            self._take_hosts(result.hosts)
            return
        assert isinstance(planned, SharedWrite)
        kept = np.frombuffer(result.good, np.uint8)
        if not kept.all():
            self.counts.refused_blocks += int((kept == 0).sum())
            self._forget()

    def failed(self, planned: object) -> None:
        if isinstance(planned, _Syncing):
            self._is_syncing = False
        else:
            self._forget()

    # -- operators, and the loop's turn

    def clear(self, tenant: str | None) -> int:
        """None: all tenants."""
        digest = tenant_digest(tenant) if tenant is not None else ALL
        self._clears.append(Entry(digest, secrets.token_hex(16)))
        return 0  # how many there are is not known

    @property
    def is_clearing(self) -> bool:
        return bool(self._clears) or (self._awaited > 0 and time.monotonic() < self._await_until_s)

    def unreached(self) -> list[str]:
        return self._lacking if self._awaited else []

    def take_heard(self) -> list[str]:
        heard, self._heard = self._heard, []
        self._is_clearing_heard = bool(heard)
        return heard

    def heard_is_cleared(self) -> None:
        self._is_clearing_heard = False

    def _take_clears(self, syncing: _Syncing, result: Result) -> None:
        self._is_syncing = False
        if result.after < len(self._entries):
            self._begin_log_anew(result.clears)
        for each in result.clears:
            self._entries.append(each)
            self._digest = chained(self._digest, each)
            number = len(self._entries)
            self._generations[each.name] = number, self._digest
            self._take_entry(number, each)
            if number == self._carried_out:
                self._prove(self._digest == self._carried_digest)
        if len(result.clears) < MOST_CLEARS:
            self._prove(len(self._entries) >= self._carried_out)
            self._read_s = syncing.began_s

    def _take_entry(self, number: int, entry: Entry) -> None:
        """START names no tenant: memory and disks keep what they have."""
        is_own = entry in self._clears
        if is_own:
            self._clears.remove(entry)
        if entry.name == START:
            return
        if is_own:
            self._awaited = number
            self._await_until_s = time.monotonic() + _CONFIRMED_WITHIN_S
        elif number > self._carried_out and entry not in self._known_before:
            self._heard.append(entry.name)
        else:
            self._unproven.append(entry.name)

    def _take_hosts(self, hosts: list[str]) -> None:
        """They are kept for the next server: the tier may lose the list while this host is down."""
        unknown = [host for host in hosts if host not in self._hosts]
        self._hosts += unknown
        self._is_unsaved |= bool(unknown)

    def _prove(self, is_same: bool) -> None:
        """Whether the log is the one of which clears were carried out here. If not, those that seemed
        to be are heard, and no generation of before is used: the log may have lost the clear that
        ended it."""
        if not is_same:
            text = (
                "%s %s has lost clears of tenants while this server was down: nothing is used that"
            )
            log.warning(text + " was stored there before", self.kind, self.name)
            self._clears.append(new_start())
            self._heard += self._unproven
            self._carried_out = 0
        self._unproven.clear()

    def _begin_log_anew(self, clears: list[Entry]) -> None:
        """The tier has lost its log, or a part. What it has now counts, and gets what it lacks."""
        log.warning("%s %s has lost clears of tenants: they are noted again", self.kind, self.name)
        awaited = self._entries[self._awaited - 1 : self._awaited] if self.is_clearing else []
        lost = [each for each in self._entries if each not in clears or each in awaited]
        self._clears = list(dict.fromkeys(lost + self._clears))  # a late write notes one twice
        self._known_before |= set(self._entries[: self._carried_out])
        self._entries, self._digest = [], ""
        self._generations.clear()
        self._carried_out = self._awaited = 0
        self._read_s = -_CLEARS_HOLD_S

    @property
    def has_to_tidy(self) -> bool:
        return False

    def tidy(self) -> None:
        pass

    def take_records(self, number: int) -> tuple[Job, object] | None:
        if self._is_syncing:
            return None
        is_cleared = not (self._heard or self._is_clearing_heard)
        if len(self._entries) > self._carried_out and is_cleared:
            self._carried_out, self._carried_digest = len(self._entries), self._digest
            self._is_unsaved = True
        if self._is_unsaved and self._carried_out and not self._clears:
            self._save()  # with a START under way, the next server has to see what this one saw
        self._is_syncing = True
        job = SyncClears(
            number,
            len(self._entries),
            self._clears[:],
            self._host,
            min(self._carried_out, len(self._entries)),
            self._awaited,
            self._digest,
            self._hosts[:],
        )
        return job, _Syncing(time.monotonic(), self._awaited)

    def _save(self) -> None:
        """For the next server."""
        self._is_unsaved = False
        name = self.name
        kept = _Kept(
            self._host,
            {name: self._carried_out},
            {name: self._carried_digest},
            {name: self._hosts},
        )
        _save(self._kept_at, kept)

    def put_aside(self, why: str) -> None:
        super().put_aside(why)
        self._is_trying = False
        self._retry_at_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._forget()

    def revive(self, number: int) -> bool:
        """Once the old process is gone, its jobs have failed and the pause is over, starts a new one
        and asks it something. Uses the tier again when the answer is there. Returns whether there is
        a new process."""
        if self._is_trying:
            return False
        if self.jobs or self.mover.is_alive or time.monotonic() < self._retry_at_s:
            return False
        try:
            mover, watch = self._make_mover()
        except OSError as error:
            self.set_aside = f"its process cannot be started: {error.strerror}"
            self._retry_at_s = time.monotonic() + self._pause_s
            return False
        self._watch.close()
        self.mover, self._watch = mover, watch
        self._is_trying = self.mover.send(Find(number, "v1/nobody/0/nothing", bytes(KEY_BYTES)))
        return True

    def tried(self, error: str) -> None:
        """The answer to what `revive` has asked."""
        self._is_trying = False
        if error:
            self.put_aside(error)
            return
        log.info("%s %s answers again", self.kind, self.name)
        self.set_aside = ""
        self.faults = 0
        self._pause_s = _FIRST_PAUSE_S

    def close(self) -> bool:
        has_ended = self.mover.close()
        if has_ended:
            self._watch.close()
        else:
            self._watch.leave()  # the next server waits for it
        return has_ended


class RecentKeys:
    """Which blocks the tier has, as far as this server wrote or found them within the last twenty
    minutes: two tables of a fixed size, the older of which is dropped in turn."""

    def __init__(self, keys: int = _REMEMBERED) -> None:
        self._tables = [np.zeros(keys, np.uint64), np.zeros(keys, np.uint64)]
        self._mask = np.uint64(keys - 1)
        self._turned_s = time.monotonic()

    def add(self, place: str, keys: bytes) -> None:
        if time.monotonic() > self._turned_s + _REMEMBERED_S:
            self._turned_s = time.monotonic()
            self._tables = [np.zeros_like(self._tables[0]), self._tables[0]]
        words = words_of(place, keys)
        self._tables[0][(words & self._mask).view(np.int64)] = words

    def leading(self, place: str, keys: bytes) -> int:
        """How many leading blocks are known."""
        words = words_of(place, keys)
        at = (words & self._mask).view(np.int64)
        known = (self._tables[0][at] == words) | (self._tables[1][at] == words)
        return int(np.argmin(np.append(known, False)))

    def remove(self, place: str, keys: bytes) -> None:
        """The tier lacks these."""
        words = words_of(place, keys)
        at = (words & self._mask).view(np.int64)
        for table in self._tables:
            table[at[table[at] == words]] = 0

    def forget(self) -> None:
        """Knows nothing any more."""
        self._tables = [np.zeros_like(table) for table in self._tables]


class _Kept(msgspec.Struct, frozen=True):
    """What the next server needs: by which name other hosts know this one, and by tier how many
    clears were carried out here, their digest, and the hosts that use it."""

    host: str
    carried_out: dict[str, int]
    digests: dict[str, str] = {}
    hosts: dict[str, list[str]] = {}


def _load(path: Path) -> _Kept:
    """A new host if it cannot be read: then all clears of the log are carried out again."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    name = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:_MOST_HOST_CHARS]
    kept = _Kept(f"{name or 'host'}-{secrets.token_hex(4)}", {})
    _save(path, kept)
    return kept


def _save(path: Path, content: _Kept) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(content))
        temporary.rename(path)
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)


def tenant_digest(tenant: str) -> str:
    return blake2b(tenant.encode(), digest_size=_DIGEST_BYTES, person=b"kvkeep.tier").hexdigest()


def _name(place: str, key: bytes) -> bytes:
    return place.encode() + key
