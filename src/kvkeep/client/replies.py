"""What a server's replies must be like before anyone relies on them.

The arrays in a reply index engine memory and the pool. A server that gets them wrong is a fault of
the server, so each function here answers None or False instead of raising, and its caller counts a
miss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.keys import KEY_BYTES
from kvkeep.wire import messages as m

_U64 = 1 << 64
_MAX_SEGMENTS = 1 << 20


@dataclass(frozen=True)
class Hit:
    """A Found, read: arrays describe the blocks beyond `skip`. Without slots on the network
    plane."""

    blocks: int
    slots: NDArray[np.int64]
    checksums: NDArray[np.uint64]  # [described blocks, shards]


@dataclass(frozen=True)
class Plan:
    """A Prepared, read: positions are ascending and within the part that was asked about."""

    positions: NDArray[np.int32]
    slots: NDArray[np.int64]
    refused: int
    orphan: bool


def is_sound_welcome(welcome: m.Welcome) -> bool:
    """Whether the session can be named in a header and its pool cut into segments."""
    segment_bytes, pool_bytes = welcome.pool.segment_bytes, welcome.pool.pool_bytes
    return (
        0 <= welcome.session < _U64
        and segment_bytes > 0
        and 0 < pool_bytes <= segment_bytes * _MAX_SEGMENTS
    )


def is_sound_layout(opened: m.LayoutOpened, shard_bytes: tuple[int, ...]) -> bool:
    """Whether every shard has a place of its own in a slot."""
    ends = [
        0,
        *(
            offset + nbytes
            for offset, nbytes in zip(opened.shard_offsets, shard_bytes, strict=False)
        ),
    ]
    return (
        len(opened.shard_offsets) == len(shard_bytes)
        and opened.slot_bytes < 1 << 62
        and all(
            end <= offset
            for end, offset in zip(ends, [*opened.shard_offsets, opened.slot_bytes], strict=True)
        )
    )


def read_found(reply: object, keys: bytes, skip: int, shards: int) -> Hit | None:
    """The answer to a Lookup, or None for anything that cannot be one."""
    if not isinstance(reply, m.Found) or not 0 <= reply.blocks <= len(keys) // KEY_BYTES:
        return None
    described = max(reply.blocks - skip, 0)
    if len(reply.slots) not in (0, described * 8) or len(reply.checksums) != described * shards * 8:
        return None
    return Hit(
        reply.blocks,
        np.frombuffer(reply.slots, dtype="<i8"),
        np.frombuffer(reply.checksums, dtype="<u8").reshape(-1, shards),
    )


def read_plan(reply: object, count: int) -> Plan | None:
    """The answer to a PrepareStore of `count` blocks, or None for anything that cannot be one."""
    if (
        not isinstance(reply, m.Prepared)
        or len(reply.positions) % 4
        or not 0 <= reply.refused <= count
    ):
        return None
    positions = np.frombuffer(reply.positions, dtype="<i4")
    if len(reply.slots) not in (0, len(positions) * 8):
        return None
    if len(positions) and not (
        positions[0] >= 0 and positions[-1] < count and (positions[1:] > positions[:-1]).all()
    ):
        return None
    return Plan(positions, np.frombuffer(reply.slots, dtype="<i8"), reply.refused, reply.orphan)
