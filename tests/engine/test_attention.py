from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from kvkeep.engine.models.attention import (
    Batch,
    Rotary,
    Span,
    attend,
    read_rows,
    rms_norm,
    write_rows,
)
from kvkeep.engine.models.decoder import Decoder
from kvkeep.engine.models.gqa import GQAModel
from kvkeep.engine.models.mla import MLAModel
from kvkeep.engine.models.model import Rank, Segment
from kvkeep.engine.models.settings import ModelSettings
from kvkeep.engine.models.weights import random_weights

BLOCK_TOKENS = 4
NUM_BLOCKS = 48
VOCAB = 61
ROTARY = Rotary(size=8, theta=100.0, interleaved=False)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def model_of(kind: str, dtype: torch.dtype = torch.float64) -> Decoder:
    if kind == "gqa":
        settings = ModelSettings(
            kind="gqa",
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
        )
        return GQAModel(settings, random_weights(settings, 5, dtype))
    settings = ModelSettings(
        kind="mla",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        kv_lora_rank=16,
        qk_nope_head_dim=6,
        qk_rope_head_dim=8,
        v_head_dim=5,
    )
    return MLAModel(settings, random_weights(settings, 5, dtype))


def ranks_of(model: Decoder, tp_size: int = 1) -> list[Rank]:
    strategies = [model.strategy(tp_size, 1, rank) for rank in range(tp_size)]
    return [
        Rank(strategy, model.allocate_kv(strategy, NUM_BLOCKS, BLOCK_TOKENS))
        for strategy in strategies
    ]


def request(name: str, length: int, block_ids: Sequence[int]) -> Segment:
    """A whole request as one segment, with tokens of its own."""
    tokens = random.Random(name).choices(range(VOCAB), k=length)
    return Segment(name, None, tokens, 0, length, block_ids)


def part(whole: Segment, start: int, end: int) -> Segment:
    return Segment(whole.request_id, None, whole.tokens, start, end - start, whole.block_ids)


def logits_of(model: Decoder, segment: Segment) -> torch.Tensor:
    """What the request's last token gives when it is computed alone and in one piece."""
    return model.forward([segment], ranks_of(model), BLOCK_TOKENS)[0]


FAMILIES = pytest.mark.parametrize("kind", ["gqa", "mla"])


# --- batches --------------------------------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize("cuts", [(), (1,), (4, 8), (3, 5, 6, 16), tuple(range(1, 19))])
def test_a_request_in_pieces_computes_the_same(kind: str, cuts: tuple[int, ...]) -> None:
    model = model_of(kind)
    whole = request("a", 19, [40, 3, 17, 8, 25])
    ranks = ranks_of(model)
    for start, end in zip((0, *cuts), (*cuts, 19), strict=True):
        logits = model.forward([part(whole, start, end)], ranks, BLOCK_TOKENS)
    torch.testing.assert_close(logits[0], logits_of(model, whole), **CLOSE)


@FAMILIES
def test_requests_in_one_batch_do_not_touch_each_other(kind: str) -> None:
    model = model_of(kind)
    generator = random.Random(11)
    ids = generator.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    wholes = [
        request(name, length, ids[5 * i : 5 * i + 5])
        for i, (name, length) in enumerate(zip("abcde", (19, 7, 1, 20, 13), strict=True))
    ]
    expected = {whole.request_id: logits_of(model, whole) for whole in wholes}
    ranks = ranks_of(model)
    done = dict.fromkeys(expected, 0)
    while remaining := [whole for whole in wholes if done[whole.request_id] < whole.count]:
        step = generator.sample(remaining, generator.randint(1, len(remaining)))
        segments = []
        for whole in step:
            start = done[whole.request_id]
            done[whole.request_id] = generator.randint(start + 1, min(whole.count, start + 6))
            segments.append(part(whole, start, done[whole.request_id]))
        for row, segment in zip(
            model.forward(segments, ranks, BLOCK_TOKENS), segments, strict=True
        ):
            if segment.start + segment.count == len(segment.tokens):
                torch.testing.assert_close(row, expected[segment.request_id], **CLOSE)


@FAMILIES
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_segment_reads_what_another_of_the_same_step_writes(kind: str, tp_size: int) -> None:
    model = model_of(kind)
    first = request("a", 12, [9, 2, 30])
    shared = Segment("b", None, [*first.tokens[:8], 5, 6, 7], 8, 3, [9, 2, 31])
    whole = Segment("b", None, shared.tokens, 0, 11, [4, 5, 6])
    for segments in ([first, shared], [shared, first]):
        rows = model.forward(segments, ranks_of(model, tp_size), BLOCK_TOKENS)
        torch.testing.assert_close(rows[segments.index(shared)], logits_of(model, whole), **CLOSE)


