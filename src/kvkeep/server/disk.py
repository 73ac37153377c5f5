"""A disk below memory: its index answers at once, its process does the input and output."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.keys import KEY_BYTES
from kvkeep.server.lower_tier import Hit, LowerTier, Planned, Promotion, ReadJob
from kvkeep.server.verification import Verification
from kvkeep.store.layouts import Layout
from kvkeep.store.tree import key_at
from kvkeep.tiers.disk_check import DiskCheck
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_index import DiskAppend, DiskHit, DiskIndex, DiskWrite
from kvkeep.tiers.mover import Append, Job, Mover, Read, Result, Write
from kvkeep.wire.pool_files import Watch

log = logging.getLogger(__name__)


class Disk(LowerTier):
    """`wall_ms` is the time of day, by which blocks on disk expire."""

    kind = "disk"

    def __init__(
        self,
        name: str,
        files: DiskFiles,
        index: DiskIndex,
        mover: Mover,
        watch: Watch,
        wall_ms: Callable[[], int],
    ) -> None:
        super().__init__(name, mover)
        self.index = index
        self.verification: Verification | None = None  # the last one
        self._files = files  # open, so that no other server uses the directory
        self._watch = watch  # held by the mover while it may touch the pool
        self._wall_ms = wall_ms

    @property
    def data_bytes(self) -> int:
        return self.index.store.slabs.capacity_bytes

    @property
    def free_bytes(self) -> int:
        used = sum(layout.blocks * layout.slot_bytes for layout in self.index.store.layouts)
        return self.data_bytes - used

    def usage(self) -> tuple[int, int, int]:
        blocks = len(self.index.store.blocks.table)
        return blocks, self.data_bytes - self.free_bytes, self.data_bytes

    # -- what it has

    def find(self, tenant: str, layout: Layout, keys: bytes, skip: int) -> DiskHit | None:
        return self.index.find(tenant, layout, keys, skip, self._wall_ms())

    def release(self, hit: Hit) -> None:
        assert isinstance(hit, DiskHit)
        self.index.release(hit.number, self._wall_ms())

    def known(self, tenant: str, layout: Layout, keys: bytes) -> int:
        return self.index.known(tenant, keys)

    def hints(self, tenant: str, keys: bytes) -> tuple[int, int]:
        return self.index.hints(tenant, keys)

    def orders(self, fingerprint: bytes) -> dict[int, bytes]:
        return self.index.orders(fingerprint)

    # -- to memory

    def read_job(
        self, number: int, promotion: Promotion, start: int, slots: NDArray[np.int64]
    ) -> Job:
        layout, hit = promotion.layout, promotion.hit
        assert isinstance(hit, DiskHit)
        at = start - promotion.start
        return Read(
            number,
            slots.tobytes(),
            hit.offsets[at : at + len(slots)].tobytes(),
            layout.slot_bytes,
            list(layout.shard_offsets),
            list(layout.shard_bytes),
            hit.checksums[at : at + len(slots)].tobytes(),
        )

    def checksums(self, job: ReadJob, result: Result) -> NDArray[np.uint64]:
        hit = job.promotion.hit
        assert isinstance(hit, DiskHit)
        at = job.start - job.promotion.start
        return hit.checksums[at : at + job.blocks]

    def drop(self, job: ReadJob, bad: NDArray[np.int64]) -> str:
        self.counts.bad_blocks += len(bad)
        tenant = job.promotion.tenant
        self.index.drop([(tenant, key_at(job.promotion.keys, job.start + int(bad[0])))])
        return (
            f"{len(bad)} blocks of tenant {tenant} do not match their checksums; they are dropped"
        )

    # -- verification

    def begin_verification(self) -> None:
        """Begins to check all blocks, or continues what has begun. Fails if it is set aside."""
        if self.verification is None or not self.verification.is_running:
            self.verification = Verification(self.name, DiskCheck(self.index))
        if self.set_aside:
            self.verification.fail(self.set_aside)

    @property
    def may_check(self) -> bool:
        """Whether the mover may get the next blocks to check."""
        return not self.set_aside and self.verification is not None and self.verification.may_check

    def checked(self, verification: Verification, result: Result) -> None:
        before = verification.counts.blocks
        bad = verification.ended(result, self._wall_ms())
        self.counts.verified_blocks += verification.counts.blocks - before
        self.counts.bad_blocks += sum(bad.values())
        for tenant, count in bad.items():
            text = "disk %s: %d blocks of tenant %s do not match their checksums; they are dropped"
            log.error(text, self.name, count, tenant)
        if result.error:
            self.counts.errors += 1
            self.last_error = result.error

    # -- from memory

    def free_blocks(self, layout: Layout) -> int:
        return self.index.free_blocks(layout)

    def words_by_use(self) -> tuple[NDArray[np.uint64], int]:
        return self.index.words_by_use()

    def make_some_room(self, tenant: str, layout: Layout, parent: bytes, blocks: int) -> bool:
        return self.index.make_some_room(tenant, layout, parent, blocks, self._wall_ms())

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
    ) -> DiskWrite | None:
        now_ms = self._wall_ms()
        assert len(checksums) == len(keys) // KEY_BYTES
        return self.index.plan_write(
            tenant, layout, parent, keys, checksums, now_ms, priority, ttl_ms
        )

    def write_job(
        self, number: int, planned: Planned, layout: Layout, slots: NDArray[np.int64]
    ) -> Job:
        assert isinstance(planned, DiskWrite)
        offsets = planned.offsets.tobytes()
        return Write(number, slots.tobytes(), offsets, layout.slot_bytes, planned.record)

    def wrote(self, planned: object, result: Result) -> None:
        assert isinstance(planned, DiskWrite | DiskAppend)
        self.index.wrote(planned.number, self._wall_ms())

    def failed(self, planned: object) -> None:
        assert isinstance(planned, DiskWrite | DiskAppend)
        self.index.failed(planned.number, self._wall_ms())

    # -- operators, and the loop's turn

    def clear(self, tenant: str) -> int:
        return self.index.clear(tenant)

    @property
    def is_clearing(self) -> bool:
        return self.index.has_unlogged_clears  # a disk that is set aside cannot note them any more

    @property
    def has_to_tidy(self) -> bool:
        return self.index.store.has_to_tidy

    def tidy(self) -> None:
        self.index.store.tidy(self._wall_ms())

    def take_records(self, number: int) -> tuple[Job, object] | None:
        planned = self.index.take_records()
        return (Append(number, planned.record), planned) if planned is not None else None

    def put_aside(self, why: str) -> None:
        super().put_aside(why)
        if self.verification is not None:
            self.verification.fail(why)

    def close(self) -> bool:
        has_ended = self.mover.close()
        if has_ended:
            self._watch.close()
        else:
            self._watch.leave()  # the next server waits for it
        self._files.close()
        return has_ended
