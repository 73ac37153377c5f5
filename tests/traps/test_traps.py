"""Traps that no other test covers: faults that users of another cache server met, shown not to
happen here with real processes. docs/concepts/traps.md lists the tests of every trap."""

from __future__ import annotations

import ast
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import clients
import pytest
from clients import BLOCK_TOKENS, SMALL_POOL, SMALL_POOL_BLOCKS, Client, holds, stores
from engines import (
    BRISK,
    KEY,
    Since,
    at_rest,
    counting,
    engine,
    eventually,
    forget_local,
    oracle,
    prompt,
    serve,
    status,
    tokens_of,
    usage,
    without_cache,
)

import kvkeep
from kvkeep.cli.remote import ask
from kvkeep.engine.llm import LLM
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m
from kvkeep_lab.simulation.relay import Relay
from kvkeep_lab.simulation.strange import daemon_in_thread

TOKENS = list(range(40))


# -- 2: errors are never answered; sides that disagree on the data plane hang


def test_a_fault_inside_the_server_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--pool-size", "1MiB", "--slab-size", "64KiB")
    with daemon_in_thread(tmp_path, *flags) as daemon, clients.connect(daemon.address) as cache:
        assert stores(cache, TOKENS) == 10
        with monkeypatch.context() as patched:
            patched.setattr(daemon.store, "lookup", lambda *_, **__: 1 / 0)
            layout = cache.connection.layout
            assert layout is not None
            call = cache.connection.call(m.Lookup("default", layout.layout, b"k" * 16), 600_000)
            cache.connection.wait(call)  # returns before ten minutes only if the server answers
            assert len(cache.get(TOKENS)) == 0
        assert daemon.service.counters.internal_errors == 2
        assert holds(cache, TOKENS) == 10


@pytest.mark.parametrize("stores_by", [True, False])
def test_engines_that_move_bytes_in_different_ways_share_blocks(
    server: ServerProcess, stores_by: bool
) -> None:
    """One engine maps the pool, the other uses the network."""
    model, tokens = oracle(), prompt(22)
    with engine(server, model, extra={"kvkeep.shared_memory": stores_by}) as one:
        serve(one, [tokens])
    with engine(server, model, extra={"kvkeep.shared_memory": not stores_by}) as two:
        [answer] = serve(two, [counting(tokens)])
        planes = {session["plane"] for session in status(server)["sessions"]}
        assert planes == {"network" if stores_by else "shared_memory"}
    assert answer.kv_transfer_params == {KEY: 20}
    assert [answer.token_ids] == without_cache(model, [tokens])


# -- 3: a server that was paused writes into engine blocks that were given to others


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_server_that_was_paused_writes_nothing_into_an_engine(
    server: ServerProcess, shared_memory: bool
) -> None:
    model, prompts = oracle(), [prompt(40) for _ in range(7)]
    with engine(server, model) as other:
        serve(other, prompts[:1])
    extra = {**BRISK, "kvkeep.shared_memory": shared_memory}
    with engine(server, model, extra=extra, num_blocks=24) as llm:  # each prompt reuses all blocks
        server.send(signal.SIGSTOP)
        answers = [llm.generate([counting(tokens)])[0] for tokens in prompts]
        llm.engine.flush()
        before = all_kv(llm)
        server.send(signal.SIGCONT)
        since = Since(server)
        forget_local(llm)
        assert eventually(lambda: any(since.requests(kind) for kind in ("Ping", "Lookup", "Hello")))
        assert at_rest(server), "the server has handled what it was asked while it was paused"
        assert all_kv(llm) == before
        assert tokens_of(answers) == without_cache(model, prompts, max_tokens=16)
        assert [each.kv_transfer_params for each in answers] == [{KEY: 0}] * 7

        def hits() -> bool:
            forget_local(llm)
            return serve(llm, prompts[:1])[0].metrics.external_cached_tokens == 36

        assert eventually(hits), "the cache is used again"


def all_kv(llm: LLM) -> bytes:
    """Every byte of the engine's KV memory."""
    ranks = llm.engine.workers.ranks
    return b"".join(layer.numpy().tobytes() for rank in ranks for layer in rank.kv.values())


# -- 6: eight stuck loads block all requests


