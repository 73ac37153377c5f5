from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvkeep.client.connection import Connection
from kvkeep.client.options import CONNECT_PATIENCE_MS, ClientOptions
from kvkeep.client.requests import Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.client.scheduler import Answer
from kvkeep.engine.backends import NativeBackend, ServerBackend, backend_of
from kvkeep.engine.offloading import KVTransferConfig, resolve
from kvkeep.errors import SettingsError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.shape import BlockShape
from kvkeep.testing.clock import eventually

IDENTITY = ModelIdentity(model="m", revision="1", kv_dtype="float32", block_tokens=4, content="one")
SHAPE = BlockShape(IDENTITY, (256,))
KEYS = bytes(range(16))
ONE = np.array([1])


def nowhere() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def pools() -> set[Path]:
    return set(Path("/dev/shm").glob("kvkeep-embedded-*"))


def finished(worker: Any) -> Finished:
    """What a worker reports, once it does."""
    reports: list[Finished] = []

    def has_reported() -> bool:
        reports.append(worker.poll())
        return bool(reports[-1].stored or reports[-1].loads)

    assert eventually(has_reported)
    return reports[-1]


def answered(cache: Any) -> Answer:
    """What the cache says, once it does."""
    lookup = cache.lookup(None, KEYS)
    answer = eventually(lambda: cache.answer(lookup))
    assert isinstance(answer, Answer)
    return answer


def test_no_connector_is_no_backend() -> None:
    assert backend_of(None) is None
    assert backend_of(KVTransferConfig()) is None
    address = {"kvkeep.address": "tcp://h:1"}
    assert backend_of(KVTransferConfig(kv_connector_extra_config=address)) is None


def test_the_connector_says_which_backend() -> None:
    native = backend_of(resolve("native", 1 / 64))
    assert isinstance(native, NativeBackend)
    assert native.server.store.pool_bytes == 16 << 20
    native.close()
    assert isinstance(backend_of(resolve("kvkeep", 1)), ServerBackend)


def test_the_server_is_where_the_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVKEEP_ADDRESS", raising=False)

    def address(**extra: Any) -> str:
        backend = backend_of(KVTransferConfig("KVKeepConnector", None, extra))
        assert isinstance(backend, ServerBackend)
        backend.lookup_side(SHAPE).close()
        return backend.connections[0].options.address

    assert address() == "tcp://localhost:5555"
    assert address(**{"kvkeep.port": 7}) == "tcp://localhost:7"
    assert address(**{"kvkeep.address": "tcp://127.0.0.1:9"}) == "tcp://127.0.0.1:9"
    monkeypatch.setenv("KVKEEP_ADDRESS", "tcp://127.0.0.2:1")
    assert address() == "tcp://127.0.0.2:1"
    with pytest.raises(SettingsError, match=r"kvkeep\.nonsense"):
        address(**{"kvkeep.nonsense": 1})


@pytest.mark.parametrize(
    ("extra", "when"), [({}, "faster"), ({"kvkeep.load_when": "always"}, "always")]
)
def test_when_to_load_is_what_the_config_says(extra: dict[str, Any], when: str) -> None:
    server = backend_of(KVTransferConfig("KVKeepConnector", None, extra))
    extra = {"cpu_bytes_to_use": 16 << 20, **extra}
    native = backend_of(KVTransferConfig("NativeConnector", None, extra))
    assert server is not None and native is not None
    assert server.load_when == native.load_when == when
    native.close()


def test_a_server_that_is_not_there_costs_one_patience_for_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patience: list[int] = []
    really_wait = Connection.wait_until_up

    def wait_until_up(connection: Connection, timeout_ms: int) -> bool:
        patience.append(max(0, timeout_ms))
        return really_wait(connection, timeout_ms)

    monkeypatch.setattr(Connection, "wait_until_up", wait_until_up)
    backend = ServerBackend(ClientOptions(address=nowhere()))
    sides = [backend.transfer_side(SHAPE, ParallelStrategy.of()) for _ in range(8)]
    cache = backend.lookup_side(SHAPE)
    backend.connect()
    assert len(patience) == 9
    assert sum(patience) <= CONNECT_PATIENCE_MS + len(patience), "one patience, rounded 9 times"
    answer = cache.answer(cache.lookup(None, KEYS))
    assert isinstance(answer, Answer) and (answer.blocks, answer.failure) == (0, "not_connected")
    for side in (*sides, cache):
        side.close()
    backend.close()


def test_every_rank_and_the_scheduler_has_a_connection_of_its_own() -> None:
    backend = NativeBackend(2 << 20)
    shape = BlockShape(IDENTITY, (128, 128))
    strategies = [ParallelStrategy.of(tp_size=2, rank=rank) for rank in range(2)]
    ranks = [backend.transfer_side(shape, strategy) for strategy in strategies]
    cache = backend.lookup_side(shape)
    for rank in ranks:
        rank.register_kv_caches([torch.zeros((4, 32))])
    backend.connect()
    assert len(set(map(id, backend.connections))) == 3
    assert all(connection.up for connection in backend.connections)
    assert len(list(backend.server.service.sessions.all())) == 3
    for side in (*ranks, cache):
        side.close()
    assert not list(backend.server.service.sessions.all())
    backend.close()


def test_native_moves_blocks_and_two_do_not_share() -> None:
    before = pools()
    one, two = NativeBackend(2 << 20), NativeBackend(2 << 20)
    assert len(pools() - before) == 2
    memory = torch.arange(4 * 64, dtype=torch.float32).reshape(4, 64)
    worker = one.transfer_side(SHAPE, ParallelStrategy.of())
    cache, other = one.lookup_side(SHAPE), two.lookup_side(SHAPE)
    worker.register_kv_caches([memory])
    one.connect()
    two.connect()
    worker.store("s", StoreRequest("default", b"", KEYS, ONE))
    assert finished(worker).stored == {"s": 1}
    answer, nothing = answered(cache), answered(other)
    assert (answer.blocks, nothing.blocks, nothing.failure) == (1, 0, "")
    worker.load(
        "l",
        LoadRequest(
            "default", KEYS, 0, np.array([3]), answer.epoch, answer.slots, answer.checksums
        ),
    )
    assert finished(worker) == Finished(loads={"l": LoadOutcome()})
    assert torch.equal(memory[3], memory[1])
    for side in (worker, cache, other):
        side.close()
    one.close()
    one.close()
    two.close()
    assert pools() <= before


def test_native_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_ADDRESS", "tcp://nobody.invalid:1")
    backend = NativeBackend(2 << 20)
    cache = backend.lookup_side(SHAPE)
    backend.connect()
    [connection] = backend.connections
    assert connection.wait_until_up(30_000)
    assert connection.options.address.startswith("inproc://")
    cache.close()
    backend.close()
