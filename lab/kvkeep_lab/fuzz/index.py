"""Fuzz target of warm restarts: an index that a server left, damaged anywhere, and the next server
that reads it."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.store.adopt import Adoption, adopt
from kvkeep.store.plans import Limits
from kvkeep.store.store import OLD_SESSIONS, Store
from kvkeep.store.table import READY, PlainColumns
from kvkeep.tiers.index_files import PREFIX, FileColumns, sizes_left, why_not_adopt, write_header
from kvkeep_lab.fuzz.choices import Choices, Leak, Ran, memory_directory
from kvkeep_lab.simulation.peer import chain
from kvkeep_lab.simulation.store_integrity import check_integrity

_SLAB_BYTES, _SLABS, _SEGMENT_BYTES = 4 * 4096, 6, 8 * 4096
_POOL_BYTES = _SLABS * _SLAB_BYTES
_LIMITS = Limits(sessions=3, layouts=4, tenants=8)
_TENANTS = ("default", "t-" + "1" * 32)
_DAMAGES = 8
_ROWS_IN_USE = 24  # damage beyond them is seldom of interest
_OLD = 1

Block = tuple[str, bytes, int, bytes]


class LeftColumns(PlainColumns):
    """Columns in memory that can be copied: each input damages a copy of its own."""

    def __init__(self, left: dict[str, NDArray[Any]] | None = None) -> None:
        super().__init__()
        self._columns = {name: column.copy() for name, column in (left or {}).items()}

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        return self._columns


@cache
def left_behind() -> tuple[dict[str, NDArray[Any]], frozenset[Block]]:
    """What a server has left that was killed: ready, leased, half-written and expiring blocks of
    two tenants and two layouts. And the blocks that were true."""
    columns = LeftColumns()
    store = Store(_POOL_BYTES, _SLAB_BYTES, _LIMITS, columns=columns)
    store.add_slabs(0, _SLABS)
    store.open_session(_OLD)
    layouts = [
        store.open_layout(_OLD, name, shards).number
        for name, shards in ((b"one", (64,)), (b"two", (64, 4096)))
    ]
    write = 0
    for tenant in _TENANTS:
        for layout in layouts:
            keys = chain(f"{tenant[:3]}{layout}", 3)
            for shard in range(store.layouts[layout].shards):
                write += 1
                plan = store.prepare_store(
                    _OLD, write, tenant, layout, shard, b"", keys, 10, 50, 100 * layout
                )
                checks = np.arange(1, len(plan.slots) + 1, dtype=np.uint64) * np.uint64(write)
                store.complete_store(_OLD, write, checks, 10)
            store.lookup(_OLD, 100 + write, tenant, layout, keys, 0, 11)
    store.prepare_store(_OLD, 99, _TENANTS[0], layouts[0], 0, b"", chain("half", 3), 12)
    return columns.columns, frozenset(blocks_of(store))


def blocks_of(store: Store) -> list[Block]:
    """Tenant, key, slot and checksums of all that a lookup could find."""
    table = store.blocks.table
    return [
        (
            tenant.name,
            key,
            table.slot[row],
            store.layouts[table.layout[row]].checks[table.check[row]].tobytes(),
        )
        for tenant in store.tenants
        for key, row in tenant.index.items()
        if table.state[row] == READY
    ]


def run_index(data: bytes) -> Ran:
    """Damages what was left, in memory or in files, and adopts it: whatever is adopted was true."""
    choices = Choices(data)
    columns, true_blocks = left_behind()
    left = LeftColumns(columns)
    in_files, old_sessions = choices.byte() >= 224, choices.byte() % 2 == 1
    for _ in range(min(_DAMAGES, choices.left)):
        _damage(choices, left.columns)
    if in_files:
        _adopt_files(choices, left.columns, true_blocks, old_sessions)
    else:
        store = Store(_POOL_BYTES, _SLAB_BYTES, _LIMITS, columns=left)
        check(store, adopt(store, _SLABS, old_sessions, 20), true_blocks)
    return Ran(1)


def check(store: Store, adoption: Adoption, true_blocks: frozenset[Block]) -> None:
    """Nothing but what was true, nothing lost between two chairs, and a store that serves on."""
    if adoption.contradiction:
        return
    check_integrity(store)
    assert set(blocks_of(store)) <= true_blocks, "a block was adopted that never was"
    store.open_session(7)
    layout = store.open_layout(7, b"another", (64,)).number
    store.prepare_store(7, 1, "default", layout, 0, b"", chain("new", 30), 1_000_000)
    store.close_session(7, 1_000_001)
    if OLD_SESSIONS in store.sessions:
        store.close_session(OLD_SESSIONS, 1_000_002)
    check_integrity(store)
    table = store.blocks.table
    if store.writers or any(table.pins[row] for row in table.live_rows().tolist()):
        raise Leak("rows are held for processes that are gone")


def _damage(choices: Choices, columns: dict[str, NDArray[Any]]) -> None:
    """Changes, swaps, fills or cuts one column."""
    name = choices.pick(sorted(columns))
    column = columns[name]
    if not len(column):
        return
    flat = column.view(np.uint8).reshape(-1)
    row_bytes = flat.nbytes // len(column)
    at = choices.below(min(len(column), _ROWS_IN_USE)) * row_bytes
    at += choices.below(row_bytes)
    match choices.below(5):
        case 0:
            flat[at] ^= np.uint8(1 << choices.below(8))
        case 1:
            new = np.frombuffer(choices.take(8), np.uint8)
            flat[at : at + len(new)] = new[: len(flat) - at]
        case 2:
            flat[at : at + choices.below(4096)] = choices.pick((0, 255, 1, 127))
        case 3:
            rows = min(len(column), _ROWS_IN_USE)
            one, other = choices.below(rows), choices.below(rows)
            column[[one, other]] = column[[other, one]]
        case _:
            columns[name] = column[: choices.below(len(column))].copy()


def _adopt_files(
    choices: Choices,
    columns: dict[str, NDArray[Any]],
    true_blocks: frozenset[Block],
    old_sessions: bool,
) -> None:
    """The same from files, whose header and lengths may be wrong too."""
    with memory_directory() as name:
        directory = Path(name)
        write_header(directory, _POOL_BYTES, _SLAB_BYTES, _SEGMENT_BYTES)
        for column, values in columns.items():
            (directory / (PREFIX + column)).write_bytes(values.tobytes())
        path = directory / (PREFIX + choices.pick(["header", *sorted(columns)]))
        content = bytearray(path.read_bytes())
        if content:
            content[choices.below(len(content))] ^= choices.byte()
        path.write_bytes(content[: len(content) - choices.pick((0, 1, 8, 40))])
        if choices.seldom():
            os.unlink(path)
        sizes_left(directory)
        if why_not_adopt(directory, _POOL_BYTES, _SLAB_BYTES, _SEGMENT_BYTES):
            return
        store = Store(_POOL_BYTES, _SLAB_BYTES, _LIMITS, columns=FileColumns(directory))
        check(store, adopt(store, _SLABS, old_sessions, 20), true_blocks)
