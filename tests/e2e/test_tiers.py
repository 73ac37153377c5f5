"""Blocks that outlive memory in a tier. On a disk: engine A stores, the server's memory is lost, and
engine B loads them. In a shared directory: B's host has a memory of its own. Real processes, real
directories, the oracle model. Other kinds of shared tiers: test_shared_services.py."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
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
from tiered import (
    BLOCKS,
    FOUND,
    TOKENS,
    WAITS,
    hit,
    is_ready,
    is_written,
    restart_cold,
    tiers,
    waiting_engine,
)

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


class Place:
    """A tier. `writer` is a server that stores into it; `lose_memory` returns one that has in the
    tier alone what was stored."""

    def __init__(self, kind: str, directory: Path, ends: ExitStack) -> None:
        scheme = {"disk": "disk", "shared": "file"}[kind]
        tier = ("--tier", f"{scheme}://{directory / 'tier'}?size=64MiB")
        self.writer = ends.enter_context(ServerProcess(*POOL, *tier))
        other = kind == "shared"
        self._other = ends.enter_context(ServerProcess(*POOL, *tier)) if other else None
        assert eventually(lambda: all(map(is_ready, filter(None, (self.writer, self._other)))))

    def store(self, model: Any, *prompts: Any, blocks: int = BLOCKS, **options: Any) -> Any:
        """Computes these, until the tier has so many blocks. Returns the tokens."""
        with engine(self.writer, model, **options) as llm:
            answers = serve(llm, prompts)
            assert is_written(self.writer, blocks)
        return tokens_of(answers)

    def lose_memory(self) -> ServerProcess:
        if self._other is None:
            restart_cold(self.writer)
            return self.writer
        self.writer.stop(signal.SIGKILL)
        return self._other


def places(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("place", kinds, indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as ends:
        made = Place(request.param, tmp_path, ends)
        yield made
        assert at_rest(made._other or made.writer), "a lease or a write outlived its request"


@places("disk", "shared")
@pytest.mark.parametrize("kind", ["oracle", "gqa"])
def test_an_engine_loads_what_another_has_stored(place: Place, kind: str) -> None:
    """Also a real model of two ranks, each with shards of its own."""
    model: Any = oracle() if kind == "oracle" else GQA
    own = {} if kind == "oracle" else {"seed": seed()}
    ranks = own if kind == "oracle" else {**own, "tensor_parallel_size": 2}
    tokens = prompt(TOKENS)
    expected = without_cache(model, [tokens], **own)
    assert place.store(model, tokens, **ranks) == expected
    with waiting_engine(place.lose_memory(), model, **ranks) as other:
        [answer] = serve(other, [counting(tokens)])
    assert [answer.token_ids] == expected
    assert answer.metrics.external_cached_tokens == FOUND
    assert answer.metrics.failed_loads == 0


@places("shared")
@pytest.mark.parametrize(("stores", "hits"), [(2, 4), (4, 1)])
def test_hosts_with_engines_of_several_tensor_parallel_sizes_share(
    place: Place, stores: int, hits: int
) -> None:
    model, tokens, cut = oracle(num_kv_heads=4), prompt(TOKENS), {"kvkeep.tp_shards": 4}
    expected = without_cache(model, [tokens])
    assert place.store(model, tokens, tensor_parallel_size=stores, extra=cut) == expected
    server, ranks = place.lose_memory(), {"tensor_parallel_size": hits}
    with waiting_engine(server, model, extra=cut, **ranks) as other:
        [answer] = serve(other, [counting(tokens)])
    assert [answer.token_ids] == expected
    assert answer.metrics.external_cached_tokens == FOUND
    assert answer.metrics.failed_loads == 0


@places("disk", "shared")
def test_a_tenant_finds_its_own_blocks_only(place: Place) -> None:
    model, tokens = oracle(), prompt(TOKENS)
    place.store(model, counting(tokens, "alice"))
    with waiting_engine(place.lose_memory(), model) as other:
        found = serve(other, [counting(tokens, "bob"), counting(tokens, "alice")])
    assert [each.metrics.external_cached_tokens for each in found] == [0, FOUND]


@places("shared")
def test_a_longer_prompt_uses_what_is_there_and_stores_the_rest(place: Place) -> None:
    model, tokens = oracle(), prompt(TOKENS)
    place.store(model, tokens[:103], blocks=25)
    server = place.lose_memory()
    assert hit(server, model, tokens) == 100
    assert is_written(server, 25)


@places("disk", "shared")
def test_without_patience_no_request_waits(place: Place) -> None:
    model, tokens = oracle(), prompt(TOKENS)
    expected = place.store(model, tokens)
    best_effort = {"kvkeep.tier_patience": "best_effort"}
    with engine(place.lose_memory(), model, extra=best_effort) as other:
        [answer] = serve(other, [counting(tokens)])
    assert [answer.token_ids] == expected
    assert answer.metrics.external_cached_tokens == 0, "nothing was in memory yet"


@places("disk")
def test_an_engine_goes_on_while_its_server_is_restarted_cold(place: Place) -> None:
    model, tokens = oracle(), prompt(TOKENS)
    with engine(place.writer, model, extra=WAITS | BRISK) as llm:
        [first] = serve(llm, [tokens])
        assert is_written(place.writer)
        place.lose_memory()
        assert eventually(lambda: all(each.up for each in llm.engine.backend.connections))  # type: ignore[union-attr, attr-defined]
        llm.engine.scheduler.pool.forget_all()
        [again] = serve(llm, [counting(tokens)])
    assert again.token_ids == first.token_ids
    assert again.metrics.external_cached_tokens == FOUND


@places("disk")
@pytest.mark.parametrize("damage", ["garbage", "removed"])
def test_a_disk_that_was_damaged_meanwhile_is_a_miss(
    place: Place, tmp_path: Path, damage: str
) -> None:
    model, tokens = oracle(), prompt(TOKENS)
    place.store(model, tokens)
    place.writer.stop(signal.SIGKILL)
    shutil.rmtree(place.writer.pool)
    if damage == "removed":
        shutil.rmtree(tmp_path / "tier")
    else:
        data = tmp_path / "tier" / "data"
        with data.open("r+b") as file:
            file.write(b"\xa5" * data.stat().st_size)
    place.writer.start()
    assert hit(place.writer, model, tokens) == 0


def test_memory_disk_and_shared_tier_stack(tmp_path: Path) -> None:
    """What the disk has comes from the disk, the rest from the shared tier."""
    model, tokens = oracle(), prompt(TOKENS)
    shared = ("--tier", f"file://{tmp_path / 'shared'}?size=64MiB")
    disk = ("--tier", f"disk://{tmp_path / 'disk'}?size=64MiB")
    with ServerProcess(*POOL, *shared) as one, engine(one, model) as llm:
        serve(llm, [tokens])
        assert is_written(one)
    with ServerProcess(*POOL, *shared, *disk) as other:
        assert eventually(lambda: is_ready(other))
        assert hit(other, model, tokens[:103]) == 100
        assert eventually(lambda: tiers(other)[0]["counts"]["written_blocks"] >= 25)
        restart_cold(other)
        assert eventually(lambda: is_ready(other))
        assert hit(other, model, tokens) == FOUND
        assert all(tier["counts"]["promoted_blocks"] >= 25 for tier in tiers(other))
        assert at_rest(other)


@places("disk")
def test_routers_hear_which_blocks_are_in_memory_and_which_on_a_disk(place: Place) -> None:
    """A block is on both, on the disk only after memory was lost, and in memory again once a
    request has asked for it. A new server has no descriptions: the engine tells it again."""
    identity = ModelIdentity(model="m", revision="1", kv_dtype="|u1", block_tokens=4, content="m")
    shape = BlockShape(identity, (4096,))
    keys, texts = b"".join(bytes([at]) * 16 for at in range(4)), [b"0", b"1", b"2", b"3"]
    connection = Connection(shape, ClientOptions(address=place.writer.address))
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
    place.lose_memory()
    assert hears(m.ON_DISK, b"", b"", b"", b""), reader.there
    reader.to_say.append(Descriptions("default", keys, texts))
    assert hears(m.ON_DISK, *texts), reader.there
    connection.call(m.Prefetch("default", connection.layout_number, keys), 5_000)
    assert hears(m.IN_MEMORY | m.ON_DISK, *texts), reader.there
    connection.close()
