"""What a hit needs where an engine keeps layers of several kinds: decided here, from the kinds
alone.

    blocks of a prefix     |  0  |  1  |  2  |  3  |  4  |  5  |     a hit of six blocks needs
    full attention         |  ●  |  ●  |  ●  |  ●  |  ●  |  ●  |     all of them
    sliding window         |     |     |     |     |  ●  |  ●  |     those in the next token's window
    recurrent state        |     |     |     |     |     |  ●  |     the state at its end

Each kind is a cache group of the engine, with a table of block ids of its own, and a piece of every
block of ours. A group whose blocks hold fewer tokens than ours has several pieces, one for each of
its blocks in one of ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.requests import NO_BLOCK
from kvkeep.kv.checksum import ABSENT

Kind = Literal["full", "window", "state"]


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a table of blocks. `reach` is how many tokens back a window sees, the
    current one included."""

    kind: Kind
    block_tokens: int
    reach: int = 0


@dataclass(frozen=True)
class _Place:
    """A piece: which block of its group's table it is, within a block of ours."""

    group: int
    at: int
    start: int  # tokens of our block before it
    stop: int
    kind: Kind
    reach: int


class GroupLayout:
    """How blocks of `block_tokens` tokens are made of the blocks of several groups."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self.groups = tuple(groups)
        self.block_tokens = math.lcm(*(group.block_tokens for group in groups))
        self._places = [
            _Place(
                number,
                at,
                at * group.block_tokens,
                (at + 1) * group.block_tokens,
                group.kind,
                group.reach,
            )
            for number, group in enumerate(groups)
            for at in range(self.block_tokens // group.block_tokens)
        ]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def whole(self) -> bool:
        """Whether a hit of any length is a hit of every shorter length too: one group, of full
        attention. Then a hit may also cover the prompt to its last token; an engine computes that
        token again."""
        return len(self._places) == 1 and self._places[0].kind == "full"

    def may_lack(self, piece: int) -> bool:
        """Whether a request can use a block that lacks this piece: one inside its window, say."""
        return self._places[piece].kind != "full"

    def group_of(self, piece: int) -> int:
        return self._places[piece].group

    def rows(
        self, tables: Sequence[Sequence[int]], start: int, stop: int, null_block: int
    ) -> NDArray[np.int64]:
        """The engine blocks that hold blocks start..stop-1 of ours, a row for each piece; NO_BLOCK
        where the engine has none, which it shows by `null_block` or by a table that ends before."""
        rows = np.full((len(self), stop - start), NO_BLOCK, dtype=np.int64)
        for row, place in zip(rows, self._places, strict=True):
            each = self.block_tokens // self.groups[place.group].block_tokens
            ids = tables[place.group][start * each + place.at : stop * each : each]
            row[: len(ids)] = ids
        rows[rows == null_block] = NO_BLOCK
        return rows

    def without_states(
        self, rows: NDArray[np.int64], states_at: int, start: int
    ) -> NDArray[np.int64]:
        """The same rows with recurrent states at the end of the first `states_at` tokens only: an
        engine goes on writing into a state's block until it comes to the block's end, and passes
        ends without leaving a state."""
        for row, place in zip(rows, self._places, strict=True):
            if place.kind == "state":
                at, rest = divmod(states_at - place.stop, self.block_tokens)
                kept = row[at - start] if rest == 0 and 0 <= at - start < len(row) else NO_BLOCK
                row[:] = NO_BLOCK
                if kept != NO_BLOCK:
                    row[at - start] = kept
        return rows

    def without_tokens(self, rows: NDArray[np.int64], tokens: int, start: int) -> NDArray[np.int64]:
        """The same rows without what lies in the first `tokens` tokens: the engine has it."""
        for row, place in zip(rows, self._places, strict=True):
            row[: max(0, -(-(tokens - place.stop + 1) // self.block_tokens) - start)] = NO_BLOCK
        return rows

    def usable(self, checksums: NDArray[np.uint64], skip: int, local: int, limit: int) -> int:
        """How many leading blocks can be used, at most `limit`: row i of `checksums` [blocks,
        shards] is what the server has of block skip + i, and the engine has the first `local` ones
        itself. `local` if nothing beyond."""
        blocks = min(skip + len(checksums), limit)
        if blocks <= local:
            return local
        absent = checksums[: blocks - skip] == ABSENT
        if not absent.any():
            return blocks
        lacking = np.zeros((len(self), blocks), dtype=np.bool_)
        lacking[:, skip:] = absent.reshape(blocks - skip, -1, len(self)).any(axis=1).T
        lacking[:, :local] = False
        lengths = np.arange(local + 1, blocks + 1)
        good = np.ones(len(lengths), dtype=np.bool_)
        for row, place in zip(lacking, self._places, strict=True):
            lacking_before = np.concatenate(([0], np.cumsum(row)))
            good &= lacking_before[lengths] == lacking_before[self._first_needed(place, lengths)]
        return int(lengths[good][-1]) if good.any() else local

    def _first_needed(self, place: _Place, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first block of which hits of so many blocks need this piece."""
        match place.kind:
            case "full":
                return np.zeros_like(lengths)
            case "window":  # the next token sees `reach` tokens, itself the last
                first_seen = lengths * self.block_tokens - place.reach + 1
                return np.clip((first_seen - place.stop) // self.block_tokens + 1, 0, lengths)
            case "state":
                return lengths - (place.stop == self.block_tokens)
