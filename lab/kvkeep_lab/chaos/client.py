"""An engine process of a chaos run: the real engine, adapters, threads and copies, on a simulated
network.

The tier that is slow or fails is the pool's memory: a copy takes long, or raises. Copies go block
by block and in two halves each, so that others run, and processes stop, while a slot is half
written or half read."""

from __future__ import annotations

import ctypes
import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvkeep.client as client_code
from kvkeep.client.connection import Connection, Heartbeat
from kvkeep.client.copier import HostCopier, HostLoadCopy, HostStoreCopy, row_addresses
from kvkeep.client.options import ClientOptions
from kvkeep.client.requests import Finished
from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.client.shared_pool import SharedPool
from kvkeep.client.worker import WorkerAdapter
from kvkeep.connector.cost_model import LoadWhen
from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Request
from kvkeep.kv.copy import gather, scatter
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape
from kvkeep.wire.segments import segment_path
from kvkeep_lab.chaos.network import ADDRESS, ChaosNetwork
from kvkeep_lab.chaos.plan import Arrival, Cut, EngineItem
from kvkeep_lab.chaos.record import Record, Violation
from kvkeep_lab.simulation.oracle import WrongBytes
from kvkeep_lab.simulation.simulation import Process
from kvkeep_lab.simulation.threads import SimulatedThreads

_OPTIONS = ClientOptions(
    address=ADDRESS,
    client="chaos",
    lookup_deadline_ms=60,
    store_deadline_ms=120,
    handshake_deadline_ms=80,
    ping_interval_ms=200,
    reconnect_interval_ms=40,
)
# Where a thread may be stopped at any line: what the threads of a client share. (outage.py has a
# lock of its own.)
CLIENT_FILES = frozenset(
    str(file) for file in Path(client_code.__file__).parent.glob("*.py") if file.stem != "outage"
)
_SLOW_US = (5_000, 400_000)
_SHORTEST_STEP_US = 100
_IDLE_US = 5_000
_ASK_AGAIN_US = 1_000


@dataclass(frozen=True)
class Stop:
    """Something that happens in the middle of a copy, or of a store only. `action` returns for how
    many microseconds that copy stops, and nothing else does."""

    action: Callable[[ChaosClient], int]
    in_store: bool = False


