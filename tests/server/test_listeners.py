"""The sockets that engines connect to: where they are, whose they are, and what is left alone."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvkeep.errors import SettingsError
from kvkeep.server.listeners import Listeners, check_free
from kvkeep.wire.address import tcp_host, unix_name

Listen = Callable[[str], Listeners]


@pytest.fixture
def listen() -> Iterator[Listen]:
    with contextlib.ExitStack() as made:

        def begin(address: str) -> Listeners:
            listeners = Listeners(address)
            made.callback(listeners.close)
            return listeners

        yield begin


def connect(where: str | tuple[str, int]) -> socket.socket:
    family = (
        socket.AF_UNIX
        if isinstance(where, str)
        else socket.AF_INET6
        if ":" in where[0]
        else socket.AF_INET
    )
    connected = socket.socket(family)
    connected.settimeout(30)
    try:
        connected.connect(where)
    except OSError:
        connected.close()
        raise
    return connected


def reaches(listeners: Listeners, where: str | tuple[str, int]) -> list[str]:
    """Which of the listeners somebody reaches who connects there."""
    with connect(where):
        found = []
        for each in listeners:
            with contextlib.suppress(BlockingIOError):
                each.socket.accept()[0].close()
                found.append(each.where)
        return found


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ("tcp://127.0.0.1:0", "127.0.0.1"),
        ("tcp://localhost:0", "127.0.0.1"),
        ("tcp://127.0.0.3:0", "127.0.0.3"),
        ("tcp://[::1]:0", "::1"),
        ("tcp://*:0", "0.0.0.0"),
        ("tcp://[::]:0", "::"),
    ],
)
def test_a_port_has_a_unix_socket_beside_it(listen: Listen, given: str, host: str) -> None:
    listeners = listen(given)
    tcp, name = tcp_host(listeners.address), unix_name(listeners.address)
    assert tcp is not None and tcp[0] == host and tcp[1] > 0
    assert name is not None and name.startswith("\0kvkeep ")
    near = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(host, host)
    assert reaches(listeners, (near, tcp[1])) == [listeners.address]
    assert reaches(listeners, name) == [f"the Unix socket @{name[1:]}"]
    assert [each.is_unix for each in listeners] == [False, True]


def test_servers_at_the_same_port_of_other_host_addresses_are_left_alone(listen: Listen) -> None:
    first = listen("tcp://127.0.0.2:0")
    port = int(first.address.rpartition(":")[2])
    second = listen(f"tcp://127.0.0.1:{port}")
    for listeners, host in ((first, "127.0.0.2"), (second, "127.0.0.1")):
        name = unix_name(listeners.address)
        assert name is not None
        assert reaches(listeners, (host, port)) == [listeners.address]
        assert reaches(listeners, name) == [f"the Unix socket @{name[1:]}"]


def test_where_the_name_is_taken_engines_use_the_port(
    listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody of this host can take it: a name without a file has no owner."""
    free = Listeners("tcp://127.0.0.1:0")
    address, name = free.address, unix_name(free.address)
    free.close()
    assert name is not None
    with socket.socket(socket.AF_UNIX) as thief:
        thief.bind(name)
        listeners = listen(address)
    assert listeners.address == address and [each.is_unix for each in listeners] == [False]
    tcp = tcp_host(address)
    assert tcp is not None and reaches(listeners, tcp) == [address]
    [line] = [record.getMessage() for record in caplog.records]
    assert "engines on this host connect by TCP" in line and name[1:] in line and "in use" in line


def test_a_name_without_a_file(listen: Listen, tmp_path: Path) -> None:
    address = f"ipc://@kvkeep-{tmp_path.name}-{os.getpid()}"
    assert reaches(listen(address), f"\0{address.removeprefix('ipc://@')}") == [address]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_a_file_is_its_owners_alone_and_goes_with_the_server(
    listen: Listen, tmp_path: Path, umask: int
) -> None:
    path, before = tmp_path / "socket", os.umask(umask)
    try:
        listeners = listen(f"ipc://{path}")
        assert os.umask(umask) == umask, "the umask is as it was"
    finally:
        os.umask(before)
    assert path.is_socket() and path.stat().st_mode & 0o777 == 0o600
    assert reaches(listeners, str(path)) == [listeners.address] == [f"ipc://{path}"]
    listeners.close()
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        connect(str(path))


def test_a_file_for_others_lets_them_connect(tmp_path: Path) -> None:
    """Who they are is seen when they have connected."""
    listeners = Listeners(f"ipc://{tmp_path}/socket", for_others=True)
    assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o666
    listeners.close()


def test_a_dead_servers_file_is_taken_over(listen: Listen, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/socket")
    listeners = listen(f"ipc://{tmp_path}/socket")
    assert reaches(listeners, f"{tmp_path}/socket") == [listeners.address]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_living_servers_file_is_not(listen: Listen, tmp_path: Path, hangs: bool) -> None:
    path = f"{tmp_path}/socket"
    with contextlib.ExitStack() as waiting, socket.socket(socket.AF_UNIX) as living:
        living.bind(path)
        living.listen(0)
        while hangs:  # nobody accepts, and the queue is full
            one = waiting.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            hangs = one.connect_ex(path) == 0
        with pytest.raises(SettingsError, match="another server listens") as refused:
            listen(f"ipc://{path}")
        assert "--address" in refused.value.hint and Path(path).is_socket()


def test_a_file_that_is_no_socket_is_left_alone(listen: Listen, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    with pytest.raises(SettingsError, match="not a socket"):
        listen(f"ipc://{tmp_path}/precious")
    assert (tmp_path / "precious").read_text() == "keep me"


def test_a_directory_that_is_not_there_is_named(listen: Listen, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file") as refused:
        listen(f"ipc://{tmp_path}/nowhere/socket")
    assert f"{tmp_path}/nowhere does not exist" in refused.value.hint


def test_a_port_in_use_is_named_with_the_remedy(listen: Listen) -> None:
    first = listen("tcp://127.0.0.1:0")
    with pytest.raises(SettingsError, match=r"cannot listen on tcp.* in use") as refused:
        listen(first.address)
    assert "--address" in refused.value.hint
    tcp = tcp_host(first.address)
    assert tcp is not None and reaches(first, tcp) == [first.address], (
        "and the first one has lost nothing"
    )


def test_whether_an_address_is_free_is_known_without_listening(
    listen: Listen, tmp_path: Path
) -> None:
    taken = listen("tcp://127.0.0.1:0").address
    with pytest.raises(SettingsError, match=f"cannot listen on {taken}: Address already in use"):
        check_free(taken)
    with pytest.raises(SettingsError, match="cannot listen on it for HTTP"):
        check_free(taken, "it for HTTP")
    listen(f"ipc://{tmp_path}/socket")
    with pytest.raises(SettingsError, match="another server listens"):
        check_free(f"ipc://{tmp_path}/socket")
    check_free(f"ipc://{tmp_path}/other")
    check_free("tcp://127.0.0.1:0")


def test_a_closed_port_can_be_had_again_though_clients_were_connected(listen: Listen) -> None:
    first = listen("tcp://127.0.0.1:0")
    tcp, name = tcp_host(first.address), unix_name(first.address)
    assert tcp is not None and name is not None
    with connect(tcp), connect(name):
        accepted = [each.socket.accept()[0] for each in first]
        first.close()
        for one in accepted:
            one.close()
        again = listen(first.address)
        assert len(list(again)) == 2 and reaches(again, tcp) and reaches(again, name)
