"""M1: how much the cache gave a request, against counts made by hand, from vLLM's side and the
server's.

prompt of 170 tokens, blocks of 32:  |0|1|2|3|4|… 10 tokens      5 full blocks
"""

from __future__ import annotations

from typing import Any

import pytest
from replicas import (
    BLOCK,
    KEY,
    OTHER,
    PoolMemory,
    Replica,
    Since,
    at_rest,
    counting,
    eventually,
    forget_everything,
    prompt,
    request,
    tokens_of,
)

from kvkeep.testing.process import ServerProcess

pytestmark = pytest.mark.usefixtures("_nothing_is_left")


@pytest.fixture
def engine(one: Replica, server: ServerProcess) -> Replica:
    return one.use("llama", server)


@pytest.fixture
def other(two: Replica, server: ServerProcess) -> Replica:
    return two.use("llama", server)


@pytest.mark.parametrize("names", [[KEY], [OTHER], [KEY, OTHER]], ids=["ours", "theirs", "both"])
def test_the_number_comes_back_under_each_name_that_was_sent(
    engine: Replica, names: list[str]
) -> None:
    tokens = prompt(170)
    asked = request(tokens, params=dict.fromkeys(names))
    [cold] = engine.serve([asked])
    [warm] = engine.fresh().serve([asked])
    assert cold.params == dict.fromkeys(names, 0)
    assert warm.params == dict.fromkeys(names, 160)


@pytest.mark.parametrize(
    ("length", "first", "local", "expected"),
    [
        (170, 0, 0, 160),  # nothing local: all five full blocks
        (160, 0, 0, 128),  # the last token is always computed, so its block does not count
        (161, 0, 0, 160),
        (31, 0, 0, 0),
        (32, 0, 0, 0),
        (33, 0, 0, 32),
        (170, 70, 64, 96),  # two blocks local, the server's five less two
        (170, 135, 128, 32),
        (170, 170, 160, 0),  # all local
        (160, 160, 128, 0),  # all that vLLM takes of it
    ],
)
def test_the_number_is_the_servers_blocks_less_the_engines_own(
    engine: Replica, other: Replica, length: int, first: int, local: int, expected: int
) -> None:
    tokens = prompt(length)
    engine.serve([request(tokens)])
    if first:
        other.serve([request(tokens[:first], max_tokens=1)])
        other.fresh()  # it has them from the server, and not from before
        other.serve([request(tokens[:first], max_tokens=1)])
    [answer] = other.serve([counting(tokens)])
    assert answer.params == {KEY: expected}
    whole = (
        length if length % BLOCK == 0 else local + expected
    )  # its last token is computed, and counted or not
    assert answer.cached in (local + expected, whole, whole - 1), "and vLLM says so too"


def test_what_the_server_does_not_have_counts_nothing(
    engine: Replica, server: ServerProcess
) -> None:
    since = Since(server)
    [answer] = engine.serve([counting(prompt(170), max_tokens=23)])
    assert (since("lookups"), since("lookup_blocks"), since("hit_blocks")) == (1, 5, 0)
    assert eventually(lambda: since("stored_blocks") == 6), (
        "170 tokens and 22 generated ones: the 23rd has no KV"
    )
    assert answer.params == {KEY: 0}


def test_the_server_counts_the_same_hits(engine: Replica, server: ServerProcess) -> None:
    tokens = prompt(170)
    engine.serve([request(tokens)])
    engine.fresh()
    since = Since(server)
    [answer] = engine.serve([counting(tokens)])
    assert (since("lookups"), since("hit_blocks"), since("stored_blocks")) == (1, 5, 0)
    assert answer.params == {KEY: since("hit_blocks") * BLOCK}


def test_a_server_that_has_less_than_the_engine_never_makes_it_negative(
    engine: Replica, other: Replica, server: ServerProcess
) -> None:
    tokens = prompt(170)
    engine.fresh().serve([request(tokens)])
    forget_everything(server)
    other.fresh().serve([request(tokens[:70], max_tokens=1)])
    [answer] = engine.serve([counting([*tokens, *prompt(40)])])
    assert answer.cached == 160, "all local"
    assert answer.params == {KEY: 0}


