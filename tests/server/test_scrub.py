"""Blocks looked through in the background: bad ones go, good ones and others' stay."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import numpy as np
import pytest

from kvkeep.kv.checksum import ABSENT, checksum
from kvkeep.server.counters import Counters
from kvkeep.server.scrub import Scrub, Scrubber
from kvkeep.store.operators import clear
from kvkeep.store.store import Store
from kvkeep_lab.simulation.server import PlainMemory
from kvkeep_lab.simulation.store_integrity import check_integrity

SLOTS = 16
KEYS = bytes(range(64))


class Scene:
    """Four blocks in a chain, each with its bytes, of two shards."""

    def __init__(self, absent: int = -1) -> None:
        self.store = Store(SLOTS * 4096, SLOTS * 4096)
        self.store.add_slabs(0, 1)
        self.memory = PlainMemory(SLOTS * 4096)
        self.store.open_session(1)
        self.layout = self.store.open_layout(1, b"f", (64, 100))
        self.put(absent)
        self.counters = Counters()
        self.rows = self.store.blocks.table.live_rows()
        self.scrub = Scrub(self.store, self.memory, self.counters, self.rows)

    def put(self, absent: int = -1, seed: int = 1, keys: bytes = KEYS) -> None:
        random = np.random.default_rng(seed)
        for shard, nbytes in enumerate((64, 100)):
            plan = self.store.prepare_store(1, 1, "t", self.layout.number, shard, b"", keys, 0)
            sums = []
            for slot in plan.slots.tolist():
                area = self.memory.view(slot + self.layout.shard_offsets[shard], nbytes)
                area[:] = random.integers(0, 256, nbytes)
                sums.append(checksum(area))
            if shard == 1 and absent >= 0:
                sums[absent] = ABSENT
            self.store.complete_store(1, 1, np.array(sums, np.uint64), 0)

    def harm(self, position: int) -> None:
        self.memory.bytes[self.store.blocks.table.slot[int(self.rows[position])] + 80] ^= 1

    def run(self) -> int:
        dropped = 0
        while shards := self.scrub.take():
            dropped += self.scrub.judge(self.scrub.look(shards))
        check_integrity(self.store)
        return dropped


def test_good_blocks_stay() -> None:
    scene = Scene()
    assert scene.run() == 0
    assert (scene.counters.scrubbed_blocks, scene.counters.bad_blocks, scene.scrub.left) == (
        4,
        0,
        0,
    )


def test_a_bad_block_goes_with_all_that_hangs_on_it(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.harm(1)
    assert scene.run() == 3
    assert scene.counters.bad_blocks == 1 and len(scene.store.blocks.table) == 1
    assert "an adopted block of tenant t does not match its checksum; it is dropped" in caplog.text


def test_a_shard_that_is_not_there_is_not_looked_for() -> None:
    scene = Scene(absent=1)
    scene.harm(1)
    assert scene.run() == 0


def test_a_row_that_is_another_block_by_now_is_left_alone() -> None:
    scene = Scene()
    shards = scene.scrub.take()
    clear(scene.store)
    scene.put(seed=2, keys=KEYS[::-1])
    suspects = scene.scrub.look(shards)
    assert suspects == [0, 1, 2, 3], "what it was is not there any more"
    assert scene.scrub.judge(suspects) == 0 and scene.counters.bad_blocks == 0


def test_blocks_that_are_gone_are_passed_over() -> None:
    scene = Scene()
    clear(scene.store)
    assert scene.scrub.take() == [] and scene.scrub.left == 0


def thread_ends() -> bool:
    """Waits for the end of the scrubbers' threads."""
    threads = [each for each in threading.enumerate() if each.name == "kvkeep-scrub"]
    for each in threads:
        each.join(30)
    return not any(each.is_alive() for each in threads)


def test_the_thread_looks_through_all_and_ends() -> None:
    scene, turn = Scene(), threading.Lock()
    scene.harm(3)

    def in_loop(duty: object) -> Future[object]:
        future: Future[object] = Future()
        with turn:
            future.set_result(duty())  # type: ignore[operator]
        return future

    scrubber = Scrubber(scene.scrub, in_loop)
    scrubber.start()
    assert thread_ends() and scene.counters.scrubbed_blocks == 4
    assert len(scene.store.blocks.table) == 3


def test_it_stops_although_the_loop_does_not_answer() -> None:
    scrubber = Scrubber(Scene().scrub, lambda duty: Future())
    scrubber.start()
    scrubber.stop()
    assert thread_ends()


def test_it_ends_when_the_loop_has_ended() -> None:
    def cancelled(duty: object) -> Future[object]:
        future: Future[object] = Future()
        future.cancel()
        return future

    scrubber = Scrubber(Scene().scrub, cancelled)
    scrubber.start()
    assert thread_ends()
