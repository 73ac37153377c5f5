"""An engine sees in shared memory which blocks a server lacks, without asking: with real servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engines import Since, eventually

from kvkeep.cli.remote import ask
from kvkeep.client.connection import Connection
from kvkeep.client.options import ClientOptions
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import StoreRequest
from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.client.transfer import Transfer
from kvkeep.kv.identity import ModelIdentity, tenant_of
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape
from kvkeep.testing.process import ServerProcess

NBYTES = 4096
IDENTITY = ModelIdentity(
    model="presence", revision="1", kv_dtype="any", block_tokens=4, content="l"
)
SHAPE = BlockShape(IDENTITY, (NBYTES,))


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--pool-size", "1MiB", "--slab-size", "64KiB") as running:
        yield running


def adapter_of(server: ServerProcess, **options: Any) -> SchedulerAdapter:
    adapter = SchedulerAdapter(SHAPE, ClientOptions(address=server.address, **options))
    assert adapter.connection.wait_until_up(30_000)
    return adapter


@pytest.fixture
def adapter(server: ServerProcess) -> Iterator[SchedulerAdapter]:
    made = adapter_of(server, reconnect_interval_ms=20)
    yield made
    made.close()


def stored(server: ServerProcess, count: int) -> list[bytes]:
    """The keys of so many blocks that are stored now."""
    keys = os.urandom(16 * count)
    connection = Connection(SHAPE, ClientOptions(address=server.address, store_deadline_ms=30_000))
    assert connection.wait_until_up(30_000)
    memory = np.zeros((count, NBYTES), dtype=np.uint8)
    transfer = Transfer(connection, [GroupMemory(BlockRuns.of([memory]))], 0)
    store = StoreRequest(tenant_of(None), b"", keys, np.arange(count))
    assert transfer.store(store).written == count
    connection.close()
    return [keys[at : at + 16] for at in range(0, len(keys), 16)]


def knows_strangers(adapter: SchedulerAdapter) -> bool:
    """One key in two hundred shares its cell with one that is there."""
    return any(adapter.lacks(os.urandom(16)) for _ in range(9))


def test_what_is_stored_is_seen_and_what_is_gone_is_not(
    server: ServerProcess, adapter: SchedulerAdapter
) -> None:
    strangers = [os.urandom(16) for _ in range(50)]
    assert all(map(adapter.lacks, strangers)), "nothing is stored yet"
    first = stored(server, 20)
    assert not any(map(adapter.lacks, first))
    assert sum(map(adapter.lacks, strangers)) > 45, "a few may fall into cells of others"
    stored(server, 256)
    assert sum(map(adapter.lacks, first)) > 10, "evicted; others may use their cells"
    ask(server.http, "/v1/blocks?confirm=everything", "DELETE")
    assert all(map(adapter.lacks, first + strangers))


def test_it_is_seen_while_the_server_hangs(
    server: ServerProcess, adapter: SchedulerAdapter
) -> None:
    [key] = stored(server, 1)
    server.send(signal.SIGSTOP)
    try:
        assert adapter.answer(adapter.lookup(None, os.urandom(16))) is None
        assert not adapter.lacks(key) and knows_strangers(adapter)
    finally:
        server.send(signal.SIGCONT)


def test_a_miss_that_nobody_waits_for_costs_no_second_message(
    server: ServerProcess, adapter: SchedulerAdapter
) -> None:
    counters = adapter.connection.counters
    [key] = stored(server, 1)
    answered, since = counters.answered, Since(server)
    for _ in range(50):
        stranger = os.urandom(16)
        while not adapter.lacks(stranger):
            stranger = os.urandom(16)
        adapter.release(adapter.lookup(None, stranger))
    assert eventually(lambda: adapter.connection.poll() or counters.answered >= answered + 50)
    assert (since.requests("Lookup"), since.requests("Release")) == (50, 0)
    assert counters.late_replies == 0
    adapter.release(adapter.lookup(None, key))
    assert eventually(lambda: adapter.connection.poll() or since.requests("Release") == 1)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_server_shows_what_it_has_adopted(
    server: ServerProcess, adapter: SchedulerAdapter, end: signal.Signals
) -> None:
    keys, before = stored(server, 20), adapter.connection.epoch
    server.stop(end)
    server.start()
    assert eventually(lambda: adapter.connection.up and adapter.connection.epoch != before)
    assert not any(map(adapter.lacks, keys)) and knows_strangers(adapter)
    ask(server.http, "/v1/blocks?confirm=everything", "DELETE")
    assert all(map(adapter.lacks, keys)), "of the new server, not of the old one"


def test_over_a_network_nothing_is_seen(server: ServerProcess) -> None:
    adapter = adapter_of(server, shared_memory=False)
    assert not adapter.lacks(os.urandom(16))
    adapter.close()
    assert not adapter.lacks(os.urandom(16))


@pytest.mark.parametrize("harm", ["removed", "short", "a folder"])
def test_without_it_every_answer_is_waited_for(server: ServerProcess, harm: str) -> None:
    [file] = server.pool.glob("presence-*")
    file.unlink()
    if harm == "short":
        file.write_bytes(b"\0" * 12)
    elif harm == "a folder":
        file.mkdir()
    adapter = adapter_of(server)
    assert not adapter.lacks(os.urandom(16))
    keys = stored(server, 3)
    lookup = adapter.lookup(None, b"".join(keys))
    assert eventually(lambda: adapter.answer(lookup) is not None)
    assert lookup.answer is not None and lookup.answer.blocks == 3
    adapter.close()
