"""A server in this process on either data plane, on a network in simulated time; and a real one for
what needs it."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvkeep.client.cache import Cache
from kvkeep.client.connection import Connection
from kvkeep.client.copier import HostCopier, HostStoreCopy, row_addresses
from kvkeep.client.loads import Load
from kvkeep.client.options import ClientOptions
from kvkeep.client.requests import LoadRequest, StoreRequest
from kvkeep.client.stores import SourceBlocks, Store, source_blocks
from kvkeep.client.transfer import Transfer as BlockingTransfer
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape
from kvkeep.server.service import Service
from kvkeep.store.plans import Limits
from kvkeep.testing.process import ServerProcess
from kvkeep.tiers.memory import Pool
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, decode_request, encode
from kvkeep_lab.simulation.server import SimulatedServer
from kvkeep_lab.simulation.store_integrity import check_integrity
from kvkeep_lab.simulation.wire import Faults, SimulatedNetwork, SimulatedTransport

SLOT = 4096
IDENTITY = ModelIdentity(model="sim", revision="1", kv_dtype="|u1", block_tokens=4, content="sim")
PASS = object()  # an `instead` that answers this lets the service answer

Instead = Callable[[Header, m.Request], Any]


class Transfer(BlockingTransfer):
    """What it moves, in numbers; and the steps of it."""

    def store(self, request: StoreRequest) -> int:  # type: ignore[override]
        return self.offer(request)[0]

    def offer(self, request: StoreRequest, sources: SourceBlocks | None = None) -> tuple[int, bool]:
        """How many blocks were written, and whether the server has all of them."""
        return ended(super().store(request, sources))

    def sources(self, requests: Sequence[StoreRequest]) -> list[SourceBlocks]:
        return source_blocks(self, requests)

    def storing(self, request: StoreRequest, sources: SourceBlocks) -> Store:
        return Store(self, request, sources)

    def load_all(self, requests: Sequence[LoadRequest], *more: Any) -> list[NDArray[np.bool_]]:
        return Load(self, requests, *more).finish()

    def loading(self, requests: Sequence[LoadRequest], *more: Any) -> Load:
        return Load(self, requests, *more)


def ended(store: Store) -> tuple[int, bool]:
    store.finish()
    return store.written, store.is_complete


class Recorder:
    """Stands between the network and a service: remembers what came, and answers in its place if
    told to."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.came: list[m.Request] = []
        self.instead: Instead | None = None

    def handle(self, frames: Sequence[bytes], now_ms: int) -> list[Any] | None:
        header = decode_header(frames)
        request = decode_request(header, frames, 1 << 30)
        self.came.append(request)
        answer = self.instead(header, request) if self.instead else PASS
        if answer is PASS:
            return self.service.handle(frames, now_ms)
        return (
            encode(Header(header.session, header.number), answer)
            if isinstance(answer, m.Message)
            else answer
        )

    def count(self, kind: type) -> int:
        return sum(isinstance(request, kind) for request in self.came)


