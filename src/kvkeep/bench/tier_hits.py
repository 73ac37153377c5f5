"""How long a prompt takes whose blocks only a tier has, against computing it and against a hit in
memory. In real vLLM; without vLLM in the reference engine.

    computed   by an engine without a cache, whose tokens the other engine must answer, too
    memory     from the server's memory; the tier promotes nothing meanwhile
    tier       the server was restarted with empty memory, so the tier promotes every block

Both engines live at the same time and take turns. Each prompt is new, and a disk is empty before
it. The first prompt of each length warms up, and eight tokens of each answer are compared."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.bench.progress import say
from kvkeep.bench.shared_tier import own_salt
from kvkeep.bench.vllm_run import Answer, EngineProcess
from kvkeep.bench.vllm_session import Turns, find_device, installed, signals_end_the_block
from kvkeep.bench.vllm_setup import (
    SPARE_TOKENS,
    arguments,
    environment,
    kvkeep_arguments,
    own_model,
)
from kvkeep.errors import KVKeepError, SettingsError
from kvkeep.testing.process import ServerProcess
from kvkeep.tiers.service_address import given_credentials
from kvkeep.tiers.tier_address import TierAddress
from kvkeep.units import MIB, format_size

# A hit is measured, whatever it costs, and the request waits for all of its blocks, and for a busy
# server.
_OPTIONS = {
    "kvkeep.load_when": "always",
    "kvkeep.tier_patience": "wait",
    "kvkeep.lookup_deadline_ms": 10_000,
}
_COUNTING = "num_kvkeep_extra_cached_tokens"
_CASES = ("computed", "memory", "tier")
_CHECKED_TOKENS = 8
_WAKING_TOKENS = 8  # less than a block, so nothing of it is stored
_PROMPTS_IN_POOL = 3
_WITHIN_S = 120.0
_ASK_EVERY_S = 0.02


@dataclass(frozen=True)
class Kind:
    """A kind of engine. `make(address)` starts one with the server of this address; without a cache
    if it is None."""

    name: Callable[[], str]
    device: str
    vocab_size: int
    block_tokens: int
    kv_token_bytes: int
    make: Callable[[str | None], Any]


def engine_kind() -> str:
    """vllm, reference, or nothing if neither can run here."""
    if importlib.util.find_spec("torch") is None:
        return ""
    return "vllm" if installed("vllm") else "reference"


def hit_times(tier: TierAddress, lengths: Sequence[int], repeats: int) -> tuple[str, list[Any]]:
    """The engine, and a row for each length of a prompt. The tier's directory must be free."""
    with (
        signals_end_the_block(),
        tempfile.TemporaryDirectory(prefix="kvkeep-hits-") as folder,
        _vllm(Path(folder), max(lengths))
        if engine_kind() == "vllm"
        else _reference(max(lengths)) as kind,
        ExitStack() as ends,
    ):
        prompt_bytes = max(lengths) * kind.kv_token_bytes
        _check_size(tier, prompt_bytes)
        salt = ends.enter_context(own_salt(tier))
        server = ends.enter_context(_Server(tier, _PROMPTS_IN_POOL * prompt_bytes + 256 * MIB))
        turns = Turns.on(kind.device)
        plain, cached = (
            ends.enter_context(kind.make(address)) for address in (None, server.process.address)
        )
        bench = _Hits(kind, server, plain, cached, turns, salt)
        rows = []
        for length in lengths:
            for turn in range(repeats + 1):
                bench.round(length, turn)
            rows.append(bench.row(length))
        return kind.name(), rows


def _check_size(tier: TierAddress, prompt_bytes: int) -> None:
    """SettingsError if the tier cannot hold the longest prompt."""
    needed = prompt_bytes * 5 // 4 + 16 * MIB
    if 0 < tier.size_bytes < needed:
        raise SettingsError(
            f"a prompt of {format_size(prompt_bytes)} does not fit a tier of "
            f"{format_size(tier.size_bytes)}",
            f"use size={needed // MIB + 1}MiB or more, shorter --hit-tokens, or --no-hits",
        )


