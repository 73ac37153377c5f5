"""vLLM's own parts without an engine: configs, requests, its scheduler, and a model of a few lines
in place of workers.

    Engine.step   schedule ─► bind metadata ─► the model writes KV ─► wait_for_save ─► results ─► update_from_output

The model is an oracle: a token's KV is a number that its whole prefix decides, and so is the next
token. Before it computes, it looks at all KV that the step reads: one wrong byte, loaded or
overwritten, is an AssertionError."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

import kvkeep.vllm
import kvkeep.vllm.identity
import kvkeep.vllm.scheduler
import kvkeep.vllm.versions
import kvkeep.vllm.worker
from kvkeep.client.connection import Connection
from kvkeep.client.rank_memory import GroupMemory, physical_fingerprint
from kvkeep.client.requests import Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.client.stores import SourceBlocks, Store, source_blocks
from kvkeep.client.transfer import Transfer
from kvkeep.vllm import versions
from kvkeep.vllm.connector import KVKeepConnector
from kvkeep_lab.simulation.cache import SimulatedCache
from kvkeep_lab.simulation.given import Given

BLOCK = 4  # tokens
COUNT = "num_kvkeep_extra_cached_tokens"
FULL = "full"
WINDOW = "window"
REACH = 8  # tokens that the window sees

needs_named_failures = pytest.mark.skipif(
    not versions.names_failed_requests(),
    reason="before 0.30 a model with several groups is served without the cache",
)

AT_REST = (
    "SchedulerConnector(requests=[], running=[], jobs=0, loaded=[], lost={{}},"
    " steps={steps}, BlockTables([]), StepLoads(short=[]))"
)

_numbers = count(1)
_HASH = get_hash_fn_by_name("sha256")
init_none_hash(_HASH)


def full(block_size: int = BLOCK, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32, **more
    )


def window(block_size: int = BLOCK, reach: int = REACH, **more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.float32,
        sliding_window=reach,
        **more,
    )


def mla(block_size: int = BLOCK) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)


def uniform(*specs: Any) -> UniformTypeKVCacheSpecs:
    """A group whose layers differ, as vLLM describes it."""
    named = {f"layer.{number}": spec for number, spec in enumerate(specs)}
    return UniformTypeKVCacheSpecs(block_size=specs[0].block_size, kv_cache_specs=named)


def cache_config(*specs: Any, num_blocks: int = 64) -> KVCacheConfig:
    """One group for each spec, each with one layer."""
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def model_config(**changes: Any) -> Any:
    facts: dict[str, Any] = {
        "model": "somebody/tiny",
        "revision": None,
        "dtype": torch.float32,
        "quantization": None,
        "seed": 0,
        "hf_config": SimpleNamespace(to_dict=lambda: {"rope_theta": 1.0}),
        "use_mla": False,
        "get_total_num_kv_heads": lambda: 2,
        "is_encoder_decoder": False,
        "uses_mrope": False,
        "max_model_len": 256,
        "runner_type": "generate",
        "is_diffusion": False,
        "supports_multimodal_inputs": False,
        "is_multimodal_model": False,
        "multimodal_config": None,
        "is_attention_free": False,
        "is_moe": False,
        "architectures": ["TinyForCausalLM"],
        "return_sampling_mask": False,
        "enable_return_routed_experts": False,
        "is_hybrid": False,
        "logits_processors": None,
        "skip_tokenizer_init": True,
    }
    return SimpleNamespace(**(facts | changes))


def vllm_config(
    extra: dict[str, Any] | None = None, *, num_blocks: int = 64, budget: int = 64, **model: Any
) -> Any:
    """A config of vLLM's, of which only the model is made up."""
    kvkeep.vllm.register()
    config = VllmConfig(
        cache_config=CacheConfig(enable_prefix_caching=True),
        scheduler_config=SchedulerConfig.default_factory(
            max_num_batched_tokens=budget,
            max_num_seqs=8,
            max_model_len=256,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVKeepConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "kvkeep.revision": "a",
                "kvkeep.load_when": "always",
                "kvkeep.load": "async",
            }
            | (extra or {}),
        ),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.block_size = BLOCK
    config.cache_config.num_gpu_blocks = num_blocks
    config.model_config = model_config(**model)
    return config


