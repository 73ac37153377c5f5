"""A worker's threads: loads beside stores, in order with the engine, and none left when it is
closed."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvkeep.client import stores
from kvkeep.client import worker as module
from kvkeep.client.loads import Load, take_together
from kvkeep.client.options import ClientOptions
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.client.transport import StreamTransport
from kvkeep.client.worker import WorkerAdapter
from kvkeep.gpu.registration import PoolRegistration
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m

BLOCKS, NBYTES = 400, 640
LONG_MS = 120_000  # longer than any test: what waits for a paused server waits until it goes on
_models = itertools.count()


class Engine:
    """A worker with its memory, and what a scheduler would do for it."""

    def __init__(self, server: ServerProcess, **options: Any) -> None:
        self.memory = np.random.default_rng(7).integers(0, 128, (BLOCKS, NBYTES), dtype=np.uint8)
        self.before = self.memory.copy()
        self.name = f"wt{next(_models)}"  # a model that no other test uses
        identity = ModelIdentity(
            model=self.name, revision="1", kv_dtype="any", block_tokens=4, content="l"
        )
        options = {
            "ping_interval_ms": LONG_MS,
            "store_deadline_ms": LONG_MS,
            "lookup_deadline_ms": LONG_MS,
        } | options
        self.worker = WorkerAdapter(
            BlockShape(identity, (NBYTES,)),
            ParallelStrategy.of(),
            ClientOptions(address=server.address, **options),
        )
        self.worker.register_groups([GroupMemory(BlockRuns.of([self.memory]))])
        self.connection = self.worker.connection
        assert eventually(lambda: self.connection.up), self.connection.refusal

    @property
    def transfer(self) -> Any:
        return self.worker.memory

    def keys(self, count: int, name: str = "") -> bytes:
        """Keys here are no hashes, so the model must be in them."""
        return b"".join(f"{self.name}{name}.{at}".encode().ljust(16, b".") for at in range(count))

    def store(self, job: Any, ids: list[int], name: str = "") -> None:
        self.worker.store(
            job, StoreRequest("default", b"", self.keys(len(ids), name), np.array(ids))
        )

    def looked_up(self, ids: list[int], name: str = "") -> LoadRequest:
        assert self.connection.layout is not None
        keys = self.keys(len(ids), name)
        call = self.connection.call(
            m.Lookup("default", self.connection.layout.layout, keys), LONG_MS
        )
        found = self.connection.wait(call)
        assert isinstance(found, m.Found), call.failure
        slots, checksums = (
            np.frombuffer(found.slots, "<i8"),
            np.frombuffer(found.checksums, "<u8").reshape(-1, 1),
        )
        return LoadRequest("default", keys, 0, np.array(ids), call.epoch, slots, checksums)

    def finished(self, count: int = 1) -> Finished:
        """What ends next, so many jobs together."""
        seen = Finished()

        def enough() -> bool:
            new = self.worker.poll()
            assert not new.stored.keys() & seen.stored.keys(), "told once"
            assert not new.loads.keys() & seen.loads.keys(), "told once"
            seen.stored.update(new.stored)
            seen.incomplete.extend(new.incomplete)
            seen.loads.update(new.loads)
            seen.withdrawn += new.withdrawn
            return len(seen.stored) + len(seen.loads) >= count

        assert eventually(enough)
        return seen

    def has(self, into: list[int], source: list[int]) -> bool:
        return bool((self.memory[into] == self.before[source]).all())


Start = Callable[..., Engine]


@pytest.fixture
def start(server: ServerProcess) -> Iterator[Start]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(server, **options))
        return made[-1]

    yield make
    server.send(signal.SIGCONT)
    for each in made:
        each.worker.close()


def wrong(request: LoadRequest) -> LoadRequest:
    """The same with a checksum that no block has."""
    return LoadRequest(**(vars(request) | {"checksums": request.checksums ^ np.uint64(1)}))


class Gate:
    """Something that lasts until it is opened, and tells when somebody has come to it."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*arguments: Any, **options: Any) -> Any:
            self.pass_through()
            return function(*arguments, **options)

        return gated


