"""Which blocks are written to a tier."""

from __future__ import annotations

from hashlib import blake2b
from itertools import count
from random import Random

import numpy as np
import pytest

from kvkeep.tiers.admission import Admission

FULL = 0  # free blocks
DISK_BLOCKS = 1000


def keys(*names: object) -> bytes:
    return b"".join(blake2b(str(name).encode(), digest_size=16).digest() for name in names)


def request(admission: Admission, *names: object) -> None:
    """A request of which nothing is in memory: it looks up, computes and stores."""
    admission.looked_up(keys(*names), found=0)
    admission.stored(keys(*names))


def seen_a_scan(blocks: int = 2 * DISK_BLOCKS) -> Admission:
    """After so many blocks that no second request needs: first use does not pay."""
    admission = Admission(DISK_BLOCKS)
    for number in range(0, blocks, 10):
        request(admission, *(f"scan {number + each}" for each in range(10)))
    return admission


def test_every_block_is_wanted_while_the_disk_has_room() -> None:
    admission = seen_a_scan()
    assert admission.wanted(keys("a", "b"), free_blocks=2) == 2
    assert admission.wanted(keys("a", "b"), free_blocks=1) == 0


def test_every_block_is_wanted_until_something_speaks_against_it() -> None:
    assert Admission(DISK_BLOCKS).wanted(keys("a", "b"), FULL) == 2


def test_if_blocks_are_not_used_again_a_block_is_wanted_at_its_second_use() -> None:
    admission = seen_a_scan()
    request(admission, "a", "b")
    request(admission, "a", "c")
    assert admission.wanted(keys("a", "b"), FULL) == 1
    admission.looked_up(keys("a", "b"), found=2)
    assert admission.wanted(keys("a", "b"), FULL) == 2


def test_a_lookup_and_the_store_that_follows_are_one_use() -> None:
    admission = seen_a_scan()
    admission.looked_up(keys("a"), found=0)
    admission.stored(keys("a"))
    assert admission.wanted(keys("a"), FULL) == 0
    admission.stored(keys("a"))
    assert admission.wanted(keys("a"), FULL) == 1


def test_stores_without_a_lookup_are_uses() -> None:
    """Generated tokens are stored before any request looks them up."""
    admission = seen_a_scan()
    admission.stored(keys("a", "b"))
    assert admission.wanted(keys("a", "b"), FULL) == 0
    admission.stored(keys("a"))
    assert admission.wanted(keys("a", "b"), FULL) == 1


def test_a_block_that_was_found_is_awaited_by_no_store() -> None:
    admission = seen_a_scan()
    admission.looked_up(keys("a"), found=1)
    admission.stored(keys("a"))
    assert admission.wanted(keys("a"), FULL) == 1


def test_a_chain_is_used_as_often_as_its_end() -> None:
    """Even where the key of a block in the middle was forgotten."""
    admission = seen_a_scan()
    for _ in range(2):
        admission.stored(keys("b"))
    assert admission.wanted(keys("a", "b", "c"), FULL) == 2


def test_no_keys_are_no_use() -> None:
    admission = seen_a_scan()
    admission.looked_up(b"", found=0)
    admission.stored(b"")
    assert admission.wanted(b"", FULL) == 0


def batch(number: int) -> list[str]:
    """Ten blocks."""
    return [f"batch {number}, block {each}" for each in range(10)]


