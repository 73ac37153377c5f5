"""A client of the admin API, with the standard library only.

Over https:// the server must show a certificate of the CA in KVKEEP_CLIENT_TLS_CA, or of one that
the system trusts; we show that in KVKEEP_CLIENT_TLS_CERT, if it is set. A request to https:// is
never sent without TLS.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvkeep.cli.output import Json, show_json
from kvkeep.errors import RequestError, SettingsError, Unavailable
from kvkeep.server.settings import TABLE, made_token
from kvkeep.wire.address import is_loopback, split_host
from kvkeep.wire.frames import MAGIC, Header, encode
from kvkeep.wire.messages import Ping
from kvkeep.wire.peers import peer_uid
from kvkeep.wire.secret_files import at_home, read_token
from kvkeep.wire.tls import handshake_problem, show_own, trust_ca

DEFAULT_ADDRESS = TABLE["http_address"].default
_ANSWER_WITHIN_S = 5.0
_CHANGE_WITHIN_S = 15.0  # a change goes to disk, and its outcome is worth waiting for

Http = Annotated[
    str,
    typer.Option(
        "--http",
        envvar="KVKEEP_HTTP",
        metavar="[https://]HOST:PORT",
        help="Address of the server's admin API.",
        show_default=True,
    ),
]

TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="KVKEEP_ADMIN_TOKEN",
        metavar="FILE",
        help="File of the admin API's token; not needed for a server of this user on this host.",
    ),
]


@dataclass(frozen=True)
class Server:
    """A running server, by the options of a command, and how its answers are shown."""

    http: str
    token_file: Path | None
    as_json: bool

    def ask(
        self,
        path: str,
        method: str = "GET",
        body: Any = None,
        timeout_s: float | None = None,
        *,
        needs_token: bool = False,
    ) -> Any:
        """As the function `ask`, with its address and token."""
        token = self.token_file
        return ask(self.http, path, method, body, timeout_s, token, needs_token=needs_token)

    def show(self, said: Any, for_people: str | Callable[[], None]) -> None:
        """Prints an answer: as JSON, or the text, or what the function prints."""
        if self.as_json:
            show_json(said)
        elif isinstance(for_people, str):
            print(for_people)
        else:
            for_people()


def asks_server(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command --http, --token-file and --json, as a Server that is its first argument."""

    @wraps(command)
    def run(
        *args: Any,
        http: str = DEFAULT_ADDRESS,
        token_file: Path | None = None,
        json: bool = False,
        **own: Any,
    ) -> None:
        command(Server(http, token_file, json), *args, **own)

    options = (
        ("http", Http, DEFAULT_ADDRESS),
        ("token_file", TokenFile, None),
        ("json", Json, False),
    )
    parameters = [*signature(command, eval_str=True).parameters.values()][1:]
    for name, kind, default in options:
        at_end = Parameter.KEYWORD_ONLY
        parameters.append(Parameter(name, at_end, default=default, annotation=kind))
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


TOKEN_NAME: Final = "admin-token"
_HINT: Final = (
    "FILE, which is admin.token in its state directory or the file that its admin_token names"
)
ChooseToken = Callable[[socket.socket], tuple[bytes | None, str]]
TLS_VARIABLES: Final = ("KVKEEP_CLIENT_TLS_CERT", "KVKEEP_CLIENT_TLS_KEY", "KVKEEP_CLIENT_TLS_CA")


