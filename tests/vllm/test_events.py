"""KV events: what this engine stored in the server, and what of it turned out to be gone, as
routers read it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

import msgspec
import zmq
from engine_parts import BLOCK, Engine, cache_config, full, needs_named_failures, request, window
from replicas import Replica, prompt
from replicas import request as asking
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvkeep.client.requests import LoadOutcome
from kvkeep.connector.group_layout import CacheGroup, GroupLayout
from kvkeep.connector.step import Completed, Job
from kvkeep.testing.process import ServerProcess
from kvkeep.vllm import events as of_events
from kvkeep.vllm import versions
from kvkeep.vllm.events import MEDIUM, CacheEvents, EventGroup, event_groups

TOKENS = list(range(100, 142))
LORA = LoRARequest(lora_name="style", lora_int_id=3, lora_path="/adapters/one")
PLAIN = event_groups(cache_config(full()), GroupLayout([CacheGroup("full", BLOCK)]), BLOCK)


def cache_events(enabled: bool = True) -> CacheEvents:
    return CacheEvents(
        SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=enabled))
    )


def job(number: int, first: int, blocks: int, *, is_load: bool = False, **more: Any) -> Job:
    return Job(number, "a", first, list(range(10, 10 + blocks)), is_load, blocks, **more)


def names(asked: Any, *places: int) -> list[Any]:
    return [maybe_convert_block_hash(asked.block_hashes[place]) for place in places]


def store(
    events: CacheEvents,
    asked: Any,
    first: int,
    blocks: int,
    groups: tuple[EventGroup, ...] = PLAIN,
    number: int = 1,
) -> list[Any]:
    done = job(number, first, blocks)
    events.prepared(done, asked, groups)
    events.completed(Completed(stores=[done]))
    return list(events.take())


def load(
    events: CacheEvents, asked: Any, first: int, blocks: int, failed: set[int] | None = None
) -> list[Any]:
    done = job(9, first, blocks, is_load=True)
    events.prepared(done, asked, PLAIN)
    done.outcome = LoadOutcome(frozenset(failed or ()))
    events.completed(Completed(loads=[done]))
    return list(events.take())


def of_vllm(
    asked: Any, first: int, stop: int, block_tokens: int = BLOCK, hash_tokens: int = BLOCK
) -> Any:
    """The event that vLLM's own prefix cache publishes for these blocks of a request."""
    pool = BlockPool(64, True, hash_tokens, enable_kv_cache_events=True)
    pool.cache_full_blocks(asked, pool.get_new_blocks(stop), first, stop, block_tokens, 0)
    [event] = pool.take_events()
    for name, value in versions.event_spec_fields(full(block_tokens)).items():
        setattr(event, name, value)  # the cache manager adds these
    return event


def images(*places: tuple[int, int, str]) -> dict[str, Any]:
    return {
        "mm_features": [
            MultiModalFeatureSpec(
                None, "image", name, PlaceholderRange(offset=start, length=length)
            )  # type: ignore[call-arg]
            for start, length, name in places
        ]
    }


SAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "salted": {"cache_salt": "of one tenant"},
    "adapter": {"lora_request": LORA},
    "adapter, salted": {"lora_request": LORA, "cache_salt": "of one tenant"},
    "images, salted": {
        **images((2, 5, "an image"), (9, 12, "another one")),
        "cache_salt": "of one tenant",
    },
}


@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("more", SAYS.values(), ids=SAYS)
def test_a_store_says_what_vllms_own_events_say_but_for_the_medium(
    more: dict[str, Any], first: int
) -> None:
    asked = request(TOKENS, **more)
    [event] = store(cache_events(), asked, first, 4)
    vllms = of_vllm(asked, first, first + 4)
    assert (event.medium, vllms.medium) == ("CPU", "GPU")
    vllms.medium = "CPU"
    assert event == vllms
    assert event.token_ids == TOKENS[first * 4 : first * 4 + 16] and len(event.extra_keys) == 4


def test_salted_blocks_do_not_look_unsalted() -> None:
    [salted] = store(cache_events(), request(TOKENS, cache_salt="of one tenant"), 0, 3)
    [unsalted] = store(cache_events(), request(TOKENS), 0, 3)
    assert salted.extra_keys == [("of one tenant",), None, None], (
        "later blocks are salted by their parent"
    )
    assert unsalted.extra_keys == [None, None, None]
    assert not set(salted.block_hashes) & set(unsalted.block_hashes)


