"""The disk of a chaos run: the shipped movement, index, log and mover over simulated files.

    Movement ──► DiskMover ──► the shipped MoverProcess, a step at a time ──► ChaosFiles ──► files

The files outlive servers, and lose in a power cut what was not synced. A mover ends with its server,
in the middle of a copy."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvkeep.server.disk import Disk
from kvkeep.server.movement import Movement
from kvkeep.server.startup import _FIRST_MOVER
from kvkeep.store.store import MOVING, Store
from kvkeep.store.table import READY
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_index import _SESSION, DiskIndex
from kvkeep.tiers.memory import Pool
from kvkeep.tiers.mover import Job, Read, Result, Write
from kvkeep.tiers.mover_process import MappedPool, MoverProcess, _Moving, describe
from kvkeep.wire.messages import PoolPlace
from kvkeep_lab.chaos.mover import ChaosMover
from kvkeep_lab.chaos.plan import DiskItem
from kvkeep_lab.chaos.record import Record, Violation
from kvkeep_lab.simulation.disk import SimulatedFile
from kvkeep_lab.simulation.simulation import Simulation

Name = tuple[str, bytes]  # tenant and the store's key

_LOG_BYTES = 1 << 17
_STEP_US = (20, 500)
_SLOW_US = (5_000, 400_000)
_STALLS_US = (300_000, 1 << 60, 1 << 60)  # from the last ones no disk comes back
_WORKERS = 2
_TODAY_MS = 1_700_000_000_000
_FAULT = "an internal error; the server's log has it"


class ChaosFiles:
    """The files as a mover uses them, with faults."""

    def __init__(
        self, files: DiskFiles, rates: dict[str, float], record: Record, chance: random.Random
    ) -> None:
        self._files = files
        self._rates = rates
        self._record = record
        self._random = chance

    def read(self, offset: int, views: list[memoryview]) -> int:
        self._may_fail()
        if self._meets("half_on_disk"):
            return self._files.read(offset, _half(views))
        nbytes = self._files.read(offset, views)
        if self._meets("garbage_on_disk"):
            view = self._random.choice(views)
            view[self._random.randrange(view.nbytes)] ^= self._random.randrange(1, 256)
        return nbytes

    def write(self, offset: int, views: list[memoryview]) -> None:
        if self._meets("full_disk"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._may_fail()
        self._files.write(offset, _half(views) if self._meets("half_on_disk") else views)

    def sync_data(self) -> None:
        self._may_fail()
        self._files.sync_data()

    def append(self, records: bytes) -> None:
        self._may_fail()
        self._files.append(records)

    def sync_log(self) -> None:
        self._may_fail()
        self._files.sync_log()

    def compact(self) -> None:
        self._may_fail()
        self._files.compact()

    def _may_fail(self) -> None:
        if self._meets("failing_disk"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _meets(self, fault: str) -> bool:
        if self._random.random() >= self._rates.get(fault, 0.0):
            return False
        self._record.faults[fault] += 1
        return True


class _Process(MoverProcess):
    """The shipped mover. Its threads are steps, which its owner takes."""

    def __init__(
        self, pool: MappedPool, disk: ChaosFiles, answer: Callable[[Result], None]
    ) -> None:
        super().__init__(pool, disk, None)  # type: ignore[arg-type]
        self._give = answer

    @property
    def reads(self) -> bool:
        """Whether a read is under way."""
        return bool(self._reads)

    def step(self, before_copy: Callable[[int, bool], None]) -> bool:
        """Moves a piece, or commits. False if there is nothing to do."""
        queue = self._reads or self._writes
        if queue:
            moving, piece = queue.popleft()
            for slot in moving.slots[piece].tolist():
                before_copy(slot, isinstance(moving.job, Read))
            try:
                self._move(moving, piece)
            except Exception as error:  # guard: as the shipped thread does
                moving.fail(describe(error))
            moving.left -= 1
            if not moving.left and isinstance(moving.job, Read):
                self._answer(moving)
        elif self._commits and not self._commits[0].left:
            batch = []
            while self._commits and not self._commits[0].left:
                batch.append(self._commits.popleft())
            self._commit(batch)
            for moving in batch:
                self._answer(moving)
        else:
            return False
        return True

    def tear(self, before_copy: Callable[[int, bool], None], chance: random.Random) -> None:
        """It ends in the middle of a copy: half of a slot has other bytes, or half of a block is on
        the disk."""
        queue = self._reads or self._writes
        if not queue or chance.random() < 0.3:
            return
        moving, piece = queue[0]
        assert isinstance(moving.job, Read | Write)
        slots = moving.slots[piece][:1]
        before_copy(int(slots[0]), isinstance(moving.job, Read))
        (view,) = self._pool.views(slots, moving.job.nbytes)
        if isinstance(moving.job, Read):
            view[: view.nbytes // 2] = chance.randbytes(view.nbytes // 2)
        else:
            self._disk._files.write(int(moving.offsets[piece.start]), _half([view]))  # type: ignore[attr-defined]

    def _answer(self, moving: _Moving) -> None:
        if moving.error and not isinstance(moving.job, Read):
            moving.good[:] = 0
        self._give(Result(moving.job.number, moving.error, moving.good.tobytes()))


class DiskMover(ChaosMover):
    """With the process of a disk, whose threads are steps."""

    def __init__(
        self,
        simulation: Simulation,
        rates: dict[str, float],
        record: Record,
        pool: MappedPool,
        files: ChaosFiles,
        chance: random.Random,
    ) -> None:
        super().__init__(simulation, pool, chance)
        self._rates = rates
        self._record = record
        self._process = _Process(pool, files, self._answered)
        self._workers = 0
        self._stalled_until_us = 0

    def _begin(self, job: Job) -> None:
        self._process.take(job)
        if self._workers < _WORKERS:
            self._workers += 1
            self._simulation.after(self._random.randint(*_STEP_US), self._work)

    def _end(self) -> None:
        self._process.tear(self.before_copy, self._random)

    def _work(self) -> None:
        """A thread's turn."""
        now_us = self._simulation.now_us
        if self.problem:
            return
        if now_us < self._stalled_until_us:
            self._simulation.at(self._stalled_until_us, self._work)
            return
        # More often while it reads: then slots in memory depend on it.
        stalls = self._rates.get("stalled_disk", 0.0) * (10 if self._process.reads else 1)
        if self._random.random() < stalls:
            self._record.faults["stalled_disk"] += 1
            self._stalled_until_us = now_us + self._random.choice(_STALLS_US)
            self._simulation.at(self._stalled_until_us, self._work)
            return
        if not self._process.step(self.before_copy):
            self._workers -= 1
            return
        wait_us = self._random.randint(*_STEP_US)
        if self._random.random() < self._rates.get("slow_disk", 0.0):
            self._record.faults["slow_disk"] += 1
            wait_us = self._random.randint(*_SLOW_US)
        self._simulation.after(wait_us, self._work)

    def _answered(self, result: Result) -> None:
        since_us = self._jobs[result.number][1]
        seconds = (self._simulation.now_us - since_us) / 1e6
        self._take(Result(result.number, result.error, result.good, seconds))


