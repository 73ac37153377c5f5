"""What it costs to observe: attribution of misses and metrics, reports of requests, events for
routers. Each with and without, in alternating turns of one run.

    lookup             in a scheduler's session: of a server as shipped (its traces off), and of one
                       that neither counts nor attributes
    step               of the reference engine, in most of which a request ends
    store_with_events  of an engine that describes what it stores and takes in the pool's events,
                       and of one that does not, each with a server of its own

The server that neither counts nor attributes is a process of this module (`main`), in which a few
functions do nothing. There is no such setting."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import numpy as np

from kvkeep.bench.lookup import fill, timed
from kvkeep.cli import main as command_line
from kvkeep.client.connection import Connection, Heartbeat
from kvkeep.client.options import ClientOptions
from kvkeep.client.pool_events import Descriptions, PoolFeed
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import StoreRequest
from kvkeep.client.transfer import Transfer
from kvkeep.connector.reports import RequestReports
from kvkeep.errors import Unavailable
from kvkeep.kv.identity import DEFAULT_TENANT, ModelIdentity
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape
from kvkeep.server.counters import CountsByTenant, Latency
from kvkeep.store.departed import Departures
from kvkeep.store.store import Store
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess
from kvkeep.units import KIB, MIB
from kvkeep.wire import messages as m

_LOOKUP_BLOCKS = (128, 512, 2048, 8192)
_LOOKUP_BLOCK_BYTES = 4 * KIB
_RESIDENT_BLOCKS = 4 * max(_LOOKUP_BLOCKS)
_WARM_UP = 10
# "alike" is observed as "with" is, in a server of its own
_SERVERS = ("with", "without", "alike")
_REQUESTS, _PROMPT_TOKENS, _LEAST_ANSWER_TOKENS = 32, 40, 4
_STORED_BLOCK_BYTES = 64 * KIB
_CHAIN_BLOCKS, _CHAINS = 64, 16  # of a turn
_TURN_BYTES, _STORE_POOL = _CHAINS * _CHAIN_BLOCKS * _STORED_BLOCK_BYTES, "256MiB"
_FILLING = 4  # turns until it is full
_DESCRIPTION = bytes(128)  # as long as that of a block of 16 tokens
_DEADLINE_MS = 10_000

OPTIONS = {"rounds": "Turns of steps and of stores."}


def run(lookups: int = 1000, rounds: int = 20) -> dict[str, Any]:
    """Starts the servers that each comparison needs."""
    return {"rows": [*_lookup_rows(lookups), _step_row(rounds), _store_row(rounds)]}


def _row(facts: dict[str, Any], unit: str, took: dict[str, list[float]]) -> dict[str, Any]:
    """The medians with and without what is observed, and their ratio. Where there is a second
    server that is observed, how the two compare says how much of the ratio is chance."""
    medians = {name: float(np.median(each)) for name, each in took.items()}
    raw = {f"{name}_{unit}": round(median, 4) for name, median in medians.items()}
    row = {**facts, **raw, "ratio": round(medians["with"] / medians["without"], 4)}
    if "alike" in medians:
        row["alike_ratio"] = round(medians["alike"] / medians["with"], 4)
    return row


def _turns(took: dict[str, list[float]], turn: int) -> list[str]:
    """All of them, each as often first as last."""
    names = list(took)
    at = turn % len(names)
    return names[at:] + names[:at]


# -- lookups


class _BareServer(ServerProcess):
    """Neither counts nor attributes what is looked up."""

    def command(self) -> Sequence[str]:
        return [__name__ if each == "kvkeep.cli.main" else each for each in super().command()]


def _lookup_rows(lookups: int) -> Iterator[dict[str, Any]]:
    pool = "--pool-size", f"{_RESIDENT_BLOCKS * _LOOKUP_BLOCK_BYTES * 2 // MIB}MiB"
    with ExitStack() as ends:
        chains: dict[str, bytes] = {}
        connections: dict[str, Connection] = {}
        for name in _SERVERS:
            kind = _BareServer if name == "without" else ServerProcess
            server = ends.enter_context(kind(*pool))
            connections[name] = _connected(server, _LOOKUP_BLOCK_BYTES, m.SCHEDULER)
            ends.callback(connections[name].close)
            chains[name] = fill(connections[name], _RESIDENT_BLOCKS)[0]
        for blocks, result in product(_LOOKUP_BLOCKS, ("hit", "miss")):
            took: dict[str, list[float]] = {name: [] for name in _SERVERS}
            for turn in range(lookups + _WARM_UP):
                for name in _turns(took, turn):
                    nbytes = blocks * KEY_BYTES
                    keys = chains[name][:nbytes] if result == "hit" else os.urandom(nbytes)
                    lookup_us = _lookup_us(connections[name], keys, result)
                    took[name] += [lookup_us] if turn >= _WARM_UP else []
            yield _row({"what": "lookup", "blocks": blocks, "result": result}, "us", took)


def _lookup_us(connection: Connection, keys: bytes, result: str) -> float:
    message = m.Lookup(DEFAULT_TENANT, connection.layout_number, keys)
    took_us, (lease, found) = timed(connection, message)
    assert isinstance(found, m.Found)
    assert found.blocks * KEY_BYTES == (len(keys) if result == "hit" else 0)
    timed(connection, m.Release([lease]))
    return took_us


def _connected(server: ServerProcess, block_bytes: int, role: str) -> Connection:
    identity = ModelIdentity(
        model="bench", revision="1", kv_dtype="uint8", block_tokens=16, content="bench observe"
    )
    options = ClientOptions(server.address, lookup_deadline_ms=_DEADLINE_MS)
    connection = Connection(BlockShape(identity, (block_bytes,)), options)
    connection.role = role
    if not connection.wait_until_up(_DEADLINE_MS):
        raise Unavailable(f"no session with {server.address}: {connection.refusal}")
    return connection


# -- steps


def _step_row(rounds: int) -> dict[str, Any]:
    from kvkeep.engine.demo_model import BLOCK_TOKENS, MODEL, compute_threads, demo_model, make_llm

    rng = np.random.default_rng(0)
    tokens = _PROMPT_TOKENS + _LEAST_ANSWER_TOKENS + _REQUESTS
    num_blocks = _REQUESTS * (tokens // BLOCK_TOKENS + 2)
    took: dict[str, list[float]] = {"with": [], "without": []}
    model = demo_model(replace(MODEL, num_layers=2))
    with (
        compute_threads(1),
        ServerProcess("--pool-size", "256MiB") as server,
        make_llm(model, server.address, num_blocks, prefix_caching=False) as llm,
    ):
        for turn in range(rounds + 1):
            for name in _turns(took, turn):
                prompts = rng.integers(0, MODEL.vocab_size, (_REQUESTS, _PROMPT_TOKENS)).tolist()
                without = mock.patch.object(RequestReports, "of", _nothing)
                with without if name == "without" else nullcontext():
                    steps_ms = _steps_ms(llm, prompts)
                took[name] += steps_ms if turn else []  # the first turn warms up
        reported = (rounds + 1) * _REQUESTS
        assert eventually(lambda: server.ask()["figures"]["requests"] == reported)
    return _row({"what": "step"}, "ms", took)


def _steps_ms(llm: Any, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Of all steps that computed something."""
    from kvkeep.engine.models.sampling import SamplingParams

    for at, prompt in enumerate(prompts):
        llm.engine.add(prompt, SamplingParams(max_tokens=_LEAST_ANSWER_TOKENS + at))
    took = []
    while llm.engine.busy:
        started = time.perf_counter()
        llm.engine.step()
        if not llm.engine.waits:
            took.append((time.perf_counter() - started) * 1e3)
        llm.engine.pause()
    llm.engine.flush()
    return took


