"""Checks by brute force what must hold between two operations. For tests and chaos runs."""

from __future__ import annotations

import numpy as np

from kvkeep.store.store import Store
from kvkeep.store.table import EVICTING, FREE, NO_ROW, READY, WAITING, WRITING
from kvkeep.store.tree import children


def check_integrity(store: Store, other: Store | None = None) -> None:
    """Raises AssertionError if the store contradicts itself: a bug of ours, never a user's. `other`
    counts its blocks in the same presence map."""
    _check_index(store, other)
    _check_tree(store)
    _check_usage_and_slots(store)
    _check_holdings(store)
    store.tenants.check_integrity()
    store.blocks.order.check_integrity()


def _check_index(store: Store, other: Store | None) -> None:
    table = store.blocks.table
    present = [
        each.blocks.table.keys.words[each.blocks.table.live_rows(), 0]
        for each in (store, other)
        if each is not None
    ]
    indexed = {}
    for tenant in store.tenants:
        for key, row in tenant.index.items():
            assert table.keys[row] == key and table.tenant[row] == tenant.number
            assert table.state[row] in (WRITING, WAITING, READY)
            indexed[row] = key
    assert store.blocks.presence.holds_exactly(np.concatenate(present)), "an engine would not ask"
    for row in table.live_rows().tolist():
        was_cleared = store.tenants.by_number[table.tenant[row]].cleared > 0
        assert (row in indexed) == (table.state[row] != EVICTING) or was_cleared, (
            f"row {row} is indexed wrongly"
        )
    for tenant in store.tenants:
        rows = [
            row
            for row in table.live_rows().tolist()
            if table.tenant[row] == tenant.number and row not in indexed
        ]
        nbytes = sum(store.layouts[table.layout[row]].slot_bytes for row in rows)
        assert tenant.unindexed_bytes == nbytes, f"{tenant.name}: bytes out of the index"


def _check_tree(store: Store) -> None:
    table, unswept = store.blocks.table, store.blocks.unswept
    assert all(table.state[row] == EVICTING for row in unswept)
    for row in table.live_rows().tolist():
        parent = table.parent[row]
        assert all(table.parent[child] == row for child in children(table, row)), (
            f"row {row}: another's child"
        )
        if parent == NO_ROW:
            continue
        assert table.state[parent] != FREE, f"row {row} outlived its parent"
        assert row in children(table, parent)
        assert (
            table.tenant[parent] == table.tenant[row] and table.layout[parent] == table.layout[row]
        )
        if parent in unswept or store.tenants.by_number[table.tenant[row]].cleared:
            continue  # on its way out, or of one that is
        if table.state[row] == READY:
            assert table.state[parent] == READY, "what is READY is closed under prefixes"
        if table.state[parent] == EVICTING:
            assert table.state[row] == EVICTING
        if table.state[row] == WAITING:
            assert table.state[parent] in (WRITING, WAITING)


def _check_usage_and_slots(store: Store) -> None:
    table, handed_out = store.blocks.table, {}
    usage: dict[int, tuple[int, int]] = {}
    per_layout: dict[int, int] = {}
    for row in table.live_rows().tolist():
        layout = store.layouts[table.layout[row]]
        assert table.slot[row] not in handed_out, "one slot, two blocks"
        handed_out[table.slot[row]] = layout.slot_bytes
        blocks, nbytes = usage.get(table.tenant[row], (0, 0))
        usage[table.tenant[row]] = (blocks + 1, nbytes + layout.slot_bytes)
        per_layout[layout.number] = per_layout.get(layout.number, 0) + 1
    for tenant in store.tenants:
        assert (tenant.blocks, tenant.usage_bytes) == usage.pop(tenant.number, (0, 0)), (
            f"{tenant.name}: usage"
        )
    assert not usage, "blocks of a tenant that is not there"
    for layout in store.layouts:
        assert layout.blocks == per_layout.get(layout.number, 0)
    store.slabs.check_integrity(handed_out)


def _check_holdings(store: Store) -> None:
    """Pins are exactly the leases and writes of sessions; exactly WRITING blocks are incomplete."""
    table = store.blocks.table
    pins: dict[int, int] = {}
    writers: dict[int, int] = {}
    ended = list(store.closing)
    for session in [*store.sessions.values(), *ended]:
        for row in session.leases.values():
            pins[row] = pins.get(row, 0) + 1
        for write in session.writes.values():
            for row in write.rows:
                pins[row] = pins.get(row, 0) + 1
                assert not writers.get(row, 0) & write.mask, "two writers of one shard"
                writers[row] = writers.get(row, 0) | write.mask
        is_open = not any(session is each for each in ended)
        assert not is_open or session.writing_blocks == sum(
            len(write.rows) for write in session.writes.values()
        )
    _check_held(store, pins)
    assert writers == store.writers
    for row in table.live_rows().tolist():
        assert table.pins[row] == pins.pop(row, 0), f"row {row}: pins"
        assert (row in store.blocks.shards_in) == (table.state[row] == WRITING)
        if table.state[row] == EVICTING and table.first_child[row] == NO_ROW:
            going = table.pins[row] or store.blocks.has_to_sweep
            assert going, "an evicting leaf that nobody holds should be gone"
    assert not pins, "a lease or write on a block that is gone"


def _check_held(store: Store, pins: dict[int, int]) -> None:
    """Blocks with leases or writes, and their ancestors, are counted as held."""
    table, held = store.blocks.table, dict[int, int]()
    of_tenant: dict[int, int] = {}
    of_layout: dict[int, int] = {}
    for row in table.live_rows().tolist():
        held[row] = pins.get(row, 0) + held.get(row, 0)
    rows = [row for row in held if held[row]]
    seen = set(rows)
    for row in rows:  # grows while it is walked
        of_tenant[table.tenant[row]] = (
            of_tenant.get(table.tenant[row], 0) + store.layouts[table.layout[row]].slot_bytes
        )
        of_layout[table.layout[row]] = of_layout.get(table.layout[row], 0) + 1
        parent = table.parent[row]
        if parent != NO_ROW:
            held[parent] += 1
            if parent not in seen:
                seen.add(parent)
                rows.append(parent)
    assert all(table.held[row] == count for row, count in held.items()), (
        "what is held is counted wrongly"
    )
    assert all(tenant.held_bytes == of_tenant.get(tenant.number, 0) for tenant in store.tenants)
    assert all(layout.held_blocks == of_layout.get(layout.number, 0) for layout in store.layouts)
