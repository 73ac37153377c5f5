"""Who may ask the admin API for what, and how many at a time.

    /healthz, /readyz      open to all, at any time: they wait for no other request
    /v1/explain            needs the token: it tells of tenants' requests
    /v1/status             open on loopback; without the token it leaves out whose sessions are open
    other reading routes   open on loopback; need the token beyond it, and if `admin_token` is set
    routes that change     need the token, on loopback too
    the dashboard's files  open to all: they hold nothing of the server

Over TLS, a certificate with the right `admin` in `authorized_clients` replaces the token, for all
routes. A server without `admin_token` makes a token at its first start, in a file that only its
user can read.

A browser on the server's host can reach loopback on behalf of any site it shows. Two tricks are
refused here: a site whose name resolves to 127.0.0.1 (its requests carry that name as Host), and a
form or script that sends a change blindly (its requests carry the site's Origin). A server that
listens elsewhere does not know its names; there the token replaces the check of Host. A body has at
most 64 KiB, and a longer one is refused before it is read."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvkeep.errors import RequestError, SettingsError
from kvkeep.server.dashboard import PATHS as DASHBOARD_PATHS
from kvkeep.server.log_limits import ProblemLog
from kvkeep.wire.secret_files import check_directory, read_token, write_new

log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 64 * 1024
MAX_WORKED_ON: Final = 4  # requests at a time, to leave processor time to the server's loop
MAX_WAITING: Final = 64
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
SECRET_PATHS: Final = frozenset({"/v1/explain"})  # of what tenants asked
STATUS: Final[Mapping[str, int]] = {
    "unauthorized": 401,
    "bad_host": 403,
    "bad_origin": 403,
    "unknown_tenant": 404,
    "unknown_prefetch": 404,
    "unknown_request": 404,
    "unknown_recording": 404,
    "quota_too_large": 409,
    "limit_below_quota": 409,
    "too_many_tenants": 409,
    "too_many_prefetches": 409,
    "no_tiers": 409,
    "recording": 409,
    "body_too_large": 413,
    "not_saved": 500,
    "internal_error": 500,
    "loop_busy": 503,
    "too_many_requests": 503,
    "outcome_unknown": 504,
}
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_TOKEN_BYTES = 32


@dataclass(frozen=True)
class Access:
    """`token` returns the current token. `for_reading`: reading routes need it too. `hint` says
    where to find it."""

    token: Callable[[], bytes]
    for_reading: bool = True
    loopback: bool = True
    hint: str = ""


class Guard:
    """ASGI middleware: refuses requests, or passes them on, at most MAX_WORKED_ON at a time."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        problems: ProblemLog,
        on_bad_token: Callable[[], None] = lambda: None,
    ) -> None:
        self._app = app
        self._access = access
        self._problems = problems
        self._on_bad_token = on_bad_token
        self._working = asyncio.Semaphore(MAX_WORKED_ON)
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        try:
            # First: closing while the client sends would lose the answer.
            body = await _read_body(headers, receive)
            self._check(scope, headers)
            if scope["path"] not in OPEN_PATHS and self._waiting >= MAX_WAITING:
                raise RequestError(
                    "too_many_requests", "too many requests wait for an answer", hint="try again"
                )
        except RequestError as refusal:
            client = (scope.get("client") or ("an unknown address",))[0]
            self._problems.note(
                refusal.code, f"a request from {client} was refused: {refusal.message}"
            )
            if refusal.code == "unauthorized":
                self._on_bad_token()
            await answer_to(refusal)(scope, receive, send)
            return
        await self._pass_on(scope, _replay(body, receive), send)

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        is_change = scope["method"] not in _READING
        if self._access.loopback:
            check_host(headers)
        if is_change:
            check_origin(headers, scope.get("scheme", "http"))
        is_admin = scope.get("state", {}).get("is_admin", lambda: False)  # see TlsLayer
        open_paths = OPEN_PATHS if is_change else OPEN_PATHS | DASHBOARD_PATHS
        needs_token = scope["path"] not in open_paths and (
            self._access.for_reading or is_change or scope["path"] in SECRET_PATHS
        )
        if needs_token and not is_admin():
            check_token(headers, self._access.token(), self._access.hint)
        # Routes that are open to all may tell an operator more.
        has_proof = needs_token or is_admin() or self._has_token(headers)
        scope.setdefault("state", {})["is_operator"] = has_proof

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        if "authorization" not in headers:
            return False
        try:
            check_token(headers, self._access.token())
        except RequestError:
            return False
        return True

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        self._waiting += 1
        try:
            await self._working.acquire()
        finally:
            self._waiting -= 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._working.release()


