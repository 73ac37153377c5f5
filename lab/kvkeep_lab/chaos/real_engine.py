"""An engine in a process of its own that serves until it is told to end, and judges itself.

    parent                                  engine process: python -m kvkeep_lab.chaos.real_engine
    RealEngine(job)                  ────►  builds two engines alike: one with the server's cache, one with none
                                     ◄────  {"ready": true}
                                     ◄────  {"answers": [{…}, …]}         a round: the same prompts through both
    finish                           ────►  (no more input) ends the round, stores what is left, and goes
                                     ◄────  {"checked_bytes": …}

Both compute with the oracle model, so every byte of KV that is read is compared with what it must
be; tokens are compared with those of the engine without a cache. Computing takes its time,
`_SECONDS_A_TOKEN` for each new token, in which the processor is free: as if a GPU did it. Without
that the model would be so fast that its time to the first token is noise."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.engine.models.model import Rank, Segment
from kvkeep.errors import KVKeepError
from kvkeep.testing.process import JsonProcess
from kvkeep_lab.simulation.oracle import OracleModel, WrongBytes

if TYPE_CHECKING:
    import torch

    from kvkeep.engine.llm import LLM, Completion

_SECONDS_A_TOKEN = 0.0004
_TENANTS = ("", "alice", "bob")
_PREFIXES, _PREFIX_TOKENS = 6, (96, 320)  # shared by all engines
_MOST_TOKENS = 512  # of a prompt; then the conversation begins anew
_CONVERSATIONS = 8
_BLOCK_TOKENS = 16
_VOCABULARY = 257
_WORDS = 8


@dataclass(frozen=True)
class Job:
    """What an engine is to be. `life` counts the processes in its place: each has prompts of its
    own."""

    address: str
    seed: int
    number: int
    life: int
    tp: int
    lookup_deadline_ms: int
    num_blocks: int
    verify: bool


@dataclass(frozen=True)
class Answer:
    """One prompt through both engines. Times are of the clock that all processes of a host
    share."""

    wrong_tokens: bool
    finish_reason: str
    external_cached_tokens: int
    failed_loads: int
    arrived_s: float
    ttft_ms: float
    plain_arrived_s: float
    plain_ttft_ms: float


class RealEngine:
    """The parent's end: hears what the process says in a thread, and remembers when it was
    paused."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.answers: list[Answer] = []
        self.said: dict[str, Any] = {}  # all else, the latest of each
        self.heard_s = time.monotonic()
        self.paused: list[tuple[float, float]] = []
        clean = {name: each for name, each in os.environ.items() if not name.startswith("KVKEEP_")}
        program = ("-m", "kvkeep_lab.chaos.real_engine", json.dumps(asdict(job)))
        self.process = JsonProcess(f"engine {job.number}", program, clean)
        self._ear = threading.Thread(target=self._hear, daemon=True)
        self._ear.start()

    @property
    def ready(self) -> bool:
        return "ready" in self.said

    @property
    def alive(self) -> bool:
        return self.process.exit_code() is None

    def pause(self) -> None:
        self.process.signal(signal.SIGSTOP)
        self.paused.append((time.monotonic(), float("inf")))

    def go_on(self) -> None:
        self.process.signal(signal.SIGCONT)
        if self.paused and self.paused[-1][1] == float("inf"):
            self.paused[-1] = (self.paused[-1][0], time.monotonic())
            self.heard_s = time.monotonic()

    def kill(self) -> None:
        """Without notice. What the process had said until then counts."""
        self.process.kill()
        self._ear.join()
        self.process.end()

    def finish(self, within_s: float) -> bool:
        """Ends it in order. False if it had to be killed, or failed."""
        self.go_on()
        self.process.close_input()
        code = self.process.exit_code(within_s)
        self.kill()
        return code == 0

    def log(self) -> str:
        """What it wrote to stderr."""
        return self.process.log()

    def _hear(self) -> None:
        while True:
            try:
                said = self.process.receive()
            except KVKeepError:
                return
            self.heard_s = time.monotonic()
            self.answers += [Answer(**each) for each in said.pop("answers", ())]
            self.said |= said


# -- what the process does


class PacedOracle(OracleModel):
    """The oracle, at the pace of a small GPU."""

    def forward(
        self, segments: Sequence[Segment], ranks: Sequence[Rank], block_tokens: int
    ) -> torch.Tensor:
        time.sleep(_SECONDS_A_TOKEN * sum(segment.count for segment in segments))
        return super().forward(segments, ranks, block_tokens)


