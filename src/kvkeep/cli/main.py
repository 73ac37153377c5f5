"""`kvkeep`: all commands, and how errors end them.

    exit code   0  done
                1  the server refused, or failed; `kvkeep doctor` has found something wrong
                2  the command, a setting or the pool is wrong
                3  no server answers
                4  `kvkeep verify` has found blocks that are bad or cannot be read

An error is two lines on stderr: `error: ...` and, if there is a remedy, `hint: ...`. Only a bug
shows a traceback."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvkeep import __version__
from kvkeep.cli import bench, tenants
from kvkeep.cli.admin import drain, settings_app, status
from kvkeep.cli.demo import demo
from kvkeep.cli.doctor import doctor
from kvkeep.cli.explain import explain
from kvkeep.cli.keygen import keygen
from kvkeep.cli.output import note
from kvkeep.cli.plan import show_plan
from kvkeep.cli.prefetch import prefetch
from kvkeep.cli.record import record, replay_recording
from kvkeep.cli.serve import ServeCommand, serve
from kvkeep.cli.tiers import tiers
from kvkeep.cli.top import top
from kvkeep.cli.verify import verify
from kvkeep.errors import KVKeepError, PoolError, RequestError, SettingsError, Unavailable

EXIT_REFUSED, EXIT_WRONG, EXIT_UNAVAILABLE = 1, 2, 3

# The sections of `kvkeep --help`: the commands of each in order, with a help that fits 80 columns.
# Commands that others add follow in a section of their own.
SECTIONS: dict[str, dict[str, str]] = {
    "Daily": {
        "serve": "Run a server in the foreground.",
        "status": "Show the server: pool, sessions, hits, tenants.",
        "top": "Show the server live, once a second.",
        "doctor": "Check this host and its server, with remedies.",
        "explain": "Show why blocks of requests missed.",
        "drain": "Stop the server in order; its pool stays.",
        "tiers": "Show the server's disks and its shared tier.",
        "settings": "Show a server's settings, and change live ones.",
    },
    "Tenants": {
        "tenants": "Show tenants, set quotas and limits, clear blocks.",
        "prefetch": "Bring a tenant's blocks from disk to memory.",
    },
    "Tools": {
        "plan": "Show what memory and disk a trace of requests is worth.",
        "record": "Record a server's requests, without tenants' content.",
        "replay": "Carry out recorded requests again, and compare.",
        "keygen": "Make certificates and an admin token.",
        "verify": "Compare every block on disk with its checksum.",
        "bench": "Measure this machine.",
        "demo": "See engines share a cache that is killed meanwhile.",
    },
}


class Sections(TyperGroup):
    """Lists commands in sections."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        known = {name for section in SECTIONS.values() for name in section}
        more = {
            name: command.get_short_help_str(50)
            for name, command in self.commands.items()
            if name not in known
        }
        width = max(map(len, self.commands))
        for title, section in {**SECTIONS, "Development": more}.items():
            if section:
                with formatter.section(title):
                    formatter.write_dl(
                        [(f"{name:{width}}", text) for name, text in section.items()]
                    )


app = typer.Typer(
    cls=Sections,
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
app.command("top")(top)
app.command("doctor", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    doctor
)
app.command("explain")(explain)
app.command("drain")(drain)
app.command("tiers")(tiers)
app.command("prefetch")(prefetch)
app.command("verify")(verify)
app.command("plan")(show_plan)
app.command("record")(record)
app.command("replay")(replay_recording)
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
