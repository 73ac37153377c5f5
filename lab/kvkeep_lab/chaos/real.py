"""Chaos with real processes: a server, engines, shared memory and signals, under the faults of a
plan.

    plan ──► KILL, STOP, CONT ──► server: started again by its name, and adopts what is left (now
    and then with --fresh)
         │                   └──► engines: started again, each a new process with prompts of its own
         └─► flipped bits in the pool while it is in use, and in the index while no server has it

An engine judges each of its answers (`chaos_real_engine`). Here they are counted, and at the end it
is seen what is left over: after the last fault every engine must find blocks again; when they have
ended the server must hold nothing for anybody, and when that has ended, nothing may be there at
all.

Time to the first token: each prompt goes through an engine with a cache and one without, one right
after the other. Of the pairs whose cached request arrived while the server was paused or not there,
and whose engine was not paused itself, the 99th percentiles are compared, in windows of `_WINDOW`
pairs in the order of their times; the ratio is the median of the windows' ratios, so that a burst
of other work on the machine costs one window."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvkeep.client.options import ClientOptions
from kvkeep.errors import Unavailable
from kvkeep.testing.process import ServerProcess
from kvkeep_lab.chaos.real_engine import Answer, Job, RealEngine
from kvkeep_lab.chaos.real_plan import (
    FLIP_BIT,
    KILL_ENGINE,
    KILL_SERVER,
    PAUSE_ENGINE,
    PAUSE_SERVER,
    Counts,
    Event,
    draw,
)

Spans = Sequence[tuple[float, float]]

MOST_TTFT_RATIO = 1.1
PAIRS_TO_JUDGE = 1000  # with fewer a 99th percentile is a matter of luck
_WINDOW = 400
_SERVER = ("--pool-size", "8MiB", "--slab-size", "256KiB", "--session-check-interval", "100ms")
_READY_WITHIN_S, _ENDS_WITHIN_S, _RECOVERS_WITHIN_S, _SILENT_AT_MOST_S = 120.0, 60.0, 60.0, 60.0
_WORD_EVERY_S = 30.0
_ZEROS = ("wrong_tokens", "wrong_bytes", "failed_requests", "leaked_processes", "leaked_shm_files")
_MORE_ZEROS = ("engine_errors", "server_errors", "leaked_leases", "engines_without_hits")


@dataclass
class RealRun:
    """One run; `run` does it. `on_progress` hears a line now and then."""

    seed: int
    seconds: float
    counts: Counts
    engines: int = 4
    lookup_deadline_ms: int = ClientOptions.lookup_deadline_ms
    engine_blocks: int = 136  # little more than the requests under way need
    verify: bool = True
    on_progress: Callable[[str], None] = lambda line: None
    tally: Counter[str] = field(default_factory=Counter)
    outages: list[tuple[float, float]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Starts everything, does what the plan says, ends everything. Whatever happens, nothing is
        left running."""
        began = time.monotonic()
        self._chance = random.Random(f"flips {self.seed}")
        self._all: list[RealEngine] = []
        self._server_log = ""
        self._serving = True
        others = _children()
        with ServerProcess(*_SERVER, *(() if self.verify else ("--no-verify",))) as self._server:
            self._directory = Path("/dev/shm") / f"kvkeep-{self._server.name}"
            try:
                self._seats = [self._start_engine(number, 0) for number in range(self.engines)]
                self._await(
                    "engines do not start",
                    _READY_WITHIN_S,
                    lambda: all(each.ready for each in self._seats),
                )
                self._carry_out(draw(self.seed, self.seconds, self.engines, self.counts))
                self._look_for_hits()
                self._end()
            except RunFailed as failed:
                self.violations.append(str(failed))
            finally:
                for engine in self._all:  # those that have ended have nothing more to lose
                    engine.kill()
        self.tally["leaked_processes"] += len(_children() - others)
        return self._result(time.monotonic() - began)

    # -- faults

    def _carry_out(self, plan: Sequence[Event]) -> None:
        """Event by event; what a pause or an absence leaves to be done is put on the agenda in its
        turn."""
        self._began_s = time.monotonic()
        self._agenda: list[tuple[float, Callable[[], None]]] = [
            (each.at_s, self._action(each)) for each in plan
        ]
        next_word = _WORD_EVERY_S
        while self._agenda:
            passed = time.monotonic() - self._began_s
            self._check_engines()
            if passed >= next_word:
                next_word += _WORD_EVERY_S
                self.on_progress(
                    f"{passed:.0f} s, {self._requests():,} requests, {dict(self.tally)}"
                )
            first = min(self._agenda, key=lambda entry: entry[0])
            if passed < first[0]:
                time.sleep(min(first[0] - passed, 0.1))
                continue
            self._agenda.remove(first)
            first[1]()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._agenda.append((time.monotonic() - self._began_s + seconds, action))

    def _action(self, event: Event) -> Callable[[], None]:
        actions: dict[str, Callable[[Event], None]] = {
            KILL_SERVER: self._kill_server,
            PAUSE_SERVER: self._pause_server,
            KILL_ENGINE: self._kill_engine,
            PAUSE_ENGINE: self._pause_engine,
            FLIP_BIT: lambda event: self._flip("segment-*"),
        }
        return lambda: actions[event.kind](event)

    def _kill_server(self, event: Event) -> None:
        if not self._serving:  # the fault before it took longer than planned
            self._after(0.2, lambda: self._kill_server(event))
            return
        began = self._begin_outage()
        if event.paused:
            self._server.send(signal.SIGSTOP)
        self._server_log += self._server.stop(signal.SIGKILL)
        self.tally["server_kills"] += 1
        for _ in range(event.flips):
            self._flip("index-*")

        def start() -> None:
            try:
                self._server.start(*(("--fresh",) if event.fresh else ()))
            except Unavailable as error:
                raise RunFailed(str(error)) from error
            self.tally["fresh_starts"] += event.fresh
            self._end_outage(began)

        self._after(event.seconds, start)

    def _pause_server(self, event: Event) -> None:
        if not self._serving:
            self._after(0.2, lambda: self._pause_server(event))
            return
        began = self._begin_outage()
        self._server.send(signal.SIGSTOP)
        self.tally["server_pauses"] += 1

        def go_on() -> None:
            self._server.send(signal.SIGCONT)
            self._end_outage(began)

        self._after(event.seconds, go_on)

    def _begin_outage(self) -> float:
        self._serving = False
        return time.monotonic()

    def _end_outage(self, began_s: float) -> None:
        self._serving = True
        self.outages.append((began_s, time.monotonic()))

    def _kill_engine(self, event: Event) -> None:
        engine = self._seats[event.engine]
        if event.paused:
            engine.pause()
        engine.kill()
        self.tally["engine_kills"] += 1
        again = self._start_engine(event.engine, engine.job.life + 1)
        self._seats[event.engine] = again

    def _pause_engine(self, event: Event) -> None:
        engine = self._seats[event.engine]
        engine.pause()
        self.tally["engine_pauses"] += 1
        self._after(event.seconds, lambda: engine.go_on() if engine.alive else None)

    def _flip(self, files: str) -> None:
        """One bit, in some file of these that is not empty. The index's header is left alone: it
        would end adoption altogether, for which there are other tests."""
        paths = [
            path
            for path in self._directory.glob(files)
            if path.name != "index-header" and path.stat().st_size
        ]
        if not paths:
            return
        path = self._chance.choice(sorted(paths))
        with open(path, "r+b") as file:
            at = self._chance.randrange(self._used_bytes(path))
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << self._chance.randrange(8)]))
        self.tally["bit_flips"] += 1
        self.tally["index_bit_flips"] += path.name.startswith("index-")

    def _used_bytes(self, path: Path) -> int:
        """Up to the last byte that is not 0, and a little more: most of an index is spare."""
        return min(path.stat().st_size, len(path.read_bytes().rstrip(b"\0")) + 64)

    # -- engines

    def _start_engine(self, number: int, life: int) -> RealEngine:
        """Half of them with TP 1, half with TP 2; those alike share what they compute."""
        tp = 1 + number // 2 % 2
        engine = RealEngine(
            Job(
                self._server.address,
                self.seed,
                number,
                life,
                tp,
                self.lookup_deadline_ms,
                self.engine_blocks,
                self.verify,
            )
        )
        self._all.append(engine)
        return engine

    def _check_engines(self) -> None:
        """None may end by itself, or fall silent."""
        for engine in self._seats:
            silent_s = time.monotonic() - max(
                engine.heard_s, *(end for _, end in engine.paused), 0.0
            )
            if not engine.alive:
                raise RunFailed(
                    f"engine {engine.job.number} ended by itself:\n{engine.log().strip()}"
                )
            if silent_s > (_SILENT_AT_MOST_S if engine.ready else _READY_WITHIN_S):
                raise RunFailed(f"engine {engine.job.number} has said nothing for {silent_s:.0f} s")

    def _await(self, problem: str, within_s: float, happens: Callable[[], bool]) -> None:
        deadline = time.monotonic() + within_s
        while not happens():
            self._check_engines()
            if time.monotonic() > deadline:
                raise RunFailed(problem)
            time.sleep(0.05)

    def _requests(self) -> int:
        return sum(len(engine.answers) for engine in self._all)

    # -- the end

    def _look_for_hits(self) -> None:
        """After the last fault, each engine is to find blocks again."""
        before = [len(engine.answers) for engine in self._seats]

        def hit(engine: RealEngine, start: int) -> bool:
            return any(answer.external_cached_tokens for answer in engine.answers[start:])

        waiting = list(zip(self._seats, before, strict=True))
        try:
            self._await("", _RECOVERS_WITHIN_S, lambda: all(hit(*each) for each in waiting))
        except RunFailed as failed:
            if str(failed):
                raise
        self.tally["engines_without_hits"] += sum(not hit(*each) for each in waiting)

    def _end(self) -> None:
        for engine in self._seats:
            self.tally["engine_errors"] += not engine.finish(_ENDS_WITHIN_S)
            self.tally["checked_bytes"] += engine.said.get("checked_bytes", 0)
        self.tally["engine_errors"] += sum("Traceback" in engine.log() for engine in self._all)
        deadline = time.monotonic() + _ENDS_WITHIN_S
        while (held := self._held()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.tally["leaked_leases"] += held
        self.tally["leaked_shm_files"] += len(list(self._directory.glob("session-*.lock")))
        # as from a terminal: it removes its pool
        self._server_log += self._server.stop(signal.SIGINT)
        self.tally["server_errors"] += self._server_log.count("Traceback")
        self.tally["leaked_shm_files"] += len(
            list(Path("/dev/shm").glob(f"kvkeep-{self._server.name}*"))
        )

    def _held(self) -> int:
        """Leases, writes and sessions that the server keeps for somebody."""
        status = self._server.ask()
        held = status["leases"] + status["writes"] + sum(status["open_sessions"].values())
        return int(held + status["restart"]["held_by_old_sessions"])

    def _result(self, seconds: float) -> dict[str, Any]:
        answers = [answer for engine in self._all for answer in engine.answers]
        tally = self.tally
        tally["wrong_tokens"] += sum(answer.wrong_tokens for answer in answers)
        tally["wrong_bytes"] += sum("wrong_bytes" in engine.said for engine in self._all)
        tally["failed_requests"] += sum(answer.finish_reason != "length" for answer in answers)
        pairs = [
            pair
            for engine in self._all
            for pair in pairs_during(engine.answers, self.outages, engine.paused)
        ]
        times = ttft(pairs)
        self.violations += [
            f"{name} is {tally[name]}" for name in (*_ZEROS, *_MORE_ZEROS) if tally[name]
        ]
        if len(pairs) >= PAIRS_TO_JUDGE and times["ttft_p99_outage_ratio"] > MOST_TTFT_RATIO:
            self.violations.append(
                f"ttft_p99_outage_ratio is {times['ttft_p99_outage_ratio']}, not {MOST_TTFT_RATIO}"
            )
        faults = ("server_kills", "server_pauses", "engine_kills", "engine_pauses", "bit_flips")
        return {
            "minutes": round(self.seconds / 60, 2),
            "requests": len(answers),
            **{name: tally[name] for name in (*faults, *_ZEROS[:3])},
            **times,
            "hits": sum(answer.external_cached_tokens > 0 for answer in answers),
            "external_cached_tokens": sum(answer.external_cached_tokens for answer in answers),
            **{name: tally[name] for name in _ZEROS[3:]},
            "seconds": round(seconds, 1),
            "lookup_deadline_ms": self.lookup_deadline_ms,
            "engine_blocks": self.engine_blocks,
            "outage_seconds": round(sum(end - begin for begin, end in self.outages), 1),
            "outage_pairs": len(pairs),
            "failed_loads": sum(answer.failed_loads for answer in answers),
            **{
                name: tally[name]
                for name in ("index_bit_flips", "fresh_starts", "checked_bytes", *_MORE_ZEROS)
            },
            "violations": self.violations,
        }


class RunFailed(AssertionError):
    """The run cannot go on; says why."""


def pairs_during(answers: Sequence[Answer], outages: Spans, paused: Spans) -> list[Answer]:
    """Those that arrived in an outage, in an engine that was never paused between their arrivals
    and first tokens."""
    found = []
    for answer in answers:
        began = min(answer.arrived_s, answer.plain_arrived_s)
        ended = max(
            answer.arrived_s + answer.ttft_ms / 1e3,
            answer.plain_arrived_s + answer.plain_ttft_ms / 1e3,
        )
        in_outage = any(begin <= answer.arrived_s < end for begin, end in outages)
        if in_outage and not any(begin < ended and began < end for begin, end in paused):
            found.append(answer)
    return found


def ttft(pairs: Sequence[Answer]) -> dict[str, float]:
    """The 99th percentiles of all pairs, and the median of the windows' ratios. 0 where there are
    none."""
    pairs = sorted(pairs, key=lambda pair: pair.arrived_s)
    count = max(1, len(pairs) // _WINDOW)
    windows = [
        pairs[len(pairs) * at // count : len(pairs) * (at + 1) // count] for at in range(count)
    ]
    ratios = [
        _p99([pair.ttft_ms for pair in window]) / _p99([pair.plain_ttft_ms for pair in window])
        for window in windows
        if window
    ]
    return {
        "ttft_p99_ms_none": round(_p99([pair.plain_ttft_ms for pair in pairs]), 1)
        if pairs
        else 0.0,
        "ttft_p99_ms_outage": round(_p99([pair.ttft_ms for pair in pairs]), 1) if pairs else 0.0,
        "ttft_p99_outage_ratio": round(statistics.median(ratios), 3) if ratios else 0.0,
    }


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[max(0, math.ceil(len(values) * 0.99) - 1)]


def _children() -> set[int]:
    """The processes that this one has started and that are still there."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            pid, rest = stat.parent.name, stat.read_text().rpartition(")")[2].split()
            if int(rest[1]) == os.getpid():
                found.add(int(pid))
    return found
