"""The server within the engine's process: clients work over it as over a real one, from many
threads at once."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.client.cache import Cache
from kvkeep.client.connection import Connection
from kvkeep.client.options import ClientOptions
from kvkeep.client.requests import LoadRequest, StoreRequest
from kvkeep.client.scheduler import Answer, Lookup, SchedulerAdapter
from kvkeep.client.worker import WorkerAdapter
from kvkeep.errors import PoolError
from kvkeep.kv.identity import DEFAULT_TENANT, ModelIdentity
from kvkeep.kv.keys import KeyChain, root_key
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.shape import BlockShape
from kvkeep.server import embedded
from kvkeep.server.embedded import EmbeddedServer
from kvkeep.testing.clock import eventually
from kvkeep.tiers.memory import Pool
from kvkeep.units import KIB, MIB
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, decode_reply, encode
from kvkeep_lab.simulation.store_integrity import check_integrity

IDENTITY = ModelIdentity(
    model="embedded", revision="1", kv_dtype="|u1", block_tokens=4, content="bytes"
)
BLOCK_BYTES = 4096
SHAPE = BlockShape(IDENTITY, (BLOCK_BYTES,))

Serve = Callable[..., EmbeddedServer]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Makes servers in a directory of the test's own. Whatever a test did, their stores are sound
    at the end."""
    made: list[EmbeddedServer] = []

    def make(pool_bytes: int = 4 * MIB, slab_bytes: int = 64 * KIB) -> EmbeddedServer:
        made.append(EmbeddedServer(pool_bytes, tmp_path, slab_bytes))
        return made[-1]

    yield make
    for server in made:
        with server.turn:
            check_integrity(server.store)
        server.close()
    assert list(tmp_path.glob("kvkeep-*")) == []


@pytest.fixture
def server(serve: Serve) -> EmbeddedServer:
    return serve()


def connected(server: EmbeddedServer, **options: Any) -> Connection:
    connection = server.connection(
        SHAPE, ClientOptions(**{"lookup_deadline_ms": 10_000, **options})
    )
    assert connection.wait_until_up(10_000), connection.refusal
    return connection


def cache(server: EmbeddedServer, **options: Any) -> Cache:
    return Cache(connected(server, **options), IDENTITY, (BLOCK_BYTES,), np.dtype(np.uint8))


def some_blocks(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (count, BLOCK_BYTES), dtype=np.uint8)


def some_keys(count: int, name: str = "k") -> bytes:
    return b"".join(f"{name}{at}".encode().ljust(16, b".") for at in range(count))


def in_threads(*duties: Callable[[], None]) -> None:
    """Runs all at once. What one raises is a warning of pytest's, and so an error."""
    threads = [threading.Thread(target=duty, daemon=True) for duty in duties]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "stuck"


