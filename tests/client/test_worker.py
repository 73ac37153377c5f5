"""Stores and loads in the background, with torch tensors of every shape that engines have, against
a real server."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvkeep.client import worker as module
from kvkeep.client.connection import Connection
from kvkeep.client.copier import HostCopier
from kvkeep.client.options import ClientOptions
from kvkeep.client.requests import Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.client.stores import Store, source_blocks
from kvkeep.client.transport import StreamTransport
from kvkeep.client.worker import WorkerAdapter
from kvkeep.errors import RequestError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m

torch: Any = pytest.importorskip("torch")

BLOCKS, TOKENS, HEADS, SIZE = 12, 4, 2, 8
_models = itertools.count()


def keys(count: int, name: str = "k") -> bytes:
    return b"".join(f"{name}{at}".encode().ljust(16, b".") for at in range(count))


def shape_of(*shard_bytes: int) -> BlockShape:
    """Of a model that no other test uses."""
    model = ModelIdentity(
        model=f"w{next(_models)}", revision="1", kv_dtype="any", block_tokens=4, content="l"
    )
    return BlockShape(model, shard_bytes)


class Engine:
    """A worker with its memory, and what a scheduler would do for it."""

    def __init__(
        self,
        server: ServerProcess,
        layers: Any,
        block_dim: int = 0,
        shape: BlockShape | None = None,
    ) -> None:
        self.shape = shape or shape_of(BlockRuns.of(layers, block_dim).nbytes)
        options = ClientOptions(
            address=server.address, ping_interval_ms=100, lookup_deadline_ms=5_000
        )
        self.worker = WorkerAdapter(self.shape, ParallelStrategy.of(), options)
        self.worker.register_kv_caches(layers, block_dim)
        assert eventually(lambda: self.worker.connection.up), self.worker.connection.refusal
        self.tenant = "default"
        self.prefix = (
            self.shape.identity.model
        )  # keys here are no hashes, so the model must be in them

    @property
    def connection(self) -> Connection:
        return self.worker.connection

    def keys(self, count: int) -> bytes:
        return keys(count, f"{self.prefix}.")

    def stored(self, ids: list[int]) -> int:
        self.worker.store("s", StoreRequest(self.tenant, b"", self.keys(len(ids)), np.array(ids)))
        return self.finished().stored["s"]

    def looked_up(self, ids: list[int]) -> LoadRequest:
        assert self.connection.layout is not None
        message = m.Lookup(self.tenant, self.connection.layout.layout, self.keys(len(ids)))
        call = self.connection.call(message, 5_000)
        found = self.connection.wait(call)
        assert isinstance(found, m.Found), call.failure
        slots, checksums = (
            np.frombuffer(found.slots, "<i8"),
            np.frombuffer(found.checksums, "<u8").reshape(-1, 1),
        )
        return LoadRequest(
            self.tenant, self.keys(len(ids)), 0, np.array(ids), call.epoch, slots, checksums
        )

    def finished(self) -> Finished:
        """What ends next."""
        seen = [Finished()]

        def something() -> bool:
            seen[0] = self.worker.poll()
            return bool(seen[0].stored or seen[0].loads)

        assert eventually(something)
        return seen[0]


Start = Callable[..., Engine]


@pytest.fixture
def start(server: ServerProcess) -> Iterator[Start]:
    made: list[Engine] = []

    def make(layers: Any, block_dim: int = 0, **more: Any) -> Engine:
        made.append(Engine(server, layers, block_dim, **more))
        return made[-1]

    yield make
    for each in made:
        each.worker.close()


# -- tensors


def contiguous() -> tuple[Any, int]:
    return [torch.zeros(BLOCKS, TOKENS, HEADS, SIZE) for _ in range(3)], 0


def of_type(name: str) -> tuple[Any, int]:
    return [
        torch.zeros(BLOCKS, TOKENS, HEADS, SIZE, dtype=getattr(torch, name)) for _ in range(2)
    ], 0


def heads_first_in_memory() -> tuple[Any, int]:
    return [torch.zeros(BLOCKS, HEADS, TOKENS, SIZE).permute(0, 2, 1, 3) for _ in range(2)], 0


def padded() -> tuple[Any, int]:
    return [
        torch.zeros(BLOCKS, TOKENS + 3, HEADS, SIZE + 5)[:, :TOKENS, :, 2 : 2 + SIZE]
        for _ in range(2)
    ], 0


def keys_and_values_in_front() -> tuple[Any, int]:
    return [torch.zeros(2, BLOCKS, TOKENS, HEADS, SIZE, dtype=torch.bfloat16) for _ in range(2)], 1


def blocks_last() -> tuple[Any, int]:
    return [torch.zeros(TOKENS, SIZE, BLOCKS)], -1


def slices_of_one_allocation() -> tuple[Any, int]:
    every = torch.zeros(3, BLOCKS, TOKENS, HEADS, SIZE)
    return {f"layer{i}": every[i] for i in range(3)}, 0


def layers_inside_each_block() -> tuple[Any, int]:
    every = torch.zeros(BLOCKS, 3, TOKENS, HEADS, SIZE)
    return {f"layer{i}": every[:, i] for i in range(3)}, 0


def keys_and_values_apart() -> tuple[Any, int]:
    return {
        f"{part}{i}": torch.zeros(BLOCKS, TOKENS, HEADS, SIZE) for i in range(2) for part in "kv"
    }, 0


LAYOUTS: dict[str, Callable[[], tuple[Any, int]]] = {
    "contiguous": contiguous,
    "bfloat16": lambda: of_type("bfloat16"),
    "float8_e4m3fn": lambda: of_type("float8_e4m3fn"),
    "float8_e5m2": lambda: of_type("float8_e5m2"),
    "float16": lambda: of_type("float16"),
    "uint8": lambda: of_type("uint8"),
    "heads_first": heads_first_in_memory,
    "padded": padded,
    "keys_and_values_in_front": keys_and_values_in_front,
    "blocks_last": blocks_last,
    "slices_of_one_allocation": slices_of_one_allocation,
    "layers_inside_each_block": layers_inside_each_block,
    "keys_and_values_apart": keys_and_values_apart,
}


def tensors(layers: Any) -> list[Any]:
    return list(layers.values()) if isinstance(layers, dict) else list(layers)


def whole_bytes(tensor: Any) -> Any:
    """All bytes of the allocation behind a tensor, also those between its elements."""
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())


def fill(layers: Any) -> None:
    """Random bytes everywhere, whatever numbers they are: NaNs must come back as the same NaNs."""
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors(layers):
        area = whole_bytes(tensor)
        area.copy_(torch.randint(0, 256, area.shape, generator=generator, dtype=torch.uint8))


def bytes_of_block(layers: Any, block_dim: int, block: int) -> bytes:
    parts = [tensor.select(block_dim, block).contiguous().flatten() for tensor in tensors(layers)]
    return b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_round_trip_is_byte_exact_and_touches_nothing_else(start: Start, layout: str) -> None:
    layers, block_dim = LAYOUTS[layout]()
    fill(layers)
    engine = start(layers, block_dim)
    source, target = [7, 0, 3, 11], [1, 9, 4, 2]
    expected = [bytes_of_block(layers, block_dim, block) for block in source]
    others = {b: bytes_of_block(layers, block_dim, b) for b in range(BLOCKS) if b not in target}
    assert engine.stored(source) == 4
    engine.worker.load("l", engine.looked_up(target))
    finished = engine.finished()
    assert finished.loads == {"l": LoadOutcome()}
    assert [bytes_of_block(layers, block_dim, block) for block in target] == expected
    assert {block: bytes_of_block(layers, block_dim, block) for block in others} == others


def test_bytes_between_padded_blocks_stay_as_they_are(start: Start) -> None:
    layers, _ = padded()
    fill(layers)
    engine = start(layers)
    engine.stored([0, 1])
    before = [whole_bytes(tensor).clone() for tensor in layers]
    engine.worker.load("l", engine.looked_up([0, 1]))
    assert not engine.finished().failed_blocks
    assert all(
        torch.equal(whole_bytes(tensor), area) for tensor, area in zip(layers, before, strict=True)
    )


def test_two_layouts_of_the_same_numbers_exchange_nothing_if_their_fingerprint_is_in_the_identity() -> (
    None
):
    plain, permuted = contiguous()[0][:2], heads_first_in_memory()[0]
    assert BlockRuns.of(plain).nbytes == BlockRuns.of(permuted).nbytes
    assert BlockRuns.of(plain).fingerprint != BlockRuns.of(permuted).fingerprint


def test_tensors_that_do_not_fit_the_shape_are_refused_with_both_sizes(
    server: ServerProcess,
) -> None:
    worker = WorkerAdapter(
        shape_of(4096), ParallelStrategy.of(), ClientOptions(address=server.address)
    )
    with pytest.raises(
        RequestError, match="768 bytes a block, the block shape says 4096"
    ) as caught:
        worker.register_kv_caches(contiguous()[0])
    assert "shard_bytes" in caught.value.hint
    worker.close()


def test_tensors_are_registered_once(start: Start) -> None:
    layers, _ = contiguous()
    with pytest.raises(RequestError, match="registered already"):
        start(layers).worker.register_kv_caches(layers)


def test_a_strategy_that_does_not_fit_the_shape_is_refused() -> None:
    with pytest.raises(RequestError, match="the strategy has 2 shards, the shape 1"):
        WorkerAdapter(shape_of(64), ParallelStrategy.of(tp_size=2))


# -- jobs


def test_blocks_that_failed_are_named_by_their_ids(start: Start) -> None:
    layers, _ = contiguous()
    fill(layers)
    engine = start(layers)
    engine.stored([0, 1, 2, 3])
    request = engine.looked_up([8, 9, 10, 11])
    checksums = request.checksums.copy()
    checksums[[1, 3]] ^= 1
    bad = LoadRequest(**(vars(request) | {"checksums": checksums}))
    engine.worker.load("l", bad)
    assert engine.finished() == Finished(loads={"l": LoadOutcome(frozenset({9, 11}))})
    assert engine.connection.counters.failures["bad_block"] == 2
    assert engine.looked_up([0, 1, 2, 3]).slots.shape == (4,), (
        "the server looked for itself and kept its good blocks"
    )


def test_a_load_that_is_waited_for_is_over_when_its_call_is(start: Start) -> None:
    layers, _ = contiguous()
    fill(layers)
    engine = start(layers)
    engine.stored([0, 1, 2, 3])
    for turn in range(20):  # right behind one in the background, which may not have left yet
        engine.worker.load(turn, engine.looked_up([4, 5, 6, 7]))
        assert engine.finished() == Finished(loads={turn: LoadOutcome()})
        for layer in layers:
            layer[8:] = 0
        told = engine.worker.load_now(engine.looked_up([8, 9, 10, 11]))
        assert told == LoadOutcome() and told.seconds is not None and told.seconds > 0
        assert all(torch.equal(layer[8:], layer[:4]) for layer in layers)
        assert engine.worker.poll() == Finished()
    request = engine.looked_up([8, 9, 10, 11])
    bad = LoadRequest(
        **(
            vars(request)
            | {"checksums": request.checksums ^ np.array([[0], [1], [0], [0]], np.uint64)}
        )
    )
    assert engine.worker.load_now(bad) == LoadOutcome(frozenset({9}))
    wrong = engine.worker.load_now(engine.looked_up([8, 9, 10, BLOCKS]))
    assert wrong == LoadOutcome(frozenset({8, 9, 10, BLOCKS}))
    assert engine.connection.counters.failures["internal_error"] == 1
    engine.worker.close()
    assert engine.worker.load_now(request).failed == {8, 9, 10, 11}


def test_a_request_that_is_wrong_in_itself_is_a_failed_job_and_never_the_engines_end(
    start: Start,
) -> None:
    engine = start(contiguous()[0])
    engine.worker.store("s", StoreRequest("default", b"", engine.keys(2), np.array([0, BLOCKS])))
    assert engine.finished().stored == {"s": 0}
    engine.stored([0, 1])
    request = engine.looked_up([0, BLOCKS])
    engine.worker.load("l", request)
    assert engine.finished().failed_blocks == {0, BLOCKS}
    assert engine.connection.counters.failures["internal_error"] == 2


def test_a_store_that_cannot_be_asked_for_costs_no_other(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    layers, _ = contiguous()
    fill(layers)
    engine = start(layers)
    nobody: Any = object()  # no tenant, and nothing that a message can carry
    engine.worker.store("s", StoreRequest(nobody, b"", engine.keys(2), np.array([0, 1])))
    assert engine.finished() == Finished(stored={"s": 0}, incomplete=["s"])
    assert engine.connection.counters.failures["internal_error"] == 1
    assert "kvkeep: a store failed inside the client" in caplog.text
    engine.stored([0, 1])


def test_an_engine_says_whether_it_computes_something(start: Start) -> None:
    WorkerAdapter(shape_of(768), ParallelStrategy.of(), NOWHERE).set_engine_busy(True)
    engine = start(contiguous()[0])
    copier: Any = engine.worker.memory.copier  # type: ignore[union-attr]
    copier.set_engine_busy = (said := list[bool]()).append
    for computes in (True, False):
        engine.worker.set_engine_busy(computes)
    assert said == [True, False]


def test_sources_are_made_while_the_thread_that_stores_may_go_on(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever hands over many stores would keep it from the first of them."""
    layers, _ = contiguous()
    fill(layers)
    engine = start(layers)
    was_free = list[bool]()

    def note(*given: Any) -> Any:
        other = threading.Thread(target=engine.worker.poll, daemon=True)
        other.start()
        other.join(5)
        was_free.append(not other.is_alive())
        return source_blocks(*given)

    monkeypatch.setattr(module, "source_blocks", note)
    engine.stored([0, 1])
    assert was_free == [True]


