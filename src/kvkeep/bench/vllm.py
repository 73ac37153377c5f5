"""Real vLLM without a connector, with kvkeep's, and with its peers: what a cold prompt costs, and
what a hit saves.

Every repeat takes a prompt that nobody has sent before, of random tokens, and asks for one token:

    cold            nothing of it is known
    local hit       the same prompt again: vLLM's own prefix cache has it
    external hit    and again, with that cache dropped: whatever is not computed came through the connector

On a GPU a local and an external hit follow each other five times, and of a short prompt there are
two more that are only cold.

Before the next one is asked, what is still being stored has arrived. The floor of cold is the
engine without a connector; that of an external hit is a local one, and a copy of the KV. Noise of
the machine must meet all engines alike, so all of them live at the same time and take turns, in
changing order, one at work while others are silent; ratios are medians of the repeats' ratios. On a
GPU that has no room for all they come one after the other. On a GPU the floor of an external hit is
told, too: the local hit without a connector, and one plain copy of the prompt's KV over the bus,
measured at the end.

A round before the measured ones warms up and compares eight tokens, cold, local and external, with
those of the engine without a connector: `same_tokens`."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.bench.progress import say
from kvkeep.bench.vllm_run import Answer, EngineProcess
from kvkeep.bench.vllm_session import (
    Choice,
    FreeMemory,
    Turns,
    bus_gbps,
    fit_together,
    gpu_name,
    median,
    median_ratio,
    peers_may_fail,
    rotated,
    rounded,
    signals_end_the_block,
)
from kvkeep.bench.vllm_setup import (
    ServedModel,
    arguments,
    connector,
    decoding_with_graphs,
    environment,
    given_model,
    own_model,
)
from kvkeep.errors import SettingsError
from kvkeep.testing.process import JsonProcess
from kvkeep.units import MIB

PROMPT_TOKENS = {"cpu": (2000,), "cuda": (2000, 8000, 32000)}
# Of kvkeep: ratios at most, the speed-up at least.
TARGETS = {
    "cpu": {"cold_ratio": 1.05, "speedup": 3.0},
    "cuda": {"cold_ratio": 1.02, "floor_ratio": 1.08, "short_floor_ratio": 1.2},
}

# What options mean here, where it is more than their name says elsewhere.
OPTIONS = {
    "device": "auto, cpu or cuda; auto takes a GPU where there is one.",
    "model": "Folder of a checkpoint; auto makes a small Llama on a CPU, and on a GPU one of 8B geometry, without real "
    "weights.",
    "prompt_tokens": "Tokens in a prompt, several with commas between; auto is 2000, and on a GPU 2000,8000,32000.",
    "connectors": "Of none, kvkeep, lmcache and native, with commas between; auto is all that can be had.",
    "repeats": "How many prompts of each length.",
    "interleave": "Let engines take turns, all of them alive: on a CPU, and where a GPU and its host have room. "
    "--no-interleave: one after the other.",
    "eager": "Let engines on a GPU start each kernel alone, also for a prompt's last tokens, without CUDA graphs.",
}

_CHECKED_TOKENS = 8
_WAKING_TOKENS = 8  # less than a block, so nothing of it is kept
_CASES = ("cold", "local", "external")
# In each repeat, of either kind: on a GPU they are soon over, and noise of the host is a third of a
# local one.
_HITS = {"cpu": 1, "cuda": 5}
_REST_S = {"cpu": 0.0, "cuda": 0.25}
_SHORT_TOKENS = 4000  # in a prompt whose floor is a few milliseconds
# In each repeat of such a prompt: the limit of its ratio is a millisecond, as is the noise.
_MORE_COLD = {"cpu": 0, "cuda": 2}
_LAST_TOKENS = 128  # of a prompt: that many, or twice as many, may be left to compute of a hit
_PROMPTS_IN_POOL = 3  # then blocks are evicted, as in a server that has been running for a while


# -- what is to be measured


@dataclass(frozen=True)
class Plan:
    """The options, checked. `left_out` says why a connector is not measured; `named` were asked for
    by name."""

    device: str
    prompt_tokens: tuple[int, ...]
    connectors: tuple[str, ...]
    repeats: int
    interleave: bool
    named: bool
    left_out: dict[str, str]
    graphs: bool = False

    @classmethod
    def make(
        cls,
        device: str,
        prompt_tokens: str,
        connectors: str,
        repeats: int,
        interleave: bool,
        eager: bool = False,
    ) -> Plan:
        choice = Choice.make(device, connectors)
        lengths = (
            PROMPT_TOKENS[choice.device] if prompt_tokens == "auto" else _lengths(prompt_tokens)
        )
        interleave = interleave or choice.device == "cpu"
        named, left_out, graphs = choice.named, choice.left_out, choice.has_graphs(eager)
        return cls(
            choice.device, lengths, choice.connectors, repeats, interleave, named, left_out, graphs
        )

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Connectors whose engines live at the same time."""
        return [self.connectors] if self.interleave else [(name,) for name in self.connectors]


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    # Of less than two blocks there may be nothing to find.
    if not lengths or min(lengths) < 64:
        raise SettingsError(
            f'--prompt-tokens "{text}": expected at least 64, such as 2000 or 2000,8000'
        )
    return tuple(dict.fromkeys(lengths))


