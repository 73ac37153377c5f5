"""A plan has the figures of `kvkeep bench replay`, and what follows from them.

KVKEEP_TEST_TRACE=conversation_trace.jsonl also compares them on that trace, which takes minutes."""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path

import pytest

from kvkeep.bench import replay
from kvkeep.bench.plan import Costs, Plan, plan
from kvkeep.bench.replay import Replayed
from kvkeep.bench.traces import read_trace
from kvkeep.errors import KVKeepError

TRACE = os.environ.get("KVKEEP_TEST_TRACE", "")
COSTS = Costs(block_tokens=100, token_bytes=1000, prefill_speed=1000, memory_speed=10_000_000)


def conversations(folder: Path) -> str:
    """Sixty users in turn, each of whom asks again with two more blocks."""
    path, fresh = folder / "trace.jsonl", count()
    said: dict[int, list[int]] = {}
    lines = []
    for number in range(600):
        ids = said.setdefault(number * 7 % 60, [])
        ids += [next(fresh), next(fresh)]
        lines.append(json.dumps({"timestamp": number * 1000, "hash_ids": ids}))
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return conversations(tmp_path_factory.mktemp("trace"))


@pytest.fixture(scope="module")
def made(path: str) -> Plan:
    return plan(path, read_trace(path), COSTS, [200, 1000, 5000], [1500])


def benched_hit_rates(path: str, blocks: tuple[int, ...]) -> dict[tuple[int, int], float]:
    """By the blocks in memory and on disk."""
    rows = replay.run(path, policy=("lru", "adaptive"), blocks=blocks)["rows"]
    return {(row["blocks"], row["disk_blocks"]): row["hit_rate"] for row in rows}


def test_every_row_agrees_with_bench_replay(path: str, made: Plan) -> None:
    benched = benched_hit_rates(path, (200, 1000, 1500, 5000))
    ours = {(row.memory_blocks, row.disk_blocks): row.hit_rate for row in made.rows}
    assert [*ours] == [(200, 0), (1000, 0), (5000, 0), (1000, 1500)]
    assert ours == {size: benched[size] for size in ours}
    assert ours[200, 0] < ours[1000, 0] < ours[5000, 0]


@pytest.mark.skipif(not TRACE, reason="NOT TESTED: KVKEEP_TEST_TRACE names no trace")
def test_on_a_real_trace_every_row_agrees_with_bench_replay() -> None:
    trace = read_trace(TRACE)
    with_disk = plan(TRACE, trace, Costs(), [1000], [3000, 10_000]).rows
    in_memory = plan(TRACE, trace, Costs(), [3000, 10_000], [1]).rows[:2]
    ours = {(row.memory_blocks, row.disk_blocks): row.hit_rate for row in with_disk + in_memory}
    assert ours == benched_hit_rates(TRACE, (1000, 3000, 10_000))


def test_the_knee_is_where_memory_begins_to_bring_less(made: Plan) -> None:
    assert [row.memory_blocks for row in made.rows if row.knee] == [1000]
    shown = made.as_json()
    assert shown["requests"] == 600 and shown["seconds"] == 599.0
    assert {"memory_blocks", "disk_blocks", "hit_rate", "saved_s"} <= set(shown["rows"][0])
    best = shown["recommendation"]
    assert (best["memory_blocks"], best["disk_blocks"]) == (1000, 1500)
    assert "Give the pool 95.37MiB" in best["words"] and "A disk of 143.05MiB" in best["words"]


def test_where_memory_pays_to_the_end_the_largest_size_is_the_knee(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rounds = [*(5 * list(range(32))), *(3 * list(range(32, 96)))]
    path.write_text(
        "\n".join(json.dumps({"timestamp": at, "hash_ids": [n]}) for at, n in enumerate(rounds))
    )
    made = plan(str(path), read_trace(str(path)), COSTS, [32, 64])
    half, whole = made.rows[:2]
    assert 0.5 * whole.saved_s <= half.saved_s < 0.55 * whole.saved_s
    assert whole.knee and not half.knee


def test_a_found_block_saves_what_computing_takes_longer_than_loading() -> None:
    assert COSTS.saved_by_block_s(COSTS.memory_speed) == pytest.approx(0.1 - 0.01)
    assert COSTS.saved_by_block_s(100_000) == 0, "an engine computes what comes later than that"
    slow_disk = Costs(100, 1000, 1000, 10_000_000, disk_speed=100_000)
    assert slow_disk.saved_s(Replayed(hits=30, writes=0, in_memory=10)) == pytest.approx(0.9)


def test_sizes_follow_from_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps({"timestamp": n, "hash_ids": [n % 8]}) for n in range(64)))
    made = plan(str(path), read_trace(str(path)), COSTS)
    assert [(row.memory_blocks, row.disk_blocks) for row in made.rows] == [
        *((blocks, 0) for blocks in (1, 2, 4, 8)),
        *((8, blocks) for blocks in (2, 8)),
    ]
    assert made.rows[3].hit_rate == 56 / 64 and made.rows[3].knee
    assert "A disk beside it brings nearly nothing more" in made.words


@pytest.mark.parametrize(
    ("ids", "costs", "words"),
    [
        ([0, 1, 2, 3], COSTS, "no cache of any size helps"),
        ([0, 0, 0, 0], Costs(100, 1000, 1000, 100, 100), "longer than computing"),
        ([0, 0, 1, 0], Costs(100, 1000, 1000, 10_000_000, 100), "it saves nothing, except after"),
    ],
)
def test_where_a_cache_does_not_help_the_words_say_so(
    tmp_path: Path, ids: list[int], costs: Costs, words: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "\n".join(json.dumps({"timestamp": at, "hash_ids": [each]}) for at, each in enumerate(ids))
    )
    assert words in plan(str(path), read_trace(str(path)), costs, [4], [4]).words


def test_a_replay_that_ends_early_is_an_error_with_its_reason(path: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone.jsonl"
    with pytest.raises(KVKeepError, match="cannot read the trace"):
        plan(str(gone), read_trace(path), COSTS, [10], [10])