@dataclass
class _Hits:
    """The samples of all lengths."""

    kind: Kind
    server: _Server
    plain: EngineProcess | _ReferenceEngine
    cached: EngineProcess | _ReferenceEngine
    turns: Turns
    salt: str  # a shared tier may have what an earlier run has stored
    samples: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    cached_tokens: dict[int, int] = field(default_factory=dict)
    same_tokens: dict[int, bool] = field(default_factory=dict)

    def round(self, length: int, turn: int) -> None:
        """One prompt in all three ways. Turn 0 is not measured."""
        prompt: list[int] = (
            np.random.default_rng([length, turn]).integers(0, self.kind.vocab_size, length).tolist()
        )
        blocks = (length - 1) // self.kind.block_tokens
        answers = {"computed": self._ask(self.plain, prompt, turn)}
        self.server.restart(empty_disk=True)
        self._connect()
        self._ask(self.cached, prompt, turn)
        self.server.wait_until_on_disk(blocks)
        answers["memory"] = self._ask(self.cached, prompt, turn)
        if self.server.promoted_blocks():
            raise KVKeepError("a hit in memory took blocks from the tier")
        self.server.restart(empty_disk=False)
        self._connect()
        answers["tier"] = self._ask(self.cached, prompt, turn)
        if self.server.promoted_blocks() < blocks:
            raise KVKeepError(
                f"{self.server.promoted_blocks()} of {blocks} blocks came from the tier",
                "is it slow or failing? `kvkeep tiers` and the server's log tell",
            )
        self._note(length, turn, answers)

    def _connect(self) -> None:
        """Lets the engine notice that the server was restarted."""
        until = time.monotonic() + _WITHIN_S
        while not self.server.has_all_sessions():
            if time.monotonic() > until:
                raise KVKeepError("the engine does not connect to the server again")
            with self.turns.turn("cached"):
                self.cached.ask(range(_WAKING_TOKENS))
            time.sleep(_ASK_EVERY_S)

    def _ask(
        self, engine: EngineProcess | _ReferenceEngine, prompt: Sequence[int], turn: int
    ) -> Answer:
        with self.turns.turn("plain" if engine is self.plain else "cached"):
            engine.drop_local_cache()
            engine.ask(prompt[:_WAKING_TOKENS])
            return engine.ask(prompt, 1 if turn else _CHECKED_TOKENS, self.salt)

    def _note(self, length: int, turn: int, answers: dict[str, Answer]) -> None:
        same = all(answer.tokens == answers["computed"].tokens for answer in answers.values())
        self.same_tokens[length] = same and self.same_tokens.get(length, True)
        if not turn:
            return
        took = self.samples.setdefault(length, {case: [] for case in _CASES})
        for case, answer in answers.items():
            took[case].append(answer.ms)
        found = min(answers["memory"].cached_tokens, answers["tier"].cached_tokens)
        self.cached_tokens[length] = min(found, self.cached_tokens.get(length, found))
        said = ", ".join(f"{case} {answer.ms:.0f} ms" for case, answer in answers.items())
        say(f"{length:,} tokens: {said}")

    def row(self, length: int) -> dict[str, Any]:
        took = self.samples[length]
        return {
            "prompt_tokens": length,
            **{f"{case}_ms": round(statistics.median(took[case]), 1) for case in _CASES},
            "cached_tokens": self.cached_tokens[length],
            "same_tokens": self.same_tokens[length],
            "samples_ms": {case: [round(ms, 1) for ms in took[case]] for case in _CASES},
        }


