"""Another user of the same host tries to be the server, and to be an engine. Two real users: only
root can run this."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import kvkeep
from kvkeep.client.options import ClientOptions
from kvkeep.errors import Unavailable
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m
from kvkeep.wire.address import tcp_host
from kvkeep.wire.frames import Header, encode

sys.path.insert(0, str(Path(__file__).parent))
from engines import (
    BRISK,
    POOL,
    engine,
    eventually,
    oracle,
    prompt,
    serve,
    status,
    tokens_of,
    without_cache,
)
from local_users import (
    AS_ROOT_INSIDE,
    OTHER_UID,
    ServerInNamespace,
    doors,
    false_server,
    needs_namespaces,
    needs_two_users,
    say_as_other,
)

CACHE: dict[str, Any] = {
    "model": "m",
    "revision": "1",
    "block_tokens": 4,
    "block_shape": (2, 8),
    "dtype": "float32",
}
HELLO = b"".join(encode(Header(0, 1), m.Hello("attacker", 1)))
NOTHING = {"tcp": 0, "unix": 0}


def welcome(pool: Path) -> bytes:
    """What a false server answers: its own pool, and no verification."""
    place = m.PoolPlace(str(pool), str(pool / "session-1.lock"), 1 << 20, 1 << 20)
    limits = m.WireLimits(1 << 20, 1024, 1024, 1024)
    said = m.Welcome(7, 1, "kvkeep", place, limits, list(m.CAPABILITIES), verify=False)
    return msgspec.msgpack.encode(said)


def pool_of_other() -> Path:
    return Path(f"/dev/shm/kvkeep-false-{os.getpid()}")


def port_of(server: ServerProcess) -> int:
    tcp = tcp_host(server.address)
    assert tcp is not None
    return tcp[1]


def lines_of_other(text: str) -> list[str]:
    return [line for line in text.splitlines() if f"uid {OTHER_UID}" in line]


# -- as the server


@needs_two_users
@pytest.mark.parametrize("taken", ["port and name", "port", "name"])
def test_an_engine_says_nothing_to_another_users_server_and_serves_without_it(
    caplog: pytest.LogCaptureFixture, taken: str
) -> None:
    """The real server is stopped, and another user is in its place before it is back."""
    model, prompts = oracle(), [prompt(23) for _ in range(3)]
    expected = without_cache(model, prompts)
    with ServerProcess(*POOL) as server, engine(server, model, extra=BRISK) as llm:
        assert tokens_of(serve(llm, prompts)) == expected
        before, name = port_of(server), doors(server)[1]
        server.stop()
        caplog.clear()
        places = {"port": before if "port" in taken else 0, "name": name if "name" in taken else ""}
        with false_server(welcome(pool_of_other()), pool_of_other(), **places) as other:

            def is_tried() -> bool:
                accepted = other.ask()["accepted"]
                kinds = {"port": "tcp", "name": "unix"}
                return all(accepted[kinds[which]] >= 3 for which, used in places.items() if used)

            def goes_on() -> bool:
                assert tokens_of(serve(llm, [prompt(9)])) is not None
                return is_tried() and bool(lines_of_other(caplog.text))

            assert eventually(goes_on), "the engine tries again and again, and says why it cannot"
            assert tokens_of(serve(llm, prompts)) == expected
            assert other.ask()["heard"] == NOTHING, "not a byte was said to it"
        [line] = lines_of_other(caplog.text)
        assert (
            "another user" in line
            and "trusted_users" in line
            and "Serving without the cache" in line
        )
        server.start()
        fresh = [prompt(23)]
        assert eventually(
            lambda: serve(llm, fresh) and status(server)["counters"]["stored_blocks"] > 0
        )
        assert status(server)["sessions"], "the real server is used again"


@needs_two_users
def test_another_user_who_has_the_name_alone_keeps_nobody_from_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A name without a file is anybody's to take, before the server starts."""
    with ServerProcess(*POOL) as server:
        name = doors(server)[1]
        server.stop()
        with false_server(welcome(pool_of_other()), pool_of_other(), name=name) as other:
            server.start()
            assert "engines on this host connect by TCP" in server.log()
            with kvkeep.connect(server.address, required=True, wait_ms=10_000, **CACHE) as cache:
                assert cache.put(range(8), np.ones((2, 2, 8), np.float32)) == 2
                assert cache.contains(range(8)) == 2
            assert other.ask()["heard"] == NOTHING
    assert "another user" not in caplog.text, (
        "there is a server, so there is nothing to complain about"
    )


