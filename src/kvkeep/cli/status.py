"""`kvkeep status`: the server on one screen."""

from __future__ import annotations

from typing import Any

from kvkeep.cli.output import Json, show_facts, show_json, show_table
from kvkeep.cli.remote import DEFAULT_ADDRESS, Http, ask
from kvkeep.cli.tenants import tenant_rows
from kvkeep.units import format_duration, format_size


def status(http: Http = DEFAULT_ADDRESS, json: Json = False) -> None:
    """Show the server: its pool, sessions, hits and largest tenants."""
    said = ask(http, "/v1/status")
    if json:
        show_json(said)
        return
    show_facts(facts(said))
    if said["sessions"]:
        print()
        columns = ("session", "client", "pid", "data plane", "leases", "writing blocks")
        rows = [
            (s["session"], s["client"], str(s["pid"]), s["plane"] or "not attached", s["leases"], s["writing_blocks"])
            for s in said["sessions"]
        ]
        show_table(columns, rows)
    if said["largest_tenants"]:
        print()
        show_table(*tenant_rows(said["largest_tenants"]))


def facts(said: dict[str, Any]) -> list[tuple[str, str]]:
    """What `GET /v1/status` said, in lines."""
    pool, counters, blocks = said["pool"], said["counters"], said["pool"]["blocks"]
    state = "stopping" if said["stopping"] else "ready" if said["ready"] else "filling its pool"
    used = sum(pool["used_bytes"].values())
    held = f"{format_size(used)} of {format_size(pool['pool_bytes'])} in use"
    if pool["filled_bytes"] < pool["pool_bytes"]:
        held += f", {format_size(pool['filled_bytes'])} filled"
    asked, hit = counters["lookup_blocks"], counters["hit_blocks"]
    lines = [
        ("server", f"{said['name']} (kvkeep {said['version']}, pid {said['pid']}), {state}"),
        ("up", format_duration(said["uptime_s"])),
        ("engines", said["address"]),
        ("http", said["http_address"]),
        ("pool", held),
        ("blocks", ", ".join(f"{count:,} {state}" for state, count in blocks.items() if count) or "none"),
        ("evictions", f"{counters['evictions']:,}"),
        ("lookups", f"{counters['lookups']:,}, {hit:,} of {asked:,} blocks found ({hit / max(asked, 1):.1%})"),
        ("stored", f"{counters['stored_blocks']:,} blocks, {format_size(counters['stored_bytes'])}"),
        ("sessions", f"{len(said['sessions'])}, {said['leases']} leases, {said['writes']} stores under way"),
        ("tenants", f"{said['tenants']:,}, {format_size(said['quotas']['promised_bytes'])} promised"),
    ]
    if pool["degraded"]:
        lines.append(("degraded", pool["degraded"]))
    if said["quotas"]["overcommitted"]:
        lines.append(("warning", f"quotas in force add up to {format_size(said['quotas']['in_force_bytes'])}"))
    for name in ("bad_blocks", "internal_errors", "sessions_died"):
        if counters[name]:
            lines.append((name.replace("_", " "), f"{counters[name]:,}"))
    return lines
