"""Prompts in, answers with their metrics out; what an LLM refuses, and how it ends."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep.engine.llm import LLM, Prompt
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.models.settings import ModelSettings
from kvkeep.errors import RequestError, SettingsError
from kvkeep_lab.simulation.oracle import OracleModel

TOKENS = list(range(1, 23))
SMALL: dict[str, Any] = {"block_tokens": 4, "num_blocks": 64}
NATIVE: dict[str, Any] = {"kv_offloading_backend": "native", "kv_offloading_size": 1 / 64, **SMALL}
SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_layers": 2}
GQA = ModelSettings(kind="gqa", num_heads=2, num_kv_heads=2, head_dim=4, **SIZES)
KEY = "num_kvkeep_extra_cached_tokens"


def answers(prompts: Sequence[Any], **sampling: Any) -> list[list[int]]:
    """What the oracle answers to each prompt alone."""
    with LLM(OracleModel(), enable_prefix_caching=False, **SMALL) as llm:
        return [llm.generate([each], SamplingParams(**sampling))[0].token_ids for each in prompts]


def at_rest(llm: LLM) -> bool:
    assert llm.engine.flush()
    llm.engine.check_integrity()
    return not llm.engine.busy and not llm.engine.scheduler.unfinished


# -- what goes in


BAD_NUMBERS = [[-1], [257], [1, 2**40], [1.0], [True], ["1"], [None], [[1]]]


@pytest.mark.parametrize(
    "tokens", [[], (), *BAD_NUMBERS, "text", None, 5, 1.5, {"tokens": 1}], ids=repr
)
def test_a_prompt_that_cannot_be_served_is_refused_before_anything_runs(tokens: Any) -> None:
    with LLM(OracleModel(), **SMALL) as llm:
        for bad in ([tokens], [Prompt(tokens)], [TOKENS, tokens], [TOKENS, Prompt(tokens)]):
            with pytest.raises(RequestError) as refusal:
                llm.generate(bad)
            assert refusal.value.field == "prompt"
            assert at_rest(llm), "the good ones beside it are not left over"
        assert llm.engine.scheduler.pool.num_remembered == 0, "nothing ran"
        assert [llm.generate([TOKENS])[0].token_ids] == answers([TOKENS])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"block_size": 16}, "block_size"),
        ({"sync_loads": True}, "sync_loads"),
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy"),
        ({"num_blocks": 1}, "num_blocks"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching"),
        ({"tensor_parallel_size": 3}, "heads"),
        ({"pipeline_parallel_size": 3}, "layers"),
    ],
    ids=str,
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        LLM(OracleModel(), **options)


OUR_KEY = "kvkeep.load_failure_policy"


@pytest.mark.parametrize(
    ("field", "key", "policy", "set_by"),
    [
        (None, None, "recompute", "the default"),
        ("fail", None, "fail", "set by kv_transfer_config"),
        (None, "fail", "fail", f"set by {OUR_KEY}"),
        ("recompute", "fail", "fail", f"set by {OUR_KEY}"),
        ("fail", "recompute", "recompute", f"set by {OUR_KEY}"),
    ],
)
def test_our_key_for_the_failure_policy_wins_over_the_field_and_the_policy_is_logged(
    field: str | None, key: str | None, policy: str, set_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    words: dict[str, Any] = {"kv_connector_extra_config": {OUR_KEY: key} if key else {}}
    words |= {"kv_load_failure_policy": field} if field else {}
    caplog.set_level(logging.INFO, "kvkeep")
    with LLM(OracleModel(), kv_transfer_config=words, **NATIVE) as llm:
        assert llm.engine.config.kv_load_failure_policy == policy
    said = f"kvkeep: kv_load_failure_policy is {policy} ({set_by})"
    assert [line for line in caplog.messages if "policy" in line] == [said]


def test_keys_for_vllm_are_accepted_and_checked_all_the_same() -> None:
    extra: dict[str, Any] = {"kvkeep.revision": "2", "kvkeep.allow_untested_vllm": True}
    words = {"kv_connector_extra_config": extra}
    with LLM(OracleModel(), kv_transfer_config=words, **NATIVE) as llm:
        assert llm.generate([TOKENS])[0].finish_reason == "length"
    extra["kvkeep.revision"] = ""
    with pytest.raises(SettingsError, match=r"kvkeep\.revision"):
        LLM(OracleModel(), kv_transfer_config=words, **NATIVE)


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", str(tmp_path)):
        with pytest.raises(SettingsError, match=r"config\.json"):
            LLM(path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(SettingsError, match="architectures"):
        LLM(tmp_path)


@pytest.fixture
def no_pool_left() -> Iterator[None]:
    pools = set(Path("/dev/shm").glob("kvkeep-embedded-*"))
    yield
    assert set(Path("/dev/shm").glob("kvkeep-embedded-*")) <= pools


@pytest.mark.usefixtures("no_pool_left")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_blocks": 10**15}, "no memory for num_blocks"),
        ({"device": "meta"}, "cannot be offloaded"),
    ],
)
def test_an_engine_that_cannot_be_made_leaves_no_pool_behind(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        LLM(OracleModel(), **NATIVE | options)


@pytest.mark.usefixtures("no_pool_left")
def test_an_llm_is_closed_after_an_error_and_closing_twice_is_closing_once() -> None:
    with pytest.raises(RequestError), LLM(OracleModel(), **NATIVE) as llm:
        llm.generate([[]])
    llm.close()


# -- what comes out


def test_answers_come_in_the_order_of_the_prompts() -> None:
    prompts = [TOKENS[:at] for at in (20, 3, 11, 1)]
    with LLM(OracleModel(), max_num_seqs=2, **SMALL) as llm:
        done = llm.generate(prompts, SamplingParams(max_tokens=4))
    assert [answer.token_ids for answer in done] == answers(prompts, max_tokens=4)
    outcomes = {(each.finish_reason, each.error, each.kv_transfer_params) for each in done}
    assert outcomes == {("length", "", None)}
    assert len({answer.request_id for answer in done}) == 4


def test_prompts_may_be_any_sequence_and_are_not_changed() -> None:
    prompt = tuple(TOKENS)
    mine = list(TOKENS)
    with LLM(OracleModel(), **SMALL) as llm:
        one, two, three = llm.generate([prompt, mine, Prompt(prompt)])
        assert llm.generate([]) == []
    assert one.token_ids == two.token_ids == three.token_ids
    assert mine == TOKENS


def test_a_prompts_own_sampling_wins() -> None:
    prompts = [Prompt(TOKENS, sampling=SamplingParams(max_tokens=2)), TOKENS]
    with LLM(OracleModel(), **SMALL) as llm:
        short, long = llm.generate(prompts, SamplingParams(max_tokens=5))
    assert (len(short.token_ids), len(long.token_ids)) == (2, 5)
    assert short.token_ids == long.token_ids[:2]


def test_lower_priorities_are_served_first() -> None:
    with LLM(OracleModel(), max_num_seqs=1, **SMALL) as llm:
        late, early = llm.generate([Prompt(TOKENS, priority=5), Prompt(TOKENS[:5], priority=-5)])
    assert early.metrics.finished_s is not None and late.metrics.first_token_s is not None
    assert early.metrics.finished_s <= late.metrics.first_token_s


def test_progress_counts_answers_up_to_all_of_them() -> None:
    seen: list[int] = []
    with LLM(OracleModel(), **SMALL) as llm:
        llm.generate([TOKENS, TOKENS[:3]], SamplingParams(max_tokens=3), seen.append)
    assert len(seen) >= 3 and seen == sorted(seen) and seen[-1] == 2


def test_metrics_say_what_a_request_cost_and_was_given() -> None:
    # So few tokens would be computed otherwise.
    always = {"kv_connector_extra_config": {"kvkeep.load_when": "always"}}
    with LLM(OracleModel(), **NATIVE, kv_transfer_config=always) as llm:
        [cold] = llm.generate([Prompt(TOKENS, kv_transfer_params={KEY: None})])
        [local] = llm.generate([TOKENS])
        assert llm.engine.flush()
        llm.engine.scheduler.pool.forget_all()
        [warm] = llm.generate([Prompt(TOKENS, kv_transfer_params={KEY: None})])
    for answer in (cold, local, warm):
        metrics = answer.metrics
        assert metrics.ttft_ms is not None and metrics.ttft_ms > 0
        assert metrics.first_token_s is not None and metrics.finished_s is not None
        assert metrics.arrived_s < metrics.first_token_s <= metrics.finished_s
        assert (metrics.failed_loads, metrics.preemptions) == (0, 0)
    given = [
        (each.metrics.local_cached_tokens, each.metrics.external_cached_tokens)
        for each in (cold, local, warm)
    ]
    assert given == [(0, 0), (20, 0), (0, 20)]
    assert (cold.kv_transfer_params, warm.kv_transfer_params) == ({KEY: 0}, {KEY: 20})


def test_one_seed_is_one_model() -> None:
    def answer(seed: int) -> list[int]:
        with LLM(GQA, seed=seed, dtype=torch.float64, **SMALL) as llm:
            return llm.generate([TOKENS], SamplingParams(max_tokens=12))[0].token_ids

    assert answer(1) == answer(1) != answer(2)


# -- endings


def test_an_aborted_request_keeps_what_it_has_and_the_others_go_on() -> None:
    prompts = [TOKENS, TOKENS[:9]]
    with LLM(OracleModel(), **NATIVE) as llm:

        def progress(done: int) -> None:
            running = llm.engine.scheduler.running
            if running and len(running[0].output_tokens) >= 3:
                llm.engine.abort("request-0")

        first, second = llm.generate(prompts, SamplingParams(max_tokens=8), progress)
        assert at_rest(llm)
    expected = answers(prompts, max_tokens=8)
    assert (first.finish_reason, second.finish_reason) == ("abort", "length")
    assert 3 <= len(first.token_ids) < 8 and first.token_ids == expected[0][: len(first.token_ids)]
    assert second.token_ids == expected[1]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_interruption_between_steps_leaves_a_usable_llm(
    kind: type[BaseException], at: int
) -> None:
    steps: list[int] = []

    def progress(done: int) -> None:
        steps.append(done)
        if len(steps) == at:
            raise kind

    prompts = [TOKENS, TOKENS[:9]]
    with LLM(OracleModel(), **NATIVE) as llm:
        with pytest.raises(kind):
            llm.generate(prompts, SamplingParams(max_tokens=6), progress)
        assert at_rest(llm)
        done = llm.generate(prompts, SamplingParams(max_tokens=6))
        assert [answer.token_ids for answer in done] == answers(prompts, max_tokens=6)
        assert at_rest(llm)


@pytest.mark.parametrize("late", [False, True], ids=["before it writes KV", "after"])
@pytest.mark.parametrize("options", [SMALL, NATIVE], ids=["alone", "native"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interruption_inside_a_step_leaves_no_block_that_was_not_computed(
    failing_model: Any, at: int, options: dict[str, Any], late: bool
) -> None:
    """Ctrl-C mostly comes while the model computes. Its blocks count as remembered by then."""
    prompts = [TOKENS, [*TOKENS[:12], 99], TOKENS[:9]]
    failing_model.late, failing_model.error = late, KeyboardInterrupt()
    with LLM(failing_model, max_num_batched_tokens=24, **options) as llm:
        failing_model.fail_at = at
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, SamplingParams(max_tokens=6))
        assert at_rest(llm)
        done = llm.generate(prompts, SamplingParams(max_tokens=6))
        assert [answer.token_ids for answer in done] == answers(prompts, max_tokens=6)
        assert at_rest(llm)