class ChaosClient:
    """One engine, and whatever takes its place when it has crashed."""

    def __init__(
        self,
        number: int,
        item: EngineItem,
        cut: Cut,
        network: ChaosNetwork,
        record: Record,
        patience: str = "best_effort",
    ) -> None:
        self.patience = patience
        self.number = number
        self.item = item
        self.cut = cut
        self.record = record
        self.network = network
        self.random = random.Random(f"client {number}")
        self.turns: list[tuple[Arrival, Request]] = []  # of this life
        self.arriving: deque[Arrival] = deque()
        self.commands: deque[Callable[[Engine], object]] = deque()  # for the engine's own thread
        self.engine: Engine | None = None
        self.connections: list[ChaosConnection] = []
        self.shared_pools: list[SharedPool] = []
        self.dead_pools: list[SharedPool] = []
        self.memories: dict[int, int] = {}  # inode of the pool's memory behind each shared_pool
        self.closed = False
        self.asked_to_close = False
        self.before_copy: Callable[[ChaosClient, int, bool], None] = (
            lambda client, address, is_store: None
        )
        self.stops: deque[Stop] = deque()  # what is to happen in the middle of the next copies
        self._lives = 0
        self.start()

    # -- its life

    def start(self) -> None:
        self._lives += 1
        self.process = Process(self.network.simulation, f"engine {self.number}.{self._lives}")
        self.engine = None
        self.stops.clear()
        self.turns, self.connections = [], []
        self.process.begin(self._run)

    def start_if_dead(self) -> None:
        if self.process.dead:
            self.start()

    def crash(self) -> None:
        """The process is gone. What it held in the kernel is let go of: its locks."""
        self.record.tell(self.process.name, "crashes")
        self.process.kill()
        self.network.end_process(self.process)
        for shared_pool in self.shared_pools:
            if shared_pool._holders and shared_pool._descriptor >= 0:
                os.close(shared_pool._descriptor)
                # The threads that still end here must not act for a process that is gone.
                shared_pool._descriptor = -1
        self.dead_pools += self.shared_pools
        self.shared_pools = []

    def place_of(self, address: int) -> tuple[int, int] | None:
        """Which memory of a pool the address is in, and where. None: in none."""
        for shared_pool in self.shared_pools:
            base, segments = int(shared_pool.segments._bases[0]), shared_pool.segments
            if segments._arrays[0] is not None and 0 <= address - base < segments._pool_bytes:
                return self.memories[id(shared_pool)], address - base
        return None

    def clean_up(self) -> None:
        """When the run is over: nothing of it may stay in this process."""
        for shared_pool in (*self.shared_pools, *self.dead_pools):
            if shared_pool._holders and shared_pool._descriptor >= 0:
                os.close(shared_pool._descriptor)
                shared_pool._descriptor = -1
            shared_pool._close_server_lock()
            shared_pool.segments.close()
            shared_pool.segments.files.close()

    def pause(self, duration_us: int) -> None:
        process = self.process
        self.record.tell(process.name, f"is paused for {duration_us // 1000} ms")
        process.paused = True

        def go_on() -> None:
            process.paused = False

        self.network.simulation.after(duration_us, go_on)

    @property
    def is_idle(self) -> bool:
        engine = self.engine
        return engine is not None and not (self.arriving or engine.busy or engine.has_jobs)

    # -- its work

    def _run(self) -> None:
        simulation = self.network.simulation
        try:
            engine = Engine(self.cut.model(), self.cut.config, _Backend(self))
            self.engine = engine
            while not self.asked_to_close:
                while self.arriving:
                    self._add(engine, self.arriving.popleft())
                while self.commands:
                    self.commands.popleft()(engine)
                if engine.busy or engine.has_jobs:
                    engine.step()
                    engine.check_integrity()
                    simulation.sleep(
                        self.random.randint(_SHORTEST_STEP_US, self.item.longest_step_us)
                    )
                else:
                    simulation.sleep(_IDLE_US)
            engine.close()
            self.closed = True
        except WrongBytes as error:
            raise Violation("wrong_bytes", str(error)) from error
        except Exception as error:  # guard: raised again as what it is, a finding
            raise Violation(
                "engine_errors", f"{self.process.name}: {type(error).__name__}: {error}"
            ) from error

    def _add(self, engine: Engine, arrival: Arrival) -> None:
        request = engine.add(list(arrival.tokens), arrival.sampling, salt=arrival.salt)
        self.turns.append((arrival, request))


class ChaosConnection(Connection):
    """Tells its client which locks it takes: a crash lets go of them."""

    client: ChaosClient

    @property
    def shared_pool(self) -> SharedPool | None:
        return self._taken

    @shared_pool.setter
    def shared_pool(self, shared_pool: SharedPool | None) -> None:
        self._taken = shared_pool
        if shared_pool is not None:
            self.client.shared_pools.append(shared_pool)
            self.client.memories[id(shared_pool)] = os.stat(
                segment_path(shared_pool.segments.files.path, 0)
            ).st_ino

    def __del__(self) -> None:
        """Nothing: a process that was killed says no more, and when that is noticed is no matter of
        the seed."""


class _Backend:
    """The engine's way to the server."""

    load_when: LoadWhen = "always"
    tp_shards: int | None = None
    tracing = False

    def __init__(self, client: ChaosClient) -> None:
        self._client = client
        self._options = replace(
            _OPTIONS, shared_memory=client.item.shared_memory, tier_patience=client.patience
        )
        self._threads = SimulatedThreads(client.process)

    def lookup_side(self, shape: BlockShape) -> SchedulerAdapter:
        adapter = SchedulerAdapter(shape, connection=self._connection(shape))
        Heartbeat(self._threads).add(adapter.connection)
        return adapter

    def transfer_side(self, shape: BlockShape, strategy: ParallelStrategy) -> ChaosWorker:
        adapter = ChaosWorker(shape, strategy, connection=self._connection(shape))
        adapter.client = self._client
        if self._client.item.kept:
            Heartbeat(self._threads).add(adapter.connection)
        return adapter

    def connect(self) -> None:
        for connection in self._client.connections:
            connection.wait_until_up(100)

    def close(self) -> None:
        """The server stays."""

    def _connection(self, shape: BlockShape) -> ChaosConnection:
        client = self._client
        transport = client.network.transport(client.process)
        connection = ChaosConnection(
            shape, self._options, transport, client.process.now_ms, self._threads
        )
        connection.client = client
        client.connections.append(connection)
        return connection


