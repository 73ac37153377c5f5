from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvkeep.errors import RequestError
from kvkeep.server.guard import MAX_BODY_BYTES, Guard, check_origin, is_loopback_host


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:5556", "127.0.0.1:5556", "127.1.2.3", "[::1]", "[::1]:5556", "LOCALHOST:1"]
)
def test_loopback_by_any_name(host: str) -> None:
    assert is_loopback_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "rebound.example",
        "localhost.example",
        "127.0.0.1.example",
        "10.0.0.1:5556",
        "[::2]",
        "[::1",
        "localhost:port",
        "localhost:99999",
        "user@localhost",
        "localhost/path",
        "127.1",
        "0.0.0.0",
        "local\x00host",
    ],
)
def test_anything_else_is_not_loopback(host: str) -> None:
    assert not is_loopback_host(host)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://other.example"},
        {"origin": "null"},
        {"origin": "https://localhost:1"},
        {"origin": "http://localhost:2"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_origins_may_change_nothing(headers: dict[str, str]) -> None:
    with pytest.raises(RequestError) as caught:
        check_origin({"host": "localhost:1", **headers})
    assert caught.value.code == "bad_origin"


@pytest.mark.parametrize(
    "headers",
    [{}, {"origin": "http://localhost:1"}, {"sec-fetch-site": "none"}, {"sec-fetch-site": "same-origin"}],
)
def test_programs_and_our_own_origin_may(headers: dict[str, str]) -> None:
    check_origin({"host": "localhost:1", **headers})


def through(method: str, headers: dict[str, str], *body: bytes) -> tuple[int, bytes]:
    """Status and body of a request through the guard; what is behind it echoes the body."""
    parts = [{"type": "http.request", "body": part, "more_body": True} for part in body]
    parts.append({"type": "http.request", "body": b"", "more_body": False})
    sent: list[dict[str, Any]] = []

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": message["body"]})

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "headers": raw}
    asyncio.run(Guard(echo)(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


def test_what_is_fine_passes_unchanged() -> None:
    assert through("PUT", {"host": "localhost"}, b"ab", b"cd") == (200, b"abcd")
    assert through("GET", {"host": "localhost", "origin": "http://other.example"}) == (200, b"")


def test_a_long_body_is_refused_whether_or_not_it_says_its_length() -> None:
    half = bytes(MAX_BODY_BYTES // 2)
    assert through("PUT", {"host": "localhost"}, half, half)[0] == 200
    status, said = through("PUT", {"host": "localhost"}, half, half, b"x")
    assert status == 413 and json.loads(said)["error"] == "body_too_large"
    assert through("PUT", {"host": "localhost", "content-length": "9" * 20})[0] == 413
