"""`kvkeep keygen`: certificates for server and engines, a token for the admin API and the secrets of
a shared tier, in files for their owner alone.

ca.pem, ca.key             the CA that signs the others; its key is needed only to make more certificates
server.pem, server.key     the server's certificate, for each name and IP address that engines reach it by
NAME.pem, NAME.key         the certificate of one client, with NAME as its common name
tier.keys                  what a shared tier is encrypted with, the same on all hosts
authorized/NAME.client     the line of that client for the server's authorized_clients
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import socket
import stat
from json import dumps as to_json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli.output import Json, note, show_json
from kvkeep.cli.remote import TOKEN_NAME, keys_dir
from kvkeep.errors import SettingsError
from kvkeep.server.auth import CLIENT_FILE, read_line
from kvkeep.tiers.tier_keys import new_tier_keys
from kvkeep.wire.secret_files import PRIVATE, read_text, write_new

AUTHORIZED = "authorized"
TIER_KEYS = "tier.keys"
_CA_DAYS, _DAYS = 3650, 825
_FIRST_CLIENT = "engine"
_RESERVED = ("ca", "server", "tier", TOKEN_NAME)
_TLS = ("tls_cert", "tls_key", "tls_ca")
_TOKEN_BYTES = 32


def keygen(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Directory of the files; by default `keys` in the state directory.",
            show_default=False,
        ),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--name", help="A client to make a certificate for; may be repeated."),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", help="A name or IP address of the server; may be repeated."),
    ] = None,
    tenants: Annotated[
        str,
        typer.Option(
            help="Bind these clients to tenants: ids, or prefixes with *, separated by commas."
        ),
    ] = "",
    admin: Annotated[
        bool,
        typer.Option(
            "--admin", help="Let these clients administer the server over HTTPS, without a token."
        ),
    ] = False,
    admin_token: Annotated[
        bool, typer.Option("--admin-token", help="Make a token for the admin API.")
    ] = False,
    tier_keys: Annotated[
        bool,
        typer.Option("--tier-keys", help="Make the secrets that encrypt a shared tier."),
    ] = False,
    days: Annotated[
        int,
        typer.Option(
            help="How long certificates of server and clients are valid.", min=1, max=36_500
        ),
    ] = _DAYS,
    json: Json = False,
) -> None:
    """Make a CA, certificates for server and engines, a token for the admin API, and the secrets of a
    shared tier. Nothing is ever overwritten."""
    where = (directory or keys_dir()).expanduser().absolute()
    is_complete = admin_token or admin or tier_keys or (hosts and (where / "ca.pem").exists())
    clients = names or ([] if is_complete else [_FIRST_CLIENT])
    made = make(
        where,
        clients,
        tenants,
        admin_token,
        tuple(hosts or ()),
        days,
        admin=admin,
        tier_keys=tier_keys,
    )
    if json:
        show_json(made)
        return
    _show(where, made)
    if not names and clients:
        note(
            f"the client is called {_FIRST_CLIENT}, as no name was given; for several: --name host-a --name host-b"
        )


def _show(where: Path, made: dict[str, Any]) -> None:
    for path in made["files"]:
        print(path)
    print()
    for line in lines_for_people(made):
        print(line)
    note(
        "files that end in .key or .keys and the token are secrets: "
        "move each to the host that needs it, and nowhere else"
    )
    if os.geteuid() == 0:
        note(f"a server of another user cannot read these files: chown -R USER {where}")


def make(
    where: Path,
    clients: list[str],
    tenants: str = "",
    admin_token: bool = False,
    hosts: tuple[str, ...] = (),
    days: int = _DAYS,
    *,
    admin: bool = False,
    tier_keys: bool = False,
) -> dict[str, Any]:
    """Makes what is asked for, all or nothing of it, and says where it is and how to use it. The CA
    and the server's certificate are made with the first client; a server's certificate that is
    there is not made again. SettingsError for a name that cannot be one or is taken."""
    _check_names(clients)
    if tenants and not clients:
        raise SettingsError("--tenants binds clients, and none is made", "name them with --name")
    if admin and not clients:
        raise SettingsError(
            "--admin gives a right to clients, and none is made", "name them with --name"
        )
    _make_directory(where)
    texts: dict[Path, str] = {}
    server: dict[str, str] = {}
    entries: list[dict[str, Any]] = []
    rights = _rights(tenants, admin)
    if clients or hosts:
        _make_directory(where / AUTHORIZED)
        entries = _certificates(where, clients, rights, hosts, days, texts)
        entries = [{**entry, "admin": admin} for entry in entries]
        server = {**_named(where, "server"), "authorized_clients": str(where / AUTHORIZED)}
    if admin_token:
        texts[where / TOKEN_NAME] = secrets.token_urlsafe(_TOKEN_BYTES) + "\n"
        server["admin_token"] = str(where / TOKEN_NAME)
    if tier_keys:
        texts[where / TIER_KEYS] = new_tier_keys()
        server["tier_keys"] = str(where / TIER_KEYS)
    _write(texts)
    return {
        "directory": str(where),
        "files": [str(path) for path in texts],
        "server": server,
        "clients": entries,
    }


def _certificates(
    where: Path,
    clients: list[str],
    rights: str,
    hosts: tuple[str, ...],
    days: int,
    texts: dict[Path, str],
) -> list[dict[str, str]]:
    """Puts the files to be written into `texts`, and says what each client needs."""
    try:  # not at the top: a token needs no certificates
        from kvkeep.cli.certificates import Issued, is_host, issue, new_authority
    except ImportError:
        raise SettingsError(
            "to make certificates, kvkeep needs the package cryptography",
            "pip install 'kvkeep[tls]'",
        ) from None

    def add(name: str, issued: Issued) -> Issued:
        texts.update({where / f"{name}.key": issued.key, where / f"{name}.pem": issued.cert})
        return issued

    if (where / "ca.pem").exists():
        ca = Issued(read_text(where / "ca.pem"), read_text(where / "ca.key", PRIVATE, ours=True))
    else:
        ca = add("ca", new_authority(_CA_DAYS))
    if hosts or not (where / "server.pem").exists():
        here = [
            name
            for name in (socket.gethostname(), "localhost", "127.0.0.1", "::1")
            if is_host(name)
        ]
        add("server", issue(ca, "kvkeep server", (*here, *hosts), days=days))
    entries = []
    for name in clients:
        issued = add(name, issue(ca, name, days=days))
        line = name + rights
        entry = where / AUTHORIZED / f"{name}{CLIENT_FILE}"
        if (
            not entry.exists() or entry.read_text() != f"{line}\n"
        ):  # a renewed certificate keeps its line
            texts[entry] = f"{line}\n"
        entries.append({"name": name, **_named(where, name), "fingerprint": issued.fingerprint})
    return entries


def _rights(tenants: str, admin: bool) -> str:
    """What follows a client's name in its line."""
    binding = f" tenants={tenants}" if tenants else ""
    try:
        if "".join(tenants.split()) != tenants:
            raise ValueError("there is a blank in it")
        read_line(f"NAME{binding}")
    except ValueError as error:  # what was given is not shown: it may be a salt
        raise SettingsError(
            f"--tenants: {error}", "in a salt, write %20 for a blank and %2C for a comma"
        ) from None
    return binding + " admin" * admin


