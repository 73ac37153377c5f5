"""Another user of the same host tries to be the server, and to be an engine. Two real users: only
root can run this."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import clients
import msgspec
import pytest
from clients import holds, stores
from engines import (
    BRISK,
    POOL,
    engine,
    eventually,
    oracle,
    prompt,
    run,
    seed,
    serve,
    status,
    tokens_of,
    without_cache,
)
from local_users import (
    AS_ROOT_INSIDE,
    ATTACKER,
    NO_CAPS,
    VICTIM,
    ServerAs,
    doors,
    false_server,
    in_namespace,
    kvkeep_as,
    needs_namespaces,
    needs_two_users,
    say_as_other,
)

from kvkeep.cli.remote import ask
from kvkeep.errors import Unavailable
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m
from kvkeep.wire.address import tcp_host
from kvkeep.wire.frames import Header, encode
from kvkeep_lab.simulation.oracle import OracleModel

pytestmark = needs_two_users
POOL_OF_OTHER = Path(f"/dev/shm/kvkeep-false-{os.getpid()}")
TOKENS = list(range(8))
HELLO = b"".join(encode(Header(0, 1), m.Hello("attacker", 1)))
NOTHING = {"tcp": 0, "unix": 0}


def welcome() -> bytes:
    """What a false server answers: its own pool, and no verification."""
    pool = POOL_OF_OTHER
    place = m.PoolPlace(str(pool), str(pool / "session-1.lock"), 1 << 20, 1 << 20)
    limits = m.WireLimits(1 << 20, 1024, 1024, 1024)
    said = m.Welcome(7, 1, "kvkeep", place, limits, list(m.CAPABILITIES), verify=False)
    return msgspec.msgpack.encode(said)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory for a socket, which other users can enter."""
    path = Path(f"/tmp/kvkeep-socket-{os.getpid()}")
    path.mkdir()
    path.chmod(0o755)
    yield path
    (path / "socket").unlink(missing_ok=True)
    path.rmdir()


def port_of(server: ServerProcess) -> int:
    tcp = tcp_host(server.address)
    assert tcp is not None
    return tcp[1]


def lines_of_other(text: str) -> list[str]:
    return [line for line in text.splitlines() if f"uid {ATTACKER}" in line]


# -- as the server


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
        kinds = {"port": "tcp", "name": "unix"}
        with false_server(welcome(), POOL_OF_OTHER, **places) as other:

            def is_tried() -> bool:
                accepted = other.ask()["accepted"]
                return all(accepted[kinds[which]] >= 3 for which, used in places.items() if used)

            def goes_on() -> bool:
                assert tokens_of(serve(llm, [prompt(9)])) is not None
                return is_tried() and bool(lines_of_other(caplog.text))

            assert eventually(goes_on), "the engine tries again and again, and says why it cannot"
            assert tokens_of(serve(llm, prompts)) == expected
            assert other.ask()["heard"] == NOTHING, "not a byte was said to it"
        [line] = lines_of_other(caplog.text)
        for part in ("another user", "trusted_users", "Serving without the cache"):
            assert part in line
        server.start()
        assert eventually(
            lambda: serve(llm, [prompt(23)]) and status(server)["counters"]["stored_blocks"] > 0
        ), "the real server is used again"


def test_another_user_who_has_the_name_alone_keeps_nobody_from_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A name without a file is anybody's to take, before the server starts."""
    with ServerProcess(*POOL) as server:
        name = doors(server)[1]
        server.stop()
        with false_server(welcome(), POOL_OF_OTHER, name=name) as other:
            server.start()
            assert "engines on this host connect by TCP" in server.log()
            with clients.connect(server.address) as cache:
                assert stores(cache, TOKENS) == holds(cache, TOKENS) == 2
            assert other.ask()["heard"] == NOTHING
    assert "another user" not in caplog.text, "the server was found"


def test_a_server_at_a_socket_with_a_file_is_checked_as_well(directory: Path) -> None:
    directory.chmod(0o1777)
    address = f"ipc://{directory}/socket"
    with false_server(welcome(), POOL_OF_OTHER, name=f"{directory}/socket") as other:
        with pytest.raises(Unavailable, match=f"uid {ATTACKER}"):
            clients.connect(address, wait_ms=1_000)
        heard = other.ask()
        assert heard["heard"] == NOTHING and heard["accepted"]["unix"] > 0
        with pytest.raises(Unavailable, match="can be written by other users"):
            clients.connect(address, wait_ms=1_000, trusted_users=(ATTACKER,))
        assert other.ask()["heard"]["unix"] > 0, "a trusted user is spoken to; its pool is checked"


# -- as an engine


def test_another_user_is_closed_before_anything_is_answered() -> None:
    with ServerProcess(*POOL) as server:
        for number, where in enumerate((*doors(server), *doors(server))):
            assert say_as_other(where, HELLO) == {"came": "", "closed": True}
            assert status(server)["auth_failures"] == {"other_user": number + 1}
        assert status(server)["counters"]["sessions_opened"] == 0
        [line] = lines_of_other(server.log())
        assert "was turned away" in line and "trusted_users" in line
        with clients.connect(server.address) as cache:
            assert stores(cache, TOKENS) == 2


def test_a_user_that_was_named_is_let_in() -> None:
    with ServerProcess(*POOL, "--trusted-users", str(ATTACKER)) as server:
        for where in doors(server):
            heard = say_as_other(where, HELLO)
            assert not heard["closed"] and b"KVKP" in bytes.fromhex(heard["came"])
        assert status(server)["auth_failures"] == {}
        assert status(server)["counters"]["sessions_opened"] == 2


