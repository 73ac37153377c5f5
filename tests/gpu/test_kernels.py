"""Kernels move every byte to its place, and their checksum is the CPU's, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvkeep.errors import RequestError
from kvkeep.gpu.kernels import Units, move
from kvkeep.kv.checksum import checksum
from kvkeep.kv.runs import BlockRuns

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS = 7


def engine(
    shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.uint8, seed: int = 0
) -> list[torch.Tensor]:
    """Layers [blocks, *shape] of random bytes."""
    random = torch.Generator().manual_seed(seed)
    wide = torch.empty(0, dtype=dtype).element_size()
    layers = []
    for shape in shapes:
        data = torch.randint(
            0, 256, (BLOCKS, *shape[:-1], shape[-1] * wide), dtype=torch.uint8, generator=random
        )
        layers.append(data.view(dtype).to(DEVICE))
    return layers


def bytes_of(
    runs: BlockRuns, layers: list[torch.Tensor], block: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A block's bytes in the order of a slot, found without any kernel."""
    parts = []
    for layer in layers:
        one = layer[block]
        order = sorted(range(one.dim()), key=lambda dim: -one.stride(dim))
        parts.append(one.permute(order).contiguous().cpu().view(-1).view(torch.uint8).numpy())
    data = np.concatenate(parts)
    assert len(data) == runs.nbytes
    return data


def check(
    layers: list[torch.Tensor], *, by_words: bool, blocks: tuple[int, ...] = (5, 0, 6)
) -> None:
    runs = BlockRuns.of(layers)
    units = Units.of(runs, torch.device(DEVICE))
    assert units.by_words == by_words
    count, words = len(blocks), units.pitch // 8
    staging = torch.full((count + 1, words), -1, dtype=torch.int64, device=DEVICE)
    sums = torch.zeros(count + 1, dtype=torch.int64, device=DEVICE)
    expected = [bytes_of(runs, layers, block) for block in blocks]

    units.gather(torch.tensor(blocks, device=DEVICE), staging, sums[:count])
    gathered = staging.cpu().numpy().view(np.uint8)
    assert all(
        np.array_equal(row[: runs.nbytes], one)
        for row, one in zip(gathered, expected, strict=False)
    )
    assert units.checksums(sums[:count].cpu().numpy().view(np.uint64)).tolist() == [
        checksum(one) for one in expected
    ]
    assert (gathered[count:] == 255).all() and sums[-1] == 0, "wrote beyond its place"

    spoiled = staging.cpu().numpy().view(np.uint8)
    spoiled[:, runs.nbytes :] = 0x5A  # what fills up the last word is no part of the block
    staging = torch.from_numpy(spoiled.view(np.int64)).to(DEVICE)
    others = [1, 2, 3][:count]
    untouched = {
        block: bytes_of(runs, layers, block) for block in range(BLOCKS) if block not in others
    }
    again = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    units.scatter(torch.tensor(others, device=DEVICE), staging, again)
    assert torch.equal(again, sums[:count])
    for block, one in zip(others, expected, strict=True):
        assert np.array_equal(bytes_of(runs, layers, block), one)
    assert all(
        np.array_equal(bytes_of(runs, layers, block), data) for block, data in untouched.items()
    )


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 33])
def test_whole_rows(rows: int) -> None:
    check(engine([(rows, 4096)], seed=rows), by_words=True)


def test_layers_apart() -> None:
    check(engine([(2, 4, 64)] * 5, torch.bfloat16), by_words=True)


def test_rows_of_the_checksum_that_cross_layers_as_those_of_mla_do() -> None:
    check(engine([(16, 576)] * 3, torch.bfloat16), by_words=True)


def test_keys_and_values_apart() -> None:
    layers = [
        tensor.transpose(0, 1).contiguous().transpose(0, 1)
        for tensor in engine([(2, 16, 8, 16)] * 2, torch.float16)
    ]
    assert len(BlockRuns.of(layers).length) == 4
    check(layers, by_words=True)


def test_heads_first_in_name_and_last_in_memory() -> None:
    """As vLLM has it on an H200: (blocks, heads, tokens, 2 * head size), tokens outside of heads in
    memory."""
    layers = [tensor.transpose(1, 2) for tensor in engine([(16, 8, 32)] * 3, torch.bfloat16)]
    check(layers, by_words=True)


def test_layers_of_several_sizes() -> None:
    check(engine([(24, 8), (5, 40), (3, 16)]), by_words=True)


def test_blocks_with_gaps_between() -> None:
    memory = engine([(128,)])[0]
    check([memory[:, :96]], by_words=True)


@pytest.mark.parametrize("shapes", [[(37,)], [(5, 3), (7,)], [(4093,), (1,)], [(8193,)]])
def test_sizes_that_are_no_words(shapes: list[tuple[int, ...]]) -> None:
    check(engine(shapes), by_words=False)


def test_words_that_are_not_aligned() -> None:
    memory = engine([(80,)])[0]
    check([memory[:, 3:67]], by_words=False)


@pytest.mark.parametrize("value", [0, 0x7F, 0x80, 0xFF])
def test_extreme_words_do_not_overflow_differently(value: int) -> None:
    layers = engine([(5, 4096)])
    layers[0].fill_(value)
    check(layers, by_words=True)


def test_without_a_checksum_none_is_made() -> None:
    layers = engine([(64,)])
    units = Units.of(BlockRuns.of(layers), torch.device(DEVICE))
    staging = torch.full((8,), -1, dtype=torch.int64, device=DEVICE)
    units.gather(torch.tensor([2], device=DEVICE), staging, None)
    assert staging.view(torch.uint8).cpu().tolist() == layers[0][2].cpu().tolist()


def test_blocks_cut_too_small_are_refused() -> None:
    layers = engine([(70_001,), (70_000,)])
    with pytest.raises(RequestError, match="no greater common measure than 1 bytes"):
        Units.of(BlockRuns.of(layers), torch.device(DEVICE))


@pytest.mark.parametrize("count", [1, 1023, 1024, 3000])
def test_words_are_moved_and_no_more(count: int) -> None:
    here = torch.randint(
        -(2**63), 2**63 - 1, (count + 2,), dtype=torch.int64, pin_memory=DEVICE == "cuda"
    )
    there, back = (
        torch.full((count + 2,), -1, dtype=torch.int64, device=DEVICE),
        torch.full_like(here, -1),
    )
    back = back.pin_memory() if DEVICE == "cuda" else back
    move(there[1:], here[1:-1])
    move(back[1:], there[1:-1])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(back[1:-1], here[1:-1])
    assert back[0] == back[-1] == there[0] == there[-1] == -1
