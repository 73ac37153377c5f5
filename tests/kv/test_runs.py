"""BlockRuns: where blocks lie for every kind of tensor, and which memory is refused."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import pytest

from kvkeep.errors import RequestError
from kvkeep.kv.runs import MAX_RUNS, BlockRuns, cut_heads

torch: Any = pytest.importorskip("torch")


def test_contiguous_layers_are_one_run_each() -> None:
    a, b = np.zeros((5, 16, 2, 8), np.float16), np.zeros((5, 16, 2, 8), np.float32)
    runs = BlockRuns.of({"a": a, "b": b})
    assert runs.num_blocks == 5
    assert runs.base.tolist() == [a.ctypes.data, b.ctypes.data]
    assert runs.length.tolist() == runs.stride.tolist() == [512, 1024]
    assert runs.nbytes == 1536


def test_keys_and_values_apart_are_two_runs() -> None:
    layer = torch.zeros(2, 7, 16, 4, 8, dtype=torch.bfloat16)
    runs = BlockRuns.of([layer], block_dim=1)
    assert runs.length.tolist() == [1024, 1024]
    assert runs.stride.tolist() == [1024, 1024]
    assert runs.base.tolist() == [layer.data_ptr(), layer.data_ptr() + 7 * 1024]
    assert BlockRuns.of([layer], block_dim=-4).base.tolist() == runs.base.tolist()


def test_permuted_dims_are_taken_in_physical_order() -> None:
    heads_first = torch.zeros(6, 4, 16, 8).permute(0, 2, 1, 3)
    assert BlockRuns.of([heads_first]).length.tolist() == [4 * 16 * 8 * 4]


def test_layers_of_one_tensor_become_one_run() -> None:
    every = torch.zeros(9, 3, 16, 8)
    runs = BlockRuns.of({f"layer{i}": every[:, i] for i in range(3)})
    assert runs.length.tolist() == [3 * 16 * 8 * 4]
    backwards = BlockRuns.of({f"layer{i}": every[:, i] for i in (2, 1, 0)})
    assert backwards.length.tolist() == [16 * 8 * 4] * 3


def test_gaps_split_runs() -> None:
    wide = np.zeros((3, 4, 10), np.uint8)
    runs = BlockRuns.of([wide[:, ::2, 1:7]])
    assert runs.length.tolist() == [6, 6]
    assert (runs.base - np.uint64(wide.ctypes.data)).tolist() == [1, 21]
    assert runs.stride.tolist() == [40, 40]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "uint8", "float32"])
def test_any_dtype(dtype: str) -> None:
    layer = torch.zeros(4, 8, dtype=getattr(torch, dtype))
    assert BlockRuns.of([layer]).nbytes == 8 * layer.element_size()


def test_fingerprint_ignores_where_and_how_many() -> None:
    fingerprints = {BlockRuns.of([torch.zeros(n, 2, 16, 8)]).fingerprint for n in (1, 5, 9)} | {
        BlockRuns.of([torch.zeros(2, 5, 16, 8).transpose(0, 1)]).fingerprint,
        BlockRuns.of([torch.zeros(2, 5, 16, 8)], block_dim=1).fingerprint,
        BlockRuns.of([torch.zeros(9, 2, 16, 8)[::3]]).fingerprint,
        BlockRuns.of([np.zeros((5, 2, 16, 8), np.float32)]).fingerprint,
    }
    assert len(fingerprints) == 1


def test_fingerprint_sees_what_changes_the_bytes() -> None:
    a, b = torch.zeros(5, 4, 16, 8), torch.zeros(5, 4, 16, 8)
    layouts: list[Any] = [
        [a],
        [a, b],
        {"x": a, "y": b},
        {"y": a, "x": b},
        [torch.zeros(5, 4, 16, 8, dtype=torch.int32)],
        [torch.zeros(5, 16, 4, 8)],
        [torch.zeros(5, 16, 4, 8).transpose(1, 2)],
        [torch.zeros(5, 4, 128)],
    ]
    fingerprints = [BlockRuns.of(layers).fingerprint for layers in layouts]
    assert len(set(fingerprints)) == len(layouts)


def test_fingerprint_is_pinned() -> None:
    """Stored blocks are found by it: a change here makes every stored block unreachable."""
    layer = np.zeros((3, 16, 2, 8), np.float16)
    assert BlockRuns.of({"layer.0": layer}).fingerprint == "4fe5ee62f4cad14cf2f48b6aa73e26aa"


def test_arrays_are_frozen_and_memory_is_held() -> None:
    layer = np.zeros((3, 8), np.uint8)
    runs = BlockRuns.of([layer])
    with pytest.raises(ValueError, match="read-only"):
        runs.base[0] = 0
    assert runs.keepalive[0] is layer


def read_only() -> np.ndarray[Any, Any]:
    array = np.zeros((3, 8))
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (np.zeros((4, 8))[:, ::-1], "negative stride"),
        (np.zeros((4, 8))[::-1], "negative stride"),
        (np.broadcast_to(np.zeros(8), (4, 8)).view(), "read-only"),
        (torch.zeros(1, 8).expand(4, 8), "expanded"),
        (torch.zeros(4, 1).expand(4, 8), "expanded"),
        (torch.zeros(64).as_strided((4, 8), (4, 1)), "overlaps itself"),
        (torch.zeros(4, 8, device="meta"), "is on meta"),
        (torch.zeros(0, 8), "is empty"),
        (torch.zeros(4, 0), "is empty"),
        (torch.zeros(()), "no dim 0"),
        (read_only(), "read-only"),
        (np.array([[object()]]), "Python objects"),
        ([[1, 2]], "no dim 0"),
        (memoryview(b"1234"), "neither a torch tensor nor a numpy array"),
        (np.zeros((1, 2 * MAX_RUNS + 2), np.uint8)[:, ::2], "pieces"),
    ],
)
def test_bad_memory_is_refused_by_name(layer: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        BlockRuns.of({"model.layers.7": layer})
    assert "'model.layers.7'" in str(caught.value)
    assert caught.value.field == "model.layers.7"


def test_layers_must_fit_together() -> None:
    a = np.zeros((4, 8))
    with pytest.raises(RequestError, match="no layers"):
        BlockRuns.of([])
    with pytest.raises(RequestError, match="layer 'b' has 5 blocks, but layer 'a' 4"):
        BlockRuns.of({"a": a, "b": np.zeros((5, 8))})
    with pytest.raises(RequestError, match="layer 'b' is the memory of layer 'a' again"):
        BlockRuns.of({"a": a, "b": a})


def test_torch_is_not_needed() -> None:
    module = sys.modules["kvkeep.kv.runs"]
    assert "torch" not in vars(module)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["heads", "tokens"])
def test_a_shard_of_several_heads_has_the_bytes_and_fingerprint_of_a_rank_that_has_only_these(
    order: tuple[int, ...],
) -> None:
    """Heads are dim 1, whichever way they lie in memory."""
    whole = np.arange(5 * 4 * 6 * 8, dtype=np.uint16).reshape(5, 4, 6, 8)
    layer = np.ascontiguousarray(whole.transpose(order)).transpose(order)
    for shard, views in enumerate(cut_heads({"a": layer}, -3, 2)):
        own = whole[:, 2 * shard : 2 * shard + 2].transpose(order)
        alone = np.ascontiguousarray(own).transpose(order)
        one, other = BlockRuns.of(views), BlockRuns.of({"a": alone})
        assert one.fingerprint == other.fingerprint and one.nbytes == other.nbytes
        read = [b"".join(map(bytes, _runs_of(runs, 3))) for runs in (one, other)]
        assert read[0] == read[1] == np.ascontiguousarray(own)[3].tobytes()


def _runs_of(runs: BlockRuns, block: int) -> list[Any]:
    at = (runs.base.astype(np.int64) + block * runs.stride).tolist()
    return [
        (ctypes.c_char * int(length)).from_address(base)
        for base, length in zip(at, runs.length, strict=True)
    ]


@pytest.mark.parametrize(("shape", "dim"), [((5, 3, 8), -2), ((5, 4), -3), ((5,), -2)])
def test_heads_that_do_not_divide_are_refused_by_layer(shape: tuple[int, ...], dim: int) -> None:
    with pytest.raises(RequestError, match="layer 'a'") as refused:
        cut_heads({"a": np.zeros(shape)}, dim, 2)
    assert "kvkeep.tp_shards" in refused.value.hint
