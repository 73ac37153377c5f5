"""The store of one piece of blocks, part by part: while one is copied the server is asked for the next one's slots, and
while that one is read the one before is still on its way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.calls import Call
from kvkeep.client.copier import row_addresses
from kvkeep.client.replies import Plan, read_plan
from kvkeep.client.requests import Stored, StoreRequest
from kvkeep.client.sources import Sources
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.wire import messages as m

if TYPE_CHECKING:
    from kvkeep.client.transfer import Transfer

_BYTES_A_PART = 256 << 20  # what one block that is lost, or one server that goes, costs at most
_BYTES_OF_THE_FIRST = 32 << 20  # the sooner the server answers
_BLOCKS_A_PART = 1024


@dataclass(frozen=True)
class _Part:
    """Blocks that were read, and may still be on their way into the slots that `call` gave."""

    call: Call
    checksums: Callable[[], NDArray[np.uint64]]  # waits for them
    close: Callable[[], None]  # likewise


class PieceStore:
    """Of one request: `begin`, `copy`, `finish`. Between two of them another store may be begun, copied or finished."""

    def __init__(self, transfer: Transfer, request: StoreRequest, piece: int, sources: Sources) -> None:
        self._transfer = transfer
        self._connection = transfer.connection
        self._deadline_ms = self._connection.options.store_deadline_ms
        self._request = request
        self._piece = piece
        self._sources = sources
        self._begun: list[Call] = []  # not yet completed
        self._under_way: list[_Part] = []
        self._completions: list[tuple[Call, Call]] = []
        self._parts_left: Iterator[tuple[int, int]] = iter(())
        self._ahead: tuple[tuple[int, int], Call] | None = None
        self._takes_all = False

    def begin(self) -> None:
        """Asks the server for the first slots."""
        self._parts_left = self._parts()
        self._ahead = self._prepare(next(self._parts_left))

    def copy(self, before_the_last: Callable[[], None] = lambda: None) -> None:
        """Copies all that the server takes; the last of it may still be on its way. `before_the_last` is called when
        the server has nothing more to do for this store: another one may begin."""
        try:
            self._takes_all = self._copy_parts(before_the_last)
        except BaseException:  # guard: raised again; slots go back when no copy goes there any more
            self._give_back()
            raise

    def finish(self) -> Stored:
        """Waits for what is on its way. Slots that are not filled are given back."""
        try:
            self._complete()
        finally:
            self._give_back()
        written, all_done = self._count()
        return Stored(written, self._takes_all and all_done)

    def _give_back(self) -> None:
        for part in self._under_way:
            part.close()
        for call in self._begun:
            self._connection.give_up(call)
        self._under_way, self._begun = [], []

    def _copy_parts(self, before_the_last: Callable[[], None]) -> bool:
        """Whether the server takes all of it."""
        complete, ahead = True, self._ahead
        while ahead is not None:
            part, call = ahead
            plan = read_plan(self._connection.wait(call), part[1] - part[0])
            complete &= plan is not None and not plan.refused
            if plan is None:
                break
            positions = part[0] + plan.positions.astype(np.int64)
            self._sources.skip(self._piece, *part, positions)
            if plan.refused:
                self._connection.counters.fail("orphan" if plan.orphan else "no_room")
            # Ask for the next part's slots now: the server works while this part is copied.
            following = next(self._parts_left, None) if not plan.refused else None
            ahead = self._prepare(following) if following else None
            if ahead is None:
                before_the_last()
            if not len(plan.positions):
                self._begun.remove(call)
                continue
            written = self._write(call, positions, plan)
            if written is None:
                return False
            self._under_way.append(written)
            self._complete(leave=1)  # the one before: all its blocks have arrived, or nearly so
        return complete

    def _complete(self, leave: int = 0) -> None:
        """Says that what was under way has arrived, all but the last ones."""
        while len(self._under_way) > leave:
            part = self._under_way[0]
            checksums = part.checksums()
            part.close()
            self._under_way.pop(0)
            message = m.CompleteStore(part.call.number, checksums.tobytes())
            self._completions.append((part.call, self._connection.call(message, self._deadline_ms)))
            self._begun.remove(part.call)

    def _count(self) -> tuple[int, bool]:
        stored, all_done = 0, True
        for written, completion in self._completions:
            done = self._connection.wait(completion)
            if isinstance(done, m.Done):
                stored += done.count
            else:
                self._connection.give_up(written)
                all_done = False
        return stored, all_done

    def _parts(self) -> Iterator[tuple[int, int]]:
        """At least one."""
        count, nbytes = self._request.blocks, self._transfer.nbytes(self._piece)
        welcome = self._connection.welcome
        most = min(_BLOCKS_A_PART, welcome.limits.blocks_per_request if welcome else _BLOCKS_A_PART)
        start, size = 0, max(1, min(most, _BYTES_OF_THE_FIRST // nbytes))
        while start < max(count, 1):
            yield start, min(start + size, count)
            start, size = start + size, max(1, min(most, _BYTES_A_PART // nbytes))

    def _prepare(self, part: tuple[int, int]) -> tuple[tuple[int, int], Call]:
        start, stop = part
        request, layout = self._request, self._connection.layout
        message = m.PrepareStore(
            tenant=request.tenant,
            layout=layout.layout if layout else 0,
            shard=self._transfer.shard(self._piece),
            parent=request.keys[(start - 1) * KEY_BYTES : start * KEY_BYTES] if start else request.parent,
            keys=request.keys[start * KEY_BYTES : stop * KEY_BYTES],
            priority=request.priority,
            ttl_ms=request.ttl_ms,
        )
        call = self._connection.call(message, self._deadline_ms)
        self._begun.append(call)
        return part, call

    def _write(self, call: Call, positions: NDArray[np.int64], plan: Plan) -> _Part | None:
        """Copies the blocks that the plan names. None: they could not be written."""
        if len(plan.slots):
            return self._into_slots(call, positions, plan)
        checksums = self._into_puts(call, positions)
        return None if checksums is None else _Part(call, lambda: checksums, lambda: None)

    def _into_slots(self, call: Call, positions: NDArray[np.int64], plan: Plan) -> _Part | None:
        with contextlib.ExitStack() as stack:
            place = self._transfer.addresses(self._piece, plan.slots, call.epoch, call.session)
            addresses = stack.enter_context(place)
            if addresses is None:
                return None
            copy = self._sources.copy(self._piece, positions, addresses, verify=self._connection.verify)
            if copy is None:
                self._connection.counters.fail("withdrawn")
                return None
            stack.callback(copy.close)
            return _Part(call, copy.checksums, stack.pop_all().close)  # the memory stays ours until then

    def _into_puts(self, call: Call, positions: NDArray[np.int64]) -> NDArray[np.uint64] | None:
        """Network plane: gathers into a buffer of our own and sends it, as many blocks at a time as a frame takes."""
        nbytes, at_a_time = self._transfer.nbytes(self._piece), self._transfer.blocks_a_message(self._piece)
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
