"""Why engines of one model do not share: the parts that differ, for operators and for the engines
themselves."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from kvkeep.cli.status import session_rows, why_not_shared
from kvkeep.client.connection import Connection
from kvkeep.client.keeper import Keeper
from kvkeep.client.options import ClientOptions
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.shape import BlockShape
from kvkeep.server.sessions import ServerSession
from kvkeep.server.sharing import MOST_PAIRS, nearest_difference, not_shared
from kvkeep.testing.process import ServerProcess


def session(number: int, identity: str, **parts: str) -> ServerSession:
    made = ServerSession(number, number, "engine", 1, None, 0, 0)
    made.identity, made.parts = identity, {"model": "m", **parts}
    return made


def test_a_session_hears_which_parts_keep_it_from_the_nearest_engine_of_its_model() -> None:
    here = session(1, "a", revision="1", positions="short")
    far = session(2, "b", revision="2", positions="long")
    near = session(3, "c", revision="1", positions="long")
    other_model = session(4, "d", revision="9")
    other_model.parts = {"model": "n"}
    same = session(5, "a", revision="1", positions="short")
    assert nearest_difference(here, [here, far, near, other_model, same]) == ["positions"]
    assert nearest_difference(here, [here, same, other_model]) == []
    assert nearest_difference(ServerSession(6, 6, "old", 1, None, 0, 0), [here, far]) == []


def test_operators_see_each_identity_of_a_model_against_the_first() -> None:
    sessions = [
        session(1, "a", revision="1"),
        session(2, "a", revision="1"),
        session(3, "b", revision="2", extra="x"),
    ]
    (pair,) = not_shared([*sessions, ServerSession(4, 4, "old", 1, None, 0, 0)])
    assert (pair.model, pair.identities, pair.sessions) == ("m", ("a", "b"), ([1, 2], [3]))
    assert pair.differs == {"revision": ("1", "2"), "extra": ("not said", "x")}
    assert not_shared(sessions[:2]) == []


def test_a_status_has_a_limited_number_of_pairs_and_of_text() -> None:
    sessions = [
        session(number, f"i{number}", revision=str(number) * 1000) for number in range(1, 60)
    ]
    pairs = not_shared(sessions)
    assert len(pairs) == MOST_PAIRS
    assert all(len(text) < 200 for text in pairs[0].differs["revision"])


# --- with a real server


def status_of(server: ServerProcess) -> Any:
    with urllib.request.urlopen(f"http://{server.http}/v1/status", timeout=30) as answer:
        return json.load(answer)


def connected(
    server: ServerProcess, role: str, cut: str = "whole", **changes: object
) -> Connection:
    facts = {
        "model": "tiny",
        "revision": "1",
        "kv_dtype": "u1",
        "block_tokens": 4,
        "content": "bytes",
    } | changes
    shape = BlockShape(ModelIdentity(**facts), (64,), cut=cut)  # type: ignore[arg-type]
    connection = Connection(shape, ClientOptions(address=server.address))
    connection.role = role
    Keeper.keep(connection)
    assert connection.wait_until_up(20_000)
    return connection


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--pool-size", "8MiB") as process:
        yield process


def test_status_says_why_two_engines_of_one_model_do_not_share(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    scheduler = connected(server, "scheduler", details=(("positions", "short"),))
    worker = connected(server, "worker 0 of 1", details=(("positions", "short"),))
    assert not caplog.records, "they share"
    other = connected(server, "scheduler", details=(("positions", "long"),))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "they differ in positions" in said and other.shape.digest in said, "the engine says so"
    status = status_of(server)
    digests = [each.shape.digest for each in (scheduler, worker, other)]
    roles = ("scheduler", "worker 0 of 1", "scheduler")
    shown = [(s["model"], s["role"], s["identity"]) for s in status["sessions"]]
    assert shown == [("tiny", role, digest) for role, digest in zip(roles, digests, strict=True)]
    (pair,) = status["not_shared"]
    assert pair["differs"] == {"positions": ["short", "long"]}
    lines = "\n".join(why_not_shared(pair))
    assert all(
        word in lines for word in ("tiny", digests[0], digests[2], "positions: short | long")
    )
    columns, rows = session_rows(status["sessions"])
    assert "identity" in columns and digests[0] in rows[0]
    other.close()
    assert status_of(server)["not_shared"] == []
    scheduler.close()
    worker.close()


def test_a_client_cannot_write_lines_into_the_log_by_the_names_of_its_parts(
    server: ServerProcess,
) -> None:
    connection = connected(server, "scheduler\nroot: all is well", revision="1\x1b[2J\n2")
    (shown,) = status_of(server)["sessions"]
    assert shown["role"] == "scheduler?root: all is well"
    connection.close()
    assert "\x1b" not in server.log() and "\nroot: all is well" not in server.log()
