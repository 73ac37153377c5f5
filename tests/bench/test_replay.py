"""Small traces whose hits and writes can be worked out by hand, through the real stores."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from kvkeep.bench import replay
from kvkeep.bench.traces import Trace, read_trace
from kvkeep.errors import SettingsError

MINUTE_MS = 60_000


def written(folder: Path, requests: Sequence[tuple[int, Sequence[int]]]) -> str:
    path = folder / "trace.jsonl"
    lines = [json.dumps({"timestamp": time, "hash_ids": list(ids)}) for time, ids in requests]
    path.write_text("\n".join(lines))
    return str(path)


def replayed(trace: Trace, policy: str, memory_blocks: int, disk_blocks: int) -> tuple[int, int]:
    """Hits and writes."""
    in_memory = replay.memory_hits(trace, memory_blocks)
    return replay.replay(trace, policy, in_memory, disk_blocks)[:2]


@pytest.fixture
def trace_of(tmp_path: Path) -> Callable[..., Trace]:
    def make(*requests: Sequence[int], every_ms: int = 1) -> Trace:
        timed = [(number * every_ms, ids) for number, ids in enumerate(requests)]
        return read_trace(written(tmp_path, timed))

    return make


def test_memory_evicts_the_end_of_the_chain_that_was_used_least_recently(
    trace_of: Callable[..., Trace],
) -> None:
    trace = trace_of([1, 2], [3, 4], [5], [1, 2], [3, 4])
    # [5] evicts 2; then 1 hits and 2 evicts 4; then 3 hits
    assert replayed(trace, "lru", 4, 0) == (2, 0)
    assert replayed(trace, "lru", 5, 0) == (4, 0)


def test_first_use_writes_every_block_once(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([1, 2], [3, 4], [1, 2], [3, 4])
    assert replayed(trace, "first-use", 2, 4) == (4, 4)


def test_second_use_writes_what_is_used_twice_and_hits_at_the_third(
    trace_of: Callable[..., Trace],
) -> None:
    trace = trace_of([1, 2], [3, 4], [1, 5], [6, 7], [1, 2])
    assert replayed(trace, "second-use", 2, 4) == (1, 2)


def test_ten_minutes_is_second_use_on_a_full_disk_in_use(trace_of: Callable[..., Trace]) -> None:
    requests = [[1, 2], [3, 4], [5, 6], [3, 4], [5, 6]]
    assert replayed(trace_of(*requests), "ten-minutes", 2, 2) == (0, 6)
    quick = replayed(trace_of(*requests, every_ms=MINUTE_MS), "ten-minutes", 2, 2)
    slow = replayed(trace_of(*requests, every_ms=11 * MINUTE_MS), "ten-minutes", 2, 2)
    assert quick[1] < slow[1] == 10, "each block is written, since the oldest is always old"


def test_the_servers_rule_writes_all_while_there_is_room(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([1, 2], [3, 4], [1, 2], [3, 4])
    assert replayed(trace, "adaptive", 2, 4) == (4, 4)


def test_longer_prompts_than_one_store_takes(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of(range(1300), range(1300))
    assert replayed(trace, "lru", 2000, 0) == (1300, 0)
    assert replayed(trace, "lru", 700, 0) == (700, 0)


def scan(requests: int) -> Iterator[tuple[int, list[int]]]:
    """Two shared blocks, then ten that no other request has."""
    fresh = count(2)
    for number in range(requests):
        yield number, [0, 1, *(next(fresh) for _ in range(10))]


def test_rows_are_of_every_size_in_memory_and_as_a_disk(
    tmp_path: Path, without_unit: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, list(scan(500)))
    result = replay.run(path, blocks=(100, 2000))
    assert result["requests"] == 500 and without_unit(result) == []
    assert [(row["policy"], row["blocks"], row["disk_blocks"]) for row in result["rows"]] == [
        ("lru", 100, 0),
        ("lru", 2000, 0),
        *((name, 1000, 2000) for name in ("first-use", "second-use", "ten-minutes", "adaptive")),
    ]
    columns = ["policy", "blocks", "disk_blocks", "hit_rate", "writes_per_reference"]
    assert {tuple(row) for row in result["rows"]} == {(*columns, "infinite", "belady", "default")}
    assert {row["policy"] for row in result["rows"] if row["default"]} == {"lru", "adaptive"}
    for row in result["rows"]:
        assert row["hit_rate"] == row["infinite"] == row["belady"] == round(998 / 6000, 3)
    writes = {row["policy"]: row["writes_per_reference"] for row in result["rows"]}
    assert writes["lru"] == 0 and writes["second-use"] == round(2 / 6000, 3)
    assert 2000 / 6000 <= writes["adaptive"] < 0.5 < writes["first-use"] == round(5002 / 6000, 3)
    said = capsys.readouterr()
    assert said.out == "" and "6/6: adaptive, memory 1,000, disk 2,000" in said.err


def test_one_policy_and_one_size(tmp_path: Path) -> None:
    path = written(tmp_path, list(scan(10)))
    rows = replay.run(path, policy=("second-use",), blocks=(1000, 1001))["rows"]
    assert [(row["policy"], row["blocks"], row["disk_blocks"]) for row in rows] == [
        ("second-use", 1000, 1001)
    ]


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match='"fifo" is unknown') as refused:
        replay.run(written(tmp_path, [(0, [1])]), policy=("fifo",))
    assert refused.value.hint == (
        "policies: all, lru, first-use, second-use, ten-minutes, adaptive"
    )


def test_a_disk_that_is_not_larger_than_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="needs a disk") as refused:
        replay.run(written(tmp_path, [(0, [1])]), policy=("adaptive",), blocks=(1000,))
    assert refused.value.hint == "use a size above 1000"