def test_several_stores_are_handed_over_at_once(start: Start) -> None:
    layers, _ = contiguous()
    fill(layers)
    engine = start(layers)
    copier: Any = engine.worker.memory.copier  # type: ignore[union-attr]
    marks: list[object] = []
    copier.mark = lambda: marks.append(object()) or marks[-1]
    every = engine.keys(3)
    stores = {
        at: StoreRequest("default", b"", every[at * 16 : (at + 1) * 16], np.array([at]))
        for at in range(3)
    }
    engine.worker.store_all(stores)
    stored: dict[Any, int] = {}
    assert eventually(lambda: stored.update(engine.worker.poll().stored) or len(stored) == 3)
    assert stored == {0: 1, 1: 1, 2: 1} and len(marks) == 1


def test_if_one_of_several_is_wrong_none_has_begun(start: Start) -> None:
    layers, _ = contiguous()
    engine = start(layers)
    good, wrong = (
        StoreRequest("default", b"", engine.keys(2), np.array(ids))
        for ids in ([0, 1], [[0, 1], [0, 1]])
    )
    with pytest.raises(RequestError):
        engine.worker.store_all({"good": good, "wrong": wrong})
    assert (
        not engine.worker.jobs.queued_stores
        and not engine.worker.jobs.stores
        and engine.worker.poll() == Finished()
    )


