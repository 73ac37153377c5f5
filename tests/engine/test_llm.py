from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep.engine.llm import LLM, Prompt
from kvkeep.engine.models.model import Rank, Segment
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.models.settings import ModelSettings
from kvkeep.errors import KVKeepError, RequestError, SettingsError
from kvkeep_lab.simulation.oracle import OracleModel

TOKENS = list(range(1, 23))
SMALL: dict[str, Any] = {"block_tokens": 4, "num_blocks": 64}
NATIVE: dict[str, Any] = {"kv_offloading_backend": "native", "kv_offloading_size": 1 / 64, **SMALL}
GQA = ModelSettings(
    kind="gqa",
    vocab_size=31,
    hidden_size=16,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
)
KEY = "num_kvkeep_extra_cached_tokens"


def answers(prompts: Sequence[Any], **sampling: Any) -> list[list[int]]:
    """What the oracle answers to each prompt alone."""
    with LLM(OracleModel(), enable_prefix_caching=False, **SMALL) as llm:
        return [llm.generate([each], SamplingParams(**sampling))[0].token_ids for each in prompts]


def at_rest(llm: LLM) -> bool:
    assert llm.engine.flush()
    llm.engine.check_integrity()
    return not llm.engine.busy and not llm.engine.scheduler.unfinished


