"""Requests are checked where they are made, whatever kind of list an engine keeps its block ids
in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.client.requests import NO_BLOCK, Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.errors import RequestError

ALL = slice(None)


def keys(count: int) -> bytes:
    return b"".join(f"k{at}".encode().ljust(16, b".") for at in range(count))


def storing(**changes: Any) -> StoreRequest:
    good: dict[str, Any] = {
        "tenant": "default",
        "parent": b"",
        "keys": keys(2),
        "block_ids": [0, 1],
    }
    return StoreRequest(**good | changes)


def loading(block_ids: Any, slots: int | None = None, skip: int = 0) -> LoadRequest:
    count = np.asarray(block_ids).shape[-1] if slots is None else slots
    where, checksums = np.arange(count, dtype=np.int64), np.zeros((count, 1), dtype=np.uint64)
    return LoadRequest("default", keys(skip + count), skip, block_ids, 1, where, checksums)


# -- block ids


@pytest.mark.parametrize(
    "ids", [[0, 1], range(2), (0, 1), np.array([0, 1], dtype=np.int32), np.array([0, 1], "u2")]
)
def test_block_ids_come_as_engines_have_them(ids: Any) -> None:
    for request in (storing(block_ids=ids), loading(ids)):
        assert request.block_ids.tolist() == [0, 1]
        assert request.block_ids.dtype == np.int64 and request.block_ids.ndim == 1
        assert request.blocks == 2


def test_a_tensors_block_ids_are_taken_too() -> None:
    torch = pytest.importorskip("torch")
    assert storing(block_ids=torch.tensor([[4, 5], [6, NO_BLOCK]])).block_ids.tolist() == [
        [4, 5],
        [6, NO_BLOCK],
    ]


@pytest.mark.parametrize("ids", [[[0, 1], [7, 8], [9, NO_BLOCK]], ((0, 1), (7, 8), (9, NO_BLOCK))])
def test_a_table_has_a_row_for_each_piece_and_a_column_for_each_block(ids: Any) -> None:
    for request in (storing(block_ids=ids), loading(ids)):
        assert request.block_ids.tolist() == [[0, 1], [7, 8], [9, NO_BLOCK]]
        assert request.blocks == 2, "blocks are counted, not pieces"


@pytest.mark.parametrize("ids", [[], np.zeros((3, 0), dtype=np.int64)])
def test_a_request_for_nothing_is_a_request(ids: Any) -> None:
    assert storing(keys=b"", block_ids=ids).blocks == 0
    assert loading(ids).blocks == 0
    assert loading(ids).outcome() == LoadOutcome()


@pytest.mark.parametrize(
    "ids",
    [
        [0.5, 1.0],
        ["0", "1"],
        [[[0, 1]]],
        5,
        [None, None],
        [True, False],
        np.array([0, 1], dtype="f4"),
    ],
)
def test_what_is_no_list_of_integers_is_refused(ids: Any) -> None:
    for make in (lambda: storing(block_ids=ids), lambda: loading(ids, slots=0)):
        with pytest.raises(RequestError, match="must be integers") as caught:
            make()
        assert caught.value.field == "block_ids"


# -- stores


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_ids": [0]}, "keys"),
        ({"block_ids": [[0], [1]]}, "keys"),
        ({"block_ids": [[0, 1, 2], [3, 4, 5]]}, "keys"),
        ({"keys": keys(2)[:-1]}, "keys"),
        ({"parent": b"short"}, "parent"),
        ({"parent": bytes(17)}, "parent"),
        ({"priority": 500}, "priority"),
        ({"priority": -1}, "priority"),
        ({"ttl_ms": -1}, "ttl_ms"),
    ],
    ids=str,
)
def test_a_wrong_store_is_refused_where_it_is_made(change: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        storing(**change)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "change", [{"parent": bytes(16)}, {"priority": 0}, {"priority": 100}, {"ttl_ms": 1}], ids=str
)
def test_a_store_at_the_limits_is_not(change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    assert getattr(storing(**change), name) == value


def test_what_came_of_a_store_is_two_facts() -> None:
    assert (3, True) != (3, False) != (2, False)


# -- loads


@pytest.mark.parametrize("ids", [[0, 1, 2], [[0, 1, 2]], [[0, 1, 2], [3, 4, 5]]], ids=str)
def test_there_is_an_engine_block_for_each_slot(ids: Any) -> None:
    assert loading(ids, slots=3).blocks == 3
    assert loading(ids, slots=0).blocks == 3, "on the network plane there are no slots"
    for slots in (1, 2, 4, 6):
        with pytest.raises(RequestError, match=f"3 blocks to load from {slots} slots") as caught:
            loading(ids, slots=slots)
        assert caught.value.field == "block_ids" and "answer.skip" in caught.value.hint


def test_what_failed_of_a_block_is_the_engine_block_of_every_group() -> None:
    request = loading([[4, 5, 6], [NO_BLOCK, NO_BLOCK, 9]])
    assert request.outcome().failed == {4, 5, 6, 9}
    assert request.outcome(np.array([False, True, False])).failed == {4, 6, 9}
    assert request.outcome(np.array([False, False, True])).failed == {4, 5}
    assert request.outcome(np.ones(3, dtype=np.bool_), 0.5) == LoadOutcome()
    assert request.outcome(np.ones(3, dtype=np.bool_), 0.5).seconds == 0.5


def test_outcomes_of_ranks_are_joined() -> None:
    one, other = LoadOutcome(frozenset({1, 2}), 0.5), LoadOutcome(frozenset({2, 3}), 1.5)
    for joined in (one.joined(other), other.joined(one)):
        assert joined == LoadOutcome(frozenset({1, 2, 3})) and joined.seconds == 1.5
    assert one.joined(LoadOutcome()).seconds == 0.5, "the other rank did not measure it"
    assert LoadOutcome().joined(LoadOutcome()).seconds is None


@given(st.data())
def test_an_outcome_names_exactly_the_engine_blocks_that_are_there(data: st.DataObject) -> None:
    blocks, pieces = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 3))
    table = [[data.draw(st.integers(-1, 20)) for _ in range(blocks)] for _ in range(pieces)]
    chosen = [data.draw(st.booleans()) for _ in range(blocks)]
    expected = [b for row in table for b, c in zip(row, chosen, strict=True) if c and b != NO_BLOCK]
    array = np.array(table, dtype=np.int64).reshape(pieces, blocks)
    for ids in [array, array[0]] if pieces == 1 else [array]:
        got = loading(ids).outcome(~np.array(chosen, dtype=np.bool_)).failed
        assert got == set(expected) and all(type(block) is int for block in got)


@pytest.mark.parametrize(
    "said",
    [{"stored": {1: 0}}, {"incomplete": [1]}, {"loads": {1: LoadOutcome()}}, {"withdrawn": 3}],
    ids=lambda said: next(iter(said)),
)
def test_whoever_has_something_to_say_does_not_say_nothing(said: dict[str, Any]) -> None:
    assert Finished(3).is_nothing and not Finished(3, **said).is_nothing
