"""The connector's counts in vLLM's own classes: from a rank to the log line, and to what Prometheus
reads."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as of_vllm
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from kvkeep.vllm.stats import COUNTERS, GAUGES, KVKeepPromMetrics, KVKeepStats

ALL = {name: index for index, name in enumerate((*COUNTERS, *GAUGES), start=1)}
STRANGE: list[Any] = [
    None,
    [],
    "text",
    7,
    {1: 2},
    {"other": 1},
    {"lookups": "3"},
    {"lookups": 1.5},
    {"lookups": None},
]
STRANGE += [
    {"lookups": -1},
    {"lookups": 10**400},
    {"lookups": [1]},
    {"connected": -1},
    {"connected": float("nan")},
]


class Connector:
    """The two hooks by which vLLM comes to these classes."""

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVKeepStats:
        return KVKeepStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVKeepPromMetrics:
        return KVKeepPromMetrics(*args)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A vLLM config that names our connector."""
    monkeypatch.setattr(of_vllm.KVConnectorFactory, "get_connector_class", lambda _: Connector)
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="Connector"))


# --- KVKeepStats ----------------------------------------------------------------------------------


def test_the_names_are_those_of_the_documentation() -> None:
    assert not COUNTERS.keys() & GAUGES.keys()
    assert all(text.endswith(".") for text in (COUNTERS | GAUGES).values())


def test_counters_are_added_and_a_gauge_is_the_least() -> None:
    first, second = (
        KVKeepStats.of(lookups=2, hit_tokens=64, connected=1),
        KVKeepStats.of(lookups=3, faults=1),
    )
    both = first.aggregate(second)
    assert isinstance(both, KVKeepStats)
    assert both.data == {"hit_tokens": 64, "lookups": 5, "faults": 1, "connected": 1}
    assert (
        both.aggregate(KVKeepStats.of(connected=0))
        .aggregate(KVKeepStats.of(connected=1))
        .data["connected"]
        == 0
    )
    assert second.data == {"lookups": 3, "faults": 1}


def test_of_what_is_believed_the_newer_stays() -> None:
    stats = KVKeepStats.of(load_block_us=200, prefill_tokens_per_s=9_000)
    stats.aggregate(KVKeepStats.of(load_block_us=300)).aggregate(KVKeepStats.of(lookups=1))
    assert stats.data == {"lookups": 1, "load_block_us": 300, "prefill_tokens_per_s": 9_000}


def test_aggregating_leaves_what_it_was_made_of_alone() -> None:
    wire = {"lookups": 1}
    KVKeepStats(wire).aggregate(KVKeepStats.of(lookups=1))
    assert wire == {"lookups": 1}


def test_the_log_line_has_what_is_not_zero_and_the_gauge() -> None:
    stats = KVKeepStats.of(faults=2, loaded_blocks=5, stored_blocks=0, connected=0)
    assert list(stats.reduce().items()) == [("loaded_blocks", 5), ("faults", 2), ("connected", 0)]


def test_empty_is_nothing_counted_and_no_gauge() -> None:
    assert (
        KVKeepStats().is_empty()
        and KVKeepStats.of().is_empty()
        and KVKeepStats.of(lookups=0).is_empty()
    )
    assert not KVKeepStats.of(lookups=1).is_empty() and not KVKeepStats.of(connected=0).is_empty()
    stats = KVKeepStats.of(**ALL)
    stats.reset()
    assert stats.is_empty() and stats == KVKeepStats()


def test_a_name_that_is_not_in_the_tables_is_our_mistake() -> None:
    with pytest.raises(KeyError):
        KVKeepStats.of(lokups=1)


def test_numbers_become_plain_ints() -> None:
    stats = KVKeepStats.of(lookups=np.int64(3), connected=True)
    assert stats.data == {"lookups": 3, "connected": 1}
    assert {type(value) for value in stats.data.values()} == {int}


@pytest.mark.parametrize("data", STRANGE, ids=repr)
def test_what_is_strange_is_left_out(data: Any) -> None:
    assert KVKeepStats(data).is_empty()
    assert KVKeepStats.of(faults=1).aggregate(of_vllm.KVConnectorStats(data)).data == {"faults": 1}