class Engine:
    """A scheduler and a worker over one embedded server, with memory of 16 blocks."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.memory = np.zeros((16, BLOCK_BYTES), dtype=np.uint8)
        self.scheduler = SchedulerAdapter(SHAPE, connection=connected(server))
        self.worker = WorkerAdapter(
            SHAPE, ParallelStrategy.of(), connection=server.connection(SHAPE)
        )
        self.lookups: dict[str, Lookup] = {}
        self.worker.register_kv_caches([self.memory])
        assert eventually(lambda: self.worker.connection.up), self.worker.connection.refusal

    def store(self, keys: bytes, ids: list[int]) -> int:
        self.worker.store("store", StoreRequest(DEFAULT_TENANT, b"", keys, np.array(ids)))
        return int(eventually(lambda: self.worker.poll().stored)["store"])

    def lookup(self, request: str, keys: bytes) -> Answer:
        self.lookups[request] = lookup = self.scheduler.lookup(None, keys)
        return eventually(lambda: self.scheduler.answer(lookup))  # type: ignore[no-any-return]

    def release(self, request: str) -> None:
        self.scheduler.release(self.lookups.pop(request))

    def load(self, keys: bytes, answer: Answer, ids: list[int]) -> list[int]:
        """The blocks that failed."""
        request = LoadRequest(
            DEFAULT_TENANT, keys, 0, np.array(ids), answer.epoch, answer.slots, answer.checksums
        )
        self.worker.load("load", request)
        finished = eventually(lambda: (done := self.worker.poll()).loads and done)
        return sorted(finished.loads["load"].failed)

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


# --- clients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_cache_gets_what_it_put_on_either_data_plane(
    server: EmbeddedServer, shared_memory: bool
) -> None:
    blocks, tokens = some_blocks(70), list(range(280))
    with cache(server) as mine, cache(server, shared_memory=shared_memory) as other:
        assert (other.connection.segments is not None) == shared_memory
        assert mine.put(tokens, blocks) == 70
        assert other.put(tokens, blocks) == 0  # it is there
        assert other.contains([*tokens, 1, 2, 3, 4]) == 70
        assert (other.get(tokens) == blocks).all()
        assert mine.counters.failures == other.counters.failures == {}
    assert server.service.counters.network_bytes_out == (0 if shared_memory else 70 * BLOCK_BYTES)
    assert server.service.counters.stored_blocks == 70


def test_what_crossed_the_network_plane_is_a_copy(server: EmbeddedServer) -> None:
    keys, mine = some_keys(1), connected(server, shared_memory=False)
    assert mine.layout is not None
    write = mine.call(m.PrepareStore("default", mine.layout.layout, 0, b"", keys), 10_000)
    assert isinstance(mine.wait(write), m.Prepared)
    sent = some_blocks(1)
    assert mine.wait(mine.call(m.Put(write.number, 0), 10_000, list(sent))) == m.Done(1)
    put = server.service.sessions.all()[0].network_writes[write.number]
    pool = server.pool.segments.view(int(put.slots[0]), BLOCK_BYTES)
    sent[:] = 0  # the engine uses its memory again
    assert (pool == some_blocks(1)[0]).all()
    assert mine.wait(
        mine.call(m.CompleteStore(write.number, put.checksums.tobytes()), 10_000)
    ) == m.Done(1)
    lookup = mine.call(m.Lookup("default", mine.layout.layout, keys), 10_000)
    mine.wait(lookup)
    fetch = mine.call(m.Fetch(lookup.number, 0, 0, 1), 10_000)
    assert mine.wait(fetch) == m.Done(1)
    pool[:] = 0  # evicted and written anew
    assert [type(frame) for frame in fetch.payload] == [bytes]
    assert fetch.payload[0] == some_blocks(1)[0].tobytes()
    mine.close()


def test_many_threads_store_and_load_at_once(serve: Serve) -> None:
    server = serve(
        pool_bytes=2 * MIB
    )  # 512 blocks, and more are stored: there is eviction all the time

    def work(number: int) -> None:
        with cache(server, shared_memory=number % 3 != 0) as mine:
            for turn in range(20):
                seed = (
                    turn if number % 2 else 1000 * number + turn
                )  # some share their prompts, some do not
                tokens = [100_000 * seed + at for at in range(64)]
                mine.put(tokens, some_blocks(16, seed), salt=f"tenant {seed % 3}")
                got = mine.get(tokens, salt=f"tenant {seed % 3}")
                assert (got == some_blocks(16, seed)[: len(got)]).all()
            assert set(mine.counters.failures) <= {"no_room", "orphan"}, mine.counters.failures

    in_threads(*(lambda number=number: work(number) for number in range(8)))
    assert server.store.eviction.evictions > 0 and server.service.counters.hit_blocks > 0
    assert server.service.counters.internal_errors == 0
    assert server.store.sessions == {}


def test_a_scheduler_and_workers_use_one_server_at_once(server: EmbeddedServer) -> None:
    engines = [Engine(server) for _ in range(3)]

    def work(at: int) -> None:
        engine = engines[at]
        for turn in range(10):
            keys = some_keys(4, f"e{at}.{turn}.")
            engine.memory[:4] = some_blocks(4, 10 * at + turn)
            assert engine.store(keys, [0, 1, 2, 3]) == 4
            answer = engine.lookup(f"r{turn}", keys)
            assert engine.load(keys, answer, [4, 5, 6, 7]) == []
            assert (engine.memory[4:8] == some_blocks(4, 10 * at + turn)).all()
            engine.release(f"r{turn}")

    in_threads(*(lambda at=at: work(at) for at in range(3)))
    for engine in engines:
        engine.close()
    assert server.store.sessions == {}


# --- the transport --------------------------------------------------------------------------------


def test_replies_go_to_the_transport_that_asked(server: EmbeddedServer) -> None:
    one, other = server.transport(), server.transport()
    assert one.send(encode(Header(0, 7), m.Hello("test", os.getpid())))
    assert other.receive() is None
    frames = one.receive()
    assert frames is not None and decode_header(frames).number == 7
    assert isinstance(decode_reply(decode_header(frames), frames), m.Welcome)
    assert one.receive() is None


def test_nonsense_is_counted_and_not_answered_and_after_close_nothing_goes_out(
    server: EmbeddedServer,
) -> None:
    transport = server.transport()
    assert transport.send([b"nonsense"])
    assert transport.receive() is None
    assert server.service.counters.bad_frames == 1
    transport.close()
    assert not transport.send([b"nonsense"])
    assert server.service.counters.bad_frames == 1


def test_one_transport_serves_many_threads(server: EmbeddedServer) -> None:
    transport = server.transport()

    def ask(first: int) -> None:
        for number in range(first, first + 100):
            assert transport.send(encode(Header(0, number), m.Ping()))

    in_threads(*(lambda first=first: ask(first) for first in range(0, 600, 100)))
    numbers = [decode_header(frames).number for frames in iter(transport.receive, None)]
    assert sorted(numbers) == list(range(600))


def test_waiting_ends_with_the_reply_and_costs_nothing_meanwhile(server: EmbeddedServer) -> None:
    transport, other, waited, spent = server.transport(), server.transport(), threading.Event(), []

    def wait() -> None:
        before = time.thread_time()
        transport.wait(60_000)
        spent.append(time.thread_time() - before)
        waited.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not waited.wait(0.3)
    assert other.send(encode(Header(0, 1), m.Ping()))  # somebody else's reply
    assert not waited.wait(0.1)
    assert transport.send(encode(Header(0, 1), m.Ping()))
    assert waited.wait(30)
    assert spent[0] < 0.1
    transport.wait(60_000)  # it is still there
    assert transport.receive() is not None


@pytest.mark.parametrize("closed", [False, True])
def test_waiting_ends_when_the_time_is_over(server: EmbeddedServer, closed: bool) -> None:
    transport = server.transport()
    if closed:
        server.close()
    began, spent = time.monotonic(), time.thread_time()
    transport.wait(200)
    assert 0.19 < time.monotonic() - began < 10
    assert time.thread_time() - spent < 0.1


# --- the end --------------------------------------------------------------------------------------


def test_close_takes_everything_back_and_removes_the_pool(server: EmbeddedServer) -> None:
    mine, tokens = cache(server), list(range(8))
    assert mine.put(tokens, some_blocks(2)) == 2
    chain = KeyChain(root_key(mine.identity, None), mine.identity.block_tokens)
    chain.extend(tokens)
    layout = mine.connection.layout
    assert layout is not None
    mine.connection.wait(
        mine.connection.call(m.Lookup("default", layout.layout, chain.keys()), 1_000)
    )
    assert [len(session.leases) for session in server.store.sessions.values()] == [1]
    server.close()
    assert not server.pool.directory.exists()
    assert server.store.sessions == {} and len(server.service.sessions) == 0
    server.close()


def test_after_close_everything_misses_and_nothing_raises(server: EmbeddedServer) -> None:
    mine, tokens, transport = cache(server, ping_interval_ms=20), list(range(8)), server.transport()
    assert mine.put(tokens, some_blocks(2)) == 2
    assert not transport.lost()
    server.close()
    assert [transport.lost(), transport.lost()] == [True, False]  # said once
    mine.connection.poll()
    assert not mine.connected
    assert len(mine.get(tokens)) == 0 and mine.put(tokens, some_blocks(2)) == 0
    assert mine.counters.failures["unreachable"] > 0
    time.sleep(0.03)
    mine.connection.poll()  # its ping fails: it sees that the pool is gone, and lets go of it
    assert not mine.connection.up and mine.connection.segments is None
    mine.close()


def test_a_request_that_waited_while_the_server_closed_is_not_carried_out(
    server: EmbeddedServer,
) -> None:
    transport, taken, waiting = server.transport(), threading.Event(), threading.Event()

    class Frame:
        def __bytes__(self) -> bytes:
            waiting.set()
            return b""

    def ask() -> None:
        assert taken.wait(30)
        assert not transport.send([Frame()])

    def close() -> None:
        assert waiting.wait(30)
        server.close()

    def let_go() -> None:
        with server.turn:
            taken.set()
            assert eventually(lambda: not server.serving)

    in_threads(let_go, ask, close)
    assert server.service.counters.bad_frames == 0


def test_a_server_can_be_closed_while_clients_use_it(server: EmbeddedServer) -> None:
    tokens, blocks, all_up = list(range(64)), some_blocks(16), threading.Barrier(4, timeout=30)

    def use() -> None:
        with cache(server, lookup_deadline_ms=100, store_deadline_ms=100) as mine:
            all_up.wait()
            while server.serving:
                got = mine.get(tokens)
                assert (got == blocks[: len(got)]).all()
                mine.put(tokens, blocks)

    def close() -> None:
        all_up.wait()
        assert eventually(lambda: server.service.counters.hit_blocks > 100)
        server.close()

    in_threads(use, use, use, close)
    assert server.service.counters.internal_errors == 0
    assert not server.pool.directory.exists()


def test_a_connection_that_was_only_dropped_ends_with_the_next_request(
    server: EmbeddedServer,
) -> None:
    with cache(server) as other:
        mine = cache(server)
        assert mine.put(list(range(8)), some_blocks(2)) == 2
        assert len(server.store.sessions) == 2
        del mine
        gc.collect()
        other.contains([1])
        assert len(server.store.sessions) == 1
        assert server.service.counters.sessions_vanished == 1


def test_a_server_that_was_only_dropped_removes_its_pool(tmp_path: Path) -> None:
    server = EmbeddedServer(MIB, tmp_path)
    directory = server.pool.directory
    assert server.ready.wait(30) and directory.exists()
    del server
    assert eventually(lambda: gc.collect() >= 0 and not directory.exists())


def python(script: str, directory: Path) -> subprocess.Popen[str]:
    """A process with a server in that directory, which says where its pool is and then runs the
    script."""
    code = (
        "import sys, threading, time, pathlib; from kvkeep.server.embedded import EmbeddedServer\n"
    )
    code += "server = EmbeddedServer(1 << 20, pathlib.Path(sys.argv[1])); print(server.pool.directory, flush=True)\n"
    argv = [sys.executable, "-c", code + script, str(directory)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_pool_goes_with_the_interpreter(tmp_path: Path) -> None:
    keeps_it = (
        "threading.Thread(target=lambda mine: time.sleep(600), args=(server,), daemon=True).start()"
    )
    said, errors = python(keeps_it, tmp_path).communicate(timeout=60)
    assert said.startswith(str(tmp_path)) and errors == ""
    assert list(tmp_path.iterdir()) == []


def test_the_pool_of_a_killed_process_goes_with_the_next_start(tmp_path: Path) -> None:
    living, killed, young = (python("time.sleep(600)", tmp_path) for _ in range(3))
    try:
        pools = [
            Path(process.stdout.readline().strip())
            for process in (living, killed, young)
            if process.stdout
        ]
        for process in (killed, young):
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
        for pool in pools[:2]:
            os.utime(pool, (0, 0))
        os.utime(pools[2])
        EmbeddedServer(MIB, tmp_path).close()
        # The young one may be of a process that has not got round to its lock yet.
        assert [pool.exists() for pool in pools] == [True, False, True]
    finally:
        living.kill()
        living.communicate(timeout=60)


def in_child(duty: Callable[[], bool]) -> bool:
    """What the duty says in a forked child, which then does what an interpreter does at its end."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    good = False
    try:
        signal.alarm(30)  # ends a child that is stuck
        good = duty()
        embedded._close_all()
    finally:
        os._exit(0 if good else 1)


