"""A plan as a picture: the time that each memory size saves, as SVG without any dependency."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log2

from kvkeep.bench.plan import Plan, Row
from kvkeep.units import format_duration, format_size

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 690, 60, 350
_LINE, _DISK, _INK, _GRID = "#2563eb", "#d97706", "#1f2937", "#e5e7eb"


def draw(plan: Plan) -> str:
    """The SVG document. Memory is on a logarithmic axis; a disk is drawn at its memory."""
    memory = [row for row in plan.rows if not row.disk_blocks]
    most_s = max(row.saved_s for row in plan.rows) or 1.0
    low, high = log2(memory[0].memory_blocks), log2(memory[-1].memory_blocks)

    def x(row: Row) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (log2(row.memory_blocks) - low) / ((high - low) or 1.0)

    def y(row: Row) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * row.saved_s / most_s

    parts = [_text(_LEFT, 28, "Time saved by memory", size=16), *_grid(most_s)]
    points = " ".join(f"{x(row):.1f},{y(row):.1f}" for row in memory)
    parts.append(f'<polyline points="{points}" fill="none" stroke="{_LINE}" stroke-width="2"/>')
    for row in memory:
        parts.append(_dot(x(row), y(row), _LINE, row))
        parts.append(_text(x(row), _BOTTOM + 20, format_size(row.memory_bytes), "middle"))
    for row in plan.rows[len(memory) :]:
        parts.append(_dot(x(row), y(row), _DISK, row))
    parts += [_knee(x(row), y(row)) for row in memory if row.knee]
    parts.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 44, "memory", "middle"))
    parts.append(_text(_RIGHT, 28, "blue: memory, orange: with a disk", "end"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="12">\n<title>{escape(plan.words)}</title>\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def bars(rows: Sequence[Row], width: int) -> list[str]:
    """One bar a row for the terminal, of its share of the most that is saved."""
    most_s = max((row.saved_s for row in rows), default=0.0) or 1.0
    return [
        "█" * round(width * row.saved_s / most_s) + (" ◄ knee" if row.knee else "") for row in rows
    ]


def _grid(most_s: float) -> list[str]:
    parts = []
    for part in range(5):
        at = _BOTTOM - (_BOTTOM - _TOP) * part / 4
        parts.append(
            f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="{_GRID}"/>'
        )
        parts.append(_text(_LEFT - 8, at + 4, format_duration(most_s * part / 4), "end"))
    return parts


def _dot(x: float, y: float, colour: str, row: Row) -> str:
    disk = f", disk {format_size(row.disk_bytes)}" if row.disk_blocks else ""
    said = f"memory {format_size(row.memory_bytes)}{disk}: {row.hit_rate:.1%} found"
    title = f"<title>{escape(said)}, {format_duration(row.saved_s)} saved</title>"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{title}</circle>'


def _knee(x: float, y: float) -> str:
    ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="{_INK}"/>'
    return f"{ring}\n{_text(x, y - 16, 'knee', 'middle')}"


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{_INK}">{escape(text)}</text>'
    )
