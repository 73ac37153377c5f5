"""The admin API from the other side, with the standard library alone.

Over https:// the server has to show a certificate of the CA in KVKEEP_CLIENT_TLS_CA, or of one that
the system trusts; we show that in KVKEEP_CLIENT_TLS_CERT, if there is one. A request to https:// is
never sent without TLS.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvkeep.cli.listeners import UNKNOWN_UID, listeners
from kvkeep.errors import RequestError, SettingsError, Unavailable
from kvkeep.server.settings import TABLE, made_token
from kvkeep.wire.address import is_loopback, split_host
from kvkeep.wire.auth import at_home, read_token
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
        help="Where the server's admin API is.",
        show_default=True,
    ),
]

TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="KVKEEP_ADMIN_TOKEN",
        metavar="FILE",
        help="File of the admin API's token. That of a server on this host is found without it.",
    ),
]
TOKEN_NAME: Final = "admin-token"
TLS_VARIABLES: Final = ("KVKEEP_CLIENT_TLS_CERT", "KVKEEP_CLIENT_TLS_KEY", "KVKEEP_CLIENT_TLS_CA")


# A proxy from the environment is for the world outside, and would see the token.
class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Our server sends nobody elsewhere; whoever does is not to get the token there."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opener(url: str) -> urllib.request.OpenerDirector:
    handlers: list[Any] = [urllib.request.ProxyHandler({}), _NoRedirects]
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=_context()))
    return urllib.request.build_opener(*handlers)


def _context() -> ssl.SSLContext:
    """By the files that the environment names for clients. SettingsError if one cannot be used."""
    cert, key, ca = (os.environ.get(name) for name in TLS_VARIABLES)
    if bool(cert) != bool(key):
        there, missing = TLS_VARIABLES[:2] if cert else reversed(TLS_VARIABLES[:2])
        raise SettingsError(f"{there} is set and {missing} is not", "set both, as `kvkeep keygen` says, or none")
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
    """Where `kvkeep keygen` puts keys if nobody says, and where the token is looked for."""
    state_home = os.environ.get("XDG_STATE_HOME", "")
    usual = f"{state_home}/kvkeep" if state_home.startswith("/") else TABLE["state_dir"].default
    return Path(os.environ.get("KVKEEP_STATE_DIR") or usual).expanduser() / "keys"


def ask(
    address: str,
    path: str,
    method: str = "GET",
    body: Any = None,
    timeout_s: float | None = None,
    token_file: Path | None = None,
) -> Any:
    """The reply's JSON; None where it has no body. Unavailable if nobody answers, RequestError for a refusal."""
    url = _url(address)
    timeout_s = timeout_s or (_ANSWER_WITHIN_S if method == "GET" else _CHANGE_WITHIN_S)
    token, withheld = _token(url, method, token_file)
    try:
        return _send(url, path, method, body, timeout_s, token)
    except RequestError as refusal:
        if withheld and refusal.code == "unauthorized":
            raise RequestError(refusal.code, refusal.message, field=refusal.field, hint=withheld) from None
        raise


def _send(url: str, path: str, method: str, body: Any, timeout_s: float, token: bytes | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token.decode()}"
    request = urllib.request.Request(url + path, data, headers, method=method)
    try:
        with _opener(url).open(request, timeout=timeout_s) as reply:
            answer = reply.read()
        return json.loads(answer) if answer else None
    except urllib.error.HTTPError as error:
        raise _refusal(error, url) from None
    except (OSError, http.client.HTTPException) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(why, TimeoutError):
            raise _silent(url, timeout_s, method) from None
        if isinstance(why, ssl.SSLError):
            raise _unproved(url, why) from None
        raise Unavailable(
            f"no kvkeep server answers at {url}: {getattr(why, 'strerror', None) or why}",
            "start one with `kvkeep serve`, or say where it is with --http HOST:PORT or KVKEEP_HTTP",
        ) from None
    except ValueError:
        raise _stranger(url) from None


def _token(url: str, method: str, token_file: Path | None) -> tuple[bytes | None, str]:
    """The token, if there is one for that server; or why it is not sent. One that nobody named goes to this host alone,
    and there to ourselves and root: any user can listen on a port that is free while the server is down."""
    if token_file is not None:
        return read_token(token_file.expanduser()), ""
    usual = keys_dir() / TOKEN_NAME
    has_usual = os.path.exists(usual)  # Path.exists raises where the directory is another user's
    host, port = host_and_port(url)
    if not is_loopback(host) or (method == "GET" and not has_usual):
        return None, ""
    if strangers := listeners(host, port) - {os.geteuid(), 0}:
        who = ", ".join("unknown" if uid == UNKNOWN_UID else str(uid) for uid in sorted(strangers))
        hint = f"no token was sent: another user (uid {who}) listens there. If that is the server, say --token-file"
        return None, f"{hint} {usual if has_usual else 'FILE, which is admin.token in its state directory'}"
    token = read_token(usual) if has_usual else None
    return (token, "") if method == "GET" else _token_for_changes(url, token)


def _token_for_changes(url: str, usual: bytes | None) -> tuple[bytes | None, str]:
    """The token that a server without `admin_token` has made for itself; of another server the `usual` one."""
    try:
        rows = _send(url, "/v1/settings", "GET", None, _ANSWER_WITHIN_S, usual)
        settings = {row["name"]: row["value"] for row in rows}
        if settings["admin_token"] != "none":
            return usual, ""
        path = made_token(Path(settings["state_dir"]), settings["name"])
    except (KeyError, TypeError):
        raise _stranger(url) from None
    try:
        return read_token(path), ""
    except SettingsError as error:
        return None, f"{error.message}. Run this as the server's user, or give a copy of that file with --token-file"


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
    """Of what `--http` was given."""
    return split_host(_url(address).partition("://")[2])


def _refusal(error: urllib.error.HTTPError, url: str) -> RequestError | Unavailable:
    """What the server said, as the exception it was there."""
    with error:
        try:
            said = json.loads(error.read())
            return RequestError(said["error"], said["message"], field=said["field"], hint=said["hint"])
        except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
            return _stranger(url)


def _silent(url: str, timeout_s: float, method: str) -> Unavailable:
    """Somebody took the connection, or the kernel did in its name, and then said nothing."""
    unknown = "" if method == "GET" else "; whether the change was made is not known"
    return Unavailable(
        f"a server listens at {url} but did not answer within {timeout_s:g} s{unknown}",
        "it may be paused or stuck: see its log; if it stays so, end that process and start it again",
    )


def _unproved(url: str, error: ssl.SSLError) -> Unavailable:
    """The handshake failed, on either side. Nothing was asked."""
    return Unavailable(
        f"no TLS connection to {url}: {handshake_problem(error)}",
        f"{TLS_VARIABLES[2]} names the CA of the server, {TLS_VARIABLES[0]} and {TLS_VARIABLES[1]} our certificate; "
        f"a server without TLS is asked by --http http://{url.partition('://')[2]}",
    )


def _stranger(url: str) -> Unavailable:
    return Unavailable(f"what answers at {url} is no kvkeep server", "say where it is with --http HOST:PORT")
