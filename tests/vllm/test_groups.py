"""vLLM's own descriptions of KV in our words: which models are cached, and where their blocks
lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

import torch
from engine_parts import cache_config, full, model_config, needs_named_failures, window
from vllm.v1 import kv_cache_interface as kvi

import vllm
from kvkeep.connector.group_layout import CacheGroup, GroupLayout
from kvkeep.errors import RequestError, SettingsError
from kvkeep.vllm import versions
from kvkeep.vllm.groups import layout_of, locate

FLOATS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def engine(**model: Any) -> Any:
    return SimpleNamespace(
        use_v2_model_runner=False,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(calculate_kv_scales=False),
        model_config=model_config(**model),
    )


def mla(block_size: int = 4, **more: Any) -> kvi.MLAAttentionSpec:
    return kvi.MLAAttentionSpec(block_size=block_size, **FLOATS, **more)


def state(mode: str = "align", block_size: int = 4, **more: Any) -> kvi.MambaSpec:
    return kvi.MambaSpec(
        block_size=block_size,
        shapes=((3, 8),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
        **more,
    )


def several(*specs: Any) -> kvi.UniformTypeKVCacheSpecs:
    named = {f"layer.{number}": spec for number, spec in enumerate(specs)}
    return kvi.UniformTypeKVCacheSpecs(block_size=specs[0].block_size, kv_cache_specs=named)


def groups(*specs: Any) -> tuple[CacheGroup, ...]:
    return layout_of(engine(), cache_config(*specs)).groups


# --- what is cached -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", [full(16), mla(16), several(full(16), full(16, sliding_window=8)), several(mla(16))]
)
def test_one_group_of_full_attention_is_whole(spec: Any) -> None:
    pieces = layout_of(engine(), cache_config(spec))
    assert pieces.groups == (CacheGroup("full", 16),)
    assert pieces.whole


@needs_named_failures
def test_windows_and_states_beside_full_attention() -> None:
    assert groups(full(16), window(8, reach=32), state(block_size=16)) == (
        CacheGroup("full", 16),
        CacheGroup("window", 8, 32),
        CacheGroup("state", 16),
    )
    assert groups(window(8, reach=32)) == (CacheGroup("window", 8, 32),)


@needs_named_failures
def test_what_a_window_keeps_besides_counts() -> None:
    assert groups(full(8), window(8, reach=32, extra_retained_tokens=3))[1] == CacheGroup(
        "window", 8, 35
    )


@needs_named_failures
def test_a_window_of_mla() -> None:
    spec = kvi.SlidingWindowMLASpec(block_size=8, sliding_window=16, **FLOATS)
    assert groups(full(8), spec)[1] == CacheGroup("window", 8, 16)


@pytest.mark.skipif(versions.names_failed_requests(), reason="from 0.30 on such models are cached")
@pytest.mark.parametrize(
    "specs", [(full(), window()), (full(), full()), (window(),), (full(), state()), (state(),)]
)
def test_before_0_30_only_whole_models_are_cached(specs: tuple[Any, ...]) -> None:
    with pytest.raises(SettingsError) as refused:
        groups(*specs)
    assert "0.30" in refused.value.hint


# --- what is not ----------------------------------------------------------------------------------


def refused(vllm_config: Any, *specs: Any) -> SettingsError:
    with pytest.raises(SettingsError) as error:
        layout_of(vllm_config, cache_config(*specs))
    assert error.value.hint
    return error.value


UNKNOWN = {
    "local blocks": kvi.ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=16, **FLOATS),
    "encoder only": kvi.EncoderOnlyAttentionSpec(block_size=4, **FLOATS),
    "cross attention": kvi.CrossAttentionSpec(block_size=4, **FLOATS),
    "sinks": kvi.SinkFullAttentionSpec(block_size=4, sink_len=4, **FLOATS),
    "hidden states": kvi.HiddenStateCacheSpec(block_size=4, **FLOATS),
    "not causal": full(non_causal=True),
    "not causal, of MLA": mla(non_causal=True),
    "a plain spec": kvi.AttentionSpec(block_size=4, **FLOATS),
}


@pytest.mark.parametrize("spec", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_is_refused(spec: Any) -> None:
    assert type(spec).__name__ in refused(engine(), spec).message
    refused(engine(), full(), spec)
    refused(engine(), several(full(), spec))


@pytest.mark.parametrize("spec", [state("none"), state("all"), state(num_speculative_blocks=2)])
def test_states_that_belong_to_no_prefix_are_refused(spec: Any) -> None:
    assert "mamba_cache_mode='align'" in refused(engine(), full(), spec).hint


def test_a_group_that_mixes_kinds_is_refused() -> None:
    said = refused(engine(), several(full(), window()))
    assert "full" in said.message and "window" in said.message


def test_a_group_with_windows_of_different_reach_is_no_group_of_one_reach() -> None:
    mixed = several(full(), window(reach=8), window(reach=64))
    refused(engine(), mixed)


@needs_named_failures
def test_windows_of_several_reaches_in_one_group_count_as_the_widest_or_not_at_all() -> None:
    for specs in ((window(reach=64), window(reach=8)), (window(reach=8), window(reach=64))):
        try:
            [group] = groups(several(*specs))
        except SettingsError:
            continue
        assert group.reach == 64


def test_a_model_without_kv_is_refused() -> None:
    refused(engine())


def test_a_block_spans_the_tokens_of_all_ranks_that_divide_them() -> None:
    config = engine()
    config.parallel_config.decode_context_parallel_size = 4
    assert layout_of(config, cache_config(full(block_size=16))).block_tokens == 64
    config.parallel_config.prefill_context_parallel_size = 2
    assert layout_of(config, cache_config(full(block_size=16))).block_tokens == 64, (
        "prompts are spread, blocks are not"
    )
    for other in (window(), state()):
        assert "decode_context_parallel_size" in refused(config, full(), other).message


@pytest.mark.parametrize("setting", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_sleep_mode_is_refused_where_vllm_does_not_tell_connectors_of_it(setting: str) -> None:
    config = engine(**{setting: True})
    with mock.patch.object(versions, "tells_of_sleep", return_value=False):
        error = refused(config, full())
        assert (
            f"sleep mode of vLLM {vllm.__version__} " in error.message
            and "vLLM 0.33 or later" in error.hint
        )
    with mock.patch.object(versions, "tells_of_sleep", return_value=True):
        assert layout_of(config, cache_config(full())).whole


def test_only_the_sleep_mode_that_is_known_is_served() -> None:
    with mock.patch.object(versions, "tells_of_sleep", return_value=True):
        error = refused(engine(enable_sleep_mode=True, sleep_mode_backend="snapshot"), full())
        assert "backend 'snapshot'" in error.message


def test_encoder_decoder_models_and_scales_of_one_process_are_refused() -> None:
    refused(engine(is_encoder_decoder=True), full())
    config = engine()
    config.cache_config.calculate_kv_scales = True
    assert "calculate_kv_scales" in refused(config, full()).message


@pytest.mark.parametrize("field", ["host_resident", "enable_kv_transfer"])
def test_kv_that_must_not_leave_is_refused(field: str) -> None:
    config = cache_config(full())
    if not hasattr(config.kv_cache_groups[0], field):
        pytest.skip("this vLLM has no such KV")
    setattr(config.kv_cache_groups[0], field, field == "host_resident")
    with pytest.raises(SettingsError):
        layout_of(engine(), config)


# --- where blocks lie -----------------------------------------------------------------------------

ONE = GroupLayout([CacheGroup("full", 4)])


def layers_of(*names: list[str], num_blocks: int = 6) -> Any:
    found = [kvi.KVCacheGroupSpec(each, full()) for each in names]
    return kvi.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=found)


def read(runs: Any, block: int) -> bytes:
    """A block's bytes, run by run."""
    import ctypes

    return b"".join(
        ctypes.string_at(int(base) + block * int(stride), int(length))
        for base, stride, length in zip(runs.base, runs.stride, runs.length, strict=True)
    )


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)


