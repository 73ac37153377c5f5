"""gather and scatter: the right bytes in the right place, on both roads, and damage found on the
way back."""

from __future__ import annotations

import _ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvkeep.errors import RequestError
from kvkeep.kv import native
from kvkeep.kv.checksum import checksum
from kvkeep.kv.copy import gather, move_rows, scatter
from kvkeep.kv.runs import BlockRuns

torch: Any = pytest.importorskip("torch")


@pytest.fixture(params=["numpy", *native.INSTRUCTION_SETS])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "numpy":
        monkeypatch.setattr(native, "available", False)
    elif not native.available:
        pytest.skip("the C kernel is not built")
    elif native.use(request.param) != request.param:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    if native.available:
        native.use(native.INSTRUCTION_SETS[-1])


@dataclass
class Slots:
    """A pool of slots, with guard bytes after each; `shift` moves them off alignment."""

    count: int
    nbytes: int
    shift: int = 0

    def __post_init__(self) -> None:
        self.step = self.nbytes + 64 + -self.nbytes % 64
        self.memory = np.full(self.count * self.step + 128, 0xEE, dtype=np.uint8)
        self.start = -self.memory.ctypes.data % 64 + self.shift

    @property
    def addresses(self) -> NDArray[np.uint64]:
        first = self.memory.ctypes.data + self.start
        return np.array([first + i * self.step for i in range(self.count)], dtype=np.uint64)

    def bytes_of(self, i: int) -> NDArray[np.uint8]:
        at = self.start + i * self.step
        return self.memory[at : at + self.nbytes]

    def guards_untouched(self) -> bool:
        outside = np.ones(len(self.memory), dtype=bool)
        for i in range(self.count):
            at = self.start + i * self.step
            outside[at : at + self.nbytes] = False
        return bool((self.memory[outside] == 0xEE).all())


