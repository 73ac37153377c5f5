"""Traces are read exactly or refused with the line, and the bounds are those of small traces that
can be worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvkeep.bench.traces import Trace, belady_hit_rate, infinite_hit_rate, read_trace
from kvkeep.errors import SettingsError


def written(folder: Path, requests: Sequence[tuple[float, Sequence[int]]]) -> str:
    lines = [json.dumps({"timestamp": time, "hash_ids": list(ids)}) for time, ids in requests]
    (folder / "trace.jsonl").write_text("\n".join(lines) + "\n\n")
    return str(folder / "trace.jsonl")


def trace_of(folder: Path, *requests: Sequence[int]) -> Trace:
    return read_trace(written(folder, list(enumerate(requests))))


def test_requests_are_read_in_order_with_their_times(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, [(0, [7, 9]), (12.7, []), (1000, [7, 9, -4])]))
    assert (trace.requests, trace.references, trace.distinct) == (3, 5, 3)
    assert [(now_ms, list(blocks)) for now_ms, blocks in trace] == [
        (0, [0, 1]),
        (12, []),
        (1000, [0, 1, 2]),
    ]


def test_an_id_below_another_prefix_is_another_block(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [1, 5], [2, 5], [5, 5])
    assert [list(blocks) for _, blocks in trace] == [[0, 1], [2, 3], [4, 5]]


def test_every_block_has_a_key_of_its_own(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, range(1000))
    assert len(set(trace.keys()[:, 0].tolist())) == trace.distinct == 1000
    below_half = (trace.keys()[:, 0] < 2**63).sum()
    assert 400 < below_half < 600, "keys are spread as hashes are"


@pytest.mark.parametrize(
    ("line", "said", "hint"),
    [
        ("{", "not JSON", "timestamp"),
        ("[1]", "not a JSON object", "timestamp"),
        ('{"hash_ids": [1]}', "timestamp is null", "milliseconds"),
        ('{"timestamp": -1, "hash_ids": [1]}', "timestamp is -1", "milliseconds"),
        ('{"timestamp": NaN, "hash_ids": [1]}', "timestamp is NaN", "milliseconds"),
        ('{"timestamp": true, "hash_ids": [1]}', "timestamp is true", "milliseconds"),
        ('{"timestamp": 4, "hash_ids": [1]}', "before that of the line above", "sort"),
        ('{"timestamp": 9}', "hash_ids is null", "whole numbers"),
        ('{"timestamp": 9, "hash_ids": ["a"]}', 'hash_ids is ["a"]', "whole numbers"),
        ('{"timestamp": 9, "hash_ids": 3}', "hash_ids is 3", "whole numbers"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str, hint: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 5, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(SettingsError) as refused:
        read_trace(str(path))
    assert f"{path}, line 2: " in refused.value.message and said in refused.value.message
    assert hint in refused.value.hint


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.jsonl: No such file"):
        read_trace(str(tmp_path / "none.jsonl"))
    with pytest.raises(SettingsError, match="no requests"):
        trace_of(tmp_path, [])


def test_the_size_of_a_block_follows_from_the_lengths_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 6758, "hash_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,'
        ' 12, 13]}\n{"timestamp": 1, "input_length": "long", "hash_ids": [1]}\n'
    )
    assert read_trace(str(path)).block_tokens == 512
    assert read_trace(str(path), block_tokens=500).block_tokens == 500


def test_of_a_recording_the_lookups_are_read(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    lines: list[dict[str, object]] = [
        {"kvkeep_recording": 1},
        {"timestamp": 0, "op": "layout", "layout": 1, "block_bytes": 4096},
        {"timestamp": 1, "op": "layout", "layout": [], "block_bytes": -5},
        {"timestamp": 5, "op": "lookup", "layout": 1, "hash_ids": [7, 8]},
        {"timestamp": 6, "op": "lookup", "layout": 1, "hash_ids": [7, 8], "again": True},
        {"timestamp": 7, "op": "store", "layout": 1, "hash_ids": [7, 8]},
        {"timestamp": 9, "op": "lookup", "layout": 2, "hash_ids": [7, 9]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(str(path))
    assert [(at, list(blocks)) for at, blocks in trace] == [(5, [0, 1]), (9, [0, 2])]
    assert trace.block_bytes == 2048 and trace.block_tokens == 0


LOG = """\
INFO 11-19 01:09:18 [api_server.py:1] vLLM API server version 0.32.0
(APIServer pid=7) DEBUG 11-19 01:09:20 [request_logger.py:55] Request cmpl-1 details: \
prompt: 'say prompt_token_ids: [9, 9], prompt_embeds shape: ', \
prompt_token_ids: [1, 2, 3, 4, 5], prompt_embeds shape: None.
(APIServer pid=7) INFO 11-19 01:09:20 [request_logger.py:65] Received request cmpl-1: params: x
DEBUG 11-19 01:09:19 [request_logger.py:55] Request cmpl-2 details: prompt: None, \
prompt_token_ids: [1, 2, 3, 5], prompt_embeds shape: None.
DEBUG 11-19 01:10:20 [request_logger.py:55] Request cmpl-3 details: prompt: None, \
prompt_token_ids: [], prompt_embeds shape: None.
"""


def test_a_log_of_vllm_is_cut_into_blocks(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(LOG)
    trace = read_trace(str(path), block_tokens=2)
    assert [list(blocks) for _, blocks in trace] == [[0, 1], [0, 2], []]
    assert trace.block_tokens == 2 and trace.times[1] == trace.times[0]
    assert trace.times[2] - trace.times[0] == 60_000
    with pytest.raises(SettingsError, match="neither a trace nor a log"):
        read_trace(str(path))  # no prompt has a full block of 16 tokens


def test_an_infinite_cache_misses_each_block_once(tmp_path: Path) -> None:
    assert infinite_hit_rate(trace_of(tmp_path, [1, 2], [1, 2], [1, 3])) == 3 / 6


def test_the_best_cache_keeps_what_is_used_next(tmp_path: Path) -> None:
    """With room for one of two blocks, it keeps the one that comes back sooner."""
    trace = trace_of(tmp_path, [1], [2], [1], [2])
    assert belady_hit_rate(trace, 1) == 1 / 4
    assert belady_hit_rate(trace, 2) == 2 / 4


def test_the_best_cache_takes_in_nothing_that_is_not_used_again(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [1], [2], [3], [4], [1])
    assert belady_hit_rate(trace, 1) == 1 / 5


def test_the_best_cache_drops_the_end_of_a_chain_first(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [1, 2, 3], [1, 2, 3])
    assert [belady_hit_rate(trace, most) for most in (1, 2, 3)] == [1 / 6, 2 / 6, 3 / 6]
