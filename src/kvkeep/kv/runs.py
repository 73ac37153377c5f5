"""Where the bytes of a block lie in engine memory, as runs of contiguous bytes.

    layer "a"   [block 0][block 1][block 2] ...       run 0 of block b: base[0] + b * stride[0], length[0] bytes
    layer "b"   [k0][k1][k2] ... [v0][v1][v2] ...     runs 1 and 2: keys and values lie apart

    slot        [ run 0 ][ run 1 ][ run 2 ]           the runs of one block, one after the other

A layer's bytes go into the slot in the order in which they lie in memory (dims by descending
stride), which gives the fewest and longest runs. Two engines can exchange blocks only if they agree
on that order, so it is part of the fingerprint. Tensors are recognised by `data_ptr` and `stride`:
this module does not import torch."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import RequestError

MAX_RUNS = 65_536  # per block; beyond that the layout is a mistake, and copying it would crawl


@dataclass(frozen=True)
class _Layer:
    """One layer's memory, in bytes; `dims` are (size, stride) without the block dim."""

    name: str
    address: int
    dtype: str
    itemsize: int
    num_blocks: int
    block_stride: int
    dims: tuple[tuple[int, int], ...]
    device: str = "cpu"

    @property
    def physical_order(self) -> list[int]:
        """Dims as they lie in memory, outermost first, without those of size 1, whose stride means
        nothing."""
        wide = [d for d, (size, _) in enumerate(self.dims) if size > 1]
        return sorted(wide, key=lambda d: -self.dims[d][1])

    def signature(self) -> list[object]:
        """What must agree for the bytes of a block to mean the same elsewhere."""
        return [self.name, self.dtype, [size for size, _ in self.dims], self.physical_order]

    def runs(self) -> list[tuple[int, int, int]]:
        """(address, block stride, length) of each run of block 0, in physical order."""
        ordered = [self.dims[d] for d in self.physical_order]
        length = self.itemsize
        while ordered and ordered[-1][1] == length:
            length *= ordered.pop()[0]
        if np.prod([size for size, _ in ordered], dtype=np.float64) > MAX_RUNS:
            raise _refused(
                self.name,
                f"lies in more than {MAX_RUNS} pieces per block",
                "keep its last dim contiguous",
            )
        steps = [range(0, size * stride, stride) for size, stride in ordered]
        return [
            (self.address + sum(at), self.block_stride, length) for at in itertools.product(*steps)
        ]

    def check(self) -> None:
        """RequestError unless each byte of each block has an address of its own."""
        span = self.itemsize
        every = [*self.dims, (self.num_blocks, self.block_stride)]
        if any(size == 0 for size, _ in every):
            raise _refused(self.name, "is empty")
        for size, stride in sorted((d for d in every if d[0] > 1), key=lambda d: d[1]):
            if stride < 0:
                raise _refused(self.name, f"has a negative stride ({stride} bytes)")
            if stride == 0:
                raise _refused(self.name, "is expanded (stride 0): its blocks share memory")
            if stride < span:
                raise _refused(
                    self.name, f"overlaps itself (a stride of {stride} bytes over pieces of {span})"
                )
            span += stride * (size - 1)


@dataclass(frozen=True, eq=False)
class BlockRuns:
    """Run r of block b starts at address base[r] + b * stride[r] and has length[r] > 0 bytes; never
    changes.

    A slot holds the runs of one block in order, `nbytes` in all. `fingerprint` is equal exactly
    where blocks can be exchanged: it covers each layer's name, dtype, shape of a block and order in
    memory, in the order of the layers; not addresses, the number of blocks, or the distance between
    them. `keepalive` holds the memory."""

    base: NDArray[np.uint64]
    stride: NDArray[np.int64]
    length: NDArray[np.int64]
    num_blocks: int
    fingerprint: str
    keepalive: tuple[object, ...]
    device: str = "cpu"  # or a GPU, as torch names it

    @property
    def nbytes(self) -> int:
        """The bytes of one block, all layers together."""
        return int(self.length.sum())

    @classmethod
    def of(cls, layers: Mapping[str, Any] | Sequence[Any], block_dim: int = 0) -> BlockRuns:
        """The runs of torch tensors or numpy arrays, one per layer, whose dim `block_dim` counts
        blocks.

        Layers of a list are named by their place in it. Raises RequestError, naming the layer, for
        memory in which blocks cannot be copied."""
        named = by_name(layers)
        if not named:
            raise RequestError(
                "bad_request", "no layers given: there is nothing to copy", field="layers"
            )
        described = [_describe(name, layer, block_dim) for name, layer in named.items()]
        _check_together(described)
        runs = _merged([run for layer in described for run in layer.runs()])
        if len(runs) > MAX_RUNS:
            raise _refused(
                described[-1].name, f"brings a block to {len(runs)} pieces, the limit is {MAX_RUNS}"
            )
        signature = json.dumps([layer.signature() for layer in described], separators=(",", ":"))
        base, stride, length = zip(*runs, strict=True)
        return cls(
            base=_frozen(np.array(base, dtype=np.uint64)),
            stride=_frozen(np.array(stride, dtype=np.int64)),
            length=_frozen(np.array(length, dtype=np.int64)),
            num_blocks=described[0].num_blocks,
            fingerprint=hashlib.blake2b(signature.encode(), digest_size=16).hexdigest(),
            keepalive=tuple(named.values()),
            device=described[0].device,
        )


