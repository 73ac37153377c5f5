"""Blocks on their way from slots into engine memory: how they are given to the GPU, and what is
waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkeep.gpu.device import Cuda
from kvkeep.gpu.kernels import Units
from kvkeep.gpu.pinned import Pinned, Run
from kvkeep.gpu.staging import BAYS, Bay, Ledger, Line
from kvkeep.kv.copy import move_rows

_BAYS_TOGETHER = (
    8  # in one call, and fewer at first: who comes back from one waits for the interpreter
)


class Scattered(NamedTuple):
    """A part of them: its ledger, how many, when nearly all and when all are in place. Until
    `nearly` one can sleep."""

    ledger: Ledger
    blocks: int
    nearly: Any
    done: Any


class Fetched:
    """Bays with the first bytes of some slots, there or on their way, while nobody knows yet which
    blocks they go to. The slots must stay as they are until a load has taken the bays and is over,
    and be ours until this is closed."""

    def __init__(
        self,
        device: Cuda,
        line: Line,
        units: Units,
        addresses: NDArray[np.uint64],
        bays: list[tuple[Bay, Any]],
    ) -> None:
        self._device = device
        self._line = line
        self._units = units
        self._addresses = addresses
        self._bays = bays
        self._turn = line.turn
        self._arrived = bays[-1][1] if bays else None

    def __bool__(self) -> bool:
        return self._arrived is not None

    def take(self, units: Units, addresses: NDArray[np.uint64]) -> list[tuple[Bay, Any]]:
        """Each bay and when it is filled: once, and only for a load of these very slots, or of the
        first of them, while nobody else has taken a bay."""
        bays, self._bays = self._bays, []
        is_same = units is self._units and np.array_equal(
            self._addresses[: len(addresses)], addresses
        )
        return bays if is_same and self._line.turn == self._turn else []

    def close(self) -> None:
        """Waits until all of it has arrived, taken or not."""
        self._bays = []
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            try:
                self._device.wait(arrived)
            except BaseException:
                # guard: raised again; nobody may have memory that a copy still reads
                self._line.drain()
                raise


class Ready:
    """What the engine has to have done before blocks are written. `came_s` is when it had, if
    somebody waited for it: a load takes no time before that."""

    def __init__(self, marks: Sequence[Any], wait_for: Callable[[Any], bool]) -> None:
        self._marks = marks
        self._wait_for = wait_for
        self.came_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._marks)

    def wait(self) -> None:
        marks, self._marks = self._marks, ()
        for mark in marks:
            if self._wait_for(mark):
                self.came_s = time.perf_counter()


class Way:
    """From slots into one piece of an engine's blocks. For the thread that loads. If that is the
    engine's own, and some of it was fetched ahead, it stays `awake`: the step that comes next
    begins on a core that has not rested."""

    def __init__(
        self,
        device: Cuda,
        line: Line,
        pinned: Pinned,
        units: Units,
        engine: Ready,
        *,
        awake: bool = False,
    ) -> None:
        self._device = device
        self._line = line
        self._pinned = pinned
        self._units = units
        self._engine = engine
        self._awake = awake

    def fetch_ahead(self, addresses: NDArray[np.uint64], most_blocks: int) -> Fetched:
        """Fills as many bays as there are, or fewer: no more than so many blocks, and not from
        slots that the bus cannot reach."""
        line, units, batch = self._line, self._units, self._device.batch()
        bays, at_a_time = list[tuple[Bay, Any]](), line.blocks_a_bay(units.pitch)
        of_bays = self._pinned.runs(addresses[:most_blocks], units.nbytes, at_a_time)
        for number, runs in zip(range(BAYS), of_bays, strict=False):
            if runs is None:
                break
            bay, arrived = self._fill(batch, runs, addresses[number * at_a_time :])
            bay.busy = arrived  # for whoever comes next, if nobody takes it
            line.queue(arrived)
            bays.append((bay, arrived))
            if number == 0:  # the bus has nothing to do
                batch.run()
        batch.run()
        return Fetched(self._device, line, units, addresses, bays)

    def scatter(
        self,
        block_ids: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        *,
        verify: bool,
        fetched: Sequence[tuple[Bay, Any]] = (),
    ) -> Scattered:
        """`MOST_BLOCKS` at most. The first of them are in the bays that were fetched."""
        line, units, batch = self._line, self._units, self._device.batch()
        ledger, count, at_a_time = (
            line.take_ledger(),
            len(block_ids),
            line.blocks_a_bay(units.pitch),
        )
        rest = self._pinned.runs(addresses[len(fetched) * at_a_time :], units.nbytes, at_a_time)
        ids, bay, before = None, None, None
        for number, start in enumerate(range(0, count, at_a_time)):
            some = slice(start, min(start + at_a_time, count))
            before, is_fetched = bay.busy if bay is not None else None, number < len(fetched)
            bay, arrived = (
                fetched[number] if is_fetched else self._fill(batch, next(rest), addresses[some])
            )
            if ids is None:  # while the first are on the bus
                batch.run()
                if verify:
                    ledger.begin(batch, line.kernels, count)
                ids = ledger.ids(batch, line.kernels, block_ids)
            batch.after(line.kernels, arrived)
            batch.scatter(
                line.kernels, units, ids[some], bay.memory, ledger.sums[some] if verify else None
            )
            bay.busy = batch.mark(line.kernels)
            if not is_fetched:
                line.queue(bay.busy)
            if (number + 1) % _BAYS_TOGETHER == 0 or not number & (number + 1):
                batch.run()
        if verify:
            ledger.send_sums(batch, line.kernels, count)
        done = batch.mark(line.kernels, urgent=True)
        batch.run()
        return Scattered(ledger, count, None if self._awake else before, done)

    def _fill(
        self, batch: Any, runs: Sequence[Run] | None, addresses: NDArray[np.uint64]
    ) -> tuple[Bay, Any]:
        """The next bay, and when it holds what is in these slots. With no runs, they go through a
        bounce buffer."""
        line, units = self._line, self._units
        self._wait_for_room(batch)
        bay = line.next_bay()
        if bay.busy is not None:
            batch.after(line.copies.stream, bay.busy)
        for address, step, at, rows in runs or [self._bounced(batch, bay, addresses)]:
            place = bay.address + at * units.pitch
            line.copies.to_device(batch, place, units.pitch, address, step, units.nbytes, rows)
        bay.bounced = arrived = line.copies.mark(batch)
        return bay, arrived

    def _wait_for_room(self, batch: Any) -> None:
        """Waits, without the interpreter, while too much is queued for the bus."""
        earlier = self._line.first_of_too_many()
        if earlier is None:
            return
        if self._engine:  # that is what it waits for, too
            batch.run()
            self._engine.wait()
        batch.wait(earlier, awake=self._awake)

    def _bounced(self, batch: Any, bay: Bay, addresses: NDArray[np.uint64]) -> Run:
        """The same bytes where the bus can reach them."""
        batch.run()
        if bay.bounced is not None:
            self._device.wait(bay.bounced)
        bounce, pitch, nbytes = self._line.bounce(bay), self._units.pitch, self._units.nbytes
        move_rows(bounce, pitch, addresses, nbytes, to_slots=False)
        return bounce, pitch, 0, len(addresses)


class Scattering:
    """Blocks on their way into engine memory."""

    def __init__(
        self,
        device: Cuda,
        line: Line,
        units: Units,
        parts: list[Scattered],
        expected: NDArray[np.uint64] | None,
        ready_s: float = 0.0,
    ) -> None:
        self._device = device
        self._line = line
        self._units = units
        self._parts = parts
        self._count = sum(part.blocks for part in parts)
        self._expected = expected
        self.ready_s = ready_s

    def good(self) -> NDArray[np.bool_]:
        """Waits until all are in place; True where the bytes have the checksum expected. A block
        answered False holds bytes that must not be used."""
        self._wait()
        good = np.ones(self._count, dtype=np.bool_)
        if self._expected is not None and self._parts:
            sums = np.concatenate([part.ledger.sums_here(part.blocks) for part in self._parts])
            good = np.equal(self._units.checksums(sums), self._expected)
        self.close()
        return good

    def close(self) -> None:
        """Waits until all are in place."""
        self._wait()
        parts, self._parts = self._parts, []
        for part in parts:
            self._line.give_back(part.ledger)

    def _wait(self) -> None:
        """Asleep for most of it, then awake, because the engine waits for us."""
        for part in self._parts:
            if part.nearly is not None:
                self._device.wait(part.nearly)
            self._device.wait(part.done)
