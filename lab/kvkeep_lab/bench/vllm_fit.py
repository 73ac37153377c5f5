"""How much traffic fits a GPU and a host when the engines of all connectors are alive at the same
time.

An engine with less KV memory loses a prefix sooner, so there need be fewer prefixes, and pools may
be smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvkeep.bench.vllm_session import FreeMemory
from kvkeep_lab.bench.vllm_stations import DECODE, Station
from kvkeep_lab.bench.vllm_traffic import Traffic

_SHARED = 0.97  # of the GPU's memory; a peer's server has a context and buffers there too


def pool_bytes(traffic: Traffic, station: Station) -> int:
    """What its connector keeps outside the engine."""
    if station.connector == "none":
        return 0
    return traffic.decode_pool_bytes if station.decodes else traffic.pool_bytes


def fitted(traffic: Traffic, stations: Sequence[Station], free: FreeMemory) -> Traffic | None:
    """The traffic for engines that all live at the same time: as much KV as fits for each, not more
    than one alone has, and as many prefixes as have room in pools. None if that is too little to
    measure anything, and then that is said."""
    tokens = free.engine_tokens(traffic.model, len(stations), _SHARED)
    decodes = any(scenario in DECODE for station in stations for scenario in station.scenarios)
    least = traffic.sizes.least_engine_tokens(decodes)
    for prefixes in traffic.sizes.fewer_prefixes():
        sizes = replace(traffic.sizes, prefixes=prefixes)
        sizes = replace(
            sizes, engine_tokens=min(sizes.engine_tokens, sizes.lost_after_tokens, tokens)
        )
        smaller = replace(traffic, sizes=sizes)
        pools = ((station.connector, pool_bytes(smaller, station)) for station in stations)
        if sizes.engine_tokens >= least and free.hold(pools):
            return smaller
    free.say_too_little(len(stations))
    return None
