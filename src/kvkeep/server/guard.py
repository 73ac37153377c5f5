"""Who may ask the admin API for what, and how many at a time.

    /healthz, /readyz      anybody, always: they wait for no other request
    other reading routes   on loopback anybody; beyond it, and where `admin_token` is set, whoever sends the token
    routes that change     whoever sends the token, on loopback too

Over TLS, a certificate that has the right `admin` in `authorized_clients` does instead of the
token, for all routes. A server without `admin_token` makes a token at its first start, in a file
that only its user can read.

A browser on the server's host can reach loopback on behalf of any site it shows. Two tricks are
known, and refused here: a site whose name is made to resolve to 127.0.0.1 (its requests carry that
name as Host), and a form or script that sends a change blindly (its requests carry the site's
Origin). A server that listens elsewhere has names that it does not know; there the token does what
the Host header does on loopback. A body has at most 64 KiB, and a longer one is refused before it
is read."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvkeep.errors import RequestError, SettingsError
from kvkeep.wire.secret_files import check_directory, read_token, write_new

log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 64 * 1024
MAX_WORKED_ON: Final = (
    4  # requests at a time, so that rendering answers leaves the server's loop its processor time
)
MAX_WAITING: Final = 64
LOG_INTERVAL_S: Final = 60.0
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
STATUS: Final[Mapping[str, int]] = {
    "unauthorized": 401,
    "bad_host": 403,
    "bad_origin": 403,
    "body_too_large": 413,
    "too_many_requests": 503,
}
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_TOKEN_BYTES = 32


class RefusalLog:
    """Logs refusals and failures: one message a minute for each kind, with how many there were.
    For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, int] = {}
        self._logged_at: dict[str, float] = {}

    def note(self, kind: str, message: str, error: Exception | None = None) -> None:
        """An `error` makes it a failure, logged with its traceback."""
        self._counts[kind] = self._counts.get(kind, 0) + 1
        now_s = self._clock()
        if now_s - self._logged_at.get(kind, float("-inf")) >= LOG_INTERVAL_S:
            self._logged_at[kind] = now_s
            level = logging.WARNING if error is None else logging.ERROR
            text = "%s (%s, %d times since the last such line)"
            log.log(level, text, message, kind, self._counts.pop(kind), exc_info=error)


@dataclass(frozen=True)
class Access:
    """`token` gives the token as it is now. `for_reading`: reading routes need it too. `hint` says
    where it is."""

    token: Callable[[], bytes]
    for_reading: bool = True
    loopback: bool = True
    hint: str = ""


class Guard:
    """ASGI middleware: refuses, or passes on unchanged, at most MAX_WORKED_ON requests at a
    time."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        refusals: RefusalLog,
        on_bad_token: Callable[[], None] = lambda: None,
    ) -> None:
        self._app = app
        self._access = access
        self._refusals = refusals
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
            body = await _read_body(
                headers, receive
            )  # first: to close while the client sends loses the answer
            self._check(scope, headers)
            if scope["path"] not in OPEN_PATHS and self._waiting >= MAX_WAITING:
                raise RequestError(
                    "too_many_requests", "too many requests wait for an answer", hint="try again"
                )
        except RequestError as refusal:
            client = (scope.get("client") or ("an unknown address",))[0]
            self._refusals.note(
                refusal.code, f"a request from {client} was refused: {refusal.message}"
            )
            if refusal.code == "unauthorized":
                self._on_bad_token()
            await _refuse(refusal, send)
            return
        await self._pass_on(scope, _replay(body, receive), send)

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        is_change = scope["method"] not in _READING
        if self._access.loopback:
            check_host(headers)
        if is_change:
            check_origin(headers, scope.get("scheme", "http"))
        is_admin = scope.get("state", {}).get("is_admin", lambda: False)  # see TlsLayer
        if (
            scope["path"] not in OPEN_PATHS
            and (self._access.for_reading or is_change)
            and not is_admin()
        ):
            check_token(headers, self._access.token(), self._access.hint)

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


def token_reader(path: Path, refusals: RefusalLog, *, ours: bool = False) -> Callable[[], bytes]:
    """Gives the token as the file has it at that moment: a new one holds at once, one that cannot
    be read lets nobody in. SettingsError if it cannot be read now, or should be `ours` and is
    another user's."""
    read_token(path, ours=ours)

    def current() -> bytes:
        try:
            return read_token(path, ours=ours)
        except SettingsError as error:
            refusals.note("admin_token", f"the admin API's token cannot be used: {error.message}")
            return secrets.token_bytes(32)

    return current


def make_token(path: Path) -> None:
    """Makes the token of a server without `admin_token`, in a directory that is its user's alone.
    An earlier one stays, unless others may have read or changed it. SettingsError if none can be
    made."""
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
                log.warning(
                    "a new token for the admin API replaces the one before: %s", error.message
                )
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
    """Raises unless the request carries the token. How long that takes says nothing of how much of
    it was right."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secrets.compare_digest(
        given.strip().encode("latin-1"), token
    ):
        raise RequestError(
            "unauthorized",
            "this request needs the server's token"
            if not given
            else "this is not the token of this server",
            field="Authorization",
            hint="send `Authorization: Bearer TOKEN`; with our commands --token-file FILE, or KVKEEP_ADMIN_TOKEN=FILE"
            + where,
        )


def check_host(headers: Mapping[str, str]) -> None:
    """Raises unless the request was meant for loopback."""
    if not is_loopback_host(headers.get("host", "")):
        raise RequestError(
            "bad_host",
            "the Host header names no loopback address",
            field="Host",
            hint="ask http://127.0.0.1 or http://localhost, with the server's port",
        )


def check_origin(headers: Mapping[str, str], scheme: str = "http") -> None:
    """Raises for a change that a web page of another origin asks for. Programs other than browsers
    send no Origin."""
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


def as_json(refusal: RequestError) -> bytes:
    """The body of an answer that refuses."""
    said = {
        "error": refusal.code,
        "message": refusal.message,
        "field": refusal.field,
        "hint": refusal.hint,
    }
    return json.dumps(said).encode()


async def _refuse(refusal: RequestError, send: Send) -> None:
    body = as_json(refusal)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *([(b"www-authenticate", b"Bearer")] if refusal.code == "unauthorized" else []),
    ]
    await send({"type": "http.response.start", "status": STATUS[refusal.code], "headers": headers})
    await send({"type": "http.response.body", "body": body})
