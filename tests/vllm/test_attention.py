"""Which attention backends write the same bytes: two engines whose bytes differ never have one
identity."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

import torch
from engine_parts import cpu_layer
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvkeep.errors import SettingsError
from kvkeep.vllm import versions
from kvkeep.vllm.attention import check_heads_apart, encodings_of, summary_of


def backend(name: str, module: str = "vllm.v1.attention.backends.somewhere") -> type:
    return type(name, (), {"__module__": module, "__qualname__": name})


def layer(name: str, cache_type: str = "auto", **more: Any) -> Any:
    kind = backend(name, **more)
    return SimpleNamespace(get_attn_backend=lambda: kind, kv_cache_dtype=cache_type)


def encoding(one: Any, dtype: torch.dtype = torch.bfloat16) -> str:
    compilation = SimpleNamespace(static_forward_context={} if one is None else {"layer.0": one})
    config = SimpleNamespace(
        compilation_config=compilation, model_config=SimpleNamespace(dtype=dtype)
    )
    (found,) = encodings_of(config, ["layer.0"]).values()
    return found


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says which release of vLLM this is."""
    return lambda *number: monkeypatch.setattr(versions, "release", lambda: number)


def test_backends_that_write_the_same_bytes_share_an_encoding() -> None:
    fused = (
        "FlashAttentionBackend",
        "TritonAttentionBackend",
        "FlashInferBackend",
        "FlexAttentionBackend",
    )
    assert {encoding(layer(name)) for name in fused} == {"fused-kv"}
    latent = ("TritonMLABackend", "FlashMLABackend", "FlashAttnMLABackend", "CPUMLABackend")
    assert {encoding(layer(name)) for name in latent} == {"mla"}
    assert encoding(cpu_layer("vec"), torch.float32) not in ("fused-kv", "mla")


def test_instruction_sets_that_pack_keys_otherwise_have_encodings_of_their_own(
    release: Any,
) -> None:
    release(0, 32)
    assert {encoding(cpu_layer(isa)) for isa in ("vec", "vec16")} == {"cpu-columns"}
    assert encoding(cpu_layer("neon"), torch.float32) == "cpu-columns"
    different = [encoding(cpu_layer(isa)) for isa in ("vec", "neon", "amx", "rvv", "vxe", "vsx")]
    assert len(set(different)) == len(different)


def test_an_encoding_that_has_moved_is_another_one_in_each_release(release: Any) -> None:
    seen = []
    for number in ((0, 28), (0, 30), (0, 31), (0, 32), (0, 33)):
        release(*number)
        seen.append(
            (
                encoding(cpu_layer("neon")),
                encoding(cpu_layer("amx")),
                encoding(layer("FlashMLASparseBackend")),
            )
        )
    neon, amx, sparse = zip(*seen, strict=True)
    assert neon[0] == neon[1] and len(set(neon)) == 4, (
        "0.28 and 0.30 were seen to write the same bytes"
    )
    assert len(set(amx)) == len(set(sparse)) == 5


def test_the_instructions_are_found_where_each_release_keeps_them() -> None:
    of_impl = SimpleNamespace(
        get_attn_backend=lambda: CPUAttentionBackend,
        kv_cache_dtype="auto",
        impl=SimpleNamespace(isa="vec"),
    )
    assert encoding(of_impl) == encoding(cpu_layer("vec"))
    with pytest.raises(SettingsError, match="without saying for which instructions"):
        encoding(cpu_layer(None))


def test_packed_numbers_are_shared_within_a_release_only(release: Any) -> None:
    release(0, 32)
    plain = encoding(layer("TritonAttentionBackend"))
    packed = encoding(layer("TritonAttentionBackend", "int4_per_token_head"))
    release(0, 33)
    assert (
        len({plain, packed, encoding(layer("TritonAttentionBackend", "int4_per_token_head"))}) == 3
    )
    assert encoding(layer("TritonAttentionBackend")) == plain
    eight = {encoding(layer("FlashAttentionBackend", kind)) for kind in ("fp8_e4m3", "fp8_e5m2")}
    assert len(eight | {plain}) == 3
    assert encoding(layer("FlashAttentionBackend", "fp8")) == encoding(
        layer("FlashAttentionBackend", "fp8_e4m3")
    )


def test_states_say_which_dimension_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "conv_state_layout", lambda: "SD")
    one = encoding(layer("ShortConvAttentionBackend"))
    monkeypatch.setattr(versions, "conv_state_layout", lambda: "DS")
    assert encoding(layer("ShortConvAttentionBackend")) != one


@pytest.mark.parametrize(
    ("unknown", "name"),
    [
        (layer("RocmAttentionBackend"), "RocmAttentionBackend"),
        (layer("NextYearsBackend"), "NextYearsBackend"),
        (
            layer("FlashAttentionBackend", module="plugin.attention"),
            r"plugin\.attention\.FlashAttentionBackend",
        ),
        (SimpleNamespace(), "does not name"),
        (None, "does not name"),
    ],
)
def test_an_unknown_backend_is_refused_by_name(unknown: Any, name: str) -> None:
    with pytest.raises(SettingsError, match=name) as caught:
        encoding(unknown)
    assert "layer.0" in caught.value.message and "--attention-backend" in caught.value.hint


def test_the_summary_tells_which_layer_has_which_encoding() -> None:
    assert summary_of({"a": "fused-kv", "b": "fused-kv"}) == "fused-kv"
    mixed = [summary_of({"a": "fused-kv", "b": "mla"}), summary_of({"a": "mla", "b": "fused-kv"})]
    assert mixed[0] != mixed[1] and all(
        text.startswith("fused-kv, mla, by layer ") for text in mixed
    )


def test_every_backend_that_is_listed_is_vllms() -> None:
    """A name that no release has would be a typing error: nothing would match it."""
    from pathlib import Path

    import vllm
    from kvkeep.vllm import attention

    sources = "\n".join(
        path.read_text()
        for path in Path(vllm.__file__).parent.glob("v1/attention/backends/**/*.py")
    )
    listed = set(re.findall(r'"(\w+Backend)"', Path(attention.__file__).read_text()))
    assert len(listed) > 10
    made_at_run_time = ("TritonFlashAttentionBackend", "TritonFlashInferBackend")
    missing = [
        name for name in listed if f"class {name}(" not in sources and name not in made_at_run_time
    ]
    assert not missing or versions.release() != (0, 32), missing


@pytest.mark.parametrize("encoding", ["fused-kv", "fused-kv fp8 e4m3", "cpu-columns"])
def test_heads_that_lie_apart_can_be_cut(encoding: str) -> None:
    check_heads_apart({"layer.0": encoding})


@pytest.mark.parametrize(
    "encoding", ["mla", "cpu-amx of vLLM 0.32.0", "fused-kv turbo of vLLM 0.32.0", "states ds"]
)
def test_other_encodings_are_not_cut_and_named(encoding: str) -> None:
    with pytest.raises(SettingsError, match=r"layer layer\.1, written as") as refused:
        check_heads_apart({"layer.0": "fused-kv", "layer.1": encoding})
    assert encoding in refused.value.message and "kvkeep.tp_shards" in refused.value.hint
