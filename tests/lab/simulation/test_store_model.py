"""The model is simple enough to read; these few examples keep it honest about what tests/model
relies on."""

from __future__ import annotations

import pytest

from kvkeep.errors import RequestError
from kvkeep.store.plans import Limits
from kvkeep_lab.simulation.store_model import StoreModel


@pytest.fixture
def model() -> StoreModel:
    """Three slots, one session, a layout of one shard."""
    made = StoreModel(3, 4096, Limits(tenants=2), None)
    made.layouts[1] = 1
    made.open_session(1)
    return made


def put(
    model: StoreModel, *keys: bytes, tenant: str = "t", now_ms: int = 0, ttl_ms: int = 0
) -> int:
    plan = model.prepare_store(1, 1, tenant, 1, 0, b"", list(keys), now_ms, 50, ttl_ms)
    if plan.positions:
        model.complete_store(1, 1, [0] * len(plan.positions))
    return plan.refused


def test_tails_go_first_and_leases_protect(model: StoreModel) -> None:
    put(model, b"a", b"b", b"c")
    put(model, b"x")
    assert [block.key for block in model.blocks] == [b"a", b"b", b"x"]
    assert len(model.lookup(1, 7, "t", [b"a", b"b"], 0)) == 2
    assert put(model, b"y", b"z") == 1
    assert model.release(1, 7) and not model.release(1, 7)


def test_the_expired_go_first(model: StoreModel) -> None:
    put(model, b"a")
    put(model, b"b", ttl_ms=5)
    put(model, b"c")
    put(model, b"d", now_ms=5)
    assert [block.key for block in model.blocks] == [b"a", b"c", b"d"]


def test_quotas_protect(model: StoreModel) -> None:
    model.set_quota("ann", 2 * 4096)
    put(model, b"a", b"b", tenant="ann")
    assert put(model, b"x", b"y", tenant="bob") == 1 and model.usage("ann") == 2 * 4096
    with pytest.raises(RequestError):
        model.set_quota("bob", 2 * 4096)


def test_abandoned_blocks_vanish_and_dropped_ones_wait_for_their_readers(model: StoreModel) -> None:
    model.prepare_store(1, 1, "t", 1, 0, b"", [b"a", b"b"], 0, 50, 0)
    assert model.abandon_store(1, 1) and model.blocks == []
    put(model, b"a", b"b")
    model.lookup(1, 7, "t", [b"a", b"b"], 0)
    assert model.drop_block("t", b"a") == 2 and len(model.blocks) == 2
    model.close_session(1)
    assert model.blocks == [] and model.tenants() == set()
