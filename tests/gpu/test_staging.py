"""Staging memory: buffers come in turn, records are nobody else's, and room aside is given back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pretend import Pretend

from kvkeep.errors import DeviceError
from kvkeep.gpu.staging import MOST_BLOCKS, CopyLane, EvacuationBuffer


@pytest.fixture
def device() -> Any:
    return Pretend()


@pytest.fixture
def lane(device: Any) -> Any:
    return CopyLane(device, 3 << 12, 4096)


def test_buffers_come_in_turn_and_each_is_as_large_as_the_largest_block(lane: CopyLane) -> None:
    buffers = [lane.next_buffer() for _ in range(6)]
    assert len({id(buffer) for buffer in buffers}) == 3 and buffers[:3] == buffers[3:]
    assert all(buffer.memory.numel() * 8 == lane.buffer_bytes >= 4096 for buffer in buffers)
    assert CopyLane(Pretend(), 0, 12_288).buffer_bytes == 12_288  # type: ignore[arg-type]


@pytest.mark.parametrize(("pitch", "blocks"), [(4096, 1), (1024, 4), (8, 512), (4096 * 3, 0)])
def test_blocks_per_buffer(lane: CopyLane, pitch: int, blocks: int) -> None:
    assert lane.blocks_per_buffer(pitch) == blocks


def test_a_buffer_never_takes_more_blocks_than_a_call() -> None:
    lane = CopyLane(Pretend(), 3 * 8 * MOST_BLOCKS * 2, 8)  # type: ignore[arg-type]
    assert lane.blocks_per_buffer(8) == MOST_BLOCKS


def test_however_many_records_are_out_each_is_ones_own(lane: CopyLane) -> None:
    taken = [lane.take_record() for _ in range(9)]
    assert len({id(record) for record in taken}) == 9
    lane.give_back(taken[3])
    assert lane.take_record() is taken[3]


def test_a_new_record_is_made_for_the_stream_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives memory of one stream to others when that one is done with it."""
    device, inside, made_on = Pretend(), list[Any](), list[Any]()
    lane = CopyLane(device, 3 << 12, 4096)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        inside.append(stream)
        yield
        inside.pop()

    memory = device.memory
    monkeypatch.setattr(device, "on", on)
    monkeypatch.setattr(
        device, "memory", lambda words: (made_on.append(list(inside)), memory(words))[1]
    )
    while not made_on:
        lane.take_record()
    assert {tuple(streams) for streams in made_on} == {(lane.kernels,)}


def test_a_record_carries_ids_out_and_sums_back(device: Any, lane: CopyLane) -> None:
    record = lane.take_record()
    batch, stream = device.batch(), lane.kernels
    record.begin(batch, stream, 8)
    assert record.sums[:8].tolist() == [0] * 8
    assert record.ids(batch, stream, np.array([5, 6]), 3).tolist() == [5, 6]
    assert record.ids(batch, stream, np.array([7]), 5).tolist() == [7]
    record.sums[:2] = -1
    record.send_sums(batch, stream, 2)
    assert record.sums_here(2).tolist() == [2**64 - 1] * 2


def test_a_bounce_buffer_is_made_once_for_each_buffer(lane: CopyLane) -> None:
    buffer = lane.next_buffer()
    assert buffer.bounce is None
    assert lane.bounce(buffer) == lane.bounce(buffer)
    assert buffer.bounce is not None and buffer.bounce.numel() * 8 == lane.buffer_bytes


@pytest.mark.parametrize("marks_left", [0, 1, 2])
def test_a_line_is_drained_though_no_event_can_be_had(
    device: Any, lane: CopyLane, marks_left: int
) -> None:
    lane.drain()
    assert [stream for stream, _ in device.marks] == streams_of(lane) and not device.drained
    device.marks_left = marks_left
    lane.drain()
    assert device.drained == streams_of(lane)[marks_left:]


def test_a_line_is_drained_though_an_event_cannot_be_waited_for(
    device: Any, lane: CopyLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "wait", failing)
    lane.drain()
    assert device.drained == streams_of(lane)


def test_a_line_is_drained_though_one_of_its_streams_fails(
    device: Any, lane: CopyLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    for broken in streams_of(lane):
        drained = list[Any]()

        def drain(stream: Any, broken: Any = broken, drained: list[Any] = drained) -> None:
            failing() if stream is broken else drained.append(stream)

        with monkeypatch.context() as patched:
            patched.setattr(device, "wait", failing)
            patched.setattr(device, "drain", drain)
            with pytest.raises(RuntimeError, match="launch failure"):
                lane.drain()
        assert drained == [stream for stream in streams_of(lane) if stream is not broken]


def failing(*_: Any) -> None:
    raise RuntimeError("CUDA error: launch failure")


def streams_of(lane: CopyLane) -> list[Any]:
    return [lane.kernels, *lane.copies.streams]


class Blocks:
    """Units of 4 words, whose kernel is not run."""

    nbytes = pitch = 32
    broken = False

    def gather(self, ids: Any, staging: Any, sums: Any) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize("what", ["kernel", "mark"])
def test_room_for_blocks_that_could_not_be_set_aside_is_given_back(what: str) -> None:
    device, units = Pretend(), Blocks()
    aside = EvacuationBuffer(device, 5 * 32)  # type: ignore[arg-type]
    made = aside.take(units, np.array([5, 6]))  # type: ignore[arg-type]
    units.broken, device.marks_left = what == "kernel", 0 if what == "mark" else 9
    for _ in range(3):
        with pytest.raises((DeviceError, RuntimeError), match="out of memory"):
            aside.take(units, np.array([7]))  # type: ignore[arg-type]
    with pytest.raises(MemoryError):
        aside.take(units, np.arange(4))  # type: ignore[arg-type]
    for each in made:
        each.free()
    units.broken, device.marks_left = False, 9
    assert len(aside.take(units, np.arange(5))) == 5, "all of it is free"  # type: ignore[arg-type]
