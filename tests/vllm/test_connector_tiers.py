"""Tiers below the server, with real vLLM. A disk: the server's memory is lost, and another engine
loads from the disk. Each kind of shared tier: one host stores and vanishes, and an engine on another
host, whose server has its own memory, loads what it has computed."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from replicas import (
    POOL,
    Replica,
    Server,
    at_rest,
    counting,
    eventually,
    prompt,
    request,
    tokens_of,
)
from shared_services import KINDS, service

from kvkeep.cli.remote import ask

WAITS = {"kvkeep.tier_patience": "wait"}
BLOCK_TOKENS = 32


def counts(server: Server) -> dict[str, Any]:
    [tier] = ask(server.http, "/v1/tiers")
    return dict(tier["counts"])


def test_another_engine_loads_from_disk_what_memory_has_lost(
    plain: Replica, one: Replica, two: Replica, tmp_path: Path
) -> None:
    tokens, other = prompt(400), prompt(100)
    expected = tokens_of(plain.use("llama").serve([request(tokens), request(other)]))
    blocks = len(tokens) // BLOCK_TOKENS
    with Server(*POOL, "--tier", f"disk://{tmp_path / 'tier'}?size=64MiB") as server:
        first = one.use("llama", server)
        assert tokens_of(first.serve([request(tokens)])) == expected[:1]
        first.close_engine()
        assert eventually(lambda: counts(server)["written_blocks"] >= blocks), "write-behind"
        server.stop(signal.SIGKILL)
        shutil.rmtree(server.pool)
        server.start()
        second = two.use("llama", server, extra=WAITS)
        answers = second.serve([counting(tokens), counting(other)], together=True)
        assert tokens_of(answers) == expected
        assert [answer.extra for answer in answers] == [blocks * BLOCK_TOKENS, 0]
        assert at_rest(server)
        second.close_engine()


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_on_another_host_loads_what_the_first_has_shared(
    plain: Replica, one: Replica, two: Replica, tmp_path: Path, kind: str
) -> None:
    tokens, other = prompt(400), prompt(100)
    computing = plain.use("llama")
    expected = tokens_of(computing.serve([request(tokens), request(other)]))
    blocks = len(tokens) // BLOCK_TOKENS
    with service(kind, tmp_path) as running:
        flags, more = (*POOL, "--tier", running.address), running.environment
        with Server(*flags, environment=more) as first, Server(*flags, environment=more) as second:
            storing = one.use("llama", first)
            assert tokens_of(storing.serve([request(tokens)])) == expected[:1]
            storing.close_engine()
            assert eventually(lambda: counts(first)["written_blocks"] >= blocks), "write-behind"
            first.stop(signal.SIGKILL)
            loading = two.use("llama", second, extra=WAITS)
            # While a job takes long, on a busy machine above all, requests do not wait for the tier.
            assert eventually(lambda: ask(second.http, "/v1/tiers")[0]["state"] == "ok")
            [answer] = loading.serve([counting(tokens)])
            answers = [answer, *loading.serve([counting(other)])]
            assert tokens_of(answers) == expected
            assert [each.extra for each in answers] == [blocks * BLOCK_TOKENS, 0]
            assert counts(second)["promoted_blocks"] == blocks
            assert at_rest(second)
            loading.close_engine()
