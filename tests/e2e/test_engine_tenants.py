"""Two salts never share blocks, whatever tokens they ask for, and the server knows digests only.

The oracle model's bytes differ by salt: a block of another tenant raises, not only misses."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from engines import (
    KEY,
    POOL,
    PoolMemory,
    Since,
    at_rest,
    content,
    counting,
    engine,
    eventually,
    forget_local,
    local_blocks,
    metrics_text,
    oracle,
    prompt,
    seed,
    serve,
    usage,
    without_cache,
)
from engines import run as run_process

from kvkeep.cli.remote import ask
from kvkeep.engine.llm import Prompt
from kvkeep.errors import KVKeepError, RequestError
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.process import ServerProcess
from kvkeep_lab.simulation.oracle import OracleModel

SALT = "s3cret-salt-of-alice"
HOSTILE = {
    "long": "x" * 100_000,
    "nul": "a\0b",
    "surrogate": "\ud800\udfff\udc00",
    "path": "../../@/\\*?:|",
    "tenant": "default",
    "digest": "t-" + "0" * 32,
    "space": " ",
    "lines": "a\nb\r\x1b[31m\u2028",
    "format": "%s%n{}",
    "composed": "\u00e9",
    "decomposed": "e\u0301",
}


def extra(answer: Any) -> int:
    return (answer.kv_transfer_params or {})[KEY]


def test_two_salts_never_share_and_the_same_does(server: ServerProcess) -> None:
    model, tokens = oracle(), prompt(22)
    before = usage(server)
    with engine(server, model) as llm:
        for salt in ("alice", "bob", None, "carol"):
            [answer] = serve(llm, [counting(tokens, salt)], max_tokens=1)
            assert extra(answer) == 0, f"{salt} hit what somebody else stored"
            assert answer.metrics.local_cached_tokens == 0, (
                "the engine's own prefix cache isolates too"
            )
            assert [answer.token_ids] == without_cache(
                model, [Prompt(tokens, salt=salt)], max_tokens=1
            )
    after = usage(server)
    for tenant in (tenant_of("alice"), tenant_of("bob"), tenant_of("carol"), "default"):
        assert after[tenant] - before.get(tenant, 0) == 5, "each has its own five blocks"
    with engine(server, model) as other:
        for salt in ("alice", "bob", None, "carol"):
            [answer] = serve(other, [counting(tokens, salt)], max_tokens=1)
            assert extra(answer) == 20
            assert [answer.token_ids] == without_cache(
                model, [Prompt(tokens, salt=salt)], max_tokens=1
            )
    assert usage(server) == after, "and nothing was stored twice"
    assert at_rest(server)


def test_salts_in_one_batch_do_not_meet(server: ServerProcess) -> None:
    def pairs(numbers: list[int]) -> list[tuple[int, ...]]:
        return [
            tuple(sorted((numbers[first], numbers[second])))
            for first, second in ((0, 4), (1, 5), (2, 3))
        ]

    model, tokens = oracle(), prompt(22)
    prompts = [counting(tokens, salt) for salt in ("a", "b", None, "", "a", "b")]
    with engine(server, model) as llm:
        answers = serve(llm, prompts)
        found = [answer.metrics.local_cached_tokens for answer in answers]
        assert pairs(found) == [(0, 20)] * 3, (
            "whoever of a pair came second found the blocks of the first"
        )
        forget_local(llm)
        answers = serve(llm, prompts)
    assert pairs([extra(answer) for answer in answers]) == [(0, 20)] * 3
    assert [answer.token_ids for answer in answers] == without_cache(model, prompts)


def test_no_salt_and_an_empty_one_are_the_default_tenant(server: ServerProcess) -> None:
    model, tokens = oracle(), prompt(22)
    before = usage(server)
    with engine(server, model) as llm:
        [first] = serve(llm, [counting(tokens, None)], max_tokens=1)
        [local] = serve(llm, [counting(tokens, "")], max_tokens=1)
        forget_local(llm)
        [loaded] = serve(llm, [counting(tokens, "")], max_tokens=1)
        [plain] = serve(llm, [tokens], max_tokens=1)
    after = usage(server)
    assert (extra(first), local.metrics.local_cached_tokens, extra(loaded)) == (0, 20, 20)
    assert first.token_ids == local.token_ids == loaded.token_ids == plain.token_ids
    grown = {tenant for tenant in after if after[tenant] != before.get(tenant, 0)}
    assert grown == {"default"} and after["default"] == before.get("default", 0) + 5


def test_a_salted_load_works_over_the_network_too(server: ServerProcess) -> None:
    model, tokens = oracle(), prompt(22)
    far = {"kvkeep.shared_memory": False}
    with engine(server, model, extra=far) as llm:
        since = Since(server)
        serve(llm, [counting(tokens, "alice")], max_tokens=1)
        forget_local(llm)
        [bob] = serve(llm, [counting(tokens, "bob")], max_tokens=1)
        [alice] = serve(llm, [counting(tokens, "alice")], max_tokens=1)
        assert since("network_out_bytes") == 5 * 4 * 2 * 4 * 2 * 8, "alice's blocks, once"
    assert (extra(bob), extra(alice)) == (0, 20)
    assert [alice.token_ids] == without_cache(model, [Prompt(tokens, salt="alice")], max_tokens=1)


def test_another_process_shares_by_salt_only(server: ServerProcess) -> None:
    number, tokens = seed(), prompt(22)
    with engine(server, OracleModel(number)) as llm:
        [cold] = serve(llm, [counting(tokens, SALT)])
    job = {"seed": number, "prompts": [tokens, tokens, tokens], "salts": [SALT, "bob", None]}
    [warm, other, unsalted] = run_process(server.address, job)
    assert (extra(cold), warm["extra"], other["extra"], unsalted["extra"]) == (0, 20, 0, 0)
    assert cold.token_ids == warm["tokens"]
    assert len({tuple(each["tokens"]) for each in (warm, other, unsalted)}) == 3, (
        "bytes differ by salt"
    )


@pytest.mark.parametrize("salt", HOSTILE.values(), ids=HOSTILE)
def test_hostile_salts_are_salts_like_others(server: ServerProcess, salt: str) -> None:
    model, tokens = oracle(), prompt(22)
    others = [None, *(other for other in HOSTILE.values() if other != salt)]
    with engine(server, model) as llm:
        serve(llm, [Prompt(tokens, salt=other) for other in others], max_tokens=1)
        [cold] = serve(llm, [counting(tokens, salt)], max_tokens=1)
        forget_local(llm)
        [warm] = serve(llm, [counting(tokens, salt)], max_tokens=1)
    assert (extra(cold), cold.metrics.local_cached_tokens, extra(warm)) == (0, 0, 20)
    [expected] = without_cache(model, [Prompt(tokens, salt=salt)], max_tokens=1)
    assert cold.token_ids == warm.token_ids == expected
    assert tenant_of(salt) in usage(server) and at_rest(server)


def quota(server: ServerProcess, salt: str, blocks: int) -> None:
    path = f"/v1/tenants/{tenant_of(salt)}/quota"
    ask(server.http, path, "PUT", {"quota_bytes": blocks * 4096})


def test_a_promised_quota_is_kept_while_another_tenant_floods() -> None:
    """256 slots; 40 are promised to alice, 16 to bob."""
    with ServerProcess("--pool-size", "1MiB", "--slab-size", "64KiB") as small:
        alice, bob = tenant_of("alice"), tenant_of("bob")
        quota(small, "alice", 40)
        quota(small, "bob", 16)
        model, hers = oracle(), prompt(161)
        with engine(small, model, num_blocks=128) as llm:
            [expected] = serve(llm, [counting(hers, "alice")], max_tokens=1)
            assert usage(small)[alice] == 40
            for _ in range(5):
                flood = Prompt(prompt(401), salt="bob")
                [answer] = serve(llm, [flood], max_tokens=1)
                assert [answer.token_ids] == without_cache(model, [flood], max_tokens=1)
                now = usage(small)
                assert now[alice] == 40, "a flood evicts nothing that another was promised"
                assert now[bob] <= 256 - 40
            assert usage(small)[bob] > 16, "what nobody uses may be borrowed"
            forget_local(llm)
            [again] = serve(llm, [counting(hers, "alice")], max_tokens=1)
            assert extra(again) == 160
            assert again.token_ids == expected.token_ids
            told = ask(small.http, f"/v1/tenants/{alice}")
            assert told["quota_bytes"] == told["usage_bytes"] == 40 * 4096 and told["own_quota"]


def test_a_tenant_beyond_its_quota_goes_without_and_is_served_right() -> None:
    """Everything is promised to alice but for 16 slots: bob has those, and nothing to borrow."""
    with ServerProcess("--pool-size", "1MiB", "--slab-size", "64KiB") as small:
        alice, bob = tenant_of("alice"), tenant_of("bob")
        quota(small, "alice", 240)
        quota(small, "bob", 16)
        model = oracle()
        with engine(small, model, num_blocks=512) as llm:
            serve(llm, [Prompt(prompt(961), salt="alice")], max_tokens=1)
            assert usage(small)[alice] == 240
            for length in (161, 33, 401):
                own = counting(prompt(length), "bob")
                [answer] = serve(llm, [own], max_tokens=1)
                assert [answer.token_ids] == without_cache(model, [own], max_tokens=1)
                assert usage(small)[bob] <= 16 and usage(small)[alice] == 240
                forget_local(llm)
                [again] = serve(llm, [own], max_tokens=1)
                assert again.token_ids == answer.token_ids
                assert extra(again) <= 16 * 4


def test_the_raw_salt_and_the_environment_are_nowhere_to_be_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in logs, any route, file names or the index; also after a failed load."""
    secret = "the-value-of-a-secret-variable"
    monkeypatch.setenv("SOME_API_KEY", secret)
    model, tokens = oracle(), prompt(22)
    with ServerProcess(*POOL, "--log-level", "debug") as server, caplog.at_level(logging.DEBUG):
        with engine(server, model) as llm, engine(server, model) as other:
            params = {"kvkeep_priority": "junk", "kvkeep_session_finished": True}
            serve(llm, [counting(tokens, SALT, **params)])
            PoolMemory(server).flip(content(llm, local_blocks(llm, tokens, SALT)[1]))
            [answer] = serve(other, [counting(tokens, SALT)])
            assert answer.metrics.failed_loads == 1
            assert eventually(lambda: "does not match its checksum" in server.log())
            routes = ask(server.http, "/openapi.json")["paths"]
            paths = [path for path, kinds in routes.items() if "get" in kinds and "{" not in path]
            assert "/v1/settings" in paths and "/v1/tenants" in paths
            assert server.state_dir is not None
            token = server.state_dir / server.name / "admin.token"
            shown = json.dumps(
                [ask(server.http, path, token_file=token) for path in paths if path != "/metrics"]
            )
            files = [*server.pool.rglob("*"), *Path(str(server.state_dir)).rglob("*")]
            small = [path for path in files if path.is_file() and "segment-" not in path.name]
            assert len(small) > 5
            public = [caplog.text, server.log(), metrics_text(server), shown, str(files)]
            public += [path.read_bytes().decode("latin-1") for path in small]
        for path in ("/env", "/debug", "/v1/env", "/../proc/self/environ"):
            with pytest.raises(KVKeepError, match="Not Found"):
                ask(server.http, path)
    assert tenant_of(SALT) in shown and f'tenant="{tenant_of(SALT)}"' in public[2]
    assert "kvkeep_priority" in caplog.text, "the engine's log is among them"
    assert not [text for text in public if SALT in text or secret in text]


def test_a_request_with_a_salt_that_is_none_is_refused_without_repeating_it(
    server: ServerProcess,
) -> None:
    with engine(server, oracle()) as llm:
        for salt in (b"s3cret-bytes", 5, ["s3cret"], object()):
            with pytest.raises(RequestError, match="salt must be str") as refusal:
                llm.generate([Prompt(prompt(9), salt=salt)])  # type: ignore[arg-type]
            assert refusal.value.field == "salt"
            assert "s3cret" not in str(refusal.value)
        [answer] = serve(llm, [counting(prompt(9))])
        assert answer.finish_reason == "length"
