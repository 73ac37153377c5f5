"""The GPU's checksum is the CPU's, bit for bit. Needs a GPU (or TRITON_INTERPRET=1, which runs it slowly without)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from kvkeep.errors import RequestError
from kvkeep.kv.checksum import checksum as on_cpu

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("CUDA is not available", allow_module_level=True)

from kvkeep.gpu.checksum import checksum  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"


def check(data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    got = checksum(torch.from_numpy(data).to(DEVICE)).cpu().numpy().view(np.uint64)
    assert got.tolist() == [on_cpu(block) for block in data]


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 64, 257])
@pytest.mark.parametrize("n", [1, 3])
def test_same_as_on_the_cpu(n: int, rows: int) -> None:
    check(np.random.default_rng(rows).integers(0, 256, (n, rows * 4096), dtype=np.uint8))


def test_more_tiles_than_are_added_at_a_time() -> None:
    check(np.random.default_rng(0).integers(0, 256, (1, 2060 * 4096), dtype=np.uint8))


@pytest.mark.parametrize("value", [0, 0x7F, 0x80, 0xFF])
def test_extreme_words_do_not_overflow_differently(value: int) -> None:
    check(np.full((2, 5 * 4096), value, dtype=np.uint8))


def test_no_blocks() -> None:
    assert checksum(torch.zeros((0, 4096), dtype=torch.uint8, device=DEVICE)).shape == (0,)


@pytest.mark.parametrize(
    "blocks",
    [
        torch.zeros((2, 4095), dtype=torch.uint8),
        torch.zeros((2, 0), dtype=torch.uint8),
        torch.zeros((2, 4096), dtype=torch.int8),
        torch.zeros(4096, dtype=torch.uint8),
        torch.zeros((2, 8192), dtype=torch.uint8)[:, :4096],
    ],
)
def test_other_tensors_are_refused(blocks: Any) -> None:
    with pytest.raises(RequestError):
        checksum(blocks)
