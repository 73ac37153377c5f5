"""Our side in vLLM's real scheduler, step by step: what is loaded and stored when, and that nothing
stays behind.

The model in place of the workers checks every byte of KV that a step reads, so each test is one of
being right, too."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

from engine_parts import (
    BLOCK,
    REACH,
    Engine,
    answer_to,
    full,
    needs_named_failures,
    next_token,
    request,
    window,
)

from kvkeep.kv.keys import KEY_BYTES
from kvkeep_lab.simulation.cache import SimulatedCache

pytestmark = pytest.mark.usefixtures("way")

PROMPT = list(range(100, 123))  # five blocks and three tokens
OTHER = list(range(500, 523))
COUNT = {"num_kvkeep_extra_cached_tokens": None}

HYBRID = pytest.param((full(), window()), id="full and window", marks=needs_named_failures)
MODELS = pytest.mark.parametrize("specs", [pytest.param((full(),), id="full"), HYBRID])


def filled(make: Callable[..., Engine], *specs: Any, **options: Any) -> Engine:
    """An engine whose server has PROMPT, and which has nothing of it itself."""
    make(*specs).run(request(PROMPT))
    return make(*specs, **options)


def waits_for_no_answer(config: Any) -> None:
    """An idle engine waits for the answer, a little; not one that others wait for."""
    config.parallel_config.data_parallel_size = 2


def counted(engine: Engine, name: str) -> int:
    return int(engine.params[name]["num_kvkeep_extra_cached_tokens"])


def preempted_once(engine: Engine, asked: Any, generated: int) -> Engine:
    """Serves the request, takes its blocks away when it has generated this many tokens, and serves
    it to its end with what the server has."""
    engine.add(asked)
    while len(engine.answers[asked.request_id]) < generated:
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert asked.num_preemptions == 1
    return engine


def stored_blocks(engine: Engine) -> int:
    return sum(asked.blocks for what, asked in engine.worker.began if what == "store")


# --- loads ----------------------------------------------------------------------------------------


@MODELS
def test_what_one_engine_stored_another_loads(
    make: Callable[..., Engine], specs: tuple[Any, ...]
) -> None:
    engine = filled(make, *specs)
    assert engine.run(request(PROMPT, "b", params=COUNT)).answers["b"] == answer_to(PROMPT)
    assert counted(engine, "b") == 5 * BLOCK
    assert len(engine.worker.loads) == 1


def test_a_request_waits_while_it_is_looked_up_and_then_while_it_is_loaded(
    make: Callable[..., Engine],
) -> None:
    engine = filled(make, change=waits_for_no_answer)
    asked = request(PROMPT, "b")
    engine.add(asked)
    for _ in range(3):
        assert not engine.step(delivers=False).num_scheduled_tokens
        assert asked.status.name == "WAITING" and engine.free_blocks == engine.free, (
            "not known yet: it has no blocks"
        )
    engine.worker.holds = True
    for _ in range(3):
        assert not engine.step().num_scheduled_tokens
        assert asked.status.name == "WAITING_FOR_REMOTE_KVS" and engine.free_blocks < engine.free
    assert len(engine.worker.loads) == 1
    engine.worker.holds = False
    engine.step()
    assert engine.step().num_scheduled_tokens == {"b": 3}
    assert engine.run().answers["b"] == answer_to(PROMPT)


@pytest.mark.parametrize("resets", [False, True])
def test_others_run_while_one_waits(make: Callable[..., Engine], resets: bool) -> None:
    """Also if the prefix cache is reset meanwhile."""
    engine = filled(make)
    engine.worker.holds = True
    engine.add(request(PROMPT, "b"), request(OTHER, "c", max_tokens=20))
    for _ in range(4):
        engine.step()
    assert engine.answers["c"] and not engine.answers["b"]
    assert not resets or engine.connector.reset_cache() is True
    engine.worker.holds = False
    engine.run()
    assert (engine.answers["b"], engine.answers["c"]) == (answer_to(PROMPT), answer_to(OTHER, 20))


def test_others_run_while_one_waits_for_blocks_from_a_tier(
    make: Callable[..., Engine], cache: SimulatedCache
) -> None:
    tiers = cache.add_tier(block_ms=4)
    engine = filled(make)
    assert tiers.take_down() > 0
    asked = request(PROMPT, "b", params=COUNT)
    engine.add(asked, request(OTHER, "c", max_tokens=20))
    for _ in range(8):
        engine.step()
        assert asked.status.name == "WAITING", "it has no blocks yet, and holds none of vLLM's"
    assert engine.answers["c"] and not engine.answers["b"]
    engine.run()
    assert (engine.answers["b"], engine.answers["c"]) == (answer_to(PROMPT), answer_to(OTHER, 20))
    assert counted(engine, "b") == 5 * BLOCK


def test_two_requests_with_one_prefix_load_it_once(make: Callable[..., Engine]) -> None:
    engine = filled(make)
    engine.run(request(PROMPT, "b", params=COUNT), request([*PROMPT, 1, 2, 3], "c", params=COUNT))
    assert engine.answers == {"b": answer_to(PROMPT), "c": answer_to([*PROMPT, 1, 2, 3])}
    assert (counted(engine, "b"), counted(engine, "c")) == (5 * BLOCK, 0)
    assert len(engine.worker.loads) == 1


def test_only_what_the_engine_lacks_is_loaded(make: Callable[..., Engine]) -> None:
    engine = filled(make)
    engine.run(request(PROMPT[: 2 * BLOCK], "short"))
    before = len(engine.worker.loads)
    engine.run(request(PROMPT, "b", params=COUNT))
    assert counted(engine, "b") == 3 * BLOCK
    [load] = engine.worker.loads[before:]
    assert (load.skip, load.blocks) == (2, 3)


@MODELS
def test_a_prompt_of_whole_blocks_that_the_server_has_entirely(
    make: Callable[..., Engine], specs: tuple[Any, ...]
) -> None:
    prompt = PROMPT[: 5 * BLOCK]
    make(*specs).run(request(prompt, "a"))
    engine = make(*specs).run(request(prompt, "b", params=COUNT))
    assert engine.answers["b"] == answer_to(prompt)
    assert counted(engine, "b") == 4 * BLOCK, (
        "the last token is always computed, so its block does not count"
    )
    # Full attention takes all of it and computes the last token again; with others, that token's
    # block is left out.
    assert [load.blocks for load in engine.worker.loads] == [5 if len(specs) == 1 else 4]


@MODELS
def test_a_cold_prompt_that_loads_back_what_it_generated_was_given_nothing(
    make: Callable[..., Engine], specs: tuple[Any, ...]
) -> None:
    prompt = PROMPT[:9]
    engine = preempted_once(make(*specs), request(prompt, "b", max_tokens=40, params=COUNT), 34)
    assert engine.answers["b"] == answer_to(prompt, 40)
    assert engine.worker.loads[-1].skip + engine.worker.loads[-1].blocks > 8, (
        "it loads what it generated"
    )
    assert counted(engine, "b") == 0


def test_a_prompt_that_was_all_local_before_a_preemption_was_given_nothing(
    make: Callable[..., Engine],
) -> None:
    prompt = list(range(41))
    engine = make().run(request(prompt, "a"))
    preempted_once(engine, request(prompt, "b", max_tokens=40, params=COUNT), 34)
    assert engine.answers["b"] == answer_to(prompt, 40)
    assert engine.worker.loads[-1].skip == 0 and engine.worker.loads[-1].blocks > 10, (
        "it loads its prompt and more"
    )
    assert counted(engine, "b") == 0


def test_preempted_in_its_prompt_it_counts_what_it_had_not_computed_by_then(
    make: Callable[..., Engine],
) -> None:
    """The server has nothing of the prompt when the request begins, and all of it when the request
    begins again."""
    prompt, other = list(range(41)), make()
    engine = make(budget=16)
    engine.add(asked := request(prompt, "b", params=COUNT))
    while asked.num_computed_tokens < 16:
        engine.step()
    other.run(request(prompt, "a"))
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.run().answers["b"] == answer_to(prompt)
    assert counted(engine, "b") == 40 - 16


def test_a_request_that_is_not_cached_any_more_is_told_what_it_was_given(
    make: Callable[..., Engine],
) -> None:
    make().run(request(PROMPT, "a"))
    engine = make()
    engine.add(request(PROMPT, "b", params=COUNT))
    while not engine.answers["b"]:
        engine.step()
    engine.connector.reset_cache()
    assert engine.run().answers["b"] == answer_to(PROMPT)
    assert counted(engine, "b") == 5 * BLOCK


def test_a_miss_and_a_server_that_is_away_cost_nothing_but_the_computation(
    make: Callable[..., Engine], cache: SimulatedCache
) -> None:
    engine = make()
    assert engine.run(request(PROMPT, "a", params=COUNT)).answers["a"] == answer_to(PROMPT)
    assert counted(engine, "a") == 0
    cache.stop_server()
    engine.forget().add(request(PROMPT, "b", params=COUNT))
    for _ in range(200):
        engine.step()
    assert engine.answers["b"] == answer_to(PROMPT)
    assert counted(engine, "b") == 0
    cache.resume_server()


def test_a_request_that_must_not_read_from_a_cache_does_not_ask(
    make: Callable[..., Engine],
) -> None:
    engine = filled(make)
    engine.run(request(PROMPT, "b", sampling={"skip_reading_prefix_cache": True}, params=COUNT))
    assert (engine.answers["b"], counted(engine, "b")) == (answer_to(PROMPT), 0)
    assert not engine.worker.loads


def test_salts_share_nothing(make: Callable[..., Engine]) -> None:
    make().run(request(PROMPT, cache_salt="alice"))
    engine = make()
    for name, salt in (("b", "bob"), ("n", None)):
        engine.run(request(PROMPT, name, cache_salt=salt, params=COUNT))
        assert (engine.answers[name], counted(engine, name)) == (answer_to(PROMPT), 0)
    engine.run(request(PROMPT, "a", cache_salt="alice", params=COUNT))
    assert counted(engine, "a") == 5 * BLOCK


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_block_that_fails_is_computed_and_not_asked_for_again(
    make: Callable[..., Engine], place: int
) -> None:
    engine = filled(make)
    engine.worker.failing = lambda load: [place]
    engine.run(request(PROMPT, "b", params=COUNT), most=30)
    assert engine.answers["b"] == answer_to(PROMPT)
    assert counted(engine, "b") == place * BLOCK
    assert len(engine.worker.loads) == 1, "no second try"


@needs_named_failures
def test_with_several_groups_a_load_fails_as_a_whole(make: Callable[..., Engine]) -> None:
    engine = filled(make, full(), window())
    engine.worker.failing = lambda load: [3]
    engine.run(request(PROMPT, "b", params=COUNT), most=30)
    assert (engine.answers["b"], counted(engine, "b")) == (answer_to(PROMPT), 0)
    assert len(engine.worker.loads) == 1


def test_who_waited_for_a_load_that_failed_is_served_too(make: Callable[..., Engine]) -> None:
    engine = filled(make)
    engine.worker.failing = lambda load: [1] if len(engine.worker.loads) == 1 else []
    engine.run(request(PROMPT, "b"), request(PROMPT, "c"), most=40)
    assert engine.answers == {"b": answer_to(PROMPT), "c": answer_to(PROMPT)}


def test_a_failed_load_under_the_policy_fail_ends_the_request(make: Callable[..., Engine]) -> None:
    engine = filled(make, extra={"kvkeep.load_failure_policy": "fail"})
    assert engine.config.kv_transfer_config.kv_load_failure_policy == "fail"
    engine.worker.failing = lambda load: [0]
    engine.add(request(PROMPT, "b"))
    for _ in range(6):
        engine.step()
    assert not engine.scheduler.requests
    assert engine.answers["b"] == []


def test_a_load_that_cannot_be_prepared_is_one_that_failed(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = filled(make)
    monkeypatch.setattr(engine.side, "prepare_load", lambda *args: 1 / 0)
    engine.worker.withdraw = lambda block_ids: None  # type: ignore[method-assign]
    engine.run(request(PROMPT, "b", params=COUNT), most=30)
    assert (engine.answers["b"], counted(engine, "b")) == (answer_to(PROMPT), 0)
    assert not engine.worker.loads


# --- preemption -----------------------------------------------------------------------------------


@MODELS
def test_preempted_requests_come_back_and_answer_the_same(
    make: Callable[..., Engine], specs: tuple[Any, ...]
) -> None:
    prompts = {
        name: list(range(1000 * at, 1000 * at + 17)) for at, name in enumerate("abcd", start=1)
    }
    engine = make(*specs, num_blocks=20 * len(specs))
    asked = [request(prompt, name, max_tokens=24, params=COUNT) for name, prompt in prompts.items()]
    engine.run(*asked, most=600)
    assert sum(each.num_preemptions for each in asked) > 0, "this is a test of preemption"
    assert engine.answers == {name: answer_to(prompt, 24) for name, prompt in prompts.items()}
    assert engine.worker.loads, "a preempted request finds what it stored before"


def test_exactly_the_blocks_that_a_step_may_write_into_are_taken_back_from_stores(
    make: Callable[..., Engine],
) -> None:
    engine = make(num_blocks=6)  # five for requests, and all of them are stored
    engine.worker.holds = True
    engine.add(request(PROMPT[: 5 * BLOCK], "a", max_tokens=1))
    engine.step()
    while engine.scheduler.requests:
        engine.step()
    stored = {
        block
        for what, store in engine.worker.began
        if what == "store"
        for block in store.block_ids.tolist()
    }
    assert len(stored) == 5 and engine.free_blocks == engine.free, "over, and its store is not"
    engine.add(request(OTHER[: 2 * BLOCK + 1], "b", max_tokens=1))
    scheduled = engine.step(delivers=False)
    if not scheduled.scheduled_new_reqs:  # it waits for an answer
        scheduled = engine.step()
    given = set(scheduled.scheduled_new_reqs[0].block_ids[0])
    assert len(given) == 3 and given <= stored
    assert scheduled.kv_connector_metadata.step.withdrawn == sorted(given)
    engine.worker.holds = False
    engine.run()
    other = make().run(request(PROMPT, "c", params=COUNT))
    assert (other.answers["c"], counted(other, "c")) == (answer_to(PROMPT), 5 * BLOCK), (
        "set aside, and stored"
    )


def test_blocks_that_a_running_request_grows_into_are_taken_back(
    make: Callable[..., Engine],
) -> None:
    engine = make(num_blocks=10)  # nine for requests
    engine.add(request(OTHER[:2], "long", max_tokens=30))
    while not engine.answers["long"]:
        engine.step()
    engine.worker.holds = True
    engine.add(request(PROMPT, "a", max_tokens=1))
    while "a" in engine.scheduler.requests:
        engine.step()
    stored = {
        block
        for what, store in engine.worker.began
        if what == "store"
        for block in store.block_ids.tolist()
    }
    withdrawn: set[int] = set()
    while "long" in engine.scheduler.requests:
        scheduled = engine.step()
        more = {
            block
            for new in scheduled.scheduled_cached_reqs.new_block_ids
            if new
            for block in new[0]
        }
        assert set(scheduled.kv_connector_metadata.step.withdrawn) == more & stored
        withdrawn |= more & stored
    assert withdrawn, "this is a test of a block that is needed again"
    engine.worker.holds = False
    engine.run()
    assert engine.answers["long"] == answer_to(OTHER[:2], 30)
    other = make().run(request(PROMPT, "c", params=COUNT))
    assert (other.answers["c"], counted(other, "c")) == (answer_to(PROMPT), 5 * BLOCK)


# --- aborts ---------------------------------------------------------------------------------------


def test_aborted_before_anything(make: Callable[..., Engine]) -> None:
    engine = filled(make)
    engine.add(request(PROMPT, "b", params=COUNT))
    engine.abort("b")


def test_aborted_while_the_lookup_is_under_way(make: Callable[..., Engine]) -> None:
    engine = filled(make)
    engine.add(request(PROMPT, "b"))
    engine.step(delivers=False)
    engine.abort("b")


def test_aborted_when_the_lookup_is_answered_and_no_room_is_there(
    make: Callable[..., Engine],
) -> None:
    engine = filled(make, num_blocks=10)
    engine.add(request(OTHER, "long", max_tokens=8))
    for _ in range(3):
        engine.step()
    engine.add(request(PROMPT, "b"))
    for _ in range(2):
        engine.step()
    assert not engine.worker.loads, "this is a test of having no room"
    engine.abort("b")
    assert engine.run().answers["long"] == answer_to(OTHER, 8)


@MODELS
def test_aborted_while_it_is_loaded(make: Callable[..., Engine], specs: tuple[Any, ...]) -> None:
    engine = filled(make, *specs)
    engine.worker.holds = True
    engine.add(request(PROMPT, "b"))
    for _ in range(3):
        engine.step()
    assert engine.worker.loads
    engine.abort("b")
    engine.step()
    assert engine.free_blocks < engine.free, "a load still writes into them"
    engine.worker.holds = False


def test_aborted_when_it_is_loaded_and_not_yet_run(make: Callable[..., Engine]) -> None:
    engine = filled(make)
    engine.worker.holds = True
    engine.add(request(PROMPT, "b"))
    for _ in range(3):
        engine.step()
    engine.worker.holds = False
    engine.step()
    assert not engine.answers["b"]
    engine.abort("b")
    assert engine.free_blocks == engine.free


def test_aborted_while_its_load_fails(make: Callable[..., Engine]) -> None:
    engine = filled(make)
    engine.worker.holds, engine.worker.failing = True, lambda load: [0]
    engine.add(request(PROMPT, "b"))
    for _ in range(3):
        engine.step()
    engine.abort("b")
    engine.worker.holds = False


def test_who_waits_for_the_load_of_an_aborted_request_is_served(
    make: Callable[..., Engine],
) -> None:
    engine = filled(make)
    engine.worker.holds = True
    engine.add(request(PROMPT, "b"), request(PROMPT, "c"))
    for _ in range(3):
        engine.step()
    engine.abort("b")
    engine.step()
    engine.worker.holds = False
    assert engine.run(most=30).answers["c"] == answer_to(PROMPT)


def test_aborted_while_it_runs(make: Callable[..., Engine]) -> None:
    engine = filled(make)
    engine.add(request(PROMPT, "b", max_tokens=50))
    for _ in range(8):
        engine.step()
    assert engine.answers["b"]
    engine.abort("b")


def test_the_name_of_an_aborted_request_may_be_used_again_at_once(
    make: Callable[..., Engine],
) -> None:
    engine = filled(make, change=waits_for_no_answer)
    engine.add(request(PROMPT, "b"))
    engine.step(delivers=False)
    engine.abort("b")
    engine.run(request(OTHER, "b"))
    assert engine.answers["b"] == answer_to(OTHER)


def test_a_scheduler_in_the_same_process_hears_of_a_load_a_step_sooner(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "ahead", True)
    steps = {}
    for apart in (False, True):
        monkeypatch.setattr(Engine, "apart", apart)
        engine = filled(make)
        engine.add(request(PROMPT, "b", params=COUNT))
        engine.worker.holds = True
        while not engine.worker.loads:
            engine.step()
        engine.worker.holds = False  # it ends while the next step is under way
        steps[apart] = 0
        while not engine.answers["b"]:
            engine.step()
            steps[apart] += 1
        engine.run()
        assert (engine.answers["b"], counted(engine, "b")) == (answer_to(PROMPT), 5 * BLOCK)
    assert steps[False] == steps[True] - 1


def test_results_that_cannot_be_taken_in_keep_no_request_waiting(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = filled(make)
    engine.add(request(PROMPT, "b"))
    while not engine.worker.loads:
        engine.step()
    complete, requests = engine.side.complete, engine.half
    assert requests is not None

    def fail(reports: Any) -> Any:
        complete(reports)
        raise RuntimeError("as the test says")

    monkeypatch.setattr(engine.side, "complete", fail)
    while not engine.answers["b"]:
        engine.step()
    monkeypatch.undo()
    engine.run()
    assert engine.answers["b"] == answer_to(PROMPT)
    requests.faults = 0  # counted, and seen by the test


@needs_named_failures
def test_two_loads_that_fail_together_where_there_is_no_room_for_both(
    make: Callable[..., Engine],
) -> None:
    """The first needs more blocks than it gave back, the second holds them, and vLLM looks at the
    first alone."""
    engine = make(full(), window(), num_blocks=24)
    prompts = {
        "a": list(range(100, 133)),
        "b": list(range(300, 333)),
    }  # eight blocks and a token each
    for tokens in prompts.values():
        engine.run(request(tokens, max_tokens=1))
    engine.forget()
    engine.worker.holds = True
    engine.worker.failing = lambda load: list(range(load.blocks))
    engine.add(*(request(tokens, name) for name, tokens in prompts.items()))
    while len(engine.worker.loads) < 2:
        engine.step()
    engine.worker.holds = False
    engine.run(most=100)
    assert {name: engine.answers[name] for name in prompts} == {
        name: answer_to(tokens) for name, tokens in prompts.items()
    }


@MODELS
def test_a_request_without_room_does_not_hold_up_one_whose_load_has_ended(
    make: Callable[..., Engine], specs: tuple[Any, ...]
) -> None:
    """The second request waits for the first one's load, so the third one, behind it, gets its
    blocks first. Then the second needs these blocks, and vLLM before 0.32 looks at no request
    behind it."""
    prompts = {"a": PROMPT, "b": [*PROMPT[: 5 * BLOCK], *range(700, 700 + 6 * BLOCK)], "c": OTHER}
    room = sum(-(-len(prompts["b"]) // BLOCK) for _ in specs)
    engine = filled(
        make, *specs, num_blocks=room + 2
    )  # vLLM keeps the null block, and one is to spare
    engine.run(request(OTHER, max_tokens=1)).forget()
    engine.worker.holds = True
    engine.add(*(request(tokens, name, max_tokens=1) for name, tokens in prompts.items()))
    while len(engine.worker.loads) < 2:
        engine.step()
    engine.worker.holds = False
    engine.run(most=50)
    assert {name: engine.answers[name] for name in prompts} == {
        name: answer_to(tokens, 1) for name, tokens in prompts.items()
    }


# --- stores ---------------------------------------------------------------------------------------


def test_the_last_full_blocks_of_a_finished_request_are_stored(make: Callable[..., Engine]) -> None:
    engine = make().run(request(PROMPT, "a", max_tokens=10))
    # Of 33 tokens the last one was never computed: eight blocks are full.
    assert stored_blocks(engine) == 8
    turn = [*PROMPT, *answer_to(PROMPT, 10), 1, 2]
    other = make().run(request(turn, "b", params=COUNT))
    assert (other.answers["b"], counted(other, "b")) == (answer_to(turn), 8 * BLOCK)


def test_a_prompt_is_stored_as_it_is_computed(make: Callable[..., Engine]) -> None:
    engine = make(budget=2 * BLOCK)
    engine.add(request(PROMPT, "a"))
    seen = []
    for _ in range(4):
        engine.step()
        seen.append(stored_blocks(engine))
    assert seen == [2, 4, 5, 5], "two blocks a step, and the one that is full of the rest"
    engine.run()


def test_generated_blocks_are_stored_several_together(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.run(request(PROMPT, "a", max_tokens=60))
    sizes = [asked.blocks for what, asked in engine.worker.began if what == "store"]
    assert sum(sizes) == (23 + 59) // BLOCK
    assert len(sizes) <= 4, sizes


def test_what_the_server_has_is_not_stored_again(make: Callable[..., Engine]) -> None:
    engine = filled(make)
    engine.run(request(PROMPT, "b", max_tokens=1))
    assert stored_blocks(engine) == 0


def test_guessed_tokens_are_stored_only_when_they_turned_out_right(
    make: Callable[..., Engine],
) -> None:
    engine = make(guesses=3)
    asked = request(PROMPT, "a", max_tokens=20)
    engine.add(asked)
    while engine.scheduler.requests:
        engine.step()
        if engine.scheduler.requests and asked.num_output_tokens:
            right = next_token(asked.all_token_ids)
            asked.spec_token_ids = [right, 7, 7] if asked.num_output_tokens % 2 else [7, 7, 7]
    assert engine.run().answers["a"] == answer_to(PROMPT, 20)
    for _, store in [each for each in engine.worker.began if each[0] == "store"]:
        assert len(store.keys) == store.blocks * KEY_BYTES
    assert stored_blocks(engine) == (23 + 19) // BLOCK
    turn = [*PROMPT, *answer_to(PROMPT, 20), 1]
    other = make().run(request(turn, "b", params=COUNT))
    assert (other.answers["b"], counted(other, "b")) == (
        answer_to(turn),
        (23 + 19) // BLOCK * BLOCK,
    )


@needs_named_failures
def test_a_window_needs_its_last_blocks_only(make: Callable[..., Engine]) -> None:
    make(full(), window()).run(request(PROMPT))
    engine = make(full(), window()).run(request(PROMPT, "b", params=COUNT))
    [load] = engine.worker.loads
    rows = load.block_ids
    assert (rows[0] >= 0).all()
    assert (rows[1] >= 0).sum() <= -(-REACH // BLOCK) + 1 < 5
    assert counted(engine, "b") == 5 * BLOCK


# --- the rest -------------------------------------------------------------------------------------


def test_after_a_reset_nothing_old_is_found_and_new_blocks_are_its_own(
    make: Callable[..., Engine],
) -> None:
    engine = filled(make)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run(request(PROMPT, "b", params=COUNT))
    assert counted(engine, "b") == 0
    engine.forget().run(request(PROMPT, "c", params=COUNT))
    assert counted(engine, "c") == 5 * BLOCK, "what it stored since"
    other = make().run(request(PROMPT, "d", params=COUNT))
    assert (other.answers["d"], counted(other, "d")) == (answer_to(PROMPT), 5 * BLOCK), (
        "what was stored before"
    )


def test_statistics_reach_vllms(make: Callable[..., Engine]) -> None:
    engine = filled(make)
    engine.add(request(PROMPT, "b", max_tokens=6))
    seen: dict[str, int] = {}
    make_stats = engine.scheduler.make_stats

    def spy(spec: Any = None, stats: Any = None, *args: Any, **words: Any) -> Any:
        for name, value in (stats.data if stats is not None else {}).items():
            seen[name] = seen.get(name, 0) + value
        return make_stats(spec, stats, *args, **words)

    engine.scheduler.make_stats = spy  # type: ignore[method-assign]
    engine.run()
    assert seen["lookups"] == 1 and seen["hit_tokens"] == 5 * BLOCK and seen["loaded_blocks"] == 5
    assert seen["stored_blocks"] == 1 and "faults" not in seen and seen["connected"]


@MODELS
@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_in_whatever_order(
    make: Callable[..., Engine], cache: SimulatedCache, specs: tuple[Any, ...], seed: int
) -> None:
    chance, cache.is_seen = random.Random(seed), seed % 2 == 0
    engine = make(*specs, num_blocks=26 * len(specs), budget=16)
    engine.worker.failing = lambda load: (
        [chance.randrange(load.blocks)] if chance.random() < 0.2 else []
    )
    shared = [[1000 * start + token for token in range(40)] for start in range(3)]
    asked: dict[str, tuple[list[int], int]] = {}
    for number in range(150):
        if chance.random() < 0.3 and len(engine.scheduler.requests) < 6:
            prompt = [
                *chance.choice(shared)[: chance.randrange(3, 40)],
                *(number for _ in range(chance.randrange(3))),
            ]
            asked[f"f{number}"] = prompt, chance.randrange(1, 20)
            engine.add(
                request(prompt, f"f{number}", max_tokens=asked[f"f{number}"][1], params=COUNT)
            )
        if chance.random() < 0.05 and engine.scheduler.requests:
            asked.pop(name := chance.choice(list(engine.scheduler.requests)), None)
            engine.abort(name)
        if chance.random() < 0.1 and not engine.scheduler.running:
            engine.scheduler.reset_prefix_cache()
        engine.worker.holds = chance.random() < 0.3
        engine.step(delivers=chance.random() < 0.8)
    engine.worker.holds = False
    engine.run(most=400)
    for name, (prompt, max_tokens) in asked.items():
        assert engine.answers[name] == answer_to(prompt, max_tokens), name
        assert counted(engine, name) == engine.given.tokens(name, len(prompt)), name
    assert engine.worker.loads, "this is a test of loads, too"