def test_a_forked_child_reaches_nothing_and_closes_nothing(server: EmbeddedServer) -> None:
    mine, tokens, transport = cache(server), list(range(8)), server.transport()
    assert mine.put(tokens, some_blocks(2)) == 2

    def use_and_close() -> bool:
        transport.wait(10)
        reached = transport.send(encode(Header(0, 1), m.Ping())) or len(mine.get(tokens)) > 0
        own = server.connection(SHAPE)
        reached = reached or own.wait_until_up(50)
        own.close()
        mine.close()
        server.close()
        return not reached

    with server.turn:  # another thread was in the middle of a request
        assert in_child(use_and_close)
    assert server.pool.directory.exists()
    assert (mine.get(tokens) == some_blocks(2)).all()
    assert mine.counters.failures == {}
    mine.close()


# --- memory ---------------------------------------------------------------------------------------


def test_each_server_has_a_pool_of_its_own_in_shared_memory() -> None:
    one, other = EmbeddedServer(MIB), EmbeddedServer(MIB)
    directories = [server.pool.directory for server in (one, other)]
    assert [path.parent for path in directories] == [Path("/dev/shm")] * 2
    assert directories[0] != directories[1]
    one.close()
    assert [path.exists() for path in directories] == [False, True]
    other.close()
    assert [path.exists() for path in directories] == [False, False]


