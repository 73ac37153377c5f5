"""What a chaos run leaves behind: its story, its faults by kind, and what it found wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvkeep_lab.simulation.simulation import Simulation

# What each kind of finding is. The first six are what operators ask about, by these names.
FINDINGS = {
    "wrong_tokens": "an answer is not the one without a cache",
    "wrong_bytes": "bytes that were read, or could be, are not those of the block",
    "engine_errors": "something was raised into an engine, or ended one of its threads",
    "stuck_requests": "a request did not end though all faults had",
    "leaked_blocks": "memory that nobody uses was not given back",
    "leaked_leases": "a promise to somebody who is done, or dead, was kept",
    "broken_rules": "the server or a client contradicts itself, its protocol or a quota",
}


class Violation(Exception):
    """Ends a run: a promise was broken. `finding` is one of FINDINGS."""

    def __init__(self, finding: str, text: str) -> None:
        assert finding in FINDINGS
        super().__init__(f"{finding}: {text}")
        self.finding = finding
        self.text = text


@dataclass
class Outcome:
    """One run, in numbers. `violation` is empty for one in which nothing was wrong."""

    seed: int
    requests: int = 0
    finished: int = 0  # the others ended with their engine
    hit_blocks: int = 0
    adopted_blocks: int = 0  # by servers after a crash
    hosts: int = 1
    written_blocks: int = 0  # to the disk, or the shared tier
    promoted_blocks: int = 0  # from it
    tier_hits: int = 0  # those of them that another host had written
    clears: int = 0  # on a shared tier, of which an operator was told that they are complete
    events: int = 0
    simulated_ms: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    finding: str = ""
    violation: str = ""
    story: list[str] = field(default_factory=list)


class Record:
    """Kept by everybody while a run goes on."""

    def __init__(self, simulation: Simulation, detailed: bool = False) -> None:
        self.faults: Counter[str] = Counter()
        self.story: list[str] = []
        self.messages = 0
        self.detailed = detailed
        self._simulation = simulation

    def tell(self, who: str, what: str) -> None:
        """A line of the story."""
        self.story.append(f"{self._simulation.now_us / 1000:10.3f} ms  {who:<12} {what}")

    def tell_detail(self, who: str, what: str) -> None:
        """One that only a replay is interested in."""
        if self.detailed:
            self.tell(who, what)