def fill(layers: list[Any], seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for layer in layers:
        if isinstance(layer, np.ndarray):
            layer[...] = rng.integers(0, 200, layer.shape)
        else:
            noise = torch.from_numpy(rng.integers(0, 100, tuple(layer.shape)).astype(np.float32))
            layer.copy_(noise)


def block_bytes(layers: list[Any], block: int, block_dim: int) -> bytes:
    """What a slot must hold, by indexing alone: each layer's block in physical order."""
    out = b""
    for layer in layers:
        tensor = torch.from_numpy(layer) if isinstance(layer, np.ndarray) else layer
        part = tensor.select(block_dim, block)
        order = sorted(range(part.dim()), key=lambda d: -part.stride(d) if part.shape[d] > 1 else 0)
        wide = [d for d in order if part.shape[d] > 1]
        part = part.permute(*wide, *[d for d in range(part.dim()) if d not in wide]).contiguous()
        out += part.view(torch.uint8).numpy().tobytes()
    return out


LAYOUTS: dict[str, tuple[Any, int]] = {
    "one layer": (lambda: [torch.zeros(7, 16, 4, 32)], 0),
    "many layers of 2 KiB": (
        lambda: [torch.zeros(7, 16, 64, dtype=torch.bfloat16) for _ in range(9)],
        0,
    ),
    "keys and values apart": (
        lambda: [torch.zeros(2, 7, 16, 96, dtype=torch.bfloat16) for _ in range(3)],
        1,
    ),
    "heads first": (lambda: [torch.zeros(7, 4, 16, 32).permute(0, 2, 1, 3) for _ in range(3)], 0),
    "fp8": (lambda: [torch.zeros(7, 16, 656, dtype=torch.float8_e4m3fn) for _ in range(3)], 0),
    "odd lengths": (lambda: [np.zeros((7, n), np.uint8) for n in (1, 3, 4095, 8, 4097, 61)], 0),
    "lines but not rows": (
        lambda: [torch.zeros(7, n, dtype=torch.uint8) for n in (64, 4032, 192, 9216)],
        0,
    ),
    "gaps": (lambda: [np.zeros((7, 6, 50), np.uint16)[:, ::2, 3:40] for _ in range(2)], 0),
    "blocks last": (lambda: [torch.zeros(12, 7, dtype=torch.int16)], 1),
    "big": (lambda: [torch.zeros(7, 70_000, dtype=torch.uint8) for _ in range(2)], 0),
}


@pytest.mark.parametrize("shift", [0, 1, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip(road: str, layout: str, shift: int) -> None:
    make, block_dim = LAYOUTS[layout]
    layers, back = make(), make()
    fill(layers)
    source, target = BlockRuns.of(layers, block_dim), BlockRuns.of(back, block_dim)
    slots = Slots(4, source.nbytes, shift)
    ids = np.array([5, 0, 6, 2], dtype=np.int64)

    sums = gather(source, ids, slots.addresses, verify=True)
    assert sums is not None
    for i, block in enumerate(ids.tolist()):
        assert slots.bytes_of(i).tobytes() == block_bytes(layers, block, block_dim)
        assert checksum(slots.bytes_of(i)) == int(sums[i])
    before = slots.memory.copy()
    assert gather(source, ids, slots.addresses, verify=False) is None
    assert np.array_equal(slots.memory, before)
    assert slots.guards_untouched()

    assert scatter(target, ids[::-1], slots.addresses[::-1], sums[::-1]).all()
    for block in range(7):
        want = block_bytes(layers, block, block_dim) if block in ids else bytes(source.nbytes)
        assert block_bytes(back, block, block_dim) == want
    assert np.array_equal(slots.memory, before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unchecked_scatter_copies_the_same(road: str, layout: str) -> None:
    make, block_dim = LAYOUTS[layout]
    layers, back = make(), make()
    fill(layers)
    source, target = BlockRuns.of(layers, block_dim), BlockRuns.of(back, block_dim)
    slots, ids = Slots(7, source.nbytes), np.arange(7)
    gather(source, ids, slots.addresses, verify=False)
    assert scatter(target, ids, slots.addresses, None).all()
    for block in range(7):
        assert block_bytes(back, block, block_dim) == block_bytes(layers, block, block_dim)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_is_found_where_it_is(road: str, layout: str) -> None:
    make, block_dim = LAYOUTS[layout]
    layers = make()
    fill(layers)
    runs = BlockRuns.of(layers, block_dim)
    slots, ids = Slots(7, runs.nbytes), np.arange(7)
    sums = gather(runs, ids, slots.addresses, verify=True)
    for at in (0, runs.nbytes // 2, runs.nbytes - 1):
        slots.bytes_of(3)[at] ^= 0x10
        assert scatter(runs, ids, slots.addresses, sums).tolist() == [
            True,
            True,
            True,
            False,
            True,
            True,
            True,
        ]
        slots.bytes_of(3)[at] ^= 0x10
    assert scatter(runs, ids, slots.addresses, sums).all()


def test_swapped_layers_and_stale_pieces_are_found(road: str) -> None:
    layers = [torch.zeros(2, 16, 64, dtype=torch.bfloat16) for _ in range(4)]
    fill(layers)
    runs, slots = BlockRuns.of(layers), Slots(2, 4 * 2048)
    sums = gather(runs, np.arange(2), slots.addresses, verify=True)
    pieces = slots.bytes_of(0).reshape(4, 2048)
    for i in range(4):
        for j in range(i):
            pieces[[i, j]] = pieces[[j, i]]
            assert scatter(runs, np.arange(2), slots.addresses, sums).tolist() == [False, True]
            pieces[[i, j]] = pieces[[j, i]]
    pieces[2] = slots.bytes_of(1).reshape(4, 2048)[2]
    assert scatter(runs, np.arange(2), slots.addresses, sums).tolist() == [False, True]


def test_more_strips_than_one_window(road: str) -> None:
    layers = [np.zeros((3, 192), np.uint8) for _ in range(301)]
    fill(layers)
    runs, slots = BlockRuns.of(layers), Slots(3, 301 * 192)
    sums = gather(runs, np.arange(3), slots.addresses, verify=True)
    assert sums is not None
    assert [checksum(slots.bytes_of(i)) for i in range(3)] == sums.tolist()
    assert slots.bytes_of(2).tobytes() == b"".join(layer[2].tobytes() for layer in layers)


@pytest.mark.parametrize("nbytes", [1, 64, 1000, 4096, 10_000])
@pytest.mark.parametrize("to_slots", [True, False])
def test_rows_of_plain_memory_go_into_slots_and_back(
    road: str, nbytes: int, to_slots: bool
) -> None:
    slots, pitch = Slots(5, nbytes, shift=3), nbytes + 24
    rows = np.random.default_rng(1).integers(0, 256, (5, pitch), dtype=np.uint8)
    if not to_slots:
        for i in range(5):
            slots.bytes_of(i)[:] = rows[4 - i, :nbytes]
    before = rows.copy()
    move_rows(rows.ctypes.data, pitch, slots.addresses, nbytes, to_slots=to_slots)
    for i in range(5):
        assert np.array_equal(slots.bytes_of(i), before[i if to_slots else 4 - i, :nbytes])
        assert np.array_equal(rows[i, :nbytes], slots.bytes_of(i))
    assert np.array_equal(rows[:, nbytes:], before[:, nbytes:]), "what lies between rows stays"
    move_rows(rows.ctypes.data, pitch, slots.addresses[:0], nbytes, to_slots=to_slots)


def test_nothing_to_copy(road: str) -> None:
    runs = BlockRuns.of([np.zeros((3, 64), np.uint8)])
    none = np.array([], dtype=np.int64)
    sums = gather(runs, none, none.astype(np.uint64), verify=True)
    assert sums is not None
    assert sums.tolist() == []
    assert scatter(runs, none, none.astype(np.uint64), sums).tolist() == []


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 3], "block 3 does not exist: the engine has blocks 0 to 2"),
        ([-1, 0], "block -1 does not exist"),
        ([0], "1 blocks, but 2 slots"),
        ([0.0, 1.0], "block_ids must be a list of integers"),
        ([[0], [1]], "block_ids must be a list of integers"),
    ],
)
def test_bad_blocks_are_refused_and_nothing_is_copied(
    road: str, ids: list[Any], message: str
) -> None:
    layer = np.ones((3, 64), np.uint8)
    runs, slots = BlockRuns.of([layer]), Slots(2, 64)
    with pytest.raises(RequestError, match=message):
        gather(runs, np.array(ids), slots.addresses, verify=True)
    with pytest.raises(RequestError, match=message):
        scatter(runs, np.array(ids), slots.addresses, None)
    assert (slots.memory == 0xEE).all()
    assert (layer == 1).all()


def test_bad_slots_and_checksums_are_refused() -> None:
    layer = np.ones((3, 64), np.uint8)
    runs, slots = BlockRuns.of([layer]), Slots(2, 64)
    with pytest.raises(RequestError, match="address"):
        gather(runs, np.arange(2), np.array([0, slots.addresses[1]], dtype=np.uint64), verify=False)
    with pytest.raises(RequestError, match="1 checksums"):
        scatter(runs, np.arange(2), slots.addresses, np.zeros(1, dtype=np.uint64))
    assert (layer == 1).all()


def test_the_environment_turns_the_kernel_off() -> None:
    program = "from kvkeep.kv import checksum, native; print(native.available, checksum.checksum(b'kvkeep'))"
    environment = {**os.environ, "KVKEEP_NATIVE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", str(0x2D015B9CD6A825E8)]


def test_a_kernel_of_another_version_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Such as one that an earlier version of the sources has left in the tree."""
    (tmp_path / "_native.so").symlink_to(_ctypes.__file__)  # a library with other functions
    monkeypatch.delenv("KVKEEP_NATIVE", raising=False)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    assert native._load() is None
    assert "cannot be loaded" in caplog.text
