from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kvkeep.errors import RequestError, SettingsError
from kvkeep.server.guard import (
    MAX_BODY_BYTES,
    Access,
    Guard,
    ProblemLog,
    check_origin,
    check_token,
    is_loopback_host,
    make_token,
    token_reader,
)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:5556",
        "127.0.0.1:5556",
        "127.1.2.3",
        "[::1]",
        "[::1]:5556",
        "LOCALHOST:1",
    ],
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
    [
        {},
        {"origin": "http://localhost:1"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "same-origin"},
    ],
)
def test_programs_and_our_own_origin_may(headers: dict[str, str]) -> None:
    check_origin({"host": "localhost:1", **headers})


def test_over_tls_our_own_origin_is_one_of_https() -> None:
    check_origin({"host": "cache:1", "origin": "https://cache:1"}, "https")
    with pytest.raises(RequestError):
        check_origin({"host": "cache:1", "origin": "http://cache:1"}, "https")


TOKEN = "t" * 43
WITH_TOKEN = {"authorization": f"Bearer {TOKEN}"}
EVERYTHING = Access(TOKEN.encode)
CHANGES = Access(TOKEN.encode, for_reading=False)


def through(
    method: str,
    headers: dict[str, str],
    *body: bytes,
    path: str = "/v1/status",
    access: Access = CHANGES,
    problems: ProblemLog | None = None,
    state: dict[str, Any] | None = None,
    **options: Any,
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
    scope = {"type": "http", "method": method, "headers": raw, "path": path, "state": state or {}}
    asyncio.run(Guard(echo, access, problems or ProblemLog(), **options)(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


def test_what_is_fine_passes_unchanged() -> None:
    assert through("PUT", {"host": "localhost", **WITH_TOKEN}, b"ab", b"cd") == (200, b"abcd")
    assert through("GET", {"host": "localhost", "origin": "http://other.example"}) == (200, b"")


def test_a_long_body_is_refused_whether_or_not_it_says_its_length() -> None:
    half = bytes(MAX_BODY_BYTES // 2)
    headers = {"host": "localhost", **WITH_TOKEN}
    assert through("PUT", headers, half, half)[0] == 200
    status, said = through("PUT", headers, half, half, b"x")
    assert status == 413 and json.loads(said)["error"] == "body_too_large"
    assert through("PUT", {**headers, "content-length": "9" * 20})[0] == 413


# -- the token


@pytest.mark.parametrize(
    ("headers", "access", "admin", "may"),
    [
        ({}, CHANGES, False, False),
        ({"authorization": "Bearer wrong"}, CHANGES, False, False),
        (WITH_TOKEN, CHANGES, False, True),
        (WITH_TOKEN, EVERYTHING, False, True),
        ({}, CHANGES, True, True),
    ],
)
def test_a_route_that_is_open_learns_whether_an_operator_asks(
    headers: dict[str, str], access: Access, admin: bool, may: bool
) -> None:
    state: dict[str, Any] = {"is_admin": lambda: admin}
    assert through("GET", {"host": "localhost"} | headers, access=access, state=state)[0] == 200
    assert state["is_operator"] is may


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


def test_a_token_that_was_set_is_asked_for_on_every_path_but_few() -> None:
    turned_away: list[int] = []
    options: dict[str, Any] = {"access": EVERYTHING, "on_bad_token": lambda: turned_away.append(1)}
    good = {"host": "localhost", **WITH_TOKEN}
    for path in (
        "/v1/status",
        "/metrics",
        "/openapi.json",
        "/healthz/",
        "/healthz/../v1/status",
        "//healthz",
        "/readyz/",
    ):
        status, said = through("GET", {"host": "localhost"}, path=path, **options)
        assert status == 401 and json.loads(said)["error"] == "unauthorized"
        assert through("GET", good, path=path, **options)[0] == 200
    assert len(turned_away) == 7
    for path in ("/healthz", "/readyz", "/"):  # the last leads to the dashboard
        assert through("GET", {"host": "localhost"}, path=path, **options)[0] == 200
    assert through("PUT", {**good, "origin": "http://other.example"}, **options)[0] == 403, (
        "the other checks stay"
    )


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "TRACE", "ANYTHING"])
def test_the_servers_own_token_is_asked_for_by_changes_alone(method: str) -> None:
    assert through(method, {"host": "localhost"})[0] == 401
    assert through(method, {"host": "localhost", "authorization": f"Bearer {TOKEN[1:]}"})[0] == 401
    assert through(method, {"host": "localhost", **WITH_TOKEN})[0] == 200
    for reading in ("GET", "HEAD", "OPTIONS"):
        assert through(reading, {"host": "localhost"})[0] == 200


def test_a_certificate_that_administers_does_instead_of_the_token_and_of_nothing_else() -> None:
    beyond = Access(TOKEN.encode, loopback=False)
    for administers in (True, False):
        state = {"is_admin": lambda: administers}  # noqa: B023
        for method in ("GET", "PUT"):
            status, _ = through(method, {"host": "cache"}, access=beyond, state=state)
            assert status == (200 if administers else 401)
        assert through("PUT", {"host": "cache", **WITH_TOKEN}, access=beyond, state=state)[0] == 200
    foreign = {"host": "cache", "origin": "https://other.example"}
    assert through("PUT", foreign, access=beyond, state={"is_admin": lambda: True})[0] == 403


def test_a_refusal_is_said_when_the_whole_body_has_come() -> None:
    """A connection that is closed while the client still sends is reset, and the client may lose
    the answer."""
    happened: list[Any] = []

    async def receive() -> Any:
        happened.append("received")
        return {"type": "http.request", "body": b"a", "more_body": len(happened) < 3}

    async def send(message: Any) -> None:
        happened.append(message.get("status", "body"))

    scope = {
        "type": "http",
        "method": "PUT",
        "headers": [(b"host", b"localhost")],
        "path": "/v1/status",
    }
    asyncio.run(Guard(send, CHANGES, ProblemLog())(scope, receive, send))  # type: ignore[arg-type]
    assert happened == ["received"] * 3 + [401, "body"]


def test_a_foreign_host_name_is_heard_beyond_loopback_alone() -> None:
    named, beyond = {"host": "cache.example", **WITH_TOKEN}, Access(TOKEN.encode, loopback=False)
    assert through("GET", named, access=beyond)[0] == 200
    assert through("GET", {"host": "cache.example"}, access=beyond)[0] == 401
    assert through("GET", named, access=EVERYTHING)[0] == 403
    assert through("GET", named, access=CHANGES)[0] == 403


def test_the_token_is_read_anew_and_one_that_cannot_be_read_lets_nobody_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    with pytest.raises(SettingsError, match="cannot be read"):
        token_reader(file, ProblemLog())
    file.write_text(TOKEN)
    file.chmod(0o600)
    current = token_reader(file, ProblemLog())
    assert current() == TOKEN.encode()
    file.write_text("n" * 20)
    assert current() == b"n" * 20
    file.unlink()
    assert current() != current() and len(current()) == 32, "nobody can know it"
    assert caplog.text.count("cannot be used") == 1, "said once a minute"


def test_a_token_of_the_servers_own_is_private_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "state" / "admin.token"
    file.parent.mkdir(mode=0o775)
    file.parent.chmod(0o775)
    make_token(file)
    token = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert len(token) == 43 and [path.name for path in file.parent.iterdir()] == ["admin.token"]
    make_token(file)
    assert token_reader(file, ProblemLog(), ours=True)() == token.encode()


@pytest.mark.parametrize(
    "flaw", ["open to others", "writable for the group", "cut short", "a link", "another user's"]
)
def test_a_token_that_others_may_know_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flaw: str
) -> None:
    file, elsewhere = tmp_path / "admin.token", tmp_path / "elsewhere"
    elsewhere.write_text(TOKEN)
    elsewhere.chmod(0o600)
    make_token(file)
    before = file.read_text()
    match flaw:
        case "open to others":
            file.chmod(0o644)
        case "writable for the group":
            file.chmod(0o660)
        case "cut short":
            file.write_text("short")
        case "a link":
            file.unlink()
            file.symlink_to(elsewhere)
        case "another user's":
            if os.geteuid() != 0:
                pytest.skip("only root can give a file away")
            os.chown(file, 65534, 65534)
    make_token(file)
    assert len(file.read_text().strip()) == 43 and file.read_text() not in (before, TOKEN)
    assert stat.S_IMODE(file.lstat().st_mode) == 0o600 and file.stat().st_uid == os.geteuid()
    assert elsewhere.read_text() == TOKEN
    assert ("replaces the last" in caplog.text) == (flaw != "a link")


def test_a_directory_of_another_user_holds_no_token(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(SettingsError, match="belongs to another user"):
        make_token(tmp_path / "admin.token")
    with pytest.raises(SettingsError, match="cannot be written") as caught:
        make_token(tmp_path / "nothing" / "admin.token")
    assert "--state-dir" in caught.value.hint


# -- the log


def test_refusals_are_logged_once_a_minute_for_each_kind_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = [0.0]
    problems = ProblemLog(lambda: now_s[0])
    wrong = {"host": "localhost", "authorization": "Bearer secret-guess"}
    for _ in range(1000):
        through("DELETE", wrong, problems=problems)
        through("GET", {"host": "rebound.example"}, problems=problems)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "secret-guess" not in caplog.text
    assert "rebound.example" not in caplog.text
    assert "(unauthorized, 1 times" in lines[0] and "(bad_host, 1 times" in lines[1]
    now_s[0] = 60.0
    through("DELETE", wrong, problems=problems)
    assert "(unauthorized, 1000 times" in caplog.records[-1].getMessage()
    assert len(caplog.records) == 3
