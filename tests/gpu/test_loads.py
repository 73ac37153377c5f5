"""Loads never queue more for the bus than a step's inputs can wait for, and tell until when they
waited."""

from __future__ import annotations

import mmap
import time
from typing import Any

import numpy as np
import pytest
import torch
from pretend import Immediate, Pretend

from kvkeep.gpu.copier import GpuCopier
from kvkeep.gpu.loads import Ready
from kvkeep.gpu.streams import CopySizes
from kvkeep.kv.runs import BlockRuns

BLOCKS, BLOCK_BYTES = 40, 1 << 20  # a buffer of the smallest staging has three of these
BUFFERS = 14
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a pretended device")


class Watched(Pretend):
    """Notes what is waited for and what is copied, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    def wait(self, event: Any) -> None:
        self.said.append(event)
        super().wait(event)

    def to_device(self, *copied: Any) -> None:
        self.said.append("copy")
        super().to_device(*copied)


def loaded(
    queued_bytes: int, *, step_under_way: bool, ahead: bool = False
) -> tuple[Watched, Any, Any]:
    """The device, the engine's mark, and the load of all blocks."""
    device, layer = Watched(), torch.zeros(BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    sizes, runs = CopySizes(queued_bytes=queued_bytes), BlockRuns.of([layer])
    copier: Any = GpuCopier([runs], 24 << 20, device, sizes)  # type: ignore[arg-type]
    pool = np.frombuffer(mmap.mmap(-1, BLOCKS * BLOCK_BYTES), dtype=np.uint8)
    assert copier.pin(pool.ctypes.data, pool.nbytes)
    addresses = pool.ctypes.data + np.arange(BLOCKS, dtype=np.uint64) * BLOCK_BYTES
    copier.set_engine_busy(False)  # buffers are not cut
    mark = copier.mark()
    if step_under_way:
        device.unfinished.append(mark)
    fetched = copier.fetch_ahead(0, addresses.astype(np.uint64)) if ahead else None
    device.said.clear()
    made = copier.begin_load(
        0, np.arange(BLOCKS), addresses.astype(np.uint64), None, [mark], fetched
    )
    device.pool = pool  # type: ignore[attr-defined]  # for as long as that
    return device, mark, made


@without_gpu
def test_no_more_buffers_are_queued_than_the_bus_takes_in_a_moment() -> None:
    device, mark, made = loaded(5 * (3 << 20), step_under_way=False)
    assert device.said.count("copy") == BUFFERS
    waits = [at for at, said in enumerate(device.said) if said != "copy"]
    assert device.said[:6] == ["copy"] * 5 + [device.said[5]] and len(waits) == BUFFERS - 5
    assert device.said[6::2] == ["copy"] * (BUFFERS - 5), "for each one that is over another one"
    over = [device.said[at] for at in waits]
    assert over == [mark for mark in device.marks if mark in over], "in order, each once"
    assert mark not in over and made.ready_s == 0, "the engine was there already"


@without_gpu
@pytest.mark.parametrize("queued_bytes", [0, 1 << 20])
def test_all_buffers_can_be_under_way_however_large_they_are(queued_bytes: int) -> None:
    device, _, _ = loaded(queued_bytes, step_under_way=False)
    assert device.said[:3] == ["copy"] * 3 and device.said[3] != "copy"


@without_gpu
def test_a_load_that_waits_for_the_engine_tells_until_when() -> None:
    before_s = time.perf_counter()
    device, mark, made = loaded(0, step_under_way=True)
    assert device.said[:5] == ["copy"] * 3 + [mark, device.said[4]], (
        "what there is room for goes first"
    )
    assert device.said.count(mark) == 1
    assert before_s < made.ready_s < time.perf_counter()


@without_gpu
def test_a_load_with_room_for_all_of_it_waits_for_nobody() -> None:
    device, _, made = loaded(1 << 30, step_under_way=True)
    assert device.said == ["copy"] * BUFFERS and made.ready_s == 0


@without_gpu
@pytest.mark.parametrize("ahead", [False, True])
def test_an_engines_own_thread_does_not_sleep_until_its_load_is_over(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    stayed_awake: list[bool] = []
    wait = Immediate.wait

    def note(batch: Any, event: Any, *, awake: bool = False) -> None:
        stayed_awake.append(awake)
        wait(batch, event)

    monkeypatch.setattr(Immediate, "wait", note)
    device, _, made = loaded(5 * (3 << 20), step_under_way=False, ahead=ahead)
    assert stayed_awake and set(stayed_awake) == {ahead}
    device.said.clear()
    assert made.good().all()
    assert len(set(device.said)) == (1 if ahead else 2), (
        "who may sleep does so until nearly all is there"
    )


def test_marks_are_waited_for_once() -> None:
    asked: list[str] = []
    ready = Ready(["over", "under way"], lambda mark: asked.append(mark) or mark == "under way")  # type: ignore[func-returns-value]
    assert ready and not ready.came_s
    ready.wait()
    assert not ready and ready.came_s
    ready.wait()
    assert asked == ["over", "under way"]
    assert not Ready([], lambda mark: True)
