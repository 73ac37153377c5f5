"""Trap 12, with vLLM: server and engine must be of one version, and nothing tells them when they
are not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from replicas import Replica, counting, eventually, prompt, request, tokens_of, transfer

from kvkeep.wire import messages as m
from kvkeep_lab.simulation.strange import server_of_version

OTHER = m.PROTOCOL_VERSION + 1


@pytest.fixture
def future_server() -> Iterator[str]:
    """A server that speaks the next version, and answers everything in it."""
    with server_of_version(OTHER) as address:
        yield address


def test_an_engine_with_a_server_of_another_version_says_so_and_serves(
    plain: Replica, one: Replica, future_server: str
) -> None:
    said, tokens = len(one.log()), prompt(100)
    expected = tokens_of(plain.use("llama").serve([request(tokens)]))
    one.use("llama", transfer_config=transfer(future_server))

    def told() -> list[str]:
        return [
            line for line in one.log()[said:].splitlines() if f"protocol version {OTHER}" in line
        ]

    assert eventually(lambda: bool(told()))
    answers = [one.fresh().serve([counting(tokens)])[0] for _ in range(3)]
    assert tokens_of(answers) == 3 * expected
    assert [answer.extra for answer in answers] == [0, 0, 0]
    assert len(told()) <= 2, "at most once for each side of the engine"
    assert all(f"this client {m.PROTOCOL_VERSION}" in line for line in told()), "with both versions"
    one.close_engine()