@pytest.mark.parametrize("users", ["none", str(ATTACKER)])
def test_a_socket_with_a_file_is_open_to_users_that_were_named(directory: Path, users: str) -> None:
    flags = ("--address", f"ipc://{directory}/socket", "--trusted-users", users)
    with ServerProcess(*POOL, *flags) as server:
        heard = say_as_other(f"{directory}/socket", HELLO)
        if users == "none":
            assert heard == {"refused": "PermissionError"}
        else:
            assert b"KVKP" in bytes.fromhex(heard["came"])
        assert status(server)["counters"]["sessions_opened"] == (users != "none")


# -- users that were named, on purpose

ROOT: tuple[str, ...] = ()
INSIDE = 1_000  # how a namespace shows a user
SHARED, SOCKET, NOTHING_AT_ALL = "shared memory", "the socket", "nothing"


@pytest.mark.parametrize(
    ("engine_as", "names", "server_uid", "server_names", "through"),
    [
        pytest.param(ROOT, ATTACKER, ATTACKER, None, SHARED, id="root"),
        pytest.param(NO_CAPS, ATTACKER, ATTACKER, None, SOCKET, id="root without capabilities"),
        pytest.param(VICTIM, None, 0, VICTIM, SOCKET, id="a user, beside root's server"),
        pytest.param(VICTIM, ATTACKER, ATTACKER, VICTIM, SOCKET, id="two users"),
        pytest.param(VICTIM, ATTACKER, ATTACKER, None, NOTHING_AT_ALL, id="named by one side"),
        pytest.param(
            in_namespace(ATTACKER, INSIDE),
            INSIDE,
            ATTACKER,
            None,
            SHARED,
            id="as the namespace shows it",
            marks=needs_namespaces,
        ),
        pytest.param(
            in_namespace(ATTACKER, INSIDE),
            ATTACKER,
            ATTACKER,
            None,
            NOTHING_AT_ALL,
            id="not as the namespace shows it",
            marks=needs_namespaces,
        ),
    ],
)
def test_engine_and_server_of_different_users_work_as_the_guide_says(
    engine_as: int | tuple[str, ...],
    names: int | None,
    server_uid: int,
    server_names: int | None,
    through: str,
) -> None:
    """The table in docs/guides/security.md, row by row, and what namespaces make of it."""
    number, prompts = seed(), [prompt(23)]
    flags = () if server_names is None else ("--trusted-users", str(server_names))
    become = kvkeep_as(engine_as) if isinstance(engine_as, int) else engine_as
    extra = {} if names is None else {"kvkeep.trusted_users": str(names)}
    options = {"extra": extra, "enable_prefix_caching": False}
    job = {"seed": number, "prompts": prompts, "rounds": 2, "options": options}
    # Not below pytest's directory, which each run of pytest closes to other users.
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as name:
        os.chown(name, server_uid, server_uid)
        server_as = kvkeep_as(server_uid) if server_uid else ROOT
        with ServerAs(server_as, *POOL, *flags, state_dir=Path(name)) as server:
            [answer] = run(server.address, job, become)
            counters = ask(server.http, "/v1/status")["counters"]
    assert [answer["tokens"]] == without_cache(OracleModel(number), prompts)
    assert answer["extra"] == (0 if through == NOTHING_AT_ALL else 20), "in the second round"
    assert (counters["hit_blocks"] > 0) is (through != NOTHING_AT_ALL)
    assert (counters["network_bytes_out"] > 0) is (through == SOCKET)


# -- in another user namespace


@needs_namespaces
def test_a_server_in_a_user_namespace_refuses_a_user_that_it_cannot_map() -> None:
    with ServerAs(AS_ROOT_INSIDE, *POOL) as server:
        for where in doors(server):
            assert say_as_other(where, HELLO) == {"came": "", "closed": True}
        assert status(server)["auth_failures"] == {"other_user": 2}
        assert "one user namespace" in server.log() and f"uid {ATTACKER}" not in server.log()
        with clients.connect(server.address) as cache:
            assert stores(cache, TOKENS) == 2, "a user that is mapped is let in"


IN_A_NAMESPACE = """
import sys, kvkeep.errors
sys.path.insert(0, sys.argv[2])
import clients
try:
    clients.connect(sys.argv[1], wait_ms=1_000)
except kvkeep.errors.Unavailable as error:
    print(error)
"""


@needs_namespaces
@pytest.mark.parametrize("inside", [AS_ROOT_INSIDE, ("unshare", "--user")])
def test_an_engine_in_a_user_namespace_says_nothing_to_a_server_that_it_cannot_map(
    inside: tuple[str, ...],
) -> None:
    """Also if its own user is not mapped, and so looks like the attacker."""
    with ServerProcess(*POOL) as server:
        port, name = port_of(server), doors(server)[1]
        address = server.address
    with false_server(welcome(), POOL_OF_OTHER, port, name) as other:
        command = [*inside, sys.executable, "-c", IN_A_NAMESPACE, address, clients.__file__[:-11]]
        ended = subprocess.run(command, capture_output=True, text=True)
        heard = other.ask()
    assert "one user namespace" in ended.stdout, ended.stderr
    assert heard["heard"] == NOTHING and heard["accepted"]["unix"] > 0
