"""`kvkeep demo`: a server and several client processes that share blocks, told as a short story.

Each client is a process of its own (`python -m kvkeep.cli.demo ROLE ADDRESS`); it prints one JSON line. The bytes of a
block are a function of tenant and prefix, so whoever reads them can tell whether they are right.
"""

from __future__ import annotations

import hashlib
import json as json_module
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvkeep
from kvkeep.cli.output import Json, note, show_json, show_table
from kvkeep.cli.remote import ask
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import KeyChain, root_key
from kvkeep.testing.process import ServerProcess
from kvkeep.units import format_size
from kvkeep.wire import messages as m

USERS = ("alice", "bob")
BLOCK_TOKENS, BLOCKS = 16, 512
BLOCK_SHAPE = (32, 2, BLOCK_TOKENS, 32)  # 32 layers, K and V, 16 tokens, 32 numbers: 64 KiB in float16
_SECONDS_TO_RETURN = 10


def demo(json: Json = False) -> None:
    """Start a server and show processes sharing blocks through it."""
    with ServerProcess("--pool-size", "256MiB", "--session-check-interval", "100ms") as server:
        _say(json, f"1. A server is running: {server.address}, pool {format_size(256 << 20)}")
        wrote = _client("write", server.address)
        _say(json, f"2. Process {wrote['pid']} stored {wrote['blocks']} blocks for 2 tenants, and has ended")
        read = _client("read", server.address)
        right = "bit for bit the same" if read["same_bytes"] else "NOT the same"
        _say(json, f"3. Process {read['pid']} got {read['blocks']} blocks, {right}")
        _say(json, f"   with another tenant's salt it got {read['other_tenant_blocks']}")
        tenants = ask(server.http, "/v1/tenants")["tenants"]
        visible, returned = _kill_a_writer(server)
        _say(json, f"4. A process was killed in the middle of a store: {visible} of its blocks are visible,")
        _say(json, f"   its slots are {'free again' if returned else 'STILL TAKEN'}")
        outcome = {
            "stored_blocks": wrote["blocks"],
            "store_gbps": wrote["gbps"],
            "hit_blocks": read["blocks"],
            "load_gbps": read["gbps"],
            "same_bytes": read["same_bytes"],
            "other_tenant_blocks": read["other_tenant_blocks"],
            "half_written_blocks_visible": visible,
            "slots_returned": returned,
            "tenants": tenants,
        }
    if json:
        show_json(outcome)
    else:
        _show(outcome)
    good = outcome["same_bytes"] and not outcome["other_tenant_blocks"] and not visible and returned
    if not good or outcome["hit_blocks"] != outcome["stored_blocks"]:
        sys.exit(1)


