from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvkeep.errors import RequestError, SettingsError
from kvkeep.server.guard import MAX_BODY_BYTES, Guard, check_origin, check_token, is_loopback_host, token_reader


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


def through(
    method: str, headers: dict[str, str], *body: bytes, path: str = "/v1/status", **options: Any
) -> tuple[int, bytes]:
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
    scope = {"type": "http", "method": method, "headers": raw, "path": path}
    asyncio.run(Guard(echo, **options)(scope, receive, send))
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


# -- the token

TOKEN = "t" * 43


@pytest.mark.parametrize("given", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER  {TOKEN} "])
def test_the_token_opens(given: str) -> None:
    check_token({"authorization": given}, TOKEN.encode())


@pytest.mark.parametrize(
    "given",
    [
        "",
        "Bearer",
        "Bearer ",
        TOKEN,
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}t",
        f"Bearer {TOKEN[1:]}",
        "Bearer é",
        f"Bearer{TOKEN}",
    ],
)
def test_anything_else_does_not_and_is_told_the_remedy(given: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_token({"authorization": given}, TOKEN.encode())
    assert caught.value.code == "unauthorized" and "--token-file" in caught.value.hint
    assert TOKEN not in str(caught.value)
    with pytest.raises(RequestError):
        check_token({}, b"")


def test_with_a_token_every_path_but_liveness_asks_for_it() -> None:
    turned_away: list[int] = []
    options = {"token": TOKEN.encode, "on_bad_token": lambda: turned_away.append(1)}
    good = {"host": "localhost", "authorization": f"Bearer {TOKEN}"}
    for path in ("/v1/status", "/metrics", "/readyz", "/", "/healthz/", "/healthz/../v1/status", "//healthz"):
        status, said = through("GET", {"host": "localhost"}, path=path, **options)
        assert status == 401 and json.loads(said)["error"] == "unauthorized"
        assert through("GET", good, path=path, **options)[0] == 200
    assert len(turned_away) == 7
    assert through("GET", {"host": "localhost"}, path="/healthz", **options)[0] == 200
    assert through("PUT", {**good, "origin": "http://other.example"}, **options)[0] == 403, "the other checks stay"


def test_a_foreign_host_name_is_heard_beyond_loopback_with_a_token_alone() -> None:
    named = {"host": "cache.example", "authorization": f"Bearer {TOKEN}"}
    assert through("GET", named, token=TOKEN.encode, loopback=False)[0] == 200
    assert through("GET", {"host": "cache.example"}, token=TOKEN.encode, loopback=False)[0] == 401
    assert through("GET", named, token=TOKEN.encode, loopback=True)[0] == 403
    assert through("GET", named, token=None, loopback=False)[0] == 403


def test_the_token_is_read_anew_and_one_that_cannot_be_read_lets_nobody_in(tmp_path: Path) -> None:
    assert token_reader(None) is None
    file = tmp_path / "token"
    with pytest.raises(SettingsError, match="cannot be read"):
        token_reader(file)
    file.write_text(TOKEN)
    file.chmod(0o600)
    current = token_reader(file)
    assert current is not None and current() == TOKEN.encode()
    file.write_text("n" * 20)
    assert current() == b"n" * 20
    file.unlink()
    assert current() != current() and len(current()) == 32, "nobody can know it"
