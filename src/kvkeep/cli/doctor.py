"""`kvkeep doctor`: what is wrong on this host, or with its server, and what to do about it.

Each check gives one finding."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli import doctor_host, doctor_server
from kvkeep.cli.doctor_host import Finding
from kvkeep.cli.output import APP, Json, counted, show_json, show_table
from kvkeep.cli.remote import DEFAULT_ADDRESS, Http, TokenFile

EXIT_FOUND = 1


app = typer.Typer(**APP)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def doctor(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Read settings from this TOML file.")] = None,
    server: Annotated[
        bool, typer.Option(help="Ask the running server; --no-server: check this host alone.")
    ] = True,
    http: Http = DEFAULT_ADDRESS,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Check this host and its server, and name a remedy for what is wrong. Takes the flags of
    `kvkeep serve`, too."""
    settings, finding = doctor_host.settings_of(config, context.args, os.environ)
    findings = [finding]
    if settings is not None:
        findings += [check(settings) for check in doctor_host.OF_SETTINGS]
    findings += [check() for check in doctor_host.OF_ENVIRONMENT]
    if server:
        running = doctor_server.Running(http, token_file, settings)
        findings += [check(running) for check in doctor_server.WITHOUT_ANSWER]
        if running.has_answered:
            findings += [check(running) for check in doctor_server.WITH_ANSWER]
    if json:
        show_json({"findings": [asdict(each) for each in findings]})
    else:
        _show(findings)
    if not all(each.ok for each in findings):
        raise typer.Exit(EXIT_FOUND)


def _show(findings: list[Finding]) -> None:
    rows = [(_state(each), each.check, each.found) for each in findings]
    show_table(("", "check", "found"), rows)
    wrong = [each for each in findings if not each.ok]
    print()
    for each in wrong:
        print(f"{each.check}: {each.remedy}")
    if not wrong:
        print(f"nothing is wrong ({counted(len(findings), 'check')})")


def _state(finding: Finding) -> str:
    return "WRONG" if not finding.ok else "skipped" if finding.skipped else "ok"
