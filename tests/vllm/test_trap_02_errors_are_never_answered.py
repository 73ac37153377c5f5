"""Trap 2, with vLLM: handler errors are never answered, and sides that disagree on how bytes move
hang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from replicas import Replica, at_rest, counting, eventually, prompt, request, tokens_of

from kvkeep.server.daemon import Daemon
from kvkeep.testing.process import ServerProcess
from kvkeep_lab.simulation.strange import daemon_in_thread

TEN_MINUTES = {
    "kvkeep.lookup_deadline_ms": 600_000,
    "kvkeep.store_deadline_ms": 600_000,
}  # no test waits so long


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A real daemon, in this process so that its store can be broken."""
    with daemon_in_thread(tmp_path, "--pool-size", "4MiB", "--slab-size", "1MiB") as made:
        yield made


def test_a_fault_inside_the_server_is_answered(
    plain: Replica, one: Replica, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    engine, tokens, others = (
        one.use("llama", daemon.address, extra=TEN_MINUTES),
        prompt(100),
        prompt(70),
    )
    expected = tokens_of(plain.use("llama").serve([request(tokens), request(others)]))

    def finds(tokens: list[int]) -> bool:
        [answer] = engine.fresh().serve([counting(tokens)])
        return answer.extra == len(tokens) // 32 * 32

    assert eventually(lambda: finds(tokens)), "it is connected, and caches"
    with monkeypatch.context() as patched:
        patched.setattr(daemon.store, "lookup", broken)
        patched.setattr(daemon.store, "prepare_store", broken)
        # Had it to wait for its deadlines, none of this would come back within the test's patience.
        answers = engine.fresh().serve([counting(tokens), counting(others)])
    assert tokens_of(answers) == expected
    assert [answer.extra for answer in answers] == [0, 0]
    assert daemon.service.counters.internal_errors >= 3, "two lookups and a store"
    assert finds(tokens), "and nothing was spoilt"
    engine.close_engine()


def test_engines_that_move_bytes_in_different_ways_share_blocks(
    plain: Replica, one: Replica, two: Replica, server: ServerProcess
) -> None:
    """One maps the pool, the other cannot: each says so in the handshake, and both are served."""
    maps, cannot = (
        one.use("llama", server),
        two.use("llama", server, extra={"kvkeep.shared_memory": False}),
    )
    for stores, reads in ((maps, cannot), (cannot, maps)):
        tokens = prompt(100)
        stores.serve([request(tokens)])
        [answer] = reads.serve([counting(tokens)])
        assert answer.extra == 96
        assert [answer.tokens] == tokens_of(plain.use("llama").serve([request(tokens)]))
    assert at_rest(server)
