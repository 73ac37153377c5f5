"""`kvkeep keygen`: keys for engines and server and a token for the admin API, in files for their owner alone."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import stat
from json import dumps as to_json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli.output import Json, note, show_json
from kvkeep.cli.remote import TOKEN_NAME, keys_dir
from kvkeep.errors import SettingsError
from kvkeep.server.auth import read_line
from kvkeep.wire.auth import new_pair, read_pair, write_new

AUTHORIZED = "authorized"
_FIRST_CLIENT = "engine"
_TOKEN_BYTES = 32


def keygen(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where the files go. By default `keys` in the state directory.", show_default=False),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--name", help="Make a key for a client of this name; may be given several times."),
    ] = None,
    tenants: Annotated[
        str, typer.Option(help="Bind these clients to tenants: ids, beginnings of ids and *, with commas between.")
    ] = "",
    admin_token: Annotated[bool, typer.Option("--admin-token", help="Make a token for the admin API.")] = False,
    json: Json = False,
) -> None:
    """Make keys for engines and server, and a token for the admin API. Nothing is ever overwritten."""
    where = (directory or keys_dir()).expanduser().absolute()
    clients = names or ([] if admin_token else [_FIRST_CLIENT])
    made = make(where, clients, tenants, admin_token)
    if json:
        show_json(made)
        return
    for path in made["files"]:
        print(path)
    print()
    for line in lines_for_people(made):
        print(line)
    note("files that end in .key and the token are secrets: move each to the host that needs it, and nowhere else")
    if not names and clients:
        note(f"the client is called {_FIRST_CLIENT}, as no name was given; for several: --name host-a --name host-b")


def make(where: Path, clients: list[str], tenants: str, admin_token: bool) -> dict[str, Any]:
    """Makes what is asked for, all or nothing of it, and says where it is and how to use it. The server's own pair is
    made with the first client. SettingsError for a name that is none or is taken."""
    _check_names(clients)
    if tenants and not clients:
        raise SettingsError("--tenants binds clients, and none is made", "name them with --name")
    _make_directory(where)
    if clients:
        _make_directory(where / AUTHORIZED)
    texts: dict[Path, str] = {}
    server_key, made = where / "server.key", {"directory": str(where)}
    if clients and not server_key.exists():
        public, secret = new_pair()
        texts[server_key] = f"# kvkeep: secret key of the server\n{secret}\n"
        texts[where / "server.pub"] = f"# kvkeep: public key of the server\n{public}\n"
    elif clients:
        public, _ = read_pair(server_key)
    entries = []
    for name in clients:
        own, secret = new_pair()
        line = f"{own} {name}" + (f" tenants={tenants}" if tenants else "")
        try:
            read_line(line)
        except ValueError as error:
            raise SettingsError(f"--tenants {tenants}: {error}") from None
        texts[where / f"{name}.key"] = f"# kvkeep: secret key of the client {name}\n{secret}\n"
        texts[where / AUTHORIZED / f"{name}.pub"] = f"{line}\n"
        entries.append({"name": name, "curve_key": str(where / f"{name}.key"), "public_key": own, "server_key": public})
    if admin_token:
        texts[where / TOKEN_NAME] = secrets.token_urlsafe(_TOKEN_BYTES) + "\n"
    _write(texts)
    server: dict[str, str] = {}
    if clients:
        server |= {"curve_key": str(server_key), "authorized_keys": str(where / AUTHORIZED)}
    if admin_token:
        server["admin_token"] = str(where / TOKEN_NAME)
    return {**made, "files": [str(path) for path in texts], "server": server, "clients": entries}


def lines_for_people(made: dict[str, Any]) -> list[str]:
    """What to put into settings, on both sides, each line as it can be pasted; and what to do then."""
    lines = ["server, in its settings file:"]
    lines += [f"    {name} = {_quoted(value)}" for name, value in made["server"].items()]
    for client in made["clients"]:
        extra = {f"kvkeep.{name}": client[name] for name in ("curve_key", "server_key")}
        lines += ["", f"client {client['name']}, as kv_connector_extra_config:", f"    {_quoted(extra)}"]
        lines += ["or in its environment:", f"    export KVKEEP_CLIENT_KEY={shlex.quote(client['curve_key'])}"]
        lines += [f"    export KVKEEP_SERVER_KEY={shlex.quote(client['server_key'])}"]
    if "admin_token" in made["server"]:
        lines += ["", "commands such as `kvkeep status`:"]
        lines += [f"    --token-file {shlex.quote(made['server']['admin_token'])}"]
    steps = [f"    {number}. {step}" for number, step in enumerate(_next_steps(made), 1)]
    return [*lines, "", "next:", *steps]


def _next_steps(made: dict[str, Any]) -> list[str]:
    if not made["clients"]:
        return ["start the server with its line; from then on all but /healthz and /readyz asks for the token"]
    return [
        "start the server with its lines; one that runs with them already sees new clients by itself",
        "a client on another host: move its .key file there (mode 0600), and write the new path into its lines",
        'it also needs "kvkeep.address": "tcp://HOST:5555", and the server address = "tcp://0.0.0.0:5555"',
        "start the engines with their lines; `kvkeep status` shows who is connected, and who was turned away",
    ]


def _quoted(value: Any) -> str:
    """As JSON; a string in it is one of TOML, too."""
    return to_json(value, ensure_ascii=False)


def _check_names(names: list[str]) -> None:
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) or name in ("server", TOKEN_NAME):
            raise SettingsError(
                f'--name "{name}": expected letters, digits, dots, - and _, at most 64, not server or {TOKEN_NAME}',
                "these two are the server's own",
            )
    if len(set(names)) != len(names):
        raise SettingsError("--name: each client needs a name of its own")


def _make_directory(path: Path) -> None:
    """A directory that is its owner's alone."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise SettingsError(f"{path} cannot be made: {error.strerror}", "choose another --dir") from error
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SettingsError(f"{path} is open to others", f"chmod 700 {path}, or choose another --dir")


def _write(texts: dict[Path, str]) -> None:
    """All files or none."""
    for path in texts:
        if path.exists() or path.is_symlink():
            ours = path.name in (TOKEN_NAME, "server.key", "server.pub")
            remedy = "use that one" if ours else "name the next client with --name NAME"
            raise SettingsError(f"{path} is there already, and nothing was made", f"{remedy}, or remove it")
    written: list[Path] = []
    try:
        for path, text in texts.items():
            write_new(path, text)
            written.append(path)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise SettingsError(f"{path} cannot be written: {error.strerror}", "nothing was made") from error
