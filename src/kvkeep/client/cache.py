"""The small public API: put blocks in, get blocks out.

import kvkeep, numpy as np
cache = kvkeep.connect(model="my-model", revision="1", block_tokens=16, block_shape=(2, 16, 8, 64), dtype="float16")
tokens = list(range(64))                                   # four full blocks
cache.put(tokens, np.ones((4, 2, 16, 8, 64), "float16"))
blocks = cache.get(tokens)                                 # here, or in any other process on the host
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from kvkeep.client.connection import Connection
from kvkeep.client.keeper import Keeper
from kvkeep.client.options import DEFAULT_ADDRESS, ClientOptions
from kvkeep.client.transfer import LoadRequest, StoreRequest, Transfer
from kvkeep.errors import RequestError, Unavailable
from kvkeep.kv.identity import ModelIdentity, tenant_of
from kvkeep.kv.keys import KeyChain, root_key
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape
from kvkeep.wire import messages as m


def connect(
    address: str = DEFAULT_ADDRESS,
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
    """A cache for blocks of one model, on the server at `address`.

    A server that is not there is no error: everything misses until it appears. With `required`, Unavailable is raised
    if there is no session within `wait_ms`.
    """
    shape, kind = tuple(int(size) for size in block_shape), np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if nbytes < 1:
        raise RequestError("bad_shape", f"a block of shape {shape} has no bytes", field="block_shape")
    identity = ModelIdentity(
        model=model,
        revision=revision,
        kv_dtype=kind.str,
        block_tokens=block_tokens,
        layout="array " + "x".join(map(str, shape)),
    )
    chosen = options or ClientOptions(address=address)
    connection = Connection(BlockShape(identity, (nbytes,)), chosen)
    Keeper.keep(connection)
    if not connection.wait_until_up(wait_ms) and required:
        why = connection.refusal or "nobody answers"
        connection.close()
        raise Unavailable(f"no kvkeep server at {chosen.address}: {why}", "start one with `kvkeep serve`")
    return Cache(connection, identity, shape, kind)


class Cache:
    """Blocks by the tokens they were computed from. A fault of the server is a miss; `counters` says how many."""

    def __init__(
        self, connection: Connection, identity: ModelIdentity, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.connection = connection
        self.identity = identity
        self._shape = shape
        self._dtype = dtype

    @property
    def connected(self) -> bool:
        return self.connection.up

    def put(
        self,
        tokens: Sequence[int],
        blocks: ArrayLike,
        *,
        salt: str | None = None,
        priority: int = 50,
        ttl_ms: int = 0,
    ) -> int:
        """Stores the full blocks of `tokens`. Returns how many were written: what is there already is not."""
        array = np.ascontiguousarray(blocks, dtype=self._dtype)
        chain = self._chain(tokens, salt)
        if array.shape != (len(chain), *self._shape):
            raise RequestError(
                "bad_shape",
                f"{len(tokens)} tokens have {len(chain)} full blocks of shape {self._shape}; got {array.shape}",
                field="blocks",
            )
        if not len(chain):
            return 0
        request = StoreRequest(tenant_of(salt), b"", chain.keys(), np.arange(len(chain)), priority, ttl_ms)
        return Transfer(self.connection, BlockRuns.of([_writable(array)]), 0).store(request)

    def get(self, tokens: Sequence[int], *, salt: str | None = None) -> NDArray[Any]:
        """The leading blocks of `tokens` that the server has, verified: an array [n, *block_shape], n may be 0."""
        chain = self._chain(tokens, salt)
        connection, layout = self.connection, self.connection.layout
        message = m.Lookup(tenant_of(salt), layout.layout if layout else 0, chain.keys())
        call = connection.call(message, connection.options.lookup_deadline_ms)
        epoch = connection.epoch
        found = connection.wait(call)
        if not isinstance(found, m.Found) or not found.blocks:
            return np.empty((0, *self._shape), dtype=self._dtype)
        blocks = np.empty((found.blocks, *self._shape), dtype=self._dtype)
        request = LoadRequest(
            tenant_of(salt),
            chain.keys(),
            0,
            np.arange(found.blocks),
            epoch,
            np.frombuffer(found.slots, dtype="<i8"),
            np.frombuffer(found.checksums, dtype="<u8").reshape(-1, 1),
        )
        loaded = Transfer(connection, BlockRuns.of([blocks]), 0).load(request)
        connection.give_up(call)
        whole = int(np.argmin(loaded)) if not loaded.all() else found.blocks
        return blocks[:whole]

    def contains(self, tokens: Sequence[int], *, salt: str | None = None) -> int:
        """How many leading blocks of `tokens` the server has."""
        chain = self._chain(tokens, salt)
        connection, layout = self.connection, self.connection.layout
        message = m.Lookup(tenant_of(salt), layout.layout if layout else 0, chain.keys())
        call = connection.call(message, connection.options.lookup_deadline_ms)
        found = connection.wait(call)
        connection.give_up(call)
        return found.blocks if isinstance(found, m.Found) else 0

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _chain(self, tokens: Sequence[int], salt: str | None) -> KeyChain:
        chain = KeyChain(root_key(self.identity, salt), self.identity.block_tokens)
        chain.extend(tokens)
        return chain


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """BlockRuns takes memory it could also write to; a caller's read-only array is copied."""
    return array if array.flags.writeable else array.copy()
