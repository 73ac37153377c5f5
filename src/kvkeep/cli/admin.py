"""Commands for a running server: `kvkeep status`, `kvkeep drain` and `kvkeep settings ...`."""

from __future__ import annotations

import socket
import time
from typing import Annotated, Any

import typer

from kvkeep.cli.explain import missed
from kvkeep.cli.output import APP, counted, note, show_facts, show_table
from kvkeep.cli.remote import Server, asks_server, host_and_port
from kvkeep.cli.tenants import FIGURE_COLUMNS, figure_cells, tenant_rows
from kvkeep.cli.tiers import tier_line
from kvkeep.errors import RequestError, Unavailable
from kvkeep.units import format_size

_LOOK_EVERY_S = 0.2
_WAIT_S = 60.0

settings_app = typer.Typer(
    no_args_is_help=True, help="Show a running server's settings, and change live ones.", **APP
)


# -- kvkeep status


@asks_server
def status(server: Server) -> None:
    """Show the server: its pool, sessions, hits and largest tenants."""
    said = server.ask("/v1/status", needs_token=True)
    server.show(said, lambda: _show(said))


def _show(said: dict[str, Any]) -> None:
    show_facts(facts(said))
    if said["sessions"]:
        print()
        show_table(*session_rows(said["sessions"]))
    for pair in said["not_shared"] or ():
        print()
        print("\n".join(why_not_shared(pair)))
    if said["largest_tenants"]:
        print()
        show_table(*tenant_rows(said["largest_tenants"]))


