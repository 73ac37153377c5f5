"""A real engine on a scripted external cache: the test says what is answered, when, by which rank,
and what fails.

After each step the rig checks the engine's integrity, and compares the bytes of every block that
the prefix cache offers with those that an engine without any cache computes. After each test that
passed, `done` checks the tokens of every request and that no block, job or lease is left."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch

from kvkeep.client.requests import Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.client.scheduler import Answer, Lookup
from kvkeep.connector.cost_model import LoadWhen
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.engine import Engine
from kvkeep.engine.models.model import Rank, Segment
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.request import Request
from kvkeep.engine.step import Step, StepOutput
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import KEY_BYTES, KeyChain
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.shape import BlockShape
from kvkeep.wire.messages import RequestReport
from kvkeep_lab.simulation.oracle import OracleModel

BLOCK_TOKENS = 4
GARBAGE = 0x5AD0BAD05AD0BAD
SLOTS_A_LEASE = 1_000
PASSED = pytest.StashKey[bool]()


def keys_of(joined: bytes) -> list[bytes]:
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


def read_block(kv: Mapping[str, torch.Tensor], block: int) -> bytes:
    return b"".join(layer[block].numpy().tobytes() for layer in kv.values())


def write_block(kv: Mapping[str, torch.Tensor], block: int, content: bytes | None) -> None:
    """None: garbage that no model would ever write."""
    for number, layer in enumerate(kv.values()):
        if content is None:
            layer[block] = GARBAGE + number
        else:
            size = layer[block].nbytes
            words = np.frombuffer(content[number * size : (number + 1) * size], dtype=np.int64)
            layer[block] = torch.from_numpy(words.copy()).view(layer[block].shape)


@dataclass
class ScriptedCache:
    """The external cache, in memory, with every decision left to the test.

    hold_lookups     lookups are answered with None
    hold_loads       loads of these ranks are begun, and end with release_loads; None: of all ranks
    hold_stores      likewise; a store reads the engine's blocks as late as it can, when it ends
    failing          places in the request that fail to load, by rank; garbage is written there
    """

    blocks: dict[tuple[str, bytes, int], bytes] = field(default_factory=dict)
    hold_lookups: bool = False
    hold_loads: set[int] | None = field(default_factory=set)
    hold_stores: set[int] | None = field(default_factory=set)
    failing: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    most_blocks: int = 1_000  # that a lookup finds
    lookups: list[Lookup] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)  # numbers of lookups, from 1
    reports: list[RequestReport] = field(default_factory=list)
    finished: list[bytes] = field(default_factory=list)  # last keys of conversations
    leases: dict[int, Lookup] = field(default_factory=dict)
    loads: list[LoadRequest] = field(default_factory=list)
    stores: list[StoreRequest] = field(default_factory=list)
    ranks: list[ScriptedRank] = field(default_factory=list)
    num_shards: int = 1
    load_when: LoadWhen = "always"
    tp_shards: int | None = None
    tracing: bool = False

    # -- the backend

    def lookup_side(self, shape: BlockShape) -> ScriptedCache:
        self.num_shards = len(shape.shard_bytes)
        return self

    def transfer_side(self, shape: BlockShape, strategy: ParallelStrategy) -> ScriptedRank:
        self.ranks.append(ScriptedRank(self, strategy))
        return self.ranks[-1]

    def connect(self) -> None: ...

    def close(self) -> None: ...

    # -- the scheduler's side

    def lookup(self, salt: str | None, keys: bytes, skip: int = 0, trace: str = "") -> Lookup:
        lookup = Lookup(salt, keys, skip)
        self.lookups.append(lookup)
        self.leases[len(self.lookups)] = lookup
        return lookup

    def answer(self, lookup: Lookup) -> Answer | None:
        assert not lookup.is_released
        if lookup.answer is None and not self.hold_lookups:
            lookup.answer = self._answer(lookup)
        return lookup.answer

    def answer_now(self, number: int) -> None:
        """Answers that lookup, from 1 on, also while lookups are held."""
        lookup = self.lookups[number - 1]
        lookup.answer = self._answer(lookup)

    def _answer(self, lookup: Lookup) -> Answer:
        tenant, blocks, skip = tenant_of(lookup.salt), 0, lookup.skip
        for key in keys_of(lookup.keys)[: self.most_blocks]:
            if not all((tenant, key, shard) in self.blocks for shard in range(self.num_shards)):
                break
            blocks += 1
        described = max(0, blocks - skip)
        # So that a load shows which blocks it reads, and under which lease.
        first = (self.lookups.index(lookup) + 1) * SLOTS_A_LEASE + skip
        slots = np.arange(first, first + described, dtype=np.int64)
        checksums = np.zeros((described, self.num_shards), dtype=np.uint64)
        return Answer(blocks, skip, 1, slots, checksums)

    def wait(self, lookup: Lookup, milliseconds: int) -> None:
        """Time does not pass here."""

    def release(self, lookup: Lookup, loaded_tokens: int = 0) -> None:
        assert not lookup.is_released
        lookup.is_released = True
        number = self.lookups.index(lookup) + 1
        del self.leases[number]
        self.releases.append(number)

    def lacks(self, key: bytes) -> bool:
        return False

    def wait_for_tier(self, lookup: Lookup, most_ms: float | None = None) -> bool:
        return False

    def prefetch(self, salt: str | None, keys: bytes) -> None:
        """There are no tiers here."""

    def report(self, report: RequestReport, lacked_by: object) -> None:
        self.reports.append(report)

    def finish_conversation(self, salt: str | None, last_key: bytes) -> None:
        self.finished.append(last_key)

    def is_leased(self, load: LoadRequest) -> bool:
        return {slot // SLOTS_A_LEASE for slot in load.slots.tolist()} <= self.leases.keys()

    # -- the script

    def fail(self, *places: int, rank: int = 0) -> None:
        self.failing[rank].update(places)

    def release_loads(self, rank: int | None = None) -> None:
        """The loads that are held now end."""
        for each in self.ranks:
            if rank in (None, each.strategy.rank):
                each.end_loads()

    def release_stores(self, rank: int | None = None) -> None:
        for each in self.ranks:
            if rank in (None, each.strategy.rank):
                each.end_stores()

    def let_go(self) -> None:
        """Nothing is held back from now on."""
        self.hold_lookups, self.hold_loads, self.hold_stores = False, set(), set()
        self.release_loads()
        self.release_stores()


@dataclass
class ScriptedRank:
    """One worker's side. A load tears its blocks when it begins, and makes them right or wrong when
    it ends."""

    cache: ScriptedCache
    strategy: ParallelStrategy
    kv: Mapping[str, torch.Tensor] = field(default_factory=dict)
    held_loads: dict[Hashable, LoadRequest] = field(default_factory=dict)
    held_stores: dict[Hashable, StoreRequest] = field(default_factory=dict)
    aside: dict[tuple[Hashable, int], bytes] = field(default_factory=dict)  # by job and block
    finished: Finished = field(default_factory=Finished)

    def register_kv_caches(self, layers: Mapping[str, torch.Tensor], block_dim: int = 0) -> None:
        self.kv = layers

    def load(self, job: Hashable, request: LoadRequest) -> None:
        if self.strategy.rank == 0:
            self.cache.loads.append(request)
        self.held_loads[job] = request
        for block in request.block_ids.tolist():
            write_block(self.kv, block, None)
        if self.cache.hold_loads is not None and self.strategy.rank not in self.cache.hold_loads:
            self.end_loads()

    def end_loads(self) -> None:
        for job, request in self.held_loads.items():
            assert self.cache.is_leased(request), "a load reads what is leased no longer"
            places = [slot % SLOTS_A_LEASE for slot in request.slots.tolist()]
            assert places == list(range(request.skip, request.skip + len(request.block_ids)))
            bad = []
            keys = keys_of(request.keys)[request.skip :]
            for at, (key, block) in enumerate(zip(keys, request.block_ids.tolist(), strict=True)):
                content = self.cache.blocks.get((request.tenant, key, self.strategy.kv_rank))
                if request.skip + at in self.cache.failing[self.strategy.rank] or content is None:
                    bad.append(block)
                    content = None
                write_block(self.kv, block, content)
            self.finished.loads[job] = LoadOutcome(frozenset(bad))
        self.held_loads.clear()

    def store_all(self, requests: Mapping[Any, StoreRequest]) -> None:
        for job, request in requests.items():
            self.store(job, request)

    def store(self, job: Hashable, request: StoreRequest) -> None:
        if self.strategy.rank == 0:
            self.cache.stores.append(request)
        self.held_stores[job] = request
        if self.cache.hold_stores is not None and self.strategy.rank not in self.cache.hold_stores:
            self.end_stores()

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """The next owner of a block may write into it at once, so the rig tears it."""
        for job, request in self.held_stores.items():
            for block in set(request.block_ids.tolist()) & set(block_ids):
                self.aside.setdefault((job, block), read_block(self.kv, block))
        for block in block_ids:
            write_block(self.kv, block, None)

    def end_stores(self) -> None:
        for job, request in self.held_stores.items():
            for key, block in zip(keys_of(request.keys), request.block_ids.tolist(), strict=True):
                if self.strategy.stores:
                    place = request.tenant, key, self.strategy.kv_rank
                    aside = self.aside.pop((job, block), None)
                    self.cache.blocks[place] = aside or read_block(self.kv, block)
            self.finished.stored[job] = len(request.block_ids)
        self.held_stores.clear()

    def poll(self) -> Finished:
        finished, self.finished = self.finished, Finished()
        return finished

    def close(self) -> None: ...


class Truth:
    """What an engine without a cache answers, and what bytes each block of it must have."""

    def __init__(self, tp_size: int) -> None:
        sizes = {"block_tokens": BLOCK_TOKENS, "num_blocks": 512}
        config = EngineConfig(**sizes, tensor_parallel_size=tp_size)
        self.engine = Engine(small_model(), config)
        self.contents: dict[bytes, list[bytes]] = {}  # by key: of each shard
        self._answers: dict[object, list[int]] = {}

    def answer(
        self, tokens: Sequence[int], sampling: SamplingParams, salt: str | None
    ) -> list[int]:
        known = tuple(tokens), sampling.max_tokens, sampling.stop_token_ids, salt
        if known not in self._answers:
            request = self.engine.add(tokens, sampling, salt=salt)
            while self.engine.busy:
                self.engine.step()
            self._answers[known] = request.output_tokens
            blocks = self.engine.scheduler.pool.longest_prefix(request.chain, len(request.chain))
            for at, block in enumerate(blocks):
                self.contents[request.chain.key(at)] = self._shards(block)
        return self._answers[known]

    def _shards(self, block: int) -> list[bytes]:
        ranks = self.engine.workers.ranks
        shards = {rank.strategy.kv_rank: read_block(rank.kv, block) for rank in ranks}
        return [shards[shard] for shard in sorted(shards)]

    def chain(self, tokens: Sequence[int], salt: str | None = None) -> KeyChain:
        """The keys of these tokens."""
        request = self.engine.add(tokens, SamplingParams(max_tokens=1), salt=salt)
        self.engine.abort(request.request_id)
        self.engine.step()
        return request.chain


@dataclass
class OneKey:
    """A chain of one block, to ask a pool for a block wherever it lies in its prefix."""

    only: bytes

    def __len__(self) -> int:
        return 1

    def key(self, index: int) -> bytes:
        return self.only


def small_model() -> OracleModel:
    return OracleModel(num_layers=2, num_kv_heads=4, words=1)


class Rig:
    """One engine with its script. `before_run` and `after_run` are called once, in the middle of
    the next step."""

    def __init__(self, **options: Any) -> None:
        cached = options.pop("cache", True)
        self.config = EngineConfig(**{"block_tokens": BLOCK_TOKENS, "num_blocks": 64, **options})
        self.cache = ScriptedCache()
        self.truth = Truth(self.config.tensor_parallel_size)
        self.engine = Engine(small_model(), self.config, self.cache if cached else None)
        self.scheduler = self.engine.scheduler
        self.pool = self.scheduler.pool
        self.ranks: Sequence[Rank] = self.engine.workers.ranks
        self.requests: list[Request] = []
        self.steps: list[Step] = []
        self.before_run: Callable[[], object] = lambda: None
        self.after_run: Callable[[StepOutput], object] = lambda output: None
        self._run, self.engine.workers.run = self.engine.workers.run, self._run_with_hooks  # type: ignore[method-assign]

    # -- what goes in

    def words(self, count: int, which: object = 0) -> list[int]:
        """`count` tokens; the same `which` begins the same way."""
        draw = random.Random(str(which))
        return [draw.randrange(200) for _ in range(count)]

    def prompt(self, blocks: int, tail: int = 2, which: object = 0, end: object = "") -> list[int]:
        """The first blocks of text `which`, and a tail of its own."""
        return self.words(blocks * BLOCK_TOKENS, which) + self.words(tail, f"{which}/{end}/tail")

    def seed(self, tokens: Sequence[int], salt: str | None = None) -> None:
        """The external cache has all full blocks of these tokens."""
        self.truth.answer(tokens, SamplingParams(max_tokens=1), salt)
        for key in keys_of(self.truth.chain(tokens, salt).keys()):
            for shard, content in enumerate(self.truth.contents[key]):
                self.cache.blocks[tenant_of(salt), key, shard] = content

    def add(
        self, tokens: Sequence[int], name: str | None = None, *, max_tokens: int = 3, **options: Any
    ) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=options.pop("stop", ()))
        self.truth.answer(tokens, sampling, options.get("salt"))
        options.setdefault("kv_transfer_params", {"kvkeep_session_finished": True})
        request = self.engine.add(tokens, sampling, request_id=name, **options)
        self.requests.append(request)
        return request

    def add_stored(
        self,
        blocks: int,
        name: str | None = None,
        *,
        fail: Sequence[int] = (),
        tail: int = 2,
        which: object = 0,
        end: object = "",
        **options: Any,
    ) -> Request:
        """A request whose first `blocks` blocks are in the external cache. Those at `fail` do not
        load."""
        prompt = self.prompt(blocks, tail, which, end)
        self.seed(prompt[: blocks * BLOCK_TOKENS])
        self.cache.fail(*fail)
        return self.add(prompt, name, **options)

    def answer(self, request: Request) -> list[int]:
        """The tokens that the request must generate."""
        prompt = request.tokens[: request.prompt_tokens]
        return self.truth.answer(prompt, request.sampling, request.salt)

    # -- steps

    def step(self, count: int = 1) -> list[Request]:
        finished: list[Request] = []
        for _ in range(count):
            finished += self.engine.step()
            self.check()
        return finished

    def run(self, limit: int = 200) -> set[str]:
        """Steps until every request has ended, `limit` at most. Returns the reasons of all
        requests."""
        for _ in range(limit):
            if not self.engine.busy:
                return {request.finish_reason for request in self.requests}
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.unfinished}")

    def done(self, limit: int = 200) -> None:
        """Ends everything, and checks that answers are right and nothing is left."""
        self.cache.let_go()
        self.run(limit)
        for _ in range(3):
            self.cache.let_go()
            self.step()
        for request in self.requests:
            if request.finish_reason in ("length", "stop"):
                assert request.output_tokens == self.answer(request), (
                    f"{request.request_id}: wrong tokens"
                )
            else:
                assert request.finish_reason in ("abort", "error")
        assert self.pool.num_free == self.config.num_blocks - 1, "blocks are lost"
        assert not self.engine.has_jobs and not self.cache.leases, "leases are lost"
        if self.scheduler.planner is not None:
            hints = [request.hints for request in self.requests]
            over = sum(each.conversation_finished for each in hints)
            assert len(self.cache.finished) == over, "a conversation is finished once"
        for (_, key, shard), content in self.cache.blocks.items():
            assert content == self.truth.contents[key][shard], "wrong bytes were stored"
        self._use_every_block()

    def _use_every_block(self) -> None:
        """No request waits for a block that an earlier one was to recompute."""
        last = self.add(self.words(self.config.max_tokens - 2, "every block"), max_tokens=2)
        self.run()
        assert last.output_tokens == self.answer(last)

    def _run_with_hooks(self, step: Step) -> StepOutput:
        self._check_step(step)
        before, self.before_run = self.before_run, lambda: None
        before()
        output = self._run(step)
        after, self.after_run = self.after_run, lambda output: None
        after(output)
        return output

    def _check_step(self, step: Step) -> None:
        self.steps.append(step)
        counts = step.num_scheduled_tokens.values()
        assert sum(counts) <= self.config.max_num_batched_tokens, "over budget"
        assert len(self.scheduler.running) <= self.config.max_num_seqs
        assert len(counts) == len(step.segments) == len(step.requests)
        assert all(count > 0 for count in counts)

    def check(self) -> None:
        self.engine.check_integrity()
        self._check_prefix_cache()
        for request in self.requests:
            metrics = request.metrics
            cached = metrics.local_cached_tokens, metrics.external_cached_tokens
            counts = *cached, metrics.failed_loads, metrics.preemptions
            progress = request.num_computed_tokens, request.remembered_blocks
            assert min(*counts, *progress, request.jobs, request.loads, request.stored) >= 0
        held = [load for rank in self.cache.ranks for load in rank.held_loads.values()]
        assert all(map(self.cache.is_leased, held)), "a lease ended before its load"

    def _check_prefix_cache(self) -> None:
        """Every block that the prefix cache offers holds the right bytes."""
        offered = 0
        for key, shards in self.truth.contents.items():
            for block in self.pool.longest_prefix(cast(KeyChain, OneKey(key)), 1):
                offered += 1
                for rank in self.ranks:
                    right = shards[rank.strategy.kv_rank]
                    assert read_block(rank.kv, block) == right, f"block {block} is offered wrong"
        assert offered == self.pool.num_remembered, "the pool remembers a prefix of no request"

    # -- what a test asks

    @property
    def scheduled(self) -> dict[str, int]:
        """The tokens of each request in the last step."""
        return dict(self.steps[-1].num_scheduled_tokens)

    @property
    def loads(self) -> list[tuple[int, int]]:
        """The first block and the number of blocks of every load so far."""
        return [(load.skip, len(load.block_ids)) for load in self.cache.loads]

    @property
    def stored(self) -> list[int]:
        """The number of blocks of every store so far."""
        return [len(store.block_ids) for store in self.cache.stores]

    def computed(self, *requests: Request) -> list[float]:
        """The blocks that count as computed, of these requests or all."""
        return [each.num_computed_tokens / BLOCK_TOKENS for each in requests or self.requests]

    def cached(self, request: Request) -> tuple[float, float]:
        """The blocks that the request found in the prefix cache and in the external one."""
        metrics = request.metrics
        tokens = metrics.local_cached_tokens, metrics.external_cached_tokens
        return tokens[0] / BLOCK_TOKENS, tokens[1] / BLOCK_TOKENS

    def found(self, tokens: Sequence[int]) -> int:
        """How many blocks of these tokens the prefix cache has."""
        chain = self.truth.chain(tokens)
        return len(self.pool.longest_prefix(chain, len(chain)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Callable[..., Rig]]:
    """Makes rigs. After a test that passed, every one of them is brought to its end and checked."""
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for each in rigs if request.node.stash[PASSED] else ():
        each.done()


class FailingModel(OracleModel):
    """Raises `error` in forward pass number `fail_at` from now on: before it writes any KV, or
    after where `late` is set."""

    fail_at = 0
    error: BaseException = RuntimeError("out of memory")
    late = False

    def forward(
        self, segments: Sequence[Segment], ranks: Sequence[Rank], block_tokens: int
    ) -> torch.Tensor:
        self.fail_at -= 1
        fails = self.fail_at == 0
        if fails and not self.late:
            raise self.error
        logits = super().forward(segments, ranks, block_tokens)
        if fails:
            raise self.error
        return logits


@pytest.fixture
def failing_model() -> FailingModel:
    return FailingModel()
