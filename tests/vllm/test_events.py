"""KV events: what this engine stored in the server, and what of it turned out to be gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it")

from engine_parts import request
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvkeep.connector.step import Completed, Job
from kvkeep.vllm import events as of_events
from kvkeep.vllm.events import MEDIUM, CacheEvents

TOKENS = list(range(100, 142))


def cache_events(enabled: bool = True) -> CacheEvents:
    return CacheEvents(SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=enabled)))


def job(number: int, first: int, blocks: int, *, is_load: bool = False, **more: Any) -> Job:
    return Job(number, "a", first, list(range(10, 10 + blocks)), is_load, blocks, **more)


def names(asked: Any, *places: int) -> list[Any]:
    return [maybe_convert_block_hash(asked.block_hashes[place]) for place in places]


def stored(events: CacheEvents, asked: Any, first: int, blocks: int, number: int = 1) -> BlockStored:
    done = job(number, first, blocks)
    events.prepared(done, asked, 4, 4)
    events.completed(Completed(stores=[done]))
    [event] = events.take()
    assert isinstance(event, BlockStored)
    return event


def test_a_store_says_what_vllms_own_events_say() -> None:
    asked = request(TOKENS)
    event = stored(cache_events(), asked, 0, 3)
    assert event.block_hashes == names(asked, 0, 1, 2)
    assert (event.parent_block_hash, event.token_ids, event.block_size) == (None, TOKENS[:12], 4)
    assert (event.medium, event.lora_id, event.lora_name) == (MEDIUM, None, None)


def test_a_later_store_names_its_parent() -> None:
    asked = request(TOKENS)
    event = stored(cache_events(), asked, 3, 2)
    assert ([event.parent_block_hash], event.block_hashes) == (names(asked, 2), names(asked, 3, 4))
    assert event.token_ids == TOKENS[12:20]


def test_coarser_blocks_are_named_by_their_last_hash() -> None:
    asked, events = request(TOKENS), cache_events()
    done = job(1, 1, 1)
    events.prepared(done, asked, 4, 16)
    events.completed(Completed(stores=[done]))
    [event] = events.take()
    assert isinstance(event, BlockStored)
    assert ([event.parent_block_hash], event.block_hashes) == (names(asked, 3), names(asked, 7))
    assert (event.token_ids, event.block_size) == (TOKENS[16:32], 16)


def test_an_adapter_is_named() -> None:
    lora = LoRARequest(lora_name="style", lora_int_id=3, lora_path="/adapters/one")
    event = stored(cache_events(), request(TOKENS, lora_request=lora), 0, 1)
    assert (event.lora_id, event.lora_name) == (3, "style")


def test_nothing_is_said_before_the_end_nor_of_a_store_that_left_something_out() -> None:
    asked, events = request(TOKENS), cache_events()
    done = job(1, 0, 3)
    events.prepared(done, asked, 4, 4)
    assert events.take() == []
    done.incomplete = True
    events.completed(Completed(stores=[done]))
    assert events.take() == [] and not events._jobs


@pytest.mark.parametrize("config", [None, SimpleNamespace(enable_kv_cache_events=False)])
def test_nothing_is_said_or_kept_if_nobody_listens(config: Any) -> None:
    asked, events = request(TOKENS), CacheEvents(SimpleNamespace(kv_events_config=config))
    for number, is_load in enumerate((False, True)):
        done = job(number, 0, 3, is_load=is_load)
        events.prepared(done, asked, 4, 4)
        events.completed(Completed(loads=[done] if is_load else [], stores=[] if is_load else [done]))
    events.reset()
    assert events.take() == [] and not events._jobs and not events._stored


def test_what_fails_to_load_is_gone() -> None:
    asked, events = request(TOKENS), cache_events()
    stored(events, asked, 0, 3)
    load = job(2, 0, 3, is_load=True)
    events.prepared(load, asked, 4, 4)
    load.failed = {11}
    events.completed(Completed(loads=[load]))
    [event] = events.take()
    assert isinstance(event, BlockRemoved)
    assert (event.block_hashes, event.medium) == (names(asked, 1, 2), MEDIUM)
    events.prepared(load, asked, 4, 4)
    events.completed(Completed(loads=[load]))
    assert events.take() == [], "once"


def test_loads_that_go_well_and_what_others_stored_are_no_news() -> None:
    asked, events = request(TOKENS), cache_events()
    load = job(2, 0, 3, is_load=True)
    events.prepared(load, asked, 4, 4)
    events.completed(Completed(loads=[load]))
    load.failed = {10}
    events.prepared(load, asked, 4, 4)
    events.completed(Completed(loads=[load]))
    assert events.take() == []


def test_after_a_reset_all_of_it_is_gone() -> None:
    asked, events = request(TOKENS), cache_events()
    stored(events, asked, 0, 3)
    events.reset()
    [event] = events.take()
    assert isinstance(event, BlockRemoved) and event.block_hashes == names(asked, 0, 1, 2)
    events.reset()
    assert events.take() == []


def test_a_store_that_ends_after_a_reset_is_still_told_as_what_it_is() -> None:
    asked, events = request(TOKENS), cache_events()
    done = job(1, 0, 3)
    events.prepared(done, asked, 4, 4)
    events.reset()
    events.completed(Completed(stores=[done]))
    assert all(isinstance(event, BlockStored) for event in events.take())


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_events, "_REMEMBERED_BLOCKS", 5)
    events = cache_events()
    for number in range(10):
        stored(events, request([number, *TOKENS]), 0, 3, number)
    assert len(events._stored) == 5 and not events._jobs


def test_a_job_that_nobody_prepared_is_nothing() -> None:
    events = cache_events()
    events.completed(Completed(loads=[job(1, 0, 3, is_load=True)], stores=[job(2, 0, 3)]))
    assert events.take() == []
