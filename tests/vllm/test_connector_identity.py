"""Real engines and their identities: which share, and what happens while nothing is known of the
weights yet."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from replicas import BLOCK, Replica, Since, counting, eventually, prompt, request, status, tokens_of

from kvkeep.testing.process import ServerProcess

pytestmark = pytest.mark.usefixtures("_nothing_is_left")


def test_engines_that_differ_in_max_model_len_alone_share(
    plain: Replica, one: Replica, two: Replica, server: ServerProcess
) -> None:
    tokens, since = prompt(1000), Since(server)
    expected = tokens_of(plain.use("llama").serve([request(tokens)]))
    one.use("llama", server).serve([request(tokens)])
    assert eventually(lambda: since("stored_blocks") >= 1000 // BLOCK)
    warm = two.use("llama", server, max_model_len=1536).serve([counting(tokens)])
    assert (warm[0].extra, tokens_of(warm)) == (1000 // BLOCK * BLOCK, expected)
    shown = status(server)
    assert shown["not_shared"] == [] and len({each["identity"] for each in shown["sessions"]}) == 1
    assert {each["role"] for each in shown["sessions"]} == {"scheduler", "worker 0 of 1"}


def test_status_says_why_two_real_engines_do_not_share(
    one: Replica, two: Replica, server: ServerProcess
) -> None:
    one.use("llama", server)
    two.use("llama", server, dtype="float16")
    (pair,) = status(server)["not_shared"]
    assert pair["differs"]["kv_dtype"] == ["auto of float32", "auto of float16"]
    assert "revision" not in pair["differs"], "their weights are the same"
    two.close_engine()


def test_an_engine_serves_without_the_cache_until_a_new_checkpoint_is_hashed(
    plain: Replica, two: Replica, server: ServerProcess, tmp_path: Path
) -> None:
    """The test holds the lock of the host's only hasher, so that the digest does not become
    known."""
    tokens, since = prompt(100), Since(server)
    expected = tokens_of(plain.use("llama").serve([request(tokens)]))
    hasher = tmp_path / "kvkeep"
    hasher.mkdir(mode=0o700)
    lock = os.open(hasher / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    engine = two.use(
        "llama", server.address, env={"XDG_CACHE_HOME": str(tmp_path)}, max_model_len=1024
    )
    cold = engine.serve([counting(tokens)])
    assert (tokens_of(cold), cold[0].extra, since("stored_blocks")) == (expected, 0, 0), (
        "it starts and serves"
    )
    os.close(lock)
    assert eventually(
        lambda: bool(engine.serve([request(prompt(40))])) and since("stored_blocks") > 0
    )
    engine.serve([request(tokens)])
    warm = engine.fresh().serve([counting(tokens)])
    assert (tokens_of(warm), warm[0].extra) == (expected, 96)
    engine.close_engine()
