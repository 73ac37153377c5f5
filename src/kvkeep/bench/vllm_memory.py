"""What several engines that share a GPU get of it, and their connectors' pools of the host.

    GPU       │ weights │ KV │ beside it ║ weights │ KV │ beside it ║ …                 spare │
              └── an equal share for each engine, the same KV ──────┘
    host      │ pool of kvkeep │ pool of a peer │ …             processes, and what is pinned │
    /dev/shm  │ pool of kvkeep │

An engine with less KV loses a prefix sooner, so there need be fewer of them, and pools may be smaller.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvkeep.bench.vllm_stations import DECODE, Station
from kvkeep.bench.vllm_traffic import Traffic
from kvkeep.errors import KVKeepError, SettingsError
from kvkeep.server.host_memory import available_bytes
from kvkeep.units import GIB, MIB

_SHARED = 0.97  # of the GPU's memory; a peer's server has a context and buffers there too
_BESIDE_KV_BYTES = 3 * GIB + 512 * MIB  # activations of a step and CUDA's context; then staging memory of kvkeep
_POOLED = 0.75  # of the host's memory
_SHM = Path("/dev/shm")


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


def _free_gpu_bytes() -> int:
    """Asked in a process of its own: a context would stay in ours, and take half a GiB."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.mem_get_info()[0])"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KVKeepError(f"torch does not say how much memory the GPU has: {done.stderr.strip()[-500:]}")
    return int(done.stdout)


def pool_bytes(traffic: Traffic, station: Station) -> int:
    """What its connector keeps outside the engine."""
    if station.connector == "none":
        return 0
    return traffic.decode_pool_bytes if station.decodes else traffic.pool_bytes


def fitted(traffic: Traffic, stations: Sequence[Station], free: FreeMemory) -> Traffic:
    """The traffic for engines that all live at the same time: as much KV as fits for each, not more than one alone has,
    and as many prefixes as have room in pools. SettingsError if that is too little to measure anything."""
    share = int(free.gpu * _SHARED) // len(stations)
    tokens = (share - traffic.model.weight_bytes - _BESIDE_KV_BYTES) // traffic.model.kv_token_bytes
    decodes = any(scenario in DECODE for station in stations for scenario in station.scenarios)
    least = traffic.sizes.least_engine_tokens(decodes)
    for prefixes in traffic.sizes.fewer_prefixes():
        sizes = replace(traffic.sizes, prefixes=prefixes)
        sizes = replace(sizes, engine_tokens=min(sizes.engine_tokens, sizes.lost_after_tokens, tokens))
        smaller = replace(traffic, sizes=sizes)
        pools = [(station.connector, pool_bytes(smaller, station)) for station in stations]
        in_shm = sum(size for name, size in pools if name == "kvkeep")
        fit = sum(size for _, size in pools) <= free.host * _POOLED and in_shm <= free.shm
        if fit and sizes.engine_tokens >= least:
            return smaller
    raise SettingsError(
        f"{len(stations)} engines at a time do not fit: free are {free.gpu / GIB:.0f} GiB of the GPU, "
        f"{free.host / GIB:.0f} GiB of the host and {free.shm / GIB:.0f} GiB in {_SHM}",
        "name fewer --connectors or --scenarios, or leave out --interleave",
    )
