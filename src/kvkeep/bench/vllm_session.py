"""What benchmarks of real vLLM share: what can be measured here, how a run ends, and how its
numbers are drawn."""

from __future__ import annotations

import importlib.util
import signal
import statistics
import sys
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvkeep.bench.transfer_floor import Gpu, load_gbps
from kvkeep.errors import SettingsError

CONNECTORS = ("none", "kvkeep", "lmcache", "native")
PEERS = ("lmcache", "native")

# vLLM's processes spin for one second after their last message before they sleep (SpinCondition's
# busy_loop_s). With few cores that second would be taken from the engine whose turn is next. A
# little more: they notice it a little late.
SILENT_AFTER_S = 1.2

# -- what can be measured


@dataclass(frozen=True)
class Choice:
    """Device and connectors, checked. `left_out` says why a connector is not measured; `named` were
    asked for by name."""

    device: str
    connectors: tuple[str, ...]
    named: bool
    left_out: dict[str, str]

    @classmethod
    def make(cls, device: str, connectors: str) -> Choice:
        if not installed("vllm"):
            raise SettingsError(
                "vLLM is not installed in this environment",
                "pip install kvkeep beside vLLM, and run this command with that environment's python",
            )
        device = find_device(device)
        missing = _missing(device)
        if connectors == "auto":
            return cls(
                device, tuple(name for name in CONNECTORS if name not in missing), False, missing
            )
        names = connectors.split(",")
        for name in names:
            if name not in CONNECTORS:
                raise SettingsError(
                    f'--connectors "{name}": expected some of {", ".join(CONNECTORS)}, or auto'
                )
            if name in missing:
                raise SettingsError(f"connector {name} cannot be measured here: {missing[name]}")
        # All are compared with none.
        return cls(device, tuple(name for name in CONNECTORS if name in {"none", *names}), True, {})

    def has_graphs(self, eager: bool) -> bool:
        """Whether engines use CUDA graphs: on a GPU, unless they are to be `eager`."""
        if eager and self.device != "cuda":
            raise SettingsError("--eager needs a GPU", "leave it out, or use --device cuda")
        return self.device == "cuda" and not eager


def find_device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise SettingsError(f'--device "{device}": expected auto, cpu or cuda')
    if device == "cpu":
        return device
    import torch

    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        hint = (
            "run it on a GPU host, with a torch that was built for CUDA; --device cpu measures here"
        )
        raise SettingsError("--device cuda: torch finds no GPU", hint)
    return "cuda" if there else "cpu"


def gpu_name() -> str:
    """To be asked when engines are gone: it takes memory of the GPU."""
    return Gpu("cuda").name


def bus_gbps() -> float:
    """Likewise: how fast a plain copy to the GPU is."""
    return load_gbps(Gpu("cuda"))


def _missing(device: str) -> dict[str, str]:
    missing = {}
    if not installed("lmcache"):
        missing["lmcache"] = "not installed"
    if device == "cpu":
        missing["native"] = "needs a GPU"
    return missing


def installed(name: str) -> bool:
    """A mere folder of that name, where we were started, is no package."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


# -- the run


@contextmanager
def signals_end_the_block() -> Iterator[None]:
    """An engine may hold a whole GPU, and a server's pool outlives it: neither is left behind."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Turns:
    """Of engines that live at the same time one is at work. Its turn begins when all others have
    been silent for `silent_after_s`; two turns of the same engine may follow each other at once."""

    silent_after_s: float
    _ended: dict[Hashable, float] = field(default_factory=dict)

    @classmethod
    def on(cls, device: str) -> Turns:
        """Hosts of GPUs have cores to spare for engines that spin."""
        return cls(SILENT_AFTER_S if device == "cpu" else 0.0)

    @contextmanager
    def turn(self, engine: Hashable) -> Iterator[None]:
        others = [ended for name, ended in self._ended.items() if name != engine]
        time.sleep(max(0.0, max(others, default=0.0) + self.silent_after_s - time.monotonic()))
        try:
            yield
        finally:
            self._ended[engine] = time.monotonic()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- its numbers


def median(values: Sequence[float], digits: int) -> float | None:
    return round(statistics.median(values), digits) if values else None


def rounded(values: Sequence[float | None], digits: int) -> list[float | None]:
    return [None if value is None else round(value, digits) for value in values]


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float | None:
    """The median of the repeats' ratios."""
    return median([a / b for a, b in zip(above, below, strict=True)], 3)


def draw(lines: Sequence[Sequence[str]]) -> list[str]:
    """Cells in columns; all lines have as many."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def verdict(met: bool, text: str) -> str:
    return f"target {'met' if met else 'MISSED'}: {text}"
