"""Traces of requests, and the bounds of any cache on them.

A trace has one JSON object a line, in the format that the Mooncake project published:

    {"timestamp": 27482, "input_length": 1350, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds, and `hash_ids` names the blocks of the prompt in order. Other fields
are ignored, but `input_length`, from which the size of a block follows. Two requests share a block
if all their ids up to it are equal, whether or not the ids are chained hashes.

A recording of a server's requests is such a trace, too: its lookups have these fields, and its
other lines name another `op`.

What begins with anything but "{" is read as a log of vLLM at level DEBUG with
--enable-log-requests, whose lines list the tokens of each prompt:

    DEBUG 11-19 01:09:18 [...] Request cmpl-1 details: prompt: '...', prompt_token_ids: [1, 2], ...

Its blocks are cut here. It does not say which requests have a salt or an adapter."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import SettingsError
from kvkeep.kv.keys import KEY_BYTES

_EXAMPLE = '{"timestamp": 27482, "hash_ids": [46, 47, 2353]}'
_ROOT = -1
_NEVER = 2**62
VLLM_BLOCK_TOKENS = 16
_LOGGED = re.compile(rb"prompt_token_ids: \[([0-9, ]*)\], prompt_embeds shape: ")
_LOGGED_AT = re.compile(rb"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")


@dataclass
class Trace:
    """Requests as arrays: 8 bytes for each block that a request names.

    blocks   numbers of all requests' blocks, one request after the other: 0 is the first block seen
    ends     where each request's blocks end
    times    when each request came, in milliseconds

    `block_tokens` and `block_bytes` are 0 where the trace does not tell.
    """

    blocks: array[int] = field(default_factory=lambda: array("q"))
    ends: array[int] = field(default_factory=lambda: array("q"))
    times: array[int] = field(default_factory=lambda: array("q"))
    distinct: int = 0
    block_tokens: int = 0
    block_bytes: int = 0

    @property
    def requests(self) -> int:
        return len(self.ends)

    @property
    def references(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[tuple[int, array[int]]]:
        """Time and blocks of each request."""
        start = 0
        for now_ms, end in zip(self.times, self.ends, strict=True):
            yield now_ms, self.blocks[start:end]
            start = end

    def keys(self) -> NDArray[np.uint64]:
        """A key for each block number: words that are as random as a hash."""
        numbers = np.arange(self.distinct * (KEY_BYTES // 8), dtype=np.uint64) + np.uint64(1)
        numbers *= np.uint64(0x9E3779B97F4A7C15)  # the generator splitmix64
        numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return (numbers ^ numbers >> np.uint64(31)).reshape(self.distinct, -1)


def read_trace(path: str, block_tokens: int = 0) -> Trace:
    """Raises SettingsError, with the line, if the file is no trace. `block_tokens` overrules what
    the trace says; a log of vLLM is cut into blocks of so many tokens."""
    try:
        with Path(path).open("rb") as lines:
            first = next((line for line in lines if line.strip()), b"")
            lines.seek(0)
            if first.lstrip().startswith(b"{") or not first:
                trace = _read_json(lines, path)
            else:
                trace = _read_log(lines, path, block_tokens or VLLM_BLOCK_TOKENS)
    except OSError as error:
        raise SettingsError(
            f"cannot read the trace {path}: {error.strerror}", "name a file of JSON lines"
        ) from None
    trace.block_tokens = block_tokens or trace.block_tokens
    return trace


def _read_json(lines: Iterable[bytes], path: str) -> Trace:
    trace, numbers = Trace(), dict[tuple[int, int], int]()
    longest = nbytes = 0
    slots = dict[int, int]()  # of a recording: bytes of a block of each layout
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        request = _parse(line, f"{path}, line {number}")
        if request.get("op") == "layout":
            slots[_whole(request, "layout")] = _whole(request, "block_bytes")
        if "kvkeep_recording" in request or request.get("op", "lookup") != "lookup":
            continue
        if request.get("again"):
            continue  # the same request, which waited for a tier
        _add(trace, numbers, request, number, path)
        if blocks := len(request["hash_ids"]):
            longest = max(longest, -(-_whole(request, "input_length") // blocks))
            nbytes += blocks * slots.get(_whole(request, "layout"), 0)
    if not trace.references:
        raise SettingsError(f"{path} has no requests", f"write one a line, as {_EXAMPLE}")
    trace.distinct = len(numbers)
    if longest:  # the last block of most prompts is not full
        trace.block_tokens = 1 << (longest - 1).bit_length()
    trace.block_bytes = nbytes // trace.references
    return trace


def _read_log(lines: Iterable[bytes], path: str, block_tokens: int) -> Trace:
    """Of the requests that a log of vLLM lists with their tokens. A prompt may quote anything: what
    vLLM itself writes comes last."""
    trace, numbers = Trace(block_tokens=block_tokens), dict[tuple[int, int], int]()
    for number, line in enumerate(lines, start=1):
        found, at = _LOGGED.findall(line), _LOGGED_AT.search(line)
        if not found or at is None:
            continue
        month, day, hour, minute, second = map(int, at.groups())
        time_s = (((month * 31 + day) * 24 + hour) * 60 + minute) * 60 + second
        tokens = np.array([int(each) for each in found[-1].split(b",") if each.strip()], np.int64)
        full = len(tokens) // block_tokens * block_tokens
        ids = [
            int.from_bytes(blake2b(block.tobytes(), digest_size=8).digest(), "little")
            for block in tokens[:full].reshape(-1, block_tokens)
        ]
        time_ms = max(time_s * 1000, trace.times[-1] if trace.times else 0)
        _add(trace, numbers, {"timestamp": time_ms, "hash_ids": ids}, number, path)
    if not trace.references:
        raise SettingsError(
            f"{path} is neither a trace nor a log of vLLM that lists tokens",
            "run vLLM with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG; a trace has lines "
            f"as {_EXAMPLE}",
        )
    trace.distinct = len(numbers)
    return trace


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{where}: not JSON: {error}", f"write it as {_EXAMPLE}") from None
    if not isinstance(request, dict):
        raise SettingsError(f"{where}: not a JSON object", f"write it as {_EXAMPLE}")
    return request


def _whole(fields: dict[str, Any], name: str) -> int:
    """A whole number that may be missing; 0 for anything else."""
    value = fields.get(name)
    return value if type(value) is int and 0 <= value < _NEVER else 0


def _add(
    trace: Trace,
    numbers: dict[tuple[int, int], int],
    request: dict[str, Any],
    line: int,
    path: str,
) -> None:
    """Appends a request. `numbers` has the number of each block, by its parent's and its id."""
    where = f"{path}, line {line}"
    time: Any = request.get("timestamp")
    ids: Any = request.get("hash_ids")
    if type(time) not in (int, float) or not 0 <= time < _NEVER:
        raise SettingsError(
            f"{where}: timestamp is {json.dumps(time)}", "give milliseconds, 0 or more"
        )
    if trace.times and time < trace.times[-1]:
        raise SettingsError(
            f"{where}: timestamp {time} is before that of the line above",
            "sort the trace by timestamp",
        )
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise SettingsError(
            f"{where}: hash_ids is {json.dumps(ids)[:80]}", "give a list of whole numbers"
        )
    above = _ROOT
    for each in ids:
        above = numbers.setdefault((above, each), len(numbers))
        trace.blocks.append(above)
    trace.ends.append(len(trace.blocks))
    trace.times.append(int(time))


