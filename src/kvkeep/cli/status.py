"""`kvkeep status`: the server on one screen."""

from __future__ import annotations

from typing import Any

from kvkeep.cli.output import Json, counted, show_facts, show_json, show_table
from kvkeep.cli.remote import DEFAULT_ADDRESS, Http, TokenFile, ask
from kvkeep.cli.tenants import tenant_rows
from kvkeep.units import format_size


def status(http: Http = DEFAULT_ADDRESS, token_file: TokenFile = None, json: Json = False) -> None:
    """Show the server: its pool, sessions, hits and largest tenants."""
    said = ask(http, "/v1/status", token_file=token_file)
    if json:
        show_json(said)
        return
    show_facts(facts(said))
    if said["sessions"]:
        print()
        show_table(*session_rows(said["sessions"]))
    for pair in said["not_shared"]:
        print()
        print("\n".join(why_not_shared(pair)))
    if said["largest_tenants"]:
        print()
        show_table(*tenant_rows(said["largest_tenants"]))


def session_rows(sessions: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """One line a session: engines that show the same identity share blocks."""
    columns = (
        "session",
        "client",
        "pid",
        "model",
        "role",
        "identity",
        "data plane",
        "leases",
        "writing blocks",
    )
    rows = [
        (
            *(s["session"], s["client"], str(s["pid"])),
            *(s["model"] or "-", s["role"] or "-", s["identity"] or "-"),
            *(s["plane"] or "not attached", s["leases"], s["writing_blocks"]),
        )
        for s in sessions
    ]
    return columns, rows


def why_not_shared(pair: dict[str, Any]) -> list[str]:
    """Two identities of one model, and the parts that keep their engines from sharing blocks."""
    (one, other), (here, there) = pair["identities"], pair["sessions"]
    lines = [
        f"not shared: {pair['model']} is served under identity {one} (session {_listed(here)}) "
        f"and {other} (session {_listed(there)}); they differ in"
    ]
    return lines + [
        f"  {name}: {first} | {second}" for name, (first, second) in pair["differs"].items()
    ]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def time_since(seconds: float) -> str:
    """The two largest units that say something: `1m 43s`, `2h`, `3d 4h`."""
    parts, rest = [], int(seconds)
    for unit, scale in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, scale)
        parts.append((count, unit))
    while len(parts) > 1 and not parts[0][0]:
        del parts[0]
    return " ".join(f"{count}{unit}" for count, unit in parts[:2] if count) or "0s"


def security(said: dict[str, bool], is_https: bool = False) -> str:
    """Who has to prove who they are, of those who can reach the server."""
    engines = "engines need a certificate (TLS)" if said["tls"] else "engines need no certificate"
    proof = "a token or an admin's certificate" if is_https else "a token"
    return f"{engines}, the admin API needs {proof}{'' if said['admin_token'] else ' for changes'}"


def start(restart: dict[str, Any], scrubbed_blocks: int) -> str:
    """Whether the server began with what another one had left, and what came of it."""
    if not restart["warm"]:
        return f"cold: {restart['why_cold']}"
    took = f"in {restart['adoption_seconds']:g} s, {restart['dropped_at_adoption']:,} dropped"
    return f"warm: {counted(restart['adopted_blocks'], 'block')} adopted {took}; {scrubbed_blocks:,} looked through"


def facts(said: dict[str, Any]) -> list[tuple[str, str]]:
    """What `GET /v1/status` said, in lines."""
    pool, counters, blocks = said["pool"], said["counters"], said["pool"]["blocks"]
    state = "stopping" if said["stopping"] else "ready" if said["ready"] else "filling its pool"
    used = sum(pool["used_bytes"].values())
    held = f"{format_size(used)} of {format_size(pool['pool_bytes'])} in use"
    if pool["filled_bytes"] < pool["pool_bytes"]:
        held += f", {format_size(pool['filled_bytes'])} filled"
    asked, hit = counters["lookup_blocks"], counters["hit_blocks"]
    leases, stores = counted(said["leases"], "lease"), counted(said["writes"], "store")
    lines = [
        ("server", f"{said['name']} (kvkeep {said['version']}, pid {said['pid']}), {state}"),
        ("up", time_since(said["uptime_s"])),
        ("engines", said["address"]),
        ("http", said["http_address"]),
        ("security", security(said["security"], said["http_address"].startswith("https:"))),
        ("start", start(said["restart"], counters["scrubbed_blocks"])),
        ("pool", held),
        (
            "blocks",
            ", ".join(f"{count:,} {state}" for state, count in blocks.items() if count) or "none",
        ),
        ("evictions", f"{counters['evictions']:,}"),
        (
            "lookups",
            f"{counters['lookups']:,}, {hit:,} of {asked:,} blocks found ({hit / max(asked, 1):.1%})",
        ),
        (
            "stored",
            f"{counted(counters['stored_blocks'], 'block')}, {format_size(counters['stored_bytes'])}",
        ),
        ("sessions", f"{len(said['sessions'])}, {leases}, {stores} under way"),
        (
            "tenants",
            f"{said['tenants']:,}, {format_size(said['quotas']['promised_bytes'])} promised",
        ),
    ]
    restart = said["restart"]
    if restart["held_by_old_sessions"]:
        processes = "processes" if restart["old_sessions"] != 1 else "process"
        held = counted(restart["held_by_old_sessions"], "block")
        lines.append(
            ("held", f"{held} for {restart['old_sessions']} {processes} of the server before")
        )
    if pool["degraded"]:
        lines.append(("degraded", pool["degraded"]))
    if said["quotas"]["scaled_down"]:
        promised = format_size(said["quotas"]["promised_bytes"])
        lines.append(
            (
                "quotas",
                f"{promised} do not fit the pool: scaled down until --pool-size is that large",
            )
        )
    if said["quotas"]["overcommitted"]:
        lines.append(
            (
                "warning",
                f"quotas in force add up to {format_size(said['quotas']['in_force_bytes'])}",
            )
        )
    if turned_away := said["auth_failures"]:
        lines.append(
            (
                "turned away",
                ", ".join(f"{count:,} {reason}" for reason, count in sorted(turned_away.items())),
            )
        )
    for name in ("bad_blocks", "internal_errors", "sessions_died"):
        if counters[name]:
            lines.append((name.replace("_", " "), f"{counters[name]:,}"))
    return lines
