"""`kvkeep`: all commands, and how errors end them.

    exit code   0  done
                1  the server refused, or failed; `kvkeep doctor` has found something wrong
                2  the command, a setting or the pool is wrong
                3  no server answers
                4  `kvkeep verify` has found blocks that are bad or cannot be read

An error is two lines on stderr: `error: ...` and, if there is a remedy, `hint: ...`. Only a bug
shows a traceback."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvkeep import __version__
from kvkeep.cli.output import APP, note
from kvkeep.errors import KVKeepError, PoolError, RequestError, SettingsError, Unavailable

EXIT_REFUSED, EXIT_WRONG, EXIT_UNAVAILABLE = 1, 2, 3


@dataclass(frozen=True)
class Place:
    """Where a command is: `module:name` of its function or of its app. It is imported when it is
    asked for: all commands together take a second."""

    where: str
    help: str  # fits 80 columns

    def command(self, name: str) -> Any:
        module, attribute = self.where.split(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            app = typer.Typer(**APP)
            app.command()(found)
            found = app
        command = typer.main.get_command(found)
        command.name = name
        return command


# The sections of `kvkeep --help`: the commands of each in order.
SECTIONS: dict[str, dict[str, Place]] = {
    "Daily": {
        "serve": Place("kvkeep.cli.serve:app", "Run a server in the foreground."),
        "status": Place(
            "kvkeep.cli.admin:status", "Show the server: pool, sessions, hits, tenants."
        ),
        "top": Place("kvkeep.cli.top:top", "Show the server live, once a second."),
        "doctor": Place("kvkeep.cli.doctor:app", "Check this host and its server, with remedies."),
        "explain": Place("kvkeep.cli.explain:explain", "Show why blocks of requests missed."),
        "drain": Place("kvkeep.cli.admin:drain", "Stop the server in order; its pool stays."),
        "tiers": Place("kvkeep.cli.tiers:tiers", "Show the server's disks and its shared tier."),
        "settings": Place(
            "kvkeep.cli.admin:settings_app", "Show a server's settings, and change live ones."
        ),
    },
    "Tenants": {
        "tenants": Place(
            "kvkeep.cli.tenants:app", "Show tenants, set quotas and limits, clear blocks."
        ),
        "prefetch": Place(
            "kvkeep.cli.prefetch:prefetch", "Bring a tenant's blocks from disk to memory."
        ),
    },
    "Tools": {
        "plan": Place(
            "kvkeep.cli.plan:show_plan", "Show what memory and disk a trace of requests is worth."
        ),
        "record": Place(
            "kvkeep.cli.record:record", "Record a server's requests, without tenants' content."
        ),
        "replay": Place(
            "kvkeep.cli.record:replay_recording", "Carry out recorded requests again, and compare."
        ),
        "keygen": Place("kvkeep.cli.keygen:keygen", "Make certificates and an admin token."),
        "verify": Place(
            "kvkeep.cli.verify:verify", "Compare every block on disk with its checksum."
        ),
        "bench": Place("kvkeep.cli.bench:app", "Measure this machine."),
        "demo": Place(
            "kvkeep.cli.demo:demo", "See engines share a cache that is killed meanwhile."
        ),
    },
    # What a checkout adds has a section of its own.
    "Development": {
        each.name: Place(each.value, "") for each in entry_points(group="kvkeep.commands")
    },
}
PLACES = {name: place for section in SECTIONS.values() for name, place in section.items()}


class Commands(Mapping[str, Any]):
    """All commands by name. One is imported when it is looked up, and not before."""

    def __getitem__(self, name: str) -> Any:
        return PLACES[name].command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(PLACES)

    def __len__(self) -> int:
        return len(PLACES)


class Sections(TyperGroup):
    """Lists commands in sections."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given | {"commands": Commands()})

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, PLACES))
        for title, section in SECTIONS.items():
            if section:
                with formatter.section(title):
                    formatter.write_dl(
                        [
                            (
                                f"{name:{width}}",
                                place.help or self.commands[name].get_short_help_str(50),
                            )
                            for name, place in section.items()
                        ]
                    )


app = typer.Typer(
    cls=Sections,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="A KV-cache server for LLM inference.",
    **APP,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvkeep {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """A KV-cache server for LLM inference."""


def main() -> None:
    """The entry point."""
    try:
        app(prog_name="kvkeep")
    except KVKeepError as error:
        sys.exit(_explain(error))
    except BrokenPipeError:
        # The reader of our output (`head`, say) has ended. The rest of the buffer is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_REFUSED)


def _explain(error: KVKeepError) -> int:
    note(f"error: {error.message}")
    if error.hint:
        note(f"hint: {error.hint}")
    match error:
        case Unavailable():
            return EXIT_UNAVAILABLE
        case SettingsError() | PoolError():
            return EXIT_WRONG
        case RequestError(code="bad_tenant" | "bad_setting" | "bad_request"):
            return EXIT_WRONG
        case _:
            return EXIT_REFUSED


if __name__ == "__main__":
    main()
