"""Tiers below the server, with real vLLM. A disk: the server's memory is lost, and another engine
loads from the disk. Each kind of shared tier: one host stores and vanishes, and an engine on another
host, whose server has its own memory, loads what it has computed."""

from __future__ import annotations

import shutil
import signal
import time
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
TRIES = 3  # on a busy machine


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
def test_an_engine_on_another_host_hits_within_six_seconds_of_the_firsts_end(
    plain: Replica, one: Replica, two: Replica, tmp_path: Path, kind: str
) -> None:
    """The other host uses the tier all the while. Its requests wait for the tier, but not at all
    costs: what no host seems to have written they do not wait for."""
    patience = {"kvkeep.tier_patience": "timeout=10000"}
    with service(kind, tmp_path) as running:
        flags, more = (*POOL, "--tier", running.address), running.environment
        with Server(*flags, environment=more) as second:
            loading = two.use("llama", second, extra=patience)
            own = prompt(400)
            loading.serve([request(own)])
            blocks = len(own) // BLOCK_TOKENS
            assert eventually(lambda: counts(second)["written_blocks"] >= blocks), "write-behind"

            def is_hit_in_time() -> bool:
                prompts = [prompt(400) for _ in range(6)]
                expected = tokens_of(plain.use("llama").serve([request(each) for each in prompts]))
                with Server(*flags, environment=more) as first:
                    storing = one.use("llama", first)
                    answers = storing.serve([request(each) for each in prompts])
                    assert tokens_of(answers) == expected
                    storing.close_engine()
                    stored = len(prompts) * blocks
                    assert eventually(lambda: counts(first)["written_blocks"] >= stored)
                    first.stop(signal.SIGKILL)
                    ended_s = time.monotonic()
                for tokens, right in zip(prompts, expected, strict=True):
                    before = counts(second)["promoted_blocks"]
                    [answer] = loading.serve([counting(tokens)])
                    assert answer.tokens == right
                    if answer.extra == blocks * BLOCK_TOKENS:
                        assert counts(second)["promoted_blocks"] == before + blocks
                        return time.monotonic() < ended_s + 6
                    time.sleep(0.5)
                return False

            assert any(is_hit_in_time() for _ in range(TRIES))
            other = prompt(100)
            expected = tokens_of(plain.use("llama").serve([request(other)]))
            [answer] = loading.serve([counting(other)])
            assert answer.tokens == expected[0] and answer.extra == 0
            assert at_rest(second)
            loading.close_engine()
