"""Trap 2: handler errors are never answered, an absent server ends the engine, sides that disagree
hang."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clients
import pytest
from engines import KEY, counting, engine, forget_local, oracle, prompt, serve, without_cache
from patience import patient_client, patient_engine

from kvkeep.server.daemon import Daemon
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m
from kvkeep_lab.simulation.strange import daemon_in_thread

TOKENS = list(range(40))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A real daemon, in this process so that its store can be broken."""
    with daemon_in_thread(tmp_path, "--pool-size", "1MiB", "--slab-size", "64KiB") as made:
        yield made


def test_a_fault_inside_the_server_is_answered(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    with patient_client(daemon.address) as cache:
        assert cache.put(TOKENS, clients.oracle(TOKENS)) == 10
        with monkeypatch.context() as patched:
            patched.setattr(daemon.store, "lookup", broken)
            layout = cache.connection.layout
            assert layout is not None
            call = cache.connection.call(m.Lookup("default", layout.layout, b"k" * 16), 600_000)
            # A deadline of ten minutes: that this returns at all is the server's answer.
            cache.connection.wait(call)
            assert len(cache.get(TOKENS)) == 0
        assert daemon.service.counters.internal_errors == 2
        assert (
            clients.same(cache.get(TOKENS), clients.oracle(TOKENS)) and cache.contains(TOKENS) == 10
        )


def test_an_engine_starts_and_serves_without_a_server() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nowhere = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    model, tokens = oracle(), prompt(22)
    with engine(nowhere, model) as llm:
        [answer] = serve(llm, [counting(tokens)])
    assert [answer.token_ids] == without_cache(model, [tokens])
    assert answer.kv_transfer_params == {KEY: 0}


@pytest.mark.parametrize("stores_by", [True, False])
def test_engines_that_move_bytes_in_different_ways_share_blocks(
    server: ServerProcess, stores_by: bool
) -> None:
    """One maps the pool, the other cannot: each says so in the handshake, and both are served."""
    model, tokens = oracle(), prompt(22)
    with patient_engine(server, model, {"kvkeep.shared_memory": stores_by}) as one:
        serve(one, [tokens])
    with patient_engine(server, model, {"kvkeep.shared_memory": not stores_by}) as two:
        [answer] = serve(two, [counting(tokens)])
        forget_local(two)
        [again] = serve(two, [counting(tokens)])
    assert answer.kv_transfer_params == again.kv_transfer_params == {KEY: 20}
    assert [answer.token_ids] == without_cache(model, [tokens])
