"""M3: requests share blocks only under the same salt, whatever the salt is."""

from __future__ import annotations

import pytest
from replicas import Replica, counting, prompt, request, tokens_of, usage

from kvkeep.kv.identity import tenant_of
from kvkeep.testing.process import ServerProcess

pytestmark = pytest.mark.usefixtures("_nothing_is_left")

HOSTILE = {
    "slash": "a/b",
    "parent": "../../a-salt",  # not just two dots, which lines of vLLM's own log have
    "nul": "a\0b",
    "long": "x" * 4000,
    "emoji": "🦊 und 🐻",
    "surrogate": "\ud800",
    "newline": 'a\n"b"',
    "default": "default",
    "percent": "%s%n{}",
}


@pytest.fixture
def engine(one: Replica, server: ServerProcess) -> Replica:
    return one.use("llama", server)


@pytest.fixture
def other(two: Replica, server: ServerProcess) -> Replica:
    return two.use("llama", server)


def test_two_salts_never_share_and_one_does(
    plain: Replica, engine: Replica, other: Replica
) -> None:
    tokens = prompt(100)
    [stored] = engine.serve([request(tokens, "alice")])
    asked = [
        counting(tokens, "bob"),
        counting(tokens),
        counting(tokens, "alice "),
        counting(tokens, "alice"),
    ]
    answers = other.fresh().serve(asked)
    assert [answer.extra for answer in answers] == [0, 0, 0, 96]
    assert {tuple(answer.tokens) for answer in [stored, *answers]} == {
        tuple(plain.use("llama").serve([request(tokens)])[0].tokens)
    }


def test_no_salt_is_shared_by_all_without_one(engine: Replica, other: Replica) -> None:
    tokens = prompt(100)
    engine.serve([request(tokens)])
    assert [
        answer.extra
        for answer in other.fresh().serve([counting(tokens), counting(tokens, "carol")])
    ] == [96, 0]


def test_salts_share_nothing_in_one_batch(plain: Replica, engine: Replica, other: Replica) -> None:
    tokens = prompt(100)
    salts = ["s0", "s1", "s2", None]
    engine.fresh().serve([request(tokens, salt) for salt in salts[:2]], together=True)
    answers = other.fresh().serve([counting(tokens, salt) for salt in salts], together=True)
    assert [answer.extra for answer in answers] == [96, 96, 0, 0]
    assert tokens_of(answers) == 4 * tokens_of(plain.use("llama").serve([request(tokens)]))


def test_blocks_belong_to_the_salts_tenant(engine: Replica, server: ServerProcess) -> None:
    engine.serve([request(prompt(100), "dora", max_tokens=1)])
    assert usage(server)[tenant_of("dora")] == 3


@pytest.mark.parametrize("salt", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_salt_is_served_and_stays_alone(
    plain: Replica, engine: Replica, other: Replica, server: ServerProcess, salt: str
) -> None:
    tokens = prompt(100)
    expected = tokens_of(plain.use("llama").serve([request(tokens)]))
    assert tokens_of(engine.serve([request(tokens, salt)])) == expected
    answers = other.fresh().serve(
        [counting(tokens), counting(tokens, salt), counting(tokens, salt + "x")]
    )
    assert tokens_of(answers) == 3 * expected
    assert [answers[0].extra, answers[2].extra] == [0, 0]
    assert answers[1].extra in (96, 0), "found, or not kept at all"
    assert salt == "default" or salt not in server.log() + engine.log() + other.log()


def test_a_salt_is_nowhere_to_be_read(engine: Replica, server: ServerProcess) -> None:
    salt = "do-not-write-me-down-7311"
    engine.serve([request(prompt(100), salt), counting(prompt(100), salt)])
    assert salt not in server.log() + engine.log()
    assert salt not in str(usage(server))
