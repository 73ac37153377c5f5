"""M4: what switches offloading on, where it goes, and what happens when no server is there."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.client.connection import Connection
from kvkeep.client.options import ClientOptions
from kvkeep.engine import backends
from kvkeep.engine.backends import NativeBackend, ServerBackend
from kvkeep.engine.llm import LLM
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.offloading import KVTransferConfig
from kvkeep.errors import KVKeepError, SettingsError
from kvkeep.testing.process import ServerProcess

sys.path.insert(0, str(Path(__file__).parent))
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
    tokens_of,
    without_cache,
)

SMALL: dict[str, Any] = {"block_tokens": BLOCK_TOKENS, "num_blocks": 64}
MIB_64 = 1 / 16  # of a GiB


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*POOL) as running:
        yield running


@pytest.fixture
def nowhere() -> str:
    """An address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def embedded_pools() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("kvkeep-embedded-*")}


def extra(answer: Any) -> int:
    return (answer.kv_transfer_params or {})[KEY]


def connections_of(llm: LLM) -> list[Connection]:
    """Those of an engine's scheduler and workers."""
    assert isinstance(llm.engine.backend, ServerBackend)
    return llm.engine.backend.connections


def outages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "no server at" in text]


# -- on and off


@pytest.mark.parametrize("backend", ["kvkeep", "native"])
def test_without_a_size_offloading_is_off_whatever_the_backend(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a cache was made")

    monkeypatch.setattr(backends, "ServerBackend", never)
    monkeypatch.setattr(backends, "NativeBackend", never)
    model, tokens = oracle(), prompt(22)
    with LLM(model, kv_offloading_backend=backend, **SMALL) as llm:
        assert llm.kv_transfer_config is None
        assert llm.engine.scheduler.planner is None
        [answer] = serve(llm, [counting(tokens)])
    assert [answer.token_ids] == without_cache(model, [tokens])
    assert answer.metrics.external_cached_tokens == 0
    assert not caplog.records


def test_native_keeps_blocks_in_this_process_and_for_this_engine_alone() -> None:
    model, tokens, before = oracle(), prompt(22), embedded_pools()
    native: dict[str, Any] = {
        "kv_offloading_backend": "native",
        "kv_offloading_size": MIB_64,
        **SMALL,
    }
    with LLM(model, **native) as one, LLM(model, **native) as two:
        assert len(embedded_pools() - before) == 2
        assert one.kv_transfer_config == KVTransferConfig(
            "NativeConnector", "kv_both", {"cpu_bytes_to_use": 64 << 20}
        )
        backend = one.engine.backend
        assert isinstance(backend, NativeBackend)
        [cold] = serve(one, [counting(tokens)], max_tokens=1)
        counters = backend.server.service.counters
        assert counters.stored_blocks == 5
        assert counters.stored_bytes == 5 * 4 * 2 * 4 * 2 * 8, (
            "blocks, tokens, layers, heads, words of 8 bytes"
        )
        assert backend.server.store.pool_bytes == 64 << 20
        [other] = serve(two, [counting(tokens)], max_tokens=1)
        forget_local(one)
        [warm] = serve(one, [counting(tokens)], max_tokens=1)
        assert (extra(cold), extra(other), extra(warm)) == (0, 0, 20)
        assert cold.token_ids == other.token_ids == warm.token_ids
    assert embedded_pools() <= before, "the memory went with the engines"


def test_the_native_size_that_the_user_wrote_himself_wins() -> None:
    config = {"kv_connector_extra_config": {"cpu_bytes_to_use": 16 << 20, "mine": 1}}
    native: dict[str, Any] = {"kv_offloading_backend": "native", "kv_offloading_size": 1, **SMALL}
    with LLM(oracle(), kv_transfer_config=config, **native) as llm:
        backend = llm.engine.backend
        assert isinstance(backend, NativeBackend)
        assert backend.server.store.pool_bytes == 16 << 20
        assert llm.kv_transfer_config is not None
        assert llm.kv_transfer_config.kv_connector_extra_config == {
            "cpu_bytes_to_use": 16 << 20,
            "mine": 1,
        }


# -- where the server is


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ClientOptions]:
    """The options of clients that would have been made; no connection is."""
    made: list[ClientOptions] = []
    monkeypatch.setattr(backends, "ServerBackend", lambda options, load_when: made.append(options))
    monkeypatch.delenv("KVKEEP_ADDRESS", raising=False)
    return made


