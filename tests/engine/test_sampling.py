from __future__ import annotations

from typing import Any

import pytest
import torch

from kvkeep.engine.models.sampling import MAX_SEED, SamplingParams, sample
from kvkeep.errors import RequestError

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 3.0 - 1e-6])


def drawn(logits: torch.Tensor, count: int, **params: Any) -> list[int]:
    settings = SamplingParams(seed=1, **params)
    return [sample(logits, settings, position) for position in range(count)]


def test_zero_temperature_takes_the_likeliest() -> None:
    assert drawn(LOGITS, 5) == [1] * 5
    assert drawn(LOGITS, 5, top_k=3) == [1] * 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_frequencies_are_those_of_the_softmax(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -2.0]).to(dtype)
    counts = torch.bincount(torch.tensor(drawn(logits, 4000, temperature=2.0)), minlength=4)
    expected = torch.softmax(logits.double() / 2, dim=0) * 4000
    chi_square = ((counts - expected).square() / expected).sum()
    assert chi_square < 16.3  # p = 0.001 of three degrees of freedom; the draws are always the same


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    logits = torch.zeros(1000)
    forward = [sample(logits, params, position) for position in range(50)]
    torch.manual_seed(0)
    torch.rand(10)
    again = SamplingParams(temperature=1.0, seed=5)
    assert [sample(logits, again, position) for position in reversed(range(50))] == forward[::-1]
    assert len(set(forward)) > 40
    other = SamplingParams(temperature=1.0, seed=6)
    assert [sample(logits, other, position) for position in range(50)] != forward


def test_draws_are_the_same_on_every_machine() -> None:
    assert drawn(torch.zeros(1000), 6, temperature=1.0) == WRITTEN_DOWN


WRITTEN_DOWN = [777, 369, 341, 240, 813, 304]


def test_drawing_leaves_the_global_generator_and_the_logits_alone() -> None:
    before, logits = torch.get_rng_state(), LOGITS.clone()
    drawn(logits, 3, temperature=1.0, top_k=2)
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(logits, LOGITS)


def test_top_k_draws_from_the_likeliest_only() -> None:
    assert set(drawn(LOGITS, 200, temperature=100.0, top_k=2)) == {1, 4}
    assert set(drawn(LOGITS, 200, temperature=100.0, top_k=1)) == {1}
    assert set(drawn(LOGITS, 400, temperature=100.0, top_k=99)) == {0, 1, 2, 3, 4}
    level = torch.tensor([1.0, 2.0, 2.0, 0.0])
    assert set(drawn(level, 200, temperature=100.0, top_k=1)) == {1, 2}


@pytest.mark.parametrize("temperature", [1e-3, 1e-300, 5e-324])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    assert set(drawn(torch.tensor([1.0, 3.0, 2.0]), 100, temperature=temperature)) == {1}


def test_a_seed_is_drawn_once_where_none_is_given() -> None:
    params = SamplingParams(temperature=1.0)
    assert params.seed is not None and 0 <= params.seed <= MAX_SEED
    assert params.seed != SamplingParams(temperature=1.0).seed
    logits = torch.zeros(1000)
    assert sample(logits, params, 3) == sample(logits, params, 3)


def test_stop_tokens_are_kept_as_a_tuple() -> None:
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


BAD = {
    "max_tokens": [0, 1.0, True, 10**5000],
    "temperature": [-0.1, float("nan"), float("inf"), "1", True, 10**400],
    "seed": [-1, MAX_SEED + 1, "1"],
    "top_k": [0, 1.5, 10**30],
    "stop_token_ids": ["12", 5, [-1], [1, None], [10**5000]],
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_value_is_named(field: str) -> None:
    for value in BAD[field]:  # type: ignore[attr-defined]
        with pytest.raises(RequestError, match=field) as caught:
            SamplingParams(**{field: value})
        assert (caught.value.code, caught.value.field) == ("bad_sampling", field)
