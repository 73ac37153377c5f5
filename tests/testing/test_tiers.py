"""check_tier holds a good tier to be good, and each check fails for a tier that it is there for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvkeep.errors import TierError
from kvkeep.testing import tiers
from kvkeep.testing.tiers import CHECKS, check_tier
from kvkeep.tiers.tier import Part, Usage


class Dictionary:
    """A tier in memory that is right. Also its own faults."""

    best_bytes = 1 << 16

    def __init__(self) -> None:
        self.blocks: dict[str, bytes] = {}
        self.damaged: set[str] = set()
        self.fault = ""
        self.running = threading.Event()
        self.running.set()

    def leading(self, names: Sequence[str]) -> int:
        return next((at for at, name in enumerate(names) if name not in self.blocks), len(names))

    def read(self, parts: Sequence[Part]) -> list[int]:
        self.running.wait()
        return [self.read_one(part) for part in parts]

    def read_one(self, part: Part) -> int:
        if part.name not in self.blocks or part.name in self.damaged:
            return -1
        at, data = part.offset, self.blocks[part.name]
        for view in part.views:
            some = data[at : at + view.nbytes]
            view[: len(some)] = some
            at += len(some)
        return at - part.offset

    def write(self, parts: Sequence[Part]) -> list[bool]:
        self.running.wait()
        if self.fault == "half":
            raise TierError("the medium is gone")
        return [self.write_one(part.name, b"".join(part.views)) for part in parts]

    def write_one(self, name: str, data: bytes) -> bool:
        if self.fault == "full":
            return False
        self.blocks.setdefault(name, data)
        return True

    def delete(self, prefix: str) -> int:
        doomed = [name for name in self.blocks if name.startswith(prefix)]
        for name in doomed:
            del self.blocks[name]
        return len(doomed)

    def usage(self) -> Usage:
        return Usage(len(self.blocks), sum(map(len, self.blocks.values())), 0)

    def close(self) -> None: ...

    @contextmanager
    def during(self, fault: str) -> Iterator[None]:
        self.fault = fault
        if fault == "stall":
            self.running.clear()
        yield
        self.fault = ""
        self.running.set()

    def garble(self) -> None:
        self.damaged = set(self.blocks)


class Truncates(Dictionary):
    def write_one(self, name: str, data: bytes) -> bool:
        return super().write_one(name, data[:50_000])


class IgnoresOffsets(Dictionary):
    def read_one(self, part: Part) -> int:
        return super().read_one(Part(part.name, part.views))


class ForgetsPlaces(Dictionary):
    def read_one(self, part: Part) -> int:
        key = part.name.rpartition("/")[2]
        name = next((name for name in self.blocks if name.endswith(key)), part.name)
        return super().read_one(Part(name, part.views, part.offset))


class KeepsEachWrite(Dictionary):
    def write_one(self, name: str, data: bytes) -> bool:
        if name in self.blocks:
            self.blocks[f"copy/{name}"] = data
        return super().write_one(name, data)


class KeepsHalves(Dictionary):
    def write(self, parts: Sequence[Part]) -> list[bool]:
        if self.fault == "half":
            for part in parts:
                self.write_one(part.name, b"".join(part.views)[: part.nbytes // 2])
        return super().write(parts)


class TrustsItsMedium(Dictionary):
    def garble(self) -> None:
        self.blocks = {name: bytes(len(data)) for name, data in self.blocks.items()}


class FailsAfterAStall(Dictionary):
    stalls = 0

    def read(self, parts: Sequence[Part]) -> list[int]:
        self.running.wait()
        if self.stalls:
            self.stalls = 0
            raise OSError("timed out")
        return super().read(parts)

    @contextmanager
    def during(self, fault: str) -> Iterator[None]:
        self.stalls += fault == "stall"
        with super().during(fault):
            yield


class NeverFull(Dictionary):
    def write_one(self, name: str, data: bytes) -> bool:
        super().write_one(name, data)
        self.blocks.setdefault(name, data)
        return True


class DeletesByFirstLetters(Dictionary):
    def delete(self, prefix: str) -> int:
        return super().delete(prefix.rstrip("/"))


class MixesThreads(Dictionary):
    """Two writes at a time may swap their bytes."""

    last = b""

    def write_one(self, name: str, data: bytes) -> bool:
        data, self.last = (self.last if len(self.last) == len(data) else data), data
        return super().write_one(name, data)


BROKEN: dict[str, type[Dictionary]] = {
    "check_round_trip": Truncates,
    "check_ranges": IgnoresOffsets,
    "check_missing": ForgetsPlaces,
    "check_twice": KeepsEachWrite,
    "check_half": KeepsHalves,
    "check_garbage": TrustsItsMedium,
    "check_stall": FailsAfterAStall,
    "check_full": NeverFull,
    "check_delete": DeletesByFirstLetters,
    "check_concurrency": MixesThreads,
}


def made(kind: type[Dictionary]) -> Callable[[], tuple[Dictionary, Dictionary]]:
    def make() -> tuple[Dictionary, Dictionary]:
        tier = kind()
        return tier, tier

    return make


def test_a_tier_that_is_right_passes() -> None:
    check_tier(made(Dictionary))


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_each_check_fails_for_a_tier_that_breaks_it(name: str) -> None:
    tier = BROKEN[name]()
    with pytest.raises(AssertionError):
        getattr(tiers, name)(tier, tier)
    with pytest.raises(AssertionError):
        check_tier(made(BROKEN[name]))


def test_an_error_of_the_tier_is_its_fault() -> None:
    class Refuses(Dictionary):
        def write(self, parts: Sequence[Part]) -> list[bool]:
            raise TierError("no medium")

    with pytest.raises(AssertionError, match="check_round_trip: no medium"):
        check_tier(made(Refuses))
