"""Decides which blocks are worth writing to a tier.

Most blocks are never asked for again, and a block that is written to a full disk evicts another. So
there are two rules for a block that the disk does not have:

    first use    write it at once: the next request that needs it finds it
    second use   write it when a second request needs it: few writes, and what is on disk was needed
                 twice; but the second request itself finds nothing

Which is better depends on the traffic and on the size of the disk, and changes. `Admission` tries
both all the time on two miniatures of the disk (`Trial`), and follows the one that did better.
While the disk has free room, it writes every block.

A use is a request that needs the block. The lookup of a request and the store that follows it are
one use. A store without a lookup, as of generated tokens, is a use too.
docs/decisions/0030-admission-by-trial.md has the figures."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.keys import KEY_BYTES

# A write has to bring as many hits: flash wears out, and writing takes the disk's time from reads.
HITS_PER_WRITE = 0.08
_TRIAL_BLOCKS = 4096  # in a miniature, at most
_REMEMBERED_PER_BLOCK = 8  # keys that are remembered for each block of the disk
_LEAST_REMEMBERED = 1 << 19
_MOST_REMEMBERED = 1 << 22  # 32 MiB
_RECOVERED_A_STEP = 1 << 14  # few of which displace each other

# The two lowest bits of an entry in KeyUses; the others are those of the key's first word.
_USED_AGAIN = np.uint64(1)
_AWAITED = np.uint64(2)  # a lookup did not find the block: the store that follows is the same use
_STATE = np.uint64(3)
_STATE_BITS = np.uint64(2)


class Admission:
    """One for each tier, with room for `disk_blocks`. Reads no clock. Its memory and its time for a
    key do not depend on what the tier holds."""

    def __init__(self, disk_blocks: int) -> None:
        self._uses = KeyUses(disk_blocks * _REMEMBERED_PER_BLOCK)
        self._trial = Trial(disk_blocks)

    def __repr__(self) -> str:
        return f"Admission({self._trial})"

    @property
    def admits_first_use(self) -> bool:
        """Whether a block is now worth writing to a full disk at its first use."""
        return self._trial.first_use_pays

    def fit(self, disk_blocks: int) -> None:
        """Notes how many blocks the disk holds when it is full, if that has changed or was a guess:
        it depends on the size of the blocks."""
        if not self._trial.fit(disk_blocks):
            self._trial = Trial(disk_blocks)

    def recovered(self, words: NDArray[np.uint64]) -> None:
        """Notes that the disk had blocks with these first words of their keys when the server
        started, least recently used first. Without it, a full disk would look empty to the trial,
        which would fill it once more."""
        for at in range(0, len(words), _RECOVERED_A_STEP):
            some = words[at : at + _RECOVERED_A_STEP]
            self._uses.put(some, np.zeros(len(some), np.uint64))
        self._trial.fill(words)

    def looked_up(
        self, keys: bytes, found: int, known_below: bool = False, *, coming: int = 0
    ) -> bool:
        """Notes that a request needs these blocks, of which the first `found` are in memory, and
        the next `coming` on their way there from a tier: hits of the tier, which are not stored
        again. Not for a lookup that repeats an earlier one of the same request.

        A long chain may come in parts, its end first: returns whether a block of it is known, which
        the part above gets as `known_below`."""
        words = _words(keys)
        _, is_known = self._uses.get(words)
        known = len(words) if known_below else _leading(is_known)
        states = np.zeros(len(words), np.uint64)
        states[:known] = _USED_AGAIN
        states[found + coming :] |= _AWAITED
        self._uses.put(words, states)
        self._trial.use(words, known, found)
        return known > 0

    def stored(self, keys: bytes, known_below: bool = False) -> bool:
        """Notes that an engine has stored these blocks in memory: once, when they are READY. In
        parts as `looked_up`."""
        words = _words(keys)
        states, is_known = self._uses.get(words)
        is_use = states & _AWAITED == 0
        self._uses.put(words, states & _USED_AGAIN | is_use & is_known)
        used = words[is_use]
        known = len(used) if known_below else _leading(is_known[is_use])
        self._trial.use(used, known, found=0)
        return known_below or known > 0

    def wanted(self, keys: bytes, free_blocks: int) -> int:
        """How many leading blocks are worth having on a disk with that many free blocks."""
        blocks = len(keys) // KEY_BYTES
        if blocks <= free_blocks or self.admits_first_use:
            return blocks
        states, _ = self._uses.get(_words(keys))
        return _leading(states & _USED_AGAIN != 0)


class KeyUses:
    """Which keys were used once, and which more often: a table of a fixed size.

    Each key has a pair of entries for its own and another key, the one put last in front. A new key
    takes the front, and the key in the back is forgotten."""

    def __init__(self, keys: int) -> None:
        pairs = 1 << (min(max(keys, _LEAST_REMEMBERED), _MOST_REMEMBERED) - 1).bit_length() - 1
        self._front = np.zeros(pairs, np.uint64)
        self._back = np.zeros(pairs, np.uint64)
        self._mask = np.uint64(pairs - 1)

    def get(self, words: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """The state of each key, 0 if it is unknown, and whether it is known."""
        at, tags = self._at(words), words & ~_STATE
        states = np.minimum(self._front[at] ^ tags, self._back[at] ^ tags)
        is_known = states <= _STATE
        states[~is_known] = 0
        return states, is_known

    def put(self, words: NDArray[np.uint64], states: NDArray[np.uint64]) -> None:
        """Sets the state of each key."""
        at = self._at(words)
        front = self._front[at]
        is_other = front ^ words > _STATE
        self._back[at[is_other]] = front[is_other]
        self._front[at] = words & ~_STATE | states

    def _at(self, words: NDArray[np.uint64]) -> NDArray[np.int64]:
        return (words >> _STATE_BITS & self._mask).view(np.int64)


class Trial:
    """Compares both rules on miniatures of the disk, each with its own simulated blocks.

    A sample of the keys is enough: if one key in ten is looked at, a tenth of the disk's size gives
    the same share of hits. The score is the lead of the first-use rule: its hits less those of the
    second-use rule, less HITS_PER_WRITE for each write more. What lies back as many uses as the
    disk has blocks counts half. Hits in memory count for neither."""

    def __init__(self, disk_blocks: int) -> None:
        self._disk_blocks = max(disk_blocks, 1)
        self._share = min(1.0, _TRIAL_BLOCKS / self._disk_blocks)
        self._sampled_below = np.uint64(min(int(self._share * 2**64), 2**64 - 1))
        self._most_blocks = max(1, int(self._disk_blocks * self._share))
        self._first_use: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._second_use: OrderedDict[int, None] = OrderedDict()
        self._kept_per_use = 0.5 ** (1 / self._most_blocks)
        # Writes come before the hits that they bring. So the rule that writes more starts with an
        # advance: without it, it would look bad until the first of its blocks are used again.
        self._score = HITS_PER_WRITE * self._most_blocks / 2

    def __repr__(self) -> str:
        sizes = f"{len(self._first_use)} and {len(self._second_use)} of {self._most_blocks} blocks"
        return f"first use leads by {self._score:.1f} hits, with {sizes}"

    @property
    def first_use_pays(self) -> bool:
        return self._score >= 0

    def fit(self, disk_blocks: int) -> bool:
        """Goes on with another size of the disk. False if it is too different from the first."""
        if not self._disk_blocks <= 2 * disk_blocks <= 4 * self._disk_blocks:
            return False
        self._most_blocks = max(1, int(disk_blocks * self._share))
        self._shrink(self._first_use)
        self._shrink(self._second_use)
        return True

    def fill(self, words: NDArray[np.uint64]) -> None:
        """Puts blocks into both miniatures, least recently used first. Neither has written them."""
        for word in words[words < self._sampled_below].tolist():
            self._touch(self._first_use, word)
            self._touch(self._second_use, word)

    def use(self, words: NDArray[np.uint64], known: int, found: int) -> None:
        """Tries a request for these keys on both miniatures. The first `known` were used before,
        and the first `found` are in memory."""
        sampled = np.flatnonzero(words < self._sampled_below)[::-1]  # the end of a chain goes first
        for position, word in zip(sampled.tolist(), words[sampled].tolist(), strict=True):
            self._use_one(word, is_known=position < known, in_memory=position < found)

    def _use_one(self, word: int, is_known: bool, in_memory: bool) -> None:
        first, second = self._first_use, self._second_use
        in_first, in_second = word in first, word in second
        lead = 0.0 if in_memory else float(in_first - in_second)
        if not in_first:
            lead -= HITS_PER_WRITE
        self._touch(first, word)
        if in_second:
            second.move_to_end(word)
        elif is_known or len(second) < self._most_blocks:
            lead += HITS_PER_WRITE
            self._touch(second, word)
        self._score = self._score * self._kept_per_use + lead

    def _touch(self, blocks: OrderedDict[int, None], word: int) -> None:
        blocks[word] = None
        blocks.move_to_end(word)
        self._shrink(blocks)

    def _shrink(self, blocks: OrderedDict[int, None]) -> None:
        while len(blocks) > self._most_blocks:
            blocks.popitem(last=False)


def _words(keys: bytes) -> NDArray[np.uint64]:
    """The first word of each key; keys are hashes, so it tells them apart."""
    return np.frombuffer(keys, np.uint64)[:: KEY_BYTES // 8]


def _leading(is_so: NDArray[np.bool_]) -> int:
    """How many leading blocks something is true of. What is true of a block is true of all before
    it in its chain, even where the table has forgotten that."""
    return int(np.flatnonzero(is_so)[-1]) + 1 if is_so.any() else 0
