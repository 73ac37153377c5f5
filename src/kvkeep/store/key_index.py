"""A tenant's blocks by key, as a dictionary in parts.

Python copies a dictionary in one go when it has to grow. With a million keys that takes 40 to 70
ms, so an index with many keys has parts, which grow at different times. A part is chosen by
Python's own hash, which no client can predict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from kvkeep.store.table import NO_ROW

KEYS_IN_ONE = 32768  # all further keys go into PARTS: to copy as many takes 2 ms
PARTS = 128
_MASK = PARTS - 1


class KeyIndex(Struct, eq=False, gc=False):
    """Key -> row. The garbage collector does not track it: it would look at 100,000 of them in one
    go."""

    whole: dict[bytes, int] = field(default_factory=dict)  # does not grow once there are parts
    parts: tuple[dict[bytes, int], ...] = ()

    def __len__(self) -> int:
        return len(self.whole) + sum(map(len, self.parts))

    def get(self, key: bytes) -> int:
        """The row, or NO_ROW."""
        if self.parts:
            row = self.parts[hash(key) & _MASK].get(key, NO_ROW)
            if row != NO_ROW or not self.whole:
                return row
        return self.whole.get(key, NO_ROW)

    def put(self, keys: list[bytes], rows: list[int]) -> None:
        """None of them is there."""
        if not self.parts and len(self.whole) + len(keys) <= KEYS_IN_ONE:
            self.whole.update(zip(keys, rows, strict=True))
            return
        parts = self.parts = self.parts or tuple({} for _ in range(PARTS))
        for key, row in zip(keys, rows, strict=True):
            parts[hash(key) & _MASK][key] = row

    def remove(self, keys: Iterable[bytes]) -> None:
        """All of them are there."""
        whole, parts = self.whole, self.parts
        if not parts:
            for key in keys:
                del whole[key]
            return
        for key in keys:
            if whole and key in whole:
                del whole[key]
            else:
                del parts[hash(key) & _MASK][key]

    def has_any(self, keys: list[bytes]) -> bool:
        if not self.whole.keys().isdisjoint(keys):
            return True
        parts = self.parts
        return bool(parts) and any(key in parts[hash(key) & _MASK] for key in keys)

    def pop_some(self, most: int) -> list[tuple[bytes, int]]:
        """Takes up to `most` keys out, with their rows: the youngest of a part first."""
        taken: list[tuple[bytes, int]] = []
        for part in (self.whole, *self.parts):
            while part and len(taken) < most:
                taken.append(part.popitem())
        return taken

    def items(self) -> Iterator[tuple[bytes, int]]:
        for part in (self.whole, *self.parts):
            yield from part.items()
