"""Trap 8: eviction lags, what does not fit is dropped and reported as stored, a quota kills its own
thread."""

from __future__ import annotations

from collections.abc import Iterator

import clients
import pytest
from engines import at_rest, eventually, status, usage
from patience import patient_client
from test_processes import SMALL_POOL, SMALL_POOL_BLOCKS, Client

from kvkeep.cli.remote import ask
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.process import ServerProcess

BATCH = SMALL_POOL_BLOCKS // 4


@pytest.fixture
def small() -> Iterator[ServerProcess]:
    with ServerProcess(*SMALL_POOL) as running:
        yield running


def tokens_of(number: int, blocks: int = BATCH) -> list[int]:
    return [number, *range(blocks * clients.BLOCK_TOKENS - 1)]


def test_what_is_reported_as_stored_is_there_at_once(small: ServerProcess) -> None:
    """Ten times the pool, as quickly as it goes: nothing waits for an evictor's turn."""
    with patient_client(small) as cache:
        for number in range(40):
            tokens = tokens_of(number)
            assert cache.put(tokens, clients.oracle(tokens)) == BATCH
            assert (
                clients.same(cache.get(tokens), clients.oracle(tokens))
                and cache.contains(tokens) == BATCH
            )
            assert usage(small)["default"] <= SMALL_POOL_BLOCKS
        assert usage(small) == {"default": SMALL_POOL_BLOCKS}, (
            "full, to the last block, and no fuller"
        )
        assert status(small)["counters"]["evictions"] == 40 * BATCH - SMALL_POOL_BLOCKS


def test_what_finds_no_room_is_not_reported_as_stored(small: ServerProcess) -> None:
    holder = Client("store_half", small.address, (SMALL_POOL_BLOCKS - 3) * clients.BLOCK_TOKENS)
    assert holder.hears() == {"slots": SMALL_POOL_BLOCKS - 3}
    tokens = tokens_of(1, blocks=10)
    with patient_client(small) as cache:
        assert cache.put(tokens, clients.oracle(tokens)) == 3 == cache.contains(tokens)
        assert status(small)["counters"]["refused_blocks"] == 7
        holder.kill()
        assert at_rest(small)
        assert cache.put(tokens, clients.oracle(tokens)) == 7 and cache.contains(tokens) == 10


def test_a_quota_is_kept_and_ends_nothing(small: ServerProcess) -> None:
    tenant, salt = tenant_of("greedy"), "greedy"
    block_bytes = clients.BLOCK_BYTES
    with patient_client(small) as cache:
        modest = tokens_of(7)
        assert cache.put(modest, clients.oracle(modest)) == BATCH
        for quota_blocks in (20, 5, 0, 1):
            ask(
                small.http,
                f"/v1/tenants/{tenant}/quota",
                "PUT",
                {"quota_bytes": quota_blocks * block_bytes},
            )
            for number in range(5):
                tokens = tokens_of(number, blocks=10)
                stored = cache.put(tokens, clients.oracle(tokens, salt), salt=salt)
                assert stored <= cache.contains(tokens, salt=salt)
                assert clients.same(cache.get(tokens, salt=salt), clients.oracle(tokens, salt))
        assert cache.contains(modest) == BATCH, "others keep what they have"
        ask(small.http, f"/v1/tenants/{tenant}/quota", "PUT", {"quota_bytes": None})
        for number in range(8):  # whatever evicts is still alive
            tokens = tokens_of(100 + number)
            assert cache.put(tokens, clients.oracle(tokens)) == BATCH == cache.contains(tokens)
    assert eventually(lambda: status(small)["sessions"] == [])