# -- loads beside stores


def test_a_load_ends_while_a_store_waits_for_a_paused_server(
    start: Start, server: ServerProcess
) -> None:
    engine = start()
    engine.store("s", [0, 1, 2])
    engine.finished()
    request = engine.looked_up([10, 11, 12])
    waits = threading.Event()
    wait = engine.connection.wait
    engine.connection.wait = lambda *given: (waits.set(), wait(*given))[1]  # type: ignore[method-assign]
    server.send(signal.SIGSTOP)
    engine.store("stuck", [3, 4], "b")
    assert waits.wait(30), "the store's thread is inside"
    for job in range(20):
        engine.worker.load(job, request)
        assert engine.finished() == Finished(loads={job: LoadOutcome()})
    assert engine.has([10, 11, 12], [0, 1, 2])
    engine.worker.load("timed", request)
    took_s = engine.finished().loads["timed"].seconds
    assert took_s is not None and took_s > 0 and not engine.worker.jobs.loads
    engine.worker.load("bad", wrong(request))
    assert engine.finished() == Finished(loads={"bad": LoadOutcome(frozenset({10, 11, 12}))}), (
        "reported, not waited for"
    )
    server.send(signal.SIGCONT)
    assert engine.finished() == Finished(stored={"stuck": 2})


def test_a_load_ends_while_a_store_waits_with_the_connection_in_its_hands(
    start: Start, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wait for a reply lasts until the load is over, with the connection's lock held."""
    engine = start()
    engine.store("s", [0, 1, 2])
    engine.finished()
    request = engine.looked_up([10, 11, 12])
    gate = Gate()
    monkeypatch.setattr(StreamTransport, "wait", gate.before(StreamTransport.wait))
    server.send(signal.SIGSTOP)
    engine.store("stuck", [3, 4], "b")
    assert gate.reached.wait(30)
    engine.worker.load("l", request)
    assert engine.finished() == Finished(loads={"l": LoadOutcome()})
    assert engine.has([10, 11, 12], [0, 1, 2])
    gate.open()
    server.send(signal.SIGCONT)
    assert engine.finished() == Finished(stored={"stuck": 2})


def test_a_store_ends_while_a_load_is_copied(start: Start) -> None:
    engine = start()
    engine.store("s", [0, 1])
    engine.finished()
    gate, request = Gate(), engine.looked_up([10, 11])
    engine.transfer.copier.begin_load = gate.before(engine.transfer.copier.begin_load)
    engine.worker.load("l", request)
    assert gate.reached.wait(30)
    engine.store("beside", [2, 3], "b")
    assert engine.finished() == Finished(stored={"beside": 2})
    gate.open()
    assert engine.finished() == Finished(loads={"l": LoadOutcome()})


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared_memory", "network"])
def test_loads_and_stores_at_the_same_time_do_not_mix(start: Start, shared_memory: bool) -> None:
    engine = start(shared_memory=shared_memory)
    engine.store("s", [*range(10)])
    engine.finished()
    for turn in range(30):
        into = [100 + turn, 200 + turn]
        engine.worker.load(f"l{turn}", engine.looked_up([*into, *range(300, 308)]))
        engine.store(f"s{turn}", [turn, turn + 1], f"/{turn}")
    seen = engine.finished(60)
    assert not seen.failed_blocks and seen.incomplete == [] and set(seen.stored.values()) == {2}
    assert engine.has([*range(100, 130)], [0] * 30) and engine.has([*range(200, 230)], [1] * 30)
    for turn in range(30):
        engine.worker.load("check", engine.looked_up([50, 51], f"/{turn}"))
        assert not engine.finished().failed_blocks and engine.has([50, 51], [turn, turn + 1])


def test_the_next_stores_slots_are_asked_for_while_one_is_copied_and_each_ends_with_its_own_result(
    start: Start,
) -> None:
    engine, gate = start(), Gate()
    engine.store("known", [50], "/1")
    engine.finished()
    copier, begun = engine.transfer.copier, []
    prepare = engine.connection.call
    reading = copier.begin_store

    def note(message: Any, *arguments: Any) -> Any:
        if isinstance(message, m.PrepareStore):
            begun.append(message.keys)
        return prepare(message, *arguments)

    def read_first(*arguments: Any, **options: Any) -> Any:
        gate.pass_through()
        return reading(*arguments, **options)

    engine.connection.call, copier.begin_store = note, read_first  # type: ignore[method-assign]
    engine.store(0, [0, 1], "/0")
    engine.store(1, [50, 2, 3], "/1")
    engine.store(2, [4, BLOCKS], "/2")
    engine.store(3, [5], "/3")
    assert gate.reached.wait(30)
    assert begun in ([engine.keys(2, "/0")], [engine.keys(2, "/0"), engine.keys(3, "/1")])
    gate.open()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.log, "exception", lambda *_: None)
        seen = engine.finished(4)
    assert (seen.stored, seen.incomplete) == ({0: 2, 1: 2, 2: 0, 3: 1}, [2])
    assert len(begun) == 4 and not engine.worker.jobs.stores
    engine.worker.load("l", engine.looked_up([10, 11, 12], "/1"))
    assert not engine.finished().failed_blocks and engine.has([10, 11, 12], [50, 2, 3])


