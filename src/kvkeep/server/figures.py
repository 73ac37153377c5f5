"""What the cache gave, in tokens and seconds: of the server, a model, a tenant or a session.

Time saved is the estimated time of computing the loaded tokens, by the speed that their engine
measured (connector/cost_model.py), less the time that their loads took. Tokens that were loaded
while an engine had not measured enough yet are left out and counted apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvkeep.wire.messages import RequestReport

MODELS: Final = 32  # counted by name; further ones count under OTHER_MODELS
OTHER_MODELS: Final = "other"
UNKNOWN_MODEL: Final = "unknown"  # no engine has named it
_MOST_TOKENS: Final = 1 << 32  # of one request, as far as it is believed
MOST_US: Final = 3_600_000_000


def counter(help: str, metric: str = "", default: float = 0) -> Any:
    """A field that counts. `metric` is its name in Prometheus, by default made from the field's."""
    return field(default=default, metadata={"help": help, "metric": metric})


@dataclass(kw_only=True)
class Figures:
    """Counters. Each field is a metric."""

    requests: int = counter("Requests that engines reported as finished.")
    loaded_tokens: int = counter("Tokens whose blocks engines loaded, verified and used.")
    local_tokens: int = counter("Prompt tokens that engines had in their own prefix cache.")
    computed_tokens: int = counter("Prompt tokens that engines computed.")
    unpriced_tokens: int = counter("Loaded tokens of which no time saved is known.")
    avoided_seconds: float = counter("Estimated time of computing the loaded tokens.", default=0.0)
    load_seconds: float = counter("Time that loads of these tokens took.", default=0.0)

    def count_report(self, report: RequestReport) -> None:
        """Counts what the engine says, within plausible limits. Loaded tokens are counted when
        their lease ends."""
        self.requests += 1
        self.local_tokens += plausible(report.local_tokens)
        self.computed_tokens += plausible(report.computed_tokens)
        self.unpriced_tokens += plausible(report.unpriced_tokens)
        self.avoided_seconds += plausible(report.avoided_us, MOST_US) / 1e6
        self.load_seconds += plausible(report.load_us, MOST_US) / 1e6


def plausible(number: int, most: int = _MOST_TOKENS) -> int:
    return min(max(number, 0), most)


@dataclass(frozen=True)
class FiguresShown:
    """Figures as status shows them. Time saved may be negative: loads then took longer than
    computing would have."""

    requests: int = 0
    tokens_loaded: int = 0
    tokens_computed: int = 0
    tokens_local: int = 0
    tokens_unpriced: int = 0
    saved_s: float = 0.0
    avoided_s: float = 0.0
    load_s: float = 0.0

    @classmethod
    def of(cls, figures: Figures) -> FiguresShown:
        return cls(
            figures.requests,
            figures.loaded_tokens,
            figures.computed_tokens,
            figures.local_tokens,
            figures.unpriced_tokens,
            round(figures.avoided_seconds - figures.load_seconds, 3),
            round(figures.avoided_seconds, 3),
            round(figures.load_seconds, 3),
        )


class FiguresByModel:
    """The figures of a bounded number of models, by name."""

    def __init__(self) -> None:
        self._by_model: dict[str, Figures] = {}

    def of(self, model: str) -> Figures:
        """Where to count what concerns this model."""
        return self._by_model[self.name_of(model)]

    def name_of(self, model: str) -> str:
        """Under which name a model counts from now on."""
        name = model or UNKNOWN_MODEL
        if name not in self._by_model and len(self._by_model) >= MODELS:
            name = OTHER_MODELS
        self._by_model.setdefault(name, Figures())
        return name

    def all(self) -> Mapping[str, Figures]:
        return self._by_model
