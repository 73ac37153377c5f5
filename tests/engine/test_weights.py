from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvkeep.engine.models.settings import ModelSettings
from kvkeep.engine.models.weights import Weights, load_weights, parameter_shapes, random_weights
from kvkeep.errors import SettingsError

SIZES = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
SETTINGS = ModelSettings(kind="gqa", qkv_bias=True, **SIZES, **HEADS)
EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
QUERIES = "model.layers.1.self_attn.q_proj.weight"


def tensors_of(settings: ModelSettings = SETTINGS) -> dict[str, torch.Tensor]:
    return dict(random_weights(settings, 1).tensors)


def load(
    directory: Path, settings: ModelSettings = SETTINGS, dtype: torch.dtype = torch.float32
) -> Weights:
    return load_weights(directory, settings, dtype)


def test_random_weights_are_the_same_numbers_on_every_machine() -> None:
    # Written down once. Another machine that computes others would break the promise of the
    # fingerprint.
    weights = random_weights(SETTINGS, 1)
    assert weights[EMBEDDINGS][0, :3].tolist() == EMBEDDINGS_BEGIN
    assert weights[QUERIES][0, :3].tolist() == QUERIES_BEGIN
    assert weights.fingerprint == FINGERPRINT


EMBEDDINGS_BEGIN = [0.13260334730148315, 0.31406253576278687, -0.46820351481437683]
QUERIES_BEGIN = [1.5279805660247803, 1.0870463848114014, 0.6657053828239441]
FINGERPRINT = "random-b8344cdf317dc6a8afe29c26d6844ee5"


def test_random_weights_are_a_function_of_settings_and_seed() -> None:
    first, again, other = (random_weights(SETTINGS, seed) for seed in (1, 1, 2))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert list(first.tensors) == list(parameter_shapes(SETTINGS))
    for name, shape in parameter_shapes(SETTINGS).items():
        assert first[name].shape == shape
        assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])
    assert random_weights(replace(SETTINGS, rope_theta=5.0), 1).fingerprint != first.fingerprint


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_random_weights_are_rounded_from_the_same_numbers(dtype: torch.dtype) -> None:
    exact, rounded = random_weights(SETTINGS, 1), random_weights(SETTINGS, 1, dtype)
    assert all(torch.equal(exact[name].to(dtype), rounded[name]) for name in exact.tensors)
    assert exact.fingerprint == rounded.fingerprint


def test_a_saved_checkpoint_comes_back(tmp_path: Path) -> None:
    tensors = tensors_of()
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load(tmp_path)
    assert set(loaded.tensors) == set(tensors)
    assert all(torch.equal(tensors[name], loaded[name]) for name in tensors)
    halves = load(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(halves[QUERIES], tensors[QUERIES].bfloat16())


def test_loaded_weights_do_not_change_with_the_file(tmp_path: Path) -> None:
    save_file(tensors_of(), tmp_path / "model.safetensors")
    loaded = load(tmp_path)
    before = loaded[QUERIES].clone()
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    assert torch.equal(loaded[QUERIES], before)


def split(directory: Path, tensors: dict[str, torch.Tensor], index: bool) -> None:
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    if index:
        weight_map = {name: file for file, part in parts.items() for name in part}
        content = json.dumps({"weight_map": weight_map})
        (directory / "model.safetensors.index.json").write_text(content)


@pytest.mark.parametrize("index", [True, False])
def test_a_checkpoint_in_parts_comes_back(tmp_path: Path, index: bool) -> None:
    tensors = tensors_of()
    split(tmp_path, tensors, index)
    if index:  # the same weights in another form, which the index does not name
        save_file({"layers.0.wq": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    loaded = load(tmp_path)
    assert all(torch.equal(tensors[name], loaded[name]) for name in tensors)


def test_fingerprints_follow_settings_and_every_byte(tmp_path: Path) -> None:
    tensors = tensors_of()
    save_file(tensors, tmp_path / "model.safetensors")
    first = load(tmp_path).fingerprint
    assert load(tmp_path, dtype=torch.float64).fingerprint == first
    assert load(tmp_path, replace(SETTINGS, rms_norm_eps=1e-5)).fingerprint != first
    tensors[QUERIES][0, 0] += 1e-3
    save_file(tensors, tmp_path / "model.safetensors")
    assert load(tmp_path).fingerprint != first


def refused(directory: Path, says: str, settings: ModelSettings = SETTINGS) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        load(directory, settings)
    assert caught.value.hint and str(directory) in caught.value.message


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    refused(tmp_path, "no \\*.safetensors")
    tensors = tensors_of()
    del tensors[QUERIES]
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, f"1 tensors are missing, the first is {QUERIES}")


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("model.layers.0.mlp.gate.weight", torch.zeros(1), "is not a tensor of a model with 2"),
        (QUERIES, torch.zeros(16, 17), r".*\(16, 17\), the config asks for \(16, 16\)"),
        (QUERIES, torch.zeros(16, 16, dtype=torch.int8), ".*int8.*quantized"),
        (QUERIES, torch.zeros(16, 16).to(torch.float8_e4m3fn), ".*float8.*quantized"),
    ],
)
def test_an_unexpected_tensor_shape_or_kind_is_named(
    tmp_path: Path, name: str, tensor: torch.Tensor, says: str
) -> None:
    save_file({**tensors_of(), name: tensor}, tmp_path / "model.safetensors")
    refused(tmp_path, f"{name} {says}")


def test_tensors_of_too_many_layers_are_named(tmp_path: Path) -> None:
    save_file(tensors_of(), tmp_path / "model.safetensors")
    refused(tmp_path, "layers.1.* is not a tensor", replace(SETTINGS, num_layers=1))


def test_rotary_frequencies_in_old_checkpoints_are_left_aside(tmp_path: Path) -> None:
    old = {**tensors_of(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file(old, tmp_path / "model.safetensors")
    assert set(load(tmp_path).tensors) == set(tensors_of())


def test_a_tied_head_must_be_the_embeddings(tmp_path: Path) -> None:
    tied = replace(SETTINGS, tie_word_embeddings=True)
    tensors = tensors_of(tied)
    assert HEAD not in tensors
    save_file({**tensors, HEAD: tensors[EMBEDDINGS].clone()}, tmp_path / "model.safetensors")
    assert HEAD not in load(tmp_path, tied).tensors
    save_file({**tensors, HEAD: tensors[EMBEDDINGS] + 1}, tmp_path / "model.safetensors")
    refused(tmp_path, "lm_head.weight differs from the embeddings", tied)


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 40)
    refused(tmp_path, "model.safetensors cannot be read")


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    save_file(tensors_of(), tmp_path / "a.safetensors")
    save_file({QUERIES: tensors_of()[QUERIES]}, tmp_path / "b.safetensors")
    refused(tmp_path, f"{QUERIES} occurs twice, again in b.safetensors")


BAD_MAPS = ["3", '{"a": "no.safetensors"}', '{"a": "../x"}']


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", *(f'{{"weight_map": {each}}}' for each in BAD_MAPS)]
)
def test_a_broken_index_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    refused(tmp_path, "model.safetensors.index.json")


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"torch\.int8"):
        random_weights(SETTINGS, 1, torch.int8)
    with pytest.raises(SettingsError, match="float8"):
        load(tmp_path, dtype=torch.float8_e4m3fn)


def test_without_safetensors_the_hint_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(tensors_of(), tmp_path / "model.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(SettingsError, match="pip install safetensors"):
        load(tmp_path)
