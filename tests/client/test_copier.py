"""Blocks between an engine in host memory and slots; and who does it for engines elsewhere."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvkeep.client.copier import HostCopier, copier_for, row_addresses
from kvkeep.errors import RequestError
from kvkeep.kv.checksum import checksum
from kvkeep.kv.runs import BlockRuns

MIB = 1 << 20

BLOCKS = 10
SIZES = (96, 4097)  # bytes of a block's two pieces


def memories() -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, (BLOCKS, nbytes), dtype=np.uint8) for nbytes in SIZES]


class World:
    def __init__(self) -> None:
        self.engine = memories()
        self.before = memories()
        self.copier = HostCopier([BlockRuns.of([memory]) for memory in self.engine])
        self.slots = [np.full_like(memory, 0xEE) for memory in self.engine]

    def at(self, piece: int, *slots: int) -> NDArray[np.uint64]:
        return row_addresses(self.slots[piece])[list(slots)]


def ids(*block_ids: int) -> NDArray[np.int64]:
    return np.array(block_ids, dtype=np.int64)


@pytest.fixture
def world() -> World:
    return World()


# -- stores


@pytest.mark.parametrize("piece", [0, 1])
def test_what_is_read_is_in_its_slot_with_its_checksum_batch_by_batch(
    world: World, piece: int
) -> None:
    reading = world.copier.begin_store(piece, verify=True, ready=None)
    for block_ids, slots in ((ids(7, 0), (1, 3)), (ids(), ()), (ids(9), (0,))):
        reading.make_room()
        reading.gather(block_ids, world.at(piece, *slots))
        reading.deliver()
    reading.end()
    assert (world.slots[piece][[1, 3, 0]] == world.before[piece][[7, 0, 9]]).all()
    assert (world.slots[piece][[2, *range(4, BLOCKS)]] == 0xEE).all()
    assert reading.sums().tolist() == [checksum(world.before[piece][block]) for block in (7, 0, 9)]
    assert (world.engine[piece] == world.before[piece]).all()
    reading.close()


def test_without_verification_there_is_a_zero_for_each(world: World) -> None:
    (saved,) = world.copier.evacuate(0, ids(4))
    reading = world.copier.begin_store(0, verify=False, ready=None)
    reading.gather(ids(1, 2), world.at(0, 1, 2))
    reading.put(saved, int(world.at(0, 4)[0]))
    assert reading.sums().tolist() == [0, 0, 0]
    assert (world.slots[0][[1, 2, 4]] == world.before[0][[1, 2, 4]]).all()


def test_of_nothing_there_are_no_sums(world: World) -> None:
    reading = world.copier.begin_store(0, verify=True, ready=None)
    reading.end()
    assert (reading.sums().shape, reading.sums().dtype) == ((0,), np.uint64)


@pytest.mark.parametrize(
    ("block_bytes", "at_a_time"),
    [(17 * MIB, 1), (16 * MIB, 1), (9 * MIB, 1), (8 * MIB, 2), (MIB, 16)],
)
def test_a_batch_is_as_large_as_a_lock_may_be_held_and_at_least_one_block(
    block_bytes: int, at_a_time: int
) -> None:
    copier = HostCopier([BlockRuns.of([np.empty((1, block_bytes), dtype=np.uint8)])])
    assert copier.begin_store(0, verify=True, ready=None).at_a_time == at_a_time


def test_what_is_set_aside_stays_as_it_was_whatever_the_engine_does(world: World) -> None:
    saved = world.copier.evacuate(1, ids(8, 2))
    assert [each.nbytes for each in saved] == [SIZES[1]] * 2
    world.engine[1][:] = 0xAA
    reading = world.copier.begin_store(1, verify=True, ready=None)
    reading.gather(ids(), world.at(1))
    for each, slot in zip(saved, (5, 6), strict=True):
        reading.put(each, int(world.at(1, slot)[0]))
        each.free()
    assert (world.slots[1][[5, 6]] == world.before[1][[8, 2]]).all()
    assert reading.sums().tolist() == [checksum(world.before[1][block]) for block in (8, 2)]
    assert world.copier.evacuate(1, ids()) == []


# -- loads


def test_what_is_written_is_checked_and_a_block_that_does_not_match_is_named(world: World) -> None:
    world.slots[1][:] = world.before[1][::-1]
    expected = np.array([checksum(row) for row in world.slots[1][[0, 1, 2]]], dtype=np.uint64)
    expected[1] ^= 1
    scattering = world.copier.begin_load(1, ids(4, 5, 6), world.at(1, 0, 1, 2), expected)
    assert scattering.good().tolist() == [True, False, True]
    assert (world.engine[1][[4, 6]] == world.slots[1][[0, 2]]).all()
    others = [block for block in range(BLOCKS) if block not in (4, 5, 6)]
    assert (world.engine[1][others] == world.before[1][others]).all()


def test_without_checksums_to_expect_all_is_good(world: World) -> None:
    scattering = world.copier.begin_load(0, ids(4, 5), world.at(0, 0, 1), None)
    scattering.close()
    assert scattering.good().tolist() == [True, True]
    assert (world.engine[0][[4, 5]] == 0xEE).all()
    assert world.copier.begin_load(0, ids(), world.at(0), None).good().tolist() == []


# -- both


@pytest.mark.parametrize("block", [BLOCKS, -1, 1 << 40])
def test_a_block_that_the_engine_does_not_have_is_an_error_and_nothing_is_touched(
    world: World, block: int
) -> None:
    reading = world.copier.begin_store(0, verify=True, ready=None)
    addresses = world.at(0, 0, 1)
    attempts = [
        lambda: reading.gather(ids(0, block), addresses),
        lambda: world.copier.begin_load(0, ids(0, block), addresses, None),
        lambda: world.copier.evacuate(0, ids(0, block)),
    ]
    for attempt in attempts:
        with pytest.raises(RequestError, match="does not exist"):
            attempt()
    assert (world.engine[0] == world.before[0]).all() and (world.slots[0] == 0xEE).all()


def test_in_host_memory_nobody_waits_for_anything(world: World) -> None:
    assert world.copier.mark() is None
    world.copier.fence_reads()
    world.copier.enter()
    assert world.copier.pool_registration(None) is None


def test_rows_are_addressed_where_they_lie() -> None:
    for shape in ((3, 17), (1, 1), (0, 5)):
        buffer = np.zeros(shape, dtype=np.uint8)
        assert row_addresses(buffer).tolist() == [buffer[at:].ctypes.data for at in range(shape[0])]
        assert row_addresses(buffer).dtype == np.uint64


# -- which one


def piece_on(device: str) -> Any:
    return SimpleNamespace(device=device, nbytes=96)


def test_pieces_in_host_memory_get_the_one_for_it() -> None:
    assert isinstance(copier_for([BlockRuns.of([memory]) for memory in memories()], 1), HostCopier)


@pytest.mark.parametrize("devices", [("cpu", "cuda:0"), ("cuda:0", "cuda:1")])
def test_pieces_in_several_places_are_refused(devices: tuple[str, str]) -> None:
    with pytest.raises(RequestError, match="in several places") as caught:
        copier_for([piece_on(device) for device in devices], 1)
    assert caught.value.field == "layers" and all(device in str(caught.value) for device in devices)


def test_pieces_on_a_gpu_get_the_one_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "kvkeep.gpu.copier", SimpleNamespace(GpuCopier=lambda *given: given)
    )  # type: ignore[arg-type]
    pieces = [piece_on("cuda:1"), piece_on("cuda:1")]
    assert copier_for(pieces, 77) == (pieces, 77)


def test_without_a_compiler_for_it_a_gpu_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kvkeep.gpu.copier", None)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="cannot be moved") as caught:
        copier_for([piece_on("cuda:0")], 1)
    assert caught.value.hint == "install triton"
