"""The block pool: holders of blocks, free blocks, the order of eviction, prefixes that are found."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvkeep.engine.blocks import NULL_BLOCK, BlockPool
from kvkeep.errors import SettingsError
from kvkeep.kv.keys import KeyChain

ROOT = b"r" * 16


def chain_of(*tokens: int) -> KeyChain:
    """Blocks of one token each."""
    chain = KeyChain(ROOT, 1)
    chain.extend(list(tokens))
    return chain


def remembered(pool: BlockPool, chain: KeyChain) -> list[int]:
    """Takes blocks for the whole chain and remembers them; they are held."""
    blocks = pool.take(len(chain))
    assert blocks is not None
    for at, block in enumerate(blocks):
        pool.remember(block, chain.key(at))
    return blocks


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert pool.num_blocks == 5 and pool.num_free == 4
    taken = pool.take(4)
    assert taken is not None and sorted(taken) == [1, 2, 3, 4] and NULL_BLOCK not in taken
    pool.check_integrity(taken)


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_pool_has_at_least_two_blocks(num_blocks: int) -> None:
    with pytest.raises(SettingsError, match="num_blocks"):
        BlockPool(num_blocks)


def test_take_is_all_or_nothing() -> None:
    pool = BlockPool(5)
    blocks = remembered(pool, chain_of(1, 2, 3))
    pool.release(blocks)
    assert pool.take(5) is None
    assert pool.num_free == 4 and pool.num_remembered == 3
    assert pool.longest_prefix(chain_of(1, 2, 3), 9) == blocks
    assert pool.take(0) == []
    pool.check_integrity([])


def test_a_shared_block_is_free_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(4)
    (block,) = blocks = pool.take(1) or []
    pool.share(blocks)
    pool.check_integrity([block, block])
    pool.release(blocks)
    assert pool.num_free == 2
    pool.check_integrity([block])
    pool.release(blocks)
    assert pool.num_free == 3
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


def test_sharing_a_free_block_takes_it_out_of_the_queue() -> None:
    pool = BlockPool(4)
    blocks = remembered(pool, chain_of(1, 2))
    pool.release(blocks)
    pool.share(pool.longest_prefix(chain_of(1, 2), 9))
    assert pool.num_free == 1
    assert pool.take(2) is None
    pool.check_integrity(blocks)


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(5)
    chain = chain_of(1, 2, 3, 4)
    blocks = remembered(pool, chain)
    pool.release(blocks)
    for left in (3, 2, 1, 0):
        pool.take(1)
        assert pool.longest_prefix(chain, 9) == blocks[:left]


def test_what_was_released_longest_ago_goes_first() -> None:
    pool = BlockPool(5)
    old, new = remembered(pool, chain_of(1, 2)), remembered(pool, chain_of(7, 8))
    pool.release(old)
    pool.release(new)
    assert pool.take(4) == [*reversed(old), *reversed(new)]


def test_blocks_without_a_key_go_first() -> None:
    pool = BlockPool(6)
    keyed = remembered(pool, chain_of(1, 2))
    plain = pool.take(2) or []
    pool.release(keyed)
    pool.release(plain)
    assert set(pool.take(3) or []) == {*plain, 5}
    assert pool.longest_prefix(chain_of(1, 2), 9) == keyed


def test_a_forgotten_free_block_goes_first() -> None:
    pool = BlockPool(4)
    blocks = remembered(pool, chain_of(1, 2, 3))
    pool.release(blocks)
    pool.forget([blocks[0]])
    assert pool.take(1) == [blocks[0]]


def test_the_longest_prefix_ends_at_the_first_gap_and_the_limit() -> None:
    pool = BlockPool(8)
    blocks = remembered(pool, chain_of(1, 2, 3, 4))
    assert pool.longest_prefix(chain_of(1, 2, 9, 4), 9) == blocks[:2]
    assert pool.longest_prefix(chain_of(1, 2, 3, 4), 3) == blocks[:3]
    assert pool.longest_prefix(chain_of(1, 2, 3, 4), 0) == []
    pool.forget([blocks[1]])
    assert pool.longest_prefix(chain_of(1, 2, 3, 4), 9) == blocks[:1]


def test_of_duplicates_the_first_is_found() -> None:
    pool = BlockPool(8)
    first = remembered(pool, chain_of(1, 2))
    second = remembered(pool, chain_of(1, 2))
    assert pool.longest_prefix(chain_of(1, 2), 9) == first and pool.num_remembered == 2
    pool.forget(second)
    assert pool.longest_prefix(chain_of(1, 2), 9) == first
    pool.forget(first)
    pool.remember(second[0], chain_of(1).key(0))
    assert pool.longest_prefix(chain_of(1, 2), 9) == second[:1]


def test_a_block_keeps_its_first_key() -> None:
    pool = BlockPool(4)
    (block,) = remembered(pool, chain_of(1))
    pool.remember(block, chain_of(2).key(0))
    assert pool.longest_prefix(chain_of(1), 1) == [block]
    assert pool.longest_prefix(chain_of(2), 1) == []


def test_taking_a_block_evicts_what_it_held() -> None:
    pool = BlockPool(3)
    pool.release(remembered(pool, chain_of(1, 2)))
    taken = pool.take(2) or []
    assert pool.num_remembered == 0
    pool.release(taken)
    assert pool.longest_prefix(chain_of(1, 2), 9) == []


def test_forget_all_does_not_disturb_holders() -> None:
    pool = BlockPool(4)
    blocks = remembered(pool, chain_of(1, 2))
    pool.forget_all()
    assert pool.num_remembered == 0
    pool.check_integrity(blocks)


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(4, prefix_caching=False)
    remembered(pool, chain_of(1, 2))
    assert pool.num_remembered == 0 and pool.longest_prefix(chain_of(1, 2), 9) == []


def test_the_integrity_check_can_fail() -> None:
    pool = BlockPool(5)
    blocks = remembered(pool, chain_of(1, 2))
    pool.check_integrity(blocks)
    for holders in (blocks[:1], [*blocks, blocks[0]], [*blocks, NULL_BLOCK]):
        with pytest.raises(AssertionError, match="held by others"):
            pool.check_integrity(holders)
    pool.remember(NULL_BLOCK, b"")
    with pytest.raises(AssertionError, match="block 0 is reserved"):
        pool.check_integrity(blocks)


@pytest.mark.parametrize("seed", range(5))
def test_random_use_keeps_the_books(seed: int) -> None:
    draw = random.Random(seed)
    pool, held = BlockPool(9), Counter[int]()
    chains = [chain_of(*(draw.randrange(3) for _ in range(4))) for _ in range(4)]
    for _ in range(400):
        chain = draw.choice(chains)
        match draw.randrange(5):
            case 0:
                count, free = draw.randrange(4), pool.num_free
                taken = pool.take(count)
                assert (taken is None) == (count > free)
                held.update(taken or [])
                for at, block in enumerate(taken or []):
                    pool.remember(block, chain.key(at))
            case 1:
                found = pool.longest_prefix(chain, 4)
                pool.share(found)
                held.update(found)
            case 2 | 3 if held:
                block = draw.choice(list(held.elements()))
                pool.release([block])
                held -= Counter([block])
            case 4:
                pool.forget([draw.randrange(1, 9)])
        pool.check_integrity(held.elements())
