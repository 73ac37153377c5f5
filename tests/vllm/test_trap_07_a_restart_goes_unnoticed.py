"""Trap 7, with vLLM: a restart between two pings is never noticed and caching stops; memory content
is lost."""

from __future__ import annotations

import signal

from replicas import (
    POOL,
    Replica,
    Server,
    at_rest,
    counting,
    eventually,
    prompt,
    request,
    status,
    tokens_of,
)

NEVER = {"kvkeep.ping_interval_ms": 86_400_000}


def test_a_restart_between_two_pings_is_noticed_and_hits_go_on(
    plain: Replica, one: Replica
) -> None:
    """The engine never pings: what it asks next is what tells it."""
    with Server(*POOL) as server:
        engine = one.use("llama", server, extra=NEVER)
        first, kept = prompt(100), {end: prompt(200) for end in (signal.SIGKILL, signal.SIGTERM)}
        expected = tokens_of(
            plain.use("llama").serve([request(tokens) for tokens in [first, *kept.values()]])
        )
        assert (
            tokens_of(engine.serve([request(tokens) for tokens in [first, *kept.values()]]))
            == expected
        )
        for (end, tokens), right in zip(kept.items(), expected[1:], strict=True):
            assert at_rest(server)
            server.stop(end)
            server.start()

            def hits() -> bool:
                [answer] = engine.fresh().serve([counting(first)])
                assert [answer.tokens] == expected[:1]
                return answer.extra == 96

            assert eventually(hits), "it has noticed"
            [answer] = engine.fresh().serve([counting(tokens)])
            assert (answer.extra, answer.tokens) == (192, right), (
                "content from before that nobody has stored again"
            )
            assert status(server)["restart"]["adopted_blocks"] >= 15
            new = prompt(100)
            engine.serve([request(new)])
            [answer] = engine.fresh().serve([counting(new)])
            assert answer.extra == 96, "and stores go on"
        engine.close_engine()
