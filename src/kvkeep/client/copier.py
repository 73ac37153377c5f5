"""Who moves blocks between an engine's memory and slots. For engines in host memory: here; on a
GPU: `kvkeep.gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import RequestError
from kvkeep.kv.copy import gather, move_rows, scatter
from kvkeep.kv.runs import BlockRuns

_BYTES_AT_A_TIME = 16 << 20  # read with a lock held: some two milliseconds


class EvacuatedBlock(Protocol):
    """A copy of a block that the engine took back."""

    nbytes: int

    def free(self) -> None: ...


class StoreCopy(Protocol):
    """Blocks of one piece on their way into slots. `read` takes as many as it can by itself, until
    somebody in another thread calls `halt`; both tell how many. Then for each `at_a_time` that are
    left: `make_room`, `gather`, `deliver`; then `end`. Only `read` and `gather` read engine memory,
    and `gather` never waits long. All has arrived when `sums` or `close` returns; the next reading
    may begin before that."""

    at_a_time: int

    def read(self, block_ids: NDArray[np.int64], addresses: NDArray[np.uint64]) -> int: ...
    def halt(self) -> int: ...

    def make_room(self) -> None: ...
    def gather(self, block_ids: NDArray[np.int64], addresses: NDArray[np.uint64]) -> None: ...
    def deliver(self) -> None: ...
    def put(self, saved: Any, address: int) -> None: ...
    def end(self) -> None: ...
    def sums(self) -> NDArray[np.uint64]: ...
    def close(self) -> None: ...


class LoadCopy(Protocol):
    """Slots on their way into engine blocks. All has arrived when `good` or `close` returns; True
    where the bytes have the checksum expected. A block answered False holds bytes that must not be
    used. `ready_s` is when the engine had done what had to come first, if that was waited for: a
    clock's time, or 0."""

    ready_s: float

    def good(self) -> NDArray[np.bool_]: ...
    def close(self) -> None: ...


class Fetched(Protocol):
    """The first bytes of some slots on their way to the device, if any. `close` waits until they
    are there."""

    def __bool__(self) -> bool: ...
    def close(self) -> None: ...


class Copier(Protocol):
    """Moves blocks between an engine's memory and slots.

    The engine's thread calls `mark`, `fence_reads`, `set_engine_busy`, `evacuate` and, while there
    is no job, `relocate`; the store thread `begin_store`; the load thread `begin_load` and
    `fetch_ahead`. Both threads call `enter` first.

    mark               a point in the engine's work; `wait_for` waits for it and returns whether it
                       had to
    fence_reads        orders the engine's next writes after the reads that have begun
    set_engine_busy    whether copies leave gaps for the engine's own; they do unless it is idle
    relocate           the blocks are in this memory from now on; with none the copier refers to
                       none
    fetch_ahead        begins to copy slots before the blocks are known; `begin_load` of the same
                       slots continues. None: the device cannot do that
    pool_registration  a `PoolRegistration` to run in a thread of its own, where a device needs one
    """

    # How large the parts of a store are, about. One block that is lost, or one server that goes,
    # costs a part.
    whole_bytes: int  # no larger than that, it goes in one
    first_bytes: int  # else: no larger than `whole_bytes`
    part_bytes: int  # the others

    def mark(self) -> Any: ...
    def fence_reads(self) -> None: ...
    def set_engine_busy(self, busy: bool) -> None: ...
    def relocate(self, pieces: Sequence[BlockRuns]) -> None: ...
    def evacuate(self, piece: int, block_ids: NDArray[np.int64]) -> Sequence[EvacuatedBlock]: ...
    def enter(self) -> None: ...
    def wait_for(self, mark: Any) -> bool: ...
    def begin_store(self, piece: int, *, verify: bool, ready: Any) -> StoreCopy: ...
    def begin_load(
        self,
        piece: int,
        block_ids: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        expected: NDArray[np.uint64] | None,
        ready: Sequence[Any] = (),
        ahead: Any = None,  # what `fetch_ahead` gave
    ) -> LoadCopy: ...
    def fetch_ahead(self, piece: int, addresses: NDArray[np.uint64]) -> Fetched | None: ...
    def pool_registration(self, connection: Any) -> Any: ...


