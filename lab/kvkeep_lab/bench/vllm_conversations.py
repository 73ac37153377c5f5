"""Conversations with real vLLM, over more context than the engine's KV cache holds.

    wave 1   conversation 1: start, question   │ conversation 2: … │ … │ conversation 24 or 48
    wave 2   conversation 1: its history, next question │ …
    …
    wave 6

A wave sends the next question of every conversation, and the next wave begins when the last answer
is there. The history contains the answers that the engine gave. An engine's KV cache holds about as
many contexts as it serves at a time, a fraction of them all, so the prefix that a conversation
returns to has left that cache: it is computed again, or loaded through the connector.

One run is all waves of one engine, back to back, with no other engine at work; the engines take
turns run by run. Ratios compare runs of the same repeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvkeep.bench.progress import say
from kvkeep.bench.vllm_session import (
    Choice,
    FreeMemory,
    Turns,
    fit_together,
    median,
    peers_may_fail,
    rotated,
    rounded,
)
from kvkeep.bench.vllm_setup import (
    ServedModel,
    arguments,
    connector,
    decoding_with_graphs,
    environment,
)
from kvkeep.testing.process import JsonProcess
from kvkeep.units import MIB
from kvkeep_lab.bench.vllm_lanes import LoadedEngine

MOST_OF_NATIVE = 1.0  # kvkeep's total time, against native's
_POOL_SPARE = 1.2  # for connectors that evict before their memory is full
_WARM_UP = -1  # the repeat that is not measured


@dataclass(frozen=True)
class Sizes:
    """`start_tokens` come before the first question; `at_a_time` contexts fit the engine's KV."""

    conversations: tuple[int, ...]
    turns: int
    start_tokens: int
    question_tokens: int
    answer_tokens: int
    at_a_time: int
    batch_tokens: int

    @property
    def context_tokens(self) -> int:
        """Of one conversation at its end."""
        return self.context_after(self.turns)

    def context_after(self, turns: int) -> int:
        return self.start_tokens + turns * (self.question_tokens + self.answer_tokens)

    @property
    def engine_tokens(self) -> int:
        """One context more than is served at a time, so that nothing is preempted."""
        return (self.at_a_time + 1) * self.context_tokens

    def reusable_tokens(self, conversations: int, block_tokens: int) -> int:
        """Whole blocks of the histories that waves return to. The last token of an answer has no KV
        yet."""
        blocks = sum(
            (self.context_after(turns) - 1) // block_tokens for turns in range(1, self.turns)
        )
        return conversations * blocks * block_tokens

    def questions(self, conversations: int, repeat: int, vocab_size: int) -> list[list[list[int]]]:
        """By turn and conversation; random tokens that no other repeat has."""
        rng = np.random.default_rng([conversations, repeat + 1])
        lengths = [self.question_tokens + self.start_tokens * (at == 0) for at in range(self.turns)]
        return [rng.integers(0, vocab_size, (conversations, length)).tolist() for length in lengths]

    def pool_bytes(self, model: ServedModel) -> int:
        tokens = max(self.conversations) * self.context_tokens
        return int(_POOL_SPARE * tokens) * model.kv_token_bytes + 256 * MIB


SIZES = {
    "cpu": Sizes((24, 48), 6, 64, 32, 16, 8, 1024),
    "cuda": Sizes((24, 48), 6, 1024, 384, 128, 12, 8192),
}


