"""Requests as vLLM reports them, from their arrival to the step that computes them."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

from engine_parts import BLOCK, Engine, answer_to, request
from vllm.config.kv_events import KVEventsConfig
from vllm.lora.request import LoRARequest

import kvkeep.connector.planner
from kvkeep.cli.explain import facts
from kvkeep.connector.file_hashes import hashes_of_user
from kvkeep.connector.planner import CachePlanner
from kvkeep.server.explain import RequestShown
from kvkeep.vllm.keys import Adapters
from kvkeep.vllm.versions import hashes_are_stable
from kvkeep_lab.simulation.cache import SimulatedCache

PROMPT = list(range(100, 123))  # five blocks and three tokens
COUNT = {"num_kvkeep_extra_cached_tokens": None}

# Where keys are made of tokens, all of a prompt's are made at once: there is nothing to leave for
# later.
with_stable_hashes = pytest.mark.skipif(
    not hashes_are_stable("sha256"),
    reason="the block hashes of this vLLM differ from process to process",
)


@pytest.fixture
def cache() -> SimulatedCache:
    cache = SimulatedCache(seed=1)
    cache.is_seen = True
    return cache


def lookups(cache: SimulatedCache) -> int:
    return cache.server.service.counters.lookups


def loaded(engine: Engine, name: str) -> int:
    return int(engine.params[name]["num_kvkeep_extra_cached_tokens"])


def stored(engine: Engine) -> int:
    return sum(asked.blocks for what, asked in engine.worker.began if what == "store")


def test_the_server_counts_it_as_a_lookup(
    make: Callable[..., Engine], cache: SimulatedCache
) -> None:
    engine = make()
    engine.run(request(PROMPT, "a"))
    engine.settle()
    assert lookups(cache) == 1


def test_what_another_engine_stores_before_the_step_is_loaded(make: Callable[..., Engine]) -> None:
    engine, other = make(), make()
    other.run(request(PROMPT, "b"))
    engine.run(request(PROMPT, "a", params=COUNT))
    assert engine.answers["a"] == answer_to(PROMPT) and loaded(engine, "a") == 5 * BLOCK


def test_a_prompt_that_vllm_has_itself_is_stored_all_the_same(
    make: Callable[..., Engine], cache: SimulatedCache
) -> None:
    engine = make()
    engine.run(request(PROMPT, "a"))
    cache.restart_server()
    engine.settle()
    turn = [*PROMPT, *range(9)]
    assert engine.run(request(turn, "b")).answers["b"] == answer_to(turn)
    other = make().run(request([*turn, 1], "c", params=COUNT))
    assert loaded(other, "c") == 8 * BLOCK, (
        "the first five, too, though nothing of them was computed"
    )


def test_one_that_is_aborted_before_its_step_leaves_nothing(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.add(request(PROMPT, "a"))
    engine.abort("a")
    engine.settle()
    engine.check_nothing_left()


def test_after_a_reset_nothing_of_it_is_asked_for_or_stored(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.add(request(PROMPT, "a"))
    engine.connector.reset_cache()
    engine.run()
    assert engine.answers["a"] == answer_to(PROMPT) and not stored(engine)


@with_stable_hashes
def test_what_vllm_has_of_a_prompt_does_not_hide_what_the_server_has_beyond(
    make: Callable[..., Engine], cache: SimulatedCache
) -> None:
    engine = make()
    engine.run(request(PROMPT[: BLOCK + 1], "a"))
    make().run(request(PROMPT, "b"))
    engine.run(request(PROMPT, "c", params=COUNT))
    assert engine.answers["c"] == answer_to(PROMPT) and loaded(engine, "c") == 4 * BLOCK


@pytest.mark.parametrize("apart", [False, True])
def test_a_worker_hears_of_its_stores_with_the_step(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    monkeypatch.setattr(Engine, "apart", apart)
    engine = make()
    engine.add(request(PROMPT, "a"))
    metadata = engine.step().kv_connector_metadata
    assert [store.blocks for store in metadata.step.stores_after.values()] == [5]
    engine.run()


def test_a_step_whose_end_nobody_tells_of_is_stored_with_the_next(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(budget=2 * BLOCK)
    engine.add(request(PROMPT, "a"))
    with monkeypatch.context() as patched:
        patched.setattr(engine.rank, "wait_for_save", lambda: None)
        engine.step()
    assert not stored(engine)
    engine.step()
    assert stored(engine) == 4
    engine.run()
    assert engine.answers["a"] == answer_to(PROMPT)


def test_a_store_that_fails_costs_its_own_request_the_cache_and_no_other(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(budget=64)
    prepare_store = CachePlanner.prepare_store

    def fail(planner: CachePlanner, state: Any, *args: Any, **words: Any) -> Any:
        if state.request_id == "a":
            raise RuntimeError("a bug")
        return prepare_store(planner, state, *args, **words)

    monkeypatch.setattr(CachePlanner, "prepare_store", fail)
    engine.add(request(PROMPT, "a"), request(PROMPT[::-1], "b"))
    engine.step()
    assert "a store could not be prepared" in caplog.text
    assert stored(engine) == 5
    engine.run()
    assert (engine.answers["a"], engine.answers["b"]) == (
        answer_to(PROMPT),
        answer_to(PROMPT[::-1]),
    )
    other = make().run(request(PROMPT[::-1], "c", params=COUNT))
    assert loaded(other, "c") == 5 * BLOCK


@pytest.mark.parametrize("apart", [False, True])
def test_stores_of_a_step_that_is_lost_are_not_made_in_the_next(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """By then their blocks may be somebody else's."""
    monkeypatch.setattr(Engine, "apart", apart)
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = make(num_blocks=8, change=lambda config: setattr(config, "kv_events_config", events))
    assert engine.half is not None
    engine.add(request(PROMPT, "a", max_tokens=1))
    with monkeypatch.context() as patched:
        failing = mock.Mock(side_effect=MemoryError)
        patched.setattr(kvkeep.connector.planner, "StepMetadata", failing)
        patched.setattr(engine.worker, "withdraw", lambda block_ids: None)
        engine.step()
    assert engine.side.idle and not stored(engine) and "jobs=0" in repr(engine.half.events)
    engine.run(request(PROMPT[::-1], "b"))
    assert engine.answers["b"] == answer_to(PROMPT[::-1])
    other = make(num_blocks=32).run(request(PROMPT, "c", params=COUNT), request(PROMPT[::-1], "d"))
    assert (other.answers["c"], other.answers["d"]) == (answer_to(PROMPT), answer_to(PROMPT[::-1]))