class _Server:
    """A server with the tier, which loses its memory, its disk or both between two lives."""

    def __init__(self, tier: TierAddress, pool_bytes: int) -> None:
        self._directory = None if tier.is_shared else tier.directory
        self.process = ServerProcess(
            *("--pool-size", f"{pool_bytes // MIB}MiB", "--tier", str(tier)),
            environment=given_credentials(),
        )
        self._sessions = 0

    def __enter__(self) -> _Server:
        self.process.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.process.__exit__(*error)

    def restart(self, *, empty_disk: bool) -> None:
        """The next server begins with empty memory. What was stored is on the tier first."""
        self._sessions = max(self._sessions, self._open_sessions())
        self.process.stop()
        if empty_disk and self._directory is not None:
            shutil.rmtree(self._directory)
        self.process.start("--fresh")
        # A shared tier is not read before the server knows which tenants were cleared.
        self._wait_while("the tier is still starting", lambda tier: tier["state"] == "starting")

    def has_all_sessions(self) -> bool:
        return self._open_sessions() >= self._sessions

    def _open_sessions(self) -> int:
        return sum(self.process.ask()["open_sessions"].values())

    def wait_until_on_disk(self, blocks: int) -> None:
        self._wait_while(
            f"the tier does not have {blocks} blocks",
            lambda tier: tier["counts"]["written_blocks"] < blocks,
        )

    def promoted_blocks(self) -> int:
        return int(self._tier()["counts"]["promoted_blocks"])

    def _wait_while(self, what: str, is_so: Callable[[dict[str, Any]], bool]) -> None:
        until = time.monotonic() + _WITHIN_S
        while is_so(self._tier()):
            if time.monotonic() > until:
                raise KVKeepError(f"{what} after {_WITHIN_S:g} s", "is it slow or failing?")
            time.sleep(_ASK_EVERY_S)

    def _tier(self) -> dict[str, Any]:
        (tier,) = self.process.ask("/v1/tiers")
        return dict(tier)


# -- kinds of engines


@contextmanager
def _vllm(folder: Path, longest: int) -> Iterator[Kind]:
    model = own_model(folder, find_device("auto"))
    processes: list[EngineProcess] = []
    say("starting vLLM, without a cache and with one")
    with EngineProcess.importing(("none", "kvkeep"), environment(model, longest)) as spares:

        def make(address: str | None) -> EngineProcess:
            name = "kvkeep" if address else "none"
            extra = kvkeep_arguments(address, _OPTIONS) if address else {}
            processes.append(
                EngineProcess(
                    name,
                    arguments(model, longest, 2, extra),
                    environment(model, longest),
                    _COUNTING if address else "",
                    spares[name],
                )
            )
            return processes[-1]

        sizes = model.vocab_size, model.block_tokens, model.kv_token_bytes
        yield Kind(lambda: f"vllm {processes[0].vllm}", model.device, *sizes, make)


@contextmanager
def _reference(longest: int) -> Iterator[Kind]:
    from kvkeep.engine import demo_model

    settings = demo_model.MODEL
    num_blocks = (longest + SPARE_TOKENS) // demo_model.BLOCK_TOKENS + 2
    make = functools.partial(_ReferenceEngine.make, num_blocks)
    with demo_model.compute_threads(1):  # several would wait for each other on a busy machine
        yield Kind(
            lambda: "reference",
            "reference",
            settings.vocab_size,
            demo_model.BLOCK_TOKENS,
            demo_model.kv_token_bytes(),
            make,
        )


class _ReferenceEngine:
    """The reference engine, in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    @classmethod
    @contextmanager
    def make(cls, num_blocks: int, address: str | None) -> Iterator[_ReferenceEngine]:
        from kvkeep.engine import demo_model

        model = demo_model.demo_model()
        made = demo_model.make_llm(model, address, num_blocks, prefix_caching=True, extra=_OPTIONS)
        with made as llm:
            yield cls(llm)

    def ask(self, prompt: Sequence[int], max_tokens: int = 1, salt: str | None = None) -> Answer:
        from kvkeep.engine.llm import Prompt
        from kvkeep.engine.models.sampling import SamplingParams

        asked, sampling = Prompt(list(prompt), salt), SamplingParams(max_tokens=max_tokens)
        started = time.perf_counter()
        [answer] = self._llm.generate([asked], sampling)
        ms = (time.perf_counter() - started) * 1e3
        if answer.finish_reason != "length":
            raise KVKeepError(f"the engine failed: {answer.error or answer.finish_reason}")
        return Answer(ms, answer.token_ids, answer.metrics.external_cached_tokens)

    def drop_local_cache(self) -> None:
        self._llm.engine.flush()
        self._llm.engine.scheduler.pool.forget_all()