def cpu_layer(isa: str | None = "vec", **more: Any) -> Any:
    """A layer as vLLM shows it to connectors."""
    return SimpleNamespace(
        get_attn_backend=lambda: CPUAttentionBackend, isa=isa, kv_cache_dtype="auto", **more
    )


def request(
    tokens: Sequence[int],
    name: str | None = None,
    max_tokens: int = 4,
    hash_tokens: int = BLOCK,
    **more: Any,
) -> Request:
    """A request as vLLM's engine core makes it, hashes and all."""
    params = more.pop("params", {})
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more.pop("sampling", {}))
    sampling.extra_args = {"kv_transfer_params": params} if params else None
    return Request(
        request_id=name or f"r{next(_numbers)}",
        prompt_token_ids=list(tokens),
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=get_request_block_hasher(hash_tokens, _HASH),
        **more,
    )


def prefixes(tokens: Sequence[int]) -> list[int]:
    """A number for each token that stands for all tokens up to it."""
    values, value = [], 7
    for token in tokens:
        value = (value * 1_000_003 + int(token) + 1) % (1 << 61)
        values.append(value)
    return values


def next_token(tokens: Sequence[int]) -> int:
    return prefixes(tokens)[-1] % 900


def answer_to(prompt: Sequence[int], max_tokens: int = 4) -> list[int]:
    """What the model says, without vLLM, blocks or caches."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class StepWorker:
    """A WorkerAdapter without a thread: jobs run in `poll`, unless they are held back."""

    is_near = True

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.holds = False
        self.may_lose_all = (
            False  # all that is to be stored: something fails inside, as the test wants
        )
        self.failing: Callable[[LoadRequest], list[int]] = (
            lambda load: []
        )  # of a load's blocks, by place
        self.spoil: Callable[[list[int]], None] = lambda block_ids: (
            None
        )  # what failed holds anything but what it should
        self.began: list[tuple[str, Any]] = []
        self.loaded: Callable[[LoadRequest, int], None] = lambda load, good: (
            None
        )  # somebody watches
        self.ahead: Any = None  # for whom, and from where
        self.hasty: Callable[[], bool] = lambda: (
            False
        )  # whether a store is copied when it is handed over
        self._early: list[tuple[Hashable, Store]] = []
        self._jobs: list[tuple[Hashable, LoadRequest | StoreRequest]] = []
        self._sources: dict[Hashable, SourceBlocks] = {}

    def register_groups(self, pieces: Sequence[GroupMemory]) -> None:
        self._transfer = Transfer(self.connection, pieces, 0)
        self.connection.physical = (0, physical_fingerprint(pieces))

    def store_all(self, requests: Mapping[Any, StoreRequest]) -> None:
        for job, request in requests.items():
            self.store(job, request)

    def store(self, job: Hashable, store: StoreRequest) -> None:
        self.began.append(("store", store))
        sources = source_blocks(self._transfer, [store])[0]
        if self.hasty():
            self._early.append((job, self._transfer.store(store, sources)))
            return
        self._sources[job] = sources
        self._jobs.append((job, store))

    def load(self, job: Hashable, load: LoadRequest) -> None:
        self.began.append(("load", load))
        self._jobs.append((job, load))

    def withdraw(self, block_ids: Sequence[int] | None) -> None:
        self.began.append(("withdraw", block_ids))
        assert block_ids is not None or self.may_lose_all, "something failed inside"
        for sources in self._sources.values():
            if block_ids is None:
                sources.give_up()
                continue
            sources.evacuate(torch.tensor(block_ids).numpy(), 1 << 20)

    def set_engine_busy(self, busy: bool) -> None:
        """Nothing: here is no GPU."""

    def wait_for_load(self, seconds: float) -> None:
        """Loads are over when somebody polls."""

    def load_ahead(self, owner: Hashable, epoch: int, slots: Any) -> bool:
        self.began.append(("ahead", owner))
        self.ahead = (owner, epoch, slots.tolist())
        return True

    def drop_ahead(self) -> None:
        self.ahead = None

    def load_now(self, load: LoadRequest, owner: Hashable = None) -> LoadOutcome:
        assert self.ahead in (None, (owner, load.epoch, load.slots.tolist())), (
            "what was fetched is for another load"
        )
        self.ahead = None
        self.began.append(("load", load))
        return self._load(load)

    def poll(self) -> Finished:
        finished = Finished(0)
        jobs, self._jobs = ([], self._jobs) if self.holds else (self._jobs, [])
        for job, asked in jobs:
            if isinstance(asked, LoadRequest):
                finished.loads[job] = self._load(asked)
            else:
                self._early.append((job, self._transfer.store(asked, self._sources.pop(job))))
        early, self._early = self._early, []
        finished.stored |= {job: stored.written for job, stored in early}
        finished.incomplete += [job for job, stored in early if not stored.is_complete]
        return finished

    def _load(self, load: LoadRequest) -> LoadOutcome:
        loaded = self._transfer.load(load)
        loaded[self.failing(load)] = False
        bad = (~loaded).nonzero()[0]
        self.loaded(load, int(bad[0]) if len(bad) else load.blocks)
        outcome = load.outcome(loaded)
        if outcome.failed:
            self.spoil(sorted(outcome.failed))
        return outcome

    def close(self) -> None:
        self.connection.close()

    @property
    def loads(self) -> list[LoadRequest]:
        return [asked for what, asked in self.began if what == "load"]


@contextmanager
def one_rank() -> Iterator[None]:
    """In place of vLLM's process groups: this process is all there is."""
    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    with (
        mock.patch.object(kvkeep.vllm.identity, "get_tp_group", return_value=alone),
        mock.patch.object(kvkeep.vllm.identity, "get_pp_group", return_value=alone),
        mock.patch.object(kvkeep.vllm.versions, "is_own_model", return_value=True),
    ):
        yield


