"""What keeps web sites out of an admin API that listens on loopback.

A browser on the server's host can reach loopback on behalf of any site it shows. Two tricks are known, and refused
here: a site whose name is made to resolve to 127.0.0.1 (its requests carry that name as Host), and a form or script
that sends a change blindly (its requests carry the site's Origin). Bodies are short; a long one is refused before it
is read.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvkeep.errors import RequestError

MAX_BODY_BYTES: Final = 64 * 1024
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
STATUS: Final[Mapping[str, int]] = {"bad_host": 403, "bad_origin": 403, "body_too_large": 413}


class Guard:
    """ASGI middleware: refuses, or passes on unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            check_host(headers)
            if scope["method"] not in _READING:
                check_origin(headers)
            body = await _read_body(headers, receive)
        except RequestError as refusal:
            await _refuse(refusal, send)
            return
        await self._app(scope, _replay(body, receive), send)


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
    ]
    await send({"type": "http.response.start", "status": STATUS[refusal.code], "headers": headers})
    await send({"type": "http.response.body", "body": body})