@pytest.mark.parametrize(
    ("pool_bytes", "below", "problem", "hint"),
    [
        (0, "", "no room for one slab of 1MiB", "a larger kv_offloading_size"),
        (-1, "", "no room for one slab of 1MiB", "a larger kv_offloading_size"),
        (MIB - 1, "", "no room for one slab of 1MiB", "a larger kv_offloading_size"),
        (1 << 60, "", "does not fit", "a smaller kv_offloading_size"),
        (MIB, "nowhere", "No such file", "nowhere"),
    ],
)
def test_a_pool_that_cannot_be_made_is_refused(
    tmp_path: Path, pool_bytes: int, below: str, problem: str, hint: str
) -> None:
    with pytest.raises(PoolError, match=problem) as caught:
        EmbeddedServer(pool_bytes, tmp_path / below)
    assert hint in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_first_segment_that_cannot_be_had_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(PoolError, match="No space left") as caught:
        EmbeddedServer(MIB, tmp_path)
    assert "kv_offloading_size" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


class Filling:
    """Stands in for Pool.fill_next: after the first segment it waits until it is let go on, or
    fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(embedded, "Pool", partial(Pool, segment_bytes=MIB))
        real = Pool.fill_next
        self.go_on, self.fails = threading.Event(), False

        def fill_next(pool: Pool) -> tuple[int, int]:
            if pool.filled_bytes:
                assert self.go_on.wait(30)
                if self.fails:
                    raise PoolError("no more memory")
            return real(pool)

        monkeypatch.setattr(Pool, "fill_next", fill_next)


def test_it_serves_while_the_rest_of_the_pool_is_filled(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    filling = Filling(monkeypatch)
    server = serve(pool_bytes=4 * MIB)
    with cache(server) as mine:
        assert mine.put(list(range(64)), some_blocks(16)) == 16
        assert server.store.slabs.capacity_bytes == MIB and not server.ready.is_set()
        filling.go_on.set()
        assert server.ready.wait(30)
        assert server.store.slabs.capacity_bytes == 4 * MIB
        tokens = list(range(10_000, 10_000 + 4 * 900))  # of 1024
        assert mine.put(tokens, some_blocks(900)) == 900
        assert (mine.get(tokens) == some_blocks(900)).all()
        assert server.store.eviction.evictions == 0


def test_with_less_memory_than_asked_for_it_serves_with_that(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filling = Filling(monkeypatch)
    filling.fails = True
    filling.go_on.set()
    server = serve(pool_bytes=4 * MIB)
    assert server.ready.wait(30)
    assert server.degraded == "no more memory" and "no more memory" in caplog.text
    with cache(server) as mine:
        assert mine.put([1, 2, 3, 4], some_blocks(1)) == 1


def test_close_ends_the_filling(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    filling = Filling(monkeypatch)
    server = serve(pool_bytes=64 * MIB)
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    assert eventually(lambda: not server.serving)
    filling.go_on.set()
    closing.join(30)
    assert not closing.is_alive() and not server.pool.directory.exists()
    assert server.ready.wait(30)
    assert server.pool.filled_bytes <= 2 * MIB and server.degraded == ""
