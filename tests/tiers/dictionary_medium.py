"""A medium in memory, whose contents a test can change."""

from __future__ import annotations

from collections.abc import Sequence

from kvkeep.tiers.tier import Part, Usage


class Dictionary:
    best_bytes = 4096

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def leading(self, names: Sequence[str]) -> int:
        return next((at for at, name in enumerate(names) if name not in self.values), len(names))

    def read(self, parts: Sequence[Part]) -> list[int]:
        return [self._read(part) for part in parts]

    def write(self, parts: Sequence[Part]) -> list[bool]:
        for part in parts:
            self.values.setdefault(part.name, b"".join(part.views))
        return [True] * len(parts)

    def delete(self, prefix: str) -> int:
        names = [name for name in self.values if name.startswith(prefix)]
        self.drop(names)
        return len(names)

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            self.values.pop(name, None)

    def usage(self) -> Usage:
        return Usage(len(self.values), sum(map(len, self.values.values())), 0)

    def close(self) -> None: ...

    def _read(self, part: Part) -> int:
        if part.name not in self.values:
            return -1
        data = memoryview(self.values[part.name])[part.offset :]
        at = 0
        for view in part.views:
            some = data[at : at + view.nbytes]
            view[: some.nbytes] = some
            at += some.nbytes
        return at
