"""What benchmarks of real vLLM share: what can be measured here, whether several engines fit, how
they take turns, and how a run ends.

    GPU       │ weights │ KV │ beside it ║ weights │ KV │ beside it ║ …                 spare │
              └── an equal share for each engine, the same KV ──────┘
    host      │ pool of kvkeep │ pool of a peer │ …             processes, and what is pinned │
    /dev/shm  │ pool of kvkeep │ pool of native │

Engines that do not fit at the same time come one after the other."""

from __future__ import annotations

import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kvkeep.bench.progress import say
from kvkeep.bench.transfer_floor import Gpu, load_gbps
from kvkeep.bench.vllm_setup import GPU_SHARE, SPARE_TOKENS, ServedModel
from kvkeep.errors import KVKeepError, SettingsError
from kvkeep.tiers.free_memory import available_bytes
from kvkeep.units import GIB, MIB

T = TypeVar("T")

CONNECTORS = ("none", "kvkeep", "lmcache", "native")
PEERS = ("lmcache", "native")

# vLLM's processes spin for one second after their last message before they sleep (SpinCondition's
# busy_loop_s). With few cores that second would be taken from the engine whose turn is next. A
# little more: they notice it a little late.
SILENT_AFTER_S = 1.2

# activations of a step and CUDA's context; then staging memory of kvkeep
_BESIDE_KV_BYTES = 3 * GIB + 512 * MIB
_POOLED = 0.75  # of the host's memory
_SHM = Path("/dev/shm")
_IN_SHM = ("kvkeep", "native")

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


# -- the memory of several engines


@dataclass(frozen=True)
class FreeMemory:
    """In bytes, before anything is started."""

    gpu: int
    host: int
    shm: int

    @classmethod
    def find(cls) -> FreeMemory:
        space = os.statvfs(_SHM)
        return cls(_free_gpu_bytes(), available_bytes(), space.f_bavail * space.f_frsize)

    def engine_tokens(self, model: ServedModel, engines: int, shared: float) -> int:
        """Of KV, for each of several that share so much of the GPU."""
        share = int(self.gpu * shared) // engines
        return (share - model.weight_bytes - _BESIDE_KV_BYTES) // model.kv_token_bytes

    def hold(self, pools: Iterable[tuple[str, int]]) -> bool:
        """Whether there is room for pools in the host, each named by its connector."""
        sizes = list(pools)
        in_shm = sum(size for name, size in sizes if name in _IN_SHM)
        return sum(size for _, size in sizes) <= self.host * _POOLED and in_shm <= self.shm

    def say_too_little(self, engines: int) -> None:
        """To whoever waits for `engines` that were to live at the same time."""
        if engines == 1:
            return
        say(
            f"{engines} engines at a time do not fit, so they come one after the other: free are "
            f"{self.gpu / GIB:.0f} GiB of the GPU, {self.host / GIB:.0f} GiB of the host and {self.shm / GIB:.0f} GiB "
            f"in {_SHM}"
        )


def _free_gpu_bytes() -> int:
    """Asked in a process of its own: a context would stay in ours, and take half a GiB."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.mem_get_info()[0])"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KVKeepError(
            f"torch does not say how much memory the GPU has: {done.stderr.strip()[-500:]}"
        )
    return int(done.stdout)


def fit_together(
    model: ServedModel,
    longest_prompt: int,
    connectors: Sequence[str],
    pool_bytes: int,
    free: FreeMemory,
) -> bool:
    """Whether an engine for each connector can be alive at the same time, with the longest prompt
    in its KV, and a pool of its own, unless that is `none`. If not, that is said."""
    tokens = free.engine_tokens(model, len(connectors), GPU_SHARE)
    pools = [(name, pool_bytes) for name in connectors if name != "none"]
    fit = tokens >= longest_prompt + SPARE_TOKENS and free.hold(pools)
    if not fit:
        free.say_too_little(len(connectors))
    return fit


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


def rotated(engines: Sequence[T], turn: int) -> list[T]:
    """The engines in the order of a turn: another one begins each turn."""
    first = turn % max(len(engines), 1)
    return [*engines[first:], *engines[:first]]


@contextmanager
def peers_may_fail(
    name: str, left_out: dict[str, str], scenario: str = "", *, named: bool = False
) -> Iterator[None]:
    """Leaves the connector `name` out if the block fails and it is a peer that was not asked for
    by name. All other failures end the run."""
    try:
        yield
    except KVKeepError as error:
        if name not in PEERS or named:
            raise
        left_out.setdefault(name, f"{scenario}: {error.message}" if scenario else error.message)
        where = f" of {scenario}" if scenario else ""
        say(f"connector {name} is left out{where}: {error.message}")


# -- its numbers


def median(values: Sequence[float], digits: int) -> float | None:
    return round(statistics.median(values), digits) if values else None


def rounded(values: Sequence[float | None], digits: int) -> list[float | None]:
    return [None if value is None else round(value, digits) for value in values]


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float | None:
    """The median of the repeats' ratios."""
    return median([a / b for a, b in zip(above, below, strict=True)], 3)