def _named(where: Path, name: str) -> dict[str, str]:
    """The files of one side, by option."""
    files = (f"{name}.pem", f"{name}.key", "ca.pem")
    return {option: str(where / file) for option, file in zip(_TLS, files, strict=True)}


def lines_for_people(made: dict[str, Any]) -> list[str]:
    """What to put into settings, on both sides, each line as it can be pasted; and what to do
    then."""
    lines = ["server, in its settings file:"]
    lines += [f"    {name} = {_quoted(value)}" for name, value in made["server"].items()]
    if "tls_cert" in made["server"]:
        lines += ['    # address = "tcp://0.0.0.0:5555"  # for engines on other hosts']
        lines += ['    # http_address = "0.0.0.0:5556"  # for operators on other hosts']
    for client in made["clients"]:
        extra = {f"kvkeep.{name}": client[name] for name in _TLS}
        if client["admin"]:
            lines += [
                "",
                f"{client['name']}, in the environment of `kvkeep status --http https://HOST:5556`:",
            ]
        else:
            lines += [
                "",
                f"client {client['name']}, as kv_connector_extra_config:",
                f"    {_quoted(extra)}",
            ]
            lines += ["or in its environment:"]
        lines += [
            f"    export KVKEEP_CLIENT_{name.upper()}={shlex.quote(client[name])}" for name in _TLS
        ]
    if "admin_token" in made["server"]:
        lines += ["", "commands such as `kvkeep status`:"]
        lines += [f"    --token-file {shlex.quote(made['server']['admin_token'])}"]
    steps = [f"    {number}. {step}" for number, step in enumerate(_next_steps(made), 1)]
    return [*lines, "", "next:", *steps]


