from __future__ import annotations

import pytest

from kvkeep.wire.address import MAX_SOCKET_PATH_BYTES, is_loopback, parse_address, split_host


@pytest.mark.parametrize(
    "text", ["tcp://cache:7", "tcp://*:0", "tcp://[::1]:1", "ipc:///run/kv", "ipc://@kv"]
)
def test_an_address_is_taken_as_it_is(text: str) -> None:
    assert parse_address(text) == text


@pytest.mark.parametrize(
    "text", ["", "tcp", "tcp://", "tcp://a", "ipc://", "ipc://kv", "ipc:///a\nb", "udp://a:1"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError):
        parse_address(text)


def test_a_socket_path_is_as_long_as_the_kernel_takes_it() -> None:
    longest = "ipc:///" + "é" * ((MAX_SOCKET_PATH_BYTES - 1) // 2)
    assert parse_address(longest) == longest
    with pytest.raises(ValueError):
        parse_address(longest + "x")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("localhost:0", "localhost", 0), ("[::1]:5555", "::1", 5555), ("*:65535", "*", 65535)],
)
def test_host_and_port(text: str, host: str, port: int) -> None:
    assert split_host(text) == (host, port)


@pytest.mark.parametrize(
    "text", ["", "a", "a:", ":1", "a:65536", "::1:5", "a b:1", "a:-1", "a:1\n"]
)
def test_what_is_no_host_and_port(text: str) -> None:
    with pytest.raises(ValueError):
        split_host(text)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.1", "::1"])
def test_what_is_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "*", "0.0.0.0", "::", "Localhost.", "localhost.localdomain", "127.1", "10.0.0.1"]
)
def test_what_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)
