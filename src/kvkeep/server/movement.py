"""Moves blocks between memory and the tiers below it.

    stored, or found in memory ─► written behind (`WriteBehind`)
    looked up, on a tier only ─► kept on the tier, slots in memory ─► mover reads ─► READY in memory
    on no disk either ─► a shared tier is asked, by a job ─► as above, or a miss

A lookup never waits. It is told how many blocks are coming, and asks again.

To the memory store, movement is a session (`MOVING`): a block that is read from a tier is a write, a
block that is written to a tier is leased. So an engine that stores the same block, an eviction and a
fault in the middle need no rules of their own. Each tier (`LowerTier`) is served by a process
(`Mover`); the loop only exchanges messages with it."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.errors import RequestError
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.server.clearing import Clearing
from kvkeep.server.disk import Disk
from kvkeep.server.lower_tier import (
    MOST_ROOM_PIECES,
    AskJob,
    LowerTier,
    Promotion,
    ReadJob,
    TierShown,
    WriteJob,
)
from kvkeep.server.prefetches import Prefetches, UnusedBlocks
from kvkeep.server.shared import Shared
from kvkeep.server.verification import Verification, VerificationShown, failed_verification
from kvkeep.server.write_behind import Reference, WriteBehind
from kvkeep.store.layouts import Layout
from kvkeep.store.operators import follow
from kvkeep.store.store import MOVING, Store
from kvkeep.store.table import NO_ROW, READY
from kvkeep.store.tree import key_at, known_blocks, way_up
from kvkeep.tiers.clear_log import ALL
from kvkeep.tiers.mover import Result

if TYPE_CHECKING:  # imported where tracing is switched on, and nowhere else
    from kvkeep.wire.tracing import Tracing

log = logging.getLogger(__name__)

_LEAST_AGAIN_MS = 2
_MOST_AGAIN_MS = 10_000
_STALLED_S = 10.0  # a job that takes longer: the tier is set aside
_FAULTS_IN_A_ROW = 8  # after which a tier is set aside
_LOG_INTERVAL_MS = 1000  # between records without blocks
INSISTS_MS = 5000  # a request that is willing to wait so long
MOST_SILENCE_S = 1.0  # between two turns
_MOST_SPANS = 16  # of requests that wait for one promotion


class Movement:
    """What moves, of all tiers. For the loop's thread. `wall_ms` is the time of day, by which blocks
    on tiers expire. `unusable`: disks that could not be opened.

    Prefetches that operators ask for look for blocks in the disks' indexes, so they bring nothing
    from shared tiers. Those of engines name their blocks, and may."""

    def __init__(
        self,
        store: Store,
        disks: Sequence[Disk],
        shared: Sequence[Shared],
        wall_ms: Callable[[], int],
        unusable: Sequence[TierShown] = (),
    ) -> None:
        self.disks, self._shared = disks, shared
        self._unusable = unusable
        self._unverified: list[
            VerificationShown
        ] = []  # unusable ones, once all were to be verified
        self.tiers: list[LowerTier] = [*disks, *shared]
        self.started: Callable[[int], None] = lambda fileno: None  # told of each new mover
        self.tracing: Tracing | None = None  # of a server that exports spans
        self._store = store
        self._wall_ms = wall_ms
        self._next_number = itertools.count(1).__next__
        room = sum(disk.data_bytes for disk in disks)
        groups: list[tuple[Sequence[LowerTier], int]] = [(disks, room)] if disks else []
        groups += [([tier], 0) for tier in shared]
        self.writers = [WriteBehind(store, *group, self._next_number) for group in groups]
        store.open_session(MOVING)
        self.prefetches = Prefetches(store, [disk.index for disk in disks], self)
        self._unused = UnusedBlocks(store)
        self._clearings: deque[Clearing] = deque()
        self._to_complete: deque[tuple[LowerTier, Promotion]] = deque()
        self._has_tended = False  # in the last turn
        self.follow_quotas(tenant.name for tenant in store.tenants if tenant.is_named)

    # -- what requests cause -----------------------------------------------------------------------

    def stored(self, row: int, blocks: int) -> None:
        """Notes that an engine has stored the `blocks` last blocks of the chain that ends in
        `row`."""
        table = self._store.blocks.table
        if table.state[row] == READY:
            keys = table.keys.words[way_up(table, row, blocks)].tobytes()
            tenant = self._store.tenants.by_number[table.tenant[row]].name
            self._refer(Reference(tenant, keys, len(keys) // KEY_BYTES, is_store=True))

    def orders(self, fingerprint: bytes) -> dict[int, bytes]:
        """How blocks of this layout on the tiers order their bytes: shard -> digest."""
        return {
            shard: digest
            for tier in self.tiers
            for shard, digest in tier.orders(fingerprint).items()
        }

    def stores(self) -> list[Store]:
        """The indexes of the disks that are in use."""
        return [disk.index.store for disk in self.disks if not disk.set_aside]

    def coming(
        self,
        session: int,
        tenant: str,
        layout: int,
        keys: bytes,
        hit_blocks: int,
        patience_ms: int,
        now_ms: int,
        again: bool,
        trace: str = "",
    ) -> tuple[int, int]:
        """Begins to bring up what a tier has of these blocks after the first `hit_blocks`. Returns
        how many are coming, and in how many milliseconds the last is expected; (0, 0) if none. The
        span `trace` of a question that is new has a part for the promotion."""
        coming, again_ms = 0, 0
        if hit_blocks * KEY_BYTES < len(keys):
            insists = patience_ms >= INSISTS_MS
            coming, again_ms = self._bring_up(tenant, layout, keys, hit_blocks, insists=insists)
            if trace and coming and not again:
                self._trace(trace, tenant, keys, hit_blocks)
        if not again:
            self._refer(Reference(tenant, keys, hit_blocks, coming))
        return coming, again_ms

    def _bring_up(
        self,
        tenant: str,
        layout: int,
        keys: bytes,
        hit_blocks: int,
        prefetcher: int = 0,
        insists: bool = False,
    ) -> tuple[int, int]:
        """`prefetcher`: who asks ahead of requests; 0: a request waits. If it `insists`, also for
        blocks that no tier seems to have."""
        if self.is_held:
            return 0, 0
        for tier in self._tiers():
            for promotion in tier.promotions.of(tenant):
                if _brings(promotion, tenant, keys, hit_blocks):
                    promotion.is_prefetch &= bool(prefetcher)
                    promotion.owners.add(prefetcher)
                    promotion.is_doubtful &= not insists
                    return self._expected(tier, promotion, hit_blocks)
        shape = self._store.layouts.get(layout)
        known = self._known(tenant, keys)
        hits = [
            (tier, hit)
            for tier in self._tiers()
            if tier.promotions.has_room(tenant, bool(prefetcher)) and not tier.is_slow
            if (hit := tier.find(tenant, shape, keys, known))
        ]
        promotion = Promotion(tenant, shape, keys, None, known, known, complete=known)
        promotion.is_prefetch = bool(prefetcher)
        promotion.owners = {prefetcher}
        promotion.insists = insists or bool(prefetcher)
        if not hits:
            return self._ask(promotion, hit_blocks) if prefetcher >= 0 else (0, 0)
        tier, hit = max(hits, key=lambda each: each[1].blocks)
        for other, unused in hits:
            if unused is not hit:
                other.release(unused)
        promotion.hit = hit
        tier.promotions.add(promotion)  # `turn` reads it, when all requests that came are answered
        return self._expected(tier, promotion, hit_blocks)

    def _trace(self, trace: str, tenant: str, keys: bytes, hit_blocks: int) -> None:
        """Begins the span of the promotion that brings these blocks."""
        if (tracing := self.tracing) is None:
            return
        for tier in self._tiers():
            for promotion in tier.promotions.of(tenant):
                if not _brings(promotion, tenant, keys, hit_blocks):
                    continue
                if len(promotion.spans) < _MOST_SPANS:
                    span = tracing.resume("server.promotion", trace, tier=tier.kind)
                    promotion.spans += [span] if span is not None else []
                return

    def _ask(self, promotion: Promotion, hit_blocks: int) -> tuple[int, int]:
        """Asks a shared tier what it has of blocks that no disk has. `_end_ask` goes on."""
        if promotion.start * KEY_BYTES >= len(promotion.keys):
            return 0, 0  # memory has the rest in part
        for tier in self._tiers():
            has_room = tier.promotions.has_room(promotion.tenant, promotion.is_prefetch)
            if tier.is_slow or not has_room:
                continue
            number = self._next_number()
            job = tier.ask(number, promotion)
            if job is not None and tier.mover.send(job):
                promotion.is_asked = True
                tier.jobs[number] = AskJob(promotion)
                tier.promotions.add(promotion)
                return self._expected(tier, promotion, hit_blocks)
        return 0, 0

    def prefetch(self, session: int, tenant: str, layout: int, keys: bytes, now_ms: int) -> int:
        """Begins to bring up what a tier has of these blocks and memory lacks. Returns how many are
        coming."""
        ready = self._known(tenant, keys)
        return self._bring_up(tenant, layout, keys, ready, session)[0]

    def start_prefetch(
        self, owner: int, tenant: str, layout: Layout, keys: bytes, most_bytes: int, now_ms: int
    ) -> int:
        """See `Prefetches`."""
        known = self._known(tenant, keys)
        keys = keys[: (known + most_bytes // layout.slot_bytes) * KEY_BYTES]
        if known * KEY_BYTES >= len(keys):
            return 0
        return self._bring_up(tenant, layout.number, keys, known, owner)[0]

    def prefetches_under_way(self, owner: int, tenant: str) -> int:
        """See `Prefetches`."""
        return sum(
            owner in each.owners and not each.is_over
            for tier in self._tiers()
            for each in tier.promotions.of(tenant)
        )

    def end_prefetches(self, owner: int | None) -> None:
        """Ends prefetches that only this owner wants; None: all. What a request waits for goes
        on."""
        for tier in self.tiers:
            for promotion in tier.promotions:
                promotion.owners.discard(owner or 0)
                if promotion.is_prefetch and (owner is None or not promotion.owners):
                    promotion.end()

    def clear(self, tenant: str) -> int:
        """Takes all blocks of a tenant on all tiers out of use. Returns how many."""
        self._end_promotions(lambda name: name == tenant)
        cleared = sum(tier.clear(tenant) for tier in self.tiers)
        self._send_all_records()
        return cleared

    def clear_all(self) -> Clearing:
        """Begins to take all blocks in memory and on all tiers out of use. `turn` goes on, or the
        caller."""
        for tier in self._shared:
            tier.clear(None)
        clearing = self._begin_to_clear([ALL])
        self._send_all_records()
        return clearing

    def _begin_to_clear(self, digests: Collection[str]) -> Clearing:
        clearing = Clearing(self._store, [disk.index for disk in self.disks], digests)
        self._clearings.append(clearing)
        self._end_promotions(clearing.includes)
        return clearing

    @property
    def is_held(self) -> bool:
        """Whether nothing moves, because many tenants are being cleared (`Clearing`)."""
        return bool(self._clearings)

    def _end_promotions(self, is_cleared: Callable[[str], bool]) -> None:
        self.prefetches.forget(is_cleared)
        for tier in self.tiers:
            for promotion in tier.promotions:
                if is_cleared(promotion.tenant):
                    promotion.end()

    def _send_all_records(self) -> None:
        for tier in self._tiers():
            self._send_records(tier)

    def _clear_many(self) -> None:
        """Goes on with what is being cleared, or begins with what other hosts have cleared."""
        if self._clearings and not self._clearings[0].turn():
            done = self._clearings.popleft()
            log.info("many tenants are cleared: %d blocks of memory are out of use", done.in_memory)
            for tier in self.tiers:
                tier.heard_is_cleared()
        if not self._clearings:
            heard = {digest for tier in self.tiers for digest in tier.take_heard()}
            if heard:
                log.info("another host has cleared tenants: they are cleared here, too")
                self._begin_to_clear(heard)

    @property
    def is_clearing(self) -> bool:
        """Whether a lookup could find what was cleared, or a restart or another host bring it
        back."""
        return self.is_held or any(tier.is_clearing for tier in self.tiers)

    @property
    def not_clearable(self) -> list[str]:
        """Disks that are set aside: what was cleared may come back with a restart that can use
        them."""
        names = [disk.name for disk in self.disks if disk.set_aside]
        return names + [tier.tier for tier in self._unusable]

    @property
    def unreached(self) -> list[str]:
        """Other hosts that have not carried out the last clear, as far as known."""
        return [host for tier in self.tiers for host in tier.unreached()]

    def follow_quotas(self, tenants: Iterable[str] = ()) -> None:
        """Puts the quotas and limits of these tenants in memory, and the defaults, in force on each
        tier, too."""
        names = list(tenants)
        for disk in self.disks:
            follow(disk.index.store, self._store, names)

    def shown(self) -> list[TierShown]:
        """All tiers as operators see them."""
        return [
            tier.shown(writer.chains, writer.evicted_unwritten)
            for writer in self.writers
            for tier in writer.tiers
        ] + list(self._unusable)

    # -- the loop's turn ---------------------------------------------------------------------------

    @property
    def filenos(self) -> list[int]:
        return [tier.mover.fileno() for tier in self._tiers()]

    @property
    def has_to_do(self) -> bool:
        """Whether another turn would find work at once."""
        for tier in self.tiers:  # without generators: it is asked before each turn
            if tier.results:
                return True
            if not tier.set_aside and (tier.has_to_tidy or self._next_to_read(tier) is not None):
                return True
        for writer in self.writers:
            if writer.has_to_do:
                return True
        for disk in self.disks:
            if disk.may_check:
                return True
        return self.is_held or bool(self._to_complete) or self.prefetches.has_to_do

    def turn(self, now_ms: int) -> None:
        """Takes a result of a mover and gives it another job, or writes behind: a piece of work, a
        millisecond or so. Requests that have come are answered before the next turn."""
        try:
            may_write = not self.is_held and any(writer.has_to_do for writer in self.writers)
            self._has_tended = not (self._has_tended and may_write) and self._tend_all(now_ms)
            if not self.is_held and not (self._has_tended and may_write):
                for writer in self.writers:
                    writer.turn(now_ms)
        except Exception:
            # guard: a fault in moving blocks must not end the server; memory goes on without tiers
            log.exception("moving blocks failed inside the server")
            for tier in self._tiers():
                self.put_aside(tier, "an internal error; the server's log has it")

    def _tend_all(self, now_ms: int) -> bool:
        """Whether that was a piece of work."""
        if self._to_complete:
            self._complete(*self._to_complete.popleft(), now_ms)
            return True
        has_worked = [self._tend(tier, now_ms) for tier in self.tiers]
        for disk in self.disks:
            self._verify(disk, now_ms)
        self._clear_many()
        if not self.is_held:
            self.prefetches.turn(now_ms)
        return any(has_worked)

    def _tend(self, tier: LowerTier, now_ms: int) -> bool:
        """Takes one result, or gives further jobs when there is none. Whether there was either."""
        tier.results.extend(tier.mover.results())
        has_result = bool(tier.results)
        if has_result:
            self._end(tier, tier.results.popleft(), now_ms)
            self._end_over(tier, now_ms)
        if tier.set_aside:
            self._promote(tier, now_ms)  # ends promotions whose last job has failed
            self._revive(tier)
        elif tier.mover.problem:
            self.put_aside(tier, tier.mover.problem)
        elif tier.mover.oldest_s > _STALLED_S:
            self.put_aside(tier, f"a job took more than {_STALLED_S:g} s")
        elif not has_result:
            has_read = self._promote(tier, now_ms)
            self._keep_records(tier, now_ms)
            if tier.has_to_tidy:
                tier.tidy()
            return has_read
        return has_result

    def put_aside(self, tier: LowerTier, why: str) -> None:
        """Uses a tier no longer. Jobs in flight end when its process has."""
        text = "%s %s is set aside, its blocks are misses %s: %s"
        log.error(text, tier.kind, tier.name, tier.until, why)
        tier.put_aside(why)

    def _revive(self, tier: LowerTier) -> None:
        number = self._next_number()
        if tier.revive(number):
            tier.jobs[number] = AskJob(None)
            self.started(tier.mover.fileno())
        elif tier.mover.oldest_s > _STALLED_S and not tier.mover.problem:
            tier.put_aside(f"it did not answer for {_STALLED_S:g} s")

    def close(self, now_ms: int) -> None:
        """Ends the movers. Nothing of theirs is at work in memory afterwards."""
        for tier in self.tiers:
            if tier.close():
                for result in (*tier.results, *tier.mover.results()):
                    self._end(tier, result, now_ms)
        while self._to_complete:
            self._complete(*self._to_complete.popleft(), now_ms)

    def _tiers(self) -> Iterator[LowerTier]:
        return (tier for tier in self.tiers if not tier.set_aside)

    def _refer(self, reference: Reference) -> None:
        for writer in self.writers:
            writer.refer(reference)

    # -- from a tier to memory ---------------------------------------------------------------------

    def _known(self, tenant: str, keys: bytes) -> int:
        """How many leading blocks memory has, complete or not."""
        owner = self._store.tenants.get(tenant)
        return known_blocks(owner.index, keys) if owner else 0

    def _expected(self, tier: LowerTier, promotion: Promotion, hit_blocks: int) -> tuple[int, int]:
        if tier.is_slow or promotion.is_over or promotion.reach <= hit_blocks:
            return 0, 0
        if promotion.is_doubtful:
            return 0, 0
        queued = tier.promotions.bytes_until(promotion)
        seconds = (queued + tier.mover.in_flight_bytes) / tier.reads.bytes_per_s
        asked_ms = tier.ask_ms if promotion.is_asked else 0.0
        again_ms = min(max(round(seconds * 1000 + asked_ms), _LEAST_AGAIN_MS), _MOST_AGAIN_MS)
        return promotion.reach - hit_blocks, again_ms

    def _promote(self, tier: LowerTier, now_ms: int) -> bool:
        """Begins one job of the promotion whose turn it is, or makes room for it. Whether there is
        one."""
        promotion = self._next_to_read(tier)
        if promotion is not None:
            is_wanted = not promotion.is_prefetch or self._has_owner(promotion)
            stop = self._stop_of_job(tier, promotion)
            if is_wanted and self._make_room(promotion, stop, now_ms):
                return True
            if not is_wanted or not self._read(tier, promotion, stop, now_ms):
                promotion.end()
            tier.promotions.served(promotion)
        self._end_over(tier, now_ms)
        return promotion is not None

    def _end_over(self, tier: LowerTier, now_ms: int) -> None:
        """Lets go of what is kept for promotions that are over."""
        for over in tier.promotions.take_over():
            self._give_up(over, now_ms)
            over.end_spans()
            if over.hit is not None:
                tier.release(over.hit)

    @staticmethod
    def _next_to_read(tier: LowerTier) -> Promotion | None:
        """One job of a prefetch at a time: a request that comes meanwhile waits for no more."""
        if not tier.promotions or not tier.mover.can_read:
            return None
        if (promotion := tier.promotions.next(with_prefetches=False)) is not None:
            return promotion
        reading = any(each.is_prefetch and each.reading for each in tier.promotions)
        return tier.promotions.next(with_prefetches=not reading)

    def _has_owner(self, promotion: Promotion) -> bool:
        """Whether an owner of a prefetch is still there. Sessions end, also with their process."""
        return any(owner < 0 or owner in self._store.sessions for owner in promotion.owners)

    def _make_room(self, promotion: Promotion, stop: int, now_ms: int) -> bool:
        """Makes some room for the next blocks of a promotion, up to block `stop`. False if there is
        nothing to do."""
        if promotion.room_pieces == MOST_ROOM_PIECES or not self._may_read(promotion, stop):
            return False
        promotion.room_pieces += 1
        return self._store.make_some_room(
            promotion.tenant,
            promotion.layout.number,
            promotion.parent,
            stop - promotion.next,
            now_ms,
        )

    def _may_read(self, promotion: Promotion, stop: int) -> bool:
        """Whether a prefetch may bring so much."""
        return not promotion.is_prefetch or self._unused.is_room_for(
            promotion.tenant, promotion.layout, stop - promotion.next
        )

    @staticmethod
    def _stop_of_job(tier: LowerTier, promotion: Promotion) -> int:
        start = promotion.next
        return min(promotion.stop, start + tier.blocks_a_job(promotion.layout, start))

    def _read(self, tier: LowerTier, promotion: Promotion, stop: int, now_ms: int) -> bool:
        """Begins to read the next blocks of a promotion, up to block `stop`. False if memory takes
        no more of it."""
        layout, start, parent = promotion.layout, promotion.next, promotion.parent
        keys = promotion.keys[start * KEY_BYTES : stop * KEY_BYTES]
        number = self._next_number()
        promotion.room_pieces = 0
        if not self._may_read(promotion, stop):
            self.prefetches.no_room(promotion.owners)
            return False
        wall_ms = self._wall_ms()
        priority, expires_ms = tier.hints(promotion.tenant, keys)
        try:
            plan = self._store.prepare_store(
                MOVING,
                number,
                promotion.tenant,
                layout.number,
                None,
                parent,
                keys,
                now_ms,
                priority,
                max(1, expires_ms - wall_ms) if expires_ms else 0,
            )
        except RequestError as error:
            log.debug("a promotion ends: %s", error)
            return False
        count = len(plan.slots)
        if not count:
            return False  # no room
        if plan.positions[0] != 0 or plan.positions[-1] != count - 1:
            self._store.abandon_store(MOVING, number, now_ms)
            return False  # an engine stores some of these blocks at this moment
        if not tier.mover.send(tier.read_job(number, promotion, start, plan.slots)):
            self._store.abandon_store(MOVING, number, now_ms)
            return True  # later
        tier.jobs[number] = ReadJob(promotion, start, count)
        promotion.next = start + count
        promotion.reading += 1
        if promotion.is_prefetch:
            last = key_at(promotion.keys, start + count - 1)
            self._unused.add(promotion.tenant, parent, last, count * layout.slot_bytes)
        return True

    # -- verification ------------------------------------------------------------------------------

    def begin_verification(self) -> list[VerificationShown]:
        """Begins to check all blocks of each disk, or continues what has begun. For a disk that is
        set aside it fails at once."""
        for disk in self.disks:
            disk.begin_verification()
        self._unverified = [failed_verification(each.tier, each.problem) for each in self._unusable]
        return self.verifications()

    def verifications(self) -> list[VerificationShown]:
        """The last one of each disk."""
        begun = [disk.verification for disk in self.disks if disk.verification is not None]
        return [each.shown() for each in begun] + self._unverified

    def cancel_verification(self) -> list[VerificationShown]:
        """Ends what has begun."""
        for disk in self.disks:
            if disk.verification is not None:
                disk.verification.cancel()
        return self.verifications()

    def _verify(self, disk: Disk, now_ms: int) -> None:
        """Gives the mover the next blocks to check. It checks when it has nothing else to do."""
        verification = disk.verification
        if verification is not None and disk.may_check:
            job = verification.next(self._next_number(), disk.mover.job_bytes)
            if job is None:
                return
            disk.jobs[job.number] = verification
            if not disk.mover.send(job):
                failed = Result(job.number, disk.mover.problem, bytes(len(job.offsets) // 8))
                self._end(disk, failed, now_ms)

    # -- records without blocks --------------------------------------------------------------------

    def _keep_records(self, tier: LowerTier, now_ms: int) -> None:
        """Sends what has changed on a tier without a write, now and then."""
        if now_ms < tier.records_ms + _LOG_INTERVAL_MS or not tier.mover.can_write:
            return
        tier.records_ms = now_ms
        self._send_records(tier)

    def _send_records(self, tier: LowerTier) -> None:
        number = self._next_number()
        if (taken := tier.take_records(number)) is None:
            return
        job, planned = taken
        if tier.mover.send(job):
            tier.jobs[number] = WriteJob(planned)
        else:
            tier.failed(planned)

    # -- results -----------------------------------------------------------------------------------

    def _end(self, tier: LowerTier, result: Result, now_ms: int) -> None:
        job = tier.jobs.pop(result.number)
        if isinstance(job, Verification):
            tier.checked(job, result)
            return
        if isinstance(job, WriteJob):
            self._end_write(tier, job, result, now_ms)
        elif isinstance(job, ReadJob):
            self._end_read(tier, job, result, now_ms)
        elif job.promotion is None:
            tier.tried(result.error)
            return
        else:
            self._end_ask(tier, job.promotion, result)
        if not result.error:
            tier.faults = 0
            return
        tier.counts.errors += 1
        tier.last_error = result.error
        tier.faults += 1
        if tier.faults == 1 and not tier.set_aside:
            log.warning("%s %s: %s", tier.kind, tier.name, result.error)
        if tier.faults >= _FAULTS_IN_A_ROW and not tier.set_aside:
            self.put_aside(tier, result.error)

    def _end_ask(self, tier: LowerTier, promotion: Promotion, result: Result) -> None:
        """The tier has told what it has: `_promote` reads it in this turn."""
        promotion.is_asked = False
        if not result.error and not promotion.has_ended:
            tier.answered(promotion, result)

    def _end_write(self, tier: LowerTier, job: WriteJob, result: Result, now_ms: int) -> None:
        self._store.release(MOVING, result.number, now_ms)
        if result.error:
            tier.failed(job.planned)
            return
        tier.wrote(job.planned, result)
        tier.note_write(job.blocks, job.nbytes, result.seconds, now_ms)

    def _end_read(self, tier: LowerTier, job: ReadJob, result: Result, now_ms: int) -> None:
        promotion = job.promotion
        promotion.reading -= 1
        bad = np.flatnonzero(np.frombuffer(result.good, dtype=np.uint8) == 0)
        checksums = np.zeros((0, 0), np.uint64) if result.error else tier.checksums(job, result)
        promotion.arrived[job.start] = result.number, job, checksums
        if result.error or len(bad):
            promotion.end()
            promotion.complete = NO_ROW  # no job begins there, so none becomes READY any more
            if not result.error:
                log.log(tier.drop_level, "%s %s: %s", tier.kind, tier.name, tier.drop(job, bad))
        else:
            nbytes = job.blocks * promotion.layout.slot_bytes
            tier.note_read(nbytes, result.seconds, now_ms)
        self._complete(tier, promotion, now_ms)
        if promotion.complete == NO_ROW:
            self._give_up(promotion, now_ms)

    def _complete(self, tier: LowerTier, promotion: Promotion, now_ms: int) -> None:
        """Makes the blocks of the promotion's next job READY, if they have arrived. What arrived
        before it, the next turns do."""
        if promotion.complete not in promotion.arrived:
            return
        number, arrived, checksums = promotion.arrived.pop(promotion.complete)
        self._store.complete_store(MOVING, number, checksums, now_ms)
        promotion.complete += arrived.blocks
        tier.counts.promoted_blocks += arrived.blocks
        nbytes = arrived.blocks * promotion.layout.slot_bytes
        tier.counts.promoted_bytes += nbytes
        self.prefetches.arrived(promotion.owners, arrived.blocks, nbytes)
        if promotion.complete >= promotion.stop:
            promotion.end_spans()  # now: a request may see its blocks before the next turn
        if promotion.complete in promotion.arrived:
            self._to_complete.append((tier, promotion))

    def _give_up(self, promotion: Promotion, now_ms: int) -> None:
        """Gives back the slots of blocks that hang below one that did not come."""
        numbers = [number for number, *_ in promotion.arrived.values()]
        promotion.arrived.clear()
        self._store.abandon_all(MOVING, numbers, now_ms)


def _brings(promotion: Promotion, tenant: str, keys: bytes, hit_blocks: int) -> bool:
    """Whether the promotion brings what follows the first `hit_blocks` of these keys."""
    if promotion.tenant != tenant or promotion.reach <= hit_blocks:
        return False
    if promotion.is_over:
        return False
    if key_at(promotion.keys, hit_blocks) != key_at(keys, hit_blocks):
        return False
    start, stop = hit_blocks * KEY_BYTES, min(promotion.reach * KEY_BYTES, len(keys))
    return promotion.keys[start:stop] == keys[start:stop]