def _context() -> ssl.SSLContext:
    """By the files that the environment names for clients. SettingsError if one cannot be used."""
    cert, key, ca = (os.environ.get(name) for name in TLS_VARIABLES)
    if bool(cert) != bool(key):
        there, missing = TLS_VARIABLES[:2] if cert else reversed(TLS_VARIABLES[:2])
        raise SettingsError(
            f"{there} is set and {missing} is not", "set both, as `kvkeep keygen` says, or none"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # with CERT_REQUIRED and check_hostname
    context.hostname_checks_common_name = False
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if ca:
        trust_ca(context, at_home(ca))
    else:
        context.load_default_certs()
    if cert and key:
        show_own(context, at_home(cert), at_home(key))
    return context


def keys_dir() -> Path:
    """Where `kvkeep keygen` puts keys by default, and where the token is looked for."""
    state_home = os.environ.get("XDG_STATE_HOME", "")
    usual = f"{state_home}/kvkeep" if state_home.startswith("/") else TABLE["state_dir"].default
    return Path(os.environ.get("KVKEEP_STATE_DIR") or usual).expanduser() / "keys"


class _OtherUser(Exception):
    """Another user than our own and root listens there."""


def ask(
    address: str,
    path: str,
    method: str = "GET",
    body: Any = None,
    timeout_s: float | None = None,
    token_file: Path | None = None,
    *,
    needs_token: bool = False,
) -> Any:
    """The reply's JSON; None without a body. Unavailable if no server answers, RequestError for a
    refusal. `needs_token`: the route wants one in any case, as all do that change something."""
    url = _url(address)
    timeout_s = timeout_s or (_ANSWER_WITHIN_S if method == "GET" else _CHANGE_WITHIN_S)
    if token_file is not None:
        token = read_token(token_file.expanduser())
        return _send(url, path, method, body, timeout_s, lambda connected: (token, ""))
    found, withheld = _found_token(url, method, needs_token=needs_token)

    def choose(connected: socket.socket) -> tuple[bytes | None, str]:
        why = _distrust(connected, timeout_s) if found else ""
        return (None, why) if why else (found, withheld)

    return _send(url, path, method, body, timeout_s, choose)


def _send(
    url: str, path: str, method: str, body: Any, timeout_s: float, choose_token: ChooseToken
) -> Any:
    """`choose_token` is called with the connection: it returns the token to send, or None and why
    not."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    try:
        with contextlib.closing(_connect(url, timeout_s)) as connection:
            token, withheld = choose_token(connection.sock)
            if token:
                headers["Authorization"] = f"Bearer {token.decode()}"
            connection.request(method, path, data, headers)
            reply = connection.getresponse()
            answer = reply.read()
        if reply.status >= 300:  # our server never redirects
            raise _refusal(answer, url, withheld)
        return _printable(json.loads(answer)) if answer else None
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, TimeoutError):
            raise _silent(url, timeout_s, method) from None
        if isinstance(error, ssl.SSLError):
            raise _unproved(url, error) from None
        if isinstance(error, ConnectionError | http.client.BadStatusLine) and is_for_engines(url):
            raise _for_engines(url) from None
        raise Unavailable(
            f"no kvkeep server answers at {url}: {getattr(error, 'strerror', None) or error}",
            "start one with `kvkeep serve`, or name its address with --http HOST:PORT or "
            "KVKEEP_HTTP",
        ) from None
    except ValueError:
        raise _stranger(url) from None


def _connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    host, port = host_and_port(url)
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    if url.startswith("https:"):
        context = _context()
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    connection.connect()
    return connection


def _distrust(connected: socket.socket, timeout_s: float) -> str:
    """Why the default token is not sent over this connection; "" if our own user or root is at its
    other end. Any user can listen on the port while the server is down. TimeoutError if no process
    accepts the connection."""
    until_s = time.monotonic() + timeout_s
    while (uid := peer_uid(connected)) is None:
        if time.monotonic() >= until_s:
            raise TimeoutError
        time.sleep(0.005)
    if uid in (os.geteuid(), 0):
        return ""
    return (
        f"no token was sent: another user (uid {uid}) listens there. If that is the server, use "
        f"--token-file {_HINT}"
    )


def _found_token(url: str, method: str, *, needs_token: bool = False) -> tuple[bytes | None, str]:
    """The default token for a server on this host, or why there is none. It is that of `kvkeep
    keygen`, or where one is needed in any case the one that a server without `admin_token` has made
    for itself."""
    if not is_loopback(host_and_port(url)[0]):
        return None, ""
    usual = keys_dir() / TOKEN_NAME
    # Path.exists raises if the directory belongs to another user.
    token = read_token(usual) if os.path.exists(usual) else None
    if method == "GET" and not needs_token:
        return token, ""

    def choose(connected: socket.socket) -> tuple[bytes | None, str]:
        if why := _distrust(connected, _ANSWER_WITHIN_S):
            raise _OtherUser(why)  # its answer could name any file as the token's
        return token, ""

    try:
        rows = _send(url, "/v1/settings", "GET", None, _ANSWER_WITHIN_S, choose)
    except _OtherUser as other:
        return None, str(other)
    try:
        settings = {row["name"]: row["value"] for row in rows}
        if settings["admin_token"] != "none":
            return token, ""
        path = made_token(Path(settings["state_dir"]), settings["name"])
    except (KeyError, TypeError):
        raise _stranger(url) from None
    try:
        return read_token(path), ""
    except SettingsError as error:
        remedy = "Run this as the server's user, or give a copy of that file with --token-file"
        return None, f"{error.message}. {remedy}"


def _printable(value: Any) -> Any:
    """Without control characters, which another user may have sent to the terminal."""
    if isinstance(value, str):
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in value)
    if isinstance(value, dict):
        return {_printable(name): _printable(each) for name, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list) else value


def _url(address: str) -> str:
    scheme, separator, rest = address.rpartition("://")
    try:
        if separator and scheme not in ("http", "https"):
            raise ValueError
        split_host(rest.rstrip("/"))
    except ValueError:
        hint = f"the default is {DEFAULT_ADDRESS}; with https:// in front of it for a server that has TLS"
        raise SettingsError(f'--http "{address}": expected host:port', hint) from None
    return f"{scheme or 'http'}://{rest.rstrip('/')}"


def host_and_port(address: str) -> tuple[str, int]:
    """Of the value of `--http`."""
    return split_host(_url(address).partition("://")[2])


def _refusal(answer: bytes, url: str, withheld: str) -> RequestError | Unavailable:
    """The error that the server sent."""
    try:
        said = _printable(json.loads(answer))
        hint = withheld if withheld and said["error"] == "unauthorized" else said["hint"]
        return RequestError(said["error"], said["message"], field=said["field"], hint=hint)
    except (ValueError, KeyError, TypeError):
        return _stranger(url)


def _silent(url: str, timeout_s: float, method: str) -> Unavailable:
    """A process, or the kernel for it, accepted the connection and did not answer."""
    unknown = "" if method == "GET" else "; whether the change was made is not known"
    return Unavailable(
        f"a server listens at {url} but did not answer within {timeout_s:g} s{unknown}",
        "it may be paused or stuck: see its log; if that does not help, restart it",
    )


def _unproved(url: str, error: ssl.SSLError) -> Unavailable:
    """The handshake failed, on either side. Nothing was asked."""
    return Unavailable(
        f"no TLS connection to {url}: {handshake_problem(error)}",
        f"{TLS_VARIABLES[2]} names the CA of the server, {TLS_VARIABLES[0]} and "
        f"{TLS_VARIABLES[1]} our certificate; for a server without TLS use --http "
        f"http://{url.partition('://')[2]}",
    )


def is_for_engines(address: str) -> bool:
    """Whether a kvkeep server listens for engines there, without TLS: it answers our Ping."""
    ping = b"".join(encode(Header(0, 1), Ping()))
    with (
        contextlib.suppress(OSError),
        socket.create_connection(host_and_port(address), timeout=1) as probe,
    ):
        probe.sendall(ping)
        return probe.recv(len(MAGIC)) == MAGIC
    return False


def time_at(address: str) -> float | None:
    """The time that a server's answers have, in seconds since 1970; None if they have none.
    OSError if it does not answer."""
    with contextlib.closing(_connect(_url(address), _ANSWER_WITHIN_S)) as connection:
        connection.request("GET", "/healthz")
        date = connection.getresponse().getheader("date")
    try:
        return parsedate_to_datetime(date).timestamp() if date else None
    except ValueError:
        return None


def _for_engines(url: str) -> Unavailable:
    return Unavailable(
        f"{url.partition('://')[2]} is the address for engines, not the server's HTTP address",
        f"name http_address with --http HOST:PORT; the default is {DEFAULT_ADDRESS}",
    )


def _stranger(url: str) -> Unavailable:
    return Unavailable(
        f"what answers at {url} is not a kvkeep server", "name its address with --http HOST:PORT"
    )
