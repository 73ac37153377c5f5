"""What the last requests were served from, and why the rest of their prompts was computed.

    engine's report (runs of outcomes) ─┐
    attribution: why the store lacked   ├─► RequestShown, newest last
    probes: other identities            ┘

For operators with the token: a tenant must not learn what others asked for."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvkeep.errors import RequestError
from kvkeep.kv.identity import differing_parts
from kvkeep.kv.outcomes import (
    EVICTED,
    LACKED,
    LAST,
    LOADED,
    LOCAL,
    NAMES,
    NEVER_STORED,
    NOT_KNOWN,
    NUMBERS,
    OTHER_ADAPTER,
    OTHER_IDENTITY,
    OTHER_SALT,
    OVER_LIMIT,
    REPORTED,
    probed_blocks,
    runs_of,
)
from kvkeep.server.attribution import Attribution, Eviction, Lacked
from kvkeep.server.figures import MOST_US, plausible
from kvkeep.server.sessions import Missed, ServerSession
from kvkeep.wire.messages import PROBE_BYTES, RequestReport

REQUESTS_KEPT: Final = 1_024
MOST_BLOCKS: Final = 65_536  # of a prompt, as far as a report is believed
_MOST_PROBES: Final = 16_384
_LACKED: Final = frozenset((LACKED, OTHER_SALT, OTHER_ADAPTER))


@dataclass(frozen=True)
class EvictionShown:
    """When the missing blocks were evicted, in seconds before the request asked for them, and the
    tenant for whose blocks most of them made room: "" if it is not known."""

    newest_s: float
    oldest_s: float
    by: str


@dataclass(frozen=True)
class RequestShown:
    """One request. `blocks` are those of its prompt, and `outcomes` add up to them; `runs` has them
    in order. `prompt_s`: from the request's arrival until the engine had all of its prompt.
    `differs` names the parts of the identity that differ where the same tokens were cached by an
    engine with another one."""

    number: int
    request: str
    finished_s: float
    tenant: str
    session: int
    engine: str
    model: str
    prompt_tokens: int
    tokens_loaded: int
    tokens_local: int
    tokens_computed: int
    prompt_s: float
    saved_s: float | None
    blocks: int
    outcomes: dict[str, int]
    runs: list[tuple[str, int]]
    evicted: EvictionShown | None
    differs: list[str]

    @property
    def text(self) -> str:
        """One line: how many blocks each cache gave, and why the others missed."""
        hits = [
            f"{self.outcomes[NAMES[number]]} {NAMES[number]}"
            for number in (LOCAL, LOADED)
            if self.outcomes.get(NAMES[number])
        ]
        missed = [
            f"{blocks} {self._cause(name)}"
            for name, blocks in self.outcomes.items()
            if NUMBERS[name] not in (LOCAL, LOADED, LAST)
        ]
        return f"{self.blocks} blocks: {', '.join(hits + missed) or 'none that a cache can give'}"

    def _cause(self, name: str) -> str:
        words = name.replace("_", " ")
        if self.evicted is not None and name == NAMES[EVICTED]:
            by = f" for {self.evicted.by}" if self.evicted.by else ""
            return f"{words} {self.evicted.newest_s:.0f} s before{by}"
        if name == NAMES[OTHER_IDENTITY] and self.differs:
            return f"{words} ({', '.join(self.differs)})"
        return words


@dataclass(frozen=True, slots=True)
class _Prober:
    """Who reported a prompt last."""

    identity: str
    model: str
    parts: Mapping[str, str]


class Explanations:
    """The last requests that engines have reported."""

    def __init__(self, attribution: Attribution) -> None:
        self.outcomes: Counter[str] = Counter()  # of all blocks, since the start
        self._attribution = attribution
        self._kept: deque[RequestShown] = deque(maxlen=REQUESTS_KEPT)
        self._probers: OrderedDict[tuple[int, bytes], _Prober] = OrderedDict()
        self._next = 1

    def add(
        self,
        session: ServerSession,
        report: RequestReport,
        missed: Mapping[int, Missed],
        keys: bytes,
        finished_s: float,
    ) -> RequestShown:
        """Takes in a report. `missed` are lookups of its session by number, `keys` the addresses of
        the blocks that it names. Whatever it says, its outcomes add up to its blocks."""
        runs = _believed(report)
        first = plausible(report.keys_from, MOST_BLOCKS)
        lacked = [
            self._attribution.of(missed[each], first, keys)
            for each in report.lookups
            if each in missed
        ]
        prober, blocks = self._other_identity(session, report, runs)
        found: list[tuple[int, int]] = []
        at = 0
        for number, count in runs:
            more = [(number, count)]
            if number in _LACKED:
                more = _resolved(number, at, count, lacked, blocks)
            for each in more:
                _append(found, *each)
            at += count
        outcomes: Counter[str] = Counter()
        for number, count in found:
            outcomes[NAMES[number]] += count
        self.outcomes.update(outcomes)
        is_other = NAMES[OTHER_IDENTITY] in outcomes
        evictions = [each.eviction for each in lacked if each.eviction is not None]
        is_evicted = NAMES[EVICTED] in outcomes or NAMES[OVER_LIMIT] in outcomes
        shown = RequestShown(
            number=self._next,
            request=printable(report.request),
            finished_s=round(finished_s, 3),
            tenant=report.tenant,
            session=session.number,
            engine=session.client,
            model=session.parts.get("model", ""),
            prompt_tokens=plausible(report.prompt_tokens),
            tokens_loaded=plausible(report.loaded_tokens),
            tokens_local=plausible(report.local_tokens),
            tokens_computed=plausible(report.computed_tokens),
            prompt_s=round(plausible(report.prompt_us, MOST_US) / 1e6, 6),
            saved_s=_saved_s(report),
            blocks=at,
            outcomes=dict(outcomes),
            runs=[(NAMES[number], count) for number, count in found],
            evicted=_eviction(evictions) if is_evicted and evictions else None,
            differs=differing_parts(session.parts, prober.parts) if is_other and prober else [],
        )
        self._next += 1
        self._kept.append(shown)
        return shown

    def last(self, most: int) -> list[RequestShown]:
        """The last requests, the newest first."""
        return list(self._kept)[: -most - 1 : -1]

    def find(self, request: str) -> RequestShown:
        """The newest request whose name is, or begins with, this text."""
        for exact in (True, False):
            for each in reversed(self._kept):
                if each.request == request or (not exact and each.request.startswith(request)):
                    return each
        raise RequestError(
            "unknown_request",
            "no request of that name is among the last that have finished",
            field="request",
            hint=f"the server keeps {REQUESTS_KEPT}; `kvkeep explain --last 20` lists the newest",
        )

    def _other_identity(
        self, session: ServerSession, report: RequestReport, runs: list[tuple[int, int]]
    ) -> tuple[_Prober | None, int]:
        """The last engine of another identity that reported the same first tokens of this model,
        and how many blocks of them. Remembers this one."""
        full = sum(count for number, count in runs if number != LAST)
        data, probers = report.probes, self._probers
        probes = [
            (blocks, data[at * PROBE_BYTES :][:PROBE_BYTES])
            for at, blocks in enumerate(probed_blocks(full)[: len(data) // PROBE_BYTES])
        ]
        ours = _Prober(session.identity, session.parts.get("model", ""), session.parts)
        other: tuple[_Prober | None, int] = (None, 0)
        for probe in reversed(probes):
            last = probers.get(probe)
            if last is not None and last.model == ours.model and last.identity != ours.identity:
                other = last, probe[0]
                break
        for probe in probes:
            probers[probe] = ours
            probers.move_to_end(probe)
        while len(probers) > _MOST_PROBES:
            probers.popitem(last=False)
        return other


def _believed(report: RequestReport) -> list[tuple[int, int]]:
    """The report's runs by number, up to MOST_BLOCKS."""
    runs, left = [], MOST_BLOCKS
    for name, blocks in report.runs:
        count = min(max(blocks, 0), left)
        left -= count
        if count:
            runs.append((NUMBERS[name] if name in REPORTED else NOT_KNOWN, count))
    return runs