@pytest.mark.parametrize(
    ("params", "expected"),
    [({}, {}), ({"mine": 1}, {}), ({"kvkeep_priority": 80}, {}), (None, None)],
)
def test_params_without_the_key_bring_an_empty_dict_and_none_nothing(
    engine: Replica, params: Any, expected: Any
) -> None:
    tokens = prompt(70)
    [answer] = engine.serve([request(tokens, params=params)])
    assert answer.params == expected
    [no_params] = engine.fresh().serve([request(tokens)])
    assert no_params.params is None
    assert no_params.cached == 64, "and yet it was loaded"


def test_a_request_aborted_before_it_was_ever_scheduled_is_no_crash(
    engine: Replica, server: ServerProcess
) -> None:
    tokens = prompt(170)
    engine.serve([request(tokens)])
    before = engine.fresh().state()["free_blocks"]
    names = engine.submit([request(tokens, params={KEY: None, OTHER: None}), counting(prompt(50))])
    engine.abort(names)
    assert engine.settle()["free_blocks"] == before
    assert at_rest(server), "the lease of its lookup was given back"
    [answer] = engine.serve([counting(tokens)])
    assert answer.params == {KEY: 160}


def test_a_request_aborted_while_its_blocks_come_gives_all_back(
    engine: Replica, server: ServerProcess
) -> None:
    tokens = prompt(1601)
    engine.serve([request(tokens)])
    before = engine.fresh().state()["free_blocks"]
    [name] = engine.submit([counting(tokens)])
    engine.step_until(lambda: engine.status_of(name) in ("WAITING_FOR_REMOTE_KVS", "RUNNING"))
    engine.abort([name])
    assert engine.settle()["free_blocks"] == before
    assert at_rest(server)
    [answer] = engine.fresh().serve([counting(tokens)])
    assert answer.params == {KEY: 1600}


@pytest.mark.parametrize("bad", [0, 2, 4])
def test_a_failed_load_counts_only_what_came_and_was_used(
    plain: Replica, engine: Replica, other: Replica, server: ServerProcess, bad: int
) -> None:
    tokens = prompt(170)
    expected = tokens_of(plain.use("llama").serve([request(tokens)]))
    [name] = engine.submit([request(tokens, max_tokens=3)])
    engine.step_until(lambda: bool(engine.answers([name])[0].tokens))
    [[beginnings]] = engine.call("beginnings", name=name, full=5)
    engine.run([name])
    engine.settle()
    PoolMemory(server).flip(bytes.fromhex(beginnings[bad]))
    since = Since(server)
    [answer] = other.fresh().serve([counting(tokens)])
    assert [answer.tokens] == expected
    assert eventually(lambda: since("bad_blocks") == 1)
    assert answer.params == {KEY: bad * BLOCK}
    [again] = other.fresh().serve([counting(tokens)])
    assert again.params == {KEY: 160}, "what was computed again took the bad block's place"
    assert [again.tokens] == expected


def test_of_two_that_share_a_prefix_one_loads_and_the_other_finds_it_local(
    plain: Replica, engine: Replica, other: Replica, server: ServerProcess
) -> None:
    tokens = prompt(160)
    asked = [counting([*tokens, 1]), counting([*tokens, 2])]
    engine.serve([request(tokens, max_tokens=1)])
    since = Since(server)
    answers = other.fresh().serve(asked, together=True)
    assert sorted(answer.extra for answer in answers) == [0, 160]
    assert since("hit_blocks") >= 5
    assert tokens_of(answers) == [plain.use("llama").serve([each])[0].tokens for each in asked]


def test_requests_leave_no_trackers_behind(engine: Replica) -> None:
    before = engine.settle()
    engine.serve([counting(prompt(60)) for _ in range(20)], together=True)
    assert engine.settle()["requests"] == before["requests"] == {}
