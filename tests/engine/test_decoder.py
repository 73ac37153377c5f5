"""Both families of models: their logits are those of transformers, however requests are batched,
scattered over blocks, and cut over ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvkeep.engine.models.decoder import Decoder
from kvkeep.engine.models.gqa import GQAModel
from kvkeep.engine.models.mla import MLAModel
from kvkeep.engine.models.model import Rank, Segment
from kvkeep.engine.models.settings import ModelSettings, read_settings
from kvkeep.engine.models.weights import load_weights, random_weights
from kvkeep.engine.workers import shape_of
from kvkeep.errors import SettingsError

BLOCK_TOKENS = 4
NUM_BLOCKS = 48
VOCAB = 61
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5}
HEADS = {"num_kv_heads": 4, "head_dim": 6}
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
GQA = ModelSettings(kind="gqa", num_layers=3, num_heads=8, **HEADS, **SIZES)
MLA = ModelSettings(kind="mla", num_layers=3, num_heads=8, rope_interleaved=True, **LATENT, **SIZES)
SETTINGS = {"gqa": GQA, "mla": MLA}
both_families = pytest.mark.parametrize("kind", SETTINGS)


def model_of(
    kind: str, seed: int = 5, dtype: torch.dtype = torch.float64, **changes: Any
) -> Decoder:
    settings = replace(SETTINGS[kind], **changes)
    family = GQAModel if settings.kind == "gqa" else MLAModel
    return family(settings, random_weights(settings, seed, dtype), name="tiny")


def ranks_of(model: Decoder, tp_size: int = 1, pp_size: int = 1) -> list[Rank]:
    strategies = [model.strategy(tp_size, pp_size, rank) for rank in range(tp_size * pp_size)]
    return [Rank(each, model.allocate_kv(each, NUM_BLOCKS, BLOCK_TOKENS)) for each in strategies]


def request(name: str, length: int, block_ids: Sequence[int]) -> Segment:
    """A whole request as one segment, with tokens of its own."""
    tokens = random.Random(name).choices(range(VOCAB), k=length)
    return Segment(name, None, tokens, 0, length, block_ids)


def part(whole: Segment, start: int, end: int, blocks: Sequence[int] | None = None) -> Segment:
    block_ids = whole.block_ids if blocks is None else blocks
    return Segment(whole.request_id, None, whole.tokens, start, end - start, block_ids)


def whole_request() -> Segment:
    return request("a", 19, [40, 3, 17, 8, 25])


def logits_of(model: Decoder, segment: Segment) -> torch.Tensor:
    """What the request's last token gives when it is computed alone and in one piece."""
    return model.forward([segment], ranks_of(model), BLOCK_TOKENS)[0]


def every_row(model: Decoder, whole: Segment, ranks: list[Rank], prefill: int) -> torch.Tensor:
    """The logits after the first `prefill` tokens, and after each that follows."""
    ends = [0, *range(prefill, len(whole.tokens) + 1)]
    steps = [part(whole, start, end) for start, end in pairwise(ends)]
    return torch.cat([model.forward([step], ranks, BLOCK_TOKENS) for step in steps])


