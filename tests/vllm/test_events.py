"""KV events: what the pool of a host has, as routers read it from each engine."""

from __future__ import annotations

import contextlib
import random
import socket
import time
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

from kvkeep.cli.remote import ask
from kvkeep.client.options import ClientOptions
from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.connector.group_layout import CacheGroup, GroupLayout
from kvkeep.connector.step import Completed, Job
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import KEY_BYTES, addresses
from kvkeep.testing.process import ServerProcess
from kvkeep.vllm import events as of_events
from kvkeep.vllm import versions
from kvkeep.vllm.events import CacheEvents, EventGroup, event_groups
from kvkeep.wire.messages import IN_MEMORY, ON_DISK

TOKENS = list(range(100, 142))
LORA = LoRARequest(lora_name="style", lora_int_id=3, lora_path="/adapters/one")
PLAIN = event_groups(cache_config(full()), GroupLayout([CacheGroup("full", BLOCK)]), BLOCK)
FINGERPRINT = b"a test's layout."


class Pool:
    """What a server tells engines, without a server: all hear of all blocks."""

    def __init__(self) -> None:
        self.engines: list[CacheEvents] = []
        self.media: dict[bytes, int] = {}
        self.texts: dict[bytes, bytes] = {}

    def engine(
        self,
        groups: tuple[EventGroup, ...] = PLAIN,
        block_tokens: int = BLOCK,
        scope: bytes = b"sha256",
        enabled: bool = True,
    ) -> CacheEvents:
        """A new one, which is told of what is there."""
        config = SimpleNamespace(enable_kv_cache_events=enabled)
        events = CacheEvents(
            SimpleNamespace(kv_events_config=config), groups, block_tokens, FINGERPRINT, scope
        )
        self.engines.append(events)
        self.tell_all(events)
        return events

    def tell_all(self, events: CacheEvents) -> None:
        events.begin_content()
        for address, media in self.media.items():
            if media:
                events.place(address, media, self.texts.get(address, b""))
        events.end_content()
        events.tidy()

    def put(self, address: bytes, media: int) -> None:
        """All engines hear where a block is now."""
        self.media[address] = media
        for events in self.engines:
            events.place(address, media, self.texts.get(address, b"") if media else b"")

    def tidy(self) -> None:
        for events in self.engines:
            events.tidy()

    def take_descriptions(self, events: CacheEvents, most: int = 3) -> int:
        """As a server takes them that has the blocks in memory. Returns how many."""
        count = 0
        while (said := events.describe(most)) is not None:
            assert len(said.keys) == KEY_BYTES * len(said.texts) <= KEY_BYTES * most
            there = addresses(said.keys, FINGERPRINT)
            for at, text in enumerate(said.texts):
                address = there[at * KEY_BYTES : (at + 1) * KEY_BYTES]
                self.texts[address] = text
                self.put(address, self.media.get(address) or IN_MEMORY)
                count += 1
        self.tidy()
        return count


def state_of(asked: Any, each: int = 1) -> Any:
    """The connector's record of a request, with keys of its own; `each`: hashes in a block."""
    keys = bytearray(b"".join(name[:KEY_BYTES] for name in asked.block_hashes[each - 1 :: each]))
    return SimpleNamespace(salt=asked.cache_salt, keys=keys, request=asked, noted_blocks=0)


def address_of(asked: Any, place: int) -> bytes:
    return addresses(asked.block_hashes[place][:KEY_BYTES], FINGERPRINT)


def job(number: int, first: int, blocks: int, *, is_load: bool = False, **more: Any) -> Job:
    return Job(number, None, first, list(range(10, 10 + blocks)), is_load, blocks, **more)  # type: ignore[arg-type]


def names(asked: Any, *places: int) -> list[Any]:
    return [maybe_convert_block_hash(asked.block_hashes[place]) for place in places]


def store(
    pool: Pool, events: CacheEvents, state: Any, first: int, blocks: int, number: int = 1
) -> list[Any]:
    """A job ends, and the engine hears of it. Returns what it then publishes."""
    done = job(number, first, blocks)
    events.prepared(done, state)
    events.completed(Completed(stores=[done]))
    pool.take_descriptions(events)
    return list(events.take())