def test_eight_stuck_loads_block_nobody(server: ServerProcess) -> None:
    """Eight processes are stopped in a load, and eight connections send half a message."""
    with clients.connect(server.address) as cache:
        assert stores(cache, TOKENS) == 10
    stuck = [Client("hold_lease", server.address, 40) for _ in range(8)]
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    mute = [socket.create_connection((host, int(port))) for _ in range(8)]
    try:
        for client in stuck:
            assert client.receive() == {"blocks": 10}
            client.signal(signal.SIGSTOP)
        for each in mute:
            each.sendall(b"\xff\0\0\0")
        assert status(server)["leases"] == 8
        model, mine = oracle(), prompt(22)
        with engine(server, model) as one, engine(server, model) as two:
            serve(one, [mine])
            [answer] = serve(two, [counting(mine)])
        assert answer.kv_transfer_params == {KEY: 20}
        assert [answer.token_ids] == without_cache(model, [mine])
        with clients.connect(server.address) as cache:
            assert holds(cache, TOKENS) == 10
        assert eventually(lambda: status(server)["leases"] == 8), "they were stuck all the time"
    finally:
        for client in stuck:
            client.end()
        for each in mute:
            each.close()
    assert eventually(lambda: status(server)["leases"] == 0), "the leases came back"


# -- 8: eviction lags, what does not fit is reported as stored, a quota ends the evictor

BATCH = SMALL_POOL_BLOCKS // 4


@pytest.fixture
def small() -> Iterator[ServerProcess]:
    with ServerProcess(*SMALL_POOL) as running:
        yield running


def numbered(number: int, blocks: int = BATCH) -> list[int]:
    return [number, *range(blocks * BLOCK_TOKENS - 1)]


def test_what_is_reported_as_stored_is_there_at_once(small: ServerProcess) -> None:
    """Ten times the pool, without a pause for an evictor."""
    with clients.connect(small.address) as cache:
        for number in range(40):
            assert stores(cache, numbered(number)) == holds(cache, numbered(number)) == BATCH
            assert usage(small)["default"] <= SMALL_POOL_BLOCKS
        assert usage(small) == {"default": SMALL_POOL_BLOCKS}, "full, to the last block"
        assert status(small)["counters"]["evictions"] == 40 * BATCH - SMALL_POOL_BLOCKS


def test_what_finds_no_room_is_not_reported_as_stored(small: ServerProcess) -> None:
    holder = Client("store_half", small.address, (SMALL_POOL_BLOCKS - 3) * BLOCK_TOKENS)
    assert holder.receive() == {"slots": SMALL_POOL_BLOCKS - 3}
    tokens = numbered(1, blocks=10)
    with clients.connect(small.address) as cache:
        assert stores(cache, tokens) == 3 == cache.contains(tokens)
        assert status(small)["counters"]["refused_blocks"] == 7
        holder.end()
        assert at_rest(small)
        assert stores(cache, tokens) == 7 and holds(cache, tokens) == 10


def test_a_quota_is_kept_and_ends_nothing(small: ServerProcess) -> None:
    path, salt = f"/v1/tenants/{tenant_of('greedy')}/quota", "greedy"
    with clients.connect(small.address) as cache:
        assert stores(cache, numbered(7)) == BATCH
        for quota_blocks in (20, 5, 0, 1):
            ask(small.http, path, "PUT", {"quota_bytes": quota_blocks * clients.BLOCK_BYTES})
            for number in range(5):
                tokens = numbered(number, blocks=10)
                assert stores(cache, tokens, salt) <= holds(cache, tokens, salt)
        assert cache.contains(numbered(7)) == BATCH, "other tenants keep their blocks"
        ask(small.http, path, "PUT", {"quota_bytes": None})
        for number in range(100, 108):
            assert stores(cache, numbered(number)) == BATCH == cache.contains(numbered(number))
    assert eventually(lambda: status(small)["sessions"] == [])


# -- 9: leases that outlive an abort, sets that only grow, GPU memory of engines that are gone


