"""The engine's KV blocks: who holds each, which are free, and which hold a prefix that somebody may
ask for again.

    held (refs > 0)       requests and loads under way; one block may have several holders
    free, with a key      still holds a prefix: given to a request that asks for it, evicted when
                          room is needed
    free, without         holds nothing
    block 0               never handed out: padding may point to it

Free blocks wait in a queue, and the first are taken first: those without a key, then those released
longest ago. A request's blocks are released from the last to the first, so the end of a prefix goes
before its beginning.

Stores hold nothing. A server that hangs must not keep blocks from those who need them: whoever is
given a block will write into it, and the workers are told so before (`take_given`)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from kvkeep.errors import SettingsError
from kvkeep.kv.keys import KeyChain

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1..num_blocks-1 and the prefix cache over them."""

    def __init__(self, num_blocks: int, *, prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise SettingsError(
                f"num_blocks is {num_blocks}", "block 0 is reserved: at least 2 are needed"
            )
        self._prefix_caching = prefix_caching
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._given: set[int] = set()

    @property
    def num_blocks(self) -> int:
        return len(self._refs)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_remembered(self) -> int:
        return len(self._block_of)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one holder each, evicting what they held. All or nothing."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        self.forget(taken)
        for block in taken:
            self._refs[block] = 1
        self._given.update(taken)
        return taken

    def take_given(self) -> set[int]:
        """The blocks that were handed out since this was last asked, kept or not: the next step may
        write into them."""
        given, self._given = self._given, set()
        return given

    def share(self, block_ids: Iterable[int]) -> None:
        """One more holder for each."""
        for block in block_ids:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One holder less for each. Give them in the order of the prefix: the last is evicted
        first."""
        for block in reversed(block_ids):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} was released more often than held"
            if self._refs[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def longest_prefix(self, chain: KeyChain, limit: int) -> list[int]:
        """The blocks that hold the beginning of this chain, `limit` at most. They are not held yet:
        share them."""
        found: list[int] = []
        for index in range(min(limit, len(chain)) if self._prefix_caching else 0):
            block = self._block_of.get(chain.key(index))
            if block is None:
                break
            found.append(block)
        return found

    def remember(self, block: int, key: bytes) -> None:
        """The block holds, or will hold after this step, the prefix that ends with `key`. If
        another one does already, that one stays the one that is found."""
        if self._prefix_caching and block not in self._key_of and key not in self._block_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def forget(self, block_ids: Iterable[int]) -> None:
        """What these blocks hold is no longer found."""
        for block in block_ids:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
                if block in self._free:
                    self._free.move_to_end(block, last=False)

    def forget_all(self) -> None:
        """Empties the prefix cache; holders are not disturbed."""
        self.forget(list(self._key_of))

    def start_over(self, held: Iterable[int]) -> None:
        """From now on only these are held, one entry for each hold, and nothing is found. What was
        given stays so."""
        self._block_of, self._key_of = {}, {}
        self._refs = [0] * self.num_blocks
        self._free = OrderedDict.fromkeys(range(1, self.num_blocks))
        self.share(held)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raises AssertionError unless the holders are exactly these, one entry for each hold."""
        expected = Counter(held)
        actual = {block: refs for block, refs in enumerate(self._refs) if refs}
        assert actual == dict(expected), (
            f"blocks are held by others than they should: {actual} instead of {expected}"
        )
        assert NULL_BLOCK not in expected and NULL_BLOCK not in self._key_of, "block 0 is reserved"
        assert set(self._free) == set(range(1, self.num_blocks)) - set(expected), (
            "the free queue is wrong"
        )
        assert self._block_of == {key: block for block, key in self._key_of.items()}, (
            "the prefix cache is inconsistent"
        )