@dataclass
class Conversations:
    """`said` holds what engines answered, by connector and number of conversations, a run for each
    repeat."""

    choice: Choice
    model: ServedModel
    sizes: Sizes
    repeats: int
    interleave: bool
    graphs: bool
    said: dict[tuple[str, int], list[dict[str, Any]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    vllm: str = ""

    def measure(self) -> None:
        """Starts an engine for each connector and runs every size with it."""
        names = self.choice.connectors
        if self.interleave and self.choice.device == "cuda":
            pool_bytes = self.sizes.pool_bytes(self.model)
            self.interleave = fit_together(
                self.model, self.sizes.engine_tokens, names, pool_bytes, FreeMemory.find()
            )
        groups = [names] if self.interleave else [(name,) for name in names]
        around = environment(self.model, self.sizes.engine_tokens)
        with LoadedEngine.importing(names, around) as spares:
            for group in groups:
                self._measure(group, around, spares)

    def _measure(
        self, names: tuple[str, ...], around: dict[str, str], spares: dict[str, JsonProcess]
    ) -> None:
        """Engines that live at the same time."""
        turns = Turns.on(self.choice.device)
        with ExitStack() as stack:
            engines: list[LoadedEngine] = []
            for name in names:
                with self._forgiving(name), turns.turn(name):
                    say(f"starting vLLM, connector: {name}, for conversations")
                    made = self._engine(name, len(names), around, spares[name])
                    engines.append(stack.enter_context(made))
            for engine in engines:
                self.vllm = engine.vllm
                engine.wait_until_ready()
                with self._forgiving(engine.name), turns.turn(engine.name):
                    self._run(engine, self.sizes.at_a_time // 2, _WARM_UP)
            for conversations in self.sizes.conversations:
                for repeat in range(self.repeats):
                    for engine in rotated(engines, repeat):
                        if engine.name not in self.left_out:
                            with self._forgiving(engine.name), turns.turn(engine.name):
                                self._run(engine, conversations, repeat)

    @contextmanager
    def _engine(
        self, name: str, engines: int, around: dict[str, str], spare: JsonProcess
    ) -> Iterator[LoadedEngine]:
        sizes, model = self.sizes, self.model
        with connector(name, sizes.pool_bytes(model), model) as way:
            made = arguments(model, sizes.context_tokens, engines, way.arguments)
            made["num_gpu_blocks_override"] = -(-sizes.engine_tokens // model.block_tokens)
            made["max_num_batched_tokens"] = sizes.batch_tokens
            if self.graphs:
                made |= decoding_with_graphs(sizes.at_a_time, sizes.question_tokens)
            with LoadedEngine(name, made, around, spare=spare, ready_when=way.ready_when) as engine:
                yield engine

    def _run(self, engine: LoadedEngine, conversations: int, repeat: int) -> None:
        sizes = self.sizes
        questions = sizes.questions(conversations, repeat, self.model.vocab_size)
        said = engine.converse(questions, sizes.answer_tokens, sizes.at_a_time)
        # Also waits for what is still being stored, so that it does not disturb the next engine.
        engine.drop_local_cache()
        if repeat == _WARM_UP:
            return
        self.said.setdefault((engine.name, conversations), []).append(said)
        say(
            f"{conversations} conversations, {repeat + 1} of {self.repeats}: "
            f"{engine.name}: {said['seconds']:,.2f} s"
        )

    def _forgiving(self, name: str) -> AbstractContextManager[None]:
        return peers_may_fail(name, self.left_out, "conversations")

    # -- the result

    def result(self) -> dict[str, Any]:
        measured = [
            (name, conversations)
            for conversations in self.sizes.conversations
            for name in self.choice.connectors
            if len(self.said.get((name, conversations), ())) == self.repeats
        ]
        rows = [self._row(*each) for each in measured]
        totals: dict[str, dict[str, float]] = {}
        for row in rows:
            totals.setdefault(str(row["conversations"]), {})[row["connector"]] = row["total_s"]
        return {
            "turns": self.sizes.turns,
            "context_tokens": self.sizes.context_tokens,
            "engine_tokens": self.sizes.engine_tokens,
            "at_a_time": self.sizes.at_a_time,
            "interleaved": self.interleave,
            "rows": rows,
            "totals_s": totals,
            "ratios": [
                self._ratio(name, conversations)
                for name, conversations in measured
                if name != "kvkeep" and ("kvkeep", conversations) in measured
            ],
            "most_of_native": MOST_OF_NATIVE,
        }

    def _row(self, name: str, conversations: int) -> dict[str, Any]:
        """Medians of the repeats; failed requests of all of them."""
        runs = self.said[name, conversations]
        reusable = self.sizes.reusable_tokens(conversations, self.model.block_tokens)
        waves = [wave for run in runs for wave in run["waves"]]
        cached = [sum(wave["cached_tokens"] for wave in run["waves"]) / reusable for run in runs]
        by_turn = zip(*(run["waves"] for run in runs), strict=True)
        ttfts = [wave["ttft_ms"]["mean"] for run in runs for wave in run["waves"][1:]]
        same = [
            _same(ours, none)
            for ours, none in zip(runs, self.said["none", conversations], strict=True)
        ]
        return {
            "connector": name,
            "conversations": conversations,
            "total_s": median([run["seconds"] for run in runs], 3),
            "samples_s": rounded([run["seconds"] for run in runs], 3),
            "turn_s": [median([wave["seconds"] for wave in turn], 3) for turn in by_turn],
            "ttft_mean_ms": median(ttfts, 2),
            "cached_share": median(cached, 3),
            "failed": sum(wave["failed"] for wave in waves),
            "same_answers": median(same, 3),
        }

    def _ratio(self, against: str, conversations: int) -> dict[str, Any]:
        """kvkeep's total time, as a multiple of that of `against` in the same repeat."""
        pairs = zip(
            self.said["kvkeep", conversations], self.said[against, conversations], strict=True
        )
        ratios = [ours["seconds"] / theirs["seconds"] for ours, theirs in pairs]
        return {
            "conversations": conversations,
            "against": against,
            "total_ratio": median(ratios, 3),
            "total_ratios": rounded(ratios, 3),
        }


def _same(ours: dict[str, Any], none: dict[str, Any]) -> float:
    """The share of answers that are the same. Where one differs, so do the prompts after it."""
    pairs = [
        (mine["answers"][place], answer)
        for mine, theirs in zip(ours["waves"], none["waves"], strict=True)
        for place, answer in theirs["answers"].items()
    ]
    alike: int = sum(mine == theirs for mine, theirs in pairs)
    return alike / len(pairs)
