"""Processes that stop themselves at a point, with SIGSTOP, and go on when they get SIGCONT.

    python fenced.py client POINT ADDRESS NUMBER [BUG]   stores or loads the blocks of a number
    python fenced.py server POINT ARMED BUG serve …      `kvkeep serve`; stops when a file ARMED exists

A BUG is planted by its name (`kvkeep_lab.chaos.mutants`). Readers do not verify checksums, so that
only the fence protects them from a byte that is not theirs; writers send checksums, without which
the next server adopts no block."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clients
import numpy as np

import kvkeep
from kvkeep.client import connection, copier, requests, shared_pool
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.stores import SourceBlocks, Store
from kvkeep.client.transfer import Transfer
from kvkeep.kv.keys import KeyChain, root_key
from kvkeep.kv.runs import BlockRuns
from kvkeep.server.service import Service
from kvkeep.store import adopt
from kvkeep.store.slabs import Slabs
from kvkeep.wire import messages as m
from kvkeep.wire import segments
from kvkeep.wire.pool_files import PoolFiles

BLOCKS = 8
STALE = "slots of a server that is gone"


def connect(address: str, **options: Any) -> kvkeep.Cache:
    """A client that notices soon what happens to its server."""
    return clients.connect(address, ping_interval_ms=50, reconnect_interval_ms=20, **options)


def tokens_of(number: int) -> list[int]:
    """The prompt of that number, as many blocks as each process has."""
    first = 1_000_000 + number * 10_000
    return list(range(first, first + BLOCKS * clients.BLOCK_TOKENS))


def stop() -> None:
    """All threads of this process, here and now."""
    os.kill(os.getpid(), signal.SIGSTOP)


_stopped = False


def stop_once(*_: object) -> None:
    global _stopped
    if not _stopped:
        _stopped = True
        clients.say(stops=True)
        stop()


def before(owner: Any, name: str, act: Callable[..., Any]) -> None:
    """Calls `act` with the same arguments before each call."""
    right = getattr(owner, name)

    @functools.wraps(right)
    def wrapped(*args: Any, **options: Any) -> Any:
        act(*args)
        return right(*args, **options)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, act: Callable[[], None]) -> None:
    right = getattr(owner, name)

    @functools.wraps(right)
    def wrapped(*args: Any, **options: Any) -> Any:
        result = right(*args, **options)
        act()
        return result

    setattr(owner, name, wrapped)


def in_the_middle(name: str) -> None:
    """A copy in two halves."""
    right = getattr(copier, name)

    def halved(runs: Any, block_ids: Any, slots: Any, *rest: Any, **options: Any) -> Any:
        half = len(block_ids) // 2
        parts = []
        for part in (slice(0, half), slice(half, None)):
            parts.append(right(runs, block_ids[part], slots[part], *rest, **options))
            stop_once()
        return np.concatenate(parts) if parts[0] is not None else None

    setattr(copier, name, halved)


def stop_if_store_completes(_: object, message: m.Message, *__: object) -> None:
    if isinstance(message, m.CompleteStore):
        stop_once()


# How to plant the stop of a client at each point.
POINTS: dict[str, Callable[[], None]] = {
    "store: after Prepared, before the pool is held": lambda: before(Store, "_write", stop_once),
    "store: before a segment is opened": lambda: before(segments.Segments, "_map", stop_once),
    "store: a segment is opened, its epoch not yet looked at": lambda: before(
        PoolFiles, "is_of", stop_once
    ),
    "store: its epoch was looked at, not yet mapped": lambda: after(PoolFiles, "is_of", stop_once),
    "store: before the copy": lambda: before(SourceBlocks, "copy", stop_once),
    "store: in the middle of the copy": lambda: in_the_middle("gather"),
    "store: after the copy, before CompleteStore": lambda: before(
        connection.Connection, "call", stop_if_store_completes
    ),
    f"store: {STALE}": lambda: None,
    "load: after Found, before the pool is held": lambda: after(kvkeep.Cache, "_lookup", stop_once),
    "load: in the middle of the copy": lambda: in_the_middle("scatter"),
    "load: before Release": lambda: before(connection.Connection, "give_up", stop_once),
    f"load: {STALE}": lambda: None,
    "hello: Welcome has come": lambda: before(shared_pool.SharedPool, "attach", stop_once),
    "hello: the pool was looked at, the lock not yet taken": lambda: before(
        shared_pool, "hold", stop_once
    ),
    "hello: the lock is taken, Attach not yet said": lambda: after(
        shared_pool.SharedPool, "attach", stop_once
    ),
}


def client(point: str, address: str, number: str, bug: str = "") -> None:
    """Says `stops`, is stopped, goes on, and says how many blocks it got or stored, and whether all
    that it read was right."""
    tokens, verify = tokens_of(int(number)), not point.startswith("load")
    expected = clients.oracle(tokens)
    with planted(bug):
        if point.startswith("hello"):
            POINTS[point]()
        with connect(address, verify=verify) as cache:
            if not point.startswith("hello"):
                POINTS[point]()
            if point.endswith(STALE):
                late(cache, tokens, point)
            elif point.startswith("load"):
                blocks = cache.get(tokens)
                clients.say(loaded=len(blocks), right=clients.same(blocks, expected))
            else:
                clients.say(stored=cache.put(tokens, expected), right=True)
            sys.stdin.readline()


def late(cache: Any, tokens: list[int], point: str) -> None:
    """Has slots of one server, and uses them when it is connected to the next one. If that one is
    the same server, the slots are still its own."""
    chain = KeyChain(root_key(cache.identity, None), clients.BLOCK_TOKENS)
    chain.extend(tokens)
    used = cache.connection
    layout, epoch = used.layout.layout, used.epoch
    loads = point.startswith("load")
    ask = (
        m.Lookup("default", layout, chain.keys())
        if loads
        else m.PrepareStore("default", layout, 0, b"", chain.keys())
    )
    call = used.call(ask, 10_000)
    answer = used.wait(call)
    assert isinstance(answer, m.Found | m.Prepared) and call.epoch == epoch
    slots = np.frombuffer(answer.slots, "<i8")
    clients.say(slots=len(slots))
    sys.stdin.readline()  # meanwhile there is another server, maybe
    assert used.wait_until_up(10_000)
    clients.say(moved=used.epoch != epoch)
    stop_once()
    blocks = np.zeros((len(slots), *clients.SHAPE), np.float32) if loads else clients.oracle(tokens)
    transfer = Transfer(used, [GroupMemory(BlockRuns.of([blocks]))], 0)
    if loads:
        sums = np.frombuffer(answer.checksums, "<u8").reshape(-1, 1)
        request = requests.LoadRequest(
            "default", chain.keys(), 0, np.arange(len(slots)), epoch, slots, sums
        )
        good = transfer.load(request)
        clients.say(
            loaded=int(good.sum()), right=clients.same(blocks[good], clients.oracle(tokens)[good])
        )
        return
    with transfer.addresses(0, slots, call.epoch, call.session) as addresses:
        if addresses is not None:
            copier.gather(BlockRuns.of([blocks]), np.arange(len(slots)), addresses, verify=False)
    clients.say(stored=0, right=True, wrote=addresses is not None)


def planted(bug: str) -> contextlib.AbstractContextManager[None]:
    if not bug:
        return contextlib.nullcontext()
    from kvkeep_lab.chaos import mutants

    return mutants.planted(bug)


def server(point: str, armed: str, bug: str, *command: str) -> None:
    def stop_if_armed(*_: object) -> None:
        if Path(armed).exists():
            Path(armed).unlink()
            stop()

    from kvkeep.cli.main import main

    if point:
        plant, owner, name = SERVER_POINTS[point]
        plant(owner, name, stop_if_armed)
    with planted(bug):
        sys.argv = ["kvkeep", *command]
        main()


SERVER_POINTS: dict[str, tuple[Callable[..., None], Any, str]] = {
    "before Prepared is sent": (after, Service, "_prepare_store"),
    "a slot was freed": (after, Slabs, "give"),
    "adoption: nothing is settled": (before, adopt, "_settle"),
    "adoption: all is settled": (after, adopt, "_settle"),
}

if __name__ == "__main__":
    {"client": client, "server": server}[sys.argv[1]](*sys.argv[2:])
