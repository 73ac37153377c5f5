"""Clients of the servers that tests of commands start."""

from __future__ import annotations

from typing import Any

import kvkeep
from kvkeep.client.options import ClientOptions
from kvkeep.testing.process import ServerProcess


def connect(
    server: ServerProcess,
    block_tokens: int = 1,
    block_shape: tuple[int, ...] = (512,),
    dtype: str = "uint64",
    *,
    model: str = "m",
    **options: Any,
) -> kvkeep.Cache:
    """What is found is asserted, not how soon on a busy machine."""
    return kvkeep.connect(
        server.address,
        model=model,
        revision="1",
        block_tokens=block_tokens,
        block_shape=block_shape,
        dtype=dtype,
        required=True,
        wait_ms=20_000,
        options=ClientOptions(address=server.address, lookup_deadline_ms=10_000, **options),
    )