def token_reader(path: Path, problems: ProblemLog, *, ours: bool = False) -> Callable[[], bytes]:
    """Reads the token from the file at each call: a new token is valid at once, and with a file
    that cannot be read no token is. SettingsError if it cannot be read now, or should be `ours` and
    belongs to another user."""
    read_token(path, ours=ours)

    def current() -> bytes:
        try:
            return read_token(path, ours=ours)
        except SettingsError as error:
            problems.note("admin_token", f"the admin API's token cannot be used: {error.message}")
            return secrets.token_bytes(32)

    return current


def make_token(path: Path) -> None:
    """Makes the token of a server without `admin_token`, in a directory of its user. An earlier
    token stays, unless other users may have read or changed it. SettingsError if the file cannot be
    written."""
    directory = path.parent
    try:
        if directory.stat().st_uid == os.geteuid():
            directory.chmod(0o700)
        check_directory(directory, directory.stat())
        if path.is_symlink():
            path.unlink()
        try:
            read_token(path, ours=True)
            return
        except SettingsError as error:
            if path.exists():
                log.warning("a new token for the admin API replaces the last: %s", error.message)
        draft = path.with_suffix(".new")
        draft.unlink(missing_ok=True)
        write_new(draft, secrets.token_urlsafe(_TOKEN_BYTES) + "\n")
        draft.replace(path)
    except OSError as error:
        raise SettingsError(
            f"the admin API's token cannot be written to {path}: {error.strerror}",
            "choose a --state-dir that can be written, or set admin_token",
        ) from error


def check_token(headers: Mapping[str, str], token: bytes, where: str = "") -> None:
    """Raises unless the request carries the token. Compares in constant time."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    is_right = secrets.compare_digest(given.strip().encode("latin-1"), token)
    if scheme.lower() != "bearer" or not is_right:
        wrong = "this is not the token of this server"
        raise RequestError(
            "unauthorized",
            wrong if given else "this request needs the server's token",
            field="Authorization",
            hint="send `Authorization: Bearer TOKEN`; with our commands --token-file FILE, or "
            f"KVKEEP_ADMIN_TOKEN=FILE{where}",
        )


def check_host(headers: Mapping[str, str]) -> None:
    """Raises unless the request was meant for loopback."""
    if not is_loopback_host(headers.get("host", "")):
        raise RequestError(
            "bad_host",
            "the Host header does not name a loopback address",
            field="Host",
            hint="ask http://127.0.0.1 or http://localhost, with the server's port",
        )


def check_origin(headers: Mapping[str, str], scheme: str = "http") -> None:
    """Raises for a change from a web page of another origin. Only browsers send Origin."""
    origin = headers.get("origin")
    other_site = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if other_site or (origin is not None and origin != f"{scheme}://{headers.get('host', '')}"):
        raise RequestError(
            "bad_origin", "a web page of another site may change nothing here", field="Origin"
        )


def is_loopback_host(host: str) -> bool:
    """Whether a Host header's value is localhost or a loopback address, with or without a port."""
    if not re.fullmatch(r"[0-9A-Za-z.:\[\]-]{1,64}", host):
        return False
    try:
        parts = urlsplit(f"//{host}")
        name, _ = parts.hostname or "", parts.port
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _read_body(headers: Mapping[str, str], receive: Receive) -> bytes:
    too_large = RequestError("body_too_large", f"a body has at most {MAX_BODY_BYTES} bytes")
    if len(headers.get("content-length", "0")) > len(str(MAX_BODY_BYTES)):
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def answer_to(error: RequestError, status: int | None = None) -> Response:
    """The answer that tells of an error. The status follows from its code, unless it is given."""
    said = {name: getattr(error, name) for name in ("message", "field", "hint")}
    headers = {"www-authenticate": "Bearer"} if error.code == "unauthorized" else None
    # It may quote the request, and JSON may bring half of a surrogate pair, which has no UTF-8.
    return JSONResponse(
        {
            name: text.encode(errors="backslashreplace").decode()
            for name, text in {"error": error.code, **said}.items()
        },
        status or STATUS.get(error.code, 422),
        headers,
    )
