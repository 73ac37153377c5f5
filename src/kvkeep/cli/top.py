"""`kvkeep top`: a running server at a glance, once a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvkeep.cli.admin import headline, time_since
from kvkeep.cli.explain import missed
from kvkeep.cli.output import console, counted, table_of
from kvkeep.cli.remote import Server, asks_server
from kvkeep.cli.tenants import FIGURE_COLUMNS, figure_cells
from kvkeep.cli.tiers import tier_line
from kvkeep.errors import RequestError, SettingsError, Unavailable
from kvkeep.units import format_size

_MOST_ROWS = 8  # of each table: all of it is to fit a screen
_COUNTED = ("lookups", "lookup_blocks", "hit_blocks", "stored_blocks", "stored_bytes", "evictions")
_FIGURES = ("tokens_loaded", "tokens_computed", "saved_s")


@asks_server
def top(
    server: Server,
    every: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.1, max=3600)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print, and end.")] = False,
) -> None:
    """Show a running server live: hits, misses, time saved, throughput, memory, tiers, sessions."""
    if not (once or server.as_json or sys.stdout.isatty()):
        raise SettingsError("stdout is no terminal", "use --once, or --json")
    before, at = _look(server)
    if once or server.as_json:
        time.sleep(every)
        now, later = _look(server)
        said = view(before, now, later - at)
        server.show(said, lambda: console().print(screen(said)))
        return
    try:
        with Live(console=console(), screen=True, auto_refresh=False) as live:
            live.update(screen(view(before, before, every)), refresh=True)
            while True:
                time.sleep(every)
                try:
                    now, later = _look(server)
                except (Unavailable, RequestError) as error:  # it may be restarting
                    live.update(Text(f"{error.message}\n\nasking again; Ctrl-C ends"), refresh=True)
                    continue
                live.update(screen(view(before, now, later - at)), refresh=True)
                before, at = now, later
    except KeyboardInterrupt:
        pass


def _look(server: Server) -> tuple[dict[str, Any], float]:
    said: dict[str, Any] = server.ask("/v1/status", needs_token=True)
    return said, time.monotonic()


def view(before: dict[str, Any], now: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What is shown: sums since the server started, and rates a second since `before`. The rates of
    a server that was restarted meanwhile are counted from zero."""
    is_same = before["epoch"] == now["epoch"]
    rates = {}
    for part, names in (("counters", _COUNTED), ("figures", _FIGURES)):
        for name in names:
            base = before[part][name] if is_same else 0
            rates[name] = round((now[part][name] - base) / max(seconds, 0.001), 3)
    pool, counters = now["pool"], now["counters"]
    return {
        "server": now["name"],
        "version": now["version"],
        "uptime_s": now["uptime_s"],
        "ready": now["ready"],
        "found_share": round(counters["hit_blocks"] / max(counters["lookup_blocks"], 1), 4),
        "figures": now["figures"],
        "prompt_blocks": now["prompt_blocks"],
        "rates": rates,
        "pool_bytes": pool["pool_bytes"],
        "used_bytes": sum(pool["used_bytes"].values()),
        "blocks": sum(pool["blocks"].values()),
        "leases": now["leases"],
        "tenants": now["largest_tenants"],
        "models": now["models"],
        "tiers": now["tiers"],
        "open_sessions": now["open_sessions"],
        "sessions": now["sessions"],
    }


def screen(said: dict[str, Any]) -> Group:
    """The view as a terminal shows it."""
    rates, used, of = said["rates"], said["used_bytes"], said["pool_bytes"]
    state = "" if said["ready"] else ", filling its pool"
    facts = [
        f"{said['server']} (kvkeep {said['version']}), up {time_since(said['uptime_s'])}{state}",
        f"cache   {headline(said['figures'])}",
        f"missed  {missed(said['prompt_blocks'])}",
        f"now     {rates['lookups']:,.0f} lookups/s, {rates['tokens_loaded']:,.0f} tokens/s loaded, "
        f"{rates['tokens_computed']:,.0f} computed, {rates['saved_s']:.2f} s/s saved",
        f"stores  {rates['stored_blocks']:,.0f} blocks/s, {format_size(int(rates['stored_bytes']))}/s"
        f"; {rates['evictions']:,.0f} evicted/s",
        f"pool    {bar(used, of)} {format_size(used)} of {format_size(of)}, "
        f"{counted(said['blocks'], 'block')}, {counted(said['leases'], 'lease')}",
        *(f"tier    {tier_line(tier)}" for tier in said["tiers"]),
    ]
    tables = [
        _memory_table("tenant", said["tenants"]),
        _memory_table("model", said["models"]),
        _table(
            ("session", "engine", "model", "role", "leases", *FIGURE_COLUMNS),
            [
                (
                    *(str(each["session"]), each["engine"], each["model"] or "-"),
                    *(each["role"] or "-", each["leases"], *figure_cells(each["figures"])),
                )
                for each in said["sessions"] or ()
            ],
        ),
    ]
    parts: list[Any] = [Text("\n".join(facts), overflow="ellipsis", no_wrap=True)]
    for table in tables:
        if table is not None:
            parts += [Text(""), table]
    return Group(*parts)


def _memory_table(what: str, owners: list[dict[str, Any]]) -> Table | None:
    rows = [
        (
            *(each[what], format_size(each["usage_bytes"]), each["blocks"]),
            *figure_cells(each["figures"]),
        )
        for each in owners
    ]
    return _table((what, "memory", "blocks", *FIGURE_COLUMNS), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table | None:
    if not rows:
        return None
    shown, left = rows[:_MOST_ROWS], len(rows) - _MOST_ROWS
    more = [(f"and {left:,} more", *[""] * (len(columns) - 1))] if left > 0 else []
    return table_of(columns, [*shown, *more])


def bar(part: int, whole: int, width: int = 20) -> str:
    filled = round(width * min(part, whole) / max(whole, 1))
    return "█" * filled + "░" * (width - filled)