def _pool_bytes(model: ServedModel, plan: Plan) -> int:
    return _PROMPTS_IN_POOL * max(plan.prompt_tokens) * model.kv_token_bytes + 256 * MIB


# -- the run


def run(
    device: str = "auto",
    model: str = "auto",
    prompt_tokens: str = "auto",
    connectors: str = "auto",
    repeats: int = 5,
    interleave: bool = True,
    eager: bool = False,
) -> dict[str, Any]:
    """Starts what each connector needs, and an engine with each; all are gone at the end, also
    after a signal."""
    plan = Plan.make(device, prompt_tokens, connectors, repeats, interleave, eager)
    with signals_end_the_block(), tempfile.TemporaryDirectory(prefix="kvkeep-vllm-") as folder:
        served = (
            own_model(Path(folder), plan.device)
            if model == "auto"
            else given_model(model, plan.device)
        )
        if plan.interleave and plan.device == "cuda":
            longest, pool = max(plan.prompt_tokens), _pool_bytes(served, plan)
            plan = replace(
                plan,
                interleave=fit_together(served, longest, plan.connectors, pool, FreeMemory.find()),
            )
        bench = Bench(plan, served)
        with EngineProcess.importing(plan.connectors, bench.environment) as bench.spares:
            for group in plan.groups:
                bench.measure(group)
    return bench.result(bus_gbps() if plan.device == "cuda" else None)


@dataclass
class Samples:
    """What one connector took with prompts of one length. `tokens` are those of the cases, cold
    first."""

    ms: dict[str, list[float]] = field(default_factory=lambda: {case: [] for case in _CASES})
    cached_tokens: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Subject:
    """An engine that is measured. `settle(prompt_tokens)` returns when a prompt that was cold is
    stored."""

    engine: EngineProcess
    settle: Callable[[int], None]


