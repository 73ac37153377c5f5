"""What a lookup costs, against a ping to the same server, in the same run.

The floor is a ping: one round trip with a tiny message. A miss should cost little more, a full hit
(slots and checksums of every block, leased) a few pings, and neither should grow with what is
stored. Pings and lookups alternate, so that noise of the machine meets both; ratios are of medians.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from kvkeep.client.connection import Connection
from kvkeep.client.options import ClientOptions
from kvkeep.errors import SettingsError, Unavailable
from kvkeep.kv.identity import DEFAULT_TENANT, ModelIdentity
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.kv.shape import BlockShape
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m

_BLOCKS = (128, 512, 2048, 8192)
_LONGEST = max(_BLOCKS)
_TURN = 64  # blocks that a conversation grows by at a time
_SLOT_BYTES = 4096
_DEADLINE_MS = 10_000


def run(resident: tuple[int, ...] = (10_000, 1_000_000), rounds: int = 300) -> dict[str, Any]:
    """Starts a server for each number of resident blocks and measures misses and full hits of
    several lengths."""
    if min(resident) < _LONGEST:
        raise SettingsError(
            f"--resident must be at least {_LONGEST}: the longest lookup hits so many blocks"
        )
    rows: list[dict[str, Any]] = []
    pings: list[float] = []
    for blocks in resident:
        pool_mib = blocks * _SLOT_BYTES // (1 << 20) * 11 // 10 + 64
        with ServerProcess("--pool-size", f"{pool_mib}MiB") as server:
            rows += _rows(server.address, blocks, rounds, pings)
    for row in rows:
        smallest = next(r for r in rows if (r["blocks"], r["kind"]) == (row["blocks"], row["kind"]))
        row["growth"] = round(row["ratio_to_ping"] / smallest["ratio_to_ping"], 2)
    return {"ping_us": _percentiles(pings), "rows": rows}


def _rows(address: str, resident: int, rounds: int, pings: list[float]) -> list[dict[str, Any]]:
    identity = ModelIdentity(
        model="bench", revision="1", kv_dtype="uint8", block_tokens=16, content="bench lookup"
    )
    connection = Connection(
        BlockShape(identity, (_SLOT_BYTES,)), ClientOptions(address, lookup_deadline_ms=10_000)
    )
    if not connection.wait_until_up(10_000):
        raise Unavailable(f"no session with {address}: {connection.refusal}")
    chains = fill(connection, resident)
    rows = []
    for blocks in _BLOCKS:
        for kind in ("miss", "hit"):
            own_pings, lookups = _measure(connection, chains, blocks, kind, rounds)
            pings += own_pings
            p50, ping = float(np.median(lookups)), float(np.median(own_pings))
            rows.append(
                {
                    "blocks": blocks,
                    "kind": kind,
                    "resident": resident,
                    **{f"{name}_us": value for name, value in _percentiles(lookups).items()},
                    # Of the pings between these lookups. The ratio is to this one.
                    "own_ping_us": round(ping, 1),
                    "ratio_to_ping": round(p50 / ping, 2),
                }
            )
    connection.close()
    return rows


def fill(connection: Connection, resident: int) -> list[bytes]:
    """Stores chains until so many blocks are resident, in turns as conversations grow; a quarter of
    the blocks are in long chains, which are returned."""
    long = [os.urandom(_LONGEST * KEY_BYTES) for _ in range(max(1, resident // 4 // _LONGEST))]
    for start in range(0, _LONGEST, _TURN):
        for chain in long:
            parent = chain[(start - 1) * KEY_BYTES : start * KEY_BYTES] if start else b""
            _store(connection, parent, chain[start * KEY_BYTES : (start + _TURN) * KEY_BYTES])
    for left in range(resident - len(long) * _LONGEST, 0, -512):
        _store(connection, b"", os.urandom(min(512, left) * KEY_BYTES))
    return long


def _store(connection: Connection, parent: bytes, keys: bytes) -> None:
    count = len(keys) // KEY_BYTES
    while True:
        message = m.PrepareStore(DEFAULT_TENANT, _layout(connection), 0, parent, keys)
        write = connection.call(message, _DEADLINE_MS)
        plan = connection.wait(write)
        if isinstance(plan, m.Prepared) and not plan.refused:
            break
        connection.give_up(write)
        time.sleep(0.05)  # the pool is still being filled
    done = connection.wait(
        connection.call(m.CompleteStore(write.number, bytes(8 * count)), _DEADLINE_MS)
    )
    assert isinstance(done, m.Done) and done.count == count


def _measure(
    connection: Connection, chains: list[bytes], blocks: int, kind: str, rounds: int
) -> tuple[list[float], list[float]]:
    pings, lookups = [], []
    for turn in range(rounds + 10):
        chain = chains[turn % len(chains)] if kind == "hit" else os.urandom(_LONGEST * KEY_BYTES)
        message = m.Lookup(DEFAULT_TENANT, _layout(connection), chain[: blocks * KEY_BYTES])
        ping_us, _ = timed(connection, m.Ping())
        lookup_us, (lease, found) = timed(connection, message)
        assert isinstance(found, m.Found) and found.blocks == (blocks if kind == "hit" else 0)
        timed(connection, m.Release([lease]))
        if turn >= 10:
            pings.append(ping_us)
            lookups.append(lookup_us)
    return pings, lookups


def timed(connection: Connection, message: m.Message) -> tuple[float, tuple[int, m.Reply | None]]:
    started = time.perf_counter()
    call = connection.call(message, _DEADLINE_MS)
    reply = connection.wait(call)
    return (time.perf_counter() - started) * 1e6, (call.number, reply)


def _layout(connection: Connection) -> int:
    assert connection.layout is not None
    return connection.layout.layout


def _percentiles(microseconds: list[float]) -> dict[str, float]:
    return {
        "p50": round(float(np.median(microseconds)), 1),
        "p99": round(float(np.percentile(microseconds, 99)), 1),
    }
