"""Planted causes of misses, from engines through a real server to what operators read: `kvkeep
explain` over HTTP, /metrics and `kvkeep status`."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import (
    POOL,
    engine,
    eventually,
    forget_local,
    metrics_text,
    oracle,
    prompt,
    serve,
    status,
)
from faulty_server import FaultyServer

from kvkeep.engine.llm import LLM, Prompt
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.process import ServerProcess
from kvkeep_lab.simulation.oracle import OracleModel

Run = Callable[..., "subprocess.CompletedProcess[str]"]
SMALL = ("--pool-size", "1MiB", "--slab-size", "64KiB")  # 128 blocks
BLOCK_WORDS = 32
BLOCK_BYTES = 8 << 10  # of 4 tokens, 2 layers and 4 heads
TOKENS = 41  # ten blocks and a token


def ask(server: ServerProcess, llm: LLM, tokens: list[int], salt: str | None = None) -> None:
    """Serves the prompt, and waits until the server has been told."""
    before = status(server)["figures"]["requests"]
    forget_local(llm)
    serve(llm, [Prompt(tokens, salt=salt)], max_tokens=1)
    assert eventually(lambda: status(server)["figures"]["requests"] == before + 1)


def explained(kvkeep: Run, server: ServerProcess) -> list[dict[str, Any]]:
    """What `kvkeep explain` says of all requests, the first one first. The causes of each add up to
    its blocks, and those of all are in /metrics."""
    done = kvkeep("explain", "--last", "20", "--json", "--http", server.http)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)[::-1]
    causes: Counter[str] = Counter()
    for each in found:
        assert sum(each["outcomes"].values()) == each["blocks"] == -(-each["prompt_tokens"] // 4)
        causes.update(each["outcomes"])
    shown = metrics_text(server)
    for cause, blocks in causes.items():
        assert f'kvkeep_prompt_blocks_total{{outcome="{cause}"}} {blocks}.0\n' in shown
    return found


def test_every_planted_cause_is_named(kvkeep: Run) -> None:
    model, tokens, salted = oracle(words=BLOCK_WORDS), prompt(TOKENS), prompt(TOKENS)
    fine_tune = OracleModel(words=BLOCK_WORDS, revision="a fine-tune")
    with ServerProcess(*SMALL) as server, engine(server, model) as llm:
        ask(server, llm, tokens)
        ask(server, llm, tokens)
        ask(server, llm, tokens, "bob")
        with engine(server, fine_tune) as other:
            ask(server, other, tokens)
        words = ("set-limit", "--salt-stdin", str(4 * BLOCK_BYTES), "--http", server.http)
        assert kvkeep("tenants", *words, stdin="carol").returncode == 0
        ask(server, llm, salted, "carol")
        ask(server, llm, salted, "carol")
        for _ in range(2):  # 200 blocks
            ask(server, llm, prompt(401), "bob")
        ask(server, llm, tokens)
        found = explained(kvkeep, server)
        lines = kvkeep("explain", found[-1]["request"], "--http", server.http).stdout
    assert [each["outcomes"] for each in found] == [
        {"never_stored": 10, "last": 1},
        {"loaded": 10, "last": 1},
        {"other_salt": 10, "last": 1},
        {"other_identity": 10, "last": 1},
        {"never_stored": 10, "last": 1},
        {"loaded": 4, "over_limit": 6, "last": 1},
        {"never_stored": 100, "last": 1},
        {"never_stored": 100, "last": 1},
        {"evicted": 10, "last": 1},
    ]
    assert found[3]["differs"] == ["revision"] and found[-1]["evicted"]["by"] == tenant_of("bob")
    assert f"for tenant {tenant_of('bob')}" in lines
    assert "carol" not in str(found) and "bob" not in str(found)


def test_a_killed_server_and_a_slow_tier_are_named(kvkeep: Run, tmp_path: Path) -> None:
    model, tokens = oracle(), prompt(TOKENS)
    brisk = {"kvkeep.reconnect_interval_ms": 50}
    with (
        FaultyServer(tmp_path / "tier", *POOL) as server,
        engine(server, model, extra=brisk) as llm,
    ):
        ask(server, llm, tokens)
        assert eventually(lambda: server.ask("/v1/tiers")[0]["counts"]["written_blocks"] >= 10)
        server.stop(signal.SIGKILL)
        forget_local(llm)
        llm.generate([Prompt(tokens)])
        shutil.rmtree(server.pool)
        server.start()
        assert eventually(lambda: status(server)["figures"]["requests"] == 1), "told late"
        with (
            server.fault(slow_read="1"),
            engine(server, model, extra={"kvkeep.tier_patience": "best_effort"}) as other,
        ):
            ask(server, other, tokens)
        found = explained(kvkeep, server)
    assert [each["outcomes"] for each in found] == [
        {"unreachable": 10, "last": 1},
        {"too_late": 10, "last": 1},
    ]


def test_one_prompt_ten_times_on_one_engine_loads_nothing(kvkeep: Run) -> None:
    """The engine's own prefix cache has it: the server finds the blocks, and saves no time."""
    model, tokens = oracle(), prompt(TOKENS + 3)  # eleven blocks
    with ServerProcess(*POOL) as server, engine(server, model) as llm:
        for _ in range(10):
            serve(llm, [tokens], max_tokens=1)
        assert eventually(lambda: status(server)["figures"]["requests"] == 10)
        said = status(server)
        found = explained(kvkeep, server)
        lines = kvkeep("status", "--http", server.http).stdout
    assert said["counters"]["hit_blocks"] == 9 * 11, "which is not what the cache gave"
    figures = said["figures"]
    assert (figures["tokens_loaded"], figures["saved_s"]) == (0, 0.0)
    assert figures["tokens_local"] == 9 * 40 and figures["tokens_computed"] == 44 + 9 * 4
    assert [each["outcomes"] for each in found[1:]] == [{"local": 10, "last": 1}] * 9
    assert "0 tokens loaded, " in lines
