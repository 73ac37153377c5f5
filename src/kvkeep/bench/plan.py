"""How much memory and disk a trace of requests is worth: `kvkeep plan`.

Each size is replayed through the stores that `kvkeep bench replay` uses, in as many processes as
there are cores. A block that is found saves the time to compute its tokens, less the time to load
it, where loading is faster; otherwise an engine computes it, and nothing is saved.

    saved = tokens found * (1 / prefill_speed - token_bytes / speed of memory or disk)

The knee is the memory size where the saved time, as a share of that of the largest size, is furthest
above the memory, as a share of the largest: beyond it, more memory brings less than memory does on
average. If it is nowhere above it by more than _BEND, more memory pays to the end, and the knee is
the largest size."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from kvkeep.bench.replay import SERVERS_POLICY, Replayed, memory_hits, replay
from kvkeep.bench.traces import Trace, read_trace
from kvkeep.testing.process import JsonProcess
from kvkeep.units import GIB, KIB, format_duration, format_size

_PARTS = (64, 32, 16, 8, 4, 2, 1)  # of all blocks of the trace
_MOST_ROWS = 64
_BEND = 0.05  # of a curve of saved time over memory, both as shares of the most
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Costs:
    """What a token costs. The defaults are of Llama-8B on an H200 as docs/BENCHMARKS.md has it, and
    of an NVMe disk."""

    block_tokens: int = 512
    token_bytes: int = 128 * KIB
    prefill_speed: float = 38_000.0  # tokens a second
    memory_speed: int = 50 * GIB  # bytes a second
    disk_speed: int = 5 * GIB

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    def saved_s(self, found: Replayed) -> float:
        """Seconds that all blocks found save."""
        blocks = (
            (found.in_memory, self.memory_speed),
            (found.hits - found.in_memory, self.disk_speed),
        )
        return sum(count * self.saved_by_block_s(speed) for count, speed in blocks)

    def saved_by_block_s(self, speed: int) -> float:
        return max(0.0, self.block_tokens / self.prefill_speed - self.block_bytes / speed)


@dataclass(frozen=True)
class Row:
    """What one size gives."""

    memory_blocks: int
    disk_blocks: int
    hit_rate: float
    saved_s: float
    memory_bytes: int
    disk_bytes: int
    knee: bool = False


@dataclass(frozen=True)
class Plan:
    """Rows: memory alone in increasing size, then memory with a disk."""

    requests: int
    blocks: int
    distinct_blocks: int
    seconds: float  # from the first request to the last
    costs: Costs
    rows: list[Row]
    recommendation: Row
    words: str

    def as_json(self) -> dict[str, Any]:
        said = {key: value for key, value in asdict(self.recommendation).items() if key != "knee"}
        return {
            "requests": self.requests,
            "blocks": self.blocks,
            "distinct_blocks": self.distinct_blocks,
            "seconds": self.seconds,
            "assumptions": asdict(self.costs) | {"block_bytes": self.costs.block_bytes},
            "rows": [asdict(row) for row in self.rows],
            "recommendation": said | {"words": self.words},
        }


def plan(
    path: str,
    trace: Trace,
    costs: Costs,
    memory: Sequence[int] = (),
    disk: Sequence[int] = (),
    report: Report = lambda done, total: None,
) -> Plan:
    """`trace` was read from `path`. `memory` and `disk` are sizes in blocks; by default they follow
    from the trace. A disk is tried beside the memory of the knee."""
    sizes = sorted(set(memory) or {max(1, trace.distinct // part) for part in _PARTS})[:_MOST_ROWS]
    disks = sorted(set(disk) or {-(-trace.distinct // 4), trace.distinct})[:_MOST_ROWS]
    total = len(sizes) + len(disks)
    cores = min(total, len(os.sched_getaffinity(0)))
    with _Workers(path, trace.block_tokens) as workers, ThreadPoolExecutor(cores) as pool:
        found, rows = dict[int, Sequence[int]](), list[Row]()
        for size, in_memory in zip(
            sizes, pool.map(partial(_memory_hits, workers, trace), sizes), strict=True
        ):
            found[size] = in_memory
            replayed = replay(trace, SERVERS_POLICY, in_memory, 0)
            rows.append(_row(trace, costs, size, 0, replayed))
            report(len(rows), total)
        at = _knee(rows)
        knee = rows[at] = replace(rows[at], knee=True)
        beside = partial(workers.replay, 0, found[knee.memory_blocks])
        for size, sums in zip(disks, pool.map(beside, disks), strict=True):
            rows.append(_row(trace, costs, knee.memory_blocks, size, Replayed(*sums)))
            report(len(rows), total)
    best = _best(knee, rows[len(sizes) :])
    seconds = (trace.times[-1] - trace.times[0]) / 1000
    return Plan(
        trace.requests,
        trace.references,
        trace.distinct,
        seconds,
        costs,
        rows,
        best,
        _words(rows[: len(sizes)], knee, best, costs),
    )


def _row(trace: Trace, costs: Costs, memory_blocks: int, disk_blocks: int, found: Replayed) -> Row:
    return Row(
        memory_blocks,
        disk_blocks,
        round(found.hits / trace.references, 3),
        round(costs.saved_s(found), 3),
        memory_blocks * costs.block_bytes,
        disk_blocks * costs.block_bytes,
    )


def _knee(rows: Sequence[Row]) -> int:
    most_s, most_blocks = max(row.saved_s for row in rows), rows[-1].memory_blocks
    if not most_s:
        return 0
    above = [row.saved_s / most_s - row.memory_blocks / most_blocks for row in rows]
    return above.index(max(above)) if max(above) > _BEND else len(rows) - 1


def _best(knee: Row, with_disk: Sequence[Row]) -> Row:
    """The knee, with the smallest disk that brings most of what disks bring, if that is worth
    having."""
    most_s = max((row.saved_s for row in with_disk), default=0.0) - knee.saved_s
    if most_s <= 0.02 * knee.saved_s:
        return knee
    return next(row for row in with_disk if row.saved_s - knee.saved_s >= 0.9 * most_s)


def _words(memory: Sequence[Row], knee: Row, best: Row, costs: Costs) -> str:
    if not memory[-1].hit_rate:
        return "No request repeats the beginning of an earlier one: no cache of any size helps."
    if not max(row.saved_s for row in memory):
        return (
            "Loading a block takes longer than computing it at these speeds: a cache saves nothing."
        )
    words = [
        f"Give the pool {format_size(knee.memory_bytes)}: {knee.hit_rate:.0%} of all blocks are "
        f"found, which saves {format_duration(knee.saved_s)} of computing."
    ]
    if larger := [row for row in memory if row.memory_blocks > knee.memory_blocks]:
        shown = dict.fromkeys((larger[0], larger[-1]))
        more = (f"{row.hit_rate:.0%} with {format_size(row.memory_bytes)}" for row in shown)
        words.append(f"It would be {', '.join(more)}.")
    if best is not knee:
        words.append(
            f"A disk of {format_size(best.disk_bytes)} beside it raises that to "
            f"{best.hit_rate:.0%} and {format_duration(best.saved_s)}."
        )
    elif not costs.saved_by_block_s(costs.disk_speed):
        words.append(
            "A disk at this speed gives blocks later than the engine computes them: it saves "
            "nothing, except after a restart of the host."
        )
    else:
        words.append("A disk beside it brings nearly nothing more.")
    return " ".join(words)


# -- replays, in processes of their own


def _memory_hits(workers: _Workers, trace: Trace, memory_blocks: int) -> Sequence[int]:
    if memory_blocks >= trace.distinct:  # as fast as a process starts
        return memory_hits(trace, memory_blocks)
    return workers.replay(memory_blocks, [], 0)


class _Workers:
    """Processes that replay sizes, as many as there are calls at a time. Each reads the trace once."""

    def __init__(self, path: str, block_tokens: int) -> None:
        self._program = ("-m", "kvkeep.bench.plan", path, str(block_tokens))
        self._idle: list[JsonProcess] = []

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._idle:
            worker.end()

    def replay(self, memory_blocks: int, in_memory: Sequence[int], disk_blocks: int) -> list[int]:
        """Memory's hits of each request; with a disk, beside a memory that had these blocks, the
        sums of Replayed."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = JsonProcess("a replay", self._program)
        try:
            worker.send({"sizes": [memory_blocks, disk_blocks], "in_memory": list(in_memory)})
            replayed: list[int] = worker.receive()["replayed"]
        except BaseException:  # guard: nobody else would end the process; raised again
            worker.end()
            raise
        self._idle.append(worker)
        return replayed


def _work(path: str, block_tokens: int) -> None:
    """One worker: replays what stdin says, line by line."""
    trace = read_trace(path, block_tokens)
    for line in sys.stdin:
        asked = json.loads(line)
        memory_blocks, disk_blocks = asked["sizes"]
        if disk_blocks:
            replayed = list(replay(trace, SERVERS_POLICY, asked["in_memory"], disk_blocks))
        else:
            replayed = list(memory_hits(trace, memory_blocks))
        print(json.dumps({"replayed": replayed}), flush=True)


if __name__ == "__main__":
    _work(sys.argv[1], int(sys.argv[2]))
