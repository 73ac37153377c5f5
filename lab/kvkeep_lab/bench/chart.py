"""A chart of what `bench transfer`, `vllm` or `vllm-load` measured, from its JSON: an SVG file that
needs nothing else.

    transfer   a group of bars for each model (on a CPU, each size of a block): the fraction of the floor that a store,
               a load and both at once reach, without verification (pale) and with it
    vllm       a group for each length of a prompt, on a scale of its own: the time to the first token, by connector
    vllm-load  a group for each scenario, likewise: throughput, or the time between tokens at the 99th percentile

The floor is a dashed line. For vLLM's external hits it is a local hit without a connector, and the
KV's bytes at the rate of a plain copy, which must be given; for all else it is what the engine
without a connector takes. A chart has the colours of the reader's screen, light or dark, and a
ground of its own, so that it can be read on any."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from kvkeep.errors import SettingsError
from kvkeep.units import KIB, format_size

# What options mean here.
OPTIONS = {
    "file": "What bench transfer, vllm or vllm-load printed with --json.",
    "out": "The SVG file to write.",
    "title": "What stands above; auto says what was measured.",
    "case": "Of vLLM: external_hit, local_hit or cold.",
    "floor_gbps": "Of vLLM's external hits: what a plain copy reaches. 0 draws no floor.",
    "token_bytes": "Of vLLM's external hits: KV of one token.",
}

CASES = {
    "external_hit": "Time to first token, prompt found in the cache (external hit)",
    "local_hit": "Time to first token, prompt found in vLLM's own cache (local hit)",
    "cold": "Time to first token, prompt found nowhere (cold)",
}
_SCENARIOS = {
    "mixed": "half of it found",
    "fresh": "nothing to find",
    "decode_loads": "decoding while prompts are loaded",
    "decode_stores": "decoding while prompts are stored",
}
_DIRECTIONS = {"store": 0, "load": 1, "both": 2}
_CONNECTORS = {
    "kvkeep": 0,
    "native": 1,
    "lmcache": 2,
    "none": 3,
}  # each has its colour, whichever are there

# The colours differ in lightness too, for those who do not tell them apart by hue.
_COLOURS = ("#2563eb", "#0d9488", "#d97706", "#6b7280", "#9333ea")
_COLOURS_DARK = ("#60a5fa", "#2dd4bf", "#fbbf24", "#9ca3af", "#c084fc")

_LEFT, _TOP, _PLOT_HEIGHT = 32, 112, 240
_BAR, _GAP, _GROUP_GAP = 44, 6, 48
_LEAST_WIDTH = 560


# -- what is drawn


@dataclass(frozen=True)
class Bar:
    """`series` chooses the colour; `label` stands above it."""

    series: str
    value: float
    label: str
    pale: bool = False


@dataclass(frozen=True)
class Group:
    """Bars side by side, as high as their share of `full`. `note` stands below the name."""

    name: str
    bars: Sequence[Bar]
    full: float
    floor: float | None = None
    floor_label: str = ""
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """`series` are the names in the key, each with the number of its colour."""

    title: str
    subtitle: str
    series: Mapping[str, int]
    groups: Sequence[Group]


def run(
    file: str = "result.json",
    out: str = "chart.svg",
    title: str = "auto",
    case: str = "external_hit",
    floor_gbps: float = 0.0,
    token_bytes: int = 128 * KIB,
) -> dict[str, Any]:
    """Draws the result in `file` into `out`. SettingsError for what is no result of these
    benchmarks."""
    try:
        result = json.loads(Path(file).read_text())
        chart = chart_of(result, case, floor_gbps, token_bytes)
        if not all(group.full > 0 for group in chart.groups):
            raise ValueError("all figures of a group are 0")
    except OSError as error:
        raise SettingsError(f"--file {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "give a file with what kvkeep bench transfer, vllm or vllm-load printed with --json"
        raise SettingsError(
            f"--file {file} is no result of one of these benchmarks: {error!r}", hint
        ) from error
    if title != "auto":
        chart = Chart(title, chart.subtitle, chart.series, chart.groups)
    try:
        Path(out).write_text(draw(chart))
    except OSError as error:
        raise SettingsError(f"--out {out}: {error.strerror}") from error
    return {
        "out": out,
        "groups": len(chart.groups),
        "bars": sum(len(group.bars) for group in chart.groups),
    }


def chart_of(result: Mapping[str, Any], case: str, floor_gbps: float, token_bytes: int) -> Chart:
    """The chart that suits a result."""
    rows = result["rows"]
    if not rows:
        raise ValueError("it has no rows")
    if "connector" not in rows[0]:
        return transfer_chart(result)
    if "scenario" in rows[0]:
        return load_chart(result)
    if case not in CASES:
        raise SettingsError(f'--case "{case}": expected {", ".join(CASES)}')
    return vllm_chart(result, case, floor_gbps, token_bytes)


def transfer_chart(result: Mapping[str, Any]) -> Chart:
    """Fractions of the floor, all on one scale."""
    named: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        named.setdefault(
            row.get("geometry") or f"blocks of {format_size(row['block_bytes'])}", []
        ).append(row)
    full = max(1.0, *(row["fraction_of_floor"] for row in result["rows"]))
    groups = []
    for name, rows in named.items():
        rows = sorted(rows, key=lambda row: (_DIRECTIONS[row["direction"]], row["verify"]))
        bars = [
            Bar(
                row["direction"],
                row["fraction_of_floor"],
                f"{row['fraction_of_floor']:.2f}",
                not row["verify"],
            )
            for row in rows
        ]
        verified = [f"{row['direction']} {row['gbps']:.1f}" for row in rows if row["verify"]]
        note = f"GB/s: {', '.join(verified)}"
        groups.append(Group(name, bars, full, floor=1.0, note=note))
    there = {row["direction"] for row in result["rows"]}
    series = {way: colour for way, colour in _DIRECTIONS.items() if way in there}
    where = f"{result.get('gpu') or 'CPU'}, plain copy {result['floor_gbps']:g} GB/s; pale: without verification"
    return Chart("Speed of transfers, as a fraction of a plain copy", where, series, groups)


def vllm_chart(result: Mapping[str, Any], case: str, floor_gbps: float, token_bytes: int) -> Chart:
    """Milliseconds, each length of a prompt on a scale of its own."""
    lengths = list(dict.fromkeys(row["prompt_tokens"] for row in result["rows"]))
    groups = []
    for length in lengths:
        rows = {row["connector"]: row for row in result["rows"] if row["prompt_tokens"] == length}
        times = {name: row[f"{case}_ms"] for name, row in rows.items()}
        bars = _bars(times)
        floor = _floor_ms(rows["none"], case, floor_gbps, token_bytes) if "none" in rows else None
        note = (
            f"recomputing: {rows['none']['cold_ms']:,.0f} ms"
            if case != "cold" and "none" in rows
            else ""
        )
        if bars:
            full = max([bar.value for bar in bars] + [floor or 0.0])
            label = "" if floor is None else f"floor {floor:,.1f} ms"
            groups.append(Group(f"{length:,} tokens", bars, full, floor, label, note))
    if not groups:
        raise ValueError(f"no row has {case}_ms")
    subtitle = f"{_engine(result)}; ms, less is better, a scale for each length"
    return Chart(CASES[case], subtitle, _connectors(groups), groups)


def load_chart(result: Mapping[str, Any]) -> Chart:
    """Tokens a second or milliseconds, each scenario on a scale of its own. The floor is the engine
    without a connector, which finds in its own cache what others load while requests decode."""
    groups = []
    for scenario in dict.fromkeys(row["scenario"] for row in result["rows"]):
        key, note = "output_tokens_per_s", "output tokens/s, more is better"
        if scenario.startswith("decode"):
            key, note = "itl_p99_ms", "ms between two tokens, 99th percentile, less is better"
        values = {
            row["connector"]: row[key] for row in result["rows"] if row["scenario"] == scenario
        }
        if bars := _bars(values):
            name, full = _SCENARIOS.get(scenario, scenario), max(bar.value for bar in bars)
            groups.append(Group(name, bars, full, values.get("none"), note=note))
    if not groups:
        raise ValueError("no row has a figure")
    subtitle = f"{_engine(result)}; medians of {result['repeats']} repeats, a scale for each"
    return Chart("Under load", subtitle, _connectors(groups), groups)


def _bars(values: Mapping[str, float | None]) -> list[Bar]:
    """One for each connector that has a figure."""
    there = {name: value for name, value in values.items() if value is not None}
    return [
        Bar(name, value, f"{value:,.0f}" if value >= 100 else f"{value:.1f}")
        for name, value in there.items()
    ]


def _engine(result: Mapping[str, Any]) -> str:
    version = [f"vLLM {result['vllm']}"] if result.get("vllm") else []
    return ", ".join([str(result[key]) for key in ("gpu", "model") if result.get(key)] + version)


def _connectors(groups: Sequence[Group]) -> dict[str, int]:
    return {bar.series: _CONNECTORS.get(bar.series, 4) for group in groups for bar in group.bars}


def _floor_ms(
    none: Mapping[str, Any], case: str, floor_gbps: float, token_bytes: int
) -> float | None:
    """None where there is nothing to compute it from."""
    if case != "external_hit":
        return float(none[f"{case}_ms"])
    if not floor_gbps:
        return None
    return float(none["local_hit_ms"] + none["prompt_tokens"] * token_bytes / floor_gbps / 1e6)


# -- how


def draw(chart: Chart) -> str:
    """The chart as an SVG document."""
    widths = [_group_width(group) for group in chart.groups]
    text_width = int(6.6 * max(len(chart.subtitle), len(chart.title) * 1.4))
    width = max(
        _LEAST_WIDTH,
        text_width + 2 * _LEFT,
        sum(widths) + (len(widths) - 1) * _GROUP_GAP + 2 * _LEFT,
    )
    height = _TOP + _PLOT_HEIGHT + 72
    spare = width - 2 * _LEFT - sum(widths) - (len(widths) - 1) * _GROUP_GAP
    at = _LEFT + spare / 2
    parts = [
        _text(_LEFT, 36, chart.title, "title"),
        _text(_LEFT, 57, chart.subtitle, "soft"),
        *_key(chart.series),
    ]
    for group, group_width in zip(chart.groups, widths, strict=True):
        parts += _draw_group(group, chart.series, at, group_width)
        at += group_width + _GROUP_GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(chart.title)}">'
    )
    ground = (
        f'<rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>'
    )
    return "\n".join([head, f"<style>{_style()}</style>", ground, *parts, "</svg>", ""])


def _draw_group(group: Group, series: Mapping[str, int], left: float, width: float) -> list[str]:
    bottom = _TOP + _PLOT_HEIGHT
    floor = None if group.floor is None else _PLOT_HEIGHT * group.floor / group.full
    bars, labels = [], []
    # The bars stand in the middle of what names and notes need.
    at = left + (width - _bars_width(group)) / 2
    for bar in group.bars:
        tall = _PLOT_HEIGHT * bar.value / group.full
        classes = f"bar c{series[bar.series]}" + " pale" * bar.pale
        described = f"{group.name}, {bar.series}: {bar.label}"
        bars.append(
            f'<rect class="{classes}" x="{at:.1f}" y="{bottom - tall:.2f}" width="{_BAR}" height="{tall:.2f}" rx="3">'
            f"<title>{escape(described)}</title></rect>"
        )
        labels.append(_text(at + _BAR / 2, bottom - _label_height(tall, floor), bar.label, "value"))
        at += _BAR + _GAP
    lines = [_line(left, left + width, bottom, "axis")]
    if floor is not None:
        lines.append(_line(left, left + width, bottom - floor, "floor"))
    middle = left + width / 2
    notes = [note for note in (group.floor_label, group.note) if note]
    labels.append(_text(middle, bottom + 22, group.name, "name"))
    labels += [
        _text(middle, bottom + 40 + 17 * line, note, "note") for line, note in enumerate(notes)
    ]
    return [*bars, *lines, *labels]


def _label_height(tall: float, floor: float | None) -> float:
    """Just above the bar, or above the floor where that would cross the label."""
    crosses = floor is not None and tall <= floor <= tall + 18
    return (floor if floor is not None and crosses else tall) + 6


def _line(x1: float, x2: float, y: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y:.2f}" y2="{y:.2f}"/>'


def _bars_width(group: Group) -> float:
    return len(group.bars) * (_BAR + _GAP) - _GAP


def _group_width(group: Group) -> float:
    return max(
        _bars_width(group) + 16, 6.4 * max(len(group.name), len(group.note), len(group.floor_label))
    )


def _key(series: Mapping[str, int]) -> list[str]:
    parts, at = [], float(_LEFT)
    for name, colour in series.items():
        parts.append(f'<rect class="c{colour}" x="{at:.1f}" y="71" width="12" height="12" rx="3"/>')
        parts.append(_text(at + 18, 81, name, "soft"))
        at += 18 + 7.2 * len(name) + 20
    return [*parts, _line(at, at + 22, 77, "floor"), _text(at + 28, 81, "floor", "soft")]


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _style() -> str:
    def colours(ground: str, edge: str, ink: str, soft: str, fills: Sequence[str]) -> str:
        return (
            f".ground{{fill:{ground};stroke:{edge}}}text{{fill:{ink}}}.soft,.note{{fill:{soft}}}"
            f".axis{{stroke:{soft}}}.floor{{stroke:{ink}}}"
            + "".join(f".c{number}{{fill:{fill}}}" for number, fill in enumerate(fills))
        )

    return (
        'text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}'
        "text.title{font-size:17px;font-weight:600}.value,.name,.note{text-anchor:middle}"
        "text.name{font-weight:600}text.value{font-size:11px}text.note{font-size:11px}.pale{opacity:.5}"
        ".axis{stroke-width:1}.floor{stroke-width:1.5;stroke-dasharray:5 4}"
        + colours("#ffffff", "#e5e7eb", "#111827", "#6b7280", _COLOURS)
        + "@media (prefers-color-scheme:dark){"
        + colours("#0d1117", "#30363d", "#f3f4f6", "#9ca3af", _COLOURS_DARK)
        + "}"
    )
