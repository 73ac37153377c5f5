"""M5: blocks that are damaged, gone or unreachable. Right tokens or a clean error, by policy; never a hang, never a leak."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from replicas import (
    BRISK,
    POOL,
    PoolMemory,
    Replica,
    Since,
    at_rest,
    counting,
    eventually,
    forget_everything,
    prompt,
    request,
    status,
    tokens_of,
)

from kvkeep.testing.process import ServerProcess

RECOMPUTE, FAIL = {"kvkeep.load_failure_policy": "recompute"}, {"kvkeep.load_failure_policy": "fail"}
BY_SOCKET = {"kvkeep.shared_memory": False}  # then a server that is gone has taken its blocks along


@pytest.fixture(scope="module")
def fragile() -> Iterator[ServerProcess]:
    """A server to be harmed."""
    with ServerProcess(*POOL) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def _engines_let_go(one: Replica, two: Replica) -> Iterator[None]:
    yield
    for replica in (one, two):
        replica.close_engine()


def beginnings(replica: Replica, tokens: list[int], full: int) -> list[bytes]:
    """Stores this prompt; the first bytes of each of its blocks, in the first layer of the first group."""
    [name] = replica.submit([request(tokens, max_tokens=3)])
    replica.step_until(lambda: bool(replica.answers([name])[0].tokens))
    [groups] = replica.call("beginnings", name=name, full=full)
    replica.run([name])
    replica.settle()
    return [bytes.fromhex(each) for each in groups[-1]]


def stored(server: ServerProcess, since: Since, blocks: int) -> None:
    assert eventually(lambda: since("stored_blocks") >= blocks)
    assert at_rest(server)


@pytest.mark.parametrize("model", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("bad", [0, 3])
def test_a_damaged_block_is_computed_again(
    plain: Replica, one: Replica, two: Replica, fragile: ServerProcess, model: str, bad: int
) -> None:
    tokens = prompt(300)
    expected = tokens_of(plain.use(model).serve([request(tokens)]))
    since = Since(fragile)
    found = beginnings(one.use(model, fragile, extra=RECOMPUTE), tokens, 9)
    stored(fragile, since, 9)
    PoolMemory(fragile).flip(found[bad])
    before = two.use(model, fragile, extra=RECOMPUTE).fresh().state()["free_blocks"]
    [answer] = two.serve([counting(tokens)])
    assert [answer.tokens] == expected
    assert (answer.reason, since("bad_blocks")) == ("length", 1)
    assert answer.extra <= bad * 32
    assert two.fresh().settle()["free_blocks"] == before
    [again] = two.serve([counting(tokens)])
    assert ([again.tokens], again.extra) == (expected, 288), "the good one took the bad one's place"


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_damaged_block_ends_its_request_under_policy_fail(
    plain: Replica, one: Replica, two: Replica, fragile: ServerProcess, model: str
) -> None:
    tokens = prompt(300)
    expected = tokens_of(plain.use(model).serve([request(tokens)]))
    since = Since(fragile)
    found = beginnings(one.use(model, fragile, extra=RECOMPUTE), tokens, 9)
    stored(fragile, since, 9)
    PoolMemory(fragile).flip(found[3])
    before = two.use(model, fragile, extra=FAIL).fresh().state()["free_blocks"]
    other = prompt(300)
    failed, fine = two.serve([counting(tokens), counting(other)], together=True)
    assert (failed.reason, failed.tokens) == ("error", [])
    assert [fine.tokens] == tokens_of(plain.serve([request(other)])), "nobody else is harmed"
    [again] = two.serve([counting(tokens)])
    assert [again.tokens] == expected, "nothing bad stayed in the prefix cache"
    assert two.fresh().settle()["free_blocks"] == before
    assert at_rest(fragile)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_all_blocks_damaged_and_many_that_want_them(
    plain: Replica, one: Replica, two: Replica, fragile: ServerProcess, model: str
) -> None:
    tokens = prompt(160)
    asked = [counting([*tokens, number, 3]) for number in range(5)]
    expected = [plain.use(model).serve([each])[0].tokens for each in asked]
    since = Since(fragile)
    one.use(model, fragile, extra=RECOMPUTE).serve([request(tokens, max_tokens=1)])
    stored(fragile, since, 5)
    PoolMemory(fragile).flip_all()
    answers = two.use(model, fragile, extra=RECOMPUTE).fresh().serve(asked, together=True)
    assert tokens_of(answers) == expected
    assert since("bad_blocks") > 0
    again = two.fresh().serve(asked, together=True)
    assert tokens_of(again) == expected
    forget_everything(fragile)


@pytest.mark.parametrize("policy", [RECOMPUTE, FAIL], ids=["recompute", "fail"])
def test_blocks_evicted_between_lookup_and_load(
    plain: Replica, one: Replica, two: Replica, fragile: ServerProcess, policy: dict[str, Any]
) -> None:
    tokens = prompt(300)
    expected = tokens_of(plain.use("llama").serve([request(tokens)]))
    since = Since(fragile)
    one.use("llama", fragile, extra=RECOMPUTE).serve([request(tokens)])
    stored(fragile, since, 9)
    two.use("llama", fragile, extra=policy).fresh()
    [name] = two.submit([counting(tokens)])
    assert eventually(lambda: status(fragile)["leases"] == 1)
    forget_everything(fragile)
    [answer] = two.run([name])
    assert [answer.tokens] == expected, "a lease holds its blocks"
    assert two.settle()["requests"] == {}
    assert at_rest(fragile)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", [RECOMPUTE, FAIL], ids=["recompute", "fail"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_server_that_goes_between_lookup_and_load(
    plain: Replica, two: Replica, model: str, policy: dict[str, Any], end: signal.Signals
) -> None:
    tokens = prompt(300)
    expected = tokens_of(plain.use(model).serve([request(tokens)]))
    with ServerProcess(*POOL) as doomed:
        since = Since(doomed)
        two.use(model, doomed, extra={**BRISK, **BY_SOCKET, **policy})
        assert eventually(lambda: status(doomed)["sessions"] != 0)
        before = two.state()["free_blocks"]
        assert tokens_of(two.serve([request(tokens)])) == expected
        stored(doomed, since, 9)
        two.fresh()
        [name] = two.submit([counting(tokens)])
        assert eventually(lambda: status(doomed)["leases"] == 1)
        doomed.send(end)
        [answer] = two.run([name])
        assert (answer.reason, [answer.tokens]) in (("length", expected), ("error", [[]]))
        if policy == RECOMPUTE:
            assert [answer.tokens] == expected
        others = [prompt(100), prompt(40)]
        assert tokens_of(two.serve([request(each) for each in others])) == tokens_of(
            plain.serve([request(each) for each in others])
        )
        assert two.fresh().settle()["free_blocks"] == before
        two.close_engine()


def test_a_bad_policy_is_refused_at_start(one: Replica, fragile: ServerProcess) -> None:
    with pytest.raises(AssertionError, match=r"kvkeep\.load_failure_policy"):
        one.use("llama", fragile, extra={"kvkeep.load_failure_policy": "hope"})
