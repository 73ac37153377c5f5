"""Staging memory: bays come in turn, ledgers are nobody else's, and room aside is given back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pretend import Pretend

from kvkeep.errors import DeviceError
from kvkeep.gpu.staging import MOST_BLOCKS, Aside, Line


@pytest.fixture
def line() -> Any:
    return Line(Pretend(), 3 << 12, 4096)  # type: ignore[arg-type]


def test_bays_come_in_turn_and_each_is_as_large_as_the_largest_block(line: Line) -> None:
    bays = [line.next_bay() for _ in range(6)]
    assert len({id(bay) for bay in bays}) == 3 and bays[:3] == bays[3:]
    assert all(bay.memory.numel() * 8 == line.bay_bytes >= 4096 for bay in bays)
    assert Line(Pretend(), 0, 12_288).bay_bytes == 12_288  # type: ignore[arg-type]


@pytest.mark.parametrize(("pitch", "blocks"), [(4096, 1), (1024, 4), (8, 512), (4096 * 3, 0)])
def test_blocks_a_bay(line: Line, pitch: int, blocks: int) -> None:
    assert line.blocks_a_bay(pitch) == blocks


def test_a_bay_never_takes_more_blocks_than_a_call() -> None:
    line = Line(Pretend(), 3 * 8 * MOST_BLOCKS * 2, 8)  # type: ignore[arg-type]
    assert line.blocks_a_bay(8) == MOST_BLOCKS


def test_however_many_ledgers_are_out_each_is_ones_own(line: Line) -> None:
    taken = [line.take_ledger() for _ in range(9)]
    assert len({id(ledger) for ledger in taken}) == 9
    line.give_back(taken[3])
    assert line.take_ledger() is taken[3]


def test_a_new_ledger_is_made_for_the_stream_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives memory of one stream to others when that one is done with it."""
    device, inside, made_on = Pretend(), list[Any](), list[Any]()
    line = Line(device, 3 << 12, 4096)  # type: ignore[arg-type]

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
        line.take_ledger()
    assert {tuple(streams) for streams in made_on} == {(line.kernels,)}


def test_a_ledger_carries_ids_out_and_sums_back(line: Line) -> None:
    ledger = line.take_ledger()
    batch, stream = line._device.batch(), line.kernels
    ledger.begin(batch, stream, 8)
    assert ledger.sums[:8].tolist() == [0] * 8
    assert ledger.ids(batch, stream, np.array([5, 6]), 3).tolist() == [5, 6]
    assert ledger.ids(batch, stream, np.array([7]), 5).tolist() == [7]
    ledger.sums[:2] = -1
    ledger.send_sums(batch, stream, 2)
    assert ledger.sums_here(2).tolist() == [2**64 - 1] * 2


def test_a_bounce_buffer_is_made_once_for_each_bay(line: Line) -> None:
    bay = line.next_bay()
    assert bay.bounce is None
    assert line.bounce(bay) == line.bounce(bay)
    assert bay.bounce is not None and bay.bounce.numel() * 8 == line.bay_bytes


@pytest.mark.parametrize("marks_left", [0, 1, 2])
def test_a_line_is_drained_though_no_event_can_be_had(line: Line, marks_left: int) -> None:
    device: Any = line._device
    line.drain()
    assert [stream for stream, _ in device.marks] == streams_of(line) and not device.drained
    device.marks_left = marks_left
    line.drain()
    assert device.drained == streams_of(line)[marks_left:]


def test_a_line_is_drained_though_an_event_cannot_be_waited_for(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line._device, "wait", failing)
    line.drain()
    assert line._device.drained == streams_of(line)  # type: ignore[attr-defined]


def test_a_line_is_drained_though_one_of_its_streams_fails(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    device: Any = line._device
    for broken in streams_of(line):
        drained = list[Any]()

        def drain(stream: Any, broken: Any = broken, drained: list[Any] = drained) -> None:
            failing() if stream is broken else drained.append(stream)

        with monkeypatch.context() as patched:
            patched.setattr(device, "wait", failing)
            patched.setattr(device, "drain", drain)
            with pytest.raises(RuntimeError, match="launch failure"):
                line.drain()
        assert drained == [stream for stream in streams_of(line) if stream is not broken]


def failing(*_: Any) -> None:
    raise RuntimeError("CUDA error: launch failure")


def streams_of(line: Line) -> list[Any]:
    return [line.kernels, *line.copies.streams]


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
    aside = Aside(device, 5 * 32)  # type: ignore[arg-type]
    made = aside.take(units, np.array([5, 6]))  # type: ignore[arg-type]
    units.broken, device.marks_left = what == "kernel", 0 if what == "mark" else 9
    for _ in range(3):
        with pytest.raises((DeviceError, RuntimeError), match="out of memory"):
            aside.take(units, np.array([7]))  # type: ignore[arg-type]
        assert aside._left == 2
    for each in made:
        each.free()
    units.broken, device.marks_left = False, 9
    assert len(aside.take(units, np.arange(5))) == 5, "all of it is free"  # type: ignore[arg-type]