def test_each_layer_is_a_part_of_a_block_and_absent_ones_are_elsewhere() -> None:
    kv = {"a": numbered(6, 2, 4), "b": numbered(6, 4) + 1000}
    [piece] = locate(ONE, layers_of(["a", "elsewhere", "b"]), kv)
    assert (piece.runs.num_blocks, piece.runs.nbytes, piece.may_lack) == (6, 48, False)
    assert read(piece.runs, 3) == kv["a"][3].numpy().tobytes() + kv["b"][3].numpy().tobytes()


def test_layers_that_share_their_kv_are_taken_once() -> None:
    kv = numbered(6, 4)
    [piece] = locate(ONE, layers_of(["a", "b"]), {"a": kv, "b": kv})
    assert piece.runs.nbytes == 16


def test_groups_may_lie_in_the_same_bytes() -> None:
    kv = numbered(6, 4)
    pieces = GroupLayout(
        [CacheGroup("full", 4), CacheGroup("window", 4, 8), CacheGroup("state", 4)]
    )
    located = locate(pieces, layers_of(["a"], ["b"], ["c"]), {"a": kv, "b": kv, "c": kv})
    assert [piece.may_lack for piece in located] == [False, True, True]
    assert {read(piece.runs, 2) for piece in located} == {kv[2].numpy().tobytes()}


