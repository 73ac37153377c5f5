"""What the benchmark under load measures: scenarios, and the engines that it takes to measure them.

none      mixed  fresh  decode_loads  decode_stores     one engine for all
kvkeep    mixed  fresh │                                one with vLLM's prefix cache
kvkeep                 │ decode_loads  decode_stores    and one without: what is watched must be loaded every time
"""

from __future__ import annotations

from dataclasses import dataclass

from kvkeep.bench.vllm_session import PEERS, Choice
from kvkeep.errors import SettingsError

SCENARIOS = {"mixed": ("mixed",), "fresh": ("fresh",), "decode": ("decode_loads", "decode_stores")}
DECODE = SCENARIOS["decode"]
CONVERSATIONS = "conversations"  # measured alone, with engines of its own


@dataclass(frozen=True)
class Station:
    """An engine with a connector, and what is measured with it."""

    connector: str
    scenarios: tuple[str, ...]
    prefix_cache: bool = True

    @property
    def decodes(self) -> bool:
        """Nothing but that."""
        return self.scenarios[0] in DECODE


@dataclass(frozen=True)
class Plan:
    """The options, checked."""

    choice: Choice
    scenarios: tuple[str, ...]
    seconds: int
    repeats: int
    interleave: bool
    graphs: bool = False

    @classmethod
    def make(
        cls,
        choice: Choice,
        scenarios: str,
        seconds: int,
        repeats: int,
        interleave: bool,
        eager: bool = False,
    ) -> Plan:
        names = scenarios.split(",")
        if CONVERSATIONS in names and len(names) > 1:
            raise SettingsError(
                f'--scenarios "{scenarios}": {CONVERSATIONS} is measured alone',
                f"run it once with --scenarios {CONVERSATIONS}, and once with the others",
            )
        for name in names:
            if name not in (*SCENARIOS, CONVERSATIONS):
                raise SettingsError(
                    f'--scenarios "{name}": expected some of {", ".join(SCENARIOS)}, '
                    f"or {CONVERSATIONS}"
                )
        chosen = tuple(each for name, parts in SCENARIOS.items() if name in names for each in parts)
        chosen = chosen or (CONVERSATIONS,)
        graphs = choice.has_graphs(eager)
        return cls(choice, chosen, seconds, repeats, interleave or choice.device == "cpu", graphs)

    @property
    def stations(self) -> list[Station]:
        stations = [Station("none", self.scenarios)]
        for name in self.choice.connectors:
            under_load = tuple(each for each in self.scenarios if each not in DECODE)
            decode = tuple(each for each in self.scenarios if each in DECODE)
            if name != "none" and under_load:
                stations.append(Station(name, under_load))
            if name != "none" and decode and (self.choice.named or name not in PEERS):
                stations.append(Station(name, decode, prefix_cache=False))
        return stations

    @property
    def groups(self) -> list[list[Station]]:
        """Stations whose engines live at the same time."""
        return [self.stations] if self.interleave else [[each] for each in self.stations]
