"""Blocks that outlive memory on a disk: engine A stores, the server's memory is lost, engine B loads
from the disk. Real processes, a real directory, the oracle model."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import (
    BRISK,
    GQA,
    POOL,
    at_rest,
    counting,
    engine,
    eventually,
    oracle,
    prompt,
    seed,
    serve,
    tokens_of,
    without_cache,
)
from tests.client.test_pool_events import Reader

from kvkeep.cli.remote import ask
from kvkeep.client.connection import Connection
from kvkeep.client.options import ClientOptions
from kvkeep.client.pool_events import Descriptions, PoolFeed
from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import StoreRequest
from kvkeep.client.transfer import Transfer
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.runs import BlockRuns
from kvkeep.kv.shape import BlockShape
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m

WAITS = {"kvkeep.tier_patience": "wait"}
BLOCKS = 50  # of a prompt of 203 tokens


def server_with_disk(directory: Path) -> ServerProcess:
    return ServerProcess(*POOL, "--tier", f"disk://{directory / 'tier'}?size=64MiB")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with server_with_disk(tmp_path) as running:
        yield running
        assert at_rest(running), "a lease or a write outlived its request"


def tier(server: ServerProcess) -> dict[str, Any]:
    [shown] = ask(server.http, "/v1/tiers")
    return dict(shown)


def is_on_disk(server: ServerProcess, blocks: int) -> bool:
    return eventually(lambda: tier(server)["counts"]["written_blocks"] >= blocks)


def restart_cold(server: ServerProcess) -> None:
    """As if the host had been restarted: the process is gone, and all of its shared memory."""
    server.stop(signal.SIGKILL)
    shutil.rmtree(server.pool)
    server.start()


def test_an_engine_loads_from_disk_what_another_stored_before_memory_was_lost(
    server: ServerProcess,
) -> None:
    model, tokens = oracle(), prompt(203)
    expected = without_cache(model, [tokens])
    with engine(server, model) as one:
        assert tokens_of(serve(one, [tokens])) == expected
    assert is_on_disk(server, BLOCKS)
    restart_cold(server)
    with engine(server, model, extra=WAITS) as other:
        [answer] = serve(other, [counting(tokens)])
    assert [answer.token_ids] == expected
    assert answer.metrics.external_cached_tokens == BLOCKS * 4
    assert answer.metrics.failed_loads == 0


def test_a_real_model_and_several_ranks_read_their_own_shards_back(server: ServerProcess) -> None:
    sizes, number, tokens = GQA, seed(), prompt(203)
    expected = without_cache(sizes, [tokens], seed=number)
    ranks = {"seed": number, "tensor_parallel_size": 2}
    with engine(server, sizes, **ranks) as one:
        assert tokens_of(serve(one, [tokens])) == expected
    assert is_on_disk(server, BLOCKS)
    restart_cold(server)
    with engine(server, sizes, extra=WAITS, **ranks) as other:
        [answer] = serve(other, [counting(tokens)])
    assert [answer.token_ids] == expected
    assert answer.metrics.external_cached_tokens == BLOCKS * 4


def test_without_patience_the_next_request_has_the_blocks(server: ServerProcess) -> None:
    model, tokens = oracle(), prompt(203)
    with engine(server, model) as one:
        [first] = serve(one, [tokens])
    assert is_on_disk(server, BLOCKS)
    restart_cold(server)
    with engine(server, model, extra={"kvkeep.tier_patience": "best_effort"}) as other:
        [answer] = serve(other, [counting(tokens)])
        assert answer.token_ids == first.token_ids
        assert answer.metrics.external_cached_tokens == 0, "nothing was in memory yet"


def test_a_tenant_finds_its_own_blocks_only(server: ServerProcess) -> None:
    model, tokens = oracle(), prompt(203)
    with engine(server, model) as one:
        serve(one, [counting(tokens, "alice")])
    assert is_on_disk(server, BLOCKS)
    restart_cold(server)
    with engine(server, model, extra=WAITS) as other:
        found = serve(other, [counting(tokens, "bob"), counting(tokens, "alice")])
    given = [each.metrics.external_cached_tokens for each in found]
    assert given == [0, BLOCKS * 4]


def test_an_engine_goes_on_while_its_server_is_restarted_cold(server: ServerProcess) -> None:
    model, tokens = oracle(), prompt(203)
    with engine(server, model, extra=WAITS | BRISK) as llm:
        [first] = serve(llm, [tokens])
        assert is_on_disk(server, BLOCKS)
        restart_cold(server)
        assert eventually(lambda: all(each.up for each in llm.engine.backend.connections))  # type: ignore[union-attr, attr-defined]
        llm.engine.scheduler.pool.forget_all()
        [again] = serve(llm, [counting(tokens)])
    assert again.token_ids == first.token_ids
    assert again.metrics.external_cached_tokens == BLOCKS * 4


@pytest.mark.parametrize("damage", ["garbage", "removed"])
def test_a_damaged_disk_is_a_miss(server: ServerProcess, tmp_path: Path, damage: str) -> None:
    model, tokens = oracle(), prompt(203)
    expected = without_cache(model, [tokens])
    with engine(server, model) as one:
        serve(one, [tokens])
    assert is_on_disk(server, BLOCKS)
    server.stop(signal.SIGKILL)
    shutil.rmtree(server.pool)
    if damage == "removed":
        shutil.rmtree(tmp_path / "tier")
    else:
        data = tmp_path / "tier" / "data"
        with data.open("r+b") as file:
            file.write(b"\xa5" * data.stat().st_size)
    server.start()
    with engine(server, model, extra=WAITS) as other:
        [answer] = serve(other, [counting(tokens)])
    assert [answer.token_ids] == expected
    assert answer.metrics.external_cached_tokens == 0
    assert answer.metrics.failed_loads == 0, "a bad block is not brought up at all"


def test_routers_hear_which_blocks_are_in_memory_and_which_on_a_disk(server: ServerProcess) -> None:
    """A block is on both, on the disk only after memory was lost, and in memory again once a
    request has asked for it. A new server has no descriptions: the engine tells it again."""
    identity = ModelIdentity(model="m", revision="1", kv_dtype="|u1", block_tokens=4, content="m")
    shape = BlockShape(identity, (4096,))
    keys, texts = b"".join(bytes([at]) * 16 for at in range(4)), [b"0", b"1", b"2", b"3"]
    connection = Connection(shape, ClientOptions(address=server.address))
    memory = np.ones((4, 4096), dtype=np.uint8)
    reader = Reader()
    feed = PoolFeed(reader)

    def hears(media: int, *said: bytes) -> bool:
        def heard() -> bool:
            connection.poll()
            feed.turn(connection)
            return sorted(reader.there.values()) == [(media, text) for text in said]

        return eventually(heard)

    transfer = Transfer(connection, [GroupMemory(BlockRuns.of([memory]))], 0)
    assert connection.wait_until_up(20_000)
    store = transfer.store(StoreRequest("default", b"", keys, np.arange(4)))
    store.finish()
    assert store.written == 4
    reader.to_say.append(Descriptions("default", keys, texts))
    assert hears(m.IN_MEMORY | m.ON_DISK, *texts), reader.there
    restart_cold(server)
    assert hears(m.ON_DISK, b"", b"", b"", b""), reader.there
    reader.to_say.append(Descriptions("default", keys, texts))
    assert hears(m.ON_DISK, *texts), reader.there
    connection.call(m.Prefetch("default", connection.layout_number, keys), 5_000)
    assert hears(m.IN_MEMORY | m.ON_DISK, *texts), reader.there
    connection.close()