class Interrupted(OracleModel):
    """Ctrl-C comes in the middle of some forward passes: before anything is written, or after."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.after = -1
        self._late = late

    def forward(
        self, segments: Sequence[Segment], ranks: Sequence[Rank], block_tokens: int
    ) -> torch.Tensor:
        self.after -= 1
        if self._late:
            logits = super().forward(segments, ranks, block_tokens)
        if self.after == 0:
            raise KeyboardInterrupt
        return logits if self._late else super().forward(segments, ranks, block_tokens)


# -- what goes in


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        (),
        [-1],
        [257],
        [1, 2**40],
        [1.0],
        [True],
        ["1"],
        [None],
        [[1]],
        "text",
        None,
        5,
        1.5,
        {"tokens": 1},
    ],
    ids=repr,
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


def test_a_request_that_is_too_long_is_refused_with_the_remedy() -> None:
    with LLM(OracleModel(), block_tokens=4, num_blocks=9) as llm:
        [answer] = llm.generate([TOKENS], SamplingParams(max_tokens=10))
        assert len(answer.token_ids) == 10, "22 and 10 tokens fill all eight blocks"
        with pytest.raises(RequestError, match="has 32 at most") as refusal:
            llm.generate([TOKENS], SamplingParams(max_tokens=11))
        assert "num_blocks" in refusal.value.hint
    with LLM(
        OracleModel(), enable_chunked_prefill=False, max_num_batched_tokens=24, **SMALL
    ) as whole:
        with pytest.raises(RequestError) as refusal:
            whole.generate([TOKENS], SamplingParams(max_tokens=3))
        assert "max_num_batched_tokens" in refusal.value.hint


@pytest.mark.parametrize(
    "sampling",
    [{"max_tokens": 0}, {"temperature": -1}, {"seed": "x"}, {"top_k": 0}, {"stop_token_ids": "ab"}],
    ids=str,
)
def test_bad_sampling_never_becomes_a_request(sampling: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**sampling)
    assert refusal.value.field in sampling


@pytest.mark.parametrize("priority", ["1", 1.5, True, None], ids=repr)
def test_a_priority_that_is_none_is_refused(priority: Any) -> None:
    with LLM(OracleModel(), **SMALL) as llm:
        with pytest.raises(RequestError) as refusal:
            llm.generate([Prompt(TOKENS, priority=priority)])
        assert refusal.value.field == "priority"
        assert at_rest(llm)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"block_size": 16}, "block_size"),
        ({"sync_loads": True}, "sync_loads"),
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"num_blocks": "64"}, "num_blocks"),
        ({"num_blocks": 1}, "num_blocks"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching"),
        ({"tensor_parallel_size": 3}, "heads"),
        ({"pipeline_parallel_size": 3}, "layers"),
    ],
    ids=str,
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        LLM(OracleModel(), **options)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, "recompute (the default)"),
        ({"kv_load_failure_policy": "fail"}, "fail (set by kv_transfer_config)"),
        (
            {"kv_connector_extra_config": {"kvkeep.load_failure_policy": "fail"}},
            "fail (set by kvkeep.load_failure_policy)",
        ),
    ],
)
def test_the_load_failure_policy_in_force_is_logged(
    words: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvkeep")
    with LLM(OracleModel(), kv_transfer_config=words, **NATIVE):
        assert [line for line in caplog.messages if "policy" in line] == [
            f"kvkeep: kv_load_failure_policy is {said}"
        ]


@pytest.mark.parametrize(
    ("field", "key", "policy"),
    [("recompute", "fail", "fail"), ("fail", "recompute", "recompute"), ("fail", None, "fail")],
)
def test_our_key_for_the_failure_policy_wins_over_the_field(
    field: str, key: str | None, policy: str
) -> None:
    extra = {} if key is None else {"kvkeep.load_failure_policy": key}
    words = {"kv_load_failure_policy": field, "kv_connector_extra_config": extra}
    with LLM(OracleModel(), kv_transfer_config=words, **NATIVE) as llm:
        assert llm.engine.config.kv_load_failure_policy == policy


def test_keys_for_vllm_are_accepted_and_checked_all_the_same() -> None:
    extra: dict[str, Any] = {"kvkeep.revision": "2", "kvkeep.allow_untested_vllm": True}
    with LLM(
        OracleModel(), kv_transfer_config={"kv_connector_extra_config": extra}, **NATIVE
    ) as llm:
        assert llm.generate([TOKENS])[0].finish_reason == "length"
    with pytest.raises(SettingsError, match=r"kvkeep\.revision"):
        LLM(
            OracleModel(),
            kv_transfer_config={"kv_connector_extra_config": {"kvkeep.revision": ""}},
            **NATIVE,
        )


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", str(tmp_path)):
        with pytest.raises(SettingsError, match=r"config\.json"):
            LLM(path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(SettingsError, match="architectures"):
        LLM(tmp_path)


def test_an_engine_that_cannot_be_made_leaves_no_pool_behind() -> None:
    before = set(Path("/dev/shm").glob("kvkeep-embedded-*"))
    with pytest.raises(SettingsError, match="no memory for num_blocks"):
        LLM(OracleModel(), **NATIVE | {"num_blocks": 10**15})
    assert set(Path("/dev/shm").glob("kvkeep-embedded-*")) <= before


def test_offloading_from_another_device_is_refused_and_leaves_nothing_behind() -> None:
    before = set(Path("/dev/shm").glob("kvkeep-embedded-*"))
    with pytest.raises(SettingsError, match="cannot be offloaded"):
        LLM(OracleModel(), device="meta", **NATIVE)
    assert set(Path("/dev/shm").glob("kvkeep-embedded-*")) <= before


# -- what comes out


def test_answers_come_in_the_order_of_the_prompts() -> None:
    prompts = [TOKENS[:at] for at in (20, 3, 11, 1)]
    with LLM(OracleModel(), max_num_seqs=2, **SMALL) as llm:
        done = llm.generate(prompts, SamplingParams(max_tokens=4))
    assert [answer.token_ids for answer in done] == answers(prompts, max_tokens=4)
    assert [(answer.finish_reason, answer.error, answer.kv_transfer_params) for answer in done] == [
        ("length", "", None)
    ] * 4
    assert len({answer.request_id for answer in done}) == 4


def test_no_prompts_have_no_answers() -> None:
    with LLM(OracleModel(), **SMALL) as llm:
        assert llm.generate([]) == []


def test_prompts_may_be_any_sequence_and_are_not_changed() -> None:
    prompt = tuple(TOKENS)
    mine = list(TOKENS)
    with LLM(OracleModel(), **SMALL) as llm:
        one, two, three = llm.generate([prompt, mine, Prompt(prompt)])
    assert one.token_ids == two.token_ids == three.token_ids
    assert mine == TOKENS


def test_a_prompts_own_sampling_wins() -> None:
    own = SamplingParams(max_tokens=2)
    with LLM(OracleModel(), **SMALL) as llm:
        short, long = llm.generate(
            [Prompt(TOKENS, sampling=own), TOKENS], SamplingParams(max_tokens=5)
        )
    assert (len(short.token_ids), len(long.token_ids)) == (2, 5)
    assert short.token_ids == long.token_ids[:2]


def test_a_stop_token_ends_the_answer() -> None:
    [expected] = answers([TOKENS], max_tokens=8)
    stop = SamplingParams(max_tokens=8, stop_token_ids=[expected[3]])
    with LLM(OracleModel(), **SMALL) as llm:
        [answer] = llm.generate([TOKENS], stop)
    assert (answer.finish_reason, answer.token_ids) == (
        "stop",
        expected[: expected.index(expected[3]) + 1],
    )


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
    always = {
        "kv_connector_extra_config": {"kvkeep.load_when": "always"}
    }  # so few tokens would be computed
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
        steps: list[int] = []

        def progress(done: int) -> None:
            steps.append(done)
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


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("options", [SMALL, NATIVE], ids=["alone", "native"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interruption_inside_a_step_leaves_no_block_that_was_not_computed(
    at: int, options: dict[str, Any], late: bool
) -> None:
    """Ctrl-C comes when the machine is busy, and that is in the model. Blocks count as remembered
    from then on."""
    model, prompts = Interrupted(late=late), [TOKENS, [*TOKENS[:12], 99], TOKENS[:9]]
    with LLM(model, max_num_batched_tokens=24, **options) as llm:
        model.after = at
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, SamplingParams(max_tokens=6))
        assert at_rest(llm)
        done = llm.generate(prompts, SamplingParams(max_tokens=6))
        assert [answer.token_ids for answer in done] == answers(prompts, max_tokens=6)
        assert at_rest(llm)


def test_closing_twice_is_closing_once() -> None:
    llm = LLM(OracleModel(), **NATIVE)
    llm.generate([TOKENS])
    llm.close()
    llm.close()


def test_leaving_the_block_closes_also_after_an_error() -> None:
    before = set(Path("/dev/shm").glob("kvkeep-embedded-*"))
    with pytest.raises(RequestError), LLM(OracleModel(), **NATIVE) as llm:
        llm.generate([[]])
    assert set(Path("/dev/shm").glob("kvkeep-embedded-*")) <= before


def test_a_refusal_is_one_of_ours() -> None:
    for error in (RequestError, SettingsError):
        assert issubclass(error, KVKeepError)
