"""The index of a disk tier: what was written is found, also by the next index, and nothing else."""

from __future__ import annotations

import os

import numpy as np
import pytest
from disk_life import DATA, LOG, SHAPES, SLAB, SimulatedFile, store, verify
from disk_life import plan_store as plan

from kvkeep.kv.checksum import ABSENT
from kvkeep.kv.presence import Presence
from kvkeep.store import operators
from kvkeep.store.layouts import Layout
from kvkeep.tiers import disk_index
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_index import DiskIndex

SHAPE = SHAPES[0]


class Disk:
    """Files that outlive their index."""

    def __init__(self) -> None:
        self.data, self.logs = SimulatedFile(DATA), (SimulatedFile(LOG), SimulatedFile(LOG))
        self.presence = Presence()
        self.restart()

    def restart(self, now_ms: int = 0) -> None:
        self.files = DiskFiles(self.data, self.logs, SLAB)
        if self.files.is_new:
            self.files.begin()
        found = self.files.recovered()
        self.presence = Presence()
        self.index = DiskIndex(DATA, SLAB, self.presence, found, now_ms)

    def store(
        self, keys: bytes, parent: bytes = b"", tenant: str = "a", shape: Layout = SHAPE
    ) -> int:
        """How many blocks were written."""
        written = store(self.files, self.index, tenant, shape, parent, keys)
        return len(written.offsets) if written else 0

    def log(self) -> None:
        """Makes durable what has no write to go with."""
        if waiting := self.index.take_records():
            self.files.append(waiting.record)
            self.index.wrote(waiting.number, 0)

    def found(self, keys: bytes, tenant: str = "a", shape: Layout = SHAPE, skip: int = 0) -> int:
        """How many blocks are found; those that are read must be right."""
        hit = self.index.find(tenant, shape, keys, skip, 0)
        if hit is None:
            return 0
        assert all(verify(self.files, hit, tenant, shape, keys, skip))
        self.index.release(hit.number, 0)
        return hit.blocks


@pytest.fixture
def disk() -> Disk:
    return Disk()


def test_what_was_written_is_found_by_this_index_and_the_next(disk: Disk) -> None:
    keys = os.urandom(16 * 9)
    assert disk.store(keys[: 16 * 5]) == 5
    assert disk.store(keys[16 * 5 :], parent=keys[16 * 4 : 16 * 5]) == 4
    for _ in range(3):
        assert disk.found(keys) == 9 and disk.found(keys, skip=4) == 9
        assert disk.found(keys, tenant="b") == 0
        assert disk.found(keys + os.urandom(16)) == 9
        disk.restart()
    assert disk.index.adoption.blocks == 9


@pytest.mark.parametrize("shape", SHAPES)
def test_every_layout_survives(disk: Disk, shape: Layout) -> None:
    keys = os.urandom(16 * 3)
    assert disk.store(keys, shape=shape) == 3
    disk.restart()
    assert disk.found(keys, shape=shape) == 3
    assert disk.store(keys, shape=shape) == 0, "it is there"


def test_a_block_is_found_once_its_record_is_durable(disk: Disk) -> None:
    keys = os.urandom(16 * 2)
    written = plan(disk.index, "a", SHAPE, b"", keys)
    assert written is not None and disk.found(keys) == 0
    assert plan(disk.index, "a", SHAPE, b"", keys) is None, "it is being written"
    disk.index.failed(written.number, 0)
    assert disk.found(keys) == 0 and disk.store(keys) == 2 and disk.found(keys) == 2


def test_a_lease_keeps_its_slots(disk: Disk) -> None:
    keys = os.urandom(16 * 4)
    disk.store(keys)
    hit = disk.index.find("a", SHAPE, keys, 0, 0)
    assert hit is not None
    for _ in range(40):
        disk.store(os.urandom(16 * 8), tenant="b")
    assert all(verify(disk.files, hit, "a", SHAPE, keys)) and len(hit.offsets) == 4
    disk.index.release(hit.number, 0)
    for _ in range(40):
        disk.store(os.urandom(16 * 8), tenant="b")
    assert disk.found(keys) == 0, "now it was evicted"


