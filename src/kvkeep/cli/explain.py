"""`kvkeep explain`: what requests were served from, and why the rest of their prompts was computed."""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kvkeep.cli.output import show_facts, show_table
from kvkeep.cli.remote import Server, asks_server
from kvkeep.errors import SettingsError
from kvkeep.kv.outcomes import NO_MISS, NUMBERS, OUTCOMES

_MEANING = dict(OUTCOMES)


@asks_server
def explain(
    server: Server,
    request: Annotated[
        str | None, typer.Argument(help="The engine's name of a request, or how it begins.")
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Show this number of the newest requests.")
    ] = None,
) -> None:
    """Show what requests were served from, and why their other blocks missed."""
    if (request is None) == (last is None):
        raise SettingsError("expected either REQUEST or --last", "for example --last 20")
    path = f"/v1/explain?request={quote(request)}" if request else f"/v1/explain?last={last}"
    said = server.ask(path, needs_token=True)
    if request:
        server.show(said, lambda: show_facts(facts(said[0])))
    else:
        none = "no request has finished yet"
        server.show(said, (lambda: show_table(*rows(said))) if said else none)


def rows(requests: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """One line a request."""
    columns = ("request", "ago", "tenant", "tokens", "loaded", "computed", "took", "blocks missed")
    return columns, [
        (
            *(each["request"], _ago(each), each["tenant"], each["prompt_tokens"]),
            *(each["tokens_loaded"], each["tokens_computed"]),
            *(f"{each['prompt_s']:,.2f}s", missed(each["outcomes"])),
        )
        for each in requests
    ]


def facts(said: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines of one request."""
    saved = "not known" if said["saved_s"] is None else f"{said['saved_s']:,.3f} s"
    lines = [
        ("request", f"{said['request']}, finished {_ago(said)} ago"),
        ("tenant", said["tenant"]),
        ("engine", f"{said['engine']}, session {said['session']}, model {said['model'] or '-'}"),
        (
            "prompt",
            f"{said['prompt_tokens']:,} tokens: {said['tokens_local']:,} local,"
            f" {said['tokens_loaded']:,} loaded, {said['tokens_computed']:,} computed",
        ),
        ("took", f"{said['prompt_s']:,.3f} s until the engine had all of its prompt"),
        ("time saved", saved),
        ("blocks", f"{said['blocks']:,}"),
    ]
    at = 0
    for name, count in said["runs"]:
        lines.append((_range(at, count), f"{name.replace('_', ' ')}: {_MEANING.get(name, name)}"))
        at += count
    if evicted := said["evicted"]:
        when = f"{evicted['newest_s']:,.1f} to {evicted['oldest_s']:,.1f} s before it was asked for"
        lines.append(("evicted", f"{when}, for tenant {evicted['by'] or 'not known'}"))
    if said["differs"]:
        lines.append(("differs", ", ".join(said["differs"])))
    return lines


def _range(start: int, count: int) -> str:
    return f"  {start}" if count == 1 else f"  {start}-{start + count - 1}"


def missed(outcomes: dict[str, int]) -> str:
    """Why blocks missed, the most frequent reason first; what is always computed is left out."""
    causes = {
        name: count
        for name, count in outcomes.items()
        if count and NUMBERS.get(name) not in NO_MISS
    }
    ranked = sorted(causes, key=causes.__getitem__, reverse=True)
    return ", ".join(f"{causes[name]:,} {name.replace('_', ' ')}" for name in ranked) or "none"


def _ago(said: dict[str, Any]) -> str:
    seconds = max(0.0, time.time() - said["finished_s"])
    return f"{seconds:.0f}s" if seconds < 600 else f"{seconds / 60:.0f}m"