@needs_two_users
def test_a_socket_with_a_file_in_a_directory_for_all_is_looked_at_as_well() -> None:
    directory = Path(f"/tmp/kvkeep-for-all-{os.getpid()}")
    directory.mkdir()
    directory.chmod(0o1777)
    path = directory / "socket"
    try:
        with false_server(welcome(pool_of_other()), pool_of_other(), name=str(path)) as other:
            with pytest.raises(Unavailable, match=f"uid {OTHER_UID}"):
                kvkeep.connect(f"ipc://{path}", required=True, wait_ms=1_000, **CACHE)
            heard = other.ask()
            assert heard["heard"] == NOTHING and heard["accepted"]["unix"] > 0
            users = ClientOptions(address=f"ipc://{path}", trusted_users=(OTHER_UID,))
            with pytest.raises(Unavailable, match="can be written by other users"):
                kvkeep.connect(options=users, required=True, wait_ms=1_000, **CACHE)
            assert other.ask()["heard"]["unix"] > 0, (
                "who is trusted is spoken to, and its pool is looked at"
            )
    finally:
        path.unlink(missing_ok=True)
        directory.rmdir()


# -- as an engine


@needs_two_users
def test_another_user_is_closed_before_anything_is_answered() -> None:
    with ServerProcess(*POOL) as server:
        for number, where in enumerate((*doors(server), *doors(server))):
            assert say_as_other(where, HELLO) == {"came": "", "closed": True}
            assert status(server)["auth_failures"] == {"other_user": number + 1}
        assert status(server)["counters"]["sessions_opened"] == 0
        [line] = lines_of_other(server.log())
        assert "was turned away" in line and "trusted_users" in line
        with kvkeep.connect(server.address, required=True, wait_ms=10_000, **CACHE) as cache:
            assert cache.put(range(8), np.ones((2, 2, 8), np.float32)) == 2


@needs_two_users
def test_a_user_that_was_named_is_let_in() -> None:
    with ServerProcess(*POOL, "--trusted-users", str(OTHER_UID)) as server:
        for where in doors(server):
            heard = say_as_other(where, HELLO)
            assert not heard["closed"] and b"KVKP" in bytes.fromhex(heard["came"])
        assert (
            status(server)["auth_failures"] == {}
            and status(server)["counters"]["sessions_opened"] == 2
        )


@needs_two_users
@pytest.mark.parametrize("users", ["none", str(OTHER_UID)])
def test_a_socket_with_a_file_is_open_to_users_that_were_named(users: str) -> None:
    directory = Path(f"/tmp/kvkeep-socket-{os.getpid()}")
    directory.mkdir()
    directory.chmod(0o755)
    try:
        with ServerProcess(
            *POOL, "--address", f"ipc://{directory}/socket", "--trusted-users", users
        ) as server:
            heard = say_as_other(f"{directory}/socket", HELLO)
            if users == "none":
                assert heard == {"refused": "PermissionError"}
            else:
                assert b"KVKP" in bytes.fromhex(heard["came"])
            assert status(server)["counters"]["sessions_opened"] == (users != "none")
    finally:
        directory.rmdir()


# -- in another user namespace


@needs_two_users
@needs_namespaces
def test_a_server_in_a_user_namespace_refuses_a_user_that_it_cannot_map_and_says_what_to_do() -> (
    None
):
    with ServerInNamespace(*POOL) as server:
        for where in doors(server):
            assert say_as_other(where, HELLO) == {"came": "", "closed": True}
        assert status(server)["auth_failures"] == {"other_user": 2}
        assert "one user namespace" in server.log() and f"uid {OTHER_UID}" not in server.log()
        with kvkeep.connect(server.address, required=True, wait_ms=10_000, **CACHE) as cache:
            assert cache.put(range(8), np.ones((2, 2, 8), np.float32)) == 2, (
                "who is mapped is let in"
            )


IN_A_NAMESPACE = """
import json, sys, kvkeep, kvkeep.errors
try:
    kvkeep.connect(sys.argv[1], required=True, wait_ms=1_000, **json.loads(sys.argv[2]))
except kvkeep.errors.Unavailable as error:
    print(error)
"""


@needs_two_users
@needs_namespaces
@pytest.mark.parametrize("inside", [AS_ROOT_INSIDE, ("unshare", "--user")])
def test_an_engine_in_a_user_namespace_says_nothing_to_a_server_that_it_cannot_map(
    inside: tuple[str, ...],
) -> None:
    """Also if it is mapped to nobody itself, and so looks like the other one."""
    with ServerProcess(*POOL) as server:
        port, name = port_of(server), doors(server)[1]
        address = server.address
    with false_server(welcome(pool_of_other()), pool_of_other(), port, name) as other:
        command = [*inside, sys.executable, "-c", IN_A_NAMESPACE, address, json.dumps(CACHE)]
        ended = subprocess.run(command, capture_output=True, text=True)
        heard = other.ask()
    assert "one user namespace" in ended.stdout, ended.stderr
    assert heard["heard"] == NOTHING and heard["accepted"]["unix"] > 0