def test_if_an_interrupt_comes_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else tells that none has begun."""
    worker = stalled_worker()
    store = StoreRequest("default", b"", keys(2), np.array([0, 1]))
    worker.load("l", some_load([5]))
    worker.store("repeated", store)
    monkeypatch.setattr(module, "source_blocks", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        worker.store_all({1: store, 2: store, "repeated": store})
    assert worker.poll() == Finished(stored={1: 0, 2: 0}, incomplete=[1, 2])
    assert worker.jobs.stores == 1
    worker.close()


@pytest.mark.parametrize("wrong", [False, True])
def test_what_is_refused_is_told_once(wrong: bool) -> None:
    worker, store = stalled_worker(), StoreRequest("default", b"", keys(1), np.array([0]))
    worker.load("l", some_load([5]))
    queued = {f"q{at}": store for at in range(JOBS_QUEUED - wrong)}
    worker.store_all(queued)
    ids = np.array([[0, 1], [0, 1]])
    stores = {at: StoreRequest("default", b"", keys(2), ids) for at in range(2)}
    if wrong:  # the first one, and the second is refused: then it is as if nothing had been said
        with pytest.raises(RequestError):
            worker.store_all(stores)
        assert worker.poll() == Finished()
    else:
        worker.store_all(stores)
        assert worker.poll() == Finished(stored={0: 0, 1: 0}, incomplete=[0, 1])
    assert worker.jobs.stores == len(queued)
    worker.close()


def test_a_rank_whose_shard_another_stores_has_nothing_to_do(server: ServerProcess) -> None:
    worker = WorkerAdapter(
        shape_of(768),
        ParallelStrategy.of(tp_size=8, rank=3, use_mla=True),
        ClientOptions(address=server.address),
    )
    worker.register_kv_caches(contiguous()[0])
    worker.store("s", StoreRequest("default", b"", keys(1), np.array([0])))
    assert worker.poll().stored == {"s": 0}
    assert not worker.jobs.queued_stores
    worker.close()


@pytest.mark.parametrize("when", ["closed", "repeated", "unregistered"])
def test_a_store_that_is_refused_is_not_looked_at(when: str) -> None:
    worker = WorkerAdapter(shape_of(768), ParallelStrategy.of(), NOWHERE)
    if when == "repeated":
        worker = stalled_worker()
        worker.load("l", some_load([5]))
        worker.store("x", StoreRequest("default", b"", keys(2), np.array([0, 1])))
    elif when == "closed":
        worker.close()
    worker.store("x", StoreRequest("default", b"", keys(2), np.array([[0, 1], [0, 1]])))
    assert worker.poll().incomplete == ([] if when == "repeated" else ["x"])
    reason = "repeated_job" if when == "repeated" else when
    assert worker.connection.counters.failures == {reason: 1}
    worker.close()


def test_a_worker_that_is_closed_while_a_store_is_handed_over_tells_of_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(contiguous()[0])
    close_first = lambda *given: (engine.worker.close(), source_blocks(*given))[1]  # noqa: E731
    monkeypatch.setattr(module, "source_blocks", close_first)
    store = StoreRequest("default", b"", engine.keys(2), np.array([0, 1]))
    engine.worker.store_all({"x": store, "y": store})
    assert engine.worker.poll() == Finished(stored={"x": 0, "y": 0}, incomplete=["x", "y"])
    assert engine.worker.jobs == (0, 0, 0, 0)


def test_a_store_that_has_begun_while_another_is_copied_ends_undone_if_the_worker_is_closed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, copy = start(contiguous()[0]), Store.copy
    closing = threading.Thread(target=engine.worker.close)

    def copy_until_closed(store: Store, *given: Any) -> None:
        copy(store, *given)  # begins another
        closing.start()
        assert eventually(lambda: refused(engine))

    monkeypatch.setattr(Store, "copy", copy_until_closed)
    every = engine.keys(2)
    stores = [StoreRequest("default", b"", every[at : at + 16], np.array([0])) for at in (0, 16)]
    engine.worker.store_all(dict(enumerate(stores)))
    closing_began = eventually(lambda: closing.ident is not None)
    closing.join(30)
    assert closing_began and engine.worker.poll() == Finished(stored={0: 1, 1: 0}, incomplete=[1])


def refused(engine: Engine) -> bool:
    """Whether the worker takes no more jobs."""
    before = engine.connection.counters.failures.get("closed", 0)
    engine.worker.load_now(some_load([5]))
    return engine.connection.counters.failures.get("closed", 0) > before


NOWHERE = ClientOptions(address="tcp://127.0.0.1:1")


JOBS_QUEUED = 1024  # stores, and as many loads


class StalledCopier(HostCopier):
    """Its threads begin when a load was queued and is not any more."""

    worker: WorkerAdapter
    was_used = False

    def mark(self) -> None:
        self.was_used = True

    def enter(self) -> None:
        assert eventually(lambda: self.was_used and not self.worker.jobs.queued_loads)


def stalled_worker() -> WorkerAdapter:
    """Jobs stay where they are until it is closed; the first must be a load."""
    worker = WorkerAdapter(shape_of(768), ParallelStrategy.of(), NOWHERE)
    worker.make_copier = lambda runs: StalledCopier(runs)  # type: ignore[method-assign]
    StalledCopier.worker = worker
    worker.register_kv_caches(contiguous()[0])
    return worker


def some_load(ids: list[int]) -> LoadRequest:
    nothing = np.zeros(len(ids), dtype=np.int64)
    return LoadRequest(
        "default", keys(len(ids)), 0, np.array(ids), 1, nothing, np.zeros((len(ids), 1), np.uint64)
    )


def test_a_full_queue_fails_the_job_at_once() -> None:
    worker, store = stalled_worker(), StoreRequest("default", b"", keys(1), np.array([0]))
    worker.load(0, some_load([5, 6]))
    worker.store_all(dict.fromkeys(range(JOBS_QUEUED + 1), store))
    for job in range(1, JOBS_QUEUED + 1):
        worker.load(job, some_load([5, 6]))
    late = JOBS_QUEUED
    assert worker.poll() == Finished(
        stored={late: 0}, incomplete=[late], loads={late: LoadOutcome(frozenset({5, 6}))}
    )
    assert worker.connection.counters.failures == {"queue_full": 2}
    assert worker.poll() == Finished(), "everything is told once"
    assert worker.jobs == (JOBS_QUEUED,) * 4
    worker.close()


def test_close_ends_queued_jobs_undone_and_later_ones_at_once() -> None:
    worker = stalled_worker()
    worker.withdraw([5])
    worker.load("queued", some_load([5]))
    worker.store("queued", StoreRequest("default", b"", keys(1), np.array([0])))
    worker.close()
    assert worker.poll() == Finished(
        stored={"queued": 0}, incomplete=["queued"], loads={"queued": LoadOutcome(frozenset({5}))}
    )
    worker.load("late", some_load([6]))
    worker.store("late", StoreRequest("default", b"", keys(1), np.array([0])))
    assert worker.poll() == Finished(
        stored={"late": 0}, incomplete=["late"], loads={"late": LoadOutcome(frozenset({6}))}
    )
    worker.close()


# -- a server that is not there yet


def test_what_is_stored_before_the_session_is_made_waits_for_it(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that computes its first blocks while the server is still busy with something
    else."""
    layers, _ = contiguous()
    fill(layers)
    shape = shape_of(BlockRuns.of(layers).nbytes)
    options = ClientOptions(
        address=server.address, handshake_deadline_ms=120_000, store_deadline_ms=120_000
    )
    worker = WorkerAdapter(shape, ParallelStrategy.of(), options)
    connection, done = worker.connection, Finished()
    heard, answers = StreamTransport.receive, threading.Event()
    monkeypatch.setattr(
        StreamTransport, "receive", lambda self: heard(self) if answers.is_set() else None
    )
    worker.register_kv_caches(layers)
    assert eventually(lambda: connection.state == "greeting")
    worker.store(
        "early", StoreRequest("default", b"", keys(3, f"{shape.identity.model}."), np.arange(3))
    )
    time.sleep(0.1)  # some rounds of the worker's threads
    assert worker.poll() == Finished() and connection.coming_up
    answers.set()
    assert eventually(lambda: done.stored.update(worker.poll().stored) or bool(done.stored))
    assert done.stored == {"early": 3} and not connection.counters.failures
    worker.close()


