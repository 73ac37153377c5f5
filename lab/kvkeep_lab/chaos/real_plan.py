"""What happens in a run with real processes, and when: drawn from a seed before anything starts.

Processes and the machine have a will of their own, so a seed gives the same faults at the same
moments, and not the same run. Faults of the server come one after the other, each in a span of its
own; those of engines whenever they like."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

KILL_SERVER, PAUSE_SERVER = "kill_server", "pause_server"
KILL_ENGINE, PAUSE_ENGINE = "kill_engine", "pause_engine"
FLIP_BIT = "flip_bit"

_FRESH = 0.1  # of the servers after a kill begin empty
_KILLED_PAUSED = 0.2  # of the processes that are killed were paused before
# of the kills: then the index is at rest, and any of its bits may have changed
_FLIP_WHILE_DOWN = 0.6
_LONGEST_PAUSE_S, _LONGEST_DOWN_S, _LONGEST_ENGINE_PAUSE_S = 8.0, 4.0, 3.0


@dataclass(frozen=True)
class Counts:
    """How often each fault happens."""

    server_kills: int
    server_pauses: int
    engine_kills: int
    engine_pauses: int
    bit_flips: int

    def __post_init__(self) -> None:
        assert all(getattr(self, each.name) >= 0 for each in fields(self))

    @classmethod
    def of_minutes(cls, minutes: float) -> Counts:
        """Per ten minutes: enough for figures, and time between them for hits."""
        times = minutes / 10
        return cls(*(max(1, round(count * times)) for count in (24, 24, 14, 14, 60)))


@dataclass(frozen=True)
class Event:
    """One fault. `seconds` is how long a pause lasts, or a killed process is not there; `paused`
    says that it is stopped before it is killed."""

    at_s: float
    kind: str
    engine: int = 0
    seconds: float = 0.0
    fresh: bool = False
    paused: bool = False
    flips: int = 0


def draw(seed: int, seconds: float, engines: int, counts: Counts) -> list[Event]:
    """All faults of a run, in the order of their times."""
    chance = random.Random(f"real {seed}")
    events = _of_server(chance, seconds, counts)
    for kind, count in ((KILL_ENGINE, counts.engine_kills), (PAUSE_ENGINE, counts.engine_pauses)):
        for at in range(count):
            span = seconds / count
            paused = kind == KILL_ENGINE and chance.random() < _KILLED_PAUSED
            lasts = chance.uniform(0.1, _LONGEST_ENGINE_PAUSE_S)
            events.append(
                Event(span * (at + chance.random() * 0.8), kind, at % engines, lasts, paused=paused)
            )
    while_down = sum(event.flips for event in events)
    for _ in range(max(0, counts.bit_flips - while_down)):
        events.append(Event(chance.uniform(0, seconds), FLIP_BIT))
    return sorted(events, key=lambda event: event.at_s)


def _of_server(chance: random.Random, seconds: float, counts: Counts) -> list[Event]:
    kinds = [KILL_SERVER] * counts.server_kills + [PAUSE_SERVER] * counts.server_pauses
    chance.shuffle(kinds)
    events, flips_left = [], counts.bit_flips
    for at, kind in enumerate(kinds):
        span = seconds / len(kinds)
        begins = span * (at + chance.uniform(0.05, 0.3))
        if kind == PAUSE_SERVER:
            events.append(
                Event(begins, kind, seconds=chance.uniform(0.2, min(_LONGEST_PAUSE_S, span * 0.6)))
            )
            continue
        flips = min(flips_left, 1) if chance.random() < _FLIP_WHILE_DOWN else 0
        flips_left -= flips
        down_s = chance.uniform(0.0, min(_LONGEST_DOWN_S, span * 0.4))
        fresh, paused = chance.random() < _FRESH, chance.random() < _KILLED_PAUSED
        events.append(Event(begins, kind, seconds=down_s, fresh=fresh, paused=paused, flips=flips))
    return events
