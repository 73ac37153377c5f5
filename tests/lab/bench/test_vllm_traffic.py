"""The traffic is what the benchmark says that it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvkeep.bench.vllm_setup import BLOCK_TOKENS, ServedModel
from kvkeep_lab.bench.vllm_traffic import SIZES, Traffic

CPU = Traffic(
    SIZES["cpu"], ServedModel("nowhere", "a model", "cpu", vocab_size=4096, kv_token_bytes=8192)
)


def of(device: str) -> Traffic:
    return Traffic(
        SIZES[device],
        ServedModel("nowhere", "a model", device, vocab_size=4096, kv_token_bytes=1024),
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_prompts_are_as_long_as_they_should_be(device: str) -> None:
    sizes, traffic = SIZES[device], of(device)
    mixed, fresh = (
        traffic.requests(scenario, 0, 2 * sizes.prefixes) for scenario in ("mixed", "fresh")
    )
    lengths = [len(prompt) for prompt in mixed.prompts]
    assert (
        lengths == [len(prompt) for prompt in fresh.prompts]
        and mixed.max_tokens == fresh.max_tokens
    )
    assert sizes.shortest_tokens <= min(lengths) and max(lengths) <= sizes.longest_tokens
    assert sorted(lengths[::2]) == sorted(sizes.lengths()), "each length once"
    low, high = sizes.answer_tokens
    assert low <= min(mixed.max_tokens) < max(mixed.max_tokens) <= high
    assert max(lengths) + high <= sizes.most_tokens <= sizes.engine_tokens


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_prefix_comes_back_when_the_engine_has_lost_it_and_its_pool_has_not(device: str) -> None:
    sizes, traffic = SIZES[device], of(device)
    between = sum(
        len(prompt) for prompt in traffic.requests("mixed", 0, 2 * sizes.prefixes).prompts
    )
    assert between > 1.5 * sizes.engine_tokens and sizes.lost_after_tokens == int(between / 1.5)
    assert traffic.pool_bytes > (between + sizes.at_a_time * sizes.answer_tokens[1]) * 1024
    # An engine without a connector keeps the large ones while others decode, for a while at least.
    decoding = sizes.decoders * (sizes.decoder_tokens + min(sizes.decoder_answer_tokens, 2000))
    kept = decoding + (sizes.large_prefixes + 1) * sizes.large_tokens
    assert (
        sizes.least_engine_tokens(False)
        == sizes.most_tokens
        <= sizes.least_engine_tokens(True)
        <= kept
    )
    assert kept < sizes.engine_tokens


def test_with_fewer_prefixes_all_lengths_still_come() -> None:
    numbers = [*SIZES["cuda"].fewer_prefixes()]
    assert numbers == [16, 14, 13, 12, 11, 9, 8, 7, 6, 4, 3, 2]
    for prefixes in numbers:
        fewer = replace(CPU, sizes=replace(CPU.sizes, prefixes=prefixes))
        lengths = [len(prompt) for prompt in fewer.requests("mixed", 0, 2 * prefixes).prompts[::2]]
        assert sorted(lengths) == sorted(fewer.sizes.lengths())


def test_half_of_mixed_begins_with_what_was_stored() -> None:
    stored = CPU.prefixes()
    assert all(
        (len(prompt) - 1) % block == 0
        for prompt in stored.prompts
        for block in BLOCK_TOKENS.values()
    )
    count = 3 * CPU.sizes.prefixes
    prompts = CPU.requests("mixed", 0, count).prompts
    prefixes = [prompt[:-1] for prompt in stored.prompts]
    found = [
        [len(prefix) for prefix in prefixes if prompt[: len(prefix)] == prefix]
        for prompt in prompts
    ]
    assert all(len(each) == 1 for each in found[::2]) and not any(found[1::2])
    assert sum(each[0] for each in found[::2]) == CPU.reused_tokens("mixed", count)
    own = [tuple(prompt[-CPU.sizes.own_tokens :]) for prompt in prompts]
    assert len(set(own)) == count


def test_fresh_has_nothing_in_common_with_anything() -> None:
    turns = [CPU.requests("fresh", turn, 20).prompts for turn in (0, 1)]
    others = [
        *CPU.prefixes().prompts,
        *CPU.requests("mixed", 0, 20).prompts,
        *CPU.requests("mixed", 1, 20).prompts,
    ]
    begins = [tuple(prompt[:16]) for prompt in (*turns[0], *turns[1])]
    assert len(set(begins)) == 40 and not {tuple(prompt[:16]) for prompt in others} & set(begins)
    assert CPU.reused_tokens("fresh", 20) == 0


def test_a_longer_lane_begins_as_a_shorter_one() -> None:
    long, short = (CPU.requests("mixed", 0, count) for count in (20, 7))
    assert (long.prompts[:7], long.max_tokens[:7]) == (short.prompts, short.max_tokens)


def test_large_prompts_arrive_while_others_decode() -> None:
    stored = [prompt[:-1] for prompt in CPU.large_prefixes().prompts]
    for scenario in ("decode_loads", "decode_stores"):
        decoding, large = CPU.decode(scenario, 0, 5)
        assert decoding.at_a_time == CPU.sizes.decoders and large.every_s == CPU.sizes.every_s
        assert {len(prompt) for prompt in large.prompts} == {CPU.sizes.large_tokens} and set(
            large.max_tokens
        ) == {1}
        begins = [prompt[: len(stored[0])] in stored for prompt in large.prompts]
        assert set(begins) == {scenario == "decode_loads"} and len(begins) * large.every_s > 5
        assert CPU.reused_tokens(scenario, 3) == (3 * len(stored[0]) if all(begins) else 0)
