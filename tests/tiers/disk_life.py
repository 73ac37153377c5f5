"""The life of a disk tier on simulated files, with power cuts.

What a block holds follows from its tenant and key, so a block with another's bytes is seen."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from random import Random

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.checksum import checksum
from kvkeep.store.layouts import Layout
from kvkeep.store.table import READY
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_index import DiskHit, DiskIndex, DiskWrite
from kvkeep_lab.simulation.disk import PowerCut, SimulatedFile

SLAB = 1 << 16
DATA, LOG = 8 * SLAB, 1 << 17
SHAPES = (
    Layout(1, b"one shard", (4000,)),
    Layout(2, b"two shards", (4096, 4096)),
    Layout(3, b"large", (32768,)),
)


def content(tenant: str, key: bytes, shape: Layout) -> bytes:
    """The bytes of a whole slot."""
    digest = blake2b(tenant.encode() + key + shape.fingerprint, digest_size=32).digest()
    return digest * (shape.slot_bytes // 32)


def checksums(tenant: str, keys: bytes, shape: Layout) -> NDArray[np.uint64]:
    return np.array(
        [
            [
                checksum(content(tenant, keys[at : at + 16], shape)[begin : begin + nbytes])
                for begin, nbytes in zip(shape.shard_offsets, shape.shard_bytes, strict=True)
            ]
            for at in range(0, len(keys), 16)
        ],
        np.uint64,
    ).reshape(-1, shape.shards)


def store(
    files: DiskFiles, index: DiskIndex, tenant: str, shape: Layout, parent: bytes, keys: bytes
) -> DiskWrite | None:
    """One write, from the plan to its commit."""
    plan = plan_store(index, tenant, shape, parent, keys)
    if plan is not None:
        write_blocks(files, plan, tenant, shape, keys)
        commit(files, plan.record)
        index.wrote(plan.number, 0)
    return plan


def plan_store(
    index: DiskIndex, tenant: str, shape: Layout, parent: bytes, keys: bytes, **hints: int
) -> DiskWrite | None:
    checks = checksums(tenant, keys, shape)
    return index.plan_write(tenant, shape, parent, keys, checks, 0, **hints)


def write_blocks(
    files: DiskFiles, plan: DiskWrite, tenant: str, shape: Layout, keys: bytes
) -> None:
    for position, offset in zip(plan.positions.tolist(), plan.offsets.tolist(), strict=True):
        key = keys[16 * position : 16 * position + 16]
        files.write(offset, [memoryview(content(tenant, key, shape))])


def commit(files: DiskFiles, record: bytes) -> None:
    files.sync_data()
    files.append(record)
    files.sync_log()


def verify(
    files: DiskFiles, hit: DiskHit, tenant: str, shape: Layout, keys: bytes, skip: int = 0
) -> list[bool]:
    """Reads what was found. Returns which blocks pass their checksums; one that passes must hold
    what its key says."""
    good = []
    for at, (offset, checks) in enumerate(
        zip(hit.offsets.tolist(), hit.checksums.tolist(), strict=True), start=skip
    ):
        buffer = bytearray(shape.slot_bytes)
        files.read(offset, [memoryview(buffer)])
        found = [
            checksum(bytes(buffer[begin : begin + nbytes]))
            for begin, nbytes in zip(shape.shard_offsets, shape.shard_bytes, strict=True)
        ]
        good.append(found == checks)
        if good[-1]:
            assert buffer == content(tenant, keys[16 * at : 16 * at + 16], shape), "a wrong block"
    return good


@dataclass
class Planned:
    """A write on its way."""

    plan: DiskWrite
    tenant: str
    shape: Layout
    keys: bytes

    def names(self) -> set[tuple[str, bytes]]:
        return {(self.tenant, self.keys[16 * at : 16 * at + 16]) for at in self.plan.positions}


class Life:
    """A random life: stores, reads, clears, failures, group commits in any order, and an end at any
    write or sync. `restart` checks that the next index has what this one had shown."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.left = 1 << 30  # operations until the end
        self.data = SimulatedFile(DATA, self._before)
        self.logs = (SimulatedFile(LOG, self._before), SimulatedFile(LOG, self._before))
        self.chains: list[tuple[str, Layout, bytes]] = []
        # what was written and found since, and not evicted before the end
        self.acknowledged: set[tuple[str, bytes]] = set()
        self.shown: set[tuple[str, bytes]] = set()  # those of them that were found at the end
        self.gone: set[tuple[str, bytes]] = set()  # cleared, and not stored since
        self.in_flight: list[Planned] = []
        self.lost = self.checked = 0
        self.start()

    def _before(self) -> None:
        self.left -= 1
        if self.left <= 0:
            raise PowerCut

    def start(self) -> None:
        self.files = DiskFiles(self.data, self.logs, SLAB)
        if self.files.is_new:
            assert not self.shown, "a log that cannot be read"
            self.files.begin()
        else:
            self.files.sync_log()
        self.index = DiskIndex(DATA, SLAB, None, self.files.recovered())
        self.in_flight = []

    def live(self, operations: int) -> None:
        """Up to so many writes and syncs, then the end."""
        self.left = operations
        try:
            while True:
                self.step()
        except PowerCut:
            self.left = 1 << 30
            self.shown = self.visible() & self.acknowledged

    def visible(self) -> set[tuple[str, bytes]]:
        """Tenant and key of every block that a lookup finds."""
        table = self.index.store.blocks.table
        return {
            (owner.name, key)
            for owner in self.index.store.tenants
            for key, row in owner.index.items()
            if table.state[row] == READY
        }

    def step(self) -> None:
        match self.random.choices(range(6), (10, 8, 2, 1, 1, 4))[0]:
            case 0:
                self.plan()
            case 1:
                self.commit()
            case 2 if self.in_flight:
                failed = self.in_flight.pop(self.random.randrange(len(self.in_flight)))
                self.index.failed(failed.plan.number, 0)
            case 3 if self.random.random() < 0.3:
                self.clear()
            case 4:
                self.files.compact()
            case 5 if self.chains:
                tenant, shape, keys = self.random.choice(self.chains)
                if hit := self.index.find(tenant, shape, keys, 0, 0):
                    assert all(verify(self.files, hit, tenant, shape, keys))
                    self.index.release(hit.number, 0)
            case _:
                self.index.store.tidy(0)

    def plan(self) -> None:
        """Stores a new chain, one that was there before, or more of one."""
        tenant, shape = self.random.choice("ab"), self.random.choice(SHAPES)
        keys, known = self.random.randbytes(16 * self.random.randint(1, 12)), 0
        if self.chains and self.random.random() < 0.6:
            tenant, shape, before = self.random.choice(self.chains)
            known = self.random.choice((0, len(before)))
            keys = before + keys if known else before
        plan = plan_store(self.index, tenant, shape, keys[:known][-16:], keys[known:])
        if plan is None:
            return
        self.chains = [*self.chains[-40:], (tenant, shape, keys)]
        new = Planned(plan, tenant, shape, keys[known:])
        self.gone -= new.names()
        self.in_flight.append(new)
        write_blocks(self.files, plan, tenant, shape, new.keys)

    def commit(self) -> None:
        """Some of the writes, in any order, with one sync."""
        self.random.shuffle(self.in_flight)
        some = self.in_flight[: self.random.randint(0, 3)]
        waiting = self.index.take_records() if self.random.random() < 0.5 else None
        records = [each.plan.record for each in some] + ([waiting.record] if waiting else [])
        if self.random.random() < 0.1 and waiting:
            self.index.failed(waiting.number, 0)  # its record may or may not be there
            waiting = None
        self.random.shuffle(records)
        commit(self.files, b"".join(records))
        del self.in_flight[: len(some)]
        for each in some:
            self.index.wrote(each.plan.number, 0)
            self.acknowledged |= each.names()
        if waiting:
            self.index.wrote(waiting.number, 0)

    def clear(self) -> None:
        tenant = self.random.choice(("a", "b", None))
        doomed = {
            (name, keys[at : at + 16])
            for name, _, keys in self.chains
            for at in range(0, len(keys), 16)
            if tenant in (None, name)
        }
        if tenant is None:
            self.index.note_clear_of_all()
            self.index.take_out(self.index.store.tenants.names())
        else:
            self.index.clear(tenant)
        waiting = self.index.take_records()
        assert waiting is not None
        commit(self.files, waiting.record)
        self.index.wrote(waiting.number, 0)
        self.gone |= doomed

    def restart(self, power: bool) -> None:
        """After a power cut, or after the process alone was killed."""
        for file in (self.data, *self.logs):
            if power:
                file.cut(self.random)
            file.under_way = (0, b"")
        self.start()
        visible = self.visible()
        self.acknowledged = self.shown  # not what was evicted and is back
        assert not self.shown - visible, "what was acknowledged is lost"
        assert not self.gone & visible, "what was cleared is back"
        for tenant, shape, keys in self.chains:
            hit = self.index.find(tenant, shape, keys, 0, 0)
            if hit is None:
                continue
            for at, good in enumerate(verify(self.files, hit, tenant, shape, keys)):
                name = tenant, keys[16 * at : 16 * at + 16]
                assert good or name not in self.shown, "what was acknowledged is damaged"
                self.checked += name in self.shown
                if not good:  # was never acknowledged, or was evicted: its slot has other bytes
                    self.lost += 1
                    self.index.drop([name])
                    break
            self.index.release(hit.number, 0)
        while self.index.store.tidy(0):
            pass