def session_rows(sessions: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """One line a session: engines that show the same identity share blocks."""
    what = ("session", "engine", "pid", "model", "role", "identity", "bytes a token")
    columns = (*what, "data plane", "leases", "writing blocks", *FIGURE_COLUMNS)
    rows = [
        (
            *(s["session"], s["engine"], str(s["pid"])),
            *(s["model"] or "-", s["role"] or "-", s["identity"] or "-", s["bytes_per_token"]),
            *(s["plane"] or "not attached", s["leases"], s["writing_blocks"]),
            *figure_cells(s["figures"]),
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
    """The two largest units that are not zero: `1m 43s`, `2h`, `3d 4h`."""
    parts, rest = [], int(seconds)
    for unit, scale in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, scale)
        parts.append((count, unit))
    while len(parts) > 1 and not parts[0][0]:
        del parts[0]
    return " ".join(f"{count}{unit}" for count, unit in parts[:2] if count) or "0s"


def security(said: dict[str, bool], is_https: bool = False) -> str:
    """Which peers need a certificate or a token."""
    engines = "engines need a certificate (TLS)" if said["tls"] else "engines need no certificate"
    proof = "a token or an admin's certificate" if is_https else "a token"
    return f"{engines}, the admin API needs {proof}{'' if said['admin_token'] else ' for changes'}"


def start(restart: dict[str, Any], scrubbed_blocks: int) -> str:
    """Whether the server adopted the blocks of the last server, and how many."""
    if not restart["warm"]:
        return f"cold: {restart['why_cold']}"
    took = f"in {restart['adoption_seconds']:g} s, {restart['dropped_at_adoption']:,} dropped"
    adopted = counted(restart["adopted_blocks"], "block")
    return f"warm: {adopted} adopted {took}; {scrubbed_blocks:,} checked"


def facts(said: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines of `GET /v1/status`."""
    pool, counters, quotas = said["pool"], said["counters"], said["quotas"]
    state = "stopping" if said["stopping"] else "ready" if said["ready"] else "filling its pool"
    used = f"{format_size(sum(pool['used_bytes'].values()))} of {format_size(pool['pool_bytes'])}"
    filled = f", {format_size(pool['filled_bytes'])} filled"
    is_filled = pool["filled_bytes"] >= pool["pool_bytes"]
    blocks = ", ".join(f"{count:,} {state}" for state, count in pool["blocks"].items() if count)
    asked, hit = counters["lookup_blocks"], counters["hit_blocks"]
    found = f"{hit:,} of {asked:,} blocks found, also those that engines had"
    stored = (
        f"{counted(counters['stored_blocks'], 'block')}, {format_size(counters['stored_bytes'])}"
    )
    leases, stores = counted(said["leases"], "lease"), counted(said["writes"], "store")
    lines = [
        ("server", f"{said['name']} (kvkeep {said['version']}, pid {said['pid']}), {state}"),
        ("up", time_since(said["uptime_s"])),
        ("engines", said["address"]),
        ("http", said["http_address"]),
        ("security", security(said["security"], said["http_address"].startswith("https:"))),
        ("start", start(said["restart"], counters["scrubbed_blocks"])),
        ("cache", headline(said["figures"])),
        ("missed", missed(said["prompt_blocks"])),
        ("pool", f"{used} in use{'' if is_filled else filled}"),
        ("blocks", blocks or "none"),
        ("evictions", evictions(said)),
        ("lookups", f"{counters['lookups']:,}, {found}"),
        ("stored", stored),
        ("sessions", f"{sessions(said)}, {leases}, {stores} under way"),
        ("tenants", f"{said['tenants']:,}, {format_size(quotas['promised_bytes'])} promised"),
    ]
    return lines + [("tier", tier_line(tier)) for tier in said["tiers"]] + _warnings(said)


def sessions(said: dict[str, Any]) -> str:
    """How many there are. A server tells which ones to those who have its token."""
    count = sum(said["open_sessions"].values())
    return f"{count}{' (the token shows which)' if count and said['sessions'] is None else ''}"


def evictions(said: dict[str, Any]) -> str:
    """How many blocks were evicted, why, and how long after their last use."""
    text = f"{said['counters']['evictions']:,}"
    if reasons := {name: count for name, count in said["evicted_blocks"].items() if count}:
        words = {
            "own": "for the same tenant",
            "others": "for other tenants",
            "limit": "by a limit",
            "slab": "for another size",
            "expired": "expired",
        }
        text += f" ({', '.join(f'{count:,} {words[name]}' for name, count in reasons.items())})"
    age_s = said["evicted_age_s"]
    return text if age_s is None else f"{text}, {time_since(age_s)} after their last use"


def headline(figures: dict[str, Any]) -> str:
    """What the cache gave: tokens loaded and used, of those that no engine had, and time saved."""
    loaded, computed = figures["tokens_loaded"], figures["tokens_computed"]
    if not (loaded or figures["requests"]):
        return "no request has finished yet"
    share = f" ({loaded / (loaded + computed):.1%} of what no engine had)" if loaded else ""
    text = f"{loaded:,} tokens loaded{share}, {computed:,} computed"
    text += f", {time_saved(figures['saved_s'])}"
    if unpriced := figures["tokens_unpriced"]:
        text += f" (not known for {unpriced:,} tokens)"
    return text


def time_saved(seconds: float) -> str:
    return f"{abs(seconds):,.1f} s {'lost' if round(seconds, 1) < 0 else 'saved'}"


def _warnings(said: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for what is not as it should be."""
    pool, restart, quotas = said["pool"], said["restart"], said["quotas"]
    lines = []
    if restart["held_by_old_sessions"]:
        held = counted(restart["held_by_old_sessions"], "block")
        processes = "processes" if restart["old_sessions"] != 1 else "process"
        count = restart["old_sessions"]
        lines.append(("held", f"{held} for {count} {processes} of the last server"))
    if pool["degraded"]:
        lines.append(("degraded", pool["degraded"]))
    if quotas["scaled_down"]:
        promised = format_size(quotas["promised_bytes"])
        why = "do not fit the pool: scaled down until --pool-size is that large"
        lines.append(("quotas", f"{promised} {why}"))
    if quotas["overcommitted"]:
        lines.append(
            ("warning", f"quotas in force add up to {format_size(quotas['in_force_bytes'])}")
        )
    if turned_away := sorted(said["auth_failures"].items()):
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in turned_away)
        lines.append(("turned away", reasons))
    for name in ("bad_blocks", "internal_errors", "sessions_died"):
        if count := said["counters"][name]:
            lines.append((name.replace("_", " "), f"{count:,}"))
    return lines


# -- kvkeep drain


@asks_server
def drain(
    server: Server,
    wait_s: Annotated[
        float, typer.Option(help="Seconds to wait for the server's end.", min=0)
    ] = _WAIT_S,
) -> None:
    """Stop the server in order: admit nothing more, wait for leases and stores, exit. Its pool
    stays for the next server."""
    started = time.monotonic()
    said = server.ask("/v1/drain", "POST")
    note(f"draining: {_in_use(said)} under way, at most {said['grace_s']:g} s")
    left = _wait_for_the_end(server, started + wait_s, said)
    if left is not None:
        raise RequestError(
            "still_draining",
            f"the server has not ended within {wait_s:g} s: {_in_use(left)} under way",
            hint="it will end later; use a longer --wait-s",
        )
    seconds = time.monotonic() - started
    kept = {"blocks": said["blocks"], "kept": said["keeps_pool"]}
    outcome = "kept for the next one" if said["keeps_pool"] else "removed"
    blocks = counted(said["blocks"], "block")
    text = f"the server has ended after {seconds:.1f} s, {blocks} {outcome}"
    server.show({"drained": True, "seconds": round(seconds, 3), **kept}, text)


def _wait_for_the_end(server: Server, until: float, said: Any) -> Any:
    """None when the server has ended; else what was still under way."""
    while True:
        now = said
        try:
            now = server.ask("/v1/status")
        except Unavailable:
            if not _listens(server.http):
                return None
        except RequestError as error:
            if error.code not in ("loop_busy", "outcome_unknown"):  # as may be while it ends
                raise
        if _in_use(now) != _in_use(said):
            note(f"{_in_use(now)} under way")
        said = now
        if time.monotonic() >= until:
            return said
        time.sleep(_LOOK_EVERY_S)


def _listens(http: str) -> bool:
    """Whether a server, which may only be slow, still listens."""
    try:
        socket.create_connection(host_and_port(http), timeout=1).close()
    except OSError:
        return False
    return True


def _in_use(said: Any) -> str:
    return f"{counted(said['leases'], 'lease')}, {counted(said['writes'], 'store')}"


# -- kvkeep settings


@settings_app.command("list")
@asks_server
def list_settings(server: Server) -> None:
    """Show every setting, where its value came from, and whether it is live."""
    said = server.ask("/v1/settings")
    rows = [(row["name"], row["value"], row["source"], "live" * row["live"]) for row in said]
    server.show(said, lambda: show_table(("setting", "value", "source", ""), rows))


@settings_app.command("set")
@asks_server
def set_setting(
    server: Server,
    name: Annotated[str, typer.Argument(help="A live setting, such as log_level.")],
    value: Annotated[str, typer.Argument(help="Its new value, written as in a flag.")],
) -> None:
    """Change one live setting of a running server."""
    setting = name.replace("-", "_")
    said = server.ask("/v1/settings", "PATCH", {setting: value})
    row = next(row for row in said if row["name"] == setting)
    server.show(row, f"{row['name']} = {row['value']}")
