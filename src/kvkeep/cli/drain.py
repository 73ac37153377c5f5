"""`kvkeep drain`: has a server end in order, and waits until it has."""

from __future__ import annotations

import socket
import time
from typing import Annotated, Any

import typer

from kvkeep.cli.output import Json, counted, note, show_json
from kvkeep.cli.remote import DEFAULT_ADDRESS, Http, TokenFile, ask, host_and_port
from kvkeep.errors import RequestError, Unavailable

_LOOK_EVERY_S = 0.2
_WAIT_S = 60.0


def drain(
    http: Http = DEFAULT_ADDRESS,
    wait_s: Annotated[
        float, typer.Option(help="Seconds to wait for the server's end.", min=0)
    ] = _WAIT_S,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Have the server stop admitting, let leases and stores end, and exit; its pool stays for the
    next one."""
    started = time.monotonic()
    said = ask(http, "/v1/drain", "POST", token_file=token_file)
    note(f"draining: {_in_use(said)} under way, at most {said['grace_s']:g} s")
    left = _wait_for_the_end(http, started + wait_s, said, token_file)
    if left is not None:
        raise RequestError(
            "still_draining",
            f"the server has not ended within {wait_s:g} s: {_in_use(left)} under way",
            hint="it will end by itself; wait for it with a longer --wait-s",
        )
    seconds = time.monotonic() - started
    if json:
        show_json(
            {
                "drained": True,
                "seconds": round(seconds, 3),
                "blocks": said["blocks"],
                "kept": said["keeps_pool"],
            }
        )
        return
    kept = f"{counted(said['blocks'], 'block')} {'kept for the next one' if said['keeps_pool'] else 'removed'}"
    print(f"the server has ended after {seconds:.1f} s, {kept}")


def _wait_for_the_end(http: str, until: float, said: Any, token_file: Any) -> Any:
    """None when it has ended; else what was still under way."""
    while True:
        now = said
        try:
            now = ask(http, "/v1/status", token_file=token_file)
        except Unavailable:
            if not _listens(http):
                return None
        except RequestError as error:
            if error.code not in (
                "loop_busy",
                "outcome_unknown",
            ):  # as it may well be in its last moments
                raise
        if _in_use(now) != _in_use(said):
            note(f"{_in_use(now)} under way")
        said = now
        if time.monotonic() >= until:
            return said
        time.sleep(_LOOK_EVERY_S)


def _listens(http: str) -> bool:
    """Whether there is still somebody, who may only be slow."""
    try:
        socket.create_connection(host_and_port(http), timeout=1).close()
    except OSError:
        return False
    return True


def _in_use(said: Any) -> str:
    return f"{counted(said['leases'], 'lease')}, {counted(said['writes'], 'store')}"
