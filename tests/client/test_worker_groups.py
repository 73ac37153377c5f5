"""A worker whose engine's blocks come in pieces, and one whose engine needs its blocks back:
against a real server."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvkeep.client import stores as module
from kvkeep.client import worker as worker_module
from kvkeep.client.options import ClientOptions
from kvkeep.client.rank_memory import GroupMemory, physical_fingerprint
from kvkeep.client.requests import NO_BLOCK, Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.client.stores import SourceBlocks
from kvkeep.client.worker import WorkerAdapter
from kvkeep.errors import RequestError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m

BLOCKS = 16
SIZES = (640, 320)
LONG_MS = 120_000  # longer than any test: what waits for a paused server waits until it goes on
STORED = [[0, 1, 2, 3], [4, 5, 6, 7]]
TARGETS = [[8, 9, 10, 11], [12, 13, 14, 15]]
_models = itertools.count()


def shape_of(sizes: tuple[int, ...], pieces: int = 1, model: str = "") -> BlockShape:
    """Of a model that no other test uses."""
    name = model or f"wp{next(_models)}"
    fields: dict[str, Any] = {
        "model": name,
        "revision": "1",
        "kv_dtype": "any",
        "block_tokens": 4,
        "content": "l",
    }
    return BlockShape(ModelIdentity(**fields), sizes, pieces)


def memories(sizes: tuple[int, ...] = SIZES, blocks: int = BLOCKS) -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 128, (blocks, nbytes), dtype=np.uint8) for nbytes in sizes]


def layout_of(memory: list[Any]) -> list[GroupMemory]:
    """All but the first may be missing."""
    return [GroupMemory(BlockRuns.of([area]), may_lack=at > 0) for at, area in enumerate(memory)]


class Engine:
    """A worker with its memory, and what a scheduler would do for it."""

    def __init__(
        self,
        server: ServerProcess,
        sizes: tuple[int, ...] = SIZES,
        blocks: int = BLOCKS,
        **options: Any,
    ) -> None:
        self.memory = memories(sizes, blocks)
        self.before = [area.copy() for area in self.memory]
        self.shape = shape_of(sizes, len(sizes))
        options = {
            "ping_interval_ms": LONG_MS,
            "store_deadline_ms": LONG_MS,
            "lookup_deadline_ms": LONG_MS,
        } | options
        self.worker = WorkerAdapter(
            self.shape, ParallelStrategy.of(), ClientOptions(address=server.address, **options)
        )
        self.worker.register_groups(layout_of(self.memory))
        assert eventually(lambda: self.worker.connection.up), self.worker.connection.refusal

    def keys(self, count: int, name: str = "") -> bytes:
        """Keys here are no hashes, so the model must be in them."""
        prefix = f"{self.shape.identity.model}{name}."
        return b"".join(f"{prefix}{at}".encode().ljust(16, b".") for at in range(count))

    def store(self, job: Any, ids: Any, name: str = "") -> None:
        table = np.array(ids, dtype=np.int64)
        self.worker.store(
            job, StoreRequest("default", b"", self.keys(table.shape[-1], name), table)
        )

    def finished(self, count: int = 1) -> Finished:
        """What ends next, so many jobs together."""
        seen = Finished()

        def enough() -> bool:
            new = self.worker.poll()
            seen.stored.update(new.stored)
            seen.incomplete.extend(new.incomplete)
            seen.loads.update(new.loads)
            seen.withdrawn += new.withdrawn
            return len(seen.stored) + len(seen.loads) >= count

        assert eventually(enough)
        return seen

    def found(self, count: int, name: str = "") -> tuple[int, m.Found]:
        connection = self.worker.connection
        assert connection.layout is not None
        call = connection.call(
            m.Lookup("default", connection.layout.layout, self.keys(count, name)), LONG_MS
        )
        found = connection.wait(call)
        assert isinstance(found, m.Found), call.failure
        return call.epoch, found

    def load(self, job: Any, ids: Any, name: str = "") -> Finished:
        table = np.array(ids, dtype=np.int64)
        epoch, found = self.found(table.shape[-1], name)
        checksums = np.frombuffer(found.checksums, "<u8").reshape(-1, len(self.memory))
        slots = np.frombuffer(found.slots, "<i8")
        keys = self.keys(table.shape[-1], name)
        self.worker.load(job, LoadRequest("default", keys, 0, table, epoch, slots, checksums))
        return self.finished()

    def overwrite(self, ids: list[int]) -> None:
        for area in self.memory:
            area[ids] = 255


Start = Callable[..., Engine]


@pytest.fixture
def start(server: ServerProcess) -> Iterator[Start]:
    made: list[Engine] = []

    def make(*arguments: Any, **options: Any) -> Engine:
        made.append(Engine(server, *arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.worker.close()


@pytest.fixture
def paused(server: ServerProcess) -> Iterator[Callable[[], None]]:
    """Pauses the server; the test says when it goes on, and at its end it does."""
    yield lambda: server.send(signal.SIGSTOP)
    server.send(signal.SIGCONT)


BOTH_PLANES = pytest.mark.parametrize(
    "shared_memory", [True, False], ids=["shared_memory", "network"]
)


# -- pieces


@BOTH_PLANES
def test_every_piece_comes_back_and_failures_name_the_engine_blocks_of_all(
    start: Start, shared_memory: bool
) -> None:
    engine = start(shared_memory=shared_memory)
    engine.store("s", [STORED[0], [NO_BLOCK, 5, 6, 7]])
    assert engine.finished() == Finished(stored={"s": 4})
    assert engine.load("all", TARGETS) == Finished(
        loads={"all": LoadOutcome(frozenset({8, 12}))}
    ), "both pieces of block 0"
    assert engine.load("some", [TARGETS[0], [NO_BLOCK, *TARGETS[1][1:]]]) == Finished(
        loads={"some": LoadOutcome()}
    )
    assert (engine.memory[0][TARGETS[0]] == engine.before[0][STORED[0]]).all()
    assert (engine.memory[1][TARGETS[1][1:]] == engine.before[1][STORED[1][1:]]).all()


def test_another_number_of_pieces_is_refused_where_the_store_is_made(start: Start) -> None:
    engine = start()
    for ids in ([0, 1], [[0, 1]], [[0, 1], [2, 3], [4, 5]]):
        with pytest.raises(RequestError, match="the engine's blocks have 2"):
            engine.store("s", ids)
    assert (
        engine.worker.poll() == Finished()
        and not engine.worker.jobs.queued_stores
        and not engine.worker.jobs.stores
    )


def test_another_number_of_pieces_fails_a_load_and_nothing_else(start: Start) -> None:
    engine = start()
    engine.store("s", STORED)
    engine.finished()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module.log, "exception", lambda *_: None)
        assert engine.load("l", [8, 9, 10, 11]) == Finished(
            loads={"l": LoadOutcome(frozenset({8, 9, 10, 11}))}
        )
    assert engine.worker.connection.counters.failures["internal_error"] == 1
    assert engine.load("again", TARGETS) == Finished(loads={"again": LoadOutcome()})


def test_pieces_that_do_not_fit_the_shape_are_refused_with_all_their_sizes() -> None:
    options = ClientOptions(address="tcp://127.0.0.1:1")
    for given in ([memories()[0]], memories()[::-1], [*memories(), memories((64,))[0]]):
        worker = WorkerAdapter(shape_of(SIZES, 2), ParallelStrategy.of(), options)
        sizes = r" \+ ".join(str(area.shape[1]) for area in given)
        with pytest.raises(
            RequestError, match=rf"have {sizes} bytes a block, the block shape says 640 \+ 320"
        ):
            worker.register_groups(layout_of(given))
        worker.close()


def test_each_rank_registers_the_pieces_of_its_own_shards() -> None:
    shape = shape_of((640, 320, 512, 256), pieces=2)
    for rank, sizes in ((0, (640, 320)), (1, (512, 256))):
        strategy = ParallelStrategy.of(tp_size=2, rank=rank, kv_tp_replicas=1)
        worker = WorkerAdapter(shape, strategy, ClientOptions(address="tcp://127.0.0.1:1"))
        pieces = layout_of(memories(sizes))
        worker.register_groups(pieces)
        assert worker.connection.physical == (2 * rank, physical_fingerprint(pieces))
        assert worker.poll().rank == rank
        worker.close()


def test_every_report_says_whose_it_is() -> None:
    strategy = ParallelStrategy.of(tp_size=8, rank=5, use_mla=True)
    worker = WorkerAdapter(shape_of((640,)), strategy, ClientOptions(address="tcp://127.0.0.1:1"))
    worker.store("s", StoreRequest("default", b"", bytes(16), [0]))  # type: ignore[arg-type]
    assert worker.poll() == Finished(rank=5, stored={"s": 0})
    assert worker.poll() == Finished(rank=5)
    worker.close()


def test_a_fingerprint_tells_the_pieces_and_their_order_apart_and_nothing_else() -> None:
    one, two = layout_of(memories())
    alone = physical_fingerprint([one])
    assert alone == bytes.fromhex(one.runs.fingerprint), "as it was before blocks had pieces"
    both = physical_fingerprint([one, two])
    assert len(both) == len(alone) == 16
    assert len({alone, physical_fingerprint([two]), both, physical_fingerprint([two, one])}) == 4
    elsewhere = [GroupMemory(piece.runs, may_lack=True) for piece in layout_of(memories(blocks=3))]
    assert physical_fingerprint(elsewhere) == both, (
        "neither where blocks lie nor how many there are"
    )


def test_engines_whose_pieces_lie_otherwise_in_memory_do_not_exchange_blocks(
    server: ServerProcess,
) -> None:
    workers = []
    shape = shape_of(SIZES, 2)
    for second in (memories()[1], memories()[1].view(np.uint16)):
        workers.append(
            WorkerAdapter(shape, ParallelStrategy.of(), ClientOptions(address=server.address))
        )
        workers[-1].register_groups(layout_of([memories()[0], second]))
        assert eventually(lambda: workers[0].connection.up)
    assert eventually(
        lambda: "orders the tensors of shard 0 differently" in workers[1].connection.refusal
    )
    assert not workers[1].connection.up
    for worker in workers:
        worker.close()


# -- blocks that the engine takes back


@BOTH_PLANES
def test_after_withdraw_the_engine_may_write_and_the_server_gets_what_was_there(
    start: Start, server: ServerProcess, paused: Callable[[], None], shared_memory: bool
) -> None:
    """The first store waits for a paused server, the second behind it. `withdraw` returns while
    both do."""
    engine = start(shared_memory=shared_memory)
    paused()
    engine.store("first", STORED, "a")
    engine.store("second", [TARGETS[0], [NO_BLOCK, *TARGETS[1][1:]]], "b")
    engine.worker.withdraw([*range(BLOCKS)])
    engine.overwrite([*range(BLOCKS)])
    assert engine.worker.poll() == Finished(withdrawn=15), (
        "the server is still paused: nothing was waited for"
    )
    server.send(signal.SIGCONT)
    assert engine.finished(2) == Finished(stored={"first": 4, "second": 4})
    for name, ids in (("a", STORED), ("b", [TARGETS[0], [NO_BLOCK, *TARGETS[1][1:]]])):
        into = [
            [0, 1, 2, 3],
            [NO_BLOCK if block == NO_BLOCK else 4 + at for at, block in enumerate(ids[1])],
        ]
        assert not engine.load("l", into, name).failed_blocks
        for piece in (0, 1):
            there = [
                (to, source)
                for to, source in zip(into[piece], ids[piece], strict=True)
                if to != NO_BLOCK
            ]
            assert all(
                (engine.memory[piece][to] == engine.before[piece][source]).all()
                for to, source in there
            )


@BOTH_PLANES
def test_without_room_to_set_aside_nothing_that_must_be_there_is_stored(
    start: Start,
    server: ServerProcess,
    paused: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    shared_memory: bool,
) -> None:
    monkeypatch.setattr(module, "_MOST_EVACUATED_BYTES", 639)
    engine = start(shared_memory=shared_memory)
    paused()
    engine.store("s", STORED)
    engine.worker.withdraw([1])
    engine.overwrite([1])
    server.send(signal.SIGCONT)
    seen = engine.finished()
    assert (seen.incomplete, seen.withdrawn) == (["s"], 1)
    assert engine.found(4)[1].blocks == 0
    assert engine.worker.connection.counters.failures["withdrawn"] == 1
    engine.overwrite([0])
    engine.store("again", [TARGETS[0], STORED[1]], "c")
    assert engine.finished() == Finished(stored={"again": 4}), "the next one is not held back"


def test_without_room_to_set_aside_what_may_be_missing_is(
    start: Start, server: ServerProcess, paused: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_EVACUATED_BYTES", 320)
    engine = start()
    paused()
    engine.store("s", STORED)
    engine.worker.withdraw([4, 6])
    engine.overwrite([4, 6])
    server.send(signal.SIGCONT)
    assert engine.finished() == Finished(stored={"s": 4}, withdrawn=2)
    assert engine.load("l", TARGETS) == Finished(loads={"l": LoadOutcome(frozenset({10, 14}))}), (
        "room was for one of the two"
    )
    good = [0, 1, 3]
    for piece in (0, 1):
        into, source = np.array(TARGETS[piece])[good], np.array(STORED[piece])[good]
        assert (engine.memory[piece][into] == engine.before[piece][source]).all()


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[SourceBlocks]:
    """Of all stores."""
    made, make = list[SourceBlocks](), module.SourceBlocks
    monkeypatch.setattr(
        module, "SourceBlocks", lambda *given: made.append(make(*given)) or made[-1]
    )
    return made


def evacuated(sources: list[SourceBlocks]) -> int:
    return sum(each.evacuated_bytes for each in sources)


def test_the_room_is_shared_by_all_stores_and_is_there_again_when_they_are_over(
    start: Start,
    server: ServerProcess,
    paused: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    sources: list[SourceBlocks],
) -> None:
    monkeypatch.setattr(module, "_MOST_EVACUATED_BYTES", 3 * 640)
    engine = start((640,))
    for name in ("a", "b"):  # the second time as the first
        paused()
        engine.store("first", [0, 1], f"{name}1")
        engine.store("second", [2, 3], f"{name}2")
        engine.worker.withdraw([0, 1])
        assert evacuated(sources) == 2 * 640
        engine.worker.withdraw([2, 3])
        assert evacuated(sources) == 3 * 640
        server.send(signal.SIGCONT)
        seen = engine.finished(2)
        assert (seen.stored["first"], seen.incomplete, seen.withdrawn) == (2, ["second"], 4)
        assert not engine.worker.jobs.stores


def test_nobody_knows_which_blocks_are_written_so_nothing_is_stored(
    start: Start, server: ServerProcess, paused: Callable[[], None]
) -> None:
    engine = start()
    paused()
    engine.store("first", STORED, "a")
    engine.store("second", TARGETS, "b")
    engine.worker.withdraw(None)
    engine.overwrite([*range(BLOCKS)])
    assert engine.worker.poll() == Finished()
    server.send(signal.SIGCONT)
    assert set(engine.finished(2).incomplete) == {"first", "second"}
    assert engine.found(4, "a")[1].blocks == engine.found(4, "b")[1].blocks == 0


def test_what_is_stored_already_or_never_was_to_be_is_not_withdrawn(start: Start) -> None:
    engine = start()
    engine.worker.withdraw([0, 1])
    engine.store("s", STORED)
    assert engine.finished() == Finished(stored={"s": 4})
    engine.worker.withdraw([*range(BLOCKS)])
    assert engine.worker.poll() == Finished()


@BOTH_PLANES
def test_an_engine_that_writes_into_blocks_while_they_are_stored_never_gets_a_new_byte_back(
    start: Start, shared_memory: bool
) -> None:
    """At whatever moment a block is taken back: what comes back is the old content, whole, or
    nothing."""
    rng = np.random.default_rng(11)
    blocks, nbytes, count = 60, 16 << 10, 24
    engine = start((nbytes, 1024), blocks, shared_memory=shared_memory)
    came = withdrawn = 0
    for turn in range(25):
        ids = np.stack([rng.permutation(30)[:count], 30 + rng.permutation(30)[:count]])
        for area, old in zip(engine.memory, engine.before, strict=True):
            area[:] = rng.integers(0, 128, area.shape, dtype=np.uint8)
            old[:] = area
        engine.store("s", ids, f"/{turn}")
        time.sleep(float(rng.choice([0, 0.0005, 0.002])))
        for block in rng.permutation(blocks).tolist():
            engine.worker.withdraw([block])
            engine.overwrite([block])
        seen = engine.finished()
        withdrawn += seen.withdrawn
        assert seen.incomplete == [] and seen.stored == {"s": count}
        into = np.stack([np.arange(count), 30 + np.arange(count)])
        assert not engine.load("l", into, f"/{turn}").failed_blocks
        assert (engine.memory[0][:count] == engine.before[0][ids[0]]).all()
        assert (engine.memory[1][30 : 30 + count] == engine.before[1][ids[1]]).all()
        came += count
    assert came == 25 * count and withdrawn > 0
