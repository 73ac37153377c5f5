"""`kvkeep`: all commands, and how errors end them.

    exit code   0  done
                1  the server refused, or failed
                2  the command, a setting or the pool is wrong
                3  no server answers

An error is two lines on stderr: `error: ...` and, if there is a remedy, `hint: ...`. Only a bug
shows a traceback."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer

from kvkeep import __version__
from kvkeep.cli import bench, tenants
from kvkeep.cli.admin import drain, settings_app, status
from kvkeep.cli.demo import demo
from kvkeep.cli.keygen import keygen
from kvkeep.cli.output import note
from kvkeep.cli.serve import ServeCommand, serve
from kvkeep.errors import KVKeepError, PoolError, RequestError, SettingsError, Unavailable

EXIT_REFUSED, EXIT_WRONG, EXIT_UNAVAILABLE = 1, 2, 3

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="A KV-cache server for LLM inference.",
)
app.command(
    "serve",
    cls=ServeCommand,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(serve)
app.command("status")(status)
app.command("drain")(drain)
app.command("demo")(demo)
app.command("keygen")(keygen)
app.add_typer(tenants.app, name="tenants")
app.add_typer(settings_app, name="settings")
app.add_typer(bench.app, name="bench")
for _more in entry_points(group="kvkeep.commands"):  # a checkout adds those of development
    _more.load()(app)


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