def test_a_multi_connector_may_take_it_for_the_dict_that_another_process_sends() -> None:
    stats = KVKeepStats.of(hit_tokens=2)
    assert stats["data"] == msgspec.to_builtins(stats)["data"] == {"hit_tokens": 2}


def test_it_crosses_processes_in_either_way() -> None:
    stats = KVKeepStats.of(**ALL)
    assert pickle.loads(pickle.dumps(stats)) == stats
    for payload in (stats.to_dict(), stats.data):  # newer and older releases
        assert (
            KVKeepStats(msgspec.msgpack.decode(msgspec.msgpack.encode(payload)))
            == stats
            == KVKeepStats.of(**ALL)
        )


def test_vllms_logger_adds_reports_up_and_starts_anew(config: Any) -> None:
    logging = KVConnectorLogging(config.kv_transfer_config)
    said: list[str] = []
    logging.observe(KVKeepStats.of(loaded_blocks=2, connected=1).to_dict())
    logging.observe(KVKeepStats.of(loaded_blocks=3, connected=0).to_dict())
    logging.log(lambda text, *values: said.append(text % values))
    logging.log(lambda text, *values: said.append(text % values))
    assert said == ["KV Transfer metrics: loaded_blocks=5, connected=0"]


# --- KVKeepPromMetrics ----------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """Where vLLM's metrics go, instead of the process-wide one."""
    registry = CollectorRegistry()
    for name, kind in (
        ("_gauge_cls", Gauge),
        ("_counter_cls", Counter),
        ("_histogram_cls", Histogram),
    ):

        def make(*args: Any, kind: Any = kind, **words: Any) -> Any:
            return kind(*args, registry=registry, **words)

        monkeypatch.setattr(KVConnectorProm, name, staticmethod(make))
    return registry


@pytest.fixture
def prom(config: Any, registry: CollectorRegistry) -> KVConnectorProm:
    return KVConnectorProm(config, ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]})


def shown(registry: CollectorRegistry, engine: int) -> dict[str, float]:
    labels = {"model_name": "tiny", "engine": str(engine)}
    samples = [
        sample
        for family in registry.collect()
        for sample in family.samples
        if sample.labels == labels
    ]
    return {sample.name: sample.value for sample in samples if not sample.name.endswith("_created")}


def test_every_name_is_shown_for_each_engine_from_the_start(
    prom: KVConnectorProm, registry: CollectorRegistry
) -> None:
    names = [f"vllm:kvkeep_{name}_total" for name in COUNTERS] + [
        f"vllm:kvkeep_{name}" for name in GAUGES
    ]
    assert shown(registry, 0) == shown(registry, 1) == dict.fromkeys(names, 0)
    assert {family.documentation for family in registry.collect()} == {
        *COUNTERS.values(),
        *GAUGES.values(),
    }


def test_reports_count_for_their_engine(prom: KVConnectorProm, registry: CollectorRegistry) -> None:
    prom.observe(KVKeepStats.of(**ALL).to_dict(), 1)
    prom.observe(KVKeepStats.of(lookups=10, connected=0).to_dict(), 1)
    assert not any(shown(registry, 0).values())
    expected = {f"vllm:kvkeep_{name}_total": ALL[name] for name in COUNTERS}
    expected |= {f"vllm:kvkeep_{name}": ALL[name] for name in GAUGES} | {"vllm:kvkeep_connected": 0}
    expected["vllm:kvkeep_lookups_total"] += 10
    assert shown(registry, 1) == expected


@pytest.mark.parametrize("data", STRANGE, ids=repr)
def test_strange_reports_change_nothing_and_do_not_raise(
    prom: KVConnectorProm, registry: CollectorRegistry, data: Any
) -> None:
    before = shown(registry, 0)
    prom.observe(data, 0)
    prom.observe({"lookups": 1}, 7)  # an engine that nobody announced
    assert shown(registry, 0) == before
