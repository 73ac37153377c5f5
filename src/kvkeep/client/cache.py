"""The small public API: put blocks in, get blocks out.

import kvkeep, numpy as np
cache = kvkeep.connect(
    model="my-model", revision="1", block_tokens=16, block_shape=(2, 16, 8, 64), dtype="float16"
)
tokens = list(range(64))                                   # four full blocks
cache.put(tokens, np.ones((4, 2, 16, 8, 64), "float16"))
blocks = cache.get(tokens)                                 # in any process on the host
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from kvkeep.client.calls import FIRST_PAUSE_MS, Call, ClientCounters, Hit, read_found
from kvkeep.client.connection import Connection, Heartbeat
from kvkeep.client.options import ClientOptions
from kvkeep.client.outage import trouble
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import LoadRequest, StoreRequest
from kvkeep.client.transfer import Transfer
from kvkeep.errors import RequestError, Unavailable
from kvkeep.kv.identity import ModelIdentity, tenant_of
from kvkeep.kv.keys import KeyChain, root_key
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape
from kvkeep.wire import messages as m


def connect(
    address: str | None = None,
    *,
    model: str,
    revision: str,
    block_tokens: int,
    block_shape: Sequence[int],
    dtype: DTypeLike,
    required: bool = False,
    wait_ms: int = 2_000,
    options: ClientOptions | None = None,
) -> Cache:
    """A cache for blocks of one model, on the server at `address` (else that of `options`, else
    KVKEEP_ADDRESS in the environment, else tcp://localhost:5555).

    A server that is not there is no error: everything misses until it appears. With `required`,
    Unavailable is raised if there is no session within `wait_ms`."""
    shape, kind = tuple(int(size) for size in block_shape), _dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    if min(shape, default=1) < 1 or nbytes < 1:
        raise RequestError(
            "bad_shape", f"a block of shape {shape} has no bytes", field="block_shape"
        )
    if kind.hasobject:
        raise RequestError(
            "bad_dtype", f"{kind} holds Python objects, which cannot be stored", field="dtype"
        )
    identity = ModelIdentity(
        model=model,
        revision=revision,
        kv_dtype=kind.str
        if kind.kind != "V"
        else f"{kind.str} {kind}",  # "V": several types share one short name
        block_tokens=block_tokens,
        content="array " + "x".join(map(str, shape)),
    )
    chosen = options or ClientOptions()
    if address is not None:
        chosen = replace(chosen, address=address)
    connection = Connection(BlockShape(identity, (nbytes,)), chosen)
    Heartbeat.keep(connection)
    if not connection.wait_until_up(wait_ms) and required:
        connection.close()
        why, refusal = connection.outage.trouble or ("nobody answers", connection.refusal)
        raise Unavailable(*trouble(chosen.address, why, connection.refusal or refusal))
    return Cache(connection, identity, shape, kind)


class Cache:
    """Blocks by the tokens they were computed from. A fault of the server is a miss; `counters`
    says how many."""

    def __init__(
        self,
        connection: Connection,
        identity: ModelIdentity,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        self.connection = connection
        self.identity = identity
        self._shape = shape
        self._dtype = dtype

    @property
    def connected(self) -> bool:
        """Whether the server was there when last heard of."""
        return self.connection.answering

    @property
    def counters(self) -> ClientCounters:
        """What became of our requests; `counters.failures` says why there were misses that need not
        have been."""
        return self.connection.counters

    def put(
        self,
        tokens: Sequence[int],
        blocks: ArrayLike,
        *,
        salt: str | None = None,
        priority: int = 50,
        ttl_ms: int = 0,
    ) -> int:
        """Stores the full blocks of `tokens`. Returns how many were written: what is there already
        is not.

        `priority` (0 to 100) and `ttl_ms` are hints for eviction: higher priorities stay longer,
        and after `ttl_ms` blocks are the first to go. They are served until they do."""
        if isinstance(blocks, np.ndarray) and blocks.dtype != self._dtype:
            problem = (
                f"the blocks are {blocks.dtype}, this cache keeps {self._dtype} and does not round"
            )
            raise RequestError(
                "bad_dtype",
                problem,
                field="blocks",
                hint=f"pass blocks.astype({str(self._dtype)!r})",
            )
        array = np.ascontiguousarray(blocks, dtype=self._dtype)
        chain = self._chain(tokens, salt)
        if array.shape != (len(chain), *self._shape):
            raise RequestError(
                "bad_shape",
                f"{len(tokens)} tokens have {len(chain)} full blocks of shape {self._shape};"
                f" got {array.shape}",
                field="blocks",
            )
        if not len(chain):
            return 0
        request = StoreRequest(
            tenant_of(salt), b"", chain.keys(), np.arange(len(chain)), priority, ttl_ms
        )
        return self._transfer(_writable(array)).store(request).written

    def get(self, tokens: Sequence[int], *, salt: str | None = None) -> NDArray[Any]:
        """The leading blocks of `tokens` that the server has, verified: an array [n, *block_shape],
        n may be 0. Waits for blocks from a tier as long as the option `tier_patience` says."""
        chain = self._chain(tokens, salt)
        call, hit = self._lookup(chain, salt, self.connection.patience_ms)
        good = 0
        try:
            if hit is None or not hit.blocks:
                return np.empty((0, *self._shape), dtype=self._dtype)
            blocks = np.empty((hit.blocks, *self._shape), dtype=self._dtype)
            ids = np.arange(hit.blocks)
            request = LoadRequest(
                tenant_of(salt), chain.keys(), 0, ids, call.epoch, hit.slots, hit.checksums
            )
            loaded = self._transfer(blocks).load(request)
            good = hit.blocks if loaded.all() else int(np.argmin(loaded))
        finally:
            self._give_up(call, good * self.identity.block_tokens)
        return blocks[:good]

    def contains(self, tokens: Sequence[int], *, salt: str | None = None) -> int:
        """How many leading blocks of `tokens` the server has in memory."""
        call, hit = self._lookup(self._chain(tokens, salt), salt)
        self._give_up(call)
        return hit.blocks if hit else 0

    def prefetch(self, tokens: Sequence[int], *, salt: str | None = None) -> int:
        """Asks the server to bring the blocks of `tokens` into memory. Returns how many are on
        their way from a tier."""
        connection = self.connection
        if not connection.has_tiers:
            return 0
        keys = self._chain(tokens, salt).keys()
        message = m.Prefetch(tenant_of(salt), connection.layout_number, keys)
        reply = connection.wait(connection.call(message, connection.options.lookup_deadline_ms))
        return reply.count if isinstance(reply, m.Done) else 0

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _transfer(self, blocks: NDArray[Any]) -> Transfer:
        return Transfer(self.connection, [GroupMemory(BlockRuns.of([blocks]))], 0)

    def _chain(self, tokens: Sequence[int], salt: str | None) -> KeyChain:
        chain = KeyChain(root_key(self.identity, salt), self.identity.block_tokens)
        chain.extend(tokens)
        return chain

    def _give_up(self, call: Call, loaded_tokens: int = 0) -> None:
        """The server hears of it now, and not with the next heartbeat: leased blocks cannot make
        room for others."""
        self.connection.give_up(call, loaded_tokens=loaded_tokens)
        self.connection.poll()

    def _lookup(
        self, chain: KeyChain, salt: str | None, patience_ms: int = 0
    ) -> tuple[Call, Hit | None]:
        """Asks again while blocks are coming from a tier and patience lasts; the last answer
        counts."""
        connection = self.connection
        until_ms, pause_ms = connection.now_ms + patience_ms, FIRST_PAUSE_MS
        call, hit = self._ask(chain, salt, patience_ms, -1)
        while hit is not None and hit.coming and patience_ms > 0:
            connection.pause(min(hit.again_ms, pause_ms, patience_ms))
            pause_ms *= 2
            patience_ms = max(0, until_ms - connection.now_ms)
            later, found = self._ask(chain, salt, patience_ms, hit.blocks)
            if found is None:
                break
            connection.give_up(call)
            call, hit = later, found
        return call, hit

    def _ask(
        self, chain: KeyChain, salt: str | None, patience_ms: int, found_before: int
    ) -> tuple[Call, Hit | None]:
        connection, keys = self.connection, chain.keys()
        message = m.Lookup(
            tenant_of(salt), connection.layout_number, keys, 0, patience_ms, found_before
        )
        call = connection.call(message, connection.options.lookup_deadline_ms)
        return call, read_found(connection.wait(call), keys, 0, shards=1)


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """BlockRuns takes memory it could also write to; a caller's read-only array is copied."""
    return array if array.flags.writeable else array.copy()


def _dtype(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise RequestError(
            "bad_dtype",
            f"numpy knows no dtype {dtype!r}",
            field="dtype",
            hint="for bfloat16 or fp8 pass the integer type of the same width, and view your"
            " blocks as that",
        ) from None
