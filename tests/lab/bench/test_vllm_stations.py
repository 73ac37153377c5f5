"""Which engines it takes, and which of them live at the same time."""

from __future__ import annotations

import pytest

from kvkeep.bench.vllm_session import Choice
from kvkeep.errors import SettingsError
from kvkeep_lab.bench.vllm_stations import Plan, Station

DECODE = ("decode_loads", "decode_stores")
ALL = ("none", "kvkeep", "native")


def plan(
    device: str = "cpu",
    connectors: tuple[str, ...] = ("none", "kvkeep"),
    scenarios: str = "mixed,fresh,decode",
    named: bool = False,
    interleave: bool = True,
    eager: bool = False,
) -> Plan:
    return Plan.make(Choice(device, connectors, named, {}), scenarios, 1, 1, interleave, eager)


def test_on_a_cpu_all_engines_live_together() -> None:
    none, under_load = (
        Station("none", ("mixed", "fresh", *DECODE)),
        Station("kvkeep", ("mixed", "fresh")),
    )
    assert plan().groups == [[none, under_load, Station("kvkeep", DECODE, prefix_cache=False)]]
    assert plan().interleave


def test_on_a_gpu_they_take_turns_or_come_one_after_the_other() -> None:
    apart, together = plan("cuda", ALL, interleave=False), plan("cuda", ALL)
    assert apart.groups == [[station] for station in apart.stations] and not apart.interleave
    assert together.groups == [apart.stations] and together.interleave


def test_graphs_are_a_gpus() -> None:
    assert plan("cuda").graphs and not plan("cuda", eager=True).graphs and not plan("cpu").graphs
    with pytest.raises(SettingsError, match="--eager needs a GPU"):
        plan("cpu", eager=True)


def test_peers_decode_only_if_named() -> None:
    stations = [(each.connector, each.decodes) for each in plan("cuda", ALL).stations]
    assert stations == [("none", False), ("kvkeep", False), ("kvkeep", True), ("native", False)]
    named = plan("cuda", ("none", "native"), "decode", named=True).stations
    assert named == [Station("none", DECODE), Station("native", DECODE, prefix_cache=False)]


@pytest.mark.parametrize("scenarios", ["", "mixed,load", "decode_loads"])
def test_a_wrong_scenario_is_named(scenarios: str) -> None:
    with pytest.raises(
        SettingsError, match=r'--scenarios ".*": expected some of mixed, fresh, decode'
    ):
        plan(scenarios=scenarios)


def test_conversations_are_measured_alone() -> None:
    assert plan(scenarios="conversations").scenarios == ("conversations",)
    with pytest.raises(SettingsError, match="conversations is measured alone"):
        plan(scenarios="mixed,conversations")
