"""What a request was served from, as the server is told when it has finished.

Prompts whose blocks the server lacked are remembered for some time, so that a report can say that
the same tokens were asked for under another salt or with another adapter. Only hashes of tokens are
kept, of blocks 1, 2, 4, ... and of the last one: a few microseconds for a request of any length.

    blocks   |0|1|2|3|4|5|6|7|8|9|      probes after 1, 2, 4, 8 and 10 blocks; each covers the
              ^ ^   ^       ^   ^       tokens of the last block before it, and the probe before
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

from kvkeep.connector.cost_model import CostModel
from kvkeep.connector.request_state import RequestState
from kvkeep.kv import outcomes
from kvkeep.wire.messages import MAX_REQUEST_CHARS, MAX_RUNS, PROBE_BYTES, RequestReport

REMEMBERED = 4_096  # probes of prompts, of one engine


class RequestReports:
    """Makes the reports of one engine's requests."""

    def __init__(self, costs: CostModel, block_tokens: int) -> None:
        self._costs = costs
        self._block_tokens = block_tokens
        # (blocks, probe) -> the salt's tenant and the adapter of its last request
        self._seen: OrderedDict[tuple[int, bytes], tuple[str, str]] = OrderedDict()

    def of(self, state: RequestState) -> RequestReport:
        """The report of a request that has finished. Call it once: it remembers the prompt."""
        # A request that ended early has computed only what it held.
        state.outcomes[state.held :] = bytes((outcomes.NOT_REACHED,)) * (
            state.prompt_blocks - min(state.held, state.prompt_blocks)
        )
        block_tokens, prompt = self._block_tokens, state.outcomes
        probes, keys, keys_from = b"", b"", prompt.find(outcomes.LACKED)
        if keys_from >= 0:
            keys = state.keys_of(keys_from, prompt.rfind(outcomes.LACKED) + 1)
            found = list(_probes(state, block_tokens))
            self._name_others(state, found)
            bound = f"{state.tenant} {state.adapter}".encode("utf-8", "surrogatepass")
            probes = b"".join(_hash(probe, bound) for _, probe in found)
        local = prompt.count(outcomes.LOCAL) * block_tokens
        loaded = prompt.count(outcomes.LOADED) * block_tokens
        reached = state.prompt_tokens
        if state.held < state.prompt_blocks:
            reached = state.held * block_tokens
        # the engine may not say that a prompt is computed before the request has ended
        prompt_s = state.age_s if state.prompt_s is None else state.prompt_s
        avoided_s, load_s = self._costs.computing_s(loaded), state.load_s
        is_priced = avoided_s is not None and load_s is not None
        return RequestReport(
            request=state.request_id[:MAX_REQUEST_CHARS],
            tenant=state.tenant,
            runs=_runs(state, block_tokens),
            prompt_tokens=state.prompt_tokens,
            loaded_tokens=loaded,
            local_tokens=local,
            computed_tokens=max(0, reached - local - loaded),
            prompt_us=round(prompt_s * 1e6),
            unpriced_tokens=0 if is_priced else loaded,
            avoided_us=round((avoided_s or 0.0) * 1e6) if is_priced else 0,
            load_us=round((load_s or 0.0) * 1e6) if is_priced else 0,
            keys_from=max(0, keys_from),
            keys=keys,
            probes=probes,
        )

    def _name_others(self, state: RequestState, probes: list[tuple[int, bytes]]) -> None:
        """Marks lacked blocks whose tokens were seen under another salt or with another adapter,
        and remembers these tokens."""
        seen, ours = self._seen, (state.tenant, state.adapter)
        for blocks, probe in reversed(probes):
            last = seen.get((blocks, probe))
            if last is not None and last != ours:
                number = outcomes.OTHER_SALT if last[0] != ours[0] else outcomes.OTHER_ADAPTER
                lacked, other = bytes((outcomes.LACKED,)), bytes((number,))
                state.outcomes[:blocks] = state.outcomes[:blocks].replace(lacked, other)
                break
        for each in probes:
            seen[each] = ours
            seen.move_to_end(each)
        while len(seen) > REMEMBERED:
            seen.popitem(last=False)


def _probes(state: RequestState, block_tokens: int) -> Iterator[tuple[int, bytes]]:
    """How many blocks, and a hash of some of their tokens. Nothing for a prompt whose tokens are not
    known, or not all of them: of embeddings and images."""
    blocks = min(state.prompt_blocks, len(state.tokens) // block_tokens)
    probe = b""
    for after in outcomes.probed_blocks(blocks):
        here = state.tokens[(after - 1) * block_tokens : after * block_tokens]
        probe = _hash(probe, array("q", here).tobytes())
        yield after, probe


def _hash(before: bytes, data: bytes) -> bytes:
    return blake2b(before + data, digest_size=PROBE_BYTES, person=b"kvkeep.probe").digest()


def _runs(state: RequestState, block_tokens: int) -> list[tuple[str, int]]:
    """The outcomes of all blocks of the prompt, the last one included. What follows MAX_RUNS runs
    counts as not known."""
    runs = [(outcomes.NAMES[number], count) for number, count in outcomes.runs_of(state.outcomes)]
    if len(runs) > MAX_RUNS - 2:
        rest = sum(count for _, count in runs[MAX_RUNS - 2 :])
        runs = [*runs[: MAX_RUNS - 2], (outcomes.NAMES[outcomes.NOT_KNOWN], rest)]
    if (more := -(-state.prompt_tokens // block_tokens) - len(state.outcomes)) > 0:
        runs.append((outcomes.NAMES[outcomes.LAST], more))
    return runs
