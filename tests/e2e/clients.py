"""Clients of a server: connected from the test itself, or each in a process of its own.

    python clients.py NAME ADDRESS [ARGUMENT …]

runs the function of that name, which prints lines of JSON and waits for a line where it must."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvkeep
from kvkeep.client.options import ClientOptions
from kvkeep.kv.keys import KeyChain, root_key
from kvkeep.testing.process import JsonProcess
from kvkeep.wire import messages as m

BLOCK_TOKENS, SHAPE = 4, (2, 512)
BLOCK_BYTES = 2 * 512 * 4
SMALL_POOL = ("--pool-size", "1MiB", "--slab-size", "64KiB", "--session-check-interval", "50ms")
SMALL_POOL_BLOCKS = (1 << 20) // BLOCK_BYTES


def connect(
    address: str, required: bool = True, wait_ms: int = 300_000, **options: Any
) -> kvkeep.Cache:
    return kvkeep.connect(
        model="tiny",
        revision="1",
        block_tokens=BLOCK_TOKENS,
        block_shape=SHAPE,
        dtype="float32",
        required=required,
        wait_ms=wait_ms,
        # Tests assert what is found, not how soon on a busy machine.
        options=ClientOptions(
            address=address,
            **{"lookup_deadline_ms": 20_000, "store_deadline_ms": 20_000, **options},
        ),
    )


def oracle(tokens: Sequence[int], salt: str | None = None) -> np.ndarray:
    """The blocks of a prompt: a pure function of tenant and prefix, so that one wrong byte is
    seen."""
    rows = []
    for stop in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        seed = repr((salt or "", list(tokens[:stop]))).encode()
        rows.append(np.frombuffer(hashlib.shake_128(seed).digest(BLOCK_BYTES), np.float32))
    return np.array(rows, dtype=np.float32).reshape(-1, *SHAPE)


def same(blocks: np.ndarray, expected: np.ndarray) -> bool:
    return blocks.tobytes() == expected[: len(blocks)].tobytes()


def stores(cache: kvkeep.Cache, tokens: Sequence[int], salt: str = "") -> int:
    """How many blocks of the prompt the server took."""
    return cache.put(tokens, oracle(tokens, salt), salt=salt)


def holds(cache: kvkeep.Cache, tokens: Sequence[int], salt: str = "") -> int:
    """How many blocks of the prompt can be read. Every byte must be right."""
    blocks = cache.get(tokens, salt=salt)
    assert same(blocks, oracle(tokens, salt))
    assert cache.contains(tokens, salt=salt) == len(blocks)
    return len(blocks)


class Client(JsonProcess):
    """A process that runs one of the functions below."""

    def __init__(self, name: str, *arguments: object, hash_seed: int = 0) -> None:
        program = [__file__, name, *map(str, arguments)]
        super().__init__(name, program, os.environ | {"PYTHONHASHSEED": str(hash_seed)})


def ask(name: str, *arguments: object, hash_seed: int = 0) -> dict[str, Any]:
    """What such a process says; it has ended then."""
    client = Client(name, *arguments, hash_seed=hash_seed)
    said = client.receive()
    assert client.end(60) == 0
    return said


# -- in a process of its own


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def put(address: str, count: str, salt: str = "") -> None:
    with connect(address) as cache:
        say(stored=stores(cache, range(int(count)), salt))


def get(address: str, count: str, salt: str = "") -> None:
    with connect(address) as cache:
        say(blocks=holds(cache, range(int(count)), salt))


def later_tokens(count: int | str) -> list[int]:
    """The prompt that `store_half` and `in_the_middle` store."""
    return list(range(1_000_000, 1_000_000 + int(count)))


def granted(
    cache: kvkeep.Cache, kind: type[m.Lookup | m.PrepareStore], tokens: Sequence[int]
) -> list[int]:
    """The slots that a lookup or a store of the prompt is granted."""
    chain = KeyChain(root_key(cache.identity, None), BLOCK_TOKENS)
    chain.extend(tokens)
    connection = cache.connection
    assert connection.layout is not None
    begin = (0, b"") if kind is m.PrepareStore else ()
    asked = kind("default", connection.layout.layout, *begin, chain.keys())
    answer = connection.wait(connection.call(asked, 20_000))
    assert isinstance(answer, m.Found | m.Prepared)
    slots: list[int] = np.frombuffer(answer.slots, "<i8").tolist()
    return slots


def store_half(address: str, count: str) -> None:
    """Takes slots, writes half of each block, and never completes the store."""
    cache, tokens = connect(address), later_tokens(count)
    slots = granted(cache, m.PrepareStore, tokens)
    assert cache.connection.segments is not None
    for slot, block in zip(slots, oracle(tokens), strict=False):
        half = np.frombuffer(block.tobytes(), np.uint8)[: BLOCK_BYTES // 2]
        cache.connection.segments.view(slot, len(half))[:] = half
    say(slots=len(slots))
    sys.stdin.readline()


def hold_lease(address: str, count: str) -> None:
    """Looks up and holds the lease, as a worker in a load does; then reads the blocks."""
    cache, tokens = connect(address), range(int(count))
    slots = granted(cache, m.Lookup, tokens)
    say(blocks=len(slots))
    sys.stdin.readline()
    assert cache.connection.segments is not None
    views = [cache.connection.segments.view(slot, BLOCK_BYTES) for slot in slots]
    say(right=b"".join(view.tobytes() for view in views) == oracle(tokens).tobytes())


def in_the_middle(address: str, what: str, count: str) -> None:
    """Is in a copy when the server ends, and goes on with it when told to."""
    tokens = list(range(int(count))) if what == "load" else later_tokens(count)
    cache = connect(address, ping_interval_ms=100, reconnect_interval_ms=50)
    epoch = cache.connection.epoch
    slots = granted(cache, m.Lookup if what == "load" else m.PrepareStore, tokens)
    with cache.connection.pool(epoch) as pool:
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