# -- stores


class _Router:
    """Takes in the pool's events, as what publishes them does, and describes what was stored."""

    is_full = False

    def __init__(self) -> None:
        self.stored: deque[bytes] = deque()  # keys of chains
        self.places = 0

    def describe(self, most: int) -> Descriptions | None:
        keys = self.stored.popleft() if self.stored else b""
        texts = [_DESCRIPTION] * (len(keys) // KEY_BYTES)
        return Descriptions(DEFAULT_TENANT, keys, texts) if keys else None

    def place(self, address: bytes, media: int, text: bytes) -> None:
        self.places += 1

    def tidy(self) -> None: ...

    forget_notes = begin_content = end_content = tidy


def _store_row(rounds: int) -> dict[str, Any]:
    took: dict[str, list[float]] = {name: [] for name in _SERVERS}
    routers = {name: _Router() for name in _SERVERS if name != "without"}
    with ExitStack() as ends:
        blocks = np.ones((_CHAIN_BLOCKS, _STORED_BLOCK_BYTES), np.uint8)
        transfers: dict[str, Transfer] = {}
        for name in took:
            server = ends.enter_context(ServerProcess("--pool-size", _STORE_POOL))
            connection = _connected(server, _STORED_BLOCK_BYTES, "worker")
            ends.callback(connection.close)
            if name in routers:
                connection.background = PoolFeed(routers[name]).turn
            Heartbeat.keep(connection)
            transfers[name] = Transfer(connection, [GroupMemory(BlockRuns.of([blocks]))], 0)
        for turn in range(rounds + _FILLING):
            for name in _turns(took, turn):
                gbps = _store_gbps(transfers[name], routers.get(name))
                took[name] += [gbps] if turn >= _FILLING else []
        assert eventually(lambda: all(not r.stored and r.places for r in routers.values()))
    return _row({"what": "store_with_events"}, "gbps", took)


def _store_gbps(transfer: Transfer, router: _Router | None) -> float:
    chains = [os.urandom(_CHAIN_BLOCKS * KEY_BYTES) for _ in range(_CHAINS)]
    started = time.perf_counter()
    for keys in chains:
        stored = transfer.store(StoreRequest(DEFAULT_TENANT, b"", keys, np.arange(_CHAIN_BLOCKS)))
        assert stored.written == _CHAIN_BLOCKS, stored
        if router:
            router.stored.append(keys)
    return _TURN_BYTES / (time.perf_counter() - started) / 1e9


def _nothing(*_: object) -> None: ...


def main() -> None:
    """`kvkeep` with a server that neither counts nor attributes lookups."""
    with (
        mock.patch.object(m, "SCHEDULER", ""),  # so the lookups of no session are attributed
        mock.patch.object(Store, "remember_departures", staticmethod(Departures)),
        mock.patch.object(Latency, "add", _nothing),
        mock.patch.object(CountsByTenant, "count_lookup", _nothing),
    ):
        command_line.main()


if __name__ == "__main__":
    main()
