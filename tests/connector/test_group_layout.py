"""What a hit needs: against a model that goes through the tokens one by one, as the drawing has
it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvkeep.client.requests import NO_BLOCK
from kvkeep.connector.group_layout import CacheGroup, GroupLayout
from kvkeep.kv.checksum import ABSENT

FULL, WINDOW, STATE = (
    CacheGroup("full", 4),
    CacheGroup("window", 4, reach=6),
    CacheGroup("state", 4),
)
NULL = 0


# -- the model


def spans(groups: list[CacheGroup]) -> list[tuple[CacheGroup, int, int]]:
    """Each piece: its group, and the tokens of a block that it covers."""
    block = math.lcm(*(group.block_tokens for group in groups))
    return [
        (group, start, start + group.block_tokens)
        for group in groups
        for start in range(0, block, group.block_tokens)
    ]


def needs(group: CacheGroup, first_token: int, end: int, hit_tokens: int) -> bool:
    """Whether a hit of so many tokens needs what a group holds of tokens first_token..end-1."""
    if end > hit_tokens:
        return False
    if group.kind == "full":
        return True
    if group.kind == "state":
        return end == hit_tokens
    skipped = max(0, hit_tokens - group.reach + 1)  # vLLM's get_num_skipped_tokens
    return any(token >= skipped for token in range(first_token, end))


def hit(groups: list[CacheGroup], absent: NDArray[np.bool_], local: int, limit: int) -> int:
    """The longest hit; `absent[b, p]`: the server lacks piece p of block b."""
    block_tokens = math.lcm(*(group.block_tokens for group in groups))
    for blocks in range(min(len(absent), limit), local, -1):
        wanted = [
            (block, piece)
            for block in range(local, blocks)
            for piece, (group, start, end) in enumerate(spans(groups))
            if needs(
                group,
                block * block_tokens + start,
                block * block_tokens + end,
                blocks * block_tokens,
            )
        ]
        if not any(absent[place] for place in wanted):
            return blocks
    return local


def usable(pieces: GroupLayout, absent: Any, skip: int = 0, local: int = 0, limit: int = 99) -> int:
    """One rank; `absent` is a table of 0 and 1, a row for each block."""
    table = np.array(absent, dtype=np.bool_).reshape(-1, len(pieces))
    return pieces.usable(np.where(table, np.uint64(ABSENT), np.uint64(7)), skip, local, limit)


KINDS = st.builds(
    CacheGroup,
    st.sampled_from(["full", "window", "state"]),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.integers(1, 30),
)


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_usable_is_what_the_drawing_says(data: st.DataObject) -> None:
    groups = data.draw(st.lists(KINDS, min_size=1, max_size=3), "groups")
    pieces = GroupLayout(groups)
    blocks, ranks = data.draw(st.integers(0, 6), "blocks"), data.draw(st.integers(1, 2), "ranks")
    local = data.draw(st.integers(0, 7), "local")
    skip = data.draw(st.integers(0, local), "skip")
    limit = data.draw(st.integers(0, 9), "limit")
    rare = data.draw(st.sampled_from([0.05, 0.3, 0.9]), "how rare")
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30), "seed"))
    lacks = rng.random((blocks, ranks, len(pieces))) < rare
    checksums = np.where(lacks, np.uint64(ABSENT), np.uint64(7)).reshape(
        blocks, ranks * len(pieces)
    )
    absent = np.concatenate([np.zeros((skip, len(pieces)), np.bool_), lacks.any(axis=1)])
    assert pieces.usable(checksums, skip, local, limit) == hit(groups, absent, local, limit)


@settings(max_examples=300, deadline=None)
@given(st.lists(KINDS, min_size=1, max_size=3), st.integers(1, 6))
def test_a_hit_needs_no_more_than_it_needs(groups: list[CacheGroup], blocks: int) -> None:
    """Each single missing piece costs the hit exactly if the model says that it is needed."""
    pieces = GroupLayout(groups)
    for block in range(blocks):
        for piece, (group, start, end) in enumerate(spans(groups)):
            absent = np.zeros((blocks, len(pieces)), dtype=np.bool_)
            absent[block, piece] = True
            at = block * pieces.block_tokens
            needed = needs(group, at + start, at + end, blocks * pieces.block_tokens)
            assert (usable(pieces, absent) < blocks) == needed


# -- by hand


def test_the_drawing_itself() -> None:
    """Six blocks of four tokens: all of full attention, two of the window, one state."""
    pieces = GroupLayout([FULL, WINDOW, STATE])
    drawn = np.array([[0, 1, 1]] * 4 + [[0, 0, 1], [0, 0, 0]])
    assert usable(pieces, drawn) == 6
    for block, piece in ((0, 0), (3, 0), (5, 0), (4, 1), (5, 1), (5, 2)):
        damaged = drawn.copy()
        damaged[block, piece] = 1
        assert usable(pieces, damaged) < 6, (block, piece)


@pytest.mark.parametrize(
    ("reach", "first_needed"),
    [(1, 4), (2, 3), (5, 3), (6, 2), (9, 2), (10, 1), (13, 1), (14, 0), (17, 0), (100, 0)],
)
def test_a_window_reaches_back_to_the_block_of_its_first_token(
    reach: int, first_needed: int
) -> None:
    """Of 16 tokens the next one sees reach - 1, those from 17 - reach on."""
    pieces = GroupLayout([FULL, CacheGroup("window", 4, reach)])
    before = [[0, 1]] * first_needed + [[0, 0]] * (4 - first_needed)
    assert usable(pieces, before) == 4
    if first_needed < 4:
        before[first_needed] = [0, 1]
        assert usable(pieces, before) < 4


def test_one_group_of_full_attention_is_whole_and_nothing_else_is() -> None:
    assert GroupLayout([FULL]).whole
    others = [
        [WINDOW],
        [STATE],
        [FULL, FULL],
        [FULL, WINDOW],
        [FULL, STATE],
        [FULL, CacheGroup("full", 8)],
    ]
    assert not any(GroupLayout(groups).whole for groups in others)


def test_whole_blocks_are_usable_up_to_the_first_that_is_missing() -> None:
    pieces = GroupLayout([FULL])
    assert usable(pieces, [0, 0, 0]) == 3
    assert usable(pieces, [0, 0, 1, 0]) == 2
    assert usable(pieces, [1, 0]) == 0
    assert usable(pieces, [0, 0, 0], limit=2) == 2


def test_a_missing_window_or_state_in_the_middle_is_no_loss() -> None:
    window = GroupLayout([FULL, WINDOW])
    assert usable(window, [[0, 0], [0, 1], [0, 0], [0, 0]]) == 4
    assert usable(window, [[0, 0], [0, 0], [0, 1], [0, 0]]) == 2, (
        "blocks 2 and 3 would be needed for 4, 1 and 2 for 3"
    )
    state = GroupLayout([FULL, STATE])
    assert usable(state, [[0, 1], [0, 0], [0, 1], [0, 1]]) == 2
    assert usable(state, [[0, 1], [0, 1]]) == 0
    only = GroupLayout([WINDOW])
    assert usable(only, [1, 1, 0, 0]) == 4
    assert usable(only, [1, 1, 0, 1]) == 0


def test_what_the_engine_has_itself_need_not_be_at_the_server() -> None:
    pieces = GroupLayout([FULL, WINDOW])
    absent = [[1, 1], [1, 1], [0, 0]]
    assert usable(pieces, absent, local=2) == 3
    assert usable(pieces, absent, local=1) == 1
    assert usable(pieces, absent[2:], skip=2, local=2) == 3
    assert usable(pieces, absent, local=3) == 3 and usable(pieces, absent, local=5) == 5


@pytest.mark.parametrize(
    ("skip", "local", "limit"), [(0, 0, 5), (2, 2, 5), (2, 4, 3), (0, 3, 0), (3, 3, 1)]
)
def test_an_empty_answer_is_no_hit(skip: int, local: int, limit: int) -> None:
    assert usable(GroupLayout([FULL, WINDOW]), [], skip, local, limit) == local


def test_what_one_rank_lacks_all_lack() -> None:
    pieces = GroupLayout([FULL, STATE])
    sums = np.full((2, 4), 7, dtype=np.uint64)  # rank 0: shards 0 and 1, rank 1: shards 2 and 3
    assert pieces.usable(sums, 0, 0, 9) == 2
    for shard, hit_blocks in ((0, 1), (1, 1), (2, 1), (3, 1)):
        damaged = sums.copy()
        damaged[1, shard] = ABSENT
        assert pieces.usable(damaged, 0, 0, 9) == hit_blocks
    damaged = sums.copy()
    damaged[0, 3] = ABSENT
    assert pieces.usable(damaged, 0, 0, 9) == 2, "the state of an earlier block"
    damaged[0, 3], damaged[0, 2] = 7, ABSENT
    assert pieces.usable(damaged, 0, 0, 9) == 0


def test_blocks_without_a_checksum_are_there() -> None:
    assert GroupLayout([FULL]).usable(np.zeros((3, 1), dtype=np.uint64), 0, 0, 9) == 3


# -- tables


def test_groups_of_different_sizes_meet_in_blocks_of_their_common_multiple() -> None:
    pieces = GroupLayout(
        [CacheGroup("full", 4), CacheGroup("window", 6, 9), CacheGroup("state", 12)]
    )
    assert pieces.block_tokens == 12
    assert len(pieces) == 3 + 2 + 1
    assert [pieces.group_of(piece) for piece in range(6)] == [0, 0, 0, 1, 1, 2]
    assert [pieces.may_lack(piece) for piece in range(6)] == [False, False, False, True, True, True]


def test_rows_are_the_engine_blocks_of_each_piece() -> None:
    pieces = GroupLayout([CacheGroup("full", 4), CacheGroup("window", 2, 9)])
    tables = [[11, 12, 13, 14], [21, 22, 23, 24, 25, 26, 27]]
    assert pieces.rows(tables, 0, 4, NULL).tolist() == [
        [11, 12, 13, 14],
        [21, 23, 25, 27],
        [22, 24, 26, NO_BLOCK],
    ]
    assert pieces.rows(tables, 1, 3, NULL).tolist() == [[12, 13], [23, 25], [24, 26]]
    assert pieces.rows(tables, 2, 2, NULL).shape == (3, 0)
    assert (pieces.rows(tables, 4, 6, NULL) == NO_BLOCK).all(), "tables that end before"


def test_null_blocks_are_none_wherever_they_stand() -> None:
    pieces = GroupLayout([FULL, WINDOW])
    tables = [[11, 12, 13], [NULL, NULL, 23]]
    assert pieces.rows(tables, 0, 3, NULL).tolist() == [[11, 12, 13], [NO_BLOCK, NO_BLOCK, 23]]
    assert pieces.rows([[0, 1, 2], [3, 9, 9]], 0, 3, 9).tolist() == [
        [0, 1, 2],
        [3, NO_BLOCK, NO_BLOCK],
    ]


@given(st.data())
def test_rows_hold_every_engine_block_once_where_it_belongs(data: st.DataObject) -> None:
    groups = data.draw(st.lists(KINDS, min_size=1, max_size=3))
    pieces = GroupLayout(groups)
    blocks, start = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 3))
    tables = []
    for number, group in enumerate(groups):
        most = (start + blocks) * pieces.block_tokens // group.block_tokens
        there = data.draw(st.integers(0, most))
        tables.append(
            [data.draw(st.sampled_from([NULL, 1000 * (number + 1) + at])) for at in range(there)]
        )
    rows = pieces.rows(tables, start, start + blocks, NULL)
    assert rows.shape == (len(pieces), blocks)
    for piece, (group, first, _) in enumerate(spans(groups)):
        number = pieces.group_of(piece)
        assert groups[number] == group
        for at in range(blocks):
            place = ((start + at) * pieces.block_tokens + first) // group.block_tokens
            there = tables[number][place] if place < len(tables[number]) else NULL
            assert rows[piece, at] == (there if there != NULL else NO_BLOCK)


@given(st.data())
def test_states_stay_where_the_engine_stopped_and_nowhere_else(data: st.DataObject) -> None:
    groups = data.draw(st.lists(KINDS, min_size=1, max_size=3))
    pieces = GroupLayout(groups)
    blocks, start = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    states_at = data.draw(st.integers(0, (start + blocks + 1) * pieces.block_tokens))
    rows = np.arange(1, len(pieces) * blocks + 1).reshape(len(pieces), blocks)
    rows[data.draw(st.integers(0, len(pieces) - 1)), data.draw(st.integers(0, blocks - 1))] = (
        NO_BLOCK
    )
    kept = pieces.without_states(rows.copy(), states_at, start)
    for piece, (group, _, end) in enumerate(spans(groups)):
        for at in range(blocks):
            here = (start + at) * pieces.block_tokens + end == states_at
            assert kept[piece, at] == (
                rows[piece, at] if here or group.kind != "state" else NO_BLOCK
            )


@given(st.data())
def test_what_lies_in_the_engines_own_tokens_is_not_loaded(data: st.DataObject) -> None:
    groups = data.draw(st.lists(KINDS, min_size=1, max_size=3))
    pieces = GroupLayout(groups)
    blocks, start = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    tokens = data.draw(st.integers(0, (start + blocks + 1) * pieces.block_tokens))
    rows = np.arange(1, len(pieces) * blocks + 1).reshape(len(pieces), blocks)
    left = pieces.without_tokens(rows.copy(), tokens, start)
    for piece, (_, _, end) in enumerate(spans(groups)):
        for at in range(blocks):
            has = (start + at) * pieces.block_tokens + end <= tokens
            assert left[piece, at] == (NO_BLOCK if has else rows[piece, at])