def test_metadata_of_a_worker_elsewhere_is_plain_data(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    monkeypatch.setattr(Engine, "apart", True)
    engine = make()
    engine.add(request(PROMPT, "a"))
    metadata = engine.step().kv_connector_metadata
    assert replace(pickle.loads(pickle.dumps(metadata)), step=metadata.step) == metadata
    engine.run()


# --- adapters -------------------------------------------------------------------------------------


def test_a_request_is_not_cached_until_its_adapter_is_known_and_waits_for_nothing(
    make: Callable[..., Engine],
    cache: SimulatedCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "style").mkdir()
    (tmp_path / "style" / "adapter_model.safetensors").write_bytes(b"weights")
    style = LoRARequest(lora_name="style", lora_int_id=1, lora_path=str(tmp_path / "style"))
    engine = make()
    hashes = Path(hashes_of_user().directory)
    hashes.mkdir(mode=0o700)
    with open(hashes / "lock", "wb") as lock:  # as if another process hashed a file for a long time
        fcntl.flock(lock, fcntl.LOCK_EX)
        engine.run(request(PROMPT, "a", params=COUNT, lora_request=style))
        assert engine.answers["a"] == answer_to(PROMPT) and loaded(engine, "a") == 0
        assert not stored(engine) and not lookups(cache)
    adapters = Adapters()  # which are hashed after those of the engine
    while adapters.name_of(style) is None:
        time.sleep(0.01)
    engine.scheduler.reset_prefix_cache()
    engine.run(request(PROMPT, "b", params=COUNT, lora_request=style))
    assert stored(engine) >= 5 and loaded(engine, "b") == 0
    engine.scheduler.reset_prefix_cache()
    engine.run(
        request(PROMPT, "c", params=COUNT, lora_request=style), request(PROMPT, "d", params=COUNT)
    )
    assert loaded(engine, "c") == 5 * BLOCK and loaded(engine, "d") == 0, (
        "and found by those with that adapter only"
    )


def test_that_the_same_tokens_were_cached_with_an_adapter_is_explained(
    make: Callable[..., Engine],
    cache: SimulatedCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As far as `kvkeep explain` shows it to an operator."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "style").mkdir()
    (tmp_path / "style" / "adapter_model.safetensors").write_bytes(b"weights")
    style = LoRARequest(lora_name="style", lora_int_id=1, lora_path=str(tmp_path / "style"))
    engine, explanations = make(), cache.server.service.explanations

    def serve(name: str, **more: Any) -> RequestShown:
        engine.run(request(PROMPT, name, **more)).forget()
        for _ in range(20):  # a report is sent some time later
            cache.pass_time(100)
            engine.step()
        shown = explanations.find(name)
        assert sum(shown.outcomes.values()) == shown.blocks == 6
        return shown

    numbers = count()
    while not stored(engine):  # the adapter's digest is being taken, and the request is not cached
        number = next(numbers)
        assert number < 1000
        engine.run(request(PROMPT, f"first {number}", lora_request=style)).forget()
        time.sleep(0.01)
    shown = serve("without")
    assert shown.outcomes == {"other_adapter": 5, "last": 1}
    lines = dict(facts(asdict(shown)))
    assert lines["  0-4"] == "other adapter: the same tokens were cached with another adapter"
    assert serve("again", lora_request=style).outcomes == {"loaded": 5, "last": 1}
    assert explanations.outcomes["other_adapter"] == 5, "and in the metrics"
