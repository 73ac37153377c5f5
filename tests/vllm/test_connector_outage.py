"""Servers that are absent, paused, killed and back: the engine serves, says it once, and caching
resumes by itself."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from replicas import (
    BRISK,
    DEFAULT_DEADLINES,
    POOL,
    Replica,
    Server,
    Since,
    at_rest,
    counting,
    eventually,
    prompt,
    request,
    tokens_of,
    transfer,
)


def caches(replica: Replica) -> bool:
    """Whether what it computes now is found again."""
    tokens = prompt(100)
    replica.serve([request(tokens)])
    [answer] = replica.fresh().serve([counting(tokens)])
    return answer.extra == 96


def test_an_absent_server_is_said_once_and_used_when_it_comes(plain: Replica, two: Replica) -> None:
    with Server(*POOL) as server:
        address = server.address
        server.stop()
        said = len(two.log())
        two.use("llama", transfer_config=transfer(address, BRISK))
        prompts = [prompt(40 + 30 * number) for number in range(6)]
        expected = tokens_of(plain.use("llama").serve([request(tokens) for tokens in prompts]))
        answers = two.serve([counting(tokens) for tokens in prompts])
        assert tokens_of(answers) == expected
        assert [answer.extra for answer in answers] == [0] * 6
        told = [line for line in two.log()[said:].splitlines() if "kvkeep serve" in line]
        assert len(told) == 1 and address in told[0], (
            "once for the engine, and not for each of its sides"
        )
        server.start()
        assert eventually(lambda: caches(two), 60)
        assert tokens_of(two.serve([request(tokens) for tokens in prompts])) == expected
        two.close_engine()


def test_a_killed_server_comes_back_empty_and_is_filled_again(plain: Replica, two: Replica) -> None:
    with Server(*POOL) as server:
        two.use("llama", server, extra=BRISK)
        tokens, others = prompt(200), [prompt(60 + 20 * number) for number in range(4)]
        expected = tokens_of(
            plain.use("llama").serve([request(each) for each in [tokens, *others]])
        )
        free = two.state()["free_blocks"]
        assert caches(two)
        two.serve([request(tokens)])
        names = two.submit([request(each) for each in others])
        two.step(2)
        server.stop(signal.SIGKILL)
        assert tokens_of(two.run(names)) == expected[1:], "no request notices"
        assert tokens_of(two.fresh().serve([request(tokens)])) == expected[:1]
        server.start()
        assert eventually(lambda: caches(two), 60), "it recovers by itself"
        [again] = two.fresh().serve([counting(tokens)])
        assert [again.tokens] == expected[:1]
        [warm] = two.fresh().serve([counting(tokens)])
        assert (warm.extra, [warm.tokens]) == (192, expected[:1])
        assert at_rest(server)
        assert two.fresh().settle()["free_blocks"] == free
        two.close_engine()


@pytest.mark.parametrize("deadlines", [DEFAULT_DEADLINES, BRISK], ids=["default", "brisk"])
def test_a_paused_server_fails_no_request_and_goes_on_afterwards(
    plain: Replica, two: Replica, deadlines: dict[str, Any]
) -> None:
    with Server(*POOL) as server:
        two.use("llama", transfer_config=transfer(server, deadlines))
        assert eventually(lambda: caches(two))
        known, new = [prompt(150) for _ in range(3)], [prompt(90) for _ in range(5)]
        asked = [*known, *new, *known]
        expected = tokens_of(plain.use("llama").serve([request(tokens) for tokens in asked]))
        free = two.state()["free_blocks"]
        since = Since(server)
        two.serve([request(tokens) for tokens in known])
        assert eventually(lambda: since("stored_blocks") >= 12)
        two.fresh()
        server.send(signal.SIGSTOP)
        answers = two.serve([counting(tokens) for tokens in asked], together=True)
        assert tokens_of(answers) == expected
        assert all(answer.reason == "length" for answer in answers)
        assert [answer.extra for answer in answers] == [0] * len(asked)
        server.send(signal.SIGCONT)
        assert eventually(lambda: caches(two), 60)
        assert tokens_of(two.fresh().serve([request(tokens) for tokens in asked])) == expected
        assert at_rest(server)
        assert two.fresh().settle()["free_blocks"] == free
        two.close_engine()


def test_a_server_without_room_is_no_harm(plain: Replica, two: Replica) -> None:
    with Server("--pool-size", "1MiB", "--slab-size", "256KiB") as small:
        two.use("llama", small)
        prompts = [prompt(150) for _ in range(12)]
        expected = tokens_of(plain.use("llama").serve([request(tokens) for tokens in prompts]))
        assert (
            tokens_of(two.serve([request(tokens) for tokens in prompts], together=True)) == expected
        )
        assert (
            tokens_of(two.fresh().serve([request(tokens) for tokens in prompts], together=True))
            == expected
        )
        assert Since(small)("internal_errors") == 0 and at_rest(small)
        two.close_engine()