def long_request(length: int = 30) -> Segment:
    return request("long", length, random.Random(7).sample(range(NUM_BLOCKS), -(-length // 4)))


# -- against transformers --------------------------------------------------------------------------

REFERENCE = SIZES | {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "initializer_range": 0.3,
}
LLAMA = REFERENCE | {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}
# This epsilon is far from that of the latents' norms.
DEEPSEEK = REFERENCE | LATENT | {"first_k_dense_replace": 3, "rms_norm_eps": 1e-2}
REFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama-multi-head": ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 4, "head_dim": 10}),
    "llama-tied": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 12}),
    "deepseek": ("DeepseekV2ForCausalLM", {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek-q-lora": ("DeepseekV2ForCausalLM", {**DEEPSEEK, "q_lora_rank": 24}),
}


class InDouble(TorchFunctionMode):
    """transformers computes norms, angles and softmax in float32 even of a float64 model; here it
    does not."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        wider = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        func = torch.Tensor.double if func is torch.Tensor.float else func
        named = {name: wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(wider, args), **named)


def reference_of(case: str, dtype: torch.dtype, directory: Path) -> tuple[Any, Decoder]:
    """A random model of the transformers library, none of whose parameters is a constant, and ours
    of the same checkpoint."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(1)
    architecture, config = REFERENCES[case]
    kind = getattr(transformers, architecture)
    reference = kind(kind.config_class(**config)).double().eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    reference = reference.to(dtype)
    reference.save_pretrained(directory)
    settings = read_settings(directory)
    assert settings.q_lora_rank == config.get("q_lora_rank")
    family = MLAModel if "deepseek" in case else GQAModel
    return reference, family(settings, load_weights(directory, settings, dtype))


@pytest.mark.parametrize("case", REFERENCES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    whole = long_request()
    with InDouble():
        reference, model = reference_of(case, torch.float64, tmp_path)
        expected = reference(torch.tensor([whole.tokens])).logits[0].detach()
    assert model.vocab_size == VOCAB
    for prefill in (1, 17, 30):
        actual = every_row(model, whole, ranks_of(model), prefill)
        torch.testing.assert_close(actual, expected[prefill - 1 :], **CLOSE)
    assert expected.std(0).min() > 0.1, "tokens and their contexts matter"


@pytest.mark.parametrize("case", ["qwen3", "deepseek-q-lora"])
def test_logits_in_float32_are_those_of_transformers_unchanged(case: str, tmp_path: Path) -> None:
    whole = long_request()
    reference, model = reference_of(case, torch.float32, tmp_path)
    expected = reference(torch.tensor([whole.tokens])).logits[0].detach()
    actual = every_row(model, whole, ranks_of(model), 17)
    torch.testing.assert_close(actual, expected[16:], rtol=1e-3, atol=1e-3)


# -- batches ---------------------------------------------------------------------------------------


@both_families
@pytest.mark.parametrize("cuts", [(), (1,), (4, 8), (3, 5, 6, 16), tuple(range(1, 19))])
def test_a_request_in_pieces_computes_the_same(kind: str, cuts: tuple[int, ...]) -> None:
    model = model_of(kind)
    whole = whole_request()
    ranks = ranks_of(model)
    for start, end in zip((0, *cuts), (*cuts, 19), strict=True):
        logits = model.forward([part(whole, start, end)], ranks, BLOCK_TOKENS)
    torch.testing.assert_close(logits[0], logits_of(model, whole), **CLOSE)


@both_families
def test_requests_in_one_batch_do_not_touch_each_other(kind: str) -> None:
    model = model_of(kind)
    generator = random.Random(11)
    ids = generator.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    lengths = zip("abcde", (19, 7, 1, 20, 13), strict=True)
    wholes = [
        request(name, length, ids[5 * i : 5 * i + 5]) for i, (name, length) in enumerate(lengths)
    ]
    expected = {whole.request_id: logits_of(model, whole) for whole in wholes}
    ranks = ranks_of(model)
    done = dict.fromkeys(expected, 0)
    while remaining := [whole for whole in wholes if done[whole.request_id] < whole.count]:
        segments = []
        for whole in generator.sample(remaining, generator.randint(1, len(remaining))):
            start = done[whole.request_id]
            done[whole.request_id] = generator.randint(start + 1, min(whole.count, start + 6))
            segments.append(part(whole, start, done[whole.request_id]))
        rows = model.forward(segments, ranks, BLOCK_TOKENS)
        for row, segment in zip(rows, segments, strict=True):
            if segment.start + segment.count == len(segment.tokens):
                torch.testing.assert_close(row, expected[segment.request_id], **CLOSE)


@both_families
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_segment_reads_what_another_of_the_same_step_writes(kind: str, tp_size: int) -> None:
    model = model_of(kind)
    first = request("a", 12, [9, 2, 30])
    shared = Segment("b", None, [*first.tokens[:8], 5, 6, 7], 8, 3, [9, 2, 31])
    expected = logits_of(model, part(shared, 0, 11, [4, 5, 6]))
    for segments in ([first, shared], [shared, first]):
        rows = model.forward(segments, ranks_of(model, tp_size), BLOCK_TOKENS)
        torch.testing.assert_close(rows[segments.index(shared)], expected, **CLOSE)


@both_families
def test_every_block_of_the_context_matters(kind: str) -> None:
    """But not the order of full blocks: keys carry their positions."""
    model = model_of(kind)
    whole, stranger = whole_request(), request("b", 20, [1, 33, 12, 20, 6])
    ranks = ranks_of(model)
    expected = model.forward([whole, stranger], ranks, BLOCK_TOKENS)[0]

    def last_token(block_ids: Sequence[int]) -> torch.Tensor:
        return model.forward([part(whole, 18, 19, block_ids)], ranks, BLOCK_TOKENS)[0]

    torch.testing.assert_close(last_token(whole.block_ids), expected, **CLOSE)
    torch.testing.assert_close(last_token([3, 40, 17, 8, 25]), expected, **CLOSE)
    for position in range(4):
        for wrong in (0, stranger.block_ids[position]):  # block 0 was never written
            block_ids = [*whole.block_ids]
            block_ids[position] = wrong
            assert (last_token(block_ids) - expected).abs().max() > 1e-3
    hides_tokens = [40, 3, 17, 25, 8]
    assert (last_token(hides_tokens) - expected).abs().max() > 1e-3


@both_families
def test_a_step_writes_its_rows_and_no_others(kind: str) -> None:
    model = model_of(kind)
    ranks = ranks_of(model)
    for kv in ranks[0].kv.values():
        kv.fill_(float("nan"))  # an unwritten row that is read spoils everything
    logits = model.forward([request("a", 10, [9, 2, 30])], ranks, BLOCK_TOKENS)
    assert logits.isfinite().all()
    for kv in ranks[0].kv.values():
        rows = kv.transpose(1, 2) if kind == "gqa" else kv  # blocks, tokens, …
        written = rows.isfinite().flatten(2).all(2)
        assert written[9].all() and written[2].all()
        assert written[30].tolist() == [True, True, False, False]
        assert int(rows.isfinite().flatten(2).any(2).sum()) == 10


# torch warns where the CPU has no instructions for a dtype.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@both_families
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3), (torch.float16, 0.05)]
)
def test_smaller_dtypes_compute_nearly_the_same(kind: str, dtype: torch.dtype, most: float) -> None:
    model, whole = model_of(kind, dtype=dtype), whole_request()
    weights = random_weights(model.settings, 5)
    rounded = {name: tensor.to(dtype).double() for name, tensor in weights.tensors.items()}
    in_double = type(model)(model.settings, type(weights)(rounded, "rounded"))
    exact = logits_of(in_double, whole)
    ranks = ranks_of(model)
    model.forward([part(whole, 0, 10)], ranks, BLOCK_TOKENS)
    logits = model.forward([part(whole, 10, 19)], ranks, BLOCK_TOKENS)[0]
    assert logits.dtype == dtype and next(iter(ranks[0].kv.values())).dtype == dtype
    assert (logits.double() - exact).norm() / exact.norm() < most