def of_vllm(
    asked: Any, first: int, stop: int, block_tokens: int = BLOCK, hash_tokens: int = BLOCK
) -> Any:
    """The event that vLLM's own prefix cache publishes for these blocks of a request, but for the
    medium."""
    pool = BlockPool(64, True, hash_tokens, enable_kv_cache_events=True)
    pool.cache_full_blocks(asked, pool.get_new_blocks(stop), first, stop, block_tokens, 0)
    [event] = pool.take_events()
    for name, value in versions.event_spec_fields(full(block_tokens)).items():
        setattr(event, name, value)  # the cache manager adds these
    assert event.medium == "GPU"
    event.medium = "CPU"
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
def test_every_engine_says_what_vllms_own_events_say_but_for_the_medium(
    more: dict[str, Any], first: int
) -> None:
    pool, asked = Pool(), request(TOKENS, **more)
    one, other = pool.engine(), pool.engine()
    state = state_of(asked)
    if first:
        assert store(pool, one, state, 0, first) == [of_vllm(asked, 0, first)]
        assert list(other.take()) == [of_vllm(asked, 0, first)]
    assert store(pool, one, state, first, 4) == [of_vllm(asked, first, first + 4)]
    [event] = other.take()
    assert event == of_vllm(asked, first, first + 4)
    assert event.token_ids == TOKENS[first * 4 : first * 4 + 16] and len(event.extra_keys) == 4
    [event] = pool.engine().take()
    assert event == of_vllm(asked, 0, first + 4), "one that comes later hears all of it"


def test_salted_blocks_do_not_look_unsalted() -> None:
    pool = Pool()
    events = pool.engine()
    [salted] = store(pool, events, state_of(request(TOKENS, cache_salt="of one tenant")), 0, 3)
    [unsalted] = store(pool, events, state_of(request(TOKENS)), 0, 3)
    assert salted.extra_keys == [("of one tenant",), None, None], (
        "later blocks are salted by their parent"
    )
    assert unsalted.extra_keys == [None, None, None]
    assert not set(salted.block_hashes) & set(unsalted.block_hashes)


def test_blocks_are_published_at_vllms_own_granularity() -> None:
    """A hash of 4 tokens, blocks of 8 in the group, blocks of 16 in the server."""
    pieces = GroupLayout([CacheGroup("full", 8), CacheGroup("window", 16, 8)])
    groups = event_groups(cache_config(full(8), window(16)), pieces, 4)
    pool, asked = Pool(), request(TOKENS, cache_salt="of one tenant")
    events = pool.engine(groups, 16)
    [event] = store(pool, events, state_of(asked, 4), 1, 1)
    assert event == of_vllm(asked, 0, 4, 8, 4)
    assert event.block_hashes == names(asked, 1, 3, 5, 7)
    assert (event.token_ids, event.block_size) == (TOKENS[:32], 8)


def test_each_group_of_full_attention_is_published_and_no_other() -> None:
    pieces = GroupLayout([CacheGroup("window", 4, 8), CacheGroup("full", 4), CacheGroup("full", 8)])
    groups = event_groups(cache_config(window(), full(), full(8)), pieces, 4)
    pool, asked = Pool(), request(TOKENS)
    events = pool.engine(groups, 8)
    fine, coarse = store(pool, events, state_of(asked, 2), 0, 2)
    assert (fine.group_idx, fine.block_size, fine.block_hashes) == (1, 4, names(asked, 0, 1, 2, 3))
    assert (coarse.group_idx, coarse.block_size, coarse.block_hashes) == (2, 8, names(asked, 1, 3))
    assert {fine.kv_cache_spec_kind, coarse.kv_cache_spec_kind} == {"full_attention"}
    for place in (1, 3):
        pool.put(address_of(asked, place), 0)
    events.tidy()
    assert [(each.group_idx, len(each.block_hashes)) for each in events.take()] == [(1, 4), (2, 2)]  # type: ignore[union-attr]


