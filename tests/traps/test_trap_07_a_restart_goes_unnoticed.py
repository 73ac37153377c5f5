"""Trap 7: a restart between two pings is never noticed and caching stops; memory content and quotas
are lost."""

from __future__ import annotations

import signal

import clients
import pytest
from engines import (
    KEY,
    POOL,
    counting,
    eventually,
    forget_local,
    oracle,
    prompt,
    serve,
    status,
    usage,
)
from patience import patient_client, patient_engine

from kvkeep.cli.remote import ask
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.process import ServerProcess

TOKENS, OTHERS = list(range(40)), list(range(500, 540))
NEVER_MS = 24 * 3600 * 1000


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_restart_between_two_pings_is_noticed_and_hits_go_on(end: signal.Signals) -> None:
    """The client never pings: what it asks next is what tells it."""
    with ServerProcess(*POOL) as server, patient_client(server, ping_interval_ms=NEVER_MS) as cache:
        assert cache.put(TOKENS, clients.oracle(TOKENS)) == 10
        before = cache.connection.epoch
        server.stop(end)
        server.start()
        assert eventually(lambda: cache.contains(TOKENS) == 10), (
            "memory content is still there, and found"
        )
        assert cache.connection.epoch not in (0, before), "the session is one with the new server"
        assert clients.same(cache.get(TOKENS), clients.oracle(TOKENS))
        assert cache.put(OTHERS, clients.oracle(OTHERS)) == 10, "and stores go on"
        assert usage(server) == {"default": 20}
        assert status(server)["restart"]["adopted_blocks"] == 10


def test_quotas_survive() -> None:
    tenant = tenant_of("somebody")
    with ServerProcess(*POOL) as server:
        ask(server.http, f"/v1/tenants/{tenant}/quota", "PUT", {"quota_bytes": 1 << 20})
        server.stop(signal.SIGKILL)
        server.start()
        assert ask(server.http, f"/v1/tenants/{tenant}")["quota_bytes"] == 1 << 20


def test_an_engine_notices_too() -> None:
    model, tokens = oracle(), prompt(22)
    never = {"kvkeep.ping_interval_ms": NEVER_MS}
    with ServerProcess(*POOL) as server, patient_engine(server, model, never) as llm:
        [first] = serve(llm, [counting(tokens)])
        server.stop(signal.SIGKILL)
        server.start()

        def hits() -> bool:
            forget_local(llm)
            [again] = serve(llm, [counting(tokens)])
            assert again.token_ids == first.token_ids
            return again.kv_transfer_params == {KEY: 20}

        assert eventually(hits)