@dataclass
class Bench:
    """All engines' samples."""

    plan: Plan
    model: ServedModel
    vllm: str = ""
    samples: dict[tuple[str, int], Samples] = field(default_factory=dict)
    spares: dict[str, JsonProcess] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.model, max(self.plan.prompt_tokens))

    def measure(self, names: Sequence[str]) -> None:
        """Connectors whose engines live at the same time."""
        turns = Turns.on(self.plan.device)
        with ExitStack() as stack:
            subjects: list[Subject] = []
            for name in names:
                with self._forgiving(name), turns.turn(name):
                    say(f"starting vLLM, connector: {name}")
                    subjects.append(stack.enter_context(self._subject(name, len(names))))
                    self.vllm = subjects[-1].engine.vllm
            say("waiting until their pools are as fast as they will be")
            for subject in subjects:
                subject.engine.wait_until_ready()
            for length in self.plan.prompt_tokens:
                for turn in range(self.plan.repeats + 1):
                    subjects = [
                        each for each in subjects if each.engine.name not in self.plan.left_out
                    ]
                    self._round(subjects, length, turn, turns)

    def _round(self, subjects: Sequence[Subject], length: int, turn: int, turns: Turns) -> None:
        """Turn 0 warms up and compares tokens, all others are measured."""
        more = _MORE_COLD[self.plan.device] if turn and length < _SHORT_TOKENS else 0
        prompts: list[list[int]] = [
            np.random.default_rng([length, turn, number])
            .integers(0, self.model.vocab_size, length)
            .tolist()
            for number in range(1 + more)
        ]
        asked = [("cold", prompt) for prompt in reversed(prompts)]
        asked += [
            (case, prompts[0]) for case in _CASES[1:] * (_HITS[self.plan.device] if turn else 1)
        ]
        for number, (case, prompt) in enumerate(asked):
            for subject in rotated(subjects, turn + (number if case == "cold" else 0)):
                if subject.engine.name not in self.plan.left_out:
                    with self._forgiving(subject.engine.name), turns.turn(subject.engine.name):
                        self._case(subject, case, prompt, turn)
        if turn:
            took = {each.engine.name: self._samples(each, length).ms for each in subjects}
            said = "; ".join(f"{name} {_times(ms)}" for name, ms in took.items() if ms["cold"])
            say(f"{length:,} tokens, {turn} of {self.plan.repeats}: {said}")

    def _case(self, subject: Subject, case: str, prompt: list[int], turn: int) -> None:
        engine, samples = subject.engine, self._samples(subject, len(prompt))
        if case == "external" and turn and engine.name == "none":
            return  # it would find nothing
        if case != "local":  # also before a cold one: none has more to evict than the others
            engine.drop_local_cache()
        if case == "cold":
            # A GPU that has just computed another engine's prompt is slower. Engines wait here as
            # long as each other.
            time.sleep(_REST_S[self.plan.device])
        if turn:
            # an engine that has been idle for a while answers up to a second late
            engine.ask(prompt[:_WAKING_TOKENS])
        answer = engine.ask(prompt, 1 if turn else _CHECKED_TOKENS)
        if case == "cold":
            _check_cold(engine.name, answer)
            subject.settle(len(prompt))
        if not turn:
            samples.tokens.append(answer.tokens)
            return
        samples.ms[case].append(answer.ms)
        if case == "external":
            samples.cached_tokens.append(answer.cached_tokens)

    def _samples(self, subject: Subject, length: int) -> Samples:
        return self.samples.setdefault((subject.engine.name, length), Samples())

    def _forgiving(self, name: str) -> AbstractContextManager[None]:
        return peers_may_fail(name, self.plan.left_out, named=self.plan.named)

    @contextmanager
    def _subject(self, name: str, engines: int) -> Iterator[Subject]:
        longest = max(self.plan.prompt_tokens)
        with connector(name, _pool_bytes(self.model, self.plan), self.model) as way:
            made = arguments(self.model, longest, engines, way.arguments)
            if self.plan.graphs:
                made |= decoding_with_graphs(self.model.block_tokens, _LAST_TOKENS)
            spare = self.spares.get(name)
            with EngineProcess(
                name, made, self.environment, way.counting, spare, way.ready_when
            ) as engine:
                yield Subject(engine, way.settle)

    # -- what came out

    def result(self, floor_gbps: float | None = None) -> dict[str, Any]:
        """`floor_gbps` is known on a GPU."""
        measured = [
            (name, length)
            for length in self.plan.prompt_tokens
            for name in self.plan.connectors
            if name not in self.plan.left_out
        ]
        return {
            "device": self.plan.device,
            **({"gpu": gpu_name(), "floor_gbps": round(floor_gbps, 2)} if floor_gbps else {}),
            "model": self.model.description,
            "vllm": self.vllm,
            "block_tokens": self.model.block_tokens,
            "repeats": self.plan.repeats,
            "interleaved": self.plan.interleave,
            "graphs": self.plan.graphs,
            "rows": [self._row(*each) for each in measured],
            "ratios": [self._ratios(*each, floor_gbps) for each in measured if each[0] != "none"],
            "left_out": dict(self.plan.left_out),
            "targets": dict(TARGETS[self.plan.device]),
        }

    def _row(self, name: str, length: int) -> dict[str, Any]:
        samples, wanted = self.samples[name, length], self.samples["none", length].tokens[0]
        return {
            "connector": name,
            "prompt_tokens": length,
            **{
                f"{case}{'_hit' * (case != 'cold')}_ms": median(samples.ms[case], 2)
                for case in _CASES
            },
            "cached_tokens": min(samples.cached_tokens, default=0),
            "same_tokens": len(samples.tokens) == len(_CASES)
            and all(each == wanted for each in samples.tokens),
            "samples_ms": {case: rounded(samples.ms[case], 1) for case in _CASES},
        }

    def _ratios(self, name: str, length: int, floor_gbps: float | None) -> dict[str, Any]:
        """Cold and local hit against none, how much faster than cold an external hit is, and that
        against its floor."""
        mine, none = self.samples[name, length].ms, self.samples["none", length].ms
        repeats, hits = self.plan.repeats, len(mine["external"]) // self.plan.repeats
        colds = [statistics.median(some) for some in np.array_split(mine["cold"], repeats)]
        against_floor: dict[str, Any] = {}
        if floor_gbps:
            floors = [
                local + length * self.model.kv_token_bytes / floor_gbps / 1e6
                for local in none["local"]
            ]
            against_floor["floor_ms"] = median(floors, 2)
            against_floor["floor_ratio"] = median_ratio(mine["external"], floors)
        return {
            "connector": name,
            "prompt_tokens": length,
            "cold_ratio": median_ratio(mine["cold"], none["cold"]),
            "local_hit_ratio": median_ratio(mine["local"], none["local"]),
            "speedup": median_ratio(
                [cold for cold in colds for _ in range(hits)], mine["external"]
            ),
            **against_floor,
        }


def _check_cold(name: str, answer: Answer) -> None:
    if answer.cached_tokens:
        raise AssertionError(
            f"{name}: {answer.cached_tokens} tokens of a prompt that nobody sent before were found"
        )


def _times(ms: dict[str, list[float]]) -> str:
    return "/".join(f"{values[-1]:,.0f}" for values in ms.values() if values) + " ms"