class ChaosDisk:
    """The files, over all lives of a server, and what they must and must not bring back."""

    def __init__(
        self,
        item: DiskItem,
        simulation: Simulation,
        rates: dict[str, float],
        record: Record,
        slab_bytes: int,
        seed: int,
    ) -> None:
        self.movement: Movement | None = None
        self.before_copy: Callable[[int, bool], None] = lambda slot, is_write: None
        self.after_result: Callable[[], None] = lambda: None
        self.promoted_blocks = self.written_blocks = 0  # in all lives
        self._simulation = simulation
        self._rates = rates
        self._record = record
        self._slab_bytes = slab_bytes
        self._random = random.Random(f"disk of {seed}")
        self._data = SimulatedFile(item.slabs * slab_bytes)
        self._logs = SimulatedFile(_LOG_BYTES), SimulatedFile(_LOG_BYTES)
        self._acknowledged: set[Name] = set()
        self._shown: set[Name] = set()  # those of them that the last server could find at its end
        self._cleared: set[Name] = set()  # and not written since
        self._clearing: set[Name] = set()  # likewise; a restart may bring them back

    @property
    def index(self) -> DiskIndex:
        assert self.movement is not None
        return self.movement.disks[0].index

    @property
    def mover(self) -> DiskMover:
        assert self.movement is not None
        mover: Any = self.movement.disks[0].mover
        return mover  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def open(self, pool: Pool, store: Store, epoch: int) -> Movement:
        """For another server."""
        files = self._open_files()
        index = DiskIndex(
            files.data_bytes,
            files.slab_bytes,
            store.blocks.presence,
            files.recovered(),
            self._wall_ms(),
        )
        self._check_recovered(index)
        watch = pool.watch(_FIRST_MOVER)
        place = PoolPlace(str(pool.directory), str(watch.path), pool.segment_bytes, pool.pool_bytes)
        used = ChaosFiles(self._open_files(), self._rates, self._record, self._random)
        mover: Any = DiskMover(
            self._simulation,
            self._rates,
            self._record,
            MappedPool(place, epoch),
            used,
            self._random,
        )
        mover.before_copy = lambda slot, is_write: self.before_copy(slot, is_write)
        mover.after_result = lambda: self.after_result()
        self._watch_index(index)
        self._watch_memory(store)
        disk = Disk("simulated disk", files, index, mover, watch, self._wall_ms)
        self.movement = Movement(store, [disk], [], self._wall_ms)
        return self.movement

    def turn(self, now_ms: int) -> None:
        """A turn of the loop."""
        assert self.movement is not None
        self.movement.turn(now_ms)
        (disk,) = self.movement.disks
        if disk.set_aside == _FAULT:
            raise Violation("broken_rules", "moving blocks failed inside the server")
        if self._clearing and not self.movement.is_clearing:
            self._cleared |= self._clearing
            self._clearing.clear()

    def clear(self, tenant: str | None) -> None:
        """An operator's."""
        assert self.movement is not None
        known = _names(self.index.store, self.index.store.blocks.table.live_rows().tolist())
        self._clearing |= {name for name in known if tenant in (None, name[0])}
        if tenant is None:
            self.movement.clear_all()
        else:
            self.movement.clear(tenant)

    def end(self) -> None:
        """The server's process is gone, and the mover with it."""
        if self.movement is None:
            return
        (disk,) = self.movement.disks
        self._shown = self._visible(self.index) & self._acknowledged
        self._clearing.clear()
        self.promoted_blocks += disk.counts.promoted_blocks
        self.written_blocks += disk.counts.written_blocks
        self.mover.close()
        os.close(disk._watch._descriptor)
        self.movement = None

    def stop(self, now_ms: int) -> None:
        """The server ends in order."""
        if self.movement is not None:
            movement, watch = self.movement, self.movement.disks[0]._watch
            movement.close(now_ms)
            watch._descriptor = os.open(os.devnull, os.O_RDONLY)  # `end` closes it
            self.end()

    def cut_power(self) -> None:
        """After the end of the server."""
        for file in (self._data, *self._logs):
            file.cut(self._random)

    def left(self) -> list[str]:
        """What movement holds although nothing moves."""
        if self.movement is None:
            return []
        (disk,) = self.movement.disks
        held = self.index.store.sessions[_SESSION]
        counts = {
            "jobs": len(disk.jobs),
            "promotions": len(disk.promotions),
            "leases on the disk": len(held.leases),
            "writes to the disk": len(held.writes),
        }
        return [f"{count} {name}" for name, count in counts.items() if count]

    # -- inside

    def _wall_ms(self) -> int:
        return _TODAY_MS + self._simulation.now_us // 1000

    def _open_files(self) -> DiskFiles:
        files = DiskFiles(self._data, self._logs, self._slab_bytes)
        if not files.is_new:
            files.sync_log()
            return files
        if self._shown:
            raise Violation("broken_rules", "the log of the disk cannot be read")
        files.begin()
        return files

    def _check_recovered(self, index: DiskIndex) -> None:
        visible = self._visible(index)
        if lost := self._shown - visible:
            raise Violation("broken_rules", f"{len(lost)} blocks that were on disk are lost")
        if back := self._cleared & visible:
            raise Violation("broken_rules", f"{len(back)} cleared blocks are on disk again")
        self._acknowledged = set(self._shown)  # not what was evicted and is back
        text = f"{len(visible)} blocks, {len(self._shown)} of them were found before"
        self._record.tell("disk", text)

    def _visible(self, index: DiskIndex) -> set[Name]:
        """All blocks that a lookup could find."""
        table = index.store.blocks.table
        return {
            (owner.name, key)
            for owner in index.store.tenants
            for key, row in owner.index.items()
            if table.state[row] == READY
        }

    def _watch_index(self, index: DiskIndex) -> None:
        """Notes what is planned and what is acknowledged."""
        plan_write, wrote = index.plan_write, index.wrote

        def planned(*asked: Any, **more: Any) -> Any:
            plan = plan_write(*asked, **more)
            if plan is not None:
                names = _names(index.store, self._written(index, plan.number))
                self._cleared -= names
                self._clearing -= names
            return plan

        def done(number: int, now_ms: int) -> None:
            rows = self._written(index, number)
            names = _names(index.store, rows)
            wrote(number, now_ms)
            self._acknowledged |= names & self._visible(index)

        index.plan_write, index.wrote = planned, done  # type: ignore[method-assign]

    def _written(self, index: DiskIndex, number: int) -> Iterable[int]:
        write = index.store.sessions[_SESSION].writes.get(number)
        return [] if write is None else np.asarray(write.rows).tolist()

    def _watch_memory(self, store: Store) -> None:
        """What was cleared does not come up."""
        complete_store = store.complete_store

        def completed(session: int, number: int, *asked: Any, **more: Any) -> Any:
            write = store.sessions[session].writes.get(number)
            rows = np.asarray(write.rows).tolist() if session == MOVING and write else []
            done = complete_store(session, number, *asked, **more)
            up = _names(store, [row for row in rows if _is_found(store, row)])
            if back := up & (self._cleared | self._clearing):
                text = f"{len(back)} cleared blocks came up from the disk"
                self._simulation.fail(Violation("broken_rules", text))
            return done

        store.complete_store = completed  # type: ignore[method-assign, assignment]


def _names(store: Store, rows: Iterable[int]) -> set[Name]:
    table, owners = store.blocks.table, store.tenants.by_number
    return {(owners[table.tenant[row]].name, table.keys[row]) for row in rows}


def _is_found(store: Store, row: int) -> bool:
    """Whether a lookup could find it. A block that is cleared while it is read may still become
    READY, but is in no index any more."""
    table = store.blocks.table
    if table.state[row] != READY:
        return False
    return store.tenants.by_number[table.tenant[row]].index.get(table.keys[row]) == row


def _half(views: list[memoryview]) -> list[memoryview]:
    """The first half of their bytes."""
    left = sum(view.nbytes for view in views) // 2
    found = []
    for view in views:
        found.append(view[: min(left, view.nbytes)])
        left -= found[-1].nbytes
    return [view for view in found if view.nbytes]