def test_a_segment_or_a_rank_too_short_is_our_bug() -> None:
    model = model_of("gqa")
    whole = request("a", 10, [9, 2, 30])
    for broken in (part(whole, 5, 11), part(whole, 5, 10, [9, 2])):
        with pytest.raises(AssertionError, match="a segment reaches beyond"):
            model.forward([broken], ranks_of(model), BLOCK_TOKENS)
    with pytest.raises(AssertionError, match="1 ranks hold layer 0"):
        model.forward([request("a", 3, [1])], ranks_of(model, 2)[:1], BLOCK_TOKENS)


# -- cut over ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("gqa", {}),
        ("gqa", {"qkv_bias": True}),
        ("gqa", {"qk_norm": True}),
        ("mla", {}),
        ("mla", {"rope_interleaved": False}),
    ],
)
def test_every_cut_computes_the_same(
    kind: str, change: dict[str, bool], tp_size: int, pp_size: int
) -> None:
    model, whole = model_of(kind, **change), long_request(23)
    expected = every_row(model, whole, ranks_of(model), 18)
    actual = every_row(model, whole, ranks_of(model, tp_size, pp_size), 18)
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_ranks_of_a_gqa_model_hold_their_own_layers_and_heads() -> None:
    model = model_of("gqa")
    whole, ranks = ranks_of(model), ranks_of(model, 2, 2)
    layers = [list(rank.kv) for rank in ranks]
    assert layers == [["layers.0"]] * 2 + [["layers.1", "layers.2"]] * 2
    every_row(model, long_request(20), whole, 20)
    every_row(model, long_request(20), ranks, 20)
    for rank in ranks:
        for name, kv in rank.kv.items():
            assert kv.shape == (NUM_BLOCKS, 2, BLOCK_TOKENS, 2, GQA.head_dim)
            heads = slice(2 * rank.strategy.tp_rank, 2 * rank.strategy.tp_rank + 2)
            torch.testing.assert_close(kv, whole[0].kv[name][:, :, :, heads], **CLOSE)
    assert not torch.equal(ranks[0].kv["layers.0"], ranks[1].kv["layers.0"])