class ChaosWorker(WorkerAdapter):
    """Copies with a ChaosCopier."""

    client: ChaosClient

    def make_copier(self, runs: Sequence[BlockRuns]) -> ChaosCopier:
        return ChaosCopier(runs, self.client)

    def poll(self) -> Finished:
        if self.client.cut.config.sync_loads:  # such an engine does nothing but ask, over and over
            self.client.network.simulation.sleep(_ASK_AGAIN_US)
        return super().poll()


class ChaosCopier(HostCopier):
    """Copies that others see the middle of."""

    def __init__(self, pieces: Sequence[BlockRuns], client: ChaosClient) -> None:
        super().__init__(pieces)
        self._client = client

    def begin_store(self, piece: int, *, verify: bool, ready: Any) -> ChaosStoreCopy:
        return ChaosStoreCopy(self._pieces[piece], verify, self)

    def begin_load(
        self,
        piece: int,
        block_ids: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        expected: NDArray[np.uint64] | None,
        ready: Sequence[Any] = (),
        ahead: Any = None,
    ) -> HostLoadCopy:
        runs = self._pieces[piece]
        good = np.zeros(len(block_ids), dtype=np.bool_)
        row = np.empty((1, runs.nbytes), dtype=np.uint8)
        for at, address in enumerate(addresses.tolist()):
            self.move(int(row.ctypes.data), address, runs.nbytes, is_store=False)
            sums = None if expected is None else expected[at : at + 1]
            good[at] = scatter(runs, block_ids[at : at + 1], row_addresses(row), sums)[0]
        return HostLoadCopy(good)

    def move(self, to: int, source: int, nbytes: int, *, is_store: bool) -> None:
        """Half of it, whatever happens then, and the other half."""
        half = self._client.random.randrange(nbytes)
        for start, stop in ((0, half), (half, nbytes)):
            self._client.before_copy(self._client, to if is_store else source, is_store)
            ctypes.memmove(to + start, source + start, stop - start)
            if start == 0:
                self._in_the_middle(is_store)

    def _in_the_middle(self, is_store: bool) -> None:
        client, network = self._client, self._client.network
        if client.stops and (is_store or not client.stops[0].in_store):
            network.simulation.sleep(client.stops.popleft().action(client))
        if client.random.random() < network.rates.get("slow_tier", 0.0):
            client.record.faults["slow_tier"] += 1
            network.simulation.sleep(client.random.randint(*_SLOW_US))
        if client.random.random() < network.rates.get("failing_tier", 0.0):
            client.record.faults["failing_tier"] += 1
            raise OSError("the simulated tier fails")
        network.simulation.step()


class ChaosStoreCopy(HostStoreCopy):
    """Reads the engine's blocks one by one, when their turn has come."""

    def __init__(self, runs: BlockRuns, verify: bool, copier: ChaosCopier) -> None:
        super().__init__(runs, verify)
        self._copier = copier

    def gather(self, block_ids: NDArray[np.int64], addresses: NDArray[np.uint64]) -> None:
        row = np.empty((1, self._runs.nbytes), dtype=np.uint8)
        for at, address in enumerate(addresses.tolist()):
            sums = gather(
                self._runs, block_ids[at : at + 1], row_addresses(row), verify=self._verify
            )
            self._sums.append(np.zeros(1, dtype=np.uint64) if sums is None else sums)
            self._copier.move(address, int(row.ctypes.data), self._runs.nbytes, is_store=True)
