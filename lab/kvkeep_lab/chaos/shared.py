"""The shared tier of a chaos run: the shipped movement and tier's process of each host, over one
simulated service.

    Movement ──► Shared ──► SharedMover ──► the shipped SharedProcess, with all its threads
                                            ──► CheckedTier ──► ServiceMedium ──► SharedService

A clear is followed from the operator's request to the answer: nothing that an engine began to store
before may come from the service afterwards, on any host, nor be in the memory of a host that the
answer did not name. Hosts that it could not know are the exception (`_unknown_hosts`)."""

from __future__ import annotations

import itertools
import os
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvkeep.kv.keys import KEY_BYTES
from kvkeep.server.lower_tier import LowerTier, Promotion, ReadJob, WriteJob
from kvkeep.server.movement import INSISTS_MS, Movement
from kvkeep.server.shared import RecentKeys, Shared
from kvkeep.server.startup import _FIRST_MOVER, SharedFiles
from kvkeep.store.store import MOVING, Store
from kvkeep.store.table import READY
from kvkeep.tiers.checked_tier import CheckedTier
from kvkeep.tiers.memory import Pool
from kvkeep.tiers.mover import Fetch, Job, Result, Share
from kvkeep.tiers.mover_process import MappedPool
from kvkeep.tiers.opening import SharedPlace
from kvkeep.tiers.parcels import place_of
from kvkeep.tiers.shared_process import SharedProcess, _Moving
from kvkeep.tiers.summaries import HOLDS_S, Shown
from kvkeep.wire.messages import PoolPlace
from kvkeep.wire.pool_files import Watch
from kvkeep_lab.chaos.mover import ChaosMover
from kvkeep_lab.chaos.record import Record, Violation
from kvkeep_lab.chaos.shared_service import CONTROL, Origin, ServiceMedium, SharedService
from kvkeep_lab.simulation.simulation import Process, Simulation

_TODAY_MS = 1_700_000_000_000
_UNKNOWN_US = 1 << 62  # of what is no block, or was stored by a server that ended meanwhile
_FAULT = "an internal error; the server's log has it"
_REMEMBERED = 1 << 12
_ASK_CLEAR_US = 50_000  # how often an operator looks whether a clear is complete
_CLEAR_WITHIN_US = 15_000_000  # then the operator is told that the outcome is unknown
_PUBLISHED_US = int(HOLDS_S * 1e6) + 1_500_000  # a map is read once a second


class _Process(SharedProcess):
    """Its threads are those of the simulation. Asks who holds a slot before and after it copies."""

    before_copy: Callable[[int, bool], None]

    def _move(self, moving: _Moving, piece: slice) -> None:
        self._check(moving, piece)
        super()._move(moving, piece)
        self._check(moving, piece)

    def _check(self, moving: _Moving, piece: slice) -> None:
        if isinstance(moving.job, Fetch | Share):
            for slot in moving.slots[piece].tolist():
                self.before_copy(slot, isinstance(moving.job, Fetch))


class _Socket:
    """The process's end of the socket pair."""

    def __init__(self, simulation: Simulation, take: Callable[[Result], None]) -> None:
        self._simulation = simulation
        self._take = take

    def sendall(self, frame: bytes) -> None:
        result = msgspec.msgpack.decode(frame[4:], type=Result)
        if result.error and not result.error.startswith("TierError"):
            text = f"the process of the shared tier fails inside: {result.error}"
            self._simulation.fail(Violation("broken_rules", text))
        self._take(result)


class SharedMover(ChaosMover):
    """With the process of a shared tier."""

    def __init__(
        self,
        simulation: Simulation,
        name: str,
        pool: MappedPool,
        tier: CheckedTier,
        shown: Shown,
        chance: random.Random,
    ) -> None:
        super().__init__(simulation, pool, chance)
        self._tier = tier
        self._shown = shown
        self._orders: deque[Job] = deque()
        self._process = Process(simulation, name)
        self._reader = self._process.begin(self._run)

    def _begin(self, job: Job) -> None:
        self._orders.append(job)
        self._simulation.wake(self._reader)

    def _end(self) -> None:
        self._process.kill()

    def _run(self) -> None:
        """The main thread of the process."""
        connected: Any = _Socket(self._simulation, self._take)
        worker = _Process(self._pool, self._tier, self._shown, connected)
        worker.before_copy = self.before_copy
        worker.start()
        while True:
            while self._orders:
                worker.take(self._orders.popleft())
            self._simulation.block()