def test_a_block_is_published_once_on_each_medium_until_it_is_removed() -> None:
    """Routers count how often a block is stored, and wait for as many removals."""
    pool, asked = Pool(), request(TOKENS)
    events, state = pool.engine(), state_of(request(TOKENS))
    [whole] = store(pool, events, state, 0, 3)
    assert whole.block_hashes == names(asked, 0, 1, 2)
    state.noted_blocks = 0
    assert store(pool, events, state, 0, 3) == [], "it is described already"
    [more] = store(pool, events, state, 0, 5)
    assert (more.block_hashes, [more.parent_block_hash]) == (names(asked, 3, 4), names(asked, 2))
    for place in range(5):
        pool.put(address_of(asked, place), IN_MEMORY | ON_DISK)
    for place in (4, 3, 2):
        pool.put(address_of(asked, place), ON_DISK)
        pool.put(address_of(asked, place), ON_DISK)
    events.tidy()
    on_disk, removed = events.take()
    assert (on_disk.medium, on_disk.block_hashes) == ("STORAGE", names(asked, 0, 1, 2, 3, 4))  # type: ignore[union-attr]
    assert isinstance(removed, BlockRemoved)
    assert (removed.medium, removed.block_hashes) == ("CPU", names(asked, 4, 3, 2))
    pool.put(address_of(asked, 4), 0)
    pool.put(address_of(asked, 2), IN_MEMORY | ON_DISK)
    events.tidy()
    removed, again = events.take()
    assert (removed.medium, removed.block_hashes) == ("STORAGE", names(asked, 4))  # type: ignore[union-attr]
    assert (again.medium, again.block_hashes) == ("CPU", names(asked, 2))  # type: ignore[union-attr]


def test_a_removal_and_a_store_of_one_block_keep_their_order() -> None:
    pool, asked = Pool(), request(TOKENS)
    events = pool.engine()
    store(pool, events, state_of(asked), 0, 2)
    for media in (0, IN_MEMORY, 0, IN_MEMORY):
        pool.put(address_of(asked, 1), media)
    events.tidy()
    kinds = [type(each) for each in events.take()]
    assert kinds == [BlockRemoved, BlockStored, BlockRemoved, BlockStored]


def test_a_block_waits_for_its_parent() -> None:
    """llm-d drops a block whose parent it does not know."""
    pool, asked = Pool(), request(TOKENS)
    one = pool.engine()
    store(pool, one, state_of(asked), 0, 5)
    late = pool.engine()
    late.take()
    late.reset(b"sha256")
    late.begin_content()
    other = CacheEvents(
        SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=True)),
        PLAIN,
        BLOCK,
        FINGERPRINT,
        b"sha256",
    )
    for place in (4, 3, 1, 2):
        address = address_of(asked, place)
        other.place(address, IN_MEMORY, pool.texts[address])
    other.tidy()
    assert other.take() == []
    other.place(address_of(asked, 3), 0, b"")
    other.place(address_of(asked, 0), IN_MEMORY, pool.texts[address_of(asked, 0)])
    other.tidy()
    [event] = other.take()
    assert event == of_vllm(asked, 0, 3)
    other.place(address_of(asked, 3), IN_MEMORY, pool.texts[address_of(asked, 3)])
    other.tidy()
    [event] = other.take()
    assert event == of_vllm(asked, 3, 5)


def test_nothing_is_said_before_the_end_of_a_job() -> None:
    pool, state = Pool(), state_of(request(TOKENS))
    events, done = pool.engine(), job(1, 0, 3)
    events.prepared(done, state)
    assert events.describe(9) is None
    done.incomplete = True
    events.completed(Completed(stores=[done]))
    said = events.describe(9)
    assert said is not None and len(said.texts) == 3, "the server knows which of them it has"
    assert events.describe(9) is None and repr(events) == "CacheEvents(jobs=0, blocks=0)"


def test_blocks_that_are_loaded_are_described_unless_they_are_known() -> None:
    """Those that the server adopted from the one before, for example."""
    pool, state = Pool(), state_of(request(TOKENS))
    events, done = pool.engine(), job(1, 1, 2, is_load=True)
    events.prepared(done, state)
    events.completed(Completed(loads=[done]))
    assert pool.take_descriptions(events) == 3, "and what the request had before"
    state.noted_blocks = 0
    events.prepared(done, state)
    events.completed(Completed(loads=[done]))
    assert events.describe(9) is None


@pytest.mark.parametrize("config", [None, SimpleNamespace(enable_kv_cache_events=False)])
def test_nothing_is_said_or_kept_if_events_are_off(config: Any) -> None:
    vllm_config = SimpleNamespace(kv_events_config=config)
    events = CacheEvents(vllm_config, PLAIN, BLOCK, FINGERPRINT, b"")
    assert not events.enabled
    done = job(1, 0, 3)
    events.prepared(done, state_of(request(TOKENS)))
    events.completed(Completed(stores=[done]))
    assert events.describe(9) is None and events.take() == []
    assert repr(events) == "CacheEvents(jobs=0, blocks=0)"


