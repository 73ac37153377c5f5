"""Many stores at once: the server is asked for the first one's slots while the others are handed
over."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvkeep.client.copier import HostCopier
from kvkeep.client.options import ClientOptions
from kvkeep.client.piece_store import PieceStore
from kvkeep.client.requests import Finished, LoadRequest, StoreRequest
from kvkeep.client.sources import Piece, Sources
from kvkeep.client.worker import WorkerAdapter
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m

BLOCKS, NBYTES, EACH = 48, 640, 8
_models = itertools.count()


def eventually(happens: Callable[[], bool]) -> bool:
    """Waits for something that must come; the limit only ends a test that has failed."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if happens():
            return True
        time.sleep(0.001)
    return False


class Engine:
    """A worker with its memory: half of it to store from, half to load into."""

    def __init__(self, server: ServerProcess, early: int = 0, **options: Any) -> None:
        """With so many `early` stores, before its memory is known."""
        self.memory = np.random.default_rng(7).integers(
            0, 128, (2 * BLOCKS, NBYTES), dtype=np.uint8
        )
        self.name = f"wh{next(_models)}"  # a model that no other test uses
        identity = ModelIdentity(
            model=self.name, revision="1", kv_dtype="any", block_tokens=4, content="l"
        )
        self.worker = WorkerAdapter(
            BlockShape(identity, (NBYTES,)),
            ParallelStrategy.of(),
            ClientOptions(address=server.address, **options),
        )
        if early:
            self.worker.store_all(self.stores(early))
        self.worker.register_pieces([Piece(BlockRuns.of([self.memory]))])
        assert eventually(lambda: self.worker.connection.up), self.worker.connection.refusal

    def keys(self, job: int) -> bytes:
        """Keys here are no hashes, so the model must be in them."""
        return b"".join(f"{self.name}.{job}.{at}".encode().rjust(16, b".") for at in range(EACH))

    def stores(self, count: int = BLOCKS // EACH) -> dict[int, StoreRequest]:
        every = {job: np.arange(job * EACH, (job + 1) * EACH) for job in range(count)}
        return {
            job: StoreRequest("default", b"", self.keys(job), ids) for job, ids in every.items()
        }

    def finished(self, jobs: int) -> Finished:
        """When so many stores have ended."""
        seen = Finished()

        def all_of_them() -> bool:
            more = self.worker.poll()
            seen.stored.update(more.stored)
            seen.incomplete += more.incomplete
            return len(seen.stored) >= jobs

        assert eventually(all_of_them), seen
        return seen

    def loaded(self, job: int) -> bool:
        """Whether the server has what that job stored, byte for byte."""
        connection = self.worker.connection
        assert connection.layout is not None
        call = connection.call(m.Lookup("default", connection.layout.layout, self.keys(job)), 5_000)
        found = connection.wait(call)
        assert isinstance(found, m.Found), call.failure
        slots, checksums = (
            np.frombuffer(found.slots, "<i8"),
            np.frombuffer(found.checksums, "<u8").reshape(-1, 1),
        )
        if len(slots) != EACH:
            return False
        targets = np.arange(BLOCKS, BLOCKS + EACH)
        load = LoadRequest("default", self.keys(job), 0, targets, call.epoch, slots, checksums)
        self.worker.load(f"load {job}", load)
        failed: list[Any] = []

        def ended() -> bool:
            more = self.worker.poll()
            failed.extend(more.failed)
            return bool(more.loaded)

        assert eventually(ended)
        connection.give_up(call)
        return (
            not failed
            and (self.memory[targets] == self.memory[job * EACH : (job + 1) * EACH]).all()
        )


Start = Callable[..., Engine]


@pytest.fixture
def start(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(
        HostCopier, "whole_bytes", 2 * EACH * NBYTES
    )  # two of these stores are not much
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(server, **options))
        return made[-1]

    yield make
    for each in made:
        each.worker.close()


@pytest.fixture
def asked_after(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sources there were, at each time that the server was asked for a store's first
    slots."""
    asked, made = list[int](), [0]
    begin, make = PieceStore.begin, Sources.__init__

    def note_begin(self: PieceStore, **words: bool) -> None:
        asked.append(made[0])
        begin(self, **words)

    def note_made(self: Sources, *args: Any, **words: Any) -> None:
        make(self, *args, **words)
        made[0] += 1

    monkeypatch.setattr(PieceStore, "begin", note_begin)
    monkeypatch.setattr(Sources, "__init__", note_made)
    return asked


def test_the_server_is_asked_for_the_first_before_the_others_are_handed_over(
    start: Start, asked_after: list[int]
) -> None:
    engine = start()
    engine.worker.store_all(engine.stores())
    assert asked_after[0] == 1
    assert engine.finished(6) == Finished(stored=dict.fromkeys(range(6), EACH))
    assert asked_after == [1, *[6] * 5], "each once"
    assert all(engine.loaded(job) for job in range(6))
    assert not engine.worker._sources and engine.worker._begun is None


def test_one_that_has_begun_is_not_passed_over(start: Start) -> None:
    """The thread that stores is about to look for the next one when the engine's has begun it."""
    engine = start()
    with engine.worker._wake:
        engine.worker.store_all(engine.stores())
        begun = engine.worker._begun
        assert begun is not None
        engine.worker._begin_store()
        assert engine.worker._begun is begun and len(engine.worker._stores) == 5
    assert engine.finished(6) == Finished(stored=dict.fromkeys(range(6), EACH))


@pytest.mark.parametrize("case", ["few", "one", "not idle", "far"])
def test_else_the_thread_that_stores_asks(start: Start, asked_after: list[int], case: str) -> None:
    engine = start(**({"shared_memory": False} if case == "far" else {}))
    count = {"few": 2, "one": 1}.get(case, 6)
    if case == "not idle":
        engine.worker._sources["another"] = mock.Mock()
    engine.worker.store_all(engine.stores(count))
    assert engine.finished(count).stored == dict.fromkeys(range(count), EACH)
    assert asked_after == [count] * count
    engine.worker._sources.clear()


def test_stores_that_came_before_the_memory_was_registered_are_no_others(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopier, "whole_bytes", 2 * EACH * NBYTES)
    go_on = threading.Event()
    begin = WorkerAdapter._begin_store
    monkeypatch.setattr(
        WorkerAdapter,
        "_begin_store",
        lambda self, **words: (go_on.wait(30), begin(self, **words))[1],
    )
    engine = Engine(server, early=1)
    later = engine.stores()
    del later[0]
    engine.worker.store_all(later)
    assert engine.worker._begun is None
    go_on.set()
    assert engine.finished(6).stored == dict.fromkeys(range(6), EACH)
    assert all(engine.loaded(job) for job in range(6))
    engine.worker.close()


def test_nor_is_one_of_them_lost_that_is_about_to_begin(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopier, "whole_bytes", 2 * EACH * NBYTES)
    begin, is_inside, go_on = PieceStore.begin, threading.Event(), threading.Event()

    def begin_slowly(self: PieceStore, **words: bool) -> None:
        begin(self, **words)
        if not is_inside.is_set():
            is_inside.set()
            go_on.wait(30)

    monkeypatch.setattr(PieceStore, "begin", begin_slowly)
    engine = Engine(server, early=1)
    assert is_inside.wait(30)
    later = engine.stores()
    del later[0]
    engine.worker.store_all(later)
    go_on.set()
    assert engine.finished(6).stored == dict.fromkeys(range(6), EACH)
    assert all(engine.loaded(job) for job in range(6))
    engine.worker.close()


def test_an_engine_does_not_wait_for_who_has_the_connection(
    start: Start, asked_after: list[int]
) -> None:
    engine = start()
    has_it, let_go = threading.Event(), threading.Event()

    def keep_it() -> None:
        with engine.worker.connection.lock:
            has_it.set()
            let_go.wait(30)

    other = threading.Thread(target=keep_it)
    other.start()
    assert has_it.wait(30)
    engine.worker.store_all(engine.stores())  # or it would wait for ever
    assert not asked_after and engine.worker._begun is None
    let_go.set()
    other.join()
    assert engine.finished(6) == Finished(stored=dict.fromkeys(range(6), EACH))
    assert asked_after == [6] * 6


def test_a_worker_that_is_closed_meanwhile_gives_the_slots_back_and_tells_of_all(
    start: Start, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, begin = start(), PieceStore.begin
    given_up: list[Any] = []
    give_up = engine.worker.connection.give_up
    engine.worker.connection.give_up = lambda call, **words: (
        given_up.append(call),
        give_up(call, **words),
    )[1]  # type: ignore[method-assign]

    def close(self: PieceStore, **words: bool) -> None:
        begin(self, **words)
        engine.worker.close()

    monkeypatch.setattr(PieceStore, "begin", close)
    engine.worker.store_all(engine.stores())
    assert engine.worker.poll() == Finished(
        stored=dict.fromkeys(range(6), 0), incomplete=[*range(6)]
    )
    assert (
        given_up
        and not engine.worker._sources
        and not engine.worker._stores
        and engine.worker._begun is None
    )


def test_a_worker_that_is_closed_with_a_store_begun_tells_of_all(start: Start) -> None:
    engine = start()
    with engine.worker._wake:  # its thread cannot go on
        engine.worker.store_all(engine.stores())
        assert engine.worker._begun is not None and engine.worker._begun[0] == 0
        engine.worker._closing = True
    engine.worker.close()
    ended = engine.worker.poll()
    assert sorted(ended.stored) == [*range(6)] and not engine.worker._sources
    assert ended.incomplete in ([*range(1, 6)], [*range(1, 6), 0]), (
        "the first one is in hand, or is not begun any more"
    )
    assert sum(ended.stored.values()) == (0 if 0 in ended.incomplete else EACH)


def test_one_that_has_begun_while_another_is_copied_ends_undone_if_the_worker_is_closed(
    start: Start,
) -> None:
    engine = start()
    copy = engine.worker._copy_store

    def copy_until_closed(*args: Any) -> None:
        copy(*args)  # begins another
        assert eventually(lambda: engine.worker._closing)

    engine.worker._copy_store = copy_until_closed  # type: ignore[method-assign]
    engine.worker.store_all(engine.stores(2))
    assert eventually(lambda: engine.worker._begun is not None)
    engine.worker.close()
    assert engine.worker.poll() == Finished(stored={0: EACH, 1: 0}, incomplete=[1])


@pytest.mark.parametrize("what", [MemoryError, KeyboardInterrupt])
def test_if_another_cannot_be_handed_over_the_slots_go_back(
    start: Start, monkeypatch: pytest.MonkeyPatch, what: type[BaseException]
) -> None:
    engine, make, made = start(), Sources.__init__, list[Sources]()
    given_up: list[Any] = []
    give_up = engine.worker.connection.give_up
    engine.worker.connection.give_up = lambda call, **words: (
        given_up.append(call),
        give_up(call, **words),
    )[1]  # type: ignore[method-assign]

    def fail_third(self: Sources, *args: Any, **words: Any) -> None:
        made.append(self)
        if len(made) == 3:
            raise what
        make(self, *args, **words)

    monkeypatch.setattr(Sources, "__init__", fail_third)
    with pytest.raises(what):
        engine.worker.store_all(engine.stores())
    assert (
        given_up
        and not engine.worker._sources
        and not engine.worker._stores
        and engine.worker._begun is None
    )
    told = (
        Finished()
        if what is MemoryError
        else Finished(stored=dict.fromkeys(range(6), 0), incomplete=[*range(6)])
    )
    assert engine.worker.poll() == told
    engine.name += "again"  # the server may not have heard yet that nobody writes the first ones
    engine.worker.store_all(engine.stores())
    assert engine.finished(6) == Finished(stored=dict.fromkeys(range(6), EACH))
    assert all(engine.loaded(job) for job in range(6))


def test_a_first_one_that_cannot_begin_costs_the_others_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, begin = start(), PieceStore.begin
    stores = engine.stores()

    def fail_first(self: PieceStore, **words: bool) -> None:
        if self._request is stores[0]:
            raise RuntimeError("a bug")
        begin(self, **words)

    monkeypatch.setattr(PieceStore, "begin", fail_first)
    engine.worker.store_all(stores)
    ended = engine.finished(6)
    assert ended.stored == {0: 0} | dict.fromkeys(range(1, 6), EACH) and ended.incomplete == [0]
    assert all(engine.loaded(job) for job in range(1, 6))