def _next_steps(made: dict[str, Any]) -> list[str]:
    if not made["clients"]:
        token = "from then on all but /healthz and /readyz asks for the token"
        certificate = "one that runs with them already reads its new certificate by itself"
        tier = "every server of the shared tier needs the same file, and the tier is empty at first"
        parts = [certificate] * ("tls_cert" in made["server"])
        parts += [token] * ("admin_token" in made["server"])
        parts += [tier] * ("tier_keys" in made["server"])
        return ["; ".join(["start the server with its lines", *parts])]
    if all(client["admin"] for client in made["clients"]):
        return [
            "start the server with its lines, and with an http_address that others reach, such as 0.0.0.0:5556",
            "an operator on another host: copy the .pem and .key (mode 0600) and ca.pem there, and write the new paths",
            "HOST must be in the server's certificate: make that one with --host HOST",
        ]
    return [
        "start the server with its lines; one that runs with them already sees new clients by itself",
        "a client on another host: copy its .pem and .key (mode 0600) and ca.pem there, and write the new paths",
        'it also needs "kvkeep.address": "tcp://HOST:5555", and the server address = "tcp://0.0.0.0:5555"',
        "HOST must be in the server's certificate: make that one with --host HOST",
        "start the engines with their lines; `kvkeep status` shows who is connected, and who was turned away",
    ]


def _quoted(value: Any) -> str:
    """As JSON; a string in it is one of TOML, too."""
    return to_json(value, ensure_ascii=False)


def _check_names(names: list[str]) -> None:
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) or name in _RESERVED:
            raise SettingsError(
                f'--name "{name}": expected letters, digits, dots, - and _, at most 64, not {" or ".join(_RESERVED)}',
                "files of the server have these names",
            )
    if len(set(names)) != len(names):
        raise SettingsError("--name: each client needs a name of its own")


def _make_directory(path: Path) -> None:
    """A directory that is its owner's alone."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be made: {error.strerror}", "choose another --dir"
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SettingsError(
            f"{path} is open to others", f"chmod 700 {path}, or choose another --dir"
        )


def _write(texts: dict[Path, str]) -> None:
    """All files or none."""
    for path in texts:
        if path.exists() or path.is_symlink():
            ours = path.stem in _RESERVED
            hint = (
                "use that one" if ours else "name the next client with --name NAME"
            ) + ", or move it away"
            if path.suffix == CLIENT_FILE:
                hint = "it gives this client other rights: repeat the --tenants and --admin that it has, or edit it"
            raise SettingsError(f"{path} is there already, and nothing was made", hint)
    written: list[Path] = []
    try:
        for path, text in texts.items():
            write_new(path, text)
            written.append(path)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise SettingsError(
            f"{path} cannot be written: {error.strerror}", "nothing was made"
        ) from error