def test_nothing_is_said_of_a_request_without_hashes() -> None:
    asked = request(TOKENS)
    state = state_of(asked)
    asked.block_hashes.clear()
    assert store(pool := Pool(), events := pool.engine(), state, 0, 3) == []
    assert "jobs=0" in repr(events)


def test_after_a_reset_all_of_it_is_gone_from_this_engine_and_from_no_other() -> None:
    """AllBlocksCleared would make routers forget what the GPU holds."""
    pool, asked = Pool(), request(TOKENS)
    events, other = pool.engine(), pool.engine()
    store(pool, events, state_of(asked), 0, 3)
    other.take()
    events.reset(b"sha256 and a generation")
    assert events.feed.must_restart
    pool.tell_all(events)
    pool.tell_all(other)
    [event] = events.take()
    assert (
        isinstance(event, BlockRemoved)
        and sorted(event.block_hashes) == sorted(names(asked, 0, 1, 2))
        and event.medium == "CPU"
    )
    assert other.take() == []
    pool.tell_all(events)
    assert events.take() == []


def test_what_is_not_among_all_blocks_is_gone_and_the_rest_is_no_news() -> None:
    pool, asked = Pool(), request(TOKENS)
    events = pool.engine()
    store(pool, events, state_of(asked), 0, 5)
    pool.media[address_of(asked, 4)] = 0  # while nobody told us
    pool.tell_all(events)
    [event] = events.take()
    assert isinstance(event, BlockRemoved) and event.block_hashes == names(asked, 4)


def test_a_server_that_was_restarted_is_told_again() -> None:
    pool, asked, salted = Pool(), request(TOKENS), request(TOKENS, cache_salt="another tenant")
    events = pool.engine()
    store(pool, events, state_of(asked), 0, 5)
    store(pool, events, state_of(salted), 0, 2)
    before, pool.texts = pool.texts, {}
    pool.tell_all(events)
    assert pool.engine().take() == [], "another engine learns nothing from that server yet"
    assert pool.take_descriptions(events) == 7
    assert pool.texts == before and events.take() == []
    assert sum(len(each.block_hashes) for each in pool.engines[1].take()) == 7  # type: ignore[union-attr]


def test_blocks_of_engines_with_other_hashes_are_not_published() -> None:
    pool, asked = Pool(), request(TOKENS)
    one, other = pool.engine(), pool.engine(scope=b"xxhash of this process")
    store(pool, one, state_of(asked), 0, 3)
    assert other.take() == []
    [event] = store(pool, other, state_of(asked), 0, 3)
    assert event.block_hashes == names(asked, 0, 1, 2), "it uses them, too"
    assert one.take() == []
    pool.put(address_of(asked, 2), 0)
    pool.tidy()
    for events in (one, other):
        [gone] = events.take()
        assert isinstance(gone, BlockRemoved) and gone.block_hashes == names(asked, 2)


@pytest.mark.parametrize("seed", range(20))
def test_what_another_engine_wrote_is_an_event_or_nothing(seed: int) -> None:
    """Descriptions that are cut, changed or of another form: no exception, and no event that vLLM
    could not publish."""
    rng, pool = random.Random(seed), Pool()
    store(pool, pool.engine(), state_of(request(TOKENS, **SAYS["images, salted"])), 0, 5)
    events = pool.engine(scope=b"none")
    events.reset(b"sha256")
    pool.tell_all(events)
    events.take()
    good = list(pool.texts.values())
    for _ in range(300):
        text = bytearray(rng.choice(good))
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(text))
            text[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
        if rng.random() < 0.1:
            text = bytearray(msgspec.msgpack.encode(rng.choice([1, "", [], {}, [b""] * 9])))
            if rng.random() < 0.05:
                text = bytearray(b"\x91" * 10_000)
        events.place(rng.randbytes(16), rng.choice([0, 1, 2, 3]), bytes(text))
    events.tidy()
    msgspec.msgpack.encode(events.take())


def test_a_time_that_no_calendar_has_is_no_event() -> None:
    """msgspec raises a plain ValueError for it."""
    pool, asked = Pool(), request(TOKENS, **SAYS["images, salted"])
    store(pool, pool.engine(), state_of(asked), 0, 1)
    events, good = pool.engine(scope=b"none"), pool.texts[address_of(asked, 0)]
    fields = msgspec.msgpack.decode(good)
    year_10000 = (0).to_bytes(4, "big") + (253_402_300_800).to_bytes(8, "big")
    fields[4][0][2] = [[msgspec.msgpack.Ext(-1, year_10000)]]
    events.place(b"0" * 16, IN_MEMORY, msgspec.msgpack.encode(fields))
    events.tidy()
    assert not events.take()


def test_a_job_of_before_a_reset_describes_blocks_of_before() -> None:
    pool, asked = Pool(), request(TOKENS)
    events, done = pool.engine(), job(1, 0, 3)
    events.prepared(done, state_of(asked))
    events.completed(Completed(stores=[done]))
    events.reset(b"sha256 and a generation")
    pool.tell_all(events)
    assert pool.take_descriptions(events) == 3
    assert events.take() == [], "this engine finds them no more"


def test_notes_for_a_server_that_is_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_events, "_MOST_NOTED_TOKENS", 30)
    pool = Pool()
    events = pool.engine()
    for number in range(4):
        done = job(number, 0, 3)
        events.prepared(done, state_of(request([number, *TOKENS])))
        events.completed(Completed(stores=[done]))
        events.forget_notes()
        assert events.describe(9) is None
    assert len(store(pool, events, state_of(request(TOKENS)), 0, 3)) == 1, "there is room again"


