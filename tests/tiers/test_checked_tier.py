"""Frames around what a medium holds: ranges of them, and whatever a medium may return instead."""

from __future__ import annotations

import os
from collections.abc import Sequence
from random import Random

import pytest
from dictionary_medium import Dictionary

from kvkeep.errors import TierError
from kvkeep.tiers.checked_tier import FRAME_BYTES, HEAD, SEGMENT_BYTES, CheckedTier
from kvkeep.tiers.tier import Part

NAME = "v1/tenant/0/layout/key"


def write(tier: CheckedTier, data: bytes, name: str = NAME) -> None:
    assert tier.write([Part(name, [memoryview(data)])]) == [True]


def read(
    tier: CheckedTier, sizes: Sequence[int], offset: int = 0, name: str = NAME
) -> bytes | None:
    views = [memoryview(bytearray(size)) for size in sizes]
    (found,) = tier.read([Part(name, views, offset)])
    assert -1 <= found <= sum(sizes)
    return None if found < 0 else b"".join(views)[:found]


@pytest.mark.parametrize("seed", range(40))
def test_any_range_of_any_length_in_any_views_is_what_was_written(seed: int) -> None:
    random = Random(seed)
    edges = [0, 1, 100, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 3 * SEGMENT_BYTES]
    medium = Dictionary()
    tier = CheckedTier(medium)
    total = random.choice([*edges, random.randrange(1, 3 * SEGMENT_BYTES)])
    data = random.randbytes(total)
    cuts = sorted(random.randrange(total + 1) for _ in range(random.randrange(4)))
    views = [
        memoryview(data)[low:high] for low, high in zip([0, *cuts], [*cuts, total], strict=True)
    ]
    assert tier.write([Part(NAME, views)]) == [True]
    for _ in range(20):
        offset = min(total, random.choice([*edges, random.randrange(total + 1)]))
        sizes = [random.choice([0, 1, 5000, *edges]) for _ in range(random.randrange(1, 4))]
        assert read(tier, sizes, offset) == data[offset : offset + sum(sizes)], (offset, sizes)


@pytest.mark.parametrize("segment", [0, 1, 2])
def test_a_change_of_any_byte_is_a_miss_of_the_ranges_that_have_it(segment: int) -> None:
    data = os.urandom(2 * SEGMENT_BYTES + 5000)
    start = segment * (FRAME_BYTES + SEGMENT_BYTES)
    inside = [0, 4, 5, 8, 12, 23, 24, 39, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 4999]
    for at in inside:
        medium = Dictionary()
        tier = CheckedTier(medium)
        write(tier, data)
        value = bytearray(medium.values[NAME])
        value[start + at] ^= 1
        medium.values[NAME] = bytes(value)
        for other in {0, 1, 2} - {segment}:
            assert read(tier, [100], other * SEGMENT_BYTES) is not None, "another segment"
        assert read(tier, [100], segment * SEGMENT_BYTES) is None, at
        medium.values[NAME] = bytes(value)
        assert read(tier, [len(data)]) is None, at


@pytest.mark.parametrize(
    "left", [0, 1, FRAME_BYTES, FRAME_BYTES + SEGMENT_BYTES - 1, FRAME_BYTES + SEGMENT_BYTES, -1]
)
def test_what_is_truncated_is_a_miss_and_removed(left: int) -> None:
    data = os.urandom(SEGMENT_BYTES + 5000)
    medium = Dictionary()
    tier = CheckedTier(medium)
    write(tier, data)
    medium.values[NAME] = medium.values[NAME][:left]
    assert read(tier, [len(data)]) is None
    assert not medium.values, "it is in the way of the next write"


def test_what_was_written_under_another_name_is_a_miss() -> None:
    medium = Dictionary()
    tier = CheckedTier(medium)
    write(tier, b"mine", "v1/other/0/layout/key")
    medium.values[NAME] = medium.values["v1/other/0/layout/key"]
    assert read(tier, [4]) is None
    assert read(tier, [4], name="v1/other/0/layout/key") == b"mine"


def test_segments_in_another_order_are_a_miss() -> None:
    medium = Dictionary()
    tier = CheckedTier(medium)
    write(tier, os.urandom(2 * SEGMENT_BYTES))
    value = medium.values[NAME]
    half = len(value) // 2
    medium.values[NAME] = value[half:] + value[:half]
    assert read(tier, [2 * SEGMENT_BYTES]) is None


@pytest.mark.parametrize("field", [1, 2], ids=["version", "kind"])
def test_a_frame_of_another_release_is_a_miss_and_stays(field: int) -> None:
    medium = Dictionary()
    tier = CheckedTier(medium)
    write(tier, b"newer")
    head = list(HEAD.unpack_from(medium.values[NAME]))
    head[field] += 1
    newer = HEAD.pack(*head) + medium.values[NAME][HEAD.size :]
    medium.values[NAME] = newer
    assert read(tier, [5]) is None
    assert medium.values == {NAME: newer}


def test_one_that_is_wrong_leaves_the_others_alone() -> None:
    medium = Dictionary()
    tier = CheckedTier(medium)
    names = [f"v1/tenant/0/layout/{number}" for number in range(3)]
    for name in names:
        write(tier, name.encode(), name)
    medium.values[names[1]] = b"garbage" * 100
    parts = [Part(name, [memoryview(bytearray(len(name)))]) for name in names]
    assert tier.read(parts) == [len(names[0]), -1, len(names[2])]
    assert [bytes(parts[at].views[0]).decode() for at in (0, 2)] == [names[0], names[2]]
    assert tier.leading(names) == 1 and tier.leading([]) == 0


def test_what_is_only_spoilt_on_the_way_is_found_and_stays() -> None:
    """A host whose connection broke off once would have removed clears, and other hosts from their
    list, before it had read them."""

    class BreaksOff(Dictionary):
        """In the middle of the first reading of each value."""

        def __init__(self) -> None:
            super().__init__()
            self.asked: list[str] = []

        def read(self, parts: Sequence[Part]) -> list[int]:
            again = [part.name in self.asked for part in parts]
            self.asked += [part.name for part in parts]
            found = super().read(parts)
            return [n if is_again else n // 2 for n, is_again in zip(found, again, strict=True)]

    medium = BreaksOff()
    tier = CheckedTier(medium)
    data = os.urandom(5000)
    for name in (NAME, f"{NAME}s"):
        write(tier, data, name)
    stored = dict(medium.values)
    assert read(tier, [len(data)]) == data
    parts = [Part(name, [memoryview(bytearray(len(data)))]) for name in (NAME, f"{NAME}s")]
    assert tier.read(parts) == [len(data)] * 2
    assert [bytes(part.views[0]) for part in parts] == [data] * 2
    assert medium.values == stored
    assert medium.asked == [NAME] * 3 + [f"{NAME}s"] * 2, "what was good is not read again"


def test_a_medium_that_fails_while_a_wrong_value_is_removed_is_an_error() -> None:
    class Failing(Dictionary):
        def drop(self, names: Sequence[str]) -> None:
            raise TierError("the service failed")

    medium = Failing()
    medium.values[NAME] = b"garbage" * 100
    with pytest.raises(TierError):
        read(CheckedTier(medium), [10])
