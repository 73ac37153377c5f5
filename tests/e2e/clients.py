"""What the client processes of these tests do: each function is run by name in a process of its
own.

    python clients.py NAME ADDRESS [ARGUMENT …]

They print one JSON line when they have something to say, and then wait for a line on standard input
where they must."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np

import kvkeep
from kvkeep.client.options import ClientOptions
from kvkeep.kv.keys import KeyChain, root_key
from kvkeep.wire import messages as m

BLOCK_TOKENS, SHAPE = 4, (2, 512)
BLOCK_BYTES = 2 * 512 * 4


def connect(address: str, **options: Any) -> kvkeep.Cache:
    return kvkeep.connect(
        model="tiny",
        revision="1",
        block_tokens=BLOCK_TOKENS,
        block_shape=SHAPE,
        dtype="float32",
        required=True,
        wait_ms=10_000,
        # What is found is asserted, not how soon on a busy machine.
        options=ClientOptions(address=address, **{"lookup_deadline_ms": 10_000, **options}),
    )


def oracle(tokens: list[int], salt: str | None = None) -> np.ndarray:
    """The blocks of a prompt: a pure function of tenant and prefix, so that one wrong byte is
    seen."""
    rows = []
    for stop in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        seed = repr((salt or "", tokens[:stop])).encode()
        rows.append(
            np.frombuffer(hashlib.shake_128(seed).digest(BLOCK_BYTES), dtype=np.float32).reshape(
                SHAPE
            )
        )
    return np.array(rows, dtype=np.float32).reshape(-1, *SHAPE)


def same(blocks: np.ndarray, expected: np.ndarray) -> bool:
    return blocks.tobytes() == expected[: len(blocks)].tobytes()


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def put(address: str, count: str, salt: str = "") -> None:
    tokens = list(range(int(count)))
    with connect(address) as cache:
        say(stored=cache.put(tokens, oracle(tokens, salt), salt=salt))


def get(address: str, count: str, salt: str = "") -> None:
    tokens = list(range(int(count)))
    with connect(address) as cache:
        blocks = cache.get(tokens, salt=salt)
        say(blocks=len(blocks), right=same(blocks, oracle(tokens, salt)))


def store_half(address: str, count: str) -> None:
    """Takes slots, writes half of each block, says so, and never completes."""
    tokens = list(range(1_000_000, 1_000_000 + int(count)))
    cache = connect(address)
    chain = KeyChain(root_key(cache.identity, None), BLOCK_TOKENS)
    chain.extend(tokens)
    connection = cache.connection
    assert connection.layout is not None and connection.segments is not None
    call = connection.call(
        m.PrepareStore("default", connection.layout.layout, 0, b"", chain.keys()), 5_000
    )
    plan = connection.wait(call)
    assert isinstance(plan, m.Prepared)
    for slot, block in zip(np.frombuffer(plan.slots, "<i8").tolist(), oracle(tokens), strict=False):
        half = np.frombuffer(block.tobytes(), np.uint8)[: BLOCK_BYTES // 2]
        connection.segments.view(slot, len(half))[:] = half
    say(slots=len(plan.slots) // 8)
    sys.stdin.readline()


def hold_lease(address: str, count: str) -> None:
    """Looks up and holds the lease, as a worker in the middle of a load does; then reads what is
    there."""
    tokens = list(range(int(count)))
    cache = connect(address)
    chain = KeyChain(root_key(cache.identity, None), BLOCK_TOKENS)
    chain.extend(tokens)
    connection = cache.connection
    assert connection.layout is not None and connection.segments is not None
    found = connection.wait(
        connection.call(m.Lookup("default", connection.layout.layout, chain.keys()), 5_000)
    )
    assert isinstance(found, m.Found)
    say(blocks=found.blocks)
    sys.stdin.readline()
    slots = np.frombuffer(found.slots, "<i8").tolist()
    read = b"".join(connection.segments.view(slot, BLOCK_BYTES).tobytes() for slot in slots)
    say(right=read == oracle(tokens).tobytes())


def in_the_middle(address: str, what: str, count: str) -> None:
    """Is in the middle of a copy, of which the server's end is no end: goes on with it when told
    to."""
    tokens = (
        list(range(int(count)))
        if what == "load"
        else list(range(1_000_000, 1_000_000 + int(count)))
    )
    cache = connect(address, ping_interval_ms=100, reconnect_interval_ms=50)
    chain = KeyChain(root_key(cache.identity, None), BLOCK_TOKENS)
    chain.extend(tokens)
    connection = cache.connection
    assert connection.layout is not None
    layout, epoch = connection.layout.layout, connection.epoch
    ask = {
        "load": m.Lookup("default", layout, chain.keys()),
        "store": m.PrepareStore("default", layout, 0, b"", chain.keys()),
    }
    answer = connection.wait(connection.call(ask[what], 5_000))
    assert isinstance(answer, m.Found | m.Prepared)
    slots = np.frombuffer(answer.slots, "<i8").tolist()
    with connection.pool(epoch) as pool:
        assert pool is not None
        views = [pool[0].view(slot, BLOCK_BYTES) for slot in slots]
        say(slots=len(slots))
        sys.stdin.readline()
        if what == "store":
            for view in views:
                view[:] = 0xEE
            say(written=len(views))
        else:
            say(right=b"".join(view.tobytes() for view in views) == oracle(tokens).tobytes())
        sys.stdin.readline()
        views.clear()


def work(address: str, seed: str, rounds: str) -> None:
    """Random puts and gets under several salts; every byte is checked."""
    rng = np.random.default_rng(int(seed))
    wrong = got = 0
    with connect(address, ping_interval_ms=100, reconnect_interval_ms=50) as cache:
        for _ in range(int(rounds)):
            branch, count = int(rng.integers(0, 8)), int(rng.integers(4, 120))
            salt = ["", "alice", "bob"][rng.integers(0, 3)]
            tokens = [branch] * 4 + list(range(count))
            if rng.random() < 0.5:
                cache.put(tokens, oracle(tokens, salt), salt=salt)
            else:
                blocks = cache.get(tokens, salt=salt)
                got += len(blocks)
                wrong += not same(blocks, oracle(tokens, salt))
        say(wrong=wrong, got=got, failures=cache.connection.counters.failures)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