def test_what_is_published_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked = Pool(), request(TOKENS)
    store(pool, pool.engine(), state_of(asked), 0, 5)
    size = sum(len(text) + 512 for text in list(pool.texts.values())[:3])
    monkeypatch.setattr(of_events, "MOST_BYTES", size)
    events = pool.engine()
    [event] = events.take()
    assert event == of_vllm(asked, 0, 3)
    for place in (2, 1):
        pool.put(address_of(asked, place), 0)
    events.tidy()
    events.take()
    pool.put(address_of(asked, 1), IN_MEMORY)
    events.tidy()
    [again] = events.take()
    assert again == of_vllm(asked, 1, 2), "what is gone makes room"


def test_an_engine_whose_events_are_not_taken_asks_for_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(of_events, "_MOST_WAITING", 2)
    pool = Pool()
    events, reader = pool.engine(), pool.engine()
    for first in range(2):
        assert not reader.is_full
        store(pool, events, state_of(request([first, *TOKENS])), 0, 3)
    assert reader.is_full
    assert len(reader.take()) == 2 and not reader.is_full


def test_jobs_that_cannot_be_described_in_time_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_events, "_MOST_NOTED_TOKENS", 30)
    events = Pool().engine()
    for number in range(4):
        done = job(number, 0, 3)
        events.prepared(done, state_of(request([number, *TOKENS])))
        events.completed(Completed(stores=[done]))
    said = 0
    while (some := events.describe(9)) is not None:
        said += len(some.texts)
    assert said == 6


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


class SharedServer:
    """A real server for engines without workers, in place of a simulated one: they share its
    memory, and a Heartbeat serves their connections."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._adapters: list[SchedulerAdapter] = []

    def lookup_side(self, shape: Any) -> SchedulerAdapter:
        options = ClientOptions(address=self._server.address, lookup_deadline_ms=40_000)
        self._adapters.append(SchedulerAdapter(shape, options))
        return self._adapters[-1]

    def pass_time(self, duration_ms: int) -> None:
        time.sleep(duration_ms / 1000)
        for adapter in self._adapters:
            adapter.connection.poll()

    def close(self) -> None:
        for adapter in self._adapters:
            adapter.close()


@pytest.fixture
def shared(server: ServerProcess) -> Iterator[SharedServer]:
    made = SharedServer(server)
    yield made
    made.close()


def publishing(subscriber: Subscriber) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        config.kv_events_config = subscriber.config

    return change


def connect(engine: Engine, subscriber: Subscriber) -> None:
    numbers = iter(range(1_000_000))
    subscriber.connect(lambda: engine.run(request([next(numbers), *range(40, 48)])))


@pytest.mark.parametrize(
    "specs", [(full(),), pytest.param((full(), window()), marks=needs_named_failures)]
)
def test_a_subscriber_reads_what_another_engine_stored_from_vllms_scheduler(
    shared: SharedServer, subscriber: Subscriber, specs: tuple[Any, ...]
) -> None:
    """With vLLM's own publisher, in the form that its release writes."""
    engine = Engine(shared, *specs, change=publishing(subscriber))  # type: ignore[arg-type]
    silent = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    other = Engine(
        shared, *specs, change=lambda config: setattr(config, "kv_events_config", silent)
    )  # type: ignore[arg-type]
    connect(engine, subscriber)
    asked = list(range(700, 742))
    engine.run(request(TOKENS), request(TOKENS, cache_salt="one"))
    other.run(request(TOKENS, cache_salt="two"), request(asked))
    events = subscriber.read_until(
        lambda events: (
            prefix_of(blocks_of(events, "CPU"), asked, None, BLOCK) == 10
            and prefix_of(blocks_of(events, "CPU"), TOKENS, "two", BLOCK) == 10
            and prefix_of(blocks_of(events, "CPU"), TOKENS, "one", BLOCK) == 10
        ),
        engine.step,
    )
    on_gpu, on_cpu = blocks_of(events, "GPU"), blocks_of(events, "CPU")
    for salt in (None, "one"):
        assert prefix_of(on_gpu, TOKENS, salt, BLOCK) == 10
    assert prefix_of(on_gpu, TOKENS, "two", BLOCK) == prefix_of(on_gpu, asked, None, BLOCK) == 0
    assert prefix_of(on_cpu, TOKENS, "three", BLOCK) == 0
    both = on_cpu.keys() & on_gpu.keys()
    assert {name: on_gpu[name] for name in both} == {name: on_cpu[name] for name in both}, (
        "a router takes them for the same blocks"
    )
    assert all(isinstance(event, dict) and event["type"] for event in events)
    engine.scheduler.kv_event_publisher.shutdown()