@dataclass
class _Clear:
    """One clear, of a tenant or of all. `named`: hosts that the answer has named. `unknown`: those
    that it could not name."""

    tenant: str | None
    asked_us: int
    answered_us: int
    named: set[str]
    unknown: set[str]

    def covers(self, tenant: str, stored_us: int) -> bool:
        return self.tenant in (None, tenant) and stored_us < self.asked_us


class Clears:
    """The clears that operators were told are complete, on all hosts."""

    def __init__(self) -> None:
        self.complete: list[_Clear] = []
        self.hosts: list[ChaosShared] = []


class ChaosShared:
    """The tier of one host, over all lives of its server."""

    nbytes = 0  # on disks

    def __init__(
        self,
        host: int,
        service: SharedService,
        clears: Clears,
        record: Record,
        directory: Path,
        seed: int,
    ) -> None:
        self.movement: Movement | None = None
        self.promoted_blocks = self.written_blocks = 0  # in all lives
        self.hits = 0  # blocks that another host has written
        self.before_copy: Callable[[int, bool], None] = lambda slot, is_write: None
        self.after_result: Callable[[], None] = lambda: None
        self.medium = ServiceMedium(service, self._origin_of, self._has_read)
        self.name = f"host-{host}"
        self._host = host
        self.service = service
        self._simulation = service.simulation
        self._clears = clears
        clears.hosts.append(self)
        self._record = record
        self._kept = directory / "shared-tier.json"
        self._kept.write_bytes(msgspec.json.encode({"host": self.name, "carried_out": {}}))
        self._random = random.Random(f"shared tier {host} of {seed}")
        self._movers = itertools.count(1)
        self._stored_us: dict[bytes, int] = {}  # of blocks in memory, by key
        self._writing: dict[str, int] = {}  # likewise, of blocks on their way to the service
        self._read: dict[bytes, Origin] = {}  # what was read last under a key
        self._looked_up = ("", 0, b"")  # last: tenant, layout, keys

    @property
    def tier(self) -> Shared:
        assert self.movement is not None
        tier: Any = self.movement.tiers[0]
        return tier  # type: ignore[no-any-return]

    @property
    def is_settled(self) -> bool:
        """It is used, and no clear is under way."""
        return self.tier.state == "ok" and not self.tier.is_clearing

    @property
    def mover(self) -> SharedMover:
        mover: Any = self.tier.mover
        return mover  # type: ignore[no-any-return]

    def open(self, pool: Pool, store: Store, epoch: int) -> Movement:
        """For another server."""
        files = SharedFiles(SharedPlace("simulated"))
        numbers = itertools.count(_FIRST_MOVER)

        def make_mover() -> tuple[Any, Watch]:
            watch = pool.watch(next(numbers))
            place = PoolPlace(
                str(pool.directory), str(watch.path), pool.segment_bytes, pool.pool_bytes
            )
            mover = SharedMover(
                self._simulation,
                f"mover {self._host}.{next(self._movers)}",
                MappedPool(place, epoch),
                CheckedTier(self.medium),
                files.shown,
                self._random,
            )
            mover.before_copy = lambda slot, is_write: self.before_copy(slot, is_write)
            mover.after_result = lambda: self.after_result()
            return mover, watch

        tier = Shared("simulated service", 0, make_mover, self._kept, files.shown, lambda _: 1)
        tier._there = RecentKeys(_REMEMBERED)
        self._watch_tier(tier)
        self._watch_memory(store)
        self._store = store
        self.movement = Movement(store, [], [tier], self._wall_ms)
        self._watch_lookups(self.movement)
        return self.movement

    def turn(self, now_ms: int) -> None:
        """A turn of the loop."""
        assert self.movement is not None
        self.movement.turn(now_ms)
        if self.tier.set_aside == _FAULT:
            raise Violation("broken_rules", "moving blocks failed inside the server")

    def ask_again(self, now_ms: int) -> None:
        """What was looked up last, for a request that would wait long."""
        assert self.movement is not None
        tenant, layout, keys = self._looked_up
        self.movement.coming(0, tenant, layout, keys, 0, INSISTS_MS, now_ms, False)

    def clear(self, tenant: str | None) -> None:
        """An operator's, who waits for the answer."""
        assert self.movement is not None
        movement, asked_us = self.movement, self._simulation.now_us
        if tenant is None:
            movement.clear_all()
        else:
            movement.clear(tenant)

        def look() -> None:
            if self.movement is not movement:
                return  # the server is gone: nobody was told anything
            if not movement.is_clearing:
                named, now_us = set(movement.unreached), self._simulation.now_us
                unknown = self._unknown_hosts(asked_us)
                self._clears.complete.append(_Clear(tenant, asked_us, now_us, named, unknown))
                text = f"a clear is complete{f', except on {sorted(named)}' if named else ''}"
                self._record.tell(self.name, text)
                for host in self._clears.hosts:
                    host.check_memory()
            elif self._simulation.now_us < asked_us + _CLEAR_WITHIN_US:
                self._simulation.after(_ASK_CLEAR_US, look)

        self._simulation.after(_ASK_CLEAR_US, look)

    def check_memory(self) -> None:
        """No block is there that a clear was said to have removed."""
        if self.movement is None:
            return
        store = self._store
        for owner in store.tenants:
            for key, row in owner.index.items():
                if store.blocks.table.state[row] != READY:
                    continue
                for clear in self._clears.complete:
                    is_old = clear.covers(owner.name, self._stored_us.get(key, _UNKNOWN_US))
                    if is_old and self.name not in clear.named | clear.unknown:
                        text = f"a block cleared at {clear.asked_us} us is in memory of {self.name}"
                        raise Violation("broken_rules", text)

    def end(self) -> None:
        """The server's process is gone, and the mover with it."""
        if self.movement is None:
            return
        self.promoted_blocks += self.tier.counts.promoted_blocks
        self.written_blocks += self.tier.counts.written_blocks
        self.mover.close()
        os.close(self.tier._watch._descriptor)
        self.movement = None

    def stop(self, now_ms: int) -> None:
        """The server ends in order."""
        if self.movement is not None:
            movement, watch = self.movement, self.tier._watch
            movement.close(now_ms)
            watch._descriptor = os.open(os.devnull, os.O_RDONLY)  # `end` closes it
            self.end()

    def left(self) -> list[str]:
        """What movement holds although nothing moves. The log of clears is always read."""
        if self.movement is None:
            return []
        jobs = [
            job
            for job in self.tier.jobs.values()
            if isinstance(job, ReadJob) or (isinstance(job, WriteJob) and job.blocks)
        ]
        counts = {"jobs": len(jobs), "promotions": len(self.tier.promotions)}
        return [f"{count} {name}" for name, count in counts.items() if count]

    # -- inside

    def _unknown_hosts(self, since_us: int) -> set[str]:
        """Hosts that the service has not had in its list all the time, and that this one has never
        found there, as far as its server has noted for the next: a limit (decision 31)."""
        noted = msgspec.json.decode(self._kept.read_bytes()).get("hosts", {})
        known = self.service.listed(since_us).union(*noted.values())
        return {host.name for host in self._clears.hosts} - known

    def _wall_ms(self) -> int:
        return _TODAY_MS + self._simulation.now_us // 1000

    def _origin_of(self, name: str) -> Origin:
        return Origin(self._host, self._writing.get(name, _UNKNOWN_US))

    def _has_read(self, name: str, origin: Origin) -> None:
        if not name.startswith(CONTROL):
            self._read[_key_in(name)] = origin

    def _watch_lookups(self, movement: Movement) -> None:
        coming = movement.coming

        def looked_up(session: int, tenant: str, layout: int, keys: bytes, *more: Any) -> Any:
            self._looked_up = tenant, layout, keys
            return coming(session, tenant, layout, keys, *more)

        movement.coming = looked_up  # type: ignore[method-assign, assignment]

    def _watch_tier(self, tier: LowerTier) -> None:
        """Notes which blocks go to the service and arrive there, and what requests are told of
        them."""
        write_job, wrote, ask = tier.write_job, tier.wrote, tier.ask

        def writing(number: int, planned: Any, *more: Any) -> Job:
            for name in _names(planned.place, planned.keys):
                self._writing[name] = self._stored_us.get(_key_in(name), _UNKNOWN_US)
            return write_job(number, planned, *more)

        def written(planned: Any, result: Result) -> None:
            wrote(planned, result)
            if hasattr(planned, "keys"):
                for name, good in zip(
                    _names(planned.place, planned.keys), result.good, strict=True
                ):
                    if good and name in self.service.values:
                        self.service.acknowledged_us.setdefault(name, self._simulation.now_us)

        def asking(number: int, promotion: Promotion) -> Job | None:
            job: Any = ask(number, promotion)
            if job is not None and promotion.is_doubtful:
                (name, *_) = _names(job.place, job.keys)
                self._check_doubt(name)
            return job  # type: ignore[no-any-return]

        tier.write_job = writing  # type: ignore[method-assign, assignment]
        tier.wrote, tier.ask = written, asking  # type: ignore[method-assign]

    def _check_doubt(self, name: str) -> None:
        """The service has a block, and a host has been saying so for long."""
        since_us = self.service.acknowledged_us.get(name)
        if since_us is None or name not in self.service.values:
            return
        if self._simulation.now_us > since_us + _PUBLISHED_US:
            text = f"{self.name} is sure that the service lacks what was published long ago"
            raise Violation("broken_rules", text)

    def _watch_memory(self, store: Store) -> None:
        """Notes when blocks were stored, and that none comes up that was cleared before."""
        prepare_store, complete_store = store.prepare_store, store.complete_store
        began_us: dict[tuple[int, int], int] = {}

        def prepared(session: int, number: int, *asked: Any, **more: Any) -> Any:
            plan = prepare_store(session, number, *asked, **more)
            began_us[session, number] = self._simulation.now_us
            return plan

        def completed(session: int, number: int, *asked: Any, **more: Any) -> Any:
            write = store.sessions[session].writes.get(number)
            rows = np.asarray(write.rows).tolist() if write else []
            stored_us = began_us.pop((session, number), self._simulation.now_us)
            table = store.blocks.table
            for key in (table.keys[row] for row in rows):
                self._stored_us[key] = (
                    self._read[key].stored_us
                    if session == MOVING and key in self._read
                    else stored_us
                )
            done = complete_store(session, number, *asked, **more)
            for row in rows:
                if table.state[row] == READY and session == MOVING:
                    self._has_come_up(
                        store.tenants.by_number[table.tenant[row]].name, table.keys[row]
                    )
            return done

        store.prepare_store = prepared  # type: ignore[method-assign, assignment]
        store.complete_store = completed  # type: ignore[method-assign, assignment]

    def _has_come_up(self, tenant: str, key: bytes) -> None:
        origin = self._read[key]
        self.hits += origin.host != self._host
        for clear in self._clears.complete:
            if clear.covers(tenant, origin.stored_us) and self.name not in clear.unknown:
                ago_us = self._simulation.now_us - clear.answered_us
                text = (
                    f"a block came up on {self.name} that was cleared, {ago_us} us after the answer"
                )
                self._simulation.fail(Violation("broken_rules", text))


def _names(place: str, keys: bytes) -> Iterable[str]:
    place = place_of(place, 1)
    return [f"{place}/{keys[at : at + KEY_BYTES].hex()}" for at in range(0, len(keys), KEY_BYTES)]


def _key_in(name: str) -> bytes:
    return bytes.fromhex(name.rpartition("/")[2])
