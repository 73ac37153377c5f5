from __future__ import annotations

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
from kvkeep.engine.models.model import Segment

BLOCK_TOKENS = 4
ROTARY = Rotary(size=8, theta=100.0, interleaved=False)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def test_batch_indices() -> None:
    segments = [
        Segment("a", None, [11, 12, 13], 0, 3, [7]),
        Segment("b", None, [21, 22, 23, 24, 25, 26], 4, 2, [1, 5]),
        Segment("c", None, [31, 32, 33, 34, 35, 36], 5, 1, [3, 2]),
    ]
    batch = Batch.of(segments, BLOCK_TOKENS, 2, ROTARY, torch.zeros(1))
    assert batch.tokens.tolist() == [11, 12, 13, 25, 26, 36]
    assert batch.last.tolist() == [2, 4, 5]
    assert batch.write[0].tolist() == [56, 57, 58, 40, 41, 17]
    assert batch.write[1].tolist() == [60, 61, 62, 44, 45, 21]
    a, b, c = batch.spans
    assert b.tokens == slice(3, 5) and b.read[0].tolist() == [8, 9, 10, 11, 40, 41]
    assert (a.causal, b.causal, c.causal) == (True, False, False)
    assert a.mask is None and c.mask is None and b.mask is not None
    assert (b.mask == 0).tolist() == [[True] * 5 + [False], [True] * 6]


def test_rows_written_are_read_in_any_order() -> None:
    kv = torch.zeros(3, 2, 4, 2, 5)
    values = torch.rand(3, 10)
    write_rows(kv, torch.tensor([17, 2, 9]), values)
    read = read_rows(kv, torch.tensor([9, 17, 2, 0]), 10)
    assert torch.equal(read, torch.stack([*values[[2, 0, 1]], torch.zeros(10)]))
    assert torch.equal(kv[2, 0, 1], values[0].view(2, 5))
    assert torch.equal(kv[1, 0, 1], values[2].view(2, 5))


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
    ones = torch.ones(16, dtype=torch.float16)
    assert torch.equal(rms_norm(large, ones, 1e-6), torch.ones_like(large))


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
    segment = Segment("a", None, [0, 0], 1, 1, [0])
    batch = Batch.of([segment], BLOCK_TOKENS, 1, ROTARY, torch.zeros(1))
    unit = torch.zeros(1, 1, 8, dtype=torch.float64)
    unit[..., 0] = 1
    for interleaved, partner in ((True, 1), (False, 4)):
        turned = Rotary(8, 100.0, interleaved).rotate(unit, batch)[0, 0]
        assert turned.nonzero().flatten().tolist() == [0, partner]
        assert turned[partner] == torch.tensor(1.0, dtype=torch.float64).sin()