def test_a_subscriber_reads_that_a_reset_takes_the_cpus_blocks(
    shared: SharedServer, subscriber: Subscriber
) -> None:
    engine = Engine(shared, change=publishing(subscriber))  # type: ignore[arg-type]
    connect(engine, subscriber)
    asked = list(range(800, 842))  # no other test's
    engine.run(request(asked))
    events = subscriber.read_until(
        lambda events: prefix_of(blocks_of(events, "CPU"), asked, None, BLOCK) == 10, engine.step
    )
    engine.connector.reset_cache()
    events += subscriber.read_until(lambda more: not blocks_of(events + more, "CPU"), engine.step)
    assert prefix_of(blocks_of(events, "GPU"), asked, None, BLOCK) == 10
    assert not any(event["type"] == AllBlocksCleared.__name__ for event in events)
    engine.scheduler.kv_event_publisher.shutdown()


@pytest.mark.usefixtures("_nothing_is_left")
def test_a_subscriber_of_a_real_engine_reads_what_another_one_stored_and_what_is_cleared(
    one: Replica, two: Replica, server: ServerProcess, subscriber: Subscriber
) -> None:
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv@pod@model"}
    config["endpoint"] = subscriber.config.endpoint
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        elsewhere = f"tcp://*:{free.getsockname()[1]}"
    engine = one.use("llama", server, kv_events_config=config)
    other = two.use("llama", server, kv_events_config={**config, "endpoint": elsewhere})
    subscriber.connect(lambda: engine.serve([asking(prompt(40))]))
    asked, size, own = prompt(100), 32, prompt(100)
    engine.serve([asking(own)])
    other.serve([asking(asked), asking(asked, "one"), asking(asked, "two")])

    def there(events: list[dict[str, Any]], salt: str | None) -> bool:
        return prefix_of(blocks_of(events, "CPU"), asked, salt, size) == 3

    events = subscriber.read_until(
        lambda events: all(there(events, salt) for salt in (None, "one", "two")),
        lambda: engine.serve([asking(prompt(40))]),
    )
    on_gpu, on_cpu = blocks_of(events, "GPU"), blocks_of(events, "CPU")
    assert prefix_of(on_gpu, asked, None, size) == prefix_of(on_cpu, asked, "three", size) == 0
    assert prefix_of(on_gpu, own, None, size) == prefix_of(on_cpu, own, None, size) == 3
    both = on_cpu.keys() & on_gpu.keys()
    assert {name: on_gpu[name] for name in both} == {name: on_cpu[name] for name in both}, (
        "a router takes them for the same blocks"
    )
    ask(server.http, f"/v1/tenants/{tenant_of('two')}/blocks", "DELETE")
    events += subscriber.read_until(
        lambda more: not there(events + more, "two"),
        lambda: engine.serve([asking(prompt(40))]),
    )
    assert there(events, None) and there(events, "one")
    one.close_engine()
    two.close_engine()
