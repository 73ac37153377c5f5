from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvkeep.client.requests import Finished
from kvkeep.engine.backends import NativeBackend
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.engine import Engine
from kvkeep.engine.models.model import Rank, Segment
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.request import Request, Status
from kvkeep.errors import RequestError
from kvkeep_lab.simulation.oracle import OracleModel

TOKENS = list(range(1, 23))
KEY = "num_kvkeep_extra_cached_tokens"


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"block_tokens": 4, "num_blocks": 64, **options})


def native(**options: Any) -> Engine:
    return Engine(OracleModel(), config(**options), NativeBackend(4 << 20))


def finish(engine: Engine) -> list[Request]:
    done = []
    while engine.busy:
        done += engine.step()
        engine.check_integrity()
    return done


def expected(tokens: list[int] = TOKENS, max_tokens: int = 16) -> list[int]:
    engine = Engine(OracleModel(), config(enable_prefix_caching=False))
    request = engine.add(tokens, SamplingParams(max_tokens=max_tokens))
    finish(engine)
    return request.output_tokens


def test_a_request_goes_in_and_comes_out_once() -> None:
    engine = Engine(OracleModel(), config())
    assert not engine.busy and engine.step() == []
    request = engine.add(TOKENS, SamplingParams(max_tokens=3))
    assert engine.busy and request.status is Status.WAITING
    assert finish(engine) == [request]
    assert request.status is Status.FINISHED and request.output_tokens == expected(max_tokens=3)
    assert engine.step() == []


def test_a_name_is_given_once_at_a_time() -> None:
    engine = Engine(OracleModel(), config())
    first = engine.add(TOKENS, request_id="mine")
    with pytest.raises(RequestError, match="mine") as refusal:
        engine.add([1], request_id="mine")
    assert (refusal.value.code, refusal.value.field) == ("duplicate", "request_id")
    assert engine.scheduler.unfinished == [first], "nothing has changed"
    finish(engine)
    again = engine.add(TOKENS, request_id="mine")
    assert finish(engine) == [again] and again.output_tokens == first.output_tokens