def test_aborts_at_every_moment_leave_no_lease_and_no_memory_of_the_request(
    server: ServerProcess,
) -> None:
    model, tokens = oracle(), prompt(22)
    with engine(server, model) as llm:
        serve(llm, [tokens])
        for number in range(200):
            forget_local(llm)
            request = llm.engine.add(tokens)
            for _ in range(number % 4):
                llm.engine.step()
            llm.engine.abort(request.request_id)
        llm.engine.step()
        assert llm.engine.flush()
        assert at_rest(server), "no lease waits for a timer"
        planner = llm.engine.scheduler.planner
        assert planner is not None and planner.idle
        [answer] = serve(llm, [counting(tokens)])
        assert answer.kv_transfer_params == {KEY: 20}


def test_the_server_can_hold_no_gpu_memory(server: ServerProcess) -> None:
    """It never maps an engine's memory, and loads neither CUDA nor torch."""
    with engine(server, oracle()) as llm:
        serve(llm, [prompt(22)])
        maps = Path(f"/proc/{server.pid}/maps").read_text()
    assert "segment-00000" in maps
    assert not [name for name in ("libcuda", "libcudart", "torch", "nvidia") if name in maps]


# -- 10: tokens in every message

REPORT = m.ReportRequests.__name__.encode()  # sent in a moment, after a request has ended


def bytes_of_a_hit(server: ServerProcess, block_tokens: int, blocks: int, steps: int = 1) -> int:
    """How many bytes an engine sends for a request that hits and then generates `steps` tokens."""
    model, tokens = oracle(), [at * 31 % 97 for at in range(block_tokens * blocks + 1)]
    with (
        Relay(server.address) as wire,
        engine(
            wire.address,
            model,
            extra={"kvkeep.ping_interval_ms": 86_400_000},
            block_tokens=block_tokens,
            num_blocks=4 * blocks + 64,
            max_num_batched_tokens=4096,
        ) as llm,
    ):
        serve(llm, [tokens], max_tokens=1)
        forget_local(llm)
        assert eventually(lambda: REPORT in wire.sent)
        before = len(wire.sent)
        [answer] = serve(llm, [counting(tokens)], max_tokens=steps)
        assert eventually(lambda: b"Release" in wire.sent[before:])
        assert eventually(lambda: REPORT in wire.sent[before:]), "its last message"
        said = len(wire.sent) - before
    assert answer.kv_transfer_params == {KEY: block_tokens * blocks}
    return said


def test_what_is_sent_grows_with_blocks_and_not_with_tokens_or_steps(server: ServerProcess) -> None:
    few = bytes_of_a_hit(server, block_tokens=4, blocks=100)
    assert few > 100 * KEY_BYTES
    eightfold = bytes_of_a_hit(server, block_tokens=32, blocks=100)
    assert abs(eightfold - few) < 200, "eight times the tokens, the same bytes"
    double = bytes_of_a_hit(server, block_tokens=4, blocks=200)
    assert abs(double - few - 100 * KEY_BYTES) < 200, "16 bytes more for each block"
    often = bytes_of_a_hit(server, block_tokens=32, blocks=100, steps=25)
    assert abs(often - eightfold) < 200, "25 steps that fill no block send no more than one"


# -- 11: pickle on network bytes

RUNS_CODE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
RUNS_CODE_CALLS = {"eval", "exec", "compile", "__import__", "torch.load"}


def offences(text: str) -> list[str]:
    """What in a source could run code that came as data."""
    modules, calls, keywords = [], [], []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
        elif isinstance(node, ast.Call):
            calls.append(ast.unparse(node.func))
            keywords += [word.arg for word in node.keywords]
    return [
        *(name for name in modules if name.partition(".")[0] in RUNS_CODE),
        *(name for name in calls if name in RUNS_CODE_CALLS or name.endswith("_pyobj")),
        *(name for name in keywords if name == "allow_pickle"),
    ]


def test_nothing_in_the_source_unpickles_or_evaluates() -> None:
    sources = sorted(Path(kvkeep.__file__).parent.rglob("*.py"))
    assert len(sources) > 50
    assert {path.name: bad for path in sources if (bad := offences(path.read_text()))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "eval(x)",
        "s.recv_pyobj()",
        "np.load(f, allow_pickle=True)",
        "torch.load(f)",
    ],
)
def test_code_that_unpickles_or_evaluates_is_found(text: str) -> None:
    assert offences(text)