def test_blocks_are_published_at_vllms_own_granularity() -> None:
    """A hash of 4 tokens, blocks of 8 in the group, blocks of 16 in the server."""
    pieces = GroupLayout([CacheGroup("full", 8), CacheGroup("window", 16, 8)])
    groups = event_groups(cache_config(full(8), window(16)), pieces, 4)
    asked = request(TOKENS, cache_salt="of one tenant")
    [event] = store(cache_events(), asked, 1, 1, groups)
    vllms = of_vllm(asked, 2, 4, 8, 4)
    vllms.medium = "CPU"
    assert event == vllms
    assert (event.block_hashes, [event.parent_block_hash]) == (names(asked, 5, 7), names(asked, 3))
    assert (event.token_ids, event.block_size) == (TOKENS[16:32], 8)


def test_each_group_of_full_attention_is_published_and_no_other() -> None:
    pieces = GroupLayout([CacheGroup("window", 4, 8), CacheGroup("full", 4), CacheGroup("full", 8)])
    groups = event_groups(cache_config(window(), full(), full(8)), pieces, 4)
    asked, events = request(TOKENS), cache_events()
    fine, coarse = store(events, asked, 0, 2, groups)
    assert (fine.group_idx, fine.block_size, fine.block_hashes) == (1, 4, names(asked, 0, 1, 2, 3))
    assert (coarse.group_idx, coarse.block_size, coarse.block_hashes) == (2, 8, names(asked, 1, 3))
    assert {fine.kv_cache_spec_kind, coarse.kv_cache_spec_kind} == {"full_attention"}
    events.reset()
    assert [(each.group_idx, len(each.block_hashes)) for each in events.take()] == [(1, 4), (2, 2)]  # type: ignore[union-attr]


def test_a_block_is_published_once_until_it_is_removed() -> None:
    """Routers count how often a block is stored, and wait for as many removals."""
    asked, events = request(TOKENS), cache_events()
    [whole] = store(events, asked, 1, 3)
    assert whole.block_hashes == names(asked, 1, 2, 3)
    assert store(events, asked, 1, 3) == [], "evicted, and stored again"
    before, after = store(events, asked, 0, 5)
    assert (before.block_hashes, before.parent_block_hash) == (names(asked, 0), None)
    assert (after.block_hashes, [after.parent_block_hash]) == (names(asked, 4), names(asked, 3))
    assert (before.token_ids, after.token_ids) == (TOKENS[:4], TOKENS[16:20])
    assert len(before.extra_keys) == len(after.extra_keys) == 1
    [removed] = load(events, asked, 0, 5, failed={12})
    assert removed.block_hashes == names(asked, 2, 3, 4)
    [again] = store(events, asked, 0, 5)
    assert again.block_hashes == removed.block_hashes


def test_nothing_is_said_before_the_end_nor_of_a_store_that_left_something_out() -> None:
    asked, events = request(TOKENS), cache_events()
    done = job(1, 0, 3)
    events.prepared(done, asked, PLAIN)
    assert events.take() == []
    done.incomplete = True
    events.completed(Completed(stores=[done]))
    assert events.take() == [] and "jobs=0" in repr(events)


@pytest.mark.parametrize("config", [None, SimpleNamespace(enable_kv_cache_events=False)])
def test_nothing_is_said_or_kept_if_events_are_off(config: Any) -> None:
    asked, events = request(TOKENS), CacheEvents(SimpleNamespace(kv_events_config=config))
    assert store(events, asked, 0, 3) == load(events, asked, 0, 3, failed={10}) == []
    events.reset()
    assert events.take() == [] and repr(events) == "CacheEvents(jobs=0, published=0)"


def test_nothing_is_said_of_a_request_without_hashes() -> None:
    asked = request(TOKENS)
    asked.block_hashes.clear()
    assert store(events := cache_events(), asked, 0, 3) == [] and "jobs=0" in repr(events)


def test_what_fails_to_load_is_gone() -> None:
    asked, events = request(TOKENS), cache_events()
    store(events, asked, 0, 3)
    [event] = load(events, asked, 0, 3, failed={11})
    assert isinstance(event, BlockRemoved)
    assert (event.block_hashes, event.medium, event.group_idx) == (names(asked, 1, 2), MEDIUM, 0)
    assert load(events, asked, 0, 3, failed={11}) == [], "once"


def test_loads_that_go_well_and_what_others_stored_are_no_news() -> None:
    asked, events = request(TOKENS), cache_events()
    assert load(events, asked, 0, 3) == load(events, asked, 0, 3, failed={10}) == []


