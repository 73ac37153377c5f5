"""Trap 5: no checksums, and stores that failed are served as hits."""

from __future__ import annotations

import clients
import pytest
from engines import (
    KEY,
    PoolMemory,
    Since,
    at_rest,
    content,
    counting,
    eventually,
    forget_local,
    local_blocks,
    oracle,
    prompt,
    serve,
)
from patience import patient_client, patient_engine
from test_processes import Client

from kvkeep.testing.process import ServerProcess


@pytest.mark.parametrize("shared_memory", [True, False])
def test_one_flipped_bit_in_memory_is_no_hit_and_the_block_goes(
    server: ServerProcess, shared_memory: bool
) -> None:
    model, tokens = oracle(), prompt(22)
    with (
        patient_engine(server, model) as one,
        patient_engine(server, model, extra={"kvkeep.shared_memory": shared_memory}) as two,
    ):
        [first] = serve(one, [tokens])
        PoolMemory(server).flip(content(one, local_blocks(one, tokens)[2]))
        since = Since(server)
        [answer] = serve(two, [counting(tokens)])
        assert answer.token_ids == first.token_ids
        assert answer.kv_transfer_params == {KEY: 8}, "the two blocks before it, and no more"
        assert eventually(lambda: since("bad_blocks") == 1), "counted, and dropped by the server"
        forget_local(two)
        [again] = serve(two, [counting(tokens)])
        assert again.kv_transfer_params == {KEY: 20} and again.token_ids == first.token_ids


def test_a_store_that_was_not_completed_is_never_a_hit(server: ServerProcess) -> None:
    writer = Client("store_half", server.address, 40)
    assert writer.hears() == {"slots": 10}
    tokens = list(range(1_000_000, 1_000_040))
    with patient_client(server) as cache:
        assert cache.contains(tokens) == 0, "half written"
        writer.kill()
        assert at_rest(server)
        assert cache.contains(tokens) == 0, "and never to be written"
        assert cache.put(tokens, clients.oracle(tokens)) == 10
        assert (
            clients.same(cache.get(tokens), clients.oracle(tokens)) and cache.contains(tokens) == 10
        )
