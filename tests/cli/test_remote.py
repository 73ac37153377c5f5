"""Where the admin API is asked, and what becomes of its answers."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.cli import remote
from kvkeep.cli.keygen import make
from kvkeep.cli.remote import ask
from kvkeep.errors import RequestError, SettingsError, Unavailable
from kvkeep.testing.process import ServerProcess

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def serve_once(
    listener: socket.socket, answer: bytes, heard: list[bytes] | None = None, as_other: bool = False
) -> threading.Thread:
    """Answers one connection, if there is one, and notes what it was asked. `as_other`: as another
    user, if we may become one; `setfsuid` changes this thread alone."""

    def serve() -> None:
        if as_other and os.getuid() == 0:
            ctypes.CDLL(None).setfsuid(65534)
        with contextlib.suppress(OSError):  # nobody has asked until the end
            connection, _ = listener.accept()
            with connection:
                asked = connection.recv(65536)
                if heard is not None:
                    heard.append(asked)
                connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def reply(status: int, said: Any) -> bytes:
    """As a server answers, in JSON."""
    body = json.dumps(said).encode()
    return b"HTTP/1.1 %d Said\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


@pytest.fixture
def stranger() -> Iterator[Callable[[bytes], str]]:
    """Something that listens and answers every connection with the same bytes."""
    listeners = []

    def listen(answer: bytes) -> str:
        listeners.append(socket.create_server(("127.0.0.1", 0)))
        serve_once(listeners[-1], answer)
        return f"127.0.0.1:{listeners[-1].getsockname()[1]}"

    yield listen
    for listener in listeners:
        listener.close()


def test_it_asks_and_is_refused_in_the_servers_words(server: ServerProcess) -> None:
    assert ask(server.http, "/v1/tenants") == {"total": 0, "tenants": []}
    assert ask(f"http://{server.http}/", "/healthz")["healthy"] is True
    with pytest.raises(RequestError) as caught:
        ask(server.http, "/v1/tenants/t-" + "0" * 32)
    assert caught.value.code == "unknown_tenant" and caught.value.field == "tenant"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 500 Oops\r\ncontent-length: 2\r\n\r\n[]",
        b"HTTP/1.1 404 No\r\ncontent-length: 1000\r\n\r\n{}",
        b"220 mail.example ESMTP\r\n",
        b"",
    ],
)
def test_what_is_no_kvkeep_server_is_said_to_be_none(
    stranger: Callable[[bytes], str], answer: bytes
) -> None:
    with pytest.raises(Unavailable) as caught:
        ask(stranger(answer), "/v1/status")
    assert "kvkeep server" in str(caught.value) and "--http" in caught.value.hint


def test_the_address_for_engines_is_named_as_such(kvkeep: Run, server: ServerProcess) -> None:
    said = kvkeep("status", "--http", server.address.removeprefix("tcp://"))
    assert said.returncode == 3 and said.stdout == ""
    assert "is the address for engines, not the server's HTTP address" in said.stderr
    assert "hint: name http_address with --http HOST:PORT" in said.stderr


def test_without_a_server_it_says_how_to_start_one(kvkeep: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for words in (("status",), ("tenants", "list"), ("settings", "list", "--json")):
        done = kvkeep(*words, "--http", address)
        assert done.returncode == 3 and not done.stdout
        assert done.stderr.startswith(f"error: no kvkeep server answers at http://{address}")
        assert "hint: start one with `kvkeep serve`" in done.stderr


def test_a_proxy_in_the_environment_is_not_asked(kvkeep: Run, server: ServerProcess) -> None:
    proxies = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    assert kvkeep("status", "--http", server.http, env=proxies).returncode == 0


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1",
        "127.0.0.1:port",
        "http://",
        "https://",
        "127.0.0.1:80/path",
        "a b:80",
        "ftp://a:80",
        "://a:80",
    ],
)
def test_a_malformed_address_is_named(address: str) -> None:
    with pytest.raises(SettingsError, match="--http"):
        ask(address, "/v1/status")


def test_a_server_that_says_nothing_is_not_taken_for_none(
    monkeypatch: pytest.MonkeyPatch, token_file: Path
) -> None:
    patience_s: list[float] = []
    real = http.client.HTTPConnection

    def impatient(host: str, port: int, *, timeout: float) -> http.client.HTTPConnection:
        patience_s.append(timeout)
        return real(host, port, timeout=0.1)

    monkeypatch.setattr(http.client, "HTTPConnection", impatient)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            Unavailable, match=r"a server listens at .* but did not answer within 5 s"
        ) as caught:
            ask(address, "/v1/status")
        assert "kvkeep serve" not in caught.value.hint and "not known" not in caught.value.message
        with pytest.raises(Unavailable, match="whether the change was made is not known"):
            ask(address, "/v1/settings", "PATCH", {"verify": "true"}, token_file=token_file)
        with pytest.raises(Unavailable) as caught:
            ask(address, "/v1/settings", "PATCH", {"verify": "true"})
        assert "not known" not in caught.value.message, (
            "it was not sent: which token it needs was asked first"
        )
    assert patience_s == [5, 15, 5]


# -- the token


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("t" * 43 + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def default_token(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is where `kvkeep keygen` puts it."""
    monkeypatch.setenv("KVKEEP_STATE_DIR", str(token_file.parent))
    (token_file.parent / "keys").mkdir()
    token_file.rename(token_file.parent / "keys" / "admin-token")