def test_after_a_reset_all_of_it_is_gone_from_the_cpu_and_nothing_from_the_gpu() -> None:
    """AllBlocksCleared would make routers forget what the GPU holds."""
    asked, events = request(TOKENS), cache_events()
    store(events, asked, 0, 3)
    events.reset()
    [event] = events.take()
    assert (
        isinstance(event, BlockRemoved)
        and event.block_hashes == names(asked, 0, 1, 2)
        and event.medium == "CPU"
    )
    events.reset()
    assert events.take() == []


def test_a_store_that_ends_after_a_reset_is_still_told_as_what_it_is() -> None:
    asked, events = request(TOKENS), cache_events()
    done = job(1, 0, 3)
    events.prepared(done, asked, PLAIN)
    events.reset()
    events.completed(Completed(stores=[done]))
    assert all(isinstance(event, BlockStored) for event in events.take())


def test_what_is_no_longer_remembered_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router would otherwise count it for ever, and twice when it is stored again. What was used
    last stays."""
    monkeypatch.setattr(of_events, "_REMEMBERED_BLOCKS", 5)
    events, asked = cache_events(), [request([number, *TOKENS]) for number in range(3)]
    store(events, asked[0], 0, 3)
    [event] = store(events, asked[1], 0, 2)
    load(events, asked[0], 0, 2)
    stored, removed = store(events, asked[2], 0, 3)
    assert isinstance(stored, BlockStored) and isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [*names(asked[0], 2), *event.block_hashes]
    assert repr(events) == "CacheEvents(jobs=0, published=5)"


def test_a_job_that_was_not_prepared_is_nothing() -> None:
    events = cache_events()
    events.completed(Completed(loads=[job(1, 0, 3, is_load=True)], stores=[job(2, 0, 3)]))
    assert events.take() == []


# -- a subscriber, as a router is one


class Subscriber:
    """Reads what a publisher of vLLM's sends, without vLLM's types."""

    def __init__(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe("kv@")
        with contextlib.closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._socket.connect(f"tcp://127.0.0.1:{self.port}")
        self.config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"tcp://*:{self.port}",
            topic="kv@pod@model",
        )

    def read(self, wait_ms: int = 0) -> list[dict[str, Any]]:
        """Events that have come, oldest first."""
        events: list[dict[str, Any]] = []
        while self._socket.poll(wait_ms):
            topic, sequence, payload = self._socket.recv_multipart()
            assert topic == b"kv@pod@model" and len(sequence) == 8
            _time, batch, rank = msgspec.msgpack.decode(payload)
            assert rank == 0
            events += batch
            wait_ms = min(wait_ms, 200)
        return events

    def connect(self, something_happens: Callable[[], object]) -> None:
        """ZMQ drops what is published before it has the subscription."""
        for _ in range(600):
            something_happens()
            if self.read(100):
                return
        raise AssertionError("nothing is published")

    def read_until(
        self, enough: Callable[[list[dict[str, Any]]], bool], makes: Callable[[], object]
    ) -> Any:
        """Events until there are enough of them; a step of the engine publishes what ended before
        it."""
        events = self.read(100)
        for _ in range(600):
            if enough(events):
                return events
            makes()
            events += self.read(100)
        raise AssertionError(f"only these were published: {events}")

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    made = Subscriber()
    yield made
    made.close()


def blocks_of(events: list[dict[str, Any]], medium: str) -> dict[int, dict[str, Any]]:
    """What a router knows of each block after these events, by its hash. Routers count full
    attention only."""
    found: dict[int, dict[str, Any]] = {}
    others = {
        each["group_idx"] for each in events if each.get("kv_cache_spec_kind") == "sliding_window"
    }
    for event in events:
        if event.get("group_idx") in others:
            continue
        if event["type"] == "BlockStored" and event["medium"] == medium:
            parent, size = event["parent_block_hash"], event["block_size"]
            assert len(event["token_ids"]) == size * len(event["block_hashes"])
            for at, name in enumerate(event["block_hashes"]):
                found[name] = {
                    "parent": parent,
                    "tokens": event["token_ids"][at * size : (at + 1) * size],
                    "extra_keys": event["extra_keys"][at],
                    **{
                        name: event.get(name)
                        for name in ("lora_name", "group_idx", "kv_cache_spec_kind")
                    },
                }
                parent = name
        elif event["type"] == "BlockRemoved" and event["medium"] == medium:
            for name in event["block_hashes"]:
                found.pop(name, None)
    return found


def prefix_of(
    blocks: dict[int, dict[str, Any]], tokens: list[int], salt: str | None, size: int
) -> int:
    """How many blocks of a prompt a router finds among these, from the first one on."""
    parent: int | None = None
    for at in range(len(tokens) // size):
        keys = [salt] if salt is not None and at == 0 else None
        wanted = parent, tokens[at * size : (at + 1) * size], keys
        parent = next((name for name, each in blocks.items() if _is(each, *wanted)), None)
        if parent is None:
            return at
    return len(tokens) // size


def _is(
    block: dict[str, Any], parent: int | None, tokens: list[int], keys: list[str] | None
) -> bool:
    return bool(
        block["parent"] == parent and block["tokens"] == tokens and block["extra_keys"] == keys
    )


@pytest.mark.parametrize(
    "specs", [(full(),), pytest.param((full(), window()), marks=needs_named_failures)]
)
def test_a_subscriber_reads_what_vllms_scheduler_publishes_of_the_server_and_of_the_gpu(
    make: Callable[..., Engine], subscriber: Subscriber, specs: tuple[Any, ...]
) -> None:
    """With vLLM's own publisher, in the form that its release writes."""

    def change(config: Any) -> None:
        config.kv_events_config = subscriber.config

    engine = make(*specs, change=change)
    numbers = iter(range(1_000_000))
    subscriber.connect(lambda: engine.run(request([next(numbers), *range(40, 48)])))
    engine.run(
        request(TOKENS), request(TOKENS, cache_salt="one"), request(TOKENS, cache_salt="two")
    )
    events = subscriber.read_until(lambda events: len(blocks_of(events, "CPU")) >= 30, engine.step)
    on_gpu, on_cpu = blocks_of(events, "GPU"), blocks_of(events, "CPU")
    for salt in (None, "one", "two"):
        assert (
            prefix_of(on_cpu, TOKENS, salt, BLOCK) == prefix_of(on_gpu, TOKENS, salt, BLOCK) == 10
        )
    assert prefix_of(on_cpu, TOKENS, "three", BLOCK) == 0
    assert {name: on_gpu[name] for name in on_cpu} == on_cpu, (
        "a router takes them for the same blocks"
    )
    assert all(isinstance(event, dict) and event["type"] for event in events)
    engine.scheduler.kv_event_publisher.shutdown()


