"""What a key costs: microseconds per block for each hash we could have taken, and for the whole
`KeyChain`.

    python -m kvkeep_lab.bench.keys

Each candidate runs the same chain (16 bytes of parent, then a block's tokens) in the fastest way of
calling it that we know. Candidates that are not installed are left out by name.
docs/decisions/0005-keys.md decides."""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import struct
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from kvkeep.kv import native
from kvkeep.kv.keys import KEY_BYTES, TOKEN_BYTES, KeyChain

Chain = Callable[[bytes, int], object]


def run(
    *, blocks: int = 8192, block_tokens: int = 16, repeats: int = 15, seed: int = 0
) -> dict[str, Any]:
    """Measure all candidates in turn, `repeats` rounds; the best round of each counts.

    Returns the parameters, `us_per_block` by name and the names `left_out`.
    """
    rng = random.Random(seed)
    tokens = [rng.randrange(150_000) for _ in range(blocks * block_tokens)]
    row = np.array(tokens, dtype="<u4")
    raw, width = row.tobytes(), block_tokens * TOKEN_BYTES

    chains, left_out = _candidates()
    runs: dict[str, Callable[[], object]] = {
        name: lambda chain=chain: chain(raw, width)  # type: ignore[misc]
        for name, chain in chains.items()
    }
    runs["KeyChain, from a list"] = lambda: KeyChain(bytes(KEY_BYTES), block_tokens).extend(tokens)
    runs["KeyChain, from numpy"] = lambda: KeyChain(bytes(KEY_BYTES), block_tokens).extend(row)

    best = dict.fromkeys(runs, float("inf"))
    # In rounds, not one candidate after the other: a slow moment of the machine then hits all
    # alike.
    for _ in range(repeats):
        for name, measured in runs.items():
            start = perf_counter()
            measured()
            best[name] = min(best[name], perf_counter() - start)
    return {
        "blocks": blocks,
        "block_tokens": block_tokens,
        "repeats": repeats,
        "us_per_block": {name: round(seconds / blocks * 1e6, 3) for name, seconds in best.items()},
        "left_out": left_out,
    }


def _candidates() -> tuple[dict[str, Chain], list[str]]:
    chains: dict[str, Chain] = {
        "blake2b-128": _by_copy(hashlib.blake2b(digest_size=KEY_BYTES, person=b"kvkeep.block")),
        "sha256, cut to 128": _by_copy(hashlib.sha256()),
    }
    left_out = []
    if native.available:
        chains["blake2b-128, in C"] = lambda raw, width: native.chain(
            bytes(KEY_BYTES), raw, width, KEY_BYTES
        )
    else:
        left_out.append("blake2b-128, in C")
    try:
        blake3 = importlib.import_module("blake3").blake3
        chains["blake3-128"] = _by_call(lambda data: blake3(data).digest(KEY_BYTES))
    except ImportError:
        left_out.append("blake3-128")
    try:
        chains["xxh3-128"] = _by_call(importlib.import_module("xxhash").xxh3_128_digest)
    except ImportError:
        left_out.append("xxh3-128")
    return chains, left_out


def _by_copy(prepared: Any) -> Chain:
    def chain(raw: bytes, width: int) -> None:
        key, fresh = bytes(KEY_BYTES), prepared.copy
        for (block,) in struct.iter_unpack(f"{width}s", raw):
            state = fresh()
            state.update(key + block)
            key = state.digest()[:KEY_BYTES]

    return chain


def _by_call(digest: Callable[[bytes], bytes]) -> Chain:
    def chain(raw: bytes, width: int) -> None:
        key = bytes(KEY_BYTES)
        for (block,) in struct.iter_unpack(f"{width}s", raw):
            key = digest(key + block)

    return chain


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