@pytest.fixture
def listener() -> Iterator[tuple[str, list[bytes]]]:
    """Something that keeps what it is asked, and answers with an empty object."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = serve_once(server, reply(200, {}), heard)
        yield f"127.0.0.1:{server.getsockname()[1]}", heard
        # Or it would wait on for a number that is another file's by then.
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def other_users_socket(monkeypatch: pytest.MonkeyPatch, port: int = 0) -> socket.socket:
    """One that another user listens on; or we are another, where we cannot become one."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            return socket.create_server(("127.0.0.1", port))
        finally:
            os.seteuid(0)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    return socket.create_server(("127.0.0.1", port))


def test_a_token_that_is_named_is_sent(listener: tuple[str, list[bytes]], token_file: Path) -> None:
    assert ask(listener[0], "/v1/status", token_file=token_file) == {}
    assert b"Authorization: Bearer " + b"t" * 43 + b"\r\n" in listener[1][0]


def token_sent(monkeypatch: pytest.MonkeyPatch, address: str, method: str) -> str:
    """What a request of this kind says of itself; it is not sent."""
    sent: list[str] = []
    real = http.client.HTTPConnection.request

    def note(connection: Any, asked: str, path: str, body: Any, headers: Any) -> None:
        if path == "/v1/anything":
            sent.append(headers.get("Authorization", ""))
            raise ConnectionResetError
        real(connection, asked, path, body, headers)

    with monkeypatch.context() as patched:
        patched.setattr(http.client.HTTPConnection, "request", note)
        if "192.0.2." in address:  # where nobody is
            for kind in (http.client.HTTPConnection, http.client.HTTPSConnection):
                patched.setattr(kind, "connect", lambda connection: None)
        with pytest.raises(Unavailable):
            ask(address, "/v1/anything", method)
    return sent[0]