def _resolved(
    number: int, start: int, count: int, lookups: list[Lacked], other_blocks: int
) -> list[tuple[int, int]]:
    """Why `count` blocks from `start` on, which the server lacked, were lacking. What the first of
    the lookups says counts. A block that was never stored may have been cached in another way: by
    what the engine saw, or by an engine with another identity, which had the first `other_blocks`
    of the same tokens."""
    causes = np.full(count, NOT_KNOWN, dtype=np.uint8)
    for lacked in lookups:
        causes = np.where(causes == NOT_KNOWN, lacked.spread(start, count), causes)
    never = causes == NEVER_STORED
    if number != LACKED:
        causes[never] = number
    else:
        causes[: max(0, other_blocks - start)][never[: max(0, other_blocks - start)]] = (
            OTHER_IDENTITY
        )
    return runs_of(causes)


def _append(runs: list[tuple[int, int]], number: int, count: int) -> None:
    if runs and runs[-1][0] == number:
        count += runs.pop()[1]
    runs.append((number, count))


def _eviction(evictions: list[Eviction]) -> EvictionShown:
    return EvictionShown(
        round(min(each.newest_ms for each in evictions) / 1000, 1),
        round(max(each.oldest_ms for each in evictions) / 1000, 1),
        evictions[0].by,
    )


def _saved_s(report: RequestReport) -> float | None:
    if report.unpriced_tokens:
        return None
    return round((plausible(report.avoided_us) - plausible(report.load_us)) / 1e6, 6)


def printable(name: str) -> str:
    """Without line breaks, with which a name could forge log lines."""
    return "".join(char if char.isprintable() else "?" for char in name)