def test_what_is_stored_while_there_is_no_server_ends_soon() -> None:
    layers, _ = contiguous()
    options = ClientOptions(address="tcp://127.0.0.1:1", reconnect_interval_ms=20)
    worker = WorkerAdapter(shape_of(BlockRuns.of(layers).nbytes), ParallelStrategy.of(), options)
    worker.register_kv_caches(layers)
    done = Finished()
    for job in ("in vain", "told"):
        worker.store(job, StoreRequest("default", b"", keys(3), np.arange(3)))
        assert eventually(
            lambda: done.incomplete.extend(worker.poll().incomplete) or bool(done.incomplete)
        )
        assert done.incomplete.pop() == job and not worker.connection.coming_up
    worker.close()


# -- a server that goes away


def test_a_killed_server_costs_failed_loads_and_no_more() -> None:
    layers, _ = contiguous()
    fill(layers)
    server = ServerProcess("--pool-size", "1MiB", "--slab-size", "64KiB")
    with server:
        engine = Engine(server, layers)
        assert engine.stored([0, 1, 2, 3]) == 4
        request = engine.looked_up([8, 9, 10, 11])
        expected = [bytes_of_block(layers, 0, block) for block in range(4)]
        server.stop(signal.SIGKILL)
        for job in range(20):  # the engine's thread only hands over and polls
            engine.worker.store(job, StoreRequest("default", b"", keys(4, f"{job}/"), np.arange(4)))
            engine.worker.load(job, request)
        done = Finished()

        def all_done() -> bool:
            seen = engine.worker.poll()
            done.stored.update(seen.stored)
            done.loads.update(seen.loads)
            return len(done.stored) == len(done.loads) == 20

        assert eventually(all_done)
        assert set(done.stored.values()) == {0}
        for job in range(
            20
        ):  # its memory is still mapped: what is verified may be used, the rest is named
            assert done.loads[job].failed in (set(), {8, 9, 10, 11})
        assert [bytes_of_block(layers, 0, block) for block in range(4)] == expected
        server.start()
        assert eventually(lambda: engine.connection.up and engine.connection.epoch != request.epoch)
        engine.worker.load("stale", request)
        assert engine.finished().failed_blocks == {8, 9, 10, 11}
        assert engine.stored([0, 1, 2, 3]) == 0, "the next server has what the last one had"
        engine.worker.close()
    assert "internal_error" not in engine.connection.counters.failures


def test_a_paused_server_does_not_hold_up_the_engine(server: ServerProcess) -> None:
    """No clock is looked at: were a call to wait for the server, it would wait for ever, and the
    test with it."""
    engine = Engine(server, contiguous()[0])
    engine.stored([0, 1])
    request = engine.looked_up([2, 3])
    server.send(signal.SIGSTOP)
    try:
        for job in range(50):
            engine.worker.load(job, request)
            engine.worker.store(job, StoreRequest("default", b"", keys(2, f"{job}/"), np.arange(2)))
            engine.worker.poll()
        loaded: list[Any] = []
        assert eventually(lambda: loaded.extend(engine.worker.poll().loads) or len(loaded) >= 1)
    finally:
        server.send(signal.SIGCONT)
    engine.worker.close()
