"""What the connector counts, on its way to vLLM's log line and to vLLM's /metrics.

    each rank ─► KVKeepStats ─┐                  ┌─► reduce: "KV Transfer metrics: loaded_blocks=12, connected=1"
    each rank ─► KVKeepStats ─┼─ aggregate ─► data
    scheduler ─► KVKeepStats ─┘                  └─► KVKeepPromMetrics.observe: vllm:kvkeep_loaded_blocks_total

`data` crosses processes as pickle and as MessagePack, in older releases as it is: so it is names
and plain ints alone. Counters say what came to pass since the last report, so they are added; one
that is 0 is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvkeep.client.requests import Finished

COUNTERS = {
    "hit_tokens": (
        "Tokens found in the server beyond the local prefix cache and planned to be loaded."
    ),
    "skipped_loads": "Loads skipped because computing was expected to be faster.",
    "skipped_tokens": "Tokens of skipped loads, which were computed.",
    "loaded_blocks": "Blocks loaded from the server.",
    "failed_blocks": "Blocks that failed to load and were computed.",
    "stored_blocks": "Blocks stored in the server.",
    "incomplete_stores": "Stores that did not store all of their blocks.",
    "withdrawn_blocks": "Blocks that the engine reused before they were copied.",
    "lookups": "Lookups sent.",
    "lookup_failures": "Lookups that a request waited for without an answer in time.",
    "dropped_spans": "Spans of traced requests that were not exported.",
    "faults": "Errors inside the connector that were caught.",
}
GAUGES = {
    "connected": "1 if every connection of the engine to the server is up, else 0.",
    "load_fixed_us": "Measured fixed time of a load, in microseconds.",
    "load_block_us": "Measured additional time of a load per block, in microseconds.",
    "prefill_tokens_per_s": "Measured speed of computing prompts, in tokens per second.",
}

_MOST = 2**63 - 1  # what MessagePack and a Prometheus float both take


@dataclass
class KVKeepStats(KVConnectorStats):
    """Counts since the last report. Made of anything: what is unknown in `data`, or no count, is
    left out."""

    data: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = _counts(self.data)

    @classmethod
    def of(cls, **counts: int) -> KVKeepStats:
        """Counts by name, those left out being 0. KeyError for a name that is in neither table: a
        mistake of ours."""
        for name in counts:
            if name not in COUNTERS and name not in GAUGES:
                raise KeyError(name)
        return cls(counts)

    def aggregate(self, other: KVConnectorStats) -> KVKeepStats:
        """Takes the other's counts in, and returns itself: counters are added. Of a gauge the newer
        value stays, but who is connected says nothing of who is not: there it is the least of
        both."""
        for name, value in _counts(other.data).items():
            if name == "connected":
                self.data[name] = min(value, self.data.get(name, value))
            elif name in GAUGES:
                self.data[name] = value
            else:
                self.data[name] = self.data.get(name, 0) + value
        self.data = _counts(self.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: the counters that are not 0, and the gauges."""
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data

    def reset(self) -> None:
        self.data = {}

    def to_dict(self) -> dict[str, int]:
        return dict(self.data)

    def __getitem__(self, name: str) -> dict[str, int]:
        """`data`, by its name: MultiConnector of vLLM 0.28 takes stats for the dict that another
        process would send."""
        return {"data": self.data}[name]


class KVKeepPromMetrics(KVConnectorPromMetrics):
    """Registers a counter or gauge for each name, with a line for each engine. A gauge is 0 until
    its first report."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: self._counter_cls(name=_metric(name), documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        } | {
            # Several API processes may report; Prometheus then shows the newest, as for vLLM's own
            # gauges.
            name: self._gauge_cls(
                name=_metric(name),
                documentation=text,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
            for name, text in GAUGES.items()
        }
        self._by_engine = {
            engine: {name: metric.labels(*values) for name, metric in self._metrics.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: Any, engine_idx: int = 0) -> None:
        """Records one report. What is strange in it is left out: metrics must not end an engine."""
        metrics = self._by_engine.get(engine_idx, {})
        for name, value in _counts(transfer_stats_data).items():
            if name not in metrics:
                continue
            if name in GAUGES:
                metrics[name].set(value)
            else:
                metrics[name].inc(value)


def _metric(name: str) -> str:
    return f"vllm:kvkeep_{name}"


def counts_of(reports: Sequence[Finished]) -> dict[str, int]:
    """What workers' reports say, in numbers."""
    return {
        "failed_blocks": sum(len(report.failed_blocks) for report in reports),
        "stored_blocks": sum(sum(report.stored.values()) for report in reports),
        "incomplete_stores": sum(len(report.incomplete) for report in reports),
        "withdrawn_blocks": sum(report.withdrawn for report in reports),
    }


def _counts(data: object) -> dict[str, int]:
    """What there is to report in `data`, in the tables' order: counters above 0, and gauges, as
    plain ints."""
    given = data if isinstance(data, Mapping) else {}
    counts = {name: _count(given[name]) for name in (*COUNTERS, *GAUGES) if name in given}
    return {
        name: value
        for name, value in counts.items()
        if value is not None and (value or name in GAUGES)
    }


def _count(value: object) -> int | None:
    # An Integral may be numpy's; to ask whether it is one takes longer than all the rest.
    number = value if type(value) is int else int(value) if isinstance(value, Integral) else -1
    return number if 0 <= number <= _MOST else None