class Simulation:
    """One server, any number of clients, and time that passes only when somebody waits."""

    def __init__(
        self,
        directory: Path,
        *,
        shared_memory: bool,
        slots: int,
        limits: Limits | None,
        frame_bytes: int = 1 << 20,
    ) -> None:
        self.network = SimulatedNetwork(1)
        self._directory = directory
        self._shared_memory = shared_memory
        self._slots = slots
        self._limits = limits or Limits()
        self._frame_bytes = frame_bytes
        self.pools: list[Pool] = []
        self.transports: list[SimulatedTransport] = []
        self.connections: list[Connection] = []
        self.replace_server(epoch=1)

    def replace_server(self, epoch: int) -> None:
        """A new server process takes the place of the one before, with a pool of the same name."""
        limits, frame_bytes = self._limits, self._frame_bytes
        self.server = SimulatedServer(
            self._slots * SLOT, SLOT, epoch=epoch, limits=limits, frame_bytes=frame_bytes
        )
        if self._shared_memory:
            while self.pools:
                self.pools.pop().close()
            pool = Pool(self._directory, "sim", self._slots * SLOT, SLOT, epoch)
            pool.fill_next()
            self.pools.append(pool)
            wire_limits = m.WireLimits(
                frame_bytes,
                limits.blocks_per_request,
                limits.leases_per_session,
                limits.writing_blocks_per_session,
            )
            place = m.PoolPlace(str(pool.directory), "", pool.segment_bytes, pool.pool_bytes)
            self.server.service = Service(
                self.server.store, pool.segments, place, wire_limits, epoch, pool.watch
            )
        self.server.service.verify = False  # so that each client's own option holds
        self.recorder = Recorder(self.server.service)
        self.network.serve(self.recorder)

    @property
    def store(self) -> Any:
        return self.server.store

    def connection(
        self, *shard_bytes: int, identity: ModelIdentity = IDENTITY, **options: Any
    ) -> Connection:
        options = {
            "lookup_deadline_ms": 200,
            "store_deadline_ms": 300,
            "handshake_deadline_ms": 200,
        } | options
        options = {
            "ping_interval_ms": 500,
            "reconnect_interval_ms": 100,
            "address": "tcp://cache:5555",
        } | options
        shape = BlockShape(identity, shard_bytes or (1000,))
        self.transports.append(self.network.transport())
        made = Connection(shape, ClientOptions(**options), self.transports[-1], self.network.clock)
        self.connections.append(made)
        return made

    def connected(self, *shard_bytes: int, **options: Any) -> Connection:
        connection = self.connection(*shard_bytes, **options)
        assert connection.wait_until_up(2_000)
        return connection

    def cache(self, **options: Any) -> Cache:
        return Cache(self.connected(1000, **options), IDENTITY, (1000,), np.dtype(np.uint8))

    def run(self, for_ms: int, step_ms: int = 10) -> None:
        """Lets time pass, with every client polling."""
        for _ in range(for_ms // step_ms):
            self.network.run_until(self.network.clock.now_ms + step_ms)
            for connection in self.connections:
                connection.poll()

    def lose_everything(self) -> None:
        self.network.faults = Faults(loss=1.0)

    def held(self) -> list[tuple[int, int]]:
        """Leases and writes that each session holds."""
        return [
            (len(session.leases), len(session.writes)) for session in self.store.sessions.values()
        ]

    def close(self) -> None:
        self.network.faults = Faults()
        for connection in self.connections:
            connection.close()
        check_integrity(self.store)
        while self.pools:
            self.pools.pop().close()


@pytest.fixture
def simulation(tmp_path: Path) -> Iterator[Callable[..., Simulation]]:
    """Makes Simulations. Whatever a test did, their stores are sound at the end."""
    made: list[Simulation] = []

    def make(
        *, shared_memory: bool = False, slots: int = 64, limits: Limits | None = None, **more: Any
    ) -> Simulation:
        made.append(
            Simulation(tmp_path, shared_memory=shared_memory, slots=slots, limits=limits, **more)
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def sim(simulation: Callable[..., Simulation]) -> Simulation:
    return simulation()


class LateCopier(HostCopier):
    """As on a GPU: blocks arrive, in slots or in the engine, when somebody waits for them.
    Remembers what it was asked for, and by which thread; `breaks` is the call, by its name and
    number, that raises."""

    def __init__(self, pieces: Sequence[BlockRuns], breaks: str = "") -> None:
        super().__init__(pieces)
        self.calls: list[tuple[str, str]] = []
        self.marks: list[object] = []
        self.waited_for: list[list[object]] = []  # by each reading and each scatter
        self.readings: list[LateStoreCopy] = []
        self.scatterings: list[LateScattering] = []
        self.breaks = breaks
        self.gave_way: list[bool] = []
        self.must_wait = lambda: False

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def note(self, name: str) -> None:
        self.calls.append((name, threading.current_thread().name))
        if name == self.breaks:
            raise RuntimeError(f"{name} broke")

    def mark(self) -> Any:
        self.note("mark")
        self.marks.append(object())
        return self.marks[-1]

    def fence_reads(self) -> None:
        self.note("fence_reads")

    def set_engine_busy(self, busy: bool) -> None:
        self.gave_way.append(busy)

    def enter(self) -> None:
        self.note("enter")

    def wait_for(self, mark: object) -> bool:
        self.note("wait for")
        return self.must_wait()

    def evacuate(self, piece: int, block_ids: Any) -> Any:
        self.note(f"set aside {block_ids.tolist()}")
        return super().evacuate(piece, block_ids)

    def begin_store(self, piece: int, *, verify: bool, ready: Any) -> Any:
        self.waited_for.append([ready])
        self.readings.append(LateStoreCopy(self, len(self.readings), self._pieces[piece], verify))
        return self.readings[-1]

    def begin_load(
        self,
        piece: int,
        block_ids: Any,
        addresses: Any,
        expected: Any,
        ready: Sequence[Any] = (),
        ahead: Any = None,
    ) -> Any:
        self.waited_for.append(list(ready))
        self.scatterings.append(
            LateScattering(
                self,
                len(self.scatterings),
                lambda: HostCopier.begin_load(self, piece, block_ids, addresses, expected),
            )
        )
        return self.scatterings[-1]


class LateScattering:
    ready_s = 0.0

    def __init__(self, copier: LateCopier, number: int, arrive: Callable[[], Any]) -> None:
        copier.note(f"scatter {number}")
        self.copier = copier
        self.number = number
        self._arrive = arrive
        self._arrived: Any = None

    @property
    def on_the_way(self) -> bool:
        return self._arrived is None

    def good(self) -> Any:
        self.copier.note(f"good {self.number}")
        self.close()
        return self._arrived.good()

    def close(self) -> None:
        if self._arrived is None:
            self._arrived = self._arrive()


class LateStoreCopy(HostStoreCopy):
    def __init__(self, copier: LateCopier, number: int, runs: BlockRuns, verify: bool) -> None:
        super().__init__(runs, verify)
        self.copier = copier
        self.number = number
        self.on_the_way: list[tuple[Any, int]] = []  # what goes where

    def gather(self, block_ids: Any, addresses: Any) -> None:
        self.copier.note(f"gather {self.number}")
        rows = np.empty((len(block_ids), self._runs.nbytes), dtype=np.uint8)
        super().gather(block_ids, row_addresses(rows))
        self.on_the_way += list(zip(rows, addresses.tolist(), strict=True))

    def put(self, saved: Any, address: int) -> None:
        row = np.empty(saved.nbytes, dtype=np.uint8)
        super().put(saved, row.ctypes.data)
        self.on_the_way.append((row, address))

    def sums(self) -> Any:
        self.copier.note(f"sums {self.number}")
        self._arrive()
        return super().sums()

    def close(self) -> None:
        self.copier.note(f"close {self.number}")
        self._arrive()

    def _arrive(self) -> None:
        while self.on_the_way:
            row, address = self.on_the_way.pop()
            ctypes.memmove(address, row.ctypes.data, row.nbytes)


@pytest.fixture
def late_copier() -> type[LateCopier]:
    return LateCopier


@pytest.fixture
def passing() -> object:
    """What an `instead` answers to let the service answer."""
    return PASS


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A real server for a whole module: tests use models or salts of their own."""
    with ServerProcess(
        "--pool-size", "16MiB", "--slab-size", "256KiB", "--session-check-interval", "50ms"
    ) as running:
        yield running


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.node.name)