@pytest.mark.parametrize("variable", ["KVKEEP_STATE_DIR", "XDG_STATE_HOME"])
def test_that_of_the_state_directory_is_found(
    listener: tuple[str, list[bytes]],
    token_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    monkeypatch.delenv("KVKEEP_STATE_DIR", raising=False)
    monkeypatch.setenv(variable, str(token_file.parent))
    keys = token_file.parent / ("kvkeep/keys" if variable == "XDG_STATE_HOME" else "keys")
    keys.mkdir(parents=True)
    token_file.rename(keys / "admin-token")
    ask(listener[0], "/v1/status")
    assert b"Bearer " + b"t" * 43 in listener[1][0]
    for method in ("GET", "PUT"):
        assert token_sent(monkeypatch, "http://192.0.2.7:80", method) == "", (
            "none that nobody named elsewhere"
        )


@pytest.mark.usefixtures("default_token")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_that_of_the_state_directory_is_not_sent_to_another_user(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Who took the port while the server is down. What it asks for is said, and how to send it all
    the same."""
    heard: list[bytes] = []
    message = {"message": "it asks for a token", "field": "", "hint": "give it"}
    with other_users_socket(monkeypatch) as server:
        serve_once(server, reply(401, {"error": "unauthorized", **message}), heard, as_other=True)
        with pytest.raises(RequestError) as caught:
            ask(f"{host}:{server.getsockname()[1]}", "/v1/status")
    assert b"authorization" not in heard[0].lower()
    assert "no token was sent: another user (uid" in caught.value.hint
    assert "--token-file" in caught.value.hint


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH"])
def test_the_token_that_a_server_made_is_found_for_changes(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    assert server.state_dir is not None
    made = (server.state_dir / server.name / "admin.token").read_text().strip()
    assert token_sent(monkeypatch, server.http, method) == f"Bearer {made}"


@pytest.mark.usefixtures("default_token")
def test_a_token_of_the_state_directory_does_not_hide_the_one_that_the_server_made(
    server: ServerProcess,
) -> None:
    assert ask(server.http, "/v1/settings", "PATCH", {"verify": "true"})
    assert ask(server.http, "/v1/status")["name"] == server.name


def test_no_token_is_sought_where_another_user_listens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor is that user asked where it is: the answer could name any file."""
    monkeypatch.setenv("KVKEEP_STATE_DIR", str(tmp_path))
    heard: list[bytes] = []
    with other_users_socket(monkeypatch) as server:
        thread = serve_once(server, b"", heard, as_other=True)
        token, withheld = remote._found_token(f"http://127.0.0.1:{server.getsockname()[1]}", "POST")
        assert token is None and "another user (uid" in withheld and "admin.token" in withheld
        thread.join(10)
    assert heard == [b""]


@pytest.mark.usefixtures("default_token")
def test_whoever_takes_the_port_before_the_connection_gets_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody listens when the command starts: the other user does when it connects."""
    connect = http.client.HTTPConnection.connect
    heard, servers, threads = list[bytes](), list[socket.socket](), list[threading.Thread]()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def take_the_port_first(connection: http.client.HTTPConnection) -> None:
        servers.append(other_users_socket(monkeypatch, port))
        threads.append(serve_once(servers[0], reply(200, {}), heard, as_other=True))
        connect(connection)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", take_the_port_first)
    assert ask(f"127.0.0.1:{port}", "/v1/status") == {}
    threads[0].join(10)
    servers[0].close()
    assert heard and b"authorization" not in heard[0].lower()


def test_what_a_terminal_would_obey_is_shown_as_text(stranger: Callable[[bytes], str]) -> None:
    said = {"error": "bad", "message": "a\x1b]0;title\x07b", "field": "", "hint": "c\x1b[2Jd"}
    with pytest.raises(RequestError) as caught:
        ask(stranger(reply(400, said)), "/v1/status")
    assert (caught.value.message, caught.value.hint) == ("a\\x1b]0;title\\x07b", "c\\x1b[2Jd")
    answer = ask(stranger(reply(200, [{"na\nme": ["x\x9by", 1, None]}])), "/v1/x")
    assert answer == [{"na\\nme": ["x\\x9by", 1, None]}]


def test_a_token_that_cannot_be_read_is_named_with_the_remedy(kvkeep: Run, tmp_path: Path) -> None:
    with ServerProcess("--pool-size", "16MiB", state_dir=tmp_path) as server:
        token = tmp_path / server.name / "admin.token"
        token.rename(token.with_suffix(".away"))
        done = kvkeep("drain", "--http", server.http)
        assert done.returncode == 1 and not done.stdout
        assert f"hint: {token} cannot be read" in done.stderr
        assert "Run this as the server's user" in done.stderr
        assert ask(server.http, "/v1/status")["stopping"] is False
        token.with_suffix(".away").rename(token)
        assert kvkeep("drain", "--http", server.http).returncode == 0


def test_a_named_token_wins(kvkeep: Run, server: ServerProcess, token_file: Path) -> None:
    for words, env in (
        (["--token-file", str(token_file)], {}),
        ([], {"KVKEEP_ADMIN_TOKEN": str(token_file)}),
    ):
        done = kvkeep("settings", "set", "verify", "true", "--http", server.http, *words, env=env)
        assert done.returncode == 1 and "this is not the token of this server" in done.stderr
    assert kvkeep("settings", "set", "verify", "true", "--http", server.http).returncode == 0


def test_without_one_none_is_sent(
    listener: tuple[str, list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_STATE_DIR", str(tmp_path))
    ask(listener[0], "/v1/status")
    assert b"authorization" not in listener[1][0].lower()


def test_the_token_is_not_taken_elsewhere_by_a_redirect(
    listener: tuple[str, list[bytes]], stranger: Callable[[bytes], str], token_file: Path
) -> None:
    elsewhere = f"HTTP/1.1 302 Found\r\nlocation: http://{listener[0]}/\r\ncontent-length: 0\r\n\r\n".encode()
    with pytest.raises(Unavailable, match="not a kvkeep server"):
        ask(stranger(elsewhere), "/v1/status", token_file=token_file)
    assert listener[1] == []


def test_every_command_that_asks_the_server_takes_a_token(
    kvkeep: Run, token_file: Path, tmp_path: Path
) -> None:
    flags = ("--pool-size", "16MiB", "--admin-token", str(token_file))
    tenant = "t-" + "0" * 32
    commands = [
        ("status",),
        ("tenants", "list"),
        ("tenants", "set-quota", tenant, "1MiB"),
        ("tenants", "unset-quota", tenant),
        ("tenants", "clear", "default"),
        ("tenants", "clear-all", "--yes"),
        ("settings", "list"),
        ("settings", "set", "log_level", "debug"),
    ]
    with ServerProcess(*flags) as server:
        env = {"KVKEEP_STATE_DIR": str(tmp_path)}
        for words in commands:
            refused = kvkeep(*words, "--http", server.http, env=env)
            assert refused.returncode == 1
            assert "needs the server's token" in refused.stderr
            assert "--token-file" in refused.stderr
            heard = kvkeep(*words, "--http", server.http, "--token-file", str(token_file), env=env)
            assert "token" not in heard.stderr, heard.stderr
        by_name = kvkeep(
            "status", "--http", server.http, env=env | {"KVKEEP_ADMIN_TOKEN": str(token_file)}
        )
        assert by_name.returncode == 0
        assert "t" * 43 not in server.log()


# -- over TLS


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls") / "keys"
    make(directory, ["engine"], hosts=("localhost",))
    make(directory, ["ops"], admin=True)
    return directory


@pytest.fixture(scope="module")
def secure(keys: Path) -> Iterator[ServerProcess]:
    with ServerProcess(*flags_of(keys)) as running:
        yield running


def flags_of(keys: Path) -> list[str]:
    tls = [
        word
        for name, file in TLS_FILES.items()
        for word in (f"--tls-{name}", str(keys / f"{file}"))
    ]
    listed = ["--authorized-clients", str(keys / "authorized")]
    return ["--pool-size", "16MiB", "--http-address", "0.0.0.0:0", *tls, *listed]


TLS_FILES = {"cert": "server.pem", "key": "server.key", "ca": "ca.pem"}


def env_of(keys: Path, name: str = "") -> dict[str, str]:
    """The environment of a command that trusts our CA and shows the certificate of this name, or
    none."""
    files = {"CA": "ca.pem"} | ({"CERT": f"{name}.pem", "KEY": f"{name}.key"} if name else {})
    return {f"KVKEEP_CLIENT_TLS_{what}": str(keys / file) for what, file in files.items()}


def url_of(server: ServerProcess, scheme: str = "https") -> str:
    assert server.http.startswith("https://0.0.0.0:")
    return f"{scheme}://localhost:{server.http.rpartition(':')[2]}"


def test_commands_administer_over_tls_with_a_certificate_or_a_token(
    kvkeep: Run, keys: Path, secure: ServerProcess, tmp_path: Path
) -> None:
    where = ("--http", url_of(secure))
    assert secure.state_dir is not None
    token = str(secure.state_dir / secure.name / "admin.token")
    alone = {"KVKEEP_STATE_DIR": str(tmp_path)}
    for words in (("status",), ("settings", "set", "verify", "true"), ("tenants", "list")):
        assert kvkeep(*words, *where, env=env_of(keys, "ops") | alone).returncode == 0
        assert (
            kvkeep(*words, *where, "--token-file", token, env=env_of(keys) | alone).returncode == 0
        )
        for name in ("", "engine"):
            refused = kvkeep(*words, *where, env=env_of(keys, name) | alone)
            assert refused.returncode == 1 and "certificate with the right admin" in refused.stderr
    done = kvkeep("status", env=env_of(keys, "ops") | {"KVKEEP_HTTP": url_of(secure)})
    assert f"http         {secure.http}" in done.stdout, done.stdout


def test_the_token_of_the_state_directory_is_sent_over_tls_on_this_host_alone(
    keys: Path, secure: ServerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert secure.state_dir is not None
    (tmp_path / "keys").mkdir(mode=0o700)
    token = (secure.state_dir / secure.name / "admin.token").read_text()
    (tmp_path / "keys" / "admin-token").write_text(token)
    (tmp_path / "keys" / "admin-token").chmod(0o600)
    monkeypatch.setenv("KVKEEP_STATE_DIR", str(tmp_path))
    for name, value in env_of(keys).items():
        monkeypatch.setenv(name, value)
    assert ask(url_of(secure), "/v1/settings", "PATCH", {"verify": "true"})
    for method in ("GET", "PUT"):
        assert token_sent(monkeypatch, "https://192.0.2.7:80", method) == ""


def test_a_server_is_asked_only_if_its_certificate_proves_it(
    kvkeep: Run, keys: Path, secure: ServerProcess, tmp_path: Path
) -> None:
    make(tmp_path / "other", ["ops"])
    other = env_of(tmp_path / "other")
    for env, words in (
        # The system's CAs did not sign it.
        ({}, "its certificate is not signed by a CA that we trust"),
        (other, "its certificate is not signed by a CA that we trust"),
        (env_of(tmp_path / "other", "ops") | env_of(keys), "it rejected our certificate"),
    ):
        done = kvkeep("status", "--http", url_of(secure), env=env)
        assert done.returncode == 3
        assert f"error: no TLS connection to {url_of(secure)}: {words}" in done.stderr
        assert "KVKEEP_CLIENT_TLS_CA" in done.stderr and "Traceback" not in done.stderr
    wrong_name = url_of(secure).replace("localhost", "127.0.0.2")
    done = kvkeep("status", "--http", wrong_name, env=env_of(keys, "ops"))
    assert done.returncode == 3 and "does not name the host that we connect to" in done.stderr


def test_the_wrong_scheme_is_answered_with_the_right_one(
    kvkeep: Run, keys: Path, secure: ServerProcess, server: ServerProcess, token_file: Path
) -> None:
    for words in (("status",), ("settings", "set", "verify", "true"), ("drain",)):
        for more in ((), ("--token-file", str(token_file))):
            done = kvkeep(*words, "--http", url_of(secure, "http"), *more, env=env_of(keys, "ops"))
            assert done.returncode == 1
            assert "this port speaks HTTPS" in done.stderr
            assert "https://" in done.stderr
    done = kvkeep("status", "--http", f"https://{server.http}", env=env_of(keys))
    assert done.returncode == 3 and "it does not speak TLS" in done.stderr
    assert f"--http http://{server.http}" in done.stderr


@pytest.mark.parametrize("missing", ["CERT", "KEY"])
def test_a_certificate_needs_its_key(
    kvkeep: Run, keys: Path, secure: ServerProcess, missing: str
) -> None:
    env = env_of(keys, "ops")
    del env[f"KVKEEP_CLIENT_TLS_{missing}"]
    done = kvkeep("status", "--http", url_of(secure), env=env)
    assert done.returncode == 2 and f"is set and KVKEEP_CLIENT_TLS_{missing} is not" in done.stderr


def test_files_that_cannot_be_used_are_named(
    kvkeep: Run, keys: Path, secure: ServerProcess, tmp_path: Path
) -> None:
    env = env_of(keys, "ops") | {"KVKEEP_CLIENT_TLS_CA": str(tmp_path / "none.pem")}
    done = kvkeep("status", "--http", url_of(secure), env=env)
    assert done.returncode == 2 and str(tmp_path / "none.pem") in done.stderr


def test_a_server_is_drained_over_tls(kvkeep: Run, keys: Path) -> None:
    with ServerProcess(*flags_of(keys)) as secure:
        done = kvkeep("drain", "--http", url_of(secure), env=env_of(keys, "ops"))
        assert done.returncode == 0 and "the server has ended" in done.stdout, done.stderr
        assert secure.process is not None and secure.process.wait(60) == 0
