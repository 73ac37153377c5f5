"""Two servers with memory of their own and one shared tier, with real movers.

A block's content follows from its tokens, so each `get` compares every byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvkeep
from kvkeep.cli.remote import ask
from kvkeep.client.options import ClientOptions
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess

SHAPE = (64, 256)  # 64 KiB a block
BLOCKS = 24


class Host:
    """A server with 8 MiB of memory and a shared tier, and a client."""

    def __init__(
        self,
        tier: str,
        *more: str,
        environment: dict[str, str] | None = None,
        patience: str = "timeout=200",
    ) -> None:
        self.server = ServerProcess(
            *("--pool-size", "8MiB", "--slab-size", "1MiB", "--session-check-interval", "50ms"),
            *more,
            *("--tier", tier),
            environment=environment,
        )
        self.server.start()
        self.cache = kvkeep.connect(
            self.server.address,
            model="m",
            revision="1",
            block_tokens=4,
            block_shape=SHAPE,
            dtype="float32",
            required=True,
            wait_ms=20_000,
            options=ClientOptions(lookup_deadline_ms=20_000, tier_patience=patience),
        )

    def put(self, conversation: int, salt: str | None = None) -> None:
        given = blocks_of(conversation)
        assert self.cache.put(tokens_of(conversation), given, salt=salt) == BLOCKS

    def get(self, conversation: int, salt: str | None = None) -> int:
        """How many blocks come back. All of them are right."""
        found = self.cache.get(tokens_of(conversation), salt=salt)
        assert (found == blocks_of(conversation)[: len(found)]).all()
        return len(found)

    def has(self, conversation: int, salt: str | None = None) -> bool:
        return eventually(lambda: self.get(conversation, salt) == BLOCKS)

    def tier(self) -> dict[str, Any]:
        return dict(ask(self.server.http, "/v1/tiers")[-1])

    def written(self, blocks: int) -> bool:
        return eventually(lambda: self.tier()["counts"]["written_blocks"] >= blocks)

    def movers(self) -> list[int]:
        pid = self.server.pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(child) for child in text.split()]

    def clear(self, tenant: str) -> list[str]:
        """Clears the tenant everywhere. Returns the hosts that have not confirmed it."""
        token = self.server.state_dir / self.server.name / "admin.token"
        path = f"/v1/tenants/{tenant}/blocks"
        said = ask(self.server.http, path, method="DELETE", token_file=token)
        return list(said["unreached"])

    def close(self) -> None:
        self.cache.close()
        self.server.__exit__(None, None, None)


def tokens_of(conversation: int) -> list[int]:
    return list(range(conversation * 10_000, conversation * 10_000 + 4 * BLOCKS))


def blocks_of(conversation: int) -> NDArray[np.float32]:
    blocks = np.random.default_rng(conversation).random((BLOCKS, *SHAPE))
    return blocks.astype(np.float32)


@contextmanager
def host(
    tier: Path | str,
    *more: str,
    environment: dict[str, str] | None = None,
    patience: str = "timeout=200",
) -> Iterator[Host]:
    """`tier`: an address, or a directory. `environment`: further variables of the server.
    `patience`: how long its client waits for blocks from the tier."""
    address = tier if isinstance(tier, str) else f"file://{tier}?size=64MiB"
    made = Host(address, *more, environment=environment, patience=patience)
    try:
        yield made
    finally:
        made.close()
