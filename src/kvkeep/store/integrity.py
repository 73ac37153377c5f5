"""Everything that must hold between two operations, checked by brute force. For tests, chaos runs and idle moments."""

from __future__ import annotations

from kvkeep.store.store import Store
from kvkeep.store.table import EVICTING, FREE, NO_ROW, READY, WAITING, WRITING
from kvkeep.store.tree import children


def check_integrity(store: Store) -> None:
    """Raises AssertionError if the store contradicts itself. A failure here is a bug of ours, never a user's."""
    _check_index(store)
    _check_tree(store)
    _check_usage_and_slots(store)
    _check_holdings(store)
    store.tenants.check_integrity()
    store.blocks.order.check_integrity()


def _check_index(store: Store) -> None:
    table = store.blocks.table
    indexed = {}
    for tenant in store.tenants:
        for key, row in tenant.index.items():
            assert table.keys[row] == key and table.tenant[row] == tenant.number
            assert table.state[row] in (WRITING, WAITING, READY)
            indexed[row] = key
    assert store.blocks.presence.holds_exactly(table.keys.words[table.live_rows(), 0]), "an engine would not ask"
    for row in table.live_rows().tolist():
        assert (row in indexed) == (table.state[row] != EVICTING), f"row {row} is indexed wrongly"


def _check_tree(store: Store) -> None:
    table = store.blocks.table
    for row in table.live_rows().tolist():
        parent = table.parent[row]
        assert all(table.parent[child] == row for child in children(table, row)), f"row {row}: another's child"
        if parent == NO_ROW:
            continue
        assert table.state[parent] != FREE, f"row {row} outlived its parent"
        assert row in children(table, parent)
        assert table.tenant[parent] == table.tenant[row] and table.layout[parent] == table.layout[row]
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
        assert (tenant.blocks, tenant.usage_bytes) == usage.pop(tenant.number, (0, 0)), f"{tenant.name}: usage"
    assert not usage, "blocks of a tenant that is not there"
    for layout in store.layouts:
        assert layout.blocks == per_layout.get(layout.number, 0)
    store.slabs.check_integrity(handed_out)


def _check_holdings(store: Store) -> None:
    """Pins are exactly the leases and writes that sessions hold; incomplete blocks are exactly the WRITING ones."""
    table = store.blocks.table
    pins: dict[int, int] = {}
    writers: dict[int, int] = {}
    for session in store.sessions.values():
        for row in session.leases.values():
            pins[row] = pins.get(row, 0) + 1
        for write in session.writes.values():
            for row in write.rows:
                pins[row] = pins.get(row, 0) + 1
                assert not writers.get(row, 0) >> write.shard & 1, "two writers of one shard"
                writers[row] = writers.get(row, 0) | 1 << write.shard
        assert session.writing_blocks == sum(len(write.rows) for write in session.writes.values())
    assert writers == store.writers
    for row in table.live_rows().tolist():
        assert table.pins[row] == pins.pop(row, 0), f"row {row}: pins"
        assert (row in store.blocks.shards_in) == (table.state[row] == WRITING)
        if table.state[row] == EVICTING and table.first_child[row] == NO_ROW:
            assert table.pins[row], "an evicting leaf that nobody holds should be gone"
    assert not pins, "a lease or write on a block that is gone"
