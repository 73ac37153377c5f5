"""The shape of a model's blocks: shards that fit the world, and a fingerprint that tells all shapes
apart."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvkeep.errors import RequestError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.keys import addresses, root_key
from kvkeep.kv.shape import BlockShape


def identity(**changes: Any) -> ModelIdentity:
    fields = {
        "model": "m",
        "revision": "1",
        "kv_dtype": "bfloat16",
        "block_tokens": 16,
        "content": "l",
    }
    return ModelIdentity(**(fields | changes))


def test_a_block_has_at_least_one_shard() -> None:
    with pytest.raises(RequestError, match="0 shards") as caught:
        BlockShape(identity(), ())
    assert caught.value.field == "shard_bytes"


@pytest.mark.parametrize("shard_bytes", [(64, 0), (-1, 64)])
def test_no_shard_is_empty(shard_bytes: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="at least one byte"):
        BlockShape(identity(), shard_bytes)


@pytest.mark.parametrize("shard_bytes", [(64.0,), ("64",), (None,)])
def test_sizes_are_integers(shard_bytes: Any) -> None:
    with pytest.raises(RequestError, match="shard_bytes"):
        BlockShape(identity(), shard_bytes)


def test_sizes_from_numpy_or_in_a_list_are_the_same_shape() -> None:
    plain = BlockShape(identity(), (64, 128))
    given: Any = [np.int64(64), np.int32(128)]
    assert BlockShape(identity(), given) == plain
    assert msgspec.msgpack.encode(BlockShape(identity(), given).shard_bytes), "and it can be sent"


def test_the_fingerprint_is_stable_and_changes_with_everything() -> None:
    base = BlockShape(identity(), (64,))
    assert base.fingerprint == BlockShape(identity(), (64,)).fingerprint
    others = [
        BlockShape(identity(), (65,)),
        BlockShape(identity(model="n"), (64,)),
        BlockShape(identity(revision="2"), (64,)),
        BlockShape(identity(kv_dtype="float16"), (64,)),
        BlockShape(identity(block_tokens=32), (64,)),
        BlockShape(identity(content="k"), (64,)),
        BlockShape(identity(), (32, 32)),
        BlockShape(identity(), (32, 33)),
        BlockShape(identity(), (33, 32)),
        BlockShape(identity(details=(("attention", "a"),)), (64,)),
        BlockShape(identity(details=(("attention", "b"),)), (64,)),
        BlockShape(identity(), (64,), cut="tp=2"),
    ]
    assert len({shape.fingerprint for shape in [base, *others]}) == 13
    assert all(len(shape.fingerprint) == 16 for shape in others)


def test_the_fingerprint_is_no_key() -> None:
    shape = BlockShape(identity(), (64,))
    assert shape.fingerprint != root_key(shape.identity, None)


# -- several pieces a rank


@pytest.mark.parametrize(("ranks", "pieces"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)])
def test_every_rank_has_a_size_for_each_of_its_pieces(ranks: int, pieces: int) -> None:
    sizes = tuple(range(64, 64 + ranks * pieces))
    shape = BlockShape(identity(), sizes, pieces)
    assert (shape.shard_bytes, shape.pieces, shape.kv_shards) == (sizes, pieces, ranks)
    for wrong in (sizes[1:], (*sizes, 64)) if pieces > 1 else ():
        with pytest.raises(
            RequestError, match=f"{len(wrong)} shards do not divide into {pieces} pieces"
        ) as caught:
            BlockShape(identity(), wrong, pieces)
        assert caught.value.field == "shard_bytes"


@pytest.mark.parametrize(("pieces", "sizes"), [(0, ()), (0, (64,)), (-1, ()), (-1, (64,))])
def test_there_is_at_least_one_piece(pieces: int, sizes: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match=f"do not divide into {pieces} pieces"):
        BlockShape(identity(), sizes, pieces)


def test_no_piece_is_empty() -> None:
    with pytest.raises(RequestError, match="at least one byte"):
        BlockShape(identity(), (64, 0), 2)


def test_pieces_and_ranks_of_the_same_sizes_have_different_fingerprints() -> None:
    shapes = [
        BlockShape(identity(), (64, 32), 2),
        BlockShape(identity(), (32, 64), 2),
        BlockShape(identity(), (64, 32)),
        BlockShape(identity(), (96,)),
        BlockShape(identity(), (6432,)),
        BlockShape(identity(), (64, 3, 2), 3),
    ]
    assert len({shape.fingerprint for shape in shapes}) == len(shapes)
    assert BlockShape(identity(), (64, 32), 2).fingerprint == shapes[0].fingerprint


# -- the cut is in the address, not in the key


def test_the_cut_is_in_the_address_and_not_in_the_key() -> None:
    whole = BlockShape(identity(), (64,), cut="tp=1 pp=1 replicas=1")
    halves = BlockShape(identity(), (32, 32), cut="tp=2 pp=1 replicas=1")
    assert root_key(whole.identity, "alice") == root_key(halves.identity, "alice"), (
        "keys say what numbers mean"
    )
    assert whole.fingerprint != halves.fingerprint, "and blocks of two cuts have two addresses"
    key = bytes(range(16))
    assert addresses(key, whole.fingerprint) != addresses(key, halves.fingerprint)


def test_parts_name_everything_that_has_to_be_equal() -> None:
    shape = BlockShape(identity(details=(("attention", "FLASH_ATTN"),)), (32, 32), cut="tp=2")
    assert shape.parts == {
        "model": "m", "revision": "1", "kv_dtype": "bfloat16", "block_tokens": "16", "content": "l",
        "layout_version": "2", "attention": "FLASH_ATTN", "cut": "tp=2", "shard_bytes": "32,32", "pieces": "1",
    }  # fmt: skip
    assert shape.digest == shape.fingerprint.hex()[:12]
