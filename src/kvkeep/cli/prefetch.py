"""`kvkeep prefetch`: bring a tenant's blocks from disk to memory before requests need them."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from kvkeep.cli.interrupts import interrupts
from kvkeep.cli.output import byte_progress, counted, note, show_table
from kvkeep.cli.remote import Server, asks_server
from kvkeep.cli.tenants import SaltStdin, Tenant, named
from kvkeep.errors import SettingsError, TierError
from kvkeep.units import format_size, parse_size

_LOOK_EVERY_S = 0.2
_RUNS = ("looking", "running")


@asks_server
def prefetch(
    server: Server,
    tenant: Tenant = None,
    salt_stdin: SaltStdin = False,
    most: Annotated[
        str | None,
        typer.Option(help="Bring at most this size, such as 8GiB. Default: a quarter of the pool."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait for the end. Ctrl-C then cancels it.")
    ] = True,
    show: Annotated[bool, typer.Option("--list", help="Show prefetches, and begin none.")] = False,
    cancel: Annotated[
        str | None, typer.Option(metavar="NUMBER|all", help="Cancel one prefetch, or all.")
    ] = None,
) -> None:
    """Bring the blocks that a tenant used last from disk to memory."""
    if show or cancel is not None:
        if tenant is not None or salt_stdin or (show and cancel is not None):
            raise SettingsError("expected only one of TENANT, --list and --cancel")
        _list(server) if cancel is None else _cancel(server, cancel)
        return
    body: dict[str, Any] = {"tenant": named(tenant, salt_stdin)}
    if most is not None:
        try:
            body["most_bytes"] = parse_size(most)
        except ValueError as error:
            raise SettingsError(f"--most: expected {error}") from None
    said = (_run if wait else _begin)(server, body)
    server.show(said, _line(said))
    if said["state"] == "failed":
        raise TierError(f"the prefetch has stopped early: {said['problem']}")


def _begin(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = server.ask("/v1/prefetch", "POST", body)
    return said


def _run(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """Begins a prefetch and returns at its end; shows its progress if a person watches. Ctrl-C
    cancels it."""
    with interrupts() as is_interrupted:
        said = _begin(server, body)
        with byte_progress("prefetch") as progress:
            while said["state"] in _RUNS and not is_interrupted():
                time.sleep(_LOOK_EVERY_S)
                shown = server.ask("/v1/prefetch")
                same = [each for each in shown if each["number"] == said["number"]]
                if not same:
                    raise TierError(
                        f"the server was restarted during prefetch {said['number']}",
                        "begin it again",
                    )
                said = same[0]
                progress(said["nbytes"], said["coming_bytes"])
        if said["state"] in _RUNS:
            said = server.ask(f"/v1/prefetch/{said['number']}", "DELETE")
            note("cancelled")
    return said


def _list(server: Server) -> None:
    said = server.ask("/v1/prefetch")
    rows = [
        (
            *(each[name] for name in ("number", "tenant", "state", "blocks")),
            *(format_size(each[name]) for name in ("nbytes", "most_bytes")),
            each["problem"],
        )
        for each in said
    ]
    columns = ("number", "tenant", "state", "blocks", "in memory", "at most", "problem")
    server.show(said, lambda: show_table(columns, rows))


def _cancel(server: Server, which: str) -> None:
    if which != "all" and not which.isdecimal():
        raise SettingsError("--cancel: expected the number of a prefetch, or all")
    path = "/v1/prefetch" if which == "all" else f"/v1/prefetch/{which}"
    said = server.ask(path, "DELETE")
    is_all = which == "all"
    text = f"{said['prefetches']} running prefetches are cancelled" if is_all else _line(said)
    server.show(said, text)


def _line(said: dict[str, Any]) -> str:
    return (
        f"prefetch {said['number']} of {said['tenant']} is {said['state']}: "
        f"{counted(said['blocks'], 'block')}, {format_size(said['nbytes'])} brought to memory"
    )
