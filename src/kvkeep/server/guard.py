"""Who may ask the admin API: those with its token where there is one, and never a web site.

A browser on the server's host can reach loopback on behalf of any site it shows. Two tricks are known, and refused
here: a site whose name is made to resolve to 127.0.0.1 (its requests carry that name as Host), and a form or script
that sends a change blindly (its requests carry the site's Origin). A server that listens elsewhere has names of which
we know nothing; there the token, which no site has, does what the Host header does on loopback. Bodies are short; a
long one is refused before it is read.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvkeep.errors import RequestError, SettingsError
from kvkeep.wire.auth import read_token

log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 64 * 1024
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATH: Final = "/healthz"  # for those who only want to know whether the process lives; it tells nothing else
STATUS: Final[Mapping[str, int]] = {"unauthorized": 401, "bad_host": 403, "bad_origin": 403, "body_too_large": 413}


class Guard:
    """ASGI middleware: refuses, or passes on unchanged."""

    def __init__(
        self,
        app: ASGIApp,
        token: Callable[[], bytes] | None = None,
        loopback: bool = True,
        on_bad_token: Callable[[], None] = lambda: None,
    ) -> None:
        """`token` gives the token that requests must carry, None if none is asked for. Without one only those who ask
        for `loopback` are heard."""
        self._app = app
        self._token = token
        self._check_host = loopback or token is None
        self._on_bad_token = on_bad_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            if self._check_host:
                check_host(headers)
            if self._token is not None and scope["path"] != OPEN_PATH:
                check_token(headers, self._token())
            if scope["method"] not in _READING:
                check_origin(headers)
            body = await _read_body(headers, receive)
        except RequestError as refusal:
            if refusal.code == "unauthorized":
                self._on_bad_token()
            await _refuse(refusal, send)
            return
        await self._app(scope, _replay(body, receive), send)


def token_reader(path: Path | None) -> Callable[[], bytes] | None:
    """Gives the token as the file has it at that moment: a new one holds at once, one that cannot be read lets nobody
    in. SettingsError if it cannot be read now. None: no token is asked for."""
    if path is None:
        return None
    read_token(path)

    def current() -> bytes:
        try:
            return read_token(path)
        except SettingsError as error:
            log.error("admin_token: %s", error.message)
            return secrets.token_bytes(32)

    return current


def check_token(headers: Mapping[str, str], token: bytes) -> None:
    """Raises unless the request carries the token. How long that takes says nothing of how much of it was right."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode("latin-1"), token):
        raise RequestError(
            "unauthorized",
            "this server's admin API asks for a token" if not given else "this is not the token of this server",
            field="Authorization",
            hint="send `Authorization: Bearer TOKEN`; with our commands --token-file FILE, or KVKEEP_ADMIN_TOKEN=FILE",
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


def check_origin(headers: Mapping[str, str]) -> None:
    """Raises for a change that a web page of another origin asks for. Programs other than browsers send no Origin."""
    origin = headers.get("origin")
    other_site = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if other_site or (origin is not None and origin != f"http://{headers.get('host', '')}"):
        raise RequestError("bad_origin", "a web page of another site may change nothing here", field="Origin")


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


async def _refuse(refusal: RequestError, send: Send) -> None:
    body = json.dumps(
        {"error": refusal.code, "message": refusal.message, "field": refusal.field, "hint": refusal.hint}
    ).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *([(b"www-authenticate", b"Bearer")] if refusal.code == "unauthorized" else []),
    ]
    await send({"type": "http.response.start", "status": STATUS[refusal.code], "headers": headers})
    await send({"type": "http.response.body", "body": body})
