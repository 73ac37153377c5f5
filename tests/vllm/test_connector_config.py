"""M4: the ways in, and what an engine does that was told little or told wrong."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from replicas import (
    POOL,
    VLLM,
    EngineFailed,
    Replica,
    Server,
    Since,
    counting,
    eventually,
    prompt,
    request,
    status,
    tokens_of,
)

from kvkeep.testing.process import ServerProcess

BY_MODULE = {"kv_connector_module_path": "kvkeep.vllm"}
ROLE = {"kv_role": "kv_both"}


@pytest.fixture(autouse=True)
def _engine_ends(two: Replica) -> Iterator[None]:
    yield
    two.close_engine()


LOADS = "Starting to load model"


def split(server: ServerProcess) -> tuple[str, int]:
    host, port = server.address.removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


def finds(replica: Replica, plain: Replica) -> None:
    """What it stores it finds again, in the right place."""
    tokens = prompt(100)
    expected = tokens_of(plain.use("llama").serve([request(tokens)]))
    answers = [*replica.serve([counting(tokens)]), *replica.fresh().serve([counting(tokens)])]
    assert tokens_of(answers) == expected * 2
    assert [answer.extra for answer in answers] == [0, 96]


@pytest.fixture
def since(server: ServerProcess) -> Since:
    """What the shared server has seen since the test began."""
    return Since(server)


def connected(since: Since) -> bool:
    return eventually(lambda: since("sessions_opened") >= 2)


WAYS: dict[str, dict[str, Any]] = {
    "by name, through the plugin": {
        "kv_transfer_config": {"kv_connector": "KVKeepConnector", **ROLE}
    },
    "by module path": {
        "kv_transfer_config": {"kv_connector": "KVKeepConnector", **ROLE, **BY_MODULE}
    },
    "by vLLM's own offloading options, and nothing else": {
        "kv_offloading_backend": "lmcache",
        "kv_offloading_size": 1,
    },
    "by vLLM's own offloading options": {
        "kv_offloading_backend": "lmcache",
        "kv_offloading_size": 1,
        "kv_transfer_config": dict(BY_MODULE),
    },
}


def options_of(way: str, extra: dict[str, Any]) -> dict[str, Any]:
    options = {
        key: dict(value) if isinstance(value, dict) else value for key, value in WAYS[way].items()
    }
    if extra and "kv_transfer_config" in options:
        options["kv_transfer_config"]["kv_connector_extra_config"] = extra
    return options


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_reaches_the_server(
    plain: Replica, two: Replica, server: ServerProcess, since: Since, way: str
) -> None:
    options = options_of(way, {"kvkeep.address": server.address})
    told = {} if "kv_transfer_config" in options else {"KVKEEP_ADDRESS": server.address}
    two.use("llama", env={**told, "VLLM_LOGGING_LEVEL": "INFO"}, **options)
    # Older releases take the level of their log when they are imported.
    assert LOADS in two.log() or VLLM < "0.32"
    assert two.facts["connector"] in ("KVKeepConnector", "LMCacheMPConnector")
    assert connected(since)
    finds(two, plain)


def test_the_names_of_other_software_are_understood(
    plain: Replica, two: Replica, server: ServerProcess, since: Since
) -> None:
    host, port = split(server)
    extra = {"lmcache.mp.host": f"tcp://{host}", "lmcache.mp.port": port, "lmcache.chunk_size": 256}
    two.use("llama", **options_of("by vLLM's own offloading options", extra))
    assert connected(since)
    finds(two, plain)


def test_the_address_may_come_from_the_environment(
    plain: Replica, two: Replica, server: ServerProcess, since: Since
) -> None:
    two.use(
        "llama",
        env={"KVKEEP_ADDRESS": server.address},
        **options_of("by name, through the plugin", {}),
    )
    assert connected(since)
    finds(two, plain)


def test_nothing_said_means_the_default_port(plain: Replica, two: Replica) -> None:
    with socket.socket() as taken:
        if not taken.connect_ex(("127.0.0.1", 5555)):
            pytest.skip("something listens on port 5555 here")
    server = Server(*POOL)
    server.address = "tcp://127.0.0.1:5555"
    with server:
        two.use("llama", **options_of("by vLLM's own offloading options", {}))
        assert eventually(lambda: len(status(server)["sessions"]) >= 2)
        since = Since(server)
        finds(two, plain)
        assert since("stored_blocks") == 3
        two.close_engine()


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"kvkeep.adress": "tcp://127.0.0.1:1"}, "kvkeep.adress"),
        ({"kvkeep.lookup_deadline_ms": "soon"}, "kvkeep.lookup_deadline_ms"),
        ({"kvkeep.address": "ftp://nowhere"}, "address"),
    ],
)
def test_a_bad_setting_stops_the_engine_and_is_named(
    two: Replica, server: ServerProcess, extra: dict[str, Any], named: str
) -> None:
    before = len(two.log())
    with pytest.raises(EngineFailed, match=named):
        two.use("llama", server, extra=extra, env={"VLLM_LOGGING_LEVEL": "INFO"})
    assert LOADS not in two.log()[before:], "before it loads the model"


def test_keys_of_other_software_are_left_alone(
    plain: Replica, two: Replica, server: ServerProcess
) -> None:
    two.use("llama", server, extra={"lmcache.local_cpu": True, "mine": {"a": 1}})
    finds(two, plain)
