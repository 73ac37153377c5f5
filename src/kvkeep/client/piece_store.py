"""The store of one piece of blocks, part by part: while one is copied the server is asked for the
next ones' slots, and while that one is read the one before is still on its way."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.calls import Call
from kvkeep.client.copier import row_addresses
from kvkeep.client.rank_memory import RankMemory
from kvkeep.client.replies import Plan, read_plan
from kvkeep.client.requests import Stored, StoreRequest
from kvkeep.client.sources import Sources
from kvkeep.errors import PoolError
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.wire import messages as m

_BLOCKS_A_PART = 512  # the server takes no more in one store
_PARTS_ASKED_FOR = 2  # at a time: a server that is busy with others must not leave the bus idle


@dataclass(frozen=True)
class _Part:
    """Blocks that were read, and may still be on their way into the slots that `call` gave."""

    call: Call
    checksums: Callable[[], NDArray[np.uint64]]  # waits for them
    close: Callable[[], None]  # likewise


class PieceStore:
    """Of one request: `begin`, `copy`, `depart`, `finish`. `copy` and `depart` may run in two
    threads at once, and another store may be begun or copied before this one has departed."""

    def __init__(
        self, memory: RankMemory, request: StoreRequest, piece: int, sources: Sources
    ) -> None:
        self._memory = memory
        self._connection = memory.connection
        self._deadline_ms = self._connection.options.store_deadline_ms
        self._request = request
        self._piece = piece
        self._sources = sources
        self._begun: list[Call] = []  # that no copy was begun for
        self._copied: deque[_Part | None] = deque()  # None: there is no more
        self._more = self._connection.threads.Condition()
        self._departed = False
        self._completions: list[tuple[Call, Call]] = []
        self._parts_left: Iterator[tuple[int, int]] = iter(())
        self._ahead: deque[tuple[tuple[int, int], Call]] = deque()  # asked for, in order
        self._takes_all = False

    def begin(self, *, hurry: bool = True, alone: bool = True) -> None:
        """Asks the server for the first slots; in a hurry, for few at first. It answers sooner
        then, but each part costs the engine: a store that is not too large goes in one, unless
        others wait behind it."""
        self._parts_left = self._parts(hurry, alone)
        try:
            self._ask_ahead()
        except BaseException:  # guard: raised again; what was asked for before it goes back
            self.end_copy()
            raise

    def copy(self, before_the_last: Callable[[], None] = lambda: None) -> None:
        """Copies all that the server takes; some of it may still be on its way. `before_the_last`
        is called when the server has been asked for the last slots of this store: another one may
        begin. Slots that nothing is copied to are given back."""
        try:
            self._takes_all = self._copy_parts(before_the_last)
        finally:
            self.end_copy()

    def end_copy(self) -> None:
        """Nothing more is copied."""
        begun, self._begun = self._begun, []
        try:
            for call in begun:
                self._connection.give_up(call)
        finally:  # or who waits for the end would wait for ever
            self._hand_over(None)

    def depart(self) -> None:
        """Waits for what is on its way, until there is no more, and tells the server of it. What
        could not be is given back."""
        self._departed = True
        try:
            while (part := self._next_copied()) is not None:
                self._complete(part)
        except BaseException:  # guard: raised again; slots go back when no copy goes there any more
            while (part := self._next_copied()) is not None:
                part.close()
                self._connection.give_up(part.call)
            raise

    def unanswered(self) -> Call | None:
        """Something that the server was told and has not answered, if any."""
        return next(
            (completion for _, completion in self._completions if not completion.done), None
        )

    def finish(self) -> Stored:
        """Waits for what is on its way, and for the server."""
        if not self._departed:
            self.depart()
        stored, all_done = 0, True
        for written, completion in self._completions:
            done = self._connection.wait(completion)
            if isinstance(done, m.Done):
                stored += done.count
            else:
                self._connection.give_up(written)
                all_done = False
        return Stored(stored, self._takes_all and all_done)

    def _copy_parts(self, before_the_last: Callable[[], None]) -> bool:
        """Whether the server takes all of it."""
        complete = True
        while self._ahead:
            part, call = self._ahead.popleft()
            if not self._ahead:
                before_the_last()  # while the server is at work on this part: nobody waits for that
            plan = read_plan(self._connection.wait(call), part[1] - part[0])
            complete &= plan is not None and not plan.refused
            if plan is None:
                break
            positions = part[0] + plan.positions.astype(np.int64)
            self._sources.skip(self._piece, *part, positions)
            if plan.refused:
                self._connection.counters.fail("orphan" if plan.orphan else "no_room")
                if self._ahead:
                    self._ahead.clear()
                    before_the_last()
            else:
                self._ask_ahead()  # the server works while this part is copied
            if not len(plan.positions):
                self._begun.remove(call)
                continue
            written = self._write(call, positions, plan)
            if written is None:
                return False
            self._begun.remove(call)
            self._hand_over(written)
        return complete

    def _hand_over(self, part: _Part | None) -> None:
        with self._more:
            self._copied.append(part)
            self._more.notify_all()

    def _next_copied(self) -> _Part | None:
        with self._more:
            while not self._copied:
                self._more.wait()
            return self._copied.popleft()

    def _complete(self, part: _Part) -> None:
        """All of it has arrived, and the server is told so."""
        try:
            checksums = part.checksums()
        except BaseException:  # guard: raised again, as above
            part.close()
            self._connection.give_up(part.call)
            raise
        part.close()
        message = m.CompleteStore(part.call.number, checksums.tobytes())
        self._completions.append((part.call, self._connection.call(message, self._deadline_ms)))

    def _parts(self, hurry: bool, alone: bool) -> Iterator[tuple[int, int]]:
        """At least one. If there are several, all but those that come soonest are about as
        large."""
        count, nbytes, copier = (
            self._request.blocks,
            self._memory.nbytes(self._piece),
            self._memory.copier,
        )
        welcome = self._connection.welcome
        most = min(_BLOCKS_A_PART, welcome.limits.blocks_per_request if welcome else _BLOCKS_A_PART)
        soonest = [max(1, min(most, each // nbytes)) for each in copier.first_bytes]
        whole = max(1, min(most, copier.whole_bytes // nbytes))
        if count <= (soonest[-1] if hurry and not alone else whole):
            yield 0, count
            return
        start = 0
        for size in soonest if hurry else ():
            yield start, min(start + size, count)
            start += size
        parts = max(
            round((count - start) * nbytes / copier.part_bytes),
            math.ceil((count - start) / most),
            1,
        )
        size = math.ceil((count - start) / parts)
        while start < count:
            yield start, min(start + size, count)
            start += size

    def _ask_ahead(self) -> None:
        while len(self._ahead) < _PARTS_ASKED_FOR and (part := next(self._parts_left, None)):
            self._ahead.append((part, self._prepare(*part)))

    def _prepare(self, start: int, stop: int) -> Call:
        request = self._request
        message = m.PrepareStore(
            tenant=request.tenant,
            layout=self._connection.layout_number,
            shard=self._memory.shard(self._piece),
            parent=request.keys[(start - 1) * KEY_BYTES : start * KEY_BYTES]
            if start
            else request.parent,
            keys=request.keys[start * KEY_BYTES : stop * KEY_BYTES],
            priority=request.priority,
            ttl_ms=request.ttl_ms,
        )
        call = self._connection.call(message, self._deadline_ms)
        self._begun.append(call)
        return call

    def _write(self, call: Call, positions: NDArray[np.int64], plan: Plan) -> _Part | None:
        """Copies the blocks that the plan names. None: they could not be written."""
        if len(plan.slots):
            return self._into_slots(call, positions, plan)
        checksums = self._into_puts(call, positions)
        return None if checksums is None else _Part(call, lambda: checksums, lambda: None)

    def _into_slots(self, call: Call, positions: NDArray[np.int64], plan: Plan) -> _Part | None:
        with contextlib.ExitStack() as stack:
            place = self._memory.addresses(self._piece, plan.slots, call.epoch, call.session)
            addresses = stack.enter_context(place)
            if addresses is None:
                return None
            try:
                copy = self._sources.copy(
                    self._piece, positions, addresses, verify=self._connection.verify
                )
            except PoolError as error:
                self._memory.was_cut_off(error)
                return None
            if copy is None:
                self._connection.counters.fail("withdrawn")
                return None
            stack.callback(copy.close)
            return _Part(
                call, copy.checksums, stack.pop_all().close
            )  # the memory stays ours until then

    def _into_puts(self, call: Call, positions: NDArray[np.int64]) -> NDArray[np.uint64] | None:
        """Network plane: gathers into a buffer of our own and sends it, as many blocks at a time as
        a frame takes."""
        nbytes, at_a_time = (
            self._memory.nbytes(self._piece),
            self._memory.blocks_a_message(self._piece),
        )
        checksums = np.empty(len(positions), dtype=np.uint64)
        for start in range(0, len(positions), at_a_time):
            some = positions[start : start + at_a_time]
            buffer = np.zeros((len(some), nbytes), dtype=np.uint8)
            copy = self._sources.copy(self._piece, some, row_addresses(buffer), verify=True)
            if copy is None:
                self._connection.counters.fail("withdrawn")
                return None
            checksums[start : start + len(some)] = copy.checksums()
            put = self._connection.call(m.Put(call.number, start), self._deadline_ms, list(buffer))
            if not isinstance(self._connection.wait(put), m.Done):
                return None
        return checksums
