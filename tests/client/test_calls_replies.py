"""Replies are read only if their arrays fit together and point where they may."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep.client.calls import is_sound_layout, is_sound_welcome, read_found, read_plan
from kvkeep.wire import messages as m

KEYS = bytes(16 * 4)


def integers(*values: int, dtype: str) -> bytes:
    return np.array(values, dtype=dtype).tobytes()


def test_a_hit_is_read_with_slots_and_checksums_of_what_lies_beyond_skip() -> None:
    hit = read_found(
        m.Found(3, integers(4096, 8192, dtype="<i8"), integers(1, 2, 3, 4, dtype="<u8")), KEYS, 1, 2
    )
    assert hit is not None
    assert hit.blocks == 3
    assert hit.slots.tolist() == [4096, 8192]
    assert hit.checksums.tolist() == [[1, 2], [3, 4]]


def test_a_hit_on_the_network_plane_has_checksums_and_no_slots() -> None:
    hit = read_found(m.Found(2, b"", bytes(16)), KEYS, 0, 1)
    assert hit is not None
    assert len(hit.slots) == 0
    assert hit.checksums.shape == (2, 1)


def test_what_is_coming_is_within_what_was_asked() -> None:
    for said, read in [((2, 40), (2, 40)), ((99, 0), (3, 1)), ((-1, -7), (0, 1))]:
        hit = read_found(m.Found(1, b"", bytes(8), *said), KEYS, 0, 1)
        assert hit is not None and (hit.coming, hit.again_ms) == read


def test_a_hit_that_does_not_reach_beyond_skip_describes_nothing() -> None:
    hit = read_found(m.Found(1, b"", b""), KEYS, 3, 2)
    assert hit is not None
    assert (hit.blocks, hit.checksums.shape) == (1, (0, 2))


@pytest.mark.parametrize(
    "reply",
    [
        None,
        m.Done(),
        m.Found(-1, b"", b""),
        m.Found(5, bytes(40), bytes(40)),
        m.Found(2, bytes(15), bytes(16)),
        m.Found(2, bytes(8), bytes(16)),
        m.Found(2, bytes(16), bytes(8)),
        m.Found(2, bytes(16), b""),
        m.Found(0, bytes(8), bytes(8)),
    ],
    ids=repr,
)
def test_a_hit_that_does_not_fit_what_was_asked_is_none(reply: object) -> None:
    assert read_found(reply, KEYS, 0, 1) is None


def test_a_plan_is_read_with_positions_and_slots() -> None:
    prepared = m.Prepared(integers(0, 2, dtype="<i4"), integers(0, 4096, dtype="<i8"), 1, False)
    plan = read_plan(prepared, 4)
    assert plan is not None
    assert (plan.positions.tolist(), plan.slots.tolist(), plan.refused) == ([0, 2], [0, 4096], 1)
    nothing = read_plan(m.Prepared(b"", b"", 0, False), 4)
    assert nothing is not None
    assert len(nothing.positions) == 0


@pytest.mark.parametrize(
    "reply",
    [
        None,
        m.Done(),
        m.Prepared(b"123", b"", 0, False),
        m.Prepared(integers(-1, dtype="<i4"), bytes(8), 0, False),
        m.Prepared(integers(4, dtype="<i4"), bytes(8), 0, False),
        m.Prepared(integers(1, 1, dtype="<i4"), bytes(16), 0, False),
        m.Prepared(integers(2, 1, dtype="<i4"), bytes(16), 0, False),
        m.Prepared(integers(-(2**31), 2**31 - 1, dtype="<i4"), bytes(16), 0, False),
        m.Prepared(integers(1, 2, dtype="<i4"), bytes(8), 0, False),
        m.Prepared(b"", b"", -1, False),
        m.Prepared(b"", b"", 5, False),
    ],
    ids=repr,
)
def test_a_plan_that_points_elsewhere_is_none(reply: object) -> None:
    assert read_plan(reply, 4) is None


@pytest.mark.parametrize(
    ("slot_bytes", "offsets", "sound"),
    [
        (4096, [0, 128], True),
        (192, [0, 128], True),
        (4096, [0], False),
        (4096, [0, 128, 256], False),
        (4096, [0, 64], False),
        (4096, [-128, 128], False),
        (4096, [128, 0], False),
        (4096, [0, 2**63], False),
        (2**63, [0, 2**62], False),
        (191, [0, 128], False),
    ],
)
def test_a_layout_is_sound_if_each_shard_has_a_place_of_its_own_in_the_slot(
    slot_bytes: int, offsets: list[int], sound: bool
) -> None:
    assert is_sound_layout(m.LayoutOpened(1, slot_bytes, offsets), (100, 64)) == sound


@pytest.mark.parametrize(
    ("session", "segment_bytes", "pool_bytes", "sound"),
    [
        (1, 4096, 8192, True),
        (2**64 - 1, 4096, 4096, True),
        (-1, 4096, 8192, False),
        (1, 0, 8192, False),
        (1, -4096, 8192, False),
        (1, 4096, 0, False),
        (1, 1, 2**62, False),
    ],
)
def test_a_welcome_is_sound_if_its_numbers_can_be_used(
    session: int, segment_bytes: int, pool_bytes: int, sound: bool
) -> None:
    pool, limits = m.PoolPlace("", "", segment_bytes, pool_bytes), m.WireLimits(1, 1, 1, 1)
    assert is_sound_welcome(m.Welcome(session, 1, "", pool, limits, [], True)) == sound
