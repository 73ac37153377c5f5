"""Trap 5, with vLLM: stores that failed are served as hits. (Checksums:
test_connector_failures.py.)"""

from __future__ import annotations

import signal

from replicas import (
    BRISK,
    POOL,
    Replica,
    Server,
    Since,
    at_rest,
    counting,
    eventually,
    prompt,
    request,
    tokens_of,
)


def test_a_store_that_was_not_completed_is_never_a_hit(plain: Replica, one: Replica) -> None:
    """The server stands still when it is asked for slots; it gives them when nobody wants to write
    them any more."""
    with Server(*POOL) as server:
        engine = one.use("llama", server, extra=BRISK)
        lost, kept = prompt(200), prompt(200)
        expected = tokens_of(plain.use("llama").serve([request(lost)]))
        before = engine.call("metrics")
        server.send(signal.SIGSTOP)
        try:
            [answer] = engine.serve([counting(lost)])
        finally:
            server.send(signal.SIGCONT)
        after = engine.call("metrics")
        assert [answer.tokens] == expected
        assert after.get("vllm:kvkeep_stored_blocks", 0) == before.get(
            "vllm:kvkeep_stored_blocks", 0
        )

        def caches() -> bool:
            engine.fresh().serve([request(kept)])
            [answer] = engine.fresh().serve([counting(kept)])
            return answer.extra == 192

        assert eventually(caches, 60) and at_rest(server)
        since = Since(server)
        [missed] = engine.fresh().serve([counting(lost)])
        assert (missed.extra, [missed.tokens]) == (0, expected)
        assert (since("lookups"), since("hit_blocks"), since("bad_blocks")) == (1, 0, 0), (
            "asked, and not there"
        )
        [found] = engine.fresh().serve([counting(lost)])
        assert (found.extra, [found.tokens]) == (192, expected), "stored now"
        engine.close_engine()
