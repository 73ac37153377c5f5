"""`kvkeep record` and `kvkeep replay`: the requests of a server, and what becomes of them again."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.bench.recordings import Recording, Summary, replay, summarize
from kvkeep.cli.interrupts import interrupts
from kvkeep.cli.output import Json, counted, note, show_facts, show_json, show_table
from kvkeep.cli.remote import Server, asks_server
from kvkeep.errors import KVKeepError, SettingsError
from kvkeep.server.recording import MOST_BYTES, MOST_SECONDS
from kvkeep.units import KIB, MIB, format_duration, format_size, parse_size

_LOOK_EVERY_S = 0.25
_MANY_BYTES = MIB  # more lines are waiting, most likely


@asks_server
def record(
    server: Server,
    file: Annotated[Path, typer.Argument(help="A new file, which only this user can read.")],
    seconds: Annotated[
        float, typer.Option(help="For how long; Ctrl-C ends it sooner.", min=0.1, max=MOST_SECONDS)
    ] = 60.0,
    max_size: Annotated[str, typer.Option(help="Most bytes of the file.")] = "256MiB",
) -> None:
    """Record a running server's requests, without what tells whose they are."""
    wanted = {"seconds": seconds, "most_bytes": _size(max_size)}
    with _new_file(file) as out, interrupts() as is_interrupted:
        try:
            begun = server.ask("/v1/recording", "POST", wanted)
        except BaseException:
            # guard: nothing is recorded, whatever the reason; no empty file stays
            file.unlink()
            raise
        path = f"/v1/recording/{begun['recording']}"
        try:
            ended = ""
            while not ended:
                said = server.ask(f"{path}/lines", "POST")
                lines = "".join(f"{line}\n" for line in said["lines"]).encode()
                _append(out, file, lines)
                ended = said["ended"]
                if is_interrupted() and not ended:
                    server.ask(path, "DELETE")
                elif len(lines) < _MANY_BYTES:
                    time.sleep(0 if ended else _LOOK_EVERY_S)
        except KVKeepError:
            note(f"what was recorded until now is in {file}: {format_size(out.tell())}")
            with suppress(KVKeepError):
                server.ask(path, "DELETE")
            raise
    _show(summarize(Recording(str(file))), server.as_json)
    note(f"the recording is in {file}: {format_size(file.stat().st_size)}")


def replay_recording(
    file: Annotated[str, typer.Argument(help="What `kvkeep record` has written.")],
    json: Json = False,
) -> None:
    """Carry out recorded requests in a server of this process, and compare what came of them."""
    _show(replay(Recording(file)), json)


def _new_file(path: Path) -> FileIO:
    try:
        return FileIO(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w"
        )
    except FileExistsError:
        raise SettingsError(f"{path} exists", "name a file that does not") from None
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be written: {error.strerror}", "name a file in a directory of this user"
        ) from None


def _append(out: FileIO, path: Path, data: bytes) -> None:
    """All of it, or nothing: the file ends with a whole line."""
    whole, rest = out.tell(), memoryview(data)
    try:
        while rest:
            rest = rest[out.write(rest) :]
    except OSError as error:
        out.seek(whole)
        out.truncate()
        raise KVKeepError(
            f"{path} cannot be written: {error.strerror}",
            "make room, or record less with --max-size or --seconds",
        ) from None


def _size(text: str) -> int:
    try:
        nbytes = parse_size(text)
    except ValueError:
        nbytes = 0
    if not 64 * KIB <= nbytes <= MOST_BYTES:
        most = format_size(MOST_BYTES)
        raise SettingsError(f'--max-size "{text}": expected a size from 64KiB to {most}')
    return nbytes


def _show(summary: Summary, as_json: bool) -> None:
    if as_json:
        show_json(summary.as_json())
        return
    took = format_duration(summary.seconds)
    who = f"{counted(summary.sessions, 'session')}, {counted(summary.tenants, 'tenant')}"
    facts = [("recorded", f"{took}, {who}"), ("ended", summary.reason)]
    if before := summary.stored_before_blocks:
        facts.append(("before", f"{counted(before, 'block')} were found that were stored earlier"))
    show_facts(facts)
    print()
    runs = [each.as_json() for each in (summary.recorded, summary.replayed) if each is not None]
    columns = ("", "recorded", "replayed")[: 1 + len(runs)]
    show_table(columns, [(name, *(cell(run) for run in runs)) for name, cell in _ROWS.items()])
    kinds = sorted(set().union(*(run["times"] for run in runs)))
    print()
    figures = ("requests", "p50_ms", "p99_ms", "longest_ms")
    show_table(
        ("requests", *(f"{name} {each}" for each in columns[1:] for name in _SHORT)),
        [
            (kind, *(run["times"].get(kind, {}).get(each) for run in runs for each in figures))
            for kind in kinds
        ],
    )


_SHORT = ("count", "p50 ms", "p99 ms", "longest ms")
_ROWS: dict[str, Any] = {
    "lookups": lambda run: run["lookups"],
    "blocks asked for": lambda run: run["lookup_blocks"],
    "blocks found": lambda run: run["hit_blocks"],
    "found": lambda run: f"{run['hit_blocks'] / max(run['lookup_blocks'], 1):.1%}",
    "blocks stored": lambda run: run["stored_blocks"],
    "blocks without room": lambda run: run["without_room_blocks"],
    "blocks evicted": lambda run: run["evictions"],
    "requests refused": lambda run: sum(run["refusals"].values()),
    "longest turn in ms": lambda run: run["longest_turn_ms"],
}