def by_name(layers: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    """Layers of a list are named by their place in it."""
    if isinstance(layers, Mapping):
        return dict(layers)
    return {str(place): layer for place, layer in enumerate(layers)}


def cut_heads(layers: Mapping[str, Any], head_dim: int, shards: int) -> list[dict[str, Any]]:
    """Views of each shard's heads, which are neighbours in dim `head_dim` of every layer.
    RequestError, naming the layer, if its heads do not divide evenly."""
    cut: list[dict[str, Any]] = [{} for _ in range(shards)]
    for name, layer in layers.items():
        shape = tuple(getattr(layer, "shape", ()))
        if not -len(shape) <= head_dim < len(shape) or shape[head_dim] % shards:
            raise _refused(
                name,
                f"of shape {shape} has no {shards} equal parts in dim {head_dim}",
                "kvkeep.tp_shards must divide the KV heads of every layer",
            )
        before, heads = head_dim % len(shape), shape[head_dim] // shards
        for shard, views in enumerate(cut):
            mine = slice(shard * heads, (shard + 1) * heads)
            views[name] = layer[(slice(None),) * before + (mine,)]
    return cut


def _describe(name: str, layer: Any, block_dim: int) -> _Layer:
    shape = tuple(int(size) for size in getattr(layer, "shape", ()))
    if not -len(shape) <= block_dim < len(shape):
        raise _refused(name, f"has shape {shape}, so no dim {block_dim} to count blocks")
    device = "cpu"
    if isinstance(layer, np.ndarray):
        if layer.dtype.hasobject or not layer.flags.writeable:
            raise _refused(
                name, "holds Python objects" if layer.dtype.hasobject else "is read-only"
            )
        address, strides, itemsize = layer.ctypes.data, layer.strides, layer.itemsize
        dtype = layer.dtype.name if layer.dtype.isnative else layer.dtype.str
    elif hasattr(layer, "data_ptr") and hasattr(layer, "element_size"):
        device = str(layer.device)
        if layer.device.type not in ("cpu", "cuda"):
            raise _refused(
                name, f"is on {device}", "kvkeep moves KV in host memory and on CUDA GPUs"
            )
        address, itemsize = layer.data_ptr(), layer.element_size()
        strides = tuple(step * itemsize for step in layer.stride())
        dtype = str(layer.dtype).removeprefix("torch.")
    else:
        raise _refused(
            name, f"is a {type(layer).__name__}, neither a torch tensor nor a numpy array"
        )
    dims = list(zip(shape, strides, strict=True))
    num_blocks, block_stride = dims.pop(block_dim)
    described = _Layer(
        name, address, dtype, itemsize, num_blocks, block_stride, tuple(dims), device
    )
    described.check()
    return described


def _check_together(layers: list[_Layer]) -> None:
    first = layers[0]
    seen: dict[int, str] = {}
    for layer in layers:
        if layer.num_blocks != first.num_blocks:
            raise _refused(
                layer.name,
                f"has {layer.num_blocks} blocks, but layer {first.name!r} {first.num_blocks}",
            )
        if layer.device != first.device:
            raise _refused(
                layer.name, f"is on {layer.device}, but layer {first.name!r} on {first.device}"
            )
        if layer.address in seen:
            raise _refused(
                layer.name, f"is the memory of layer {seen[layer.address]!r} again", "list it once"
            )
        seen[layer.address] = layer.name


def _merged(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours that touch in every block become one run: layers that are views of one tensor
    often do."""
    merged = runs[:1]
    for address, stride, length in runs[1:]:
        start, step, so_far = merged[-1]
        if start + so_far == address and step == stride:
            merged[-1] = (start, step, so_far + length)
        else:
            merged.append((address, stride, length))
    return merged


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def _refused(name: str, what: str, hint: str = "") -> RequestError:
    return RequestError("bad_layer", f"layer {name!r} {what}", field=name, hint=hint)