class HostCopier:
    """For engines in host memory. What the engine did, it has done: there is nothing to wait
    for."""

    whole_bytes, first_bytes, part_bytes = 32 << 20, 32 << 20, 256 << 20

    def __init__(self, pieces: Sequence[BlockRuns]) -> None:
        self.relocate(pieces)

    def relocate(self, pieces: Sequence[BlockRuns]) -> None:
        assert all(runs.device == "cpu" for runs in pieces)
        self._pieces = pieces

    def mark(self) -> None:
        return None

    def fence_reads(self) -> None:
        """Nothing: what was read was read with a lock held."""

    def set_engine_busy(self, busy: bool) -> None:
        """Nothing: memory is nobody's alone."""

    def enter(self) -> None:
        """Nothing: every thread has the memory."""

    def wait_for(self, mark: None) -> bool:
        return False

    def evacuate(self, piece: int, block_ids: NDArray[np.int64]) -> list[HostEvacuatedBlock]:
        runs = self._pieces[piece]
        rows = np.empty((len(block_ids), runs.nbytes), dtype=np.uint8)
        sums = gather(runs, block_ids, row_addresses(rows), verify=True)
        assert sums is not None
        return [
            HostEvacuatedBlock(row, value) for row, value in zip(rows, sums.tolist(), strict=True)
        ]

    def begin_store(self, piece: int, *, verify: bool, ready: Any) -> HostStoreCopy:
        return HostStoreCopy(self._pieces[piece], verify)

    def begin_load(
        self,
        piece: int,
        block_ids: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        expected: NDArray[np.uint64] | None,
        ready: Sequence[Any] = (),
        ahead: Any = None,
    ) -> HostLoadCopy:
        return HostLoadCopy(scatter(self._pieces[piece], block_ids, addresses, expected))

    def fetch_ahead(self, piece: int, addresses: NDArray[np.uint64]) -> Fetched | None:
        return None  # there is no bus to cross

    def pool_registration(self, connection: Any) -> None:
        """None: a CPU reaches the pool as soon as it is mapped."""


class HostLoadCopy:
    ready_s = 0.0

    def __init__(self, good: NDArray[np.bool_]) -> None:
        self._good = good

    def good(self) -> NDArray[np.bool_]:
        return self._good

    def close(self) -> None:
        """All has arrived before it was made."""


class HostEvacuatedBlock:
    def __init__(self, row: NDArray[np.uint8], checksum: int) -> None:
        self.row = row
        self.checksum = checksum
        self.nbytes = row.nbytes

    def free(self) -> None:
        """Nothing: it goes with the last who knows it."""


class HostStoreCopy:
    def __init__(self, runs: BlockRuns, verify: bool) -> None:
        self._runs = runs
        self._verify = verify
        self._sums: list[NDArray[np.uint64]] = []
        self.at_a_time = max(1, _BYTES_AT_A_TIME // runs.nbytes)

    def read(self, block_ids: NDArray[np.int64], addresses: NDArray[np.uint64]) -> int:
        """None: they are read with a lock held, a few at a time."""
        return 0

    def halt(self) -> int:
        return 0

    def make_room(self) -> None:
        """There always is."""

    def gather(self, block_ids: NDArray[np.int64], addresses: NDArray[np.uint64]) -> None:
        sums = gather(self._runs, block_ids, addresses, verify=self._verify)
        self._sums.append(np.zeros(len(block_ids), dtype=np.uint64) if sums is None else sums)

    def deliver(self) -> None:
        """It is in place already."""

    def put(self, saved: Any, address: int) -> None:
        move_rows(
            saved.row.ctypes.data,
            0,
            np.array([address], dtype=np.uint64),
            saved.nbytes,
            to_slots=True,
        )
        self._sums.append(np.array([saved.checksum if self._verify else 0], dtype=np.uint64))

    def end(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nor then."""

    def sums(self) -> NDArray[np.uint64]:
        return np.concatenate(self._sums) if self._sums else np.zeros(0, dtype=np.uint64)


def copier_for(pieces: Sequence[BlockRuns], staging_bytes: int) -> Copier:
    """The one for where these pieces are. RequestError if they are not all in one place, or there
    is none."""
    places = {runs.device for runs in pieces}
    if len(places) > 1:
        raise RequestError(
            "bad_layer",
            f"an engine's layers are in several places: {sorted(places)}",
            field="layers",
        )
    if places == {"cpu"}:
        return HostCopier(pieces)
    try:
        from kvkeep.gpu.copier import GpuCopier
    except ImportError as error:
        problem = f"blocks on a GPU cannot be moved: {error}"
        raise RequestError("bad_layer", problem, field="layers", hint="install triton") from error
    return GpuCopier(pieces, staging_bytes)


def row_addresses(buffer: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The address of each row of a C-contiguous array."""
    return np.uint64(buffer.ctypes.data) + np.arange(len(buffer), dtype=np.uint64) * np.uint64(
        buffer.strides[0]
    )