# -- stores on their way


def test_a_store_ends_when_it_has_arrived_and_the_server_has_answered(
    device: Callable[..., Device],
) -> None:
    world = device()
    engine, arrives, answers = world.engine, Gate(), Gate()
    begin_store, wait = world.copier.begin_store, engine.connection.wait

    def arrive_late(*arguments: Any, **options: Any) -> Any:
        made = begin_store(*arguments, **options)
        made.sums = arrives.before(made.sums)
        return made

    def answer_late(call: Any, *rest: Any) -> Any:
        if threading.current_thread().name == "kvkeep-departures":
            answers.pass_through()
        return wait(call, *rest)

    world.copier.begin_store, engine.connection.wait = arrive_late, answer_late  # type: ignore[method-assign]
    engine.store("a", [0, 1], "/a")
    engine.store("b", [2], "/b")
    assert arrives.reached.wait(30)
    assert eventually(lambda: len(world.copier.readings) == 2), "another is read meanwhile"
    assert engine.worker.jobs.stores == 2 and engine.worker.poll() == Finished()
    arrives.open()
    assert answers.reached.wait(30)
    assert engine.worker.jobs.stores == 2 and engine.worker.poll() == Finished()
    answers.open()
    assert list(engine.finished(2).stored.items()) == [("a", 2), ("b", 1)], "in order"