def test_a_group_of_smaller_blocks_has_several_pieces_in_the_same_place() -> None:
    pieces = GroupLayout([CacheGroup("full", 8), CacheGroup("window", 4, 8)])
    located = locate(pieces, layers_of(["a"], ["b"]), {"a": numbered(6, 8), "b": numbered(6, 4)})
    assert [piece.runs.nbytes for piece in located] == [32, 16, 16]


@pytest.mark.parametrize("parts", [2, 4])
def test_kernels_may_cut_blocks_into_smaller_ones(parts: int) -> None:
    kv = numbered(6 * parts, 2, 4)
    [piece] = locate(ONE, layers_of(["a"]), {"a": kv})
    assert (piece.runs.num_blocks, piece.runs.nbytes) == (6, parts * 32)
    assert read(piece.runs, 5) == kv[5 * parts : 6 * parts].numpy().tobytes()


def test_states_that_lie_apart_and_padded() -> None:
    raw = torch.arange(6 * 64, dtype=torch.int32).to(torch.int8).reshape(6, 64)
    conv, ssm = raw[:, :24].unflatten(1, (3, 8)), raw[:, 24:40]
    assert not conv.is_contiguous() and not ssm.is_contiguous()
    [piece] = locate(ONE, layers_of(["a"]), {"a": [conv, ssm]})
    assert piece.runs.nbytes == 40, "the padding is nobody's"
    assert read(piece.runs, 4) == raw[4, :40].numpy().tobytes()


def test_heads_before_tokens_make_another_layout_of_the_same_bytes() -> None:
    there, here = numbered(6, 2, 4), numbered(6, 4, 2).transpose(1, 2)
    [one], [two] = (locate(ONE, layers_of(["a"]), {"a": each}) for each in (there, here))
    assert one.runs.nbytes == two.runs.nbytes and one.runs.fingerprint != two.runs.fingerprint


@pytest.mark.parametrize("rows", [5, 7, 3])
def test_memory_of_another_size_is_refused(rows: int) -> None:
    with pytest.raises(SettingsError, match=f"layer a has {rows} rows for 6 blocks") as error:
        locate(ONE, layers_of(["a"]), {"a": numbered(rows, 4)})
    assert error.value.hint


@pytest.mark.parametrize("kv", [{}, {"b": numbered(6, 4)}, {"a": numbered(6, 1).expand(6, 4)}])
def test_memory_that_blocks_cannot_be_copied_from_is_refused(kv: dict[str, torch.Tensor]) -> None:
    with pytest.raises((RequestError, SettingsError)):
        locate(ONE, layers_of(["a"]), kv)


# --- shards of several heads ----------------------------------------------------------------------


def heads_of(count: int, names: list[str]) -> Any:
    """Layers of one group, as a rank with so many KV heads has them."""
    described = layers_of(names)
    floats = FLOATS | {"num_kv_heads": count}
    described.kv_cache_groups[0].kv_cache_spec = kvi.FullAttentionSpec(block_size=4, **floats)
    return described


@pytest.mark.parametrize("parts", [1, 2], ids=["whole", "cut by kernels"])
def test_each_shard_has_its_heads_of_every_layer(parts: int) -> None:
    shape = (6 * parts, 4, 2, 8)
    kv = {"a": numbered(*shape), "b": numbered(*shape) + 9999}
    located = locate(ONE, heads_of(4, ["a", "b"]), kv, 2)
    assert [piece.runs.nbytes for piece in located] == [2 * parts * 2 * 2 * 8 * 4] * 2
    assert len({piece.runs.fingerprint for piece in located}) == 1
    for shard, piece in enumerate(located):
        mine = [
            layer.unflatten(0, (6, parts))[3, :, 2 * shard : 2 * shard + 2].contiguous()
            for layer in kv.values()
        ]
        assert read(piece.runs, 3) == b"".join(each.numpy().tobytes() for each in mine)


@pytest.mark.parametrize("shape", [(6, 4, 8), (6, 2, 4, 8), (6, 8, 4, 8)])
def test_memory_whose_heads_are_not_found_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SettingsError, match="layer a, of shape") as error:
        locate(ONE, heads_of(4, ["a"]), {"a": numbered(*shape)}, 2)
    assert "kvkeep.tp_shards" in error.value.hint


def test_states_are_not_cut_by_heads() -> None:
    described = layers_of(["a"])
    described.kv_cache_groups[0].kv_cache_spec = state()
    with pytest.raises(SettingsError, match="cannot be cut by KV heads"):
        locate(ONE, described, {"a": numbered(6, 4, 2, 8)}, 2)
