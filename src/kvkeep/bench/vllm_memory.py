"""What several engines that share a GPU get of it, and their connectors' pools of the host.

    GPU       │ weights │ KV │ beside it ║ weights │ KV │ beside it ║ …                 spare │
              └── an equal share for each engine, the same KV ──────┘
    host      │ pool of kvkeep │ pool of a peer │ …             processes, and what is pinned │
    /dev/shm  │ pool of kvkeep │ pool of native │

An engine with less KV loses a prefix sooner, so there need be fewer of them, and pools may be
smaller. Engines that do not fit at all come one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvkeep.bench.vllm_session import say
from kvkeep.bench.vllm_setup import GPU_SHARE, SPARE_TOKENS, ServedModel
from kvkeep.errors import KVKeepError
from kvkeep.tiers.free_memory import available_bytes
from kvkeep.units import GIB, MIB

_BESIDE_KV_BYTES = (
    3 * GIB + 512 * MIB
)  # activations of a step and CUDA's context; then staging memory of kvkeep
_POOLED = 0.75  # of the host's memory
_SHM = Path("/dev/shm")
_IN_SHM = ("kvkeep", "native")


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
