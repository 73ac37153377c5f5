"""`kvkeep tiers`: the tiers below memory of a running server."""

from __future__ import annotations

from typing import Any

from kvkeep.cli.output import counted, show_each
from kvkeep.cli.remote import Server, asks_server
from kvkeep.units import format_size


@asks_server
def tiers(server: Server) -> None:
    """Show the server's disks and its shared tier: state, capacity, latency, errors, wear."""
    said = server.ask("/v1/tiers")
    none = "no tiers: the server keeps blocks in memory only (`kvkeep serve --tier ...`)"
    server.show(said, (lambda: show_each(map(facts, said))) if said else none)


def facts(tier: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines of one tier of `GET /v1/tiers`."""
    counts = tier["counts"]
    flight = format_size(tier["in_flight_bytes"])
    waiting = counted(tier["to_write_chains"], "chain")
    return [
        ("tier", tier["tier"]),
        ("state", _state(tier)),
        ("used", f"{_used(tier)}, {counted(tier['blocks'], 'block')}"),
        ("reads", _moved(counts, "promoted", tier["read_ms"], tier["read_rate"])),
        ("writes", _moved(counts, "written", tier["write_ms"], tier["write_rate"])),
        *([] if tier["is_shared"] else [("wear", _wear(tier["written_bytes_per_hit"]))]),
        ("now", f"{counted(tier['promotions'], 'promotion')}, {flight} in flight"),
        ("to write", f"{waiting} of blocks in memory, for all tiers"),
        ("lost", f"{counted(tier['evicted_unwritten'], 'chain')} evicted unwritten, of all tiers"),
        ("bad blocks", f"{counts['bad_blocks']:,}"),
        ("errors", f"{counts['errors']:,}"),
        *(_of_shared(counts) if tier["is_shared"] else []),
    ]


def _of_shared(counts: dict[str, int]) -> list[tuple[str, str]]:
    return [
        ("evicted", f"{counted(counts['lost_blocks'], 'block')} gone between lookup and read"),
        ("refused", f"{counted(counts['refused_blocks'], 'block')} for which there was no room"),
    ]


def tier_line(tier: dict[str, Any]) -> str:
    """One tier in a line of `kvkeep status`."""
    return f"{tier['tier']}: {_used(tier)} in use, {_state(tier)}"


def _state(tier: dict[str, Any]) -> str:
    if not tier["problem"]:
        return str(tier["state"])
    if tier["state"] == "set aside":
        until = "it answers again" if tier["is_shared"] else "the server restarts"
        return f"set aside until {until}: {tier['problem']}"
    return f"{tier['state']}; last error: {tier['problem']}"


def _used(tier: dict[str, Any]) -> str:
    return f"{format_size(tier['used_bytes'])} of {format_size(tier['capacity_bytes'])}"


def _moved(counts: dict[str, int], what: str, ms: float | None, rate: float | None) -> str:
    """What was moved since the server started, and how long a job takes."""
    moved = counted(counts[f"{what}_blocks"], "block")
    text = f"{moved} {what}, {format_size(counts[f'{what}_bytes'])}"
    if ms is None or rate is None:
        return text
    return f"{text}; a job takes {ms:.3g} ms, {format_size(round(rate))}/s"


def _wear(nbytes: int | None) -> str:
    if nbytes is None:
        return "no block promoted yet"
    return f"{format_size(nbytes)} written for each block promoted"
