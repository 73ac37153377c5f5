"""`kvkeep settings ...`: what a running server was told, and what can change while it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli.output import Json, show_json, show_table
from kvkeep.cli.remote import DEFAULT_ADDRESS, Http, TokenFile, ask

app = typer.Typer(
    no_args_is_help=True, help="Show a running server's settings, and change live ones."
)


@app.command("list")
def list_settings(
    http: Http = DEFAULT_ADDRESS, token_file: TokenFile = None, json: Json = False
) -> None:
    """Show every setting, where its value came from, and whether it is live."""
    said = ask(http, "/v1/settings", token_file=token_file)
    if json:
        show_json(said)
        return
    rows = [
        (row["name"], row["value"], row["source"], "live" if row["live"] else "") for row in said
    ]
    show_table(("setting", "value", "source", ""), rows)


@app.command("set")
def set_setting(
    name: Annotated[str, typer.Argument(help="A live setting, such as log_level.")],
    value: Annotated[str, typer.Argument(help="Its new value, written as in a flag.")],
    http: Http = DEFAULT_ADDRESS,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Change one live setting of a running server."""
    setting = name.replace("-", "_")
    said = ask(http, "/v1/settings", "PATCH", {setting: value}, token_file=token_file)
    row = next(row for row in said if row["name"] == setting)
    if json:
        show_json(row)
    else:
        print(f"{row['name']} = {row['value']}")