class Traffic:
    """Prompts without end: conversations that go on, and begin with what others begin with."""

    def __init__(self, job: Job) -> None:
        shared = random.Random(f"prefixes {job.seed}")
        self._prefixes = [
            (
                shared.choice(_TENANTS),
                [shared.randrange(_VOCABULARY) for _ in range(shared.randint(*_PREFIX_TOKENS))],
            )
            for _ in range(_PREFIXES)
        ]
        self._chance = random.Random(f"{job.seed} {job.number} {job.life}")
        self._talks: list[tuple[str, list[int]]] = []

    def next(self) -> list[tuple[str, list[int]]]:
        """The prompts of a round, with their tenants."""
        return [self._one() for _ in range(self._chance.choice((1, 1, 2, 3)))]

    def goes_on(self, salt: str, tokens: list[int]) -> None:
        """This was said and heard; somebody may continue."""
        self._talks.append((salt, tokens))
        del self._talks[:-_CONVERSATIONS]

    def _one(self) -> tuple[str, list[int]]:
        chance = self._chance
        salt, said = chance.choice(
            self._talks if self._talks and chance.random() < 0.6 else self._prefixes
        )
        more = [chance.randrange(_VOCABULARY) for _ in range(chance.randint(8, 96))]
        if len(said) + len(more) > _MOST_TOKENS:
            salt, said = chance.choice(self._prefixes)
        return salt, [*said, *more]


def _engine(job: Job, *, cached: bool) -> LLM:
    from kvkeep.engine.llm import LLM

    extra = {
        "kvkeep.address": job.address,
        "kvkeep.load_when": "always",
        "kvkeep.load": "sync" if job.number % 4 == 3 else "async",
        "kvkeep.lookup_deadline_ms": job.lookup_deadline_ms,
        "kvkeep.verify": job.verify,
        "kvkeep.ping_interval_ms": 200,
        "kvkeep.reconnect_interval_ms": 100,
    }
    return LLM(
        PacedOracle(job.seed, words=_WORDS, vocab_size=_VOCABULARY),
        block_tokens=_BLOCK_TOKENS,
        num_blocks=job.num_blocks,
        tensor_parallel_size=job.tp,
        enable_prefix_caching=False,  # so that what is not computed came from the server
        kv_transfer_config={"kv_connector": "KVKeepConnector", "kv_connector_extra_config": extra}
        if cached
        else None,
    )


def _round(number: int, engines: dict[str, LLM], traffic: Traffic) -> list[Answer]:
    """The same prompts through both, in changing order."""
    from kvkeep.engine.llm import Prompt
    from kvkeep.engine.models.sampling import SamplingParams

    drawn = traffic.next()
    prompts = [
        Prompt(tokens, salt=salt or None, sampling=SamplingParams(max_tokens=4))
        for salt, tokens in drawn
    ]
    given: dict[str, list[Completion]] = {}
    for name in ("plain", "cached") if number % 2 else ("cached", "plain"):
        given[name] = engines[name].generate(prompts)
    for (salt, tokens), right in zip(drawn, given["plain"], strict=True):
        traffic.goes_on(salt, tokens + right.token_ids)
    return [_judged(*both) for both in zip(given["cached"], given["plain"], strict=True)]


def _judged(cached: Completion, plain: Completion) -> Answer:
    assert plain.finish_reason == "length" and plain.metrics.ttft_ms is not None
    whole = cached.finish_reason == "length"
    expected = plain.token_ids if whole else plain.token_ids[: len(cached.token_ids)]
    return Answer(
        wrong_tokens=cached.token_ids != expected,
        finish_reason=cached.finish_reason,
        external_cached_tokens=cached.metrics.external_cached_tokens,
        failed_loads=cached.metrics.failed_loads,
        arrived_s=cached.metrics.arrived_s,
        ttft_ms=cached.metrics.ttft_ms or 0.0,
        plain_arrived_s=plain.metrics.arrived_s,
        plain_ttft_ms=plain.metrics.ttft_ms,
    )


def _say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _main(job: Job) -> None:
    import torch

    torch.set_num_threads(1)
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: ends.put(sys.stdin.read()), daemon=True).start()
    traffic, number = Traffic(job), 0
    with _engine(job, cached=True) as cached, _engine(job, cached=False) as plain:
        _say(ready=True)
        try:
            while ends.empty():
                _say(
                    answers=[
                        asdict(each)
                        for each in _round(number, {"cached": cached, "plain": plain}, traffic)
                    ]
                )
                cached.engine.check_integrity()
                number += 1
        except WrongBytes as error:
            _say(wrong_bytes=str(error))
            raise
        model = cached.engine.workers.model
        assert isinstance(model, PacedOracle)
        _say(checked_bytes=model.checked_bytes)


if __name__ == "__main__":
    _main(Job(**json.loads(sys.argv[1])))
