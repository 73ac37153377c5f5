"""The transfer benchmark for GPUs, run on a stand-in whose memory is the host's, and on a GPU where
there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvkeep.bench import transfer, transfer_cuda
from kvkeep.bench.transfer_cuda import GEOMETRIES, KV, Bench, Geometry, Measured, Samples
from kvkeep.bench.transfer_floor import DIRECTIONS, ONE_WAY, Gpu, PlainCopy
from kvkeep.errors import KVKeepError, SettingsError

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA is not available")

SMALL: Mapping[str, Geometry] = {
    "llama-8b": Geometry(3, (16, 2, 8), (0, 2, 1, 3), 0.97),
    "mla": Geometry(2, (16, 9), (0, 1, 2), 0.9),
}


class HostGpu(Gpu):
    """Stands for a GPU whose memory is the host's."""

    def __init__(self) -> None:
        self.torch, self.device, self.name, self.free_bytes = torch, "cpu", "a stand-in", 64 << 30

    def pinned(self, nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8)

    def stream(self, number: int) -> Any:
        return torch.no_grad()

    def wait(self, number: int) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that a test has time for."""
    monkeypatch.setattr(transfer_cuda, "GEOMETRIES", SMALL)
    monkeypatch.setattr(transfer_cuda, "_SLAB_BYTES", 1 << 20)


def check(result: dict[str, Any], geometries: tuple[str, ...], rounds: int) -> None:
    """What every result must have."""
    cases = [(name, verify) for name in geometries for verify in (False, True)]
    assert [(row["geometry"], row["verify"], row["direction"]) for row in result["rows"]] == [
        (*case, way) for case in cases for way in DIRECTIONS
    ]
    assert all(
        row["gbps"] > 0 and row["floor_gbps"] > 0 and row["fraction_of_floor"] > 0
        for row in result["rows"]
    )
    assert [(row["geometry"], row["verify"]) for row in result["latency"]] == cases
    assert all(0 < row["lookup_ms"] < row["ms"] for row in result["latency"])
    own = [
        (row["geometry"], row["verify"], row["computes"], row["direction"])
        for row in result["own_copies"]
    ]
    assert own == [
        (*case, computes, way) for case in cases for computes in (False, True) for way in ONE_WAY
    ]
    assert all(
        row["gbps"] and row["samples"] and 0 < row["p50_ms"] <= row["most_ms"]
        for row in result["own_copies"]
    )
    assert all(row["registered"] for row in result["warm_up"]) and len(result["warm_up"]) == len(
        cases
    )
    assert len(result["verification"]) == len(geometries) * len(DIRECTIONS)
    assert result["rounds"] == rounds and result["floor_gbps"] > 0 and result["gpu"]


@pytest.mark.usefixtures("small")
def test_a_whole_run_on_a_stand_in(without_unit: Callable[..., list[str]]) -> None:
    result = transfer_cuda.measure(HostGpu(), ["llama-8b", "mla"], 1 << 20, 2)
    check(result, ("llama-8b", "mla"), 2)
    assert result["gpu"] == "a stand-in" and without_unit(result) == []


def test_blocks_have_the_shape_and_strides_of_vllm() -> None:
    assert {name: each.block_bytes for name, each in GEOMETRIES.items()} == {
        "llama-8b": 2 << 20,
        "llama-70b": 5 << 20,
        "mla": 1_124_352,
    }
    llama = next(iter(KV(HostGpu(), GEOMETRIES["llama-8b"], 1).layers.values()))
    assert tuple(llama.shape) == (2, 8, 16, 256) and llama.stride() == (32768, 256, 2048, 1)
    mla = KV(HostGpu(), GEOMETRIES["mla"], 1).layers
    assert len(mla) == 61 and tuple(mla["0"].shape) == (2, 16, 576) and mla["0"].is_contiguous()
    assert mla["0"].dtype == torch.bfloat16


def test_blocks_are_loaded_elsewhere_and_one_wrong_bit_is_found() -> None:
    kv = KV(HostGpu(), SMALL["llama-8b"], 6)
    assert sorted([*kv.sources, *kv.targets]) == list(range(12))
    kv.clear_targets()
    assert all(layer[kv.targets].view(torch.int16).eq(0).all() for layer in kv.layers.values())
    with pytest.raises(KVKeepError, match="wrong KV after a test: 6 of 6 blocks differ in layer 0"):
        kv.check_targets(6, "a test")
    for layer in kv.layers.values():
        bits = layer.view(torch.int16)
        bits[kv.targets] = bits[kv.sources]
    kv.check_targets(6, "a test")
    kv.layers["2"].view(torch.int16)[int(kv.targets[4]), 1, 15, 7] ^= 1
    kv.check_targets(4, "a test")
    with pytest.raises(KVKeepError, match="1 of 6 blocks differ in layer 2"):
        kv.check_targets(6, "a test")


def made_up() -> Measured:
    """100, 80 and 50 % of floors that differ from round to round."""
    floors = [1.0, 4.0, 2.0]
    rates = dict(zip(DIRECTIONS, (1.0, 0.8, 0.5), strict=True))
    return Measured(
        {
            way: Samples([floor / rate for floor in floors], list(floors))
            for way, rate in rates.items()
        },
        [0.002, 0.004, 0.003],
        [0.001, 0.001, 0.002],
    )


@pytest.mark.usefixtures("small")
def test_rows_compare_each_round_with_its_own_floor() -> None:
    gpu = HostGpu()
    bench = Bench("mla", KV(gpu, SMALL["mla"], 250), PlainCopy(gpu, 1), True)
    rows = {row["direction"]: row for row in bench.rows(made_up())}
    assert [rows[way]["fraction_of_floor"] for way in DIRECTIONS] == [1.0, 0.8, 0.5]
    assert bench.nbytes == 250 * 2 * 16 * 9 * 2
    assert bench.pool_bytes > 2 * bench.nbytes
    small = bench.latency(made_up())
    assert (small["blocks"], small["ms"], small["lookup_ms"]) == (125, 3.0, 1.0)
    assert small["floor_ms"] == 1000.0  # half of the blocks, 2 s for all of them


def test_both_directions_count_both_ways() -> None:
    gpu = HostGpu()
    bench = Bench("mla", KV(gpu, GEOMETRIES["mla"], 1), PlainCopy(gpu, 1), False)
    measured = Measured({way: Samples([1e-3], [1e-3]) for way in DIRECTIONS}, [1.0], [1.0])
    store, load, both = (row["gbps"] for row in bench.rows(measured))
    assert store == load == 1.12 and both == 2.25


def test_targets_and_the_cost_of_verification() -> None:
    def row(way: str, verify: bool, fraction: float) -> dict[str, Any]:
        return {
            "geometry": "llama-8b",
            "direction": way,
            "verify": verify,
            "fraction_of_floor": fraction,
        }

    rows = [
        row("store", False, 1.0),
        row("store", True, 0.98),
        row("both", False, 0.92),
        row("both", True, 0.88),
    ]
    costs = transfer_cuda.verification_costs(rows)
    assert [each["cost"] for each in costs] == [0.02, 0.043]
    assert (
        transfer_cuda.verification_costs([row("load", False, 0.0), row("load", True, 0.0)])[0][
            "cost"
        ]
        == 1.0
    )
    assert transfer_cuda.targets(["llama-8b"]) == {
        "store": {"llama-8b": 0.97},
        "load": {"llama-8b": 0.97},
        "both": {"llama-8b": 0.9},
        "cost": 0.02,
    }


def test_options_that_cannot_be_are_refused() -> None:
    for options, complaint in (
        ({"geometries": ("gpt",)}, '--geometries "gpt": expected some of llama-8b, llama-70b, mla'),
        ({"total_bytes": 1 << 20}, "less than a block of llama-8b"),
        ({"block_bytes": (4096,)}, "--block-bytes is for a CPU"),
        ({"device": "tpu"}, '--device "tpu"'),
    ):
        with pytest.raises(SettingsError, match=complaint):
            transfer.run(**{"device": "cuda", **options})
    gpu = HostGpu()
    gpu.free_bytes = 1 << 30
    with pytest.raises(SettingsError, match="the GPU has 1GiB free"):
        transfer_cuda.measure(gpu, ["mla"], 1 << 30, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_measure() -> None:
    with pytest.raises(
        SettingsError, match="--device cuda is not here: torch finds 0 CUDA devices"
    ):
        transfer.run(device="cuda")


@needs_cuda
def test_a_whole_run_on_a_gpu() -> None:
    result = transfer.run(device="cuda", geometries=("mla",), total_bytes=64 << 20, rounds=2)
    check(result, ("mla",), 2)
    assert result["gpu"] == torch.cuda.get_device_name()