@pytest.mark.parametrize("breaks", ["sums 0", "wait"])
def test_a_fault_on_the_way_ends_that_store_alone(
    device: Callable[..., Device], monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    monkeypatch.setattr(module.log, "exception", lambda *_: None)
    world = device(breaks)
    engine, wait, left = world.engine, world.engine.connection.wait, iter([breaks == "wait"])

    def break_once(call: Any, *rest: Any) -> Any:
        if threading.current_thread().name == "kvkeep-departures" and next(left, False):
            raise RuntimeError("the connection broke")
        return wait(call, *rest)

    monkeypatch.setattr(engine.connection, "wait", break_once)
    engine.worker.store_all(
        {
            name: StoreRequest("default", b"", engine.keys(2, name), np.array([0, 1]))
            for name in ("bad", "good")
        }
    )
    seen = engine.finished(2)
    assert (seen.stored, seen.incomplete) == ({"bad": 0, "good": 2}, ["bad"])
    assert engine.connection.counters.failures["internal_error"] == 1


def test_close_waits_for_stores_that_are_on_their_way(device: Callable[..., Device]) -> None:
    world = device()
    engine, arrives = world.engine, Gate()
    begin_store = world.copier.begin_store

    def arrive_late(*arguments: Any, **options: Any) -> Any:
        made = begin_store(*arguments, **options)
        made.sums = arrives.before(made.sums)
        return made

    world.copier.begin_store = arrive_late
    for name in "abc":
        engine.store(name, [0, 1], name)
    assert eventually(lambda: len(world.copier.readings) == 3)
    closing = threading.Thread(target=engine.worker.close)
    closing.start()
    assert engine.worker.jobs.stores == 3
    arrives.open()
    closing.join(30)
    assert not closing.is_alive()
    assert list(engine.worker.poll().stored.items()) == [("a", 2), ("b", 2), ("c", 2)]


# -- many loads


@pytest.mark.parametrize("together", [1, 5 * NBYTES, 64 << 20])
def test_many_small_loads_come_back_each_with_its_own_result(
    start: Start, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    monkeypatch.setattr(
        module,
        "take_together",
        lambda waiting, nbytes, most: take_together(waiting, nbytes, together),
    )
    engine, count = start(), 60
    sizes = [1 + job % 3 for job in range(count)]
    begins = [50 + sum(sizes[:job]) for job in range(count)]
    for job, size in enumerate(sizes):
        engine.store(job, [*range(job, job + size)], f"/{job}")
    engine.finished(count)
    places = [[*range(begin, begin + size)] for begin, size in zip(begins, sizes, strict=True)]
    requests = [engine.looked_up(ids, f"/{job}") for job, ids in enumerate(places)]
    gate, batches = Gate(), []

    def load_and_note(memory: Any, given: Any, marks: Any) -> Load:
        batches.append([request.blocks * NBYTES for request in given])
        gate.pass_through()
        return Load(memory, given, marks)

    monkeypatch.setattr(module, "Load", load_and_note)
    for job, request in enumerate(requests):
        engine.worker.load(job, wrong(request) if job % 7 == 3 else request)
    assert gate.reached.wait(30)
    gate.open()
    seen = engine.finished(count)
    assert seen == Finished(
        loads={
            job: LoadOutcome(frozenset(places[job] if job % 7 == 3 else ())) for job in range(count)
        }
    )
    for job in range(count):
        if not seen.loads[job].failed:
            assert engine.has(places[job], [*range(job, job + sizes[job])])
    assert sum(map(len, batches)) == count
    assert all(len(batch) == 1 or sum(batch) <= together for batch in batches)
    assert len(batches) == count if together == 1 else len(batches) < count


def test_a_load_that_is_wrong_in_itself_costs_the_others_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.log, "exception", lambda *_: None)
    engine = start()
    engine.store("s", [0, 1])
    engine.finished()
    requests = {
        "a": engine.looked_up([10, 11]),
        "b": engine.looked_up([12, BLOCKS]),
        "c": engine.looked_up([13, 14]),
    }
    requests["d"] = LoadRequest(
        **(vars(requests["a"]) | {"block_ids": np.array([[15, 16], [17, 18]])})
    )
    gate = Gate()
    engine.transfer.copier.begin_load = gate.before(engine.transfer.copier.begin_load)
    engine.worker.load("first", engine.looked_up([20, 21]))
    assert gate.reached.wait(30)
    for job, request in requests.items():
        engine.worker.load(job, request)
    gate.open()
    seen = engine.finished(5)
    assert {job: outcome.failed for job, outcome in seen.loads.items()} == {
        "a": set(),
        "b": {12, BLOCKS},
        "c": set(),
        "d": {15, 16, 17, 18},
        "first": set(),
    }
    assert engine.has([10, 11, 13, 14, 20, 21], [0, 1] * 3)
    assert engine.connection.counters.failures["internal_error"] == 2


LOADS_UNDER_WAY = 4


def test_loads_begin_while_others_arrive_and_not_too_many(device: Callable[..., Device]) -> None:
    world = device()
    engine, gate = world.engine, Gate()
    engine.store("s", [0, 1])
    engine.finished()
    request, begin_load = engine.looked_up([10, 11]), world.copier.begin_load

    def arrive_late(*arguments: Any) -> Any:
        made = begin_load(*arguments)
        made.good = gate.before(made.good)
        return made

    world.copier.begin_load = arrive_late
    for job in range(10):
        engine.worker.load(job, request)
        begins = job < LOADS_UNDER_WAY
        assert eventually(lambda begins=begins: not (begins and engine.worker.jobs.queued_loads))  # type: ignore[misc]
    assert gate.reached.wait(30)
    assert eventually(lambda: len(world.copier.scatterings) == LOADS_UNDER_WAY)
    assert engine.worker.jobs.queued_loads == 10 - LOADS_UNDER_WAY
    assert engine.worker.poll() == Finished()
    gate.open()
    assert engine.finished(10) == Finished(loads=dict.fromkeys(range(10), LoadOutcome()))
    assert engine.has([10, 11], [0, 1])


def test_a_device_that_fails_costs_the_loads_that_were_under_way_and_no_others(
    device: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.log, "exception", lambda *_: None)
    world = device()
    world.engine.store("s", [0, 1])
    world.engine.finished()
    request = world.engine.looked_up([10, 11])
    for world.copier.breaks, failed in (
        ("good 0", {10, 11}),
        ("good 0 again", set[int]()),
        ("wait for", set[int]()),
    ):
        world.engine.worker.load(world.copier.breaks, request)
        assert world.engine.finished() == Finished(
            loads={world.copier.breaks: LoadOutcome(frozenset(failed))}
        )
    assert world.engine.connection.counters.failures["internal_error"] == 2
    fence: Any = world.engine.connection.shared_pool
    assert eventually(lambda: fence.holders == 1), "the pool is held by nobody who copies"


# -- withdrawn while loads run


def test_withdraw_waits_for_no_load(start: Start, server: ServerProcess) -> None:
    engine = start()
    engine.store("s", [0, 1])
    engine.finished()
    gate, request = Gate(), engine.looked_up([10, 11])
    engine.transfer.copier.begin_load = gate.before(engine.transfer.copier.begin_load)
    engine.worker.load("l", request)
    assert gate.reached.wait(30)
    server.send(signal.SIGSTOP)
    engine.store("stuck", [2, 3], "b")
    engine.worker.withdraw([2, 5])
    engine.memory[[2, 5]] = 255
    assert engine.worker.poll() == Finished(withdrawn=1), "neither the load nor the store is over"
    server.send(signal.SIGCONT)
    assert engine.finished() == Finished(stored={"stuck": 2})
    gate.open()
    assert engine.finished() == Finished(loads={"l": LoadOutcome()})
    engine.worker.load("b", engine.looked_up([20, 21], "b"))
    assert not engine.finished().failed_blocks and engine.has([20, 21], [2, 3])


# -- the end


def test_close_ends_what_is_queued_at_once_and_waits_for_what_both_threads_do(
    start: Start, server: ServerProcess
) -> None:
    engine = start()
    engine.store("s", [0, 1])
    engine.finished()
    request, gate = engine.looked_up([10, 11]), Gate()
    copying, waits, wait = threading.Event(), threading.Event(), engine.connection.wait
    engine.connection.wait = lambda *given: (waits.set(), wait(*given))[1]  # type: ignore[method-assign]
    engine.transfer.copier.begin_load = gate.before(engine.transfer.copier.begin_load)
    server.send(signal.SIGSTOP)
    engine.store("in hand", [2, 3], "b")
    engine.worker.load("in hand", request)
    assert waits.wait(30) and gate.reached.wait(30)
    for job in range(3):
        engine.store(job, [4], f"/{job}")
        engine.worker.load(job, request)
    closing = threading.Thread(target=engine.worker.close)
    closing.start()
    queued = engine.finished(6)
    assert queued == Finished(
        stored=dict.fromkeys(range(3), 0),
        incomplete=[0, 1, 2],
        loads=dict.fromkeys(range(3), LoadOutcome(frozenset({10, 11}))),
    )
    assert closing.is_alive() and not copying.is_set()
    gate.open()
    server.send(signal.SIGCONT)
    closing.join(30)
    assert not closing.is_alive()
    assert engine.finished(2) == Finished(stored={"in hand": 2}, loads={"in hand": LoadOutcome()})
    assert engine.has([10, 11], [0, 1])
    assert engine.connection.state == "down" and engine.connection.shared_pool is None


def test_close_in_the_middle_of_much_work_tells_of_every_job_once(start: Start) -> None:
    engine = start()
    engine.store("s", [0, 1])
    engine.finished()
    request = engine.looked_up([10, 11])
    for job in range(100):
        engine.store(job, [job], f"/{job}")
        engine.worker.load(job, request)
    engine.worker.close()
    seen = engine.finished(200)
    assert sorted(seen.loads) == sorted(seen.stored) == [*range(100)]
    assert engine.worker.poll() == Finished()
    assert not engine.worker.jobs.stores
    assert "internal_error" not in engine.connection.counters.failures


# -- a copier like a GPU's


class Device:
    """Engines whose copier keeps a record, and has the pool registered with a driver."""

    def __init__(
        self, start: Start, late_copier: Any, monkeypatch: pytest.MonkeyPatch, breaks: str = ""
    ) -> None:
        self.pinned: dict[int, int] = {}
        self.unpinned: list[int] = []

        def copier_for(pieces: Any, staging_bytes: int) -> Any:
            self.staging_bytes = staging_bytes
            self.copier = late_copier(pieces, breaks)
            driver = SimpleNamespace(pin=self._pin, unpin=self._unpin)
            self.copier.pool_registration = lambda connection: PoolRegistration(connection, driver)
            return self.copier

        monkeypatch.setattr(module, "copier_for", copier_for)
        self.engine = start(gpu_staging_bytes=77)
        assert eventually(lambda: self.copier.names.count("enter") == 5)

    def _pin(self, address: int, nbytes: int) -> bool:
        self.pinned[address] = nbytes
        return True

    def _unpin(self, address: int) -> None:
        assert mapped_at(address), "it is still there"
        self.unpinned.append(address)

    def since(self, count: int) -> list[tuple[str, str]]:
        """What the copier was asked for after its first calls, by which thread; the threads' own
        steps left out."""
        return [call for call in self.copier.calls[count:] if not call[1].startswith("kvkeep")]


def mapped_at(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split(maxsplit=1)[0].split("-"))
        if first <= address < last:
            return True
    return False


@pytest.fixture
def device(
    start: Start, late_copier: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Device]:
    return lambda breaks="": Device(start, late_copier, monkeypatch, breaks)


def test_every_thread_enters_and_the_engines_own_does_not(device: Callable[..., Device]) -> None:
    world = device()
    assert sorted(thread for name, thread in world.copier.calls if name == "enter") == [
        "kvkeep-arrivals",
        "kvkeep-departures",
        "kvkeep-loads",
        "kvkeep-registration",
        "kvkeep-stores",
    ]
    assert world.staging_bytes == 77


def test_marks_are_taken_in_the_engines_thread_and_kept_by_what_is_copied(
    device: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = device()
    engine, here = world.engine, threading.current_thread().name
    before = len(world.copier.calls)
    engine.store("s", [0, 1])
    assert world.since(before) == [("mark", here)]
    engine.finished()
    requests = [engine.looked_up([10, 11]), engine.looked_up([12, 13])]
    gate = Gate()
    monkeypatch.setattr(module, "Load", gate.before(Load))
    for job, request in enumerate(requests):
        engine.worker.load(job, request)
    assert world.since(before) == [("mark", here)] * 3
    gate.open()
    assert engine.finished(2) == Finished(loads={0: LoadOutcome(), 1: LoadOutcome()})
    assert [mark for marks in world.copier.waited_for for mark in marks] == world.copier.marks
    assert engine.has([10, 11, 12, 13], [0, 1, 0, 1])


def test_the_wait_for_the_engine_is_no_part_of_a_load(
    device: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = device()
    engine, now_s = world.engine, 1.0
    engine.store("s", [0, 1])
    engine.finished()
    request, gate = engine.looked_up([10, 11]), Gate()
    monkeypatch.setattr(module.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(module, "Load", gate.before(Load))
    world.copier.must_wait = iter([True, False, False]).__next__
    for job, now_s in (("waits", 1.0), ("same step", 2.0), ("later", 6.0)):  # noqa: B007
        engine.worker.load(job, request)
    now_s = 5.0
    gate.open()
    took_s = {job: outcome.seconds for job, outcome in engine.finished(3).loads.items()}
    assert took_s == {"waits": 0.0, "same step": 0.0, "later": -1.0}


def test_withdraw_shields_after_all_stores_have_been_seen_to(
    device: Callable[..., Device], server: ServerProcess
) -> None:
    world = device()
    engine, here = world.engine, threading.current_thread().name
    server.send(signal.SIGSTOP)
    engine.store("first", [0, 1], "a")
    engine.store("second", [1, 2], "b")
    before = len(world.copier.calls)
    engine.worker.withdraw([1])
    assert world.since(before) == [
        ("set aside [1]", here),
        ("set aside [1]", here),
        ("fence_reads", here),
    ]
    before = len(world.copier.calls)
    engine.worker.withdraw([5])
    assert world.since(before)[-1] == ("fence_reads", here)
    engine.memory[1] = 255
    server.send(signal.SIGCONT)
    assert engine.finished(2) == Finished(stored={"first": 2, "second": 2}, withdrawn=2)
    for name in ("a", "b"):
        engine.worker.load(name, engine.looked_up([10, 11], name))
        assert not engine.finished().failed_blocks
        assert engine.has([10, 11], [0, 1] if name == "a" else [1, 2])


def test_withdraw_of_nobody_knows_what_gives_all_up_and_shields(
    device: Callable[..., Device], server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, make = list[Any](), stores.SourceBlocks
    monkeypatch.setattr(
        stores, "SourceBlocks", lambda *given: sources.append(make(*given)) or sources[-1]
    )
    world = device()
    engine, here = world.engine, threading.current_thread().name
    server.send(signal.SIGSTOP)
    engine.store("first", [0, 1], "a")
    engine.store("second", [1, 2], "b")
    stops: list[list[int]] = []
    fence_reads = world.copier.fence_reads
    world.copier.fence_reads = lambda: (
        stops.append([each.stop for each in sources]),
        fence_reads(),
    )
    before = len(world.copier.calls)
    engine.worker.withdraw(None)
    assert world.since(before) == [("fence_reads", here)]
    assert stops == [[0, 0]], "nothing more is read by then"
    server.send(signal.SIGCONT)
    assert sorted(engine.finished(2).incomplete) == ["first", "second"]


def test_the_pool_is_registered_and_let_go_of_before_it_is_unmapped(
    device: Callable[..., Device],
) -> None:
    world = device()
    assert eventually(lambda: sum(world.pinned.values()) == 16 << 20)
    world.engine.worker.close()
    assert sorted(world.unpinned) == sorted(world.pinned)
    assert not any(mapped_at(address) for address in world.pinned)


def test_a_thread_that_cannot_enter_costs_no_more_than_what_it_copies(
    device: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.log, "exception", lambda *_: None)
    world = device(breaks="enter")
    engine = world.engine
    assert eventually(lambda: engine.connection.counters.failures.get("internal_error", 0) == 5)
    world.copier.breaks = "gather 0"
    engine.store("s", [0, 1])
    assert engine.finished() == Finished(stored={"s": 0}, incomplete=["s"])
    engine.store("again", [0, 1])
    assert engine.finished() == Finished(stored={"again": 2})


def test_a_job_number_that_is_used_twice_never_stores_one_request_as_another(
    start: Start, server: ServerProcess
) -> None:
    engine = start()
    server.send(signal.SIGSTOP)
    engine.store("job", [1], "a")
    engine.store("job", [2], "b")
    server.send(signal.SIGCONT)
    assert engine.finished() == Finished(stored={"job": 1})
    assert engine.connection.counters.failures["repeated_job"] == 1
    engine.worker.load("l", engine.looked_up([9], "a"))
    assert engine.finished() == Finished(loads={"l": LoadOutcome()}) and engine.has([9], [1])
    engine.store("job", [2], "b")
    assert engine.finished() == Finished(stored={"job": 1}), "it is over, and free again"