def test_a_name_that_a_user_chose_is_not_given_to_another() -> None:
    engine = Engine(OracleModel(), config())
    engine.add(TOKENS, request_id="request-0")
    unnamed = engine.add(TOKENS)
    assert unnamed.id != "request-0"
    assert len(finish(engine)) == 2


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tokens": []}, "prompt"),
        ({"tokens": [1, 999]}, "prompt"),
        ({"tokens": None}, "prompt"),
        ({"salt": 5}, "salt"),
        ({"salt": b"x"}, "salt"),
        ({"priority": "high"}, "priority"),
        ({"sampling": SamplingParams(max_tokens=10_000)}, "prompt"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_served_changes_nothing(given: dict[str, Any], field: str) -> None:
    engine = native()
    with pytest.raises(RequestError) as refusal:
        engine.add(**{"tokens": TOKENS, "request_id": "bad", **given})
    assert refusal.value.field == field
    assert not engine.busy and engine.scheduler.unfinished == []
    engine.check_integrity()
    engine.add(TOKENS, request_id="bad")
    [request] = finish(engine)
    assert request.output_tokens == expected(), "its name is free"
    engine.close()


def test_abort_at_every_step_gives_everything_back() -> None:
    engine = native()
    for steps in range(12):
        request = engine.add(TOKENS, SamplingParams(max_tokens=4), kv_transfer_params={KEY: None})
        for _ in range(steps):
            engine.step()
        engine.abort(request.id)
        engine.abort(request.id)
        if request.finish_reason == "abort":
            assert engine.step() == [request]
        assert not engine.busy
        engine.scheduler.pool.forget_all()
        engine.check_integrity()
    engine.abort("nobody")
    request = engine.add(TOKENS)
    finish(engine)
    assert request.output_tokens == expected()
    assert engine.flush()
    assert engine.scheduler.pool.num_free == 63
    engine.close()


def test_an_aborted_request_is_reported_with_the_next_step() -> None:
    engine = Engine(OracleModel(), config())
    request = engine.add(TOKENS)
    engine.abort(request.id)
    assert engine.busy, "until it was handed out"
    assert engine.step() == [request]
    assert (request.finish_reason, request.metrics.ttft_ms, request.reply_params) == (
        "abort",
        None,
        None,
    )
    assert request.metrics.finished_s is not None


def test_the_name_of_an_aborted_request_is_free_at_once() -> None:
    engine = Engine(OracleModel(), config())
    first = engine.add(TOKENS, request_id="mine")
    engine.abort("mine")
    second = engine.add(TOKENS, SamplingParams(max_tokens=4), request_id="mine")
    assert first in engine.step() and engine.busy
    finish(engine)
    assert (first.finish_reason, second.finish_reason) == ("abort", "length")
    assert second.output_tokens == expected(TOKENS, 4)


def test_flush_without_a_cache_has_nothing_to_do() -> None:
    assert Engine(OracleModel(), config()).flush(timeout_s=0)


def test_flush_says_when_it_takes_too_long() -> None:
    engine = native()
    engine.add(TOKENS, SamplingParams(max_tokens=1))
    finish(engine)
    connector = engine.scheduler.planner
    assert connector is not None
    begun = time.monotonic()
    cache = engine.workers._caches[0]
    poll, cache.poll = cache.poll, Finished  # type: ignore[method-assign]
    assert not engine.flush(timeout_s=0.1) and not connector.idle
    assert time.monotonic() - begun >= 0.1
    cache.poll = poll  # type: ignore[method-assign]
    assert engine.flush() and connector.idle
    engine.close()


def test_close_ends_what_is_unfinished_and_twice_is_once() -> None:
    engine = native()
    requests = [engine.add(TOKENS), engine.add(TOKENS[:5])]
    engine.step()
    engine.close()
    assert [request.finish_reason for request in requests] == ["abort", "abort"]
    engine.close()


def test_closing_stores_what_was_computed() -> None:
    backend = NativeBackend(4 << 20)
    engine = Engine(OracleModel(), config(), backend)
    engine.add(TOKENS, SamplingParams(max_tokens=1))
    finish(engine)
    engine.close()
    assert backend.server.service.counters.stored_blocks == 5


class Failing(OracleModel):
    """Its forward pass fails when told to, before it writes anything."""

    fails = False

    def forward(
        self, segments: Sequence[Segment], ranks: Sequence[Rank], block_tokens: int
    ) -> torch.Tensor:
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory")
        return super().forward(segments, ranks, block_tokens)


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_requests_go_on_after_a_step_that_failed(at: int, sync: bool) -> None:
    """What the step would have computed is not there: neither for the request nor for others that
    look for it."""
    model = Failing()
    engine = Engine(
        model, config(max_num_batched_tokens=9, sync_loads=sync), NativeBackend(4 << 20)
    )
    engine.add([*TOKENS[:8], 200], SamplingParams(max_tokens=1))
    finish(engine)
    assert engine.flush()
    engine.scheduler.pool.forget_all()  # two blocks can be loaded
    requests = [
        engine.add(tokens, SamplingParams(max_tokens=4))
        for tokens in (TOKENS, [*TOKENS[:13], 99], [7])
    ]
    for _ in range(at):
        engine.step()
    while engine.busy:
        model.fails = True
        try:
            while model.fails and engine.busy:  # until a step has segments to compute
                engine.step()
        except RuntimeError:
            break
    finish(engine)
    assert [request.output_tokens for request in requests] == [
        expected(tokens, 4) for tokens in (TOKENS, [*TOKENS[:13], 99], [7])
    ]
    assert engine.flush(timeout_s=1)
    engine.check_integrity()
    engine.close()
