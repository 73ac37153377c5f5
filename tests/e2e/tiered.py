"""Servers with tiers: what they say of them, and a prompt that a tier has and memory has not."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engines import counting, engine, eventually, serve, without_cache

from kvkeep.cli.remote import ask
from kvkeep.engine.llm import LLM, Prompt
from kvkeep.testing.process import ServerProcess

WAITS = {"kvkeep.tier_patience": "wait"}
TOKENS, BLOCKS = 203, 50  # of a prompt
FOUND = BLOCKS * 4  # tokens of it that a tier can have


def tiers(server: ServerProcess) -> list[dict[str, Any]]:
    """As operators see them; a shared one is the last."""
    return list(ask(server.http, "/v1/tiers"))


def is_ready(server: ServerProcess) -> bool:
    """Whether it uses its last tier: of a shared one it has read the log of clears."""
    return bool(tiers(server)[-1]["state"] == "ok")


def written(server: ServerProcess) -> int:
    return int(tiers(server)[-1]["counts"]["written_blocks"])


def is_written(server: ServerProcess, blocks: int = BLOCKS) -> bool:
    """Waits until the last tier has so many blocks."""
    return eventually(lambda: written(server) >= blocks)


def restart_cold(server: ServerProcess) -> None:
    """As if the host had been restarted: the process is gone, and all of its shared memory."""
    server.stop(signal.SIGKILL)
    shutil.rmtree(server.pool)
    server.start()


@contextmanager
def waiting_engine(server: ServerProcess, model: Any, **options: Any) -> Iterator[LLM]:
    """An engine whose requests wait for tiers. All of it is connected: a request that comes before
    is a miss."""
    extra = WAITS | options.pop("extra", {})
    with engine(server, model, extra=extra, **options) as llm:
        connections: Any = llm.engine.backend.connections  # type: ignore[union-attr, attr-defined]
        assert eventually(lambda: all(each.up for each in connections))
        yield llm


def hit(server: ServerProcess, model: Any, tokens: list[int], salt: str | None = None) -> int:
    """How many tokens a new engine finds, which waits for tiers. The answer is right in any case,
    and no bad block is brought up at all."""
    with waiting_engine(server, model) as llm:
        [answer] = serve(llm, [counting(tokens, salt)])
    assert [answer.token_ids] == without_cache(model, [Prompt(tokens, salt=salt)])
    assert answer.metrics.failed_loads == 0
    return int(answer.metrics.external_cached_tokens)
