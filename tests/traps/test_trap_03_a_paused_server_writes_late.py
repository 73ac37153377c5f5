"""Trap 3: no fencing: a server that was paused and resumed writes into engine blocks that were
given to others."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from engines import (
    BRISK,
    KEY,
    POOL,
    Since,
    at_rest,
    counting,
    engine,
    eventually,
    forget_local,
    oracle,
    prompt,
    serve,
)
from engines import without_cache as expected_of

from kvkeep.engine.llm import LLM
from kvkeep.testing.process import ServerProcess


@pytest.fixture
def own_server() -> Iterator[ServerProcess]:
    with ServerProcess(*POOL) as running:
        yield running


def all_kv(llm: LLM) -> bytes:
    """Every byte of the engine's KV memory."""
    ranks = llm.engine.workers.ranks
    return b"".join(layer.numpy().tobytes() for rank in ranks for layer in rank.kv.values())


@pytest.mark.parametrize("shared_memory", [True, False])
def test_blocks_that_were_reused_meanwhile_keep_their_bytes(
    own_server: ServerProcess, shared_memory: bool
) -> None:
    model, first = oracle(), prompt(40)
    extra = {**BRISK, "kvkeep.shared_memory": shared_memory}
    with engine(own_server, model) as other:
        serve(other, [first])
    with engine(own_server, model, extra=extra, num_blocks=24) as llm:
        own_server.send(signal.SIGSTOP)
        later = [
            prompt(40) for _ in range(6)
        ]  # several times what its memory holds: every block is reused
        answers = [llm.generate([counting(tokens)])[0] for tokens in [first, *later]]
        llm.engine.flush()
        before, since = all_kv(llm), None
        own_server.send(signal.SIGCONT)
        since = Since(own_server)
        forget_local(llm)
        assert eventually(
            lambda: since.requests("Ping") + since.requests("Lookup") + since.requests("Hello") > 0
        )
        assert at_rest(own_server), "it has gone through all that it was asked while it stood still"
        assert all_kv(llm) == before, "nobody but the engine writes into the engine"
        assert [each.token_ids for each in answers] == expected_of(
            model, [first, *later], max_tokens=16
        )
        assert [each.kv_transfer_params for each in answers] == [{KEY: 0}] * 7
        assert eventually(lambda: _hits(llm, first)), "and then the cache is of use again"


def _hits(llm: LLM, tokens: list[int]) -> bool:
    forget_local(llm)
    [answer] = serve(llm, [counting(tokens)])
    return (answer.kv_transfer_params or {})[KEY] == 36
