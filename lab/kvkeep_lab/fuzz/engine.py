"""Random lives of an engine with an external cache, each from one seed, each judged by an engine
without.

A run draws a model's cut, an engine's sizes, faults, and a few conversations whose turns share
prefixes and continue what was generated before. Then, step by step: requests arrive, are aborted or
preempted; the server restarts, falls silent, loses bits, or moves its blocks to a tier, which may
be slow or stall; loads fail, in whole or in part, now or later. At every step nothing may
contradict itself; at the end every answer equals the one without a cache, every request was told
how much the cache gave it, and every block, lease and job has been given back. The same seed gives
the same run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvkeep.client.hints import EXTRA_CACHED_TOKENS
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.engine import Engine
from kvkeep.engine.models.gqa import GQAModel
from kvkeep.engine.models.mla import MLAModel
from kvkeep.engine.models.model import Model
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.models.settings import ModelSettings
from kvkeep.engine.models.weights import random_weights
from kvkeep.engine.request import Request
from kvkeep.engine.step import Step, StepOutput
from kvkeep.errors import KVKeepError
from kvkeep_lab.simulation.cache import CacheFaults, SimulatedCache
from kvkeep_lab.simulation.given import Given
from kvkeep_lab.simulation.oracle import OracleModel
from kvkeep_lab.simulation.wire import Faults

_VOCABULARY = 97
_STEPS_AT_MOST = 20_000


class Violation(AssertionError):
    """A run broke a promise. The message names the seed."""


@dataclass
class Outcome:
    """What one run did."""

    seed: int
    requests: int = 0
    steps: int = 0
    tokens: int = 0
    aborted: int = 0
    failed: int = 0  # ended with an error, which only the policy `fail` allows
    preemptions: int = 0
    local_cached_tokens: int = 0
    external_cached_tokens: int = 0
    checked_bytes: int = 0
    promoted: int = 0  # blocks that came up from a tier
    stumbles: int = 0  # steps that failed in the middle
    faults: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Turn:
    """One request, and what it must answer."""

    request: Request
    reference: list[int]
    watch: _Watch  # of its engine


class _Watch:
    """Reads what an engine's workers were asked and what they reported, to know what the cache gave
    each request."""

    def __init__(self, engine: Engine) -> None:
        self.given = Given(engine.config.block_tokens)
        self._engine, self._run = engine, engine.workers.run
        # job -> whose, from which block on, into which
        self._loads: dict[Any, tuple[str, int, list[int]]] = {}
        self._bad: dict[Any, set[int]] = {}
        self._reports: dict[Any, set[int]] = {}  # the ranks that have reported a job
        engine.workers.run = self.run  # type: ignore[method-assign]

    def run(self, step: Step) -> StepOutput:
        started = {
            name: step.metadata.loads[job].skip for job, name in step.metadata.requests.items()
        }
        for job, load in step.metadata.loads.items():
            self._loads[job] = step.metadata.requests[job], load.skip, load.block_ids.tolist()
        for segment in step.segments:  # what it had when the step began
            tokens = (
                started[name] * self._block_tokens
                if (name := segment.request_id) in started
                else segment.start
            )
            self.given.computed(name, tokens)
        output = self._run(step)
        for report in output.reports:
            for number, outcome in report.loads.items():
                self._bad.setdefault(number, set()).update(outcome.failed)
                self._reports.setdefault(number, set()).add(report.rank)
                if (
                    number in self._loads
                    and len(self._reports[number]) == self._engine.config.world_size
                ):
                    self._end_load(number)
        return output

    @property
    def _block_tokens(self) -> int:
        return self._engine.config.block_tokens

    def _end_load(self, job: Any) -> None:
        name, first_block, block_ids = self._loads.pop(job)
        bad = [at for at, block in enumerate(block_ids) if block in self._bad.get(job, ())]
        self.given.loaded(name, first_block, min(bad, default=len(block_ids)))

    def after_step(self) -> None:
        for request in self._engine.scheduler.running:
            self.given.computed(request.request_id, request.num_computed_tokens)


class _Stumble(RuntimeError):
    """A step that fails in the middle, as for want of memory."""


class Fuzz:
    """One run. `run` raises Violation."""

    def __init__(self, seed: int, model: str = "oracle") -> None:
        self.seed = seed
        self._random = random.Random(f"{model} {seed}")
        # In some lives, users with one prompt come together and load it inside the step: what fails
        # then is shared.
        self._bursts = self._random.random() < 0.2
        self._config = self._draw_config()
        self._model_name = model
        self._reference = Engine(_model(model, self._config), _roomy(self._config))
        self.cache = SimulatedCache(
            seed, self._draw_faults(), pool_bytes=self._random.choice((1 << 17, 1 << 21, 1 << 21))
        )
        # By chances of its own, so that lives without a tier are what they were.
        self._tier_chance = random.Random(f"tier {model} {seed}")
        if self._tier_chance.random() < 0.3:
            self.cache.add_tier(self._tier_chance.choice((1, 5, 30)))
        # Likewise: engines of several tensor-parallel sizes that share.
        self._size_chance = random.Random(f"sizes {model} {seed}")
        if self._size_chance.random() < 0.5:
            self.cache.tp_shards = 4
        self._engines: list[Engine] = []
        self._watches: dict[Engine, _Watch] = {}
        self._stumbles = self._random.choice((0.0, 0.0, 0.05))
        for _ in range(self._random.choice((1, 1, 2))):
            self._add_engine()
        # what somebody may continue, or somebody else repeat
        self._histories: list[list[int]] = [[]]
        self._turns: list[_Turn] = []
        self._live: list[tuple[Engine, _Turn]] = []
        self.outcome = Outcome(seed)

    def run(self) -> Outcome:
        """Runs to the end. Violation, naming the seed, for anything that is not as promised."""
        try:
            for _ in range(self._random.randint(3, 14)):
                self._arrive()
                for _ in range(
                    self._random.choice((60, 60, 10) if self._bursts else (0, 1, 1, 3, 10, 40))
                ):
                    self._step()
                    self._disturb()
            self._finish()
        except (AssertionError, KVKeepError) as error:
            raise Violation(f"seed {self.seed}, model {self._model_name}: {error}") from error
        return self.outcome

    def _add_engine(self) -> None:
        model = _model(self._model_name, self._config)
        forward = model.forward

        def stumbling(*step: Any) -> Any:
            if self._random.random() < self._stumbles:
                raise _Stumble
            return forward(*step)

        model.forward = stumbling  # type: ignore[method-assign, assignment]
        config = self._config
        if self.cache.tp_shards is not None:
            sizes = (1, 2, 4) if model.num_kv_heads % 4 == 0 else (1, 2)
            config = replace(config, tensor_parallel_size=self._size_chance.choice(sizes))
        self._engines.append(Engine(model, config, self.cache))
        self._watches[self._engines[-1]] = _Watch(self._engines[-1])

    # -- drawn from the seed

    def _draw_config(self) -> EngineConfig:
        chance = self._random
        block_tokens = chance.choice((2, 4, 8))
        chunked = self._bursts or chance.random() < 0.75
        budget = chance.choice((8, 16) if self._bursts else (4, 16, 64)) if chunked else 400
        return EngineConfig(
            block_tokens=block_tokens,
            num_blocks=-(-200 // block_tokens) + chance.choice((2, 10, 100)),
            max_num_batched_tokens=budget,
            max_num_seqs=8 if self._bursts else chance.choice((1, 4, 8)),
            enable_chunked_prefill=chunked,
            enable_prefix_caching=self._bursts or chance.random() < 0.7,
            tensor_parallel_size=chance.choice((1, 1, 2, 4)),
            pipeline_parallel_size=chance.choice((1, 1, 2)),
            sync_loads=self._bursts or chance.random() < 0.3,
            kv_load_failure_policy="fail" if chance.random() < 0.2 else "recompute",
        )

    def _draw_faults(self) -> CacheFaults:
        chance = self._random
        if self._bursts:
            return CacheFaults(load_failure=0.6)
        if chance.random() < 0.2:
            return CacheFaults()

        def rate(*rates: float) -> float:
            return chance.choice((0.0, 0.0, *rates))

        return CacheFaults(
            network=Faults(rate(0.01, 0.1), rate(0.01, 0.05), (0, chance.choice((0, 0, 3, 25)))),
            load_failure=rate(0.1, 0.5, 1.0),
            load_loss=rate(0.1, 0.5),
            store_loss=rate(0.05, 0.3),
            bit_flip=rate(0.05, 0.5),
            delay=(0, chance.choice((0, 2, 10))),
        )

    # -- events

    def _arrive(self) -> None:
        """A new conversation, another branch of one, or its next turn; sometimes several at once
        that begin alike."""
        chance = self._random
        salt, beginning = self._beginning()
        engine = chance.choice(self._engines)
        alike = self._bursts or chance.random() < 0.3
        if self._bursts:  # then only the external cache has it
            engine.scheduler.pool.forget_all()
        for _ in range(chance.choice((1, 2, 4))):
            if not alike:
                salt, beginning = self._beginning()
                engine = chance.choice(self._engines)
            tail = chance.choice((1, 2, 20) if self._bursts else (1, 3, 9, 30))
            tokens = beginning + [chance.randrange(_VOCABULARY) for _ in range(tail)]
            sampling = SamplingParams(
                max_tokens=chance.choice((1, 4, 18)),
                temperature=chance.choice((0.0, 0.8)),
                seed=chance.randrange(1000),
            )
            reference = self._answer_without_cache(tokens, salt, sampling)
            priority = chance.choice((0, 0, 1))
            params: dict[str, Any] = dict.fromkeys(EXTRA_CACHED_TOKENS)
            if self.cache.tiers and self._tier_chance.random() < 0.1:
                params["kvkeep_prefetch"] = True
            request = engine.add(
                tokens, sampling, salt=salt or None, priority=priority, kv_transfer_params=params
            )
            turn = _Turn(request, reference, self._watches[engine])
            self._turns.append(turn)
            self._live.append((engine, turn))
            self._histories.append(tokens + reference)

    def _beginning(self) -> tuple[str, list[int]]:
        """A salt, and what somebody has said and heard, or a part of it."""
        chance = self._random
        salt = chance.choice(("",) if self._bursts else ("", "", "alice", "bob"))
        tokens = chance.choice(self._histories[-2 if self._bursts else -9 :])
        return salt, tokens[
            : chance.choice((len(tokens), len(tokens), chance.randint(0, len(tokens))))
        ][:140]

    def _answer_without_cache(
        self, tokens: list[int], salt: str, sampling: SamplingParams
    ) -> list[int]:
        request = self._reference.add(tokens, sampling, salt=salt or None)
        while self._reference.busy:
            self._reference.step()
        return request.output_tokens

    def _step(self) -> None:
        for engine in self._engines:
            try:
                engine.step()
            except _Stumble:
                self.outcome.stumbles += 1
            engine.check_integrity()
            self._watches[engine].after_step()
            self.outcome.steps += 1
        self._live = [
            (engine, turn) for engine, turn in self._live if not turn.request.finish_reason
        ]
        self.cache.pass_time(self._random.choice((0, 1, 5, 20)))
        self.cache.maybe_flip_a_bit()

    def _disturb(self) -> None:
        """Now and then, something happens that nobody planned."""
        chance = self._random
        if self._live and chance.random() < 0.03:
            engine, turn = chance.choice(self._live)
            engine.abort(turn.request.request_id)
        if self._live and chance.random() < 0.03:
            engine, turn = chance.choice(self._live)
            engine.scheduler.preempt(turn.request)
        if chance.random() < 0.1:
            chance.choice(self._engines).scheduler.pool.forget_all()
        if chance.random() < 0.01 and len(self._engines) < 3:
            self._add_engine()
        if chance.random() < 0.01:
            events: list[Callable[[], None]] = [self.cache.restart_server, self.cache.stop_server]
            chance.choice(events)()
        elif chance.random() < 0.05:
            self.cache.resume_server()
        if self.cache.tiers and self._tier_chance.random() < 0.1:
            self.cache.counts["taken_down"] += self.cache.tiers.take_down()
            self.cache.tiers.stalled = self._tier_chance.random() < 0.1

    # -- the end

    def _finish(self) -> None:
        self.cache.resume_server()
        self._stumbles = 0.0
        for _ in range(_STEPS_AT_MOST):
            if not any(engine.busy or engine.has_jobs for engine in self._engines):
                break
            self._step()
        else:
            raise AssertionError(
                f"requests are stuck: {[turn.request.request_id for _, turn in self._live]}"
            )
        for turn in self._turns:
            self._judge(turn)
        for engine in self._engines:
            pool = engine.scheduler.pool
            assert pool.num_free == pool.num_blocks - 1, "blocks are not given back"
            self.outcome.checked_bytes += getattr(engine.workers.model, "checked_bytes", 0)
        self.cache.check_nothing_held()
        self.outcome.faults = self.cache.counts | self.cache.network.counts
        self.outcome.promoted = self.cache.tiers.promoted if self.cache.tiers else 0
        for engine in [*self._engines, self._reference]:
            engine.close()

    def _judge(self, turn: _Turn) -> None:
        request, outcome = turn.request, self.outcome
        metrics = request.metrics
        given = request.output_tokens
        if request.finish_reason in ("abort", "error"):
            assert given == turn.reference[: len(given)], (
                f"{request.request_id}: wrong tokens before its end: {given}"
            )
            assert (
                request.finish_reason == "abort" or self._config.kv_load_failure_policy == "fail"
            ), request.error
        else:
            assert given == turn.reference, (
                f"{request.request_id}: {given} instead of {turn.reference}"
            )
        cached = metrics.external_cached_tokens
        assert 0 <= cached <= request.prompt_tokens and metrics.local_cached_tokens >= 0, (
            f"{request.request_id}: counted wrong"
        )
        if request.finish_reason not in (
            "abort",
            "error",
        ):  # else a load may have ended after the request was told
            right = turn.watch.given.tokens(request.request_id, request.prompt_tokens)
            assert request.reply_params == dict.fromkeys(EXTRA_CACHED_TOKENS, right), (
                f"{request.request_id}: told {request.reply_params}, but the cache gave it {right} tokens"
            )
            assert cached == right, (
                f"{request.request_id}: {cached} external tokens, but the cache gave it {right}"
            )
        outcome.requests += 1
        outcome.tokens += len(given)
        outcome.aborted += request.finish_reason == "abort"
        outcome.failed += request.finish_reason == "error"
        outcome.preemptions += metrics.preemptions
        outcome.local_cached_tokens += metrics.local_cached_tokens
        outcome.external_cached_tokens += metrics.external_cached_tokens


def _model(name: str, config: EngineConfig) -> Model:
    if name == "oracle":
        return OracleModel(vocab_size=_VOCABULARY, use_mla=config.num_blocks % 3 == 0)
    import torch

    sizes: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 8}
    if name == "mla":
        sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    settings = ModelSettings(
        kind="mla" if name == "mla" else "gqa",
        vocab_size=_VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_layers=2,
        num_heads=4,
        rope_interleaved=name == "mla",
        **sizes,
    )
    weights = random_weights(settings, 1, torch.float64)
    return (MLAModel if name == "mla" else GQAModel)(settings, weights)


def _roomy(config: EngineConfig) -> EngineConfig:
    """The same cut, with room for everything, and nothing kept from one request to the next."""
    return EngineConfig(
        block_tokens=config.block_tokens,
        num_blocks=-(-200 // config.block_tokens) + 2,
        max_num_batched_tokens=400,
        enable_prefix_caching=False,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
    )