class _No(int):
    """A number that is 0, and a method that says no."""

    def __call__(self) -> bool:
        return False


class _Guessing:
    """A speculative config: so many guesses a step, made by whoever drives the engine. Every other
    question is no."""

    def __init__(self, guesses: int) -> None:
        self.num_speculative_tokens = guesses
        self.num_speculative_tokens_per_batch_size = self.model = None
        self.method = "ngram"

    def __getattr__(self, name: str) -> _No:
        return _No()


def ours(connector: Any) -> KVKeepConnector:
    """Our connector, if it is this one or among those of a MultiConnector."""
    found = [
        each
        for each in getattr(connector, "_connectors", [connector])
        if isinstance(each, KVKeepConnector)
    ]
    return found[0]


class Engine:
    """vLLM's scheduler with our connector on both sides, and a server in simulated time. The worker
    is `apart` if the scheduler is in another process; a scheduler that is `ahead` reads a step's
    results after the next has run."""

    apart = ahead = False
    alone = True  # no other connector beside ours

    def __init__(
        self,
        cache: SimulatedCache,
        *specs: Any,
        num_blocks: int = 64,
        budget: int = 64,
        extra: dict[str, Any] | None = None,
        guesses: int = 0,
        change: Callable[[Any], None] = lambda config: None,
    ) -> None:
        self.cache = cache
        self.config = vllm_config(extra, num_blocks=num_blocks, budget=budget)
        if guesses:
            self.config.speculative_config = _Guessing(guesses)
        change(self.config)
        self.kv_cache_config = cache_config(*(specs or (full(),)), num_blocks=num_blocks)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=mock.Mock(**{"should_advance.return_value": False}),
            block_size=BLOCK,
            log_stats=True,
        )
        self.answers: dict[str, list[int]] = {}
        self.params: dict[str, Any] = {}
        self.cached: dict[
            str, int
        ] = {}  # tokens that vLLM says were not computed, told with the first token
        self.events: list[Any] = []
        self.given = Given(BLOCK)
        self.kv = {
            name: torch.zeros((num_blocks, BLOCK), dtype=torch.int64)
            for group in self.kv_cache_config.kv_cache_groups
            for name in group.layer_names
        }
        self.config.compilation_config.static_forward_context.update(
            {name: cpu_layer() for name in self.kv}
        )
        self.connector = ours(self.scheduler.connector)
        self.free = self.free_blocks
        self.is_told: Callable[[], bool] = lambda: (
            True
        )  # whether a worker hears that a step is computed
        self._unread: list[
            tuple[Any, ModelRunnerOutput]
        ] = []  # steps whose results the scheduler has not read
        self._start()

    def _make_worker(self, shape: Any, strategy: Any, options: Any) -> StepWorker:
        self.worker = StepWorker(self.cache.lookup_side(shape).connection)
        self.worker.spoil, self.worker.loaded = self._spoil, self._loaded
        return self.worker

    def _start(self) -> None:
        with one_rank(), mock.patch.object(kvkeep.vllm.worker, "WorkerAdapter", self._make_worker):
            self.rank = KVKeepConnector(self.config, KVConnectorRole.WORKER, self.kv_cache_config)
            self.rank.register_kv_caches(self.kv)
        handshake = self.rank.get_handshake_metadata()
        assert handshake is not None and handshake.shape is not None, handshake
        handshake = replace(handshake, name="") if self.apart else handshake
        with (
            mock.patch.object(
                kvkeep.vllm.scheduler,
                "SchedulerAdapter",
                lambda shape, options: self.cache.lookup_side(shape),
            ),
            mock.patch.object(kvkeep.vllm.worker, "has_kv_transfer_group", return_value=True),
            mock.patch.object(
                kvkeep.vllm.worker,
                "get_kv_transfer_group",
                return_value=self.rank if self.alone else mock.Mock(),
            ),
        ):
            self.connector.set_xfer_handshake_metadata({0: handshake})

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def half(self) -> Any:
        """The scheduler's half of the connector."""
        return self.connector.half

    @property
    def side(self) -> Any:
        """The planner."""
        return self.half.planner

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.answers[each.request_id] = []
            self.scheduler.add_request(each)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self, delivers: bool = True) -> Any:
        """One step, and what the scheduler had decided for it. Unless it `delivers`, nothing comes
        from the server."""
        if delivers:
            self.cache.pass_time(1)
        scheduled = self.scheduler.schedule()
        assert self.worker.ahead is None, "from now on those slots may be anybody's"
        self.rank.handle_preemptions(scheduled.kv_connector_metadata)
        self.rank.bind_connector_metadata(scheduled.kv_connector_metadata)
        for (
            new
        ) in scheduled.scheduled_new_reqs:  # what a worker hears is what the scheduler believes
            counted = self.scheduler.requests[new.req_id].num_computed_tokens
            assert new.num_computed_tokens == counted - scheduled.num_scheduled_tokens[new.req_id]
        sampled = {
            name: self._compute(name, tokens, scheduled) for name, tokens in self._work(scheduled)
        }
        if self.is_told():
            self.rank.wait_for_save()
        output = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: at for at, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=self.results(scheduled),
        )
        self.rank.clear_connector_metadata()
        self._unread.append((scheduled, output))
        while len(self._unread) > (self.ahead and self.scheduler.has_requests()):
            self._read(*self._unread.pop(0))
        return scheduled

    def _read(self, scheduled: Any, output: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for each in outputs.outputs:
                self.answers[each.request_id] += each.new_token_ids
                if each.prefill_stats is not None:
                    self.cached[each.request_id] = each.prefill_stats.num_cached_tokens
                if each.finish_reason is not None:
                    self.params[each.request_id] = each.kv_transfer_params

    def run(self, *requests: Request, most: int = 200) -> Engine:
        """Serves until nothing is left to do, stores among it."""
        self.add(*requests)
        for _ in range(most):
            if not self.scheduler.requests and self.side.idle:
                return self
            self.step()
        raise AssertionError(f"still there after {most} steps: {list(self.scheduler.requests)}")

    def forget(self) -> Engine:
        """Empties vLLM's own prefix cache."""
        assert self.scheduler.reset_prefix_cache()
        return self

    def settle(self) -> None:
        """Lets end what is under way."""
        for _ in range(5):
            self.step()

    def check_nothing_left(self) -> None:
        """AssertionError unless every block, lease and request is given back."""
        assert self.free_blocks == self.free
        assert not self.scheduler.requests
        steps = re.search(r"steps=(\d+)", repr(self.half))
        assert steps is not None
        assert repr(self.half) == AT_REST.format(steps=steps[1])
        assert self.connector.faults == 0 and self.half.faults == 0 and ours(self.rank).faults == 0
        self.cache.check_nothing_held()

    def check_counts(self, *requests: Request) -> None:
        """AssertionError unless each request that asked for it was told what the cache gave it."""
        for each in requests:
            right = self.given.tokens(each.request_id, each.num_prompt_tokens)
            assert self.params[each.request_id] == {COUNT: right}, each.request_id

    def _loaded(self, load: LoadRequest, good_blocks: int) -> None:
        blocks = load.outcome().failed
        jobs = [each for each in self.side.jobs if each.is_load and blocks == {*each.block_ids}]
        [name] = [job.request_id for job in jobs]
        is_whole = len(self.kv_cache_config.kv_cache_groups) == 1  # else a load fails as a whole
        self.given.loaded(
            name, load.skip, good_blocks if is_whole or good_blocks == load.blocks else 0
        )

    # -- the model

    def _spoil(self, block_ids: list[int]) -> None:
        for layer in self.kv.values():
            layer[block_ids] = -7

    def _work(self, scheduled: Any) -> list[tuple[str, int]]:
        return list(scheduled.num_scheduled_tokens.items())

    def _compute(self, name: str, tokens: int, scheduled: Any) -> list[int]:
        held = self.scheduler.requests[name]
        # By now the scheduler counts this step's tokens as computed.
        first = held.num_computed_tokens - tokens
        guessed = scheduled.scheduled_spec_decode_tokens.get(name, [])
        values = prefixes([*self._tokens(held), *guessed])
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        self.given.computed(name, first + tokens)
        for group, table in zip(self.kv_cache_config.kv_cache_groups, tables, strict=True):
            reach = getattr(group.kv_cache_spec, "sliding_window", None) or len(values)
            for layer in group.layer_names:
                self.check_kv(
                    self.kv[layer], table, values, range(max(0, first - reach + 1), first), name
                )
                for place in range(first, first + tokens):
                    assert table[place // BLOCK], "the null block is nobody's"
                    self.kv[layer][table[place // BLOCK], place % BLOCK] = values[place]
        return self._sample(held, guessed)

    def _tokens(self, held: Request) -> list[int]:
        """Those that the model knows of, at least as many as are computed."""
        return list(held.all_token_ids)

    def _sample(self, held: Request, guessed: list[int]) -> list[int]:
        if held.num_computed_tokens < held.num_tokens:
            return []
        sampled = [next_token(held.all_token_ids)]
        for guess in guessed:
            if sampled[-1] != guess:
                break
            sampled.append(next_token([*held.all_token_ids, *sampled]))
        return sampled

    def check_kv(
        self, kv: torch.Tensor, table: Sequence[int], values: list[int], places: range, name: str
    ) -> None:
        for place in places:
            assert int(kv[table[place // BLOCK], place % BLOCK]) == values[place], (
                f"{name}: wrong KV of token {place}"
            )

    def results(self, scheduled: Any) -> KVConnectorOutput:
        output = KVConnectorOutput()
        if versions.names_failed_requests():
            results = self.rank.get_transfer_results(scheduled.finished_req_ids)
            output.finished_recving = results.finished_recving
            output.failed_recving = results.failed_recving
        else:
            _, output.finished_recving = self.rank.get_finished(scheduled.finished_req_ids)
        output.invalid_block_ids = self.rank.get_block_ids_with_load_errors()
        output.kv_connector_stats = self.rank.get_kv_connector_stats()
        output.kv_connector_worker_meta = self.rank.build_connector_worker_meta()
        return output
