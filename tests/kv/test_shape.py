"""The shape of a model's blocks: shards that fit the world, and a fingerprint that tells all shapes apart."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvkeep.errors import RequestError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.keys import root_key
from kvkeep.kv.shape import BlockShape


def identity(**changes: Any) -> ModelIdentity:
    fields = {"model": "m", "revision": "1", "kv_dtype": "bfloat16", "block_tokens": 16, "layout": "l"}
    return ModelIdentity(**(fields | changes))


@pytest.mark.parametrize("shard_bytes", [(), (64, 64)])
def test_there_is_one_size_for_each_kv_rank(shard_bytes: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="KV world size of 1") as caught:
        BlockShape(identity(), shard_bytes)
    assert caught.value.field == "shard_bytes"


@pytest.mark.parametrize("shard_bytes", [(64, 0), (-1, 64)])
def test_no_shard_is_empty(shard_bytes: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="at least one byte"):
        BlockShape(identity(kv_world_size=2), shard_bytes)


@pytest.mark.parametrize("shard_bytes", [(64.0,), ("64",), (None,)])
def test_sizes_are_integers(shard_bytes: Any) -> None:
    with pytest.raises(RequestError, match="shard_bytes"):
        BlockShape(identity(), shard_bytes)


def test_sizes_from_numpy_or_in_a_list_are_the_same_shape() -> None:
    plain = BlockShape(identity(kv_world_size=2), (64, 128))
    given: Any = [np.int64(64), np.int32(128)]
    assert BlockShape(identity(kv_world_size=2), given) == plain
    assert msgspec.msgpack.encode(BlockShape(identity(kv_world_size=2), given).shard_bytes), "and it can be sent"


def test_the_fingerprint_is_stable_and_changes_with_everything() -> None:
    base = BlockShape(identity(), (64,))
    assert base.fingerprint == BlockShape(identity(), (64,)).fingerprint
    others = [
        BlockShape(identity(), (65,)),
        BlockShape(identity(model="n"), (64,)),
        BlockShape(identity(revision="2"), (64,)),
        BlockShape(identity(kv_dtype="float16"), (64,)),
        BlockShape(identity(block_tokens=32), (64,)),
        BlockShape(identity(layout="k"), (64,)),
        BlockShape(identity(kv_world_size=2), (32, 32)),
        BlockShape(identity(kv_world_size=2), (32, 33)),
        BlockShape(identity(kv_world_size=2), (33, 32)),
    ]
    assert len({shape.fingerprint for shape in [base, *others]}) == 10
    assert all(len(shape.fingerprint) == 16 for shape in others)


def test_the_fingerprint_is_no_key() -> None:
    shape = BlockShape(identity(), (64,))
    assert shape.fingerprint != root_key(shape.identity, None)


# -- several pieces a rank


@pytest.mark.parametrize(("ranks", "pieces"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)])
def test_every_rank_has_a_size_for_each_of_its_pieces(ranks: int, pieces: int) -> None:
    sizes = tuple(range(64, 64 + ranks * pieces))
    shape = BlockShape(identity(kv_world_size=ranks), sizes, pieces)
    assert (shape.shard_bytes, shape.pieces) == (sizes, pieces)
    for wrong in (sizes[1:], (*sizes, 64)):
        with pytest.raises(RequestError, match=f"{len(wrong)} shards for a KV world size of {ranks}") as caught:
            BlockShape(identity(kv_world_size=ranks), wrong, pieces)
        assert caught.value.field == "shard_bytes"
        assert (f"and {pieces} pieces" in caught.value.message) == (pieces > 1), "said where there are several"


@pytest.mark.parametrize(("pieces", "sizes"), [(0, ()), (0, (64,)), (-1, ()), (-1, (64,))])
def test_there_is_at_least_one_piece(pieces: int, sizes: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match=f"KV world size of 1 and {pieces} pieces"):
        BlockShape(identity(), sizes, pieces)


def test_no_piece_is_empty() -> None:
    with pytest.raises(RequestError, match="at least one byte"):
        BlockShape(identity(), (64, 0), 2)


def test_pieces_and_ranks_of_the_same_sizes_have_different_fingerprints() -> None:
    shapes = [
        BlockShape(identity(), (64, 32), 2),
        BlockShape(identity(), (32, 64), 2),
        BlockShape(identity(kv_world_size=2), (64, 32)),
        BlockShape(identity(), (96,)),
        BlockShape(identity(), (6432,)),
        BlockShape(identity(), (64, 3, 2), 3),
    ]
    assert len({shape.fingerprint for shape in shapes}) == len(shapes)
    assert BlockShape(identity(), (64, 32), 2).fingerprint == shapes[0].fingerprint
