"""Checks that every tier must pass: `check_tier(make, faults)`.

A check is a function that raises AssertionError. Those of faults need `Faults`: what only the
author of a tier can do to its medium."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from typing import Protocol

from kvkeep.errors import TierError
from kvkeep.tiers.tier import Part, Tier

PLACE = "v1/tenant/0/layout"
_LONGEST_S = 60.0


class Faults(Protocol):
    """Faults of the medium behind one tier."""

    def during(self, fault: str) -> AbstractContextManager[object]:
        """Inside: "half" takes the first half of each write and then fails, "stall" makes every
        read and write wait until the end, "full" has no room for what is new."""

    def garble(self) -> None:
        """Changes a bit of everything that is stored."""


def check_tier(make: Callable[[], tuple[Tier, Faults]]) -> None:
    """Makes a new tier for each check, with its faults. AssertionError says what it does wrong."""
    for check in CHECKS:
        tier, faults = make()
        with closing(tier):
            try:
                check(tier, faults)
            except TierError as error:
                raise AssertionError(f"{check.__name__}: {error}") from error
            except AssertionError as error:
                error.add_note(check.__name__)
                raise


def check_round_trip(tier: Tier, faults: Faults) -> None:
    blocks = _write(tier, [1, 100, 4096, 70_000, tier.best_bytes])
    for name, data in blocks.items():
        assert _read(tier, name, len(data)) == data, f"{len(data)} bytes came back changed"
    assert tier.usage().blocks == len(blocks), "usage counts something else"
    assert tier.usage().used_bytes >= sum(map(len, blocks.values())), "usage is too low"


def check_ranges(tier: Tier, faults: Faults) -> None:
    ((name, data),) = _write(tier, [10_000]).items()
    for offset, nbytes in ((0, 10), (1, 1), (4096, 5000), (9_999, 1), (5000, 5000)):
        assert _read(tier, name, nbytes, offset) == data[offset : offset + nbytes], "a wrong range"
    assert _read(tier, name, 500, 9_900) == data[9_900:], "a range beyond the end"
    views = [memoryview(bytearray(size)) for size in (3, 997, 0, 9_000)]
    assert tier.read([Part(name, views)]) == [10_000] and b"".join(views) == data, "several views"


def check_missing(tier: Tier, faults: Faults) -> None:
    there = list(_write(tier, [100, 100]))
    assert _read(tier, f"{PLACE}/other", 100) is None, "what was never written is there"
    assert tier.leading([]) == 0
    assert tier.leading([*there, f"{PLACE}/other", there[0]]) == 2, "leading names"
    assert tier.leading([f"{PLACE}/other", *there]) == 0, "leading names"
    key = there[0].rpartition("/")[2]
    assert _read(tier, f"v1/other/0/layout/{key}", 100) is None, "in another place"
    parts = [Part(each, [memoryview(bytearray(100))]) for each in (f"{PLACE}/other", there[1])]
    assert tier.read(parts) == [-1, 100], "one of two"


def check_twice(tier: Tier, faults: Faults) -> None:
    ((name, data),) = _write(tier, [5000]).items()
    used = tier.usage()
    for _ in range(100):
        assert tier.write([Part(name, [memoryview(data)])]) == [True], "a second write was refused"
    tier.write([Part(name, [memoryview(os.urandom(5000))])])
    again = tier.usage()
    assert _read(tier, name, 5000) == data and again.blocks == used.blocks, "it is replaced"
    # A service counts its connections and buffers as well, so its figure varies a little.
    assert again.used_bytes < used.used_bytes + 50 * len(data), "its bytes are stored twice"


def check_half(tier: Tier, faults: Faults) -> None:
    before = _write(tier, [9000])
    name, data = f"{PLACE}/half", os.urandom(9000)
    with faults.during("half"):
        try:
            tier.write([Part(name, [memoryview(data)])])
        except TierError:
            pass
        else:
            raise AssertionError("half of a write was acknowledged")
    assert tier.leading([name]) == 0, "half of a block is there"
    assert _read(tier, name, 9000) is None, "half of a block is read"
    assert tier.write([Part(name, [memoryview(data)])]) == [True], "it cannot be written again"
    for each, written in (before | {name: data}).items():
        assert _read(tier, each, len(written)) == written


def check_garbage(tier: Tier, faults: Faults) -> None:
    blocks = _write(tier, [100, 9000])
    faults.garble()
    for name, data in blocks.items():
        assert _read(tier, name, len(data)) is None, "changed bytes are read"
        assert _read(tier, name, 10, 50) is None, "a range of changed bytes is read"


def check_stall(tier: Tier, faults: Faults) -> None:
    blocks = _write(tier, [9000])
    name, data = next(iter(blocks.items()))
    with ThreadPoolExecutor(3) as pool:
        with faults.during("stall"):
            read = pool.submit(_read, tier, name, 9000)
            written = pool.submit(_write, tier, [100])
            usage = pool.submit(tier.usage)
            assert usage.result(_LONGEST_S).capacity_bytes >= 0
        for outcome in (read, written):
            error = outcome.exception(_LONGEST_S)
            assert error is None or isinstance(error, TierError), f"a stall ends with {error!r}"
        assert read.exception() or read.result() == data, "wrong bytes after a stall"
    assert _read(tier, name, 9000) == data, "it does not recover from a stall"


def check_full(tier: Tier, faults: Faults) -> None:
    ((name, data),) = _write(tier, [9000]).items()
    with faults.during("full"):
        kept = tier.write([Part(f"{PLACE}/more", [memoryview(os.urandom(9000))])])
        assert kept == [False], "a full tier takes more"
        assert tier.leading([f"{PLACE}/more"]) == 0, "what was refused is there"
        assert _read(tier, name, 9000) == data, "a full tier does not read"
    _write(tier, [9000])


def check_delete(tier: Tier, faults: Faults) -> None:
    mine, other = _write(tier, [100, 9000]), _write(tier, [100], "v1/tenant2/0/layout")
    assert tier.delete("v1/nothing/") == 0
    assert tier.delete("v1/tenant/") == 2, "the number of deleted blocks"
    assert all(_read(tier, name, 100) is None for name in mine), "what was deleted is read"
    assert tier.leading(list(mine)) == 0 and tier.leading(list(other)) == 1, "too much is deleted"
    assert tier.usage().blocks == 1, "what was deleted still counts"
    again = {name: memoryview(data) for name, data in mine.items()}
    assert tier.write([Part(name, [view]) for name, view in again.items()]) == [True, True]
    assert tier.leading(list(mine)) == 2, "what was written after the deletion"


def check_concurrency(tier: Tier, faults: Faults) -> None:
    shared = [(f"{PLACE}/shared{number}", os.urandom(5000)) for number in range(8)]
    start = threading.Barrier(4)

    def work(_: int) -> None:
        start.wait(_LONGEST_S)
        for name, data in shared:
            tier.write([Part(name, [memoryview(data)])])
            found = _read(tier, name, 5000)
            assert found in (None, data), "another block's bytes"
        for name, data in _write(tier, [3000] * 4).items():
            assert _read(tier, name, 3000) == data

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert all(_read(tier, name, 5000) == data for name, data in shared)
    assert tier.usage().blocks == len(shared) + 16, "blocks are lost, or stored twice"


CHECKS: tuple[Callable[[Tier, Faults], None], ...] = (
    check_round_trip,
    check_ranges,
    check_missing,
    check_twice,
    check_half,
    check_garbage,
    check_stall,
    check_full,
    check_delete,
    check_concurrency,
)


def _write(tier: Tier, sizes: Iterable[int], place: str = PLACE) -> dict[str, bytes]:
    """New blocks of these sizes, by name."""
    blocks = {f"{place}/{os.urandom(16).hex()}": os.urandom(size) for size in sizes}
    kept = tier.write([Part(name, [memoryview(data)]) for name, data in blocks.items()])
    assert kept == [True] * len(blocks), f"{kept.count(False)} of {len(kept)} were refused"
    return blocks


def _read(tier: Tier, name: str, nbytes: int, offset: int = 0) -> bytes | None:
    """What is there, up to `nbytes`; None if nothing is."""
    view = memoryview(bytearray(nbytes))
    (found,) = tier.read([Part(name, [view], offset)])
    assert -1 <= found <= nbytes
    return None if found < 0 else view[:found].tobytes()
