"""What switches offloading on, where blocks go, and what happens when there is no server."""

from __future__ import annotations

import json
import logging
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from engines import (
    BLOCK_TOKENS,
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
    status,
    tokens_of,
    without_cache,
)

from kvkeep.client.connection import Connection
from kvkeep.engine import backends
from kvkeep.engine.llm import LLM
from kvkeep.engine.offloading import KVTransferConfig
from kvkeep.errors import KVKeepError, SettingsError
from kvkeep.testing.process import ServerProcess

SMALL: dict[str, Any] = {"block_tokens": BLOCK_TOKENS, "num_blocks": 64}
NATIVE_CONFIG = {
    "kv_connector": "NativeConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 16 << 20},
}


@pytest.fixture
def nowhere() -> str:
    """An address where no server listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def embedded_pools() -> set[Path]:
    return set(Path("/dev/shm").glob("kvkeep-embedded-*"))


def extra(answer: Any) -> int:
    return (answer.kv_transfer_params or {})[KEY]


def cold_and_warm(llm: LLM, model: Any) -> list[int]:
    """What the cache gives a prompt the first time, and once the engine has forgotten it."""
    tokens, given = prompt(22), []
    for _ in range(2):
        [answer] = serve(llm, [counting(tokens)], max_tokens=1)
        assert [answer.token_ids] == without_cache(model, [tokens], max_tokens=1)
        given.append(answer.metrics.external_cached_tokens)
        forget_local(llm)
    return given


# -- on and off


@pytest.mark.parametrize("backend", ["kvkeep", "native"])
def test_without_a_size_offloading_is_off_whatever_the_backend(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "ServerBackend", lambda *_: pytest.fail("a cache was made"))
    monkeypatch.setattr(backends, "NativeBackend", lambda *_: pytest.fail("a cache was made"))
    model = oracle()
    with LLM(model, kv_offloading_backend=backend, **SMALL) as llm:
        assert llm.kv_transfer_config is None and llm.engine.scheduler.planner is None
        assert cold_and_warm(llm, model) == [0, 0]
    assert not caplog.records


def test_native_keeps_blocks_in_this_process_and_for_this_engine_alone() -> None:
    model, tokens, before = oracle(), prompt(22), embedded_pools()
    native = {"kv_offloading_backend": "native", "kv_offloading_size": 1 / 16, **SMALL}
    with LLM(model, **native) as one, LLM(model, **native) as two:
        assert len(embedded_pools() - before) == 2
        assert one.kv_transfer_config == KVTransferConfig(
            "NativeConnector", "kv_both", {"cpu_bytes_to_use": 64 << 20}
        )
        [cold] = serve(one, [counting(tokens)], max_tokens=1)
        [other] = serve(two, [counting(tokens)], max_tokens=1)
        forget_local(one)
        [warm] = serve(one, [counting(tokens)], max_tokens=1)
        assert (extra(cold), extra(other), extra(warm)) == (0, 0, 20)
        assert cold.token_ids == other.token_ids == warm.token_ids
    assert embedded_pools() <= before, "the memory went with the engines"


@pytest.mark.parametrize("form", ["mapping", "json", "object", "native"])
def test_a_transfer_config_alone_is_enough(server: ServerProcess, form: str) -> None:
    said = {
        "kv_connector": "KVKeepConnector",
        "kv_connector_extra_config": {"kvkeep.address": server.address},
    }
    configs: dict[str, Any] = {
        "mapping": said,
        "json": json.dumps(said),
        "object": KVTransferConfig(**said),
        "native": NATIVE_CONFIG,
    }
    model, since = oracle(), Since(server)
    with LLM(model, kv_transfer_config=configs[form], **SMALL) as llm:
        assert llm.kv_transfer_config is not None and llm.kv_transfer_config.kv_role == "kv_both"
        assert cold_and_warm(llm, model) == [0, 20]
        assert since("stored_blocks") == (0 if form == "native" else 5)


def with_extra(**keys: Any) -> dict[str, Any]:
    return {"kv_offloading_size": 1, "kv_transfer_config": {"kv_connector_extra_config": keys}}


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"kv_offloading_backend": "disk"}, "kv_offloading_backend"),
        ({"kv_offloading_size": -1}, "kv_offloading_size"),
        ({"kv_transfer_config": {"kv_conector": "KVKeepConnector"}}, "kv_connector"),
        ({"kv_transfer_config": "{"}, "JSON"),
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, "KVKeepConnector"),
        ({"kv_transfer_config": {"kv_load_failure_policy": "ignore"}}, "kv_load_failure_policy"),
        (with_extra(**{"kvkeep.adress": "tcp://h:1"}), "kvkeep.address"),
        (with_extra(**{"kvkeep.load": "later"}), "kvkeep.load"),
        ({"kv_offloading_backend": "native", "kv_offloading_size": 1e-6}, "no room for one slab"),
        *(
            (
                {
                    "kv_transfer_config": {
                        "kv_connector": "NativeConnector",
                        "kv_connector_extra_config": size,
                    }
                },
                "cpu_bytes_to_use",
            )
            for size in ({}, *({"cpu_bytes_to_use": bad} for bad in ("lots", None, -1, 1.5)))
        ),
    ],
    ids=str,
)
def test_what_cannot_be_understood_is_refused_by_name(said: dict[str, Any], named: str) -> None:
    before = embedded_pools()
    with pytest.raises(KVKeepError) as refusal:
        LLM(oracle(), **said, **SMALL)
    assert named in f"{refusal.value} {refusal.value.hint}"
    assert isinstance(refusal.value, SettingsError) or "kv_offloading_size" in refusal.value.hint
    assert embedded_pools() <= before


# -- no server


@pytest.mark.parametrize("ranks", [1, 4])
def test_without_a_server_the_engine_serves_and_says_so_once(
    nowhere: str, ranks: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections: list[Connection] = []
    connect = Connection.__init__

    def recorded(self: Connection, *words: Any, **options: Any) -> None:
        connections.append(self)
        connect(self, *words, **options)

    monkeypatch.setattr(Connection, "__init__", recorded)
    model, prompts = oracle(), [prompt(22) for _ in range(4)]
    with engine(nowhere, model, extra=BRISK, tensor_parallel_size=ranks) as llm:
        for _ in range(3):
            answers = serve(llm, prompts)
            assert tokens_of(answers) == without_cache(model, prompts)
        assert len(connections) == ranks + 1
        assert eventually(lambda: all(each.outage.told for each in connections))
        time.sleep(0.5)  # ten more attempts of each connection
    assert all(answer.metrics.external_cached_tokens == 0 for answer in answers)
    [said] = [text for text in caplog.messages if "no server at" in text]
    assert nowhere in said and "kvkeep serve" in said


def test_a_server_that_appears_later_is_used(
    nowhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokens = oracle(), prompt(22)
    later = ServerProcess(*POOL)
    later.address = nowhere
    with engine(nowhere, model, extra=BRISK) as llm, caplog.at_level(logging.WARNING):
        [alone] = serve(llm, [counting(tokens)], max_tokens=1)
        with later:
            assert eventually(lambda: attached(later) == 2), "the engine connects by itself"
            since = Since(later)
            [local] = serve(llm, [counting(tokens)], max_tokens=1)
            assert since("stored_blocks") == 5, "the engine stores what the server lacks"
            forget_local(llm)
            [warm] = serve(llm, [counting(tokens)], max_tokens=1)
            assert since("hit_blocks") == 5
            assert at_rest(later)
    assert (extra(alone), local.metrics.local_cached_tokens, extra(warm)) == (0, 20, 20)
    [expected] = without_cache(model, [tokens], max_tokens=1)
    assert alone.token_ids == local.token_ids == warm.token_ids == expected
    assert any(f"connected to {nowhere}" in text for text in caplog.messages)


def attached(server: ServerProcess) -> int:
    """How many sessions have chosen how bytes move."""
    return sum(bool(session["plane"]) for session in status(server)["sessions"])


def test_a_server_that_is_killed_and_comes_back_changes_no_token() -> None:
    model, tokens = oracle(), prompt(22)
    expected = without_cache(model, [tokens])
    with ServerProcess(*POOL) as server, engine(server, model, extra=BRISK) as llm:
        serve(llm, [tokens])
        server.stop(signal.SIGKILL)
        for _ in range(3):
            forget_local(llm)
            [answer] = serve(llm, [counting(tokens)])
            assert ([answer.token_ids], extra(answer)) == (expected, 0)
        server.start()
        assert eventually(lambda: attached(server) == 2)
        forget_local(llm)
        [warm] = serve(llm, [counting(tokens)])
        assert extra(warm) == 20, "the next server has what the last one had"
        assert [warm.token_ids] == expected
        assert at_rest(server)
