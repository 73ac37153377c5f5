"""Where the admin API is asked, and what becomes of its answers."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest

from kvkeep.cli import remote
from kvkeep.cli.remote import ask
from kvkeep.errors import RequestError, SettingsError, Unavailable
from kvkeep.testing.process import ServerProcess

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def stranger() -> Iterator[Callable[[bytes], str]]:
    """Something that listens and answers every connection with the same bytes."""
    listeners = []

    def listen(answer: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

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
def test_what_is_no_kvkeep_server_is_said_to_be_none(stranger: Callable[[bytes], str], answer: bytes) -> None:
    with pytest.raises(Unavailable) as caught:
        ask(stranger(answer), "/v1/status")
    assert "no kvkeep server" in str(caught.value)


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


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:port", "http://", "127.0.0.1:80/path", "a b:80"])
def test_a_malformed_address_is_named(address: str) -> None:
    with pytest.raises(SettingsError, match="--http"):
        ask(address, "/v1/status")


def test_a_server_that_says_nothing_is_not_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert remote._ANSWER_WITHIN_S <= 5
    monkeypatch.setattr(remote, "_ANSWER_WITHIN_S", 0.1)
    monkeypatch.setattr(remote, "_CHANGE_WITHIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unavailable, match=r"a server listens at .* but did not answer within 0\.1 s") as caught:
            ask(address, "/v1/status")
        assert "kvkeep serve" not in caught.value.hint and "not known" not in caught.value.message
        with pytest.raises(Unavailable, match="whether the change was made is not known"):
            ask(address, "/v1/settings", "PATCH", {"verify": "true"})