def test_without_a_word_the_server_is_on_localhost_5555(asked: list[ClientOptions]) -> None:
    with LLM(oracle(), kv_offloading_size=4, **SMALL) as llm:
        assert llm.kv_transfer_config == KVTransferConfig("KVKeepConnector", "kv_both", {})
    assert [options.address for options in asked] == ["tcp://localhost:5555"]


def test_the_environment_says_another_address(
    asked: list[ClientOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_ADDRESS", "tcp://cache.example:7000")
    with LLM(oracle(), kv_offloading_size=4, kv_offloading_backend="kvkeep", **SMALL):
        pass
    assert [options.address for options in asked] == ["tcp://cache.example:7000"]


def test_the_users_extra_keys_stay_and_the_size_is_not_passed_on(
    asked: list[ClientOptions],
) -> None:
    given = {
        "kvkeep.host": "10.0.0.7",
        "kvkeep.port": 5001,
        "kvkeep.verify": False,
        "theirs": {"a": [1]},
    }
    with LLM(
        oracle(),
        kv_offloading_size=4,
        kv_transfer_config={"kv_connector_extra_config": given},
        **SMALL,
    ) as llm:
        assert llm.kv_transfer_config is not None
        assert llm.kv_transfer_config.kv_connector_extra_config == given
    assert [(options.address, options.verify) for options in asked] == [
        ("tcp://10.0.0.7:5001", False)
    ]


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"kv_offloading_backend": "disk"}, "kv_offloading_backend"),
        ({"kv_offloading_size": -1}, "kv_offloading_size"),
        ({"kv_transfer_config": "{"}, "JSON"),
        ({"kv_offloading_size": 1, "extra": {"kvkeep.adress": "tcp://h:1"}}, "kvkeep.address"),
        ({"kv_offloading_size": 1, "extra": {"kvkeep.load": "later"}}, "kvkeep.load"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unknown_value_is_refused_by_name(said: dict[str, Any], named: str) -> None:
    before = embedded_pools()
    options = {name: value for name, value in said.items() if name != "extra"}
    if "extra" in said:
        options["kv_transfer_config"] = {"kv_connector_extra_config": said["extra"]}
    with pytest.raises(SettingsError) as refusal:
        LLM(oracle(), **options, **SMALL)
    assert named in f"{refusal.value} {refusal.value.hint}"
    assert embedded_pools() <= before


@pytest.mark.parametrize(
    "extra_config",
    [
        {},
        {"cpu_bytes_to_use": "lots"},
        {"cpu_bytes_to_use": None},
        {"cpu_bytes_to_use": -1},
        {"cpu_bytes_to_use": 1.5},
    ],
    ids=str,
)
def test_a_native_connector_without_a_sound_size_is_refused_by_name(
    extra_config: dict[str, Any],
) -> None:
    config = {"kv_connector": "NativeConnector", "kv_connector_extra_config": extra_config}
    with pytest.raises(SettingsError, match="cpu_bytes_to_use"):
        LLM(oracle(), kv_transfer_config=config, **SMALL)


def test_a_native_size_that_is_too_small_says_what_to_do() -> None:
    with pytest.raises(KVKeepError, match="no room for one slab") as refusal:
        LLM(oracle(), kv_offloading_backend="native", kv_offloading_size=1e-6, **SMALL)
    assert "kv_offloading_size" in refusal.value.hint


@pytest.mark.parametrize("form", ["mapping", "json", "object"])
def test_a_transfer_config_alone_is_enough(server: ServerProcess, form: str) -> None:
    said = {
        "kv_connector": "KVKeepConnector",
        "kv_connector_extra_config": {"kvkeep.address": server.address},
    }
    config: Any = {"mapping": said, "json": json.dumps(said), "object": KVTransferConfig(**said)}[
        form
    ]  # type: ignore[arg-type]
    model, tokens = oracle(), prompt(22)
    with LLM(model, kv_transfer_config=config, **SMALL) as llm:
        assert llm.kv_transfer_config is not None and llm.kv_transfer_config.kv_role == "kv_both"
        since = Since(server)
        serve(llm, [tokens], max_tokens=1)
        assert since("stored_blocks") == 5
        forget_local(llm)
        [warm] = serve(llm, [counting(tokens)], max_tokens=1)
    assert extra(warm) == 20
    assert [warm.token_ids] == without_cache(model, [tokens], max_tokens=1)


def test_a_native_transfer_config_alone_is_enough() -> None:
    config = {
        "kv_connector": "NativeConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 16 << 20},
    }
    tokens = prompt(22)
    with LLM(oracle(), kv_transfer_config=config, **SMALL) as llm:
        serve(llm, [tokens], max_tokens=1)
        forget_local(llm)
        [warm] = serve(llm, [counting(tokens)], max_tokens=1)
    assert extra(warm) == 20


# -- no server


@pytest.mark.parametrize("ranks", [1, 4])
def test_without_a_server_the_engine_serves_and_says_so_once(
    nowhere: str, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompts = oracle(), [prompt(22) for _ in range(4)]
    started = time.monotonic()
    with engine(nowhere, model, extra=BRISK, tensor_parallel_size=ranks) as llm:
        assert time.monotonic() - started < 30, "the peers block for 300 s and die"
        for _ in range(3):
            answers = serve(llm, prompts)
            assert tokens_of(answers) == without_cache(model, prompts)
        assert eventually(lambda: len(outages(caplog)) >= 1)
        connections = connections_of(llm)
        assert len(connections) == ranks + 1
        assert eventually(lambda: all(each.outage.told for each in connections)), (
            "each has met the outage"
        )
        before = [each._attempts for each in connections]
        assert eventually(
            lambda: all(
                each._attempts >= n + 3 for each, n in zip(connections, before, strict=True)
            )
        )
    assert all(extra.metrics.external_cached_tokens == 0 for extra in answers)
    assert len(outages(caplog)) == 1, "it is said once"
    [said] = outages(caplog)
    assert nowhere in said and "kvkeep serve" in said


def test_a_server_that_appears_later_is_used_without_a_word_from_anybody(
    nowhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokens = oracle(), prompt(22)
    later = ServerProcess(*POOL)
    later.address = nowhere
    with engine(nowhere, model, extra=BRISK) as llm, caplog.at_level(logging.WARNING):
        [alone] = serve(llm, [counting(tokens)], max_tokens=1)
        with later:
            connections = connections_of(llm)
            assert eventually(lambda: all(each.up for each in connections)), "it connects by itself"
            since = Since(later)
            [local] = serve(llm, [counting(tokens)], max_tokens=1)
            assert since("stored_blocks") == 5, (
                "what the engine had and the server lacked was handed on"
            )
            forget_local(llm)
            [warm] = serve(llm, [counting(tokens)], max_tokens=1)
            assert since("hit_blocks") == 5
            assert at_rest(later)
    assert (extra(alone), local.metrics.local_cached_tokens, extra(warm)) == (0, 20, 20)
    assert (
        [alone.token_ids]
        == [local.token_ids]
        == [warm.token_ids]
        == without_cache(model, [tokens], max_tokens=1)
    )
    assert any(f"connected to {nowhere}" in text for text in caplog.messages)


def test_a_server_that_is_killed_and_comes_back_changes_no_token() -> None:
    model, tokens = oracle(), prompt(22)
    expected = without_cache(model, [tokens])
    server = ServerProcess(*POOL)
    with server, engine(server, model, extra=BRISK) as llm:
        connections = connections_of(llm)
        serve(llm, [tokens])
        server.stop(signal.SIGKILL)
        for _ in range(3):
            forget_local(llm)
            [answer] = serve(llm, [counting(tokens)])
            assert ([answer.token_ids], extra(answer)) == (expected, 0)
        before = {each.epoch for each in connections} | {0}
        server.start()
        assert eventually(lambda: before.isdisjoint(each.epoch for each in connections))
        forget_local(llm)
        [warm] = serve(llm, [counting(tokens)])
        assert extra(warm) == 20, "the next server has what the last one had"
        assert [warm.token_ids] == expected
        assert at_rest(server)


def test_an_engine_that_ends_without_a_server_ends_at_once(nowhere: str) -> None:
    with engine(nowhere, oracle(), extra=BRISK) as llm:
        llm.generate([prompt(22)], SamplingParams(max_tokens=1))
        started = time.monotonic()
    assert time.monotonic() - started < 30
