"""An engine that takes its tensors' memory away for a while: no copy touches that memory, and what
was stored is found again in the memory that it has afterwards."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvkeep.client.copier import HostCopier, HostStoreCopy
from kvkeep.client.options import ClientOptions
from kvkeep.client.requests import Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.client.worker import WorkerAdapter
from kvkeep.errors import RequestError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m

BLOCKS, NBYTES = 16, 640
_models = itertools.count()


class GatedCopier(HostCopier):
    """Copies wait before they touch engine memory, while the gate is shut; `touched` counts those
    that did."""

    def __init__(self, pieces: Sequence[BlockRuns]) -> None:
        super().__init__(pieces)
        self.pieces = pieces
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()  # a copy is at the gate
        self.touched = 0

    def relocate(self, pieces: Sequence[BlockRuns]) -> None:
        super().relocate(pieces)
        self.pieces = pieces

    def pass_gate(self) -> None:
        self.arrived.set()
        assert self.gate.wait(30)

    def begin_store(self, piece: int, *, verify: bool, ready: Any) -> Any:
        self.pass_gate()
        return GatedReading(self, self._pieces[piece], verify)

    def begin_load(self, *given: Any, **more: Any) -> Any:
        self.pass_gate()
        self.touched += 1
        return super().begin_load(*given, **more)


class GatedReading(HostStoreCopy):
    def __init__(self, copier: GatedCopier, runs: BlockRuns, verify: bool) -> None:
        super().__init__(runs, verify)
        self._copier = copier

    def gather(self, *given: Any) -> None:
        self._copier.touched += 1
        super().gather(*given)


class Engine:
    """A worker with its memory."""

    def __init__(self, server: ServerProcess, **options: Any) -> None:
        self.memory = some_memory(seed=7)
        self.name = f"wu{next(_models)}"  # a model that no other test uses
        identity = ModelIdentity(
            model=self.name, revision="1", kv_dtype="any", block_tokens=4, content="l"
        )
        options = {"lookup_deadline_ms": 5_000} | options
        self.worker = WorkerAdapter(
            BlockShape(identity, (NBYTES,)),
            ParallelStrategy.of(),
            ClientOptions(address=server.address, **options),
        )
        self.worker.make_copier = self._make_copier  # type: ignore[method-assign]
        self.worker.register_kv_caches([self.memory])
        assert eventually(lambda: self.worker.connection.up), self.worker.connection.refusal

    def _make_copier(self, runs: Sequence[BlockRuns]) -> GatedCopier:
        self.copier = GatedCopier(runs)
        return self.copier

    def keys(self, count: int) -> bytes:
        """Keys here are no hashes, so the model must be in them."""
        return b"".join(f"{self.name}.{at}".encode().rjust(16, b".") for at in range(count))

    def store(self, ids: Sequence[int], job: str = "s") -> None:
        self.worker.store(job, StoreRequest("default", b"", self.keys(len(ids)), np.array(ids)))

    def finished(self) -> Finished:
        """What ends next."""
        seen = [Finished()]

        def something() -> bool:
            seen[0] = self.worker.poll()
            return bool(seen[0].stored or seen[0].loads)

        assert eventually(something)
        return seen[0]

    def looked_up(self, ids: Sequence[int]) -> LoadRequest:
        connection = self.worker.connection
        assert connection.layout is not None
        call = connection.call(
            m.Lookup("default", connection.layout.layout, self.keys(len(ids))), 5_000
        )
        found = connection.wait(call)
        assert isinstance(found, m.Found), call.failure
        slots, checksums = (
            np.frombuffer(found.slots, "<i8"),
            np.frombuffer(found.checksums, "<u8").reshape(-1, 1),
        )
        return LoadRequest(
            "default",
            self.keys(len(ids)),
            0,
            np.array(ids[: len(checksums)]),
            call.epoch,
            slots,
            checksums,
        )

    def in_the_background(self) -> threading.Thread:
        """Unregisters while copies wait at the gate."""
        thread = threading.Thread(target=self.worker.unregister_kv_caches, daemon=True)
        thread.start()
        assert eventually(lambda: not self.worker.is_registered)
        return thread


def some_memory(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (BLOCKS, NBYTES), dtype=np.uint8)


@pytest.fixture(params=[True, False], ids=["shared memory", "network"])
def engine(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(server, shared_memory=request.param)
    yield made
    made.copier.gate.set()
    made.worker.close()


def test_what_was_stored_is_loaded_into_the_memory_that_comes_after(engine: Engine) -> None:
    stored = engine.memory[:4].copy()
    engine.store([0, 1, 2, 3])
    assert engine.finished().stored["s"] == 4
    engine.worker.unregister_kv_caches()
    engine.memory[:] = 0  # the old memory is somebody else's from now on
    old, engine.memory = engine.memory, some_memory(seed=8)
    engine.worker.register_kv_caches([engine.memory])
    engine.worker.load("l", engine.looked_up([8, 9, 10, 11]))
    assert not engine.finished().failed_blocks
    assert (engine.memory[8:12] == stored).all() and not old.any()
    before = engine.memory[:8].copy()
    engine.store(
        [4, 5, 6, 7, 0, 1, 2, 3], "again"
    )  # the same keys, and four new ones: these are read from here
    assert engine.finished().stored["again"] == 4
    engine.worker.load("all", engine.looked_up(range(8)))
    assert not engine.finished().failed_blocks
    assert (engine.memory[:4] == stored).all() and (engine.memory[4:8] == before[:4]).all()


def test_a_store_under_way_reads_nothing_more(engine: Engine) -> None:
    engine.copier.gate.clear()
    engine.store([0, 1, 2, 3])
    assert engine.copier.arrived.wait(30)
    thread = engine.in_the_background()
    assert thread.is_alive(), "a copy is under way"
    engine.copier.gate.set()
    thread.join(30)
    assert not thread.is_alive()
    assert engine.copier.touched == 0
    finished = engine.finished()
    assert (finished.stored, finished.incomplete) == ({"s": 0}, ["s"])
    assert engine.looked_up([0, 1, 2, 3]).blocks == 0, "the server has none of it"


def test_a_load_under_way_ends_before_the_memory_goes(engine: Engine) -> None:
    stored = engine.memory[:4].copy()
    engine.store([0, 1, 2, 3])
    assert engine.finished().stored["s"] == 4
    load = engine.looked_up([8, 9, 10, 11])
    engine.copier.arrived.clear()
    engine.copier.gate.clear()
    engine.worker.load("l", load)
    assert engine.copier.arrived.wait(30)
    thread = engine.in_the_background()
    time.sleep(0.05)  # it may only wait: whether it does is seen at the end
    assert thread.is_alive(), "the load writes into this memory"
    engine.copier.gate.set()
    thread.join(30)
    assert not thread.is_alive()
    assert (engine.memory[8:12] == stored).all(), "it was over when the memory was free to go"
    assert list(engine.finished().loads) == ["l"]


def test_jobs_that_wait_end_undone(engine: Engine) -> None:
    engine.store([0, 1, 2, 3])
    assert engine.finished().stored["s"] == 4
    load = engine.looked_up([8, 9, 10, 11])
    engine.copier.arrived.clear()
    engine.copier.gate.clear()
    engine.worker.load(0, load)
    assert engine.copier.arrived.wait(30)
    for job in range(1, 4):
        engine.worker.load(job, load)
    thread = engine.in_the_background()
    engine.copier.gate.set()
    thread.join(30)
    ended = engine.finished()
    assert sorted(ended.loads) == list(range(4)), "each is told once"
    assert [sorted(ended.loads[job].failed) for job in range(4)] == [[], *[[8, 9, 10, 11]] * 3]


def test_while_there_is_no_memory_every_job_ends_at_once_and_undone(engine: Engine) -> None:
    engine.store([0, 1])
    assert engine.finished().stored["s"] == 2
    load = engine.looked_up([8, 9])
    engine.worker.unregister_kv_caches()
    touched = engine.copier.touched
    engine.store([2, 3], "t")
    engine.worker.load("l", load)
    ended = engine.worker.poll()
    assert (ended.stored, ended.incomplete) == ({"t": 0}, ["t"])
    assert ended.loads == {"l": LoadOutcome(frozenset({8, 9}))}
    assert engine.worker.load_now(load).failed == {8, 9}
    assert not engine.worker.load_ahead("o", load.epoch, load.slots)
    engine.worker.withdraw([1, 2])
    engine.worker.withdraw(None)
    engine.worker.set_engine_busy(True)
    assert engine.worker.connection.counters.failures["unregistered"] == 3
    assert engine.copier.touched == touched and not engine.copier.pieces
    assert engine.worker.connection.up, "the session goes on"


def test_it_can_be_asked_twice_and_before_there_is_any_memory(
    engine: Engine, server: ServerProcess
) -> None:
    engine.worker.unregister_kv_caches()
    engine.worker.unregister_kv_caches()
    engine.worker.register_kv_caches([engine.memory])
    with pytest.raises(RequestError, match="registered already"):
        engine.worker.register_kv_caches([engine.memory])
    shape, options = engine.worker.shape, ClientOptions(address=server.address)
    fresh = WorkerAdapter(shape, ParallelStrategy.of(), options)
    fresh.unregister_kv_caches()
    fresh.register_kv_caches([engine.memory])
    fresh.close()


@pytest.mark.parametrize(
    ("memory", "word"),
    [
        (np.zeros((BLOCKS, NBYTES // 2), dtype=np.uint8), "bytes a block"),
        (np.zeros((BLOCKS, NBYTES // 4), dtype=np.float32), "do not lie in memory as they did"),
    ],
)
def test_other_tensors_are_refused_and_there_is_still_no_memory(
    engine: Engine, memory: Any, word: str
) -> None:
    engine.worker.unregister_kv_caches()
    with pytest.raises(RequestError, match=word):
        engine.worker.register_kv_caches([memory])
    engine.store([0])
    assert engine.worker.poll().incomplete == ["s"]
    engine.worker.register_kv_caches([engine.memory])
    engine.store([0], "t")
    assert engine.finished().stored == {"t": 1}


def test_it_can_be_closed_without_its_memory(engine: Engine) -> None:
    engine.worker.unregister_kv_caches()
    engine.worker.close()
    with pytest.raises(RequestError, match="closed"):
        engine.worker.register_kv_caches([engine.memory])
    engine.store([0])
    assert engine.worker.poll().incomplete == ["s"]
