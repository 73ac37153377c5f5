"""`kvkeep prefetch`: bring a tenant's blocks from disk to memory before requests need them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli.interrupts import interrupts
from kvkeep.cli.output import Json, byte_progress, counted, note, show_json, show_table
from kvkeep.cli.remote import DEFAULT_ADDRESS, Http, TokenFile, ask
from kvkeep.cli.tenants import SaltStdin, Tenant, named
from kvkeep.errors import SettingsError, TierError
from kvkeep.units import format_size, parse_size

_LOOK_EVERY_S = 0.2
_RUNS = ("looking", "running")


def prefetch(
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
    http: Http = DEFAULT_ADDRESS,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Bring the blocks that a tenant used last from disk to memory."""
    if show or cancel is not None:
        if tenant is not None or salt_stdin or (show and cancel is not None):
            raise SettingsError("expected only one of TENANT, --list and --cancel")
        _list(http, token_file, json) if cancel is None else _cancel(cancel, http, token_file, json)
        return
    body: dict[str, Any] = {"tenant": named(tenant, salt_stdin)}
    if most is not None:
        try:
            body["most_bytes"] = parse_size(most)
        except ValueError as error:
            raise SettingsError(f"--most: expected {error}") from None
    said = (_run if wait else _begin)(body, http, token_file)
    if json:
        show_json(said)
    else:
        print(_line(said))
    if said["state"] == "failed":
        raise TierError(f"the prefetch has stopped early: {said['problem']}")


def _begin(body: dict[str, Any], http: str, token_file: Path | None) -> dict[str, Any]:
    said: dict[str, Any] = ask(http, "/v1/prefetch", "POST", body, token_file=token_file)
    return said


def _run(body: dict[str, Any], http: str, token_file: Path | None) -> dict[str, Any]:
    """Begins a prefetch and returns at its end; shows its progress if a person watches. Ctrl-C
    cancels it."""
    with interrupts() as is_interrupted:
        said = _begin(body, http, token_file)
        with byte_progress("prefetch") as progress:
            while said["state"] in _RUNS and not is_interrupted():
                time.sleep(_LOOK_EVERY_S)
                shown = ask(http, "/v1/prefetch", token_file=token_file)
                same = [each for each in shown if each["number"] == said["number"]]
                if not same:
                    raise TierError(
                        f"the server was restarted during prefetch {said['number']}",
                        "begin it again",
                    )
                said = same[0]
                progress(said["nbytes"], said["coming_bytes"])
        if said["state"] in _RUNS:
            said = ask(http, f"/v1/prefetch/{said['number']}", "DELETE", token_file=token_file)
            note("cancelled")
    return said


def _list(http: str, token_file: Path | None, json: bool) -> None:
    said = ask(http, "/v1/prefetch", token_file=token_file)
    if json:
        show_json(said)
        return
    rows = [
        (
            each["number"],
            each["tenant"],
            each["state"],
            each["blocks"],
            format_size(each["nbytes"]),
            format_size(each["most_bytes"]),
            each["problem"],
        )
        for each in said
    ]
    show_table(("number", "tenant", "state", "blocks", "in memory", "at most", "problem"), rows)


def _cancel(which: str, http: str, token_file: Path | None, json: bool) -> None:
    if which != "all" and not which.isdecimal():
        raise SettingsError("--cancel: expected the number of a prefetch, or all")
    path = "/v1/prefetch" if which == "all" else f"/v1/prefetch/{which}"
    said = ask(http, path, "DELETE", token_file=token_file)
    if json:
        show_json(said)
    elif which == "all":
        print(f"{said['prefetches']} running prefetches are cancelled")
    else:
        print(_line(said))


def _line(said: dict[str, Any]) -> str:
    return (
        f"prefetch {said['number']} of {said['tenant']} is {said['state']}: "
        f"{counted(said['blocks'], 'block')}, {format_size(said['nbytes'])} brought to memory"
    )