def test_first_use_pays_where_every_block_is_used_once_more() -> None:
    """Second use would write each block when its last use is over."""
    admission = seen_a_scan()
    for number in range(DISK_BLOCKS // 5):
        request(admission, *batch(number))
        if number >= 20:
            request(admission, *batch(number - 20))
    assert admission.wanted(keys("new"), FULL) == 1


def test_first_use_does_not_pay_for_hits_that_memory_has() -> None:
    admission = seen_a_scan()
    for number in range(DISK_BLOCKS // 5):
        request(admission, *batch(number))
        if number >= 20:
            admission.looked_up(keys(*batch(number - 20)), found=10)
    assert admission.wanted(keys("new"), FULL) == 0


def test_first_use_pays_for_hits_that_the_disk_has() -> None:
    """They are no hits of memory, although no store follows them."""
    admission = seen_a_scan()
    for number in range(DISK_BLOCKS // 5):
        request(admission, *batch(number))
        if number >= 20:
            admission.looked_up(keys(*batch(number - 20)), found=0, coming=10)
    assert admission.wanted(keys("new"), FULL) == 1


def test_a_disk_that_was_full_before_a_restart_is_full_for_the_trial() -> None:
    admission = Admission(DISK_BLOCKS)
    admission.recovered(np.frombuffer(keys(*range(DISK_BLOCKS)), np.uint64)[::2])
    assert "with 1000 and 1000 of 1000 blocks" in repr(admission)
    assert admission.wanted(keys("new"), FULL) == 1, "nothing speaks against it yet"
    for number in range(DISK_BLOCKS // 20):
        request(admission, *batch(number))
    assert admission.wanted(keys("new"), FULL) == 0
    request(admission, 5)
    assert admission.wanted(keys(5), FULL) == 1, "it was used before the restart, too"


@pytest.mark.parametrize("disk_blocks", [DISK_BLOCKS, 8000])
def test_the_rule_follows_the_traffic_on_disks_of_every_size(disk_blocks: int) -> None:
    """Large disks are judged by a sample of the keys."""
    admission, fresh, random = Admission(disk_blocks), count(), Random(1)
    for _ in range(disk_blocks // 20):
        request(admission, *(next(fresh) for _ in range(40)))
    assert admission.wanted(keys("new"), FULL) == 0, "after a scan"
    chats: list[list[object]] = []
    for _ in range(disk_blocks // 20):
        if random.random() < 0.3 or not chats:
            chats.append([])
        chat = random.choice(chats[-disk_blocks // 200 :])
        chat.extend(f"chat {next(fresh)}" for _ in range(20))
        request(admission, *chat)
    assert admission.wanted(keys("new"), FULL) == 1, "after conversations"


def test_memory_does_not_grow_with_the_keys() -> None:
    admission = Admission(100)
    for number in range(30):
        request(admission, *batch(number))
    assert repr(admission).endswith("hits, with 100 and 100 of 100 blocks)")


def test_another_size_of_the_disk_keeps_the_trial_or_starts_a_new_one() -> None:
    admission = seen_a_scan()
    admission.fit(2 * DISK_BLOCKS)
    assert "with 1000 and 1000 of 2000 blocks" in repr(admission)
    admission.fit(DISK_BLOCKS // 2)
    assert "with 500 and 500 of 500 blocks" in repr(admission)
    assert not admission.admits_first_use
    admission.fit(10 * DISK_BLOCKS)
    assert admission.admits_first_use and "with 0 and 0 of 4096" in repr(admission)


def test_chains_that_come_in_parts_are_judged_as_whole_ones() -> None:
    whole, parts, chance = Admission(DISK_BLOCKS), Admission(DISK_BLOCKS), Random(1)
    for _ in range(300):
        chain = [f"{chance.randrange(40)} {at}" for at in range(chance.randrange(1, 60))]
        found = chance.randrange(len(chain) + 1)
        is_store = chance.random() < 0.5
        whole.stored(keys(*chain)) if is_store else whole.looked_up(keys(*chain), found)
        is_known, stop = False, len(chain)
        while stop:
            start = max(0, stop - chance.randrange(1, 20))
            part, found_here = keys(*chain[start:stop]), max(0, found - start)
            is_known = (
                parts.stored(part, is_known)
                if is_store
                else parts.looked_up(part, found_here, is_known)
            )
            stop = start
        assert repr(parts) == repr(whole)
        assert parts.wanted(keys(*chain), FULL) == whole.wanted(keys(*chain), FULL)