@FAMILIES
def test_every_block_of_the_context_matters(kind: str) -> None:
    model = model_of(kind)
    whole, stranger = request("a", 19, [40, 3, 17, 8, 25]), request("b", 20, [1, 33, 12, 20, 6])
    ranks = ranks_of(model)
    expected = model.forward([whole, stranger], ranks, BLOCK_TOKENS)[0]
    last = part(whole, 18, 19)
    torch.testing.assert_close(model.forward([last], ranks, BLOCK_TOKENS)[0], expected, **CLOSE)
    for position in range(4):
        for wrong in (0, stranger.block_ids[position]):  # block 0 was never written
            block_ids = [*whole.block_ids]
            block_ids[position] = wrong
            other = Segment("a", None, whole.tokens, 18, 1, block_ids)
            assert (model.forward([other], ranks, BLOCK_TOKENS)[0] - expected).abs().max() > 1e-3


@FAMILIES
def test_full_blocks_in_another_order_go_unnoticed(kind: str) -> None:
    """Keys carry their positions, so attention does not notice where they lie: only which of them
    it may see."""
    model = model_of(kind)
    whole = request("a", 19, [40, 3, 17, 8, 25])
    ranks = ranks_of(model)
    expected = model.forward([whole], ranks, BLOCK_TOKENS)
    swapped = Segment("a", None, whole.tokens, 18, 1, [3, 40, 17, 8, 25])
    torch.testing.assert_close(model.forward([swapped], ranks, BLOCK_TOKENS), expected, **CLOSE)
    hidden = Segment("a", None, whole.tokens, 18, 1, [40, 3, 17, 25, 8])
    assert (model.forward([hidden], ranks, BLOCK_TOKENS) - expected).abs().max() > 1e-3


@FAMILIES
def test_a_step_writes_its_rows_and_no_others(kind: str) -> None:
    model = model_of(kind)
    ranks = ranks_of(model)
    for kv in ranks[0].kv.values():
        kv.fill_(float("nan"))  # unwritten rows, where they are read, spoil everything
    whole = request("a", 10, [9, 2, 30])
    logits = model.forward([whole], ranks, BLOCK_TOKENS)
    assert logits.isfinite().all()
    for kv in ranks[0].kv.values():
        rows = kv.transpose(1, 2) if kind == "gqa" else kv  # blocks, tokens, …
        written = rows.isfinite().flatten(2).all(2)
        assert (
            written[9].all()
            and written[2].all()
            and written[30].tolist() == [True, True, False, False]
        )
        assert int(rows.isfinite().flatten(2).any(2).sum()) == 10


@pytest.mark.filterwarnings(
    "ignore:mkldnn_matmul failed"
)  # torch's word where the CPU has no instructions for it
@FAMILIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_smaller_dtypes_compute_nearly_the_same(kind: str, dtype: torch.dtype) -> None:
    model = model_of(kind, dtype)
    whole = request("a", 19, [40, 3, 17, 8, 25])
    exact = Decoder.forward(_in_double(model), [whole], ranks_of(_in_double(model)), BLOCK_TOKENS)[
        0
    ]
    ranks = ranks_of(model)
    model.forward([part(whole, 0, 10)], ranks, BLOCK_TOKENS)
    logits = model.forward([part(whole, 10, 19)], ranks, BLOCK_TOKENS)[0]
    assert logits.dtype == dtype and next(iter(ranks[0].kv.values())).dtype == dtype
    error = (logits.double() - exact).norm() / exact.norm()
    assert error < {torch.float32: 1e-4, torch.bfloat16: 0.3, torch.float16: 0.05}[dtype]


def _in_double(model: Decoder) -> Decoder:
    """The same, already rounded, weights, computed with in float64."""
    weights = random_weights(model.settings, 5)
    dtype = model.weights["model.norm.weight"].dtype
    rounded = {name: tensor.to(dtype).double() for name, tensor in weights.tensors.items()}
    return type(model)(model.settings, type(weights)(rounded, "rounded"))


def test_a_segment_without_its_tokens_or_blocks_is_our_bug() -> None:
    model = model_of("gqa")
    whole = request("a", 10, [9, 2, 30])
    for broken in (
        Segment("a", None, whole.tokens, 5, 6, [9, 2, 30]),
        Segment("a", None, whole.tokens, 5, 5, [9, 2]),
    ):
        with pytest.raises(AssertionError, match="a segment reaches beyond"):
            model.forward([broken], ranks_of(model), BLOCK_TOKENS)


def test_a_rank_too_few_is_our_bug() -> None:
    model = model_of("gqa")
    with pytest.raises(AssertionError, match="1 ranks hold layer 0"):
        model.forward([request("a", 3, [1])], ranks_of(model, 2)[:1], BLOCK_TOKENS)