def infinite_hit_rate(trace: Trace) -> float:
    """Hits of a cache that keeps everything, as a share of all references."""
    return 1 - trace.distinct / trace.references


def belady_hit_rate(trace: Trace, most_blocks: int) -> float:
    """Hits of the best possible cache of this size. It knows the future: it evicts the block whose
    next use is the farthest, and does not take in a block that is never used again."""
    next_uses = _next_uses(trace)
    cached: dict[int, int] = {}  # block -> its next use, as the number of a reference
    farthest: list[tuple[int, int]] = []  # heap of (-next use, block); some entries are out of date
    hits = at = 0
    for _, blocks in trace:
        hits += next((n for n, block in enumerate(blocks) if block not in cached), len(blocks))
        for block in blocks:
            next_use = next_uses[at]
            at += 1
            cached.pop(block, None)
            if next_use != _NEVER:
                cached[block] = next_use
                heappush(farthest, (-next_use, block))
        while len(cached) > most_blocks:
            next_use, block = heappop(farthest)
            if cached.get(block) == -next_use:
                del cached[block]
    return hits / trace.references


def _next_uses(trace: Trace) -> array[int]:
    """For each reference, the next one to the same block."""
    next_uses, seen = array("q", [_NEVER]) * trace.references, dict[int, int]()
    for at in range(trace.references - 1, -1, -1):
        block = trace.blocks[at]
        next_uses[at] = seen.get(block, _NEVER)
        seen[block] = at
    return next_uses