def test_ranks_that_share_a_head_hold_the_same_bytes_in_tensors_of_their_own() -> None:
    model = model_of("gqa")
    ranks = ranks_of(model, tp_size=8)
    assert ranks[0].strategy.replicas == 2
    every_row(model, long_request(20), ranks, 20)
    first, same, other = (ranks[number].kv["layers.1"] for number in (0, 1, 2))
    assert torch.equal(first, same) and first.data_ptr() != same.data_ptr()
    assert not torch.equal(first, other)


def test_ranks_of_an_mla_stage_hold_the_same_bytes_in_tensors_of_their_own() -> None:
    model = model_of("mla")
    ranks = ranks_of(model, 4, 2)
    assert {rank.strategy.replicas for rank in ranks} == {4} and ranks[0].strategy.use_mla
    every_row(model, long_request(20), ranks, 12)
    for stage, layers in ((ranks[:4], ["layers.0"]), (ranks[4:], ["layers.1", "layers.2"])):
        assert [list(rank.kv) for rank in stage] == [layers] * 4
        for layer in layers:
            tensors = [rank.kv[layer] for rank in stage]
            assert tensors[0].shape == (NUM_BLOCKS, BLOCK_TOKENS, 24) and tensors[0].any()
            assert all(torch.equal(tensors[0], tensor) for tensor in tensors)
            assert len({tensor.data_ptr() for tensor in tensors}) == 4


@pytest.mark.parametrize(("kind", "tp_size"), [("gqa", 8), ("mla", 4)])
def test_each_rank_reads_its_own_kv(kind: str, tp_size: int) -> None:
    model, whole = model_of(kind), long_request(20)
    expected = every_row(model, whole, ranks_of(model, tp_size), 19)[-1]
    for damaged in range(tp_size):
        ranks = ranks_of(model, tp_size)
        model.forward([part(whole, 0, 19)], ranks, BLOCK_TOKENS)
        ranks[damaged].kv["layers.1"].zero_()
        actual = model.forward([part(whole, 19, 20)], ranks, BLOCK_TOKENS)
        assert (actual - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "fingerprints"),
    [("gqa", 6), ("mla", 2)],
    ids=["gqa: four KV heads are four shards on four or eight ranks", "mla: stages alone"],
)
def test_shapes_differ_by_cut_and_the_identity_does_not(kind: str, fingerprints: int) -> None:
    model = model_of(kind)
    cuts = [(tp_size, pp_size) for tp_size in (1, 2, 4, 8) for pp_size in (1, 2)]
    shapes = [shape_of(model, ranks_of(model, *cut), NUM_BLOCKS, BLOCK_TOKENS) for cut in cuts]
    assert len({shape.fingerprint for shape in shapes}) == fingerprints
    assert {shape.identity for shape in shapes} == {model.identity(BLOCK_TOKENS)}
    if kind == "mla":
        assert [shape.kv_shards for shape in shapes] == [pp_size for _, pp_size in cuts]


def test_identities_differ_by_weights_settings_and_blocks() -> None:
    model = model_of("gqa")
    identity = model.identity(16)
    assert (identity.model, identity.kv_dtype, identity.block_tokens) == ("tiny", "float64", 16)
    others = model_of("gqa", 6), model_of("gqa", 5, torch.float32), model_of("gqa", rope_theta=7.0)
    assert len({identity, model.identity(32), *(other.identity(16) for other in others)}) == 5


@pytest.mark.parametrize(
    ("kind", "change", "cut", "named"),
    [
        ("gqa", {}, (3, 1), "tp_size"),
        ("gqa", {}, (16, 1), "tp_size"),
        ("gqa", {}, (1, 4), "pp_size"),
        ("gqa", {"num_heads": 12, "num_kv_heads": 6}, (4, 1), "KV: 6"),
        ("mla", {}, (16, 1), "tp_size 16"),
    ],
)
def test_a_cut_that_does_not_come_out_even_is_refused(
    kind: str, change: dict[str, Any], cut: tuple[int, int], named: str
) -> None:
    with pytest.raises(SettingsError, match=named):
        model_of(kind, **change).strategy(*cut, 0)


@pytest.mark.parametrize(("family", "other"), [(GQAModel, MLA), (MLAModel, GQA)])
def test_settings_of_the_other_family_are_refused(
    family: type[Decoder], other: ModelSettings
) -> None:
    with pytest.raises(SettingsError, match="other family"):
        family(other, random_weights(other, 5))