def test_batch_indices() -> None:
    segments = [
        request("a", 3, [7]),
        part(request("b", 6, [1, 5]), 4, 6),
        part(request("c", 6, [3, 2]), 5, 6),
    ]
    batch = Batch.of(segments, BLOCK_TOKENS, 2, ROTARY, torch.zeros(1))
    assert batch.tokens.tolist() == [
        *segments[0].tokens,
        *segments[1].tokens[4:],
        segments[2].tokens[5],
    ]
    assert batch.last.tolist() == [2, 4, 5]
    assert batch.write[0].tolist() == [56, 57, 58, 40, 41, 17]
    assert batch.write[1].tolist() == [60, 61, 62, 44, 45, 21]
    a, b, c = batch.spans
    assert b.tokens == slice(3, 5) and b.read[0].tolist() == [8, 9, 10, 11, 40, 41]
    assert (a.causal, b.causal, c.causal) == (True, False, False)
    assert a.mask is None and c.mask is None and b.mask is not None
    assert (b.mask == 0).tolist() == [[True] * 5 + [False], [True] * 6]


# --- pieces ---------------------------------------------------------------------------------------


def test_rows_written_are_read_in_any_order() -> None:
    kv = torch.zeros(3, 2, 4, 2, 5)
    values = torch.rand(3, 10)
    write_rows(kv, torch.tensor([17, 2, 9]), values)
    assert torch.equal(
        read_rows(kv, torch.tensor([9, 17, 2, 0]), 10),
        torch.stack([*values[[2, 0, 1]], torch.zeros(10)]),
    )
    assert torch.equal(kv[2, 0, 1], values[0].view(2, 5)) and torch.equal(
        kv[1, 0, 1], values[2].view(2, 5)
    )


@pytest.mark.parametrize(("tokens", "context"), [(1, 1), (1, 9), (5, 5), (5, 9)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_what_the_formula_says(tokens: int, context: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(heads, length, 8, generator=generator, dtype=torch.float64)
        for heads, length in ((4, tokens), (kv_heads, context), (kv_heads, context))
    )
    segment = Segment("a", None, [0] * context, context - tokens, tokens, [0, 1, 2])
    (span,) = Batch.of([segment], BLOCK_TOKENS, 1, ROTARY, query).spans
    expected = torch.empty_like(query)
    for head in range(4):
        shared = head * kv_heads // 4
        for token in range(tokens):
            seen = context - tokens + token + 1
            shares = torch.softmax(key[shared, :seen] @ query[head, token] * 0.3, dim=0)
            expected[head, token] = shares @ value[shared, :seen]
    torch.testing.assert_close(attend(query, key, value, span, 0.3), expected, **CLOSE)


def test_a_single_token_needs_no_mask() -> None:
    span = Span(slice(0, 1), (), None, False)
    ones = torch.ones(2, 1, 4)
    assert torch.equal(attend(ones, ones, ones, span, 1.0), ones)


def test_rms_norm() -> None:
    hidden = torch.randn(3, 16, dtype=torch.float64)
    weight = torch.rand(16, dtype=torch.float64)
    expected = torch.nn.functional.rms_norm(hidden, (16,), weight, 1e-3)
    torch.testing.assert_close(rms_norm(hidden, weight, 1e-3), expected, **CLOSE)
    large = torch.full((1, 16), 300.0, dtype=torch.float16)  # its square does not fit
    assert torch.equal(
        rms_norm(large, torch.ones(16, dtype=torch.float16), 1e-6), torch.ones_like(large)
    )


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_keeps_lengths_and_makes_products_depend_on_distance(interleaved: bool) -> None:
    rotary = Rotary(8, 100.0, interleaved)
    segment = Segment("a", None, [0] * 40, 0, 40, range(10))
    batch = Batch.of([segment], BLOCK_TOKENS, 1, rotary, torch.zeros(1))
    query, key = torch.randn(2, 8, dtype=torch.float64)
    queries, keys = (rotary.rotate(vector.expand(40, 1, 8), batch)[:, 0] for vector in (query, key))
    torch.testing.assert_close(queries[0], query)
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(40), **CLOSE)
    products = queries @ keys.T
    torch.testing.assert_close(products[10:, 10:], products[:-10, :-10], **CLOSE)
    assert products[0].std() > 1e-2


def test_rotation_pairs_neighbours_or_halves() -> None:
    batch = Batch.of(
        [Segment("a", None, [0, 0], 1, 1, [0])], BLOCK_TOKENS, 1, ROTARY, torch.zeros(1)
    )
    unit = torch.zeros(1, 1, 8, dtype=torch.float64)
    unit[..., 0] = 1
    for interleaved, partner in ((True, 1), (False, 4)):
        turned = Rotary(8, 100.0, interleaved).rotate(unit, batch)[0, 0]
        assert turned.nonzero().flatten().tolist() == [0, partner]
        assert turned[partner] == torch.tensor(1.0, dtype=torch.float64).sin()