def test_the_disk_is_used_in_full_and_no_further(disk: Disk) -> None:
    blocks = DATA // SHAPE.slot_bytes
    written = sum(disk.store(os.urandom(16 * 8)) for _ in range(2 * blocks // 8))
    assert written == 2 * blocks
    assert disk.index.store.tenants.largest(1)[0].usage_bytes == DATA
    disk.restart()
    assert disk.index.adoption.blocks == blocks


def test_the_order_of_use_survives(disk: Disk) -> None:
    used, unused = os.urandom(16), os.urandom(16)
    disk.store(used)
    disk.store(unused)
    for _ in range(DATA // SHAPE.slot_bytes - 2):
        disk.store(os.urandom(16), tenant="b")
    assert disk.found(used) == 1
    disk.log()
    disk.restart()
    disk.store(os.urandom(16), tenant="b")
    assert disk.found(used) == 1 and disk.found(unused) == 0


@pytest.mark.parametrize("everything", [True, False])
def test_what_was_cleared_stays_unreadable(disk: Disk, everything: bool) -> None:
    old, new = os.urandom(16 * 3), os.urandom(16 * 2)
    disk.store(old)
    disk.store(old, tenant="b")
    in_flight = plan(disk.index, "a", SHAPE, b"", new)
    assert in_flight is not None
    if everything:
        disk.index.note_clear_of_all()
        assert disk.index.take_out(disk.index.store.tenants.names()) == 8
    else:
        assert disk.index.clear("a") == 5
    disk.log()
    disk.files.append(in_flight.record)  # which was on its way
    disk.index.wrote(in_flight.number, 0)
    assert disk.found(old) == 0 == disk.found(new)
    for compacted in (False, True):
        if compacted:
            disk.files.compact()
        disk.restart()
        assert disk.found(old) == 0 == disk.found(new)
        assert disk.found(old, tenant="b") == (0 if everything else 3)
    assert disk.store(old) == 3
    disk.restart()
    assert disk.found(old) == 3, "what was stored after the clear"


def test_a_clear_outlasts_compaction_while_older_records_are_on_their_way(disk: Disk) -> None:
    keys = os.urandom(16 * 2)
    in_flight = plan(disk.index, "a", SHAPE, b"", keys)
    assert in_flight is not None
    disk.index.clear("a")
    disk.log()
    disk.files.compact()
    disk.files.compact()
    disk.files.append(in_flight.record)
    disk.restart()
    assert disk.found(keys) == 0
    disk.store(os.urandom(16))  # by which nothing older is on its way
    disk.files.compact()
    disk.restart()
    assert not disk.files.recovered().clears


def test_a_clear_that_failed_is_logged_with_the_next_record(disk: Disk) -> None:
    keys = os.urandom(16 * 2)
    disk.store(keys)
    disk.index.clear("a")
    waiting = disk.index.take_records()
    assert waiting is not None and disk.index.take_records() is None
    disk.index.failed(waiting.number, 0)
    disk.store(os.urandom(16), tenant="b")
    disk.restart()
    assert disk.found(keys) == 0


def test_a_tenant_that_the_index_does_not_know_can_be_cleared(disk: Disk) -> None:
    keys = os.urandom(16 * 2)
    disk.store(keys)
    disk.index.store.drop_blocks("a", [keys[:16]])
    while disk.index.store.tidy(0):
        pass
    assert disk.index.store.tenants.get("a") is None
    disk.index.clear("a")
    lost = disk.index.take_records()  # with the freed slots; the clear is logged again
    assert lost is not None
    disk.index.failed(lost.number, 0)
    disk.log()
    disk.restart()
    assert disk.found(keys) == 0


def test_a_limit_of_zero_keeps_a_tenant_off_the_disk(disk: Disk) -> None:
    operators.set_limit(disk.index.store, "a", 0, 0)
    assert disk.store(os.urandom(16 * 2)) == 0 and disk.store(os.urandom(32), tenant="b") == 2


def test_what_expired_is_not_recovered(disk: Disk) -> None:
    keys = os.urandom(16 * 2)
    written = plan(disk.index, "a", SHAPE, b"", keys, ttl_ms=1000)
    assert written is not None
    disk.files.append(written.record)
    disk.restart(now_ms=999)
    assert disk.index.adoption.blocks == 2
    disk.restart(now_ms=1000)
    assert disk.index.adoption.blocks == 0


def test_blocks_without_a_parent_on_the_disk_are_not_written(disk: Disk) -> None:
    assert disk.store(os.urandom(16), parent=os.urandom(16)) == 0


def test_a_chain_ends_before_its_first_incomplete_block(disk: Disk) -> None:
    keys, checks = os.urandom(16 * 3), np.full((3, 1), 7, np.uint64)
    checks[1] = ABSENT
    written = disk.index.plan_write("a", SHAPE, b"", keys, checks, 0)
    assert written is not None and written.positions.tolist() == [0]


def test_bytes_in_another_order_are_neither_found_nor_added_to(disk: Disk) -> None:
    keys = os.urandom(16 * 2)
    one, other = (Layout(1, SHAPE.fingerprint, SHAPE.shard_bytes) for _ in range(2))
    one.agree([0], b"heads first")
    other.agree([0], b"tokens first")
    disk.store(keys, shape=one)
    for _ in range(2):
        assert disk.found(keys, shape=one) == 2 and disk.found(keys, shape=other) == 0
        assert disk.store(os.urandom(16), shape=other) == 0
        assert disk.index.orders(SHAPE.fingerprint) == one.physical
        disk.restart()
    wider = Layout(1, SHAPE.fingerprint, (8000,))
    assert disk.found(keys, shape=wider) == 0 == disk.store(os.urandom(16), shape=wider)


def test_presence_counts_what_is_on_the_disk(disk: Disk) -> None:
    keys = os.urandom(16 * 2)
    disk.store(keys)
    assert not disk.presence.lacks(keys[:16])
    disk.restart()
    assert not disk.presence.lacks(keys[16:])
    disk.index.clear("a")
    while disk.index.store.tidy(0):
        pass
    assert disk.presence.lacks(keys[:16]) and disk.presence.lacks(keys[16:])


def test_a_bad_block_is_dropped_with_its_descendants(disk: Disk) -> None:
    keys = os.urandom(16 * 4)
    disk.store(keys)
    assert disk.index.drop([("a", keys[16:32])]) >= 1
    while disk.index.store.tidy(0):
        pass
    disk.log()
    assert disk.found(keys) == 1
    disk.restart()
    assert disk.found(keys) == 1


def test_known_counts_what_is_there_or_being_written(disk: Disk) -> None:
    keys = os.urandom(16 * 6)
    assert disk.index.known("a", keys) == 0
    disk.store(keys[: 16 * 3])
    assert disk.index.known("a", keys) == 3 == disk.index.known("a", keys[: 16 * 3])
    assert plan(disk.index, "a", SHAPE, keys[32:48], keys[48:80]) is not None
    assert disk.index.known("a", keys) == 5 and disk.index.known("b", keys) == 0


def test_known_counts_as_a_use(disk: Disk) -> None:
    used, unused = os.urandom(16), os.urandom(16)
    disk.store(used)
    disk.store(unused)
    for _ in range(DATA // SHAPE.slot_bytes - 2):
        disk.store(os.urandom(16), tenant="b")
    assert disk.index.known("a", used) == 1
    disk.store(os.urandom(16), tenant="b")
    assert disk.found(used) == 1 and disk.found(unused) == 0


def test_hints_are_those_that_the_blocks_were_stored_with(disk: Disk) -> None:
    keys = os.urandom(16 * 4)
    plan(disk.index, "a", SHAPE, b"", keys[:16], priority=70)
    plan(disk.index, "a", SHAPE, keys[:16], keys[16:32], priority=80, ttl_ms=500)
    plan(disk.index, "a", SHAPE, keys[16:32], keys[32:48], priority=90, ttl_ms=300)
    assert disk.index.hints("a", keys) == (90, 300)
    assert disk.index.hints("a", keys[:16]) == (70, 0)
    assert disk.index.hints("a", keys[48:]) == (50, 0) == disk.index.hints("b", keys)


def test_blocks_are_evicted_before_an_image_of_the_log_is_too_long(disk: Disk) -> None:
    found = disk.files.recovered()
    found.most_image_bytes = 12 * 80  # a row and its checksum
    disk.index = DiskIndex(DATA, SLAB, None, found)
    first, second = os.urandom(16 * 8), os.urandom(16 * 8)
    assert disk.index.free_blocks(SHAPE) == 12
    assert disk.store(first) == 8 and disk.index.free_blocks(SHAPE) == 4
    assert disk.store(second) == 8 and disk.index.free_blocks(SHAPE) == 0
    assert disk.found(second) == 8 and disk.found(first) == 4
    hits = [disk.index.find("a", SHAPE, keys, 0, 0) for keys in (first, second)]
    assert disk.store(os.urandom(16 * 8)) == 0, "nothing can be evicted"
    assert all(hits)


def test_only_slots_that_blocks_of_a_layout_fit_into_are_free_for_it(disk: Disk) -> None:
    slabs, large = DATA // SLAB, SHAPES[2]
    assert disk.index.free_blocks(large) == slabs * (SLAB // large.slot_bytes)
    disk.store(os.urandom(16))
    assert disk.index.free_blocks(SHAPE) == slabs * (SLAB // SHAPE.slot_bytes) - 1
    assert disk.index.free_blocks(large) == (slabs - 1) * (SLAB // large.slot_bytes)


def test_the_next_index_knows_in_which_order_blocks_were_used(disk: Disk) -> None:
    keys = [os.urandom(16) for _ in range(3)]
    for key in keys:
        disk.store(key)
    disk.found(keys[0])
    disk.log()
    disk.restart()
    words, slot_bytes = disk.index.words_by_use()
    assert words.tobytes() == keys[1][:8] + keys[2][:8] + keys[0][:8]
    assert slot_bytes == SHAPE.slot_bytes


def test_what_follows_a_record_that_is_none_is_kept(disk: Disk) -> None:
    before, after = os.urandom(32), os.urandom(32)
    disk.store(before)
    disk.files.append(b"no record")
    disk.restart()
    assert disk.found(before) == 2 and disk.store(after) == 2
    disk.restart()
    assert disk.found(before) == 2 == disk.found(after)


def test_freed_slots_are_logged_in_pieces_and_end_no_later_claim(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_index, "_FREED_A_RECORD", 3)
    old = os.urandom(16 * 10)
    disk.store(old, tenant="b")
    disk.index.clear("b")
    while disk.index.store.tidy(0):
        pass
    new = os.urandom(16 * 10)
    for at in range(0, len(new), 16):  # into slots whose end is not logged yet
        disk.store(new[at : at + 16], parent=new[at - 16 : at] if at else b"")
    sizes = []
    while waiting := disk.index.take_records():
        sizes.append(len(waiting.record))
        disk.files.append(waiting.record)
        disk.index.wrote(waiting.number, 0)
    disk.restart()
    assert disk.found(new) == 10 and disk.found(old, tenant="b") == 0
    assert all(size < 400 for size in sizes)


def test_many_bad_blocks_are_dropped_with_the_work_of_one_turn(disk: Disk) -> None:
    disk.index.store.blocks.a_turn = 4
    roots = [os.urandom(16) for _ in range(8)]
    for root in roots:
        disk.store(root)
        disk.store(os.urandom(16 * 6), parent=root)
    before = len(disk.index.store.blocks.table)
    disk.index.drop([("a", root) for root in roots])
    assert before - len(disk.index.store.blocks.table) <= 4
    assert all(disk.found(root) == 0 for root in roots)
    while disk.index.store.tidy(0):
        pass
    assert not len(disk.index.store.blocks.table)
