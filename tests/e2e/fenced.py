"""Processes that stop themselves at a point, with SIGSTOP, and go on whenever somebody sends
SIGCONT.

    python fenced.py client POINT ADDRESS NUMBER [BUG]     stores or loads the blocks of a number, with the real client
    python fenced.py server POINT ARMED BUG serve …        `kvkeep serve`; stops once when the file ARMED is there

A BUG is planted by its name (`kvkeep_lab.chaos.mutants`). Readers do not verify checksums, so that
only the fence is left between them and a byte that is not theirs; who stores sends checksums, or
nobody would adopt the blocks."""

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
from kvkeep.client.options import ClientOptions
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.stores import SourceBlocks, Store
from kvkeep.client.transfer import Transfer
from kvkeep.kv.keys import KeyChain, root_key
from kvkeep.kv.runs import BlockRuns
from kvkeep.wire import messages as m
from kvkeep.wire import segments
from kvkeep.wire.pool_files import PoolFiles

BLOCKS = 8
QUICK = {"ping_interval_ms": 50, "reconnect_interval_ms": 20}  # to notice what happens
# On a busy machine, too, answers are waited for.
PATIENT = {"lookup_deadline_ms": 20_000, "store_deadline_ms": 20_000}
STORES = (
    "store: after Prepared, before the pool is held",
    "store: before a segment is opened",
    "store: a segment is opened, its epoch not yet looked at",
    "store: its epoch was looked at, not yet mapped",
    "store: before the copy",
    "store: in the middle of the copy",
    "store: after the copy, before CompleteStore",
    "store: slots of a server that is gone",
)
LOADS = (
    "load: after Found, before the pool is held",
    "load: in the middle of the copy",
    "load: before Release",
    "load: slots of a server that is gone",
)
HANDSHAKES = (
    "hello: Welcome has come",
    "hello: the pool was looked at, the lock not yet taken",
    "hello: the lock is taken, Attach not yet said",
)
POINTS = (*STORES, *LOADS, *HANDSHAKES)
STALE = "slots of a server that is gone"
SERVER_POINTS = (
    "before Prepared is sent",
    "a slot was freed",
    "adoption: nothing is settled",
    "adoption: all is settled",
)


def connect(address: str, **options: Any) -> kvkeep.Cache:
    """Waits for the session as long as it takes: who is stopped in the middle of a handshake is
    late."""
    return kvkeep.connect(
        model="tiny",
        revision="1",
        block_tokens=clients.BLOCK_TOKENS,
        block_shape=clients.SHAPE,
        dtype="float32",
        required=True,
        wait_ms=300_000,
        options=ClientOptions(address=address, **{**QUICK, **PATIENT, **options}),
    )


def tokens_of(number: int) -> list[int]:
    """The prompt of that number, as many blocks as each process has."""
    first = 1_000_000 + number * 10_000
    return list(range(first, first + BLOCKS * clients.BLOCK_TOKENS))


def stop() -> None:
    """All threads of this process, here and now."""
    os.kill(os.getpid(), signal.SIGSTOP)


_stopped = False


def stop_once() -> None:
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


def arm(point: str) -> None:
    """Plants the stop of a client."""
    match point.partition(": ")[::2]:
        case "store", "after Prepared, before the pool is held":
            before(Store, "_write", lambda *_: stop_once())
        case "store", "before a segment is opened":
            before(segments.Segments, "_map", lambda *_: stop_once())
        case "store", "a segment is opened, its epoch not yet looked at":
            before(PoolFiles, "is_of", lambda *_: stop_once())
        case "store", "its epoch was looked at, not yet mapped":
            after(PoolFiles, "is_of", stop_once)
        case "store", "before the copy":
            before(SourceBlocks, "copy", lambda *_: stop_once())
        case "store", "in the middle of the copy":
            in_the_middle("gather")
        case "store", "after the copy, before CompleteStore":
            before(
                connection.Connection,
                "call",
                lambda self, message, *_: (
                    stop_once() if isinstance(message, m.CompleteStore) else None
                ),
            )
        case "load", "after Found, before the pool is held":
            after(kvkeep.Cache, "_lookup", stop_once)
        case "load", "in the middle of the copy":
            in_the_middle("scatter")
        case "load", "before Release":
            before(connection.Connection, "give_up", lambda *_: stop_once())
        case "hello", "Welcome has come":
            before(shared_pool.SharedPool, "attach", lambda *_: stop_once())
        case "hello", "the pool was looked at, the lock not yet taken":
            before(shared_pool, "hold", lambda *_: stop_once())
        case "hello", "the lock is taken, Attach not yet said":
            after(shared_pool.SharedPool, "attach", stop_once)
        case _, other:
            assert other == STALE, point


def client(point: str, address: str, number: str, bug: str = "") -> None:
    """Says `stops`, is stopped, goes on, and says what came of it: blocks that it got, or stored,
    and whether all it read was right."""
    tokens, verify = tokens_of(int(number)), not point.startswith("load")
    expected = clients.oracle(tokens)
    with planted(bug):
        if point.startswith("hello"):
            arm(point)
        with connect(address, verify=verify) as cache:
            if not point.startswith("hello"):
                arm(point)
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
    from kvkeep_lab.chaos.mutants import planted

    return planted(bug)


def server(point: str, armed: str, bug: str, *command: str) -> None:
    from kvkeep.cli.main import main
    from kvkeep.server.service import Service
    from kvkeep.store import adopt
    from kvkeep.store.slabs import Slabs

    def stop_if_armed(*_: Any) -> None:
        if Path(armed).exists():
            Path(armed).unlink()
            stop()

    match point:
        case "before Prepared is sent":
            after(Service, "_prepare_store", stop_if_armed)
        case "a slot was freed":
            after(Slabs, "give", stop_if_armed)
        case "adoption: nothing is settled":
            before(adopt, "_settle", stop_if_armed)
        case "adoption: all is settled":
            after(adopt, "_settle", stop_if_armed)
        case _:
            assert not point, point
    with planted(bug):
        sys.argv = ["kvkeep", *command]
        main()


if __name__ == "__main__":
    {"client": client, "server": server}[sys.argv[1]](*sys.argv[2:])
