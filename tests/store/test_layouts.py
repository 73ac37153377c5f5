"""Layouts: where shards lie in a slot, one fingerprint one shape, and room for new ones."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from kvkeep.errors import RequestError
from kvkeep.store.layouts import Layout, Layouts
from kvkeep.store.table import PlainColumns


def test_shards_lie_on_cache_lines_and_slots_are_whole_blocks_of_4_kib() -> None:
    layout = Layout(1, b"f", (100, 64, 1))
    assert layout.shard_offsets == (0, 128, 192)
    assert (layout.shards, layout.slot_bytes) == (3, 4096)
    assert Layout(2, b"g", (4096, 1)).slot_bytes == 8192


def test_rows_of_checksums_are_reused_and_survive_growth() -> None:
    layout = Layout(1, b"f", (64, 64))
    rows = layout.take_checks(200)
    layout.checks[rows, 1] = rows.astype(np.uint64)
    layout.give_checks([int(rows[5])])
    more = layout.take_checks(300)
    assert int(rows[5]) in more.tolist() and len({*rows.tolist(), *more.tolist()}) == 499
    kept = [*range(5), *range(6, 200)]
    assert layout.checks[kept, 1].tolist() == kept and not layout.checks[more].any(), (
        "new ones say nothing"
    )


def test_checksums_grow_by_a_megabyte_at_a_time() -> None:
    asked: list[int] = []

    class Counted(PlainColumns):
        def grow(
            self, name: str, dtype: DTypeLike, width: int, rows: int, most_rows: int = 0
        ) -> NDArray[Any]:
            asked.append(rows * width * 8)
            return super().grow(name, dtype, width, rows, most_rows)

    layout = Layout(1, b"f", (64,) * 64, Counted())
    for _ in range(60):
        layout.take_checks(512)
    assert max(after - before for before, after in pairwise(asked)) <= 1 << 20


def test_one_fingerprint_is_one_layout() -> None:
    layouts = Layouts(4, 1 << 20)
    layout = layouts.open(1, b"f", (64,))
    assert layouts.open(2, b"f", (64,)) is layout and layout.sessions == {1, 2}
    with pytest.raises(
        RequestError, match=r"known with shards of \[64\] bytes, not \[65\]"
    ) as error:
        layouts.open(1, b"f", (65,))
    assert (error.value.code, error.value.field) == ("layout_conflict", "shard_bytes")


def test_a_block_that_fits_no_slab_is_refused_with_the_remedy() -> None:
    with pytest.raises(RequestError, match="8192 bytes does not fit a slab of 4096") as error:
        Layouts(4, 4096).open(1, b"f", (4097,))
    assert error.value.field == "shard_bytes" and "--slab-size" in error.value.hint


def test_an_unknown_number_is_refused_with_the_remedy() -> None:
    with pytest.raises(RequestError, match="number 9") as error:
        Layouts(4, 4096).get(9)
    assert error.value.field == "layout" and "OpenLayout" in error.value.hint


def test_at_the_limit_a_layout_that_nobody_needs_makes_way() -> None:
    layouts = Layouts(2, 1 << 20)
    first, second = layouts.open(1, b"a", (64,)), layouts.open(2, b"b", (64,))
    with pytest.raises(RequestError, match="2 layouts are in use") as error:
        layouts.open(1, b"c", (64,))
    assert error.value.field == "fingerprint" and "--max-layouts" in error.value.hint
    second.blocks = 1
    layouts.forget_session(2)
    assert layouts.open(1, b"c", (64,)).number == 3 and layouts.leaving == {second.number: 0}
    assert layouts.open(2, b"b", (64,)) is second and not layouts.leaving, "it is wanted again"
    layouts.forget_session(2)
    second.blocks = 0
    layouts.open(1, b"d", (64,))
    assert [layout.fingerprint for layout in layouts] == [b"a", b"c", b"d"] and first in list(
        layouts
    )


def test_the_order_of_a_tiers_blocks_is_inherited_unless_a_worker_has_declared_one() -> None:
    layouts = Layouts(4, 1 << 20)
    first, second = (layouts.open(1, name, (64, 64)) for name in (b"first", b"second"))
    layouts.agree(first, [0], b"rows first")
    layouts.agree(second, [1], b"columns first")
    layouts.inherit(second, first.physical | {1: bytes(16)})
    layouts.agree(second, [0], b"rows first")
    layouts.agree(second, [1], b"columns first")
    with pytest.raises(RequestError, match="orders the tensors of shard 0 differently"):
        layouts.agree(second, [0], b"columns first")