def _show(outcome: dict[str, Any]) -> None:
    print()
    speeds = [
        ("store", f"{outcome['stored_blocks']:,}", f"{outcome['store_gbps']:.1f} GB/s"),
        ("load", f"{outcome['hit_blocks']:,}", f"{outcome['load_gbps']:.1f} GB/s, verified"),
    ]
    show_table(("", "blocks", "speed, pages never touched before"), speeds)
    print()
    names = {tenant_of(user): user for user in USERS}
    most = max(tenant["usage_bytes"] for tenant in outcome["tenants"])
    shares = [
        (
            names[each["tenant"]],
            each["tenant"],
            format_size(each["usage_bytes"]),
            "█" * (20 * each["usage_bytes"] // most),
        )
        for each in outcome["tenants"]
    ]
    show_table(("salt", "known to the server as", "usage", ""), shares)
    print("\nThe server never sees a salt. Try it yourself: kvkeep serve, then kvkeep.connect() in Python.")


def _say(json: bool, line: str) -> None:
    if json:
        note(line)
    else:
        print(line, flush=True)


def _client(role: str, address: str) -> Any:
    """Runs one client process to its end and returns what it said."""
    done = subprocess.run([*_command(role, address)], stdout=subprocess.PIPE, text=True, check=True)
    return json_module.loads(done.stdout)


def _command(role: str, address: str) -> tuple[str, ...]:
    return sys.executable, "-m", "kvkeep.cli.demo", role, address


def _kill_a_writer(server: ServerProcess) -> tuple[int, bool]:
    """Kills a process that holds half-written slots. Returns what is visible of them, and whether they came back."""
    writer = subprocess.Popen(_command("half", server.address), stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    writer.stdout.readline()
    writer.kill()
    writer.wait()
    writer.stdout.close()
    deadline = time.monotonic() + _SECONDS_TO_RETURN
    returned = False
    while not returned and time.monotonic() < deadline:
        returned = ask(server.http, "/v1/status")["writes"] == 0
        time.sleep(0.05)
    with _connect(server.address) as cache:
        return cache.contains(_prompt("half"), salt="half"), returned


# -- what the client processes do


def _connect(address: str) -> kvkeep.Cache:
    return kvkeep.connect(
        address,
        model="demo",
        revision="1",
        block_tokens=BLOCK_TOKENS,
        block_shape=BLOCK_SHAPE,
        dtype="float16",
        required=True,
    )


def _prompt(user: str) -> list[int]:
    rng = np.random.default_rng(_seed(user))
    tokens: list[int] = rng.integers(0, 32_000, BLOCKS * BLOCK_TOKENS).tolist()
    return tokens


def _blocks(user: str) -> NDArray[np.float16]:
    """Stands for what an engine computes: bytes that depend on the user's whole prompt."""
    rng = np.random.default_rng(_seed(user + " blocks"))
    raw = rng.integers(0, 1 << 16, (BLOCKS, *BLOCK_SHAPE), dtype=np.uint16)
    return raw.view(np.float16)


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _write(cache: kvkeep.Cache) -> dict[str, Any]:
    stored, seconds = 0, 0.0
    for user in USERS:
        blocks = _blocks(user)
        started = time.perf_counter()
        stored += cache.put(_prompt(user), blocks, salt=user)
        seconds += time.perf_counter() - started
    return {"blocks": stored, "gbps": stored * blocks[0].nbytes / seconds / 1e9}


def _read(cache: kvkeep.Cache) -> dict[str, Any]:
    got, seconds, same = 0, 0.0, True
    for user in USERS:
        expected = _blocks(user)
        started = time.perf_counter()
        blocks = cache.get(_prompt(user), salt=user)
        seconds += time.perf_counter() - started
        got += len(blocks)
        same &= blocks.tobytes() == expected[: len(blocks)].tobytes()
    others = len(cache.get(_prompt(USERS[0]), salt=USERS[1]))
    gbps = got * expected[0].nbytes / seconds / 1e9
    return {"blocks": got, "gbps": gbps, "same_bytes": same, "other_tenant_blocks": others}


def _half(cache: kvkeep.Cache) -> dict[str, Any]:
    """Takes slots, writes the first half of each block, and stays like that until it is killed."""
    chain = KeyChain(root_key(cache.identity, "half"), BLOCK_TOKENS)
    chain.extend(_prompt("half"))
    connection = cache.connection
    assert connection.layout is not None and connection.segments is not None
    message = m.PrepareStore(tenant_of("half"), connection.layout.layout, 0, b"", chain.keys())
    plan = connection.wait(connection.call(message, 5_000))
    assert isinstance(plan, m.Prepared)
    half = connection.shape.shard_bytes[0] // 2
    for slot in np.frombuffer(plan.slots, dtype="<i8").tolist():
        connection.segments.view(slot, half)[:] = 1
    return {"slots": len(plan.slots) // 8}


def _main(role: str, address: str) -> None:
    with _connect(address) as cache:
        said = {"write": _write, "read": _read, "half": _half}[role](cache)
        print(json_module.dumps({"pid": os.getpid(), **said}), flush=True)
        if role == "half":
            time.sleep(600)


if __name__ == "__main__":
    _main(*sys.argv[1:])