def test_a_subscriber_reads_that_a_reset_takes_the_cpus_blocks(
    make: Callable[..., Engine], subscriber: Subscriber
) -> None:
    def change(config: Any) -> None:
        config.kv_events_config = subscriber.config

    engine = make(change=change)
    numbers = iter(range(1_000_000))
    subscriber.connect(lambda: engine.run(request([next(numbers), *range(40, 48)])))
    engine.run(request(TOKENS))
    events = subscriber.read_until(lambda events: len(blocks_of(events, "CPU")) >= 10, engine.step)
    engine.connector.reset_cache()
    events += subscriber.read_until(
        lambda events: any(each["type"] == "BlockRemoved" for each in events), engine.step
    )
    assert prefix_of(blocks_of(events, "CPU"), TOKENS, None, BLOCK) == 0
    assert prefix_of(blocks_of(events, "GPU"), TOKENS, None, BLOCK) == 10
    assert not any(event["type"] == AllBlocksCleared.__name__ for event in events)
    engine.scheduler.kv_event_publisher.shutdown()


@pytest.mark.usefixtures("_nothing_is_left")
def test_a_subscriber_reads_what_a_real_engine_stored_salts_included(
    one: Replica, server: ServerProcess, subscriber: Subscriber
) -> None:
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv@pod@model"}
    config["endpoint"] = subscriber.config.endpoint
    engine = one.use("llama", server, kv_events_config=config)
    subscriber.connect(lambda: engine.serve([asking(prompt(40))]))
    asked, size = prompt(100), 32
    engine.serve([asking(asked), asking(asked, "one"), asking(asked, "two")])
    events = subscriber.read_until(
        lambda events: len(blocks_of(events, "CPU")) >= 9,
        lambda: engine.serve([asking(prompt(40))]),
    )
    on_gpu, on_cpu = blocks_of(events, "GPU"), blocks_of(events, "CPU")
    for salt in (None, "one", "two"):
        assert prefix_of(on_cpu, asked, salt, size) == prefix_of(on_gpu, asked, salt, size) == 3
    assert prefix_of(on_cpu, asked, "three", size) == 0
    assert {name: on_gpu[name] for name in on_cpu} == on_cpu, (
        "a router takes them for the same blocks"
    )
    one.close_engine()
