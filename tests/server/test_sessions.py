"""Tests for sessions: what a server remembers of an engine process, and when it is gone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.cli.admin import session_rows, why_not_shared
from kvkeep.client.connection import Connection, Heartbeat
from kvkeep.client.options import ClientOptions
from kvkeep.errors import RequestError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.shape import BlockShape
from kvkeep.server.sessions import (
    MOST_PAIRS,
    ServerSession,
    Sessions,
    nearest_difference,
    not_shared,
)
from kvkeep.testing.process import ServerProcess
from kvkeep.wire.messages import NETWORK, SHARED_MEMORY
from kvkeep.wire.pool_files import Watch, hold

TIMEOUT_MS = 30_000


def session(plane: str = "", watch: Watch | None = None) -> ServerSession:
    return ServerSession(
        1, 1, "engine", 4711, watch, opened_ms=1_000, last_seen_ms=1_000, plane=plane
    )


# -- when one is gone


def test_a_network_session_is_gone_after_silence() -> None:
    one = session(NETWORK)
    assert not one.is_gone(1_000 + TIMEOUT_MS, TIMEOUT_MS)
    assert one.is_gone(1_001 + TIMEOUT_MS, TIMEOUT_MS)


def test_a_session_that_never_attached_is_gone_after_ten_seconds() -> None:
    assert not session().is_gone(11_000, TIMEOUT_MS)
    assert session().is_gone(11_001, TIMEOUT_MS)


def test_no_time_ends_a_session_in_shared_memory(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "lock")
    one = session(SHARED_MEMORY, watch)
    fence = hold(watch.path)
    assert not one.is_gone(2**60, TIMEOUT_MS)
    os.close(fence)
    assert one.is_gone(1_000, TIMEOUT_MS), "and none is needed once its lock has fallen"
    watch.close()


# -- all of them


def test_a_session_is_found_by_its_token_only() -> None:
    sessions = Sessions()
    one = sessions.add(sessions.next_number(), "engine", 1, None, 0)
    assert sessions.get(one.token) is one
    with pytest.raises(RequestError) as caught:
        sessions.get(one.number)
    assert (caught.value.code, caught.value.field) == ("unknown_session", "session")
    assert "Hello" in caught.value.hint


def test_tokens_cannot_be_guessed_and_are_never_zero() -> None:
    sessions = Sessions()
    tokens = {
        sessions.add(sessions.next_number(), "engine", 1, None, 0).token for _ in range(1_000)
    }
    assert len(tokens) == len(sessions) == 1_000
    assert all(0 < token < 2**63 for token in tokens)
    assert max(tokens) > 2**60


def test_numbers_are_not_used_again() -> None:
    sessions = Sessions()
    first = sessions.add(sessions.next_number(), "engine", 1, None, 0)
    sessions.remove(first)
    assert sessions.next_number() != first.number


def test_removing_a_session_removes_its_lock_file(tmp_path: Path) -> None:
    sessions = Sessions()
    one = sessions.add(sessions.next_number(), "engine", 1, Watch(tmp_path / "lock"), 0)
    sessions.remove(one)
    sessions.remove(one)
    assert not (tmp_path / "lock").exists()
    assert sessions.all() == []


# -- whose a session is


def test_a_session_is_found_with_its_own_key_alone() -> None:
    sessions = Sessions()
    keyed, plain = sessions.add(1, "a", 1, None, 0, "key"), sessions.add(2, "b", 1, None, 0)
    assert sessions.get(keyed.token, "key") is keyed and sessions.get(plain.token) is plain
    for token, key in ((keyed.token, ""), (keyed.token, "other"), (plain.token, "key"), (0, "")):
        with pytest.raises(RequestError):
            sessions.get(token, key)


def test_a_barred_session_is_not_found_but_counted_until_it_is_removed() -> None:
    sessions = Sessions()
    one = sessions.add(1, "a", 1, None, 0, "key")
    assert sessions.bar(one) and not sessions.bar(one)
    with pytest.raises(RequestError):
        sessions.get(one.token, "key")
    assert sessions.all() == [one] and len(sessions) == 1
    sessions.remove(one)
    assert sessions.all() == [] and len(sessions) == 0


def test_a_session_moves_to_a_new_connection_and_never_back() -> None:
    sessions = Sessions()
    one = sessions.add(1, "a", 1, None, 0, peer=3)
    assert sessions.get(one.token, peer=3) is sessions.get(one.token, peer=8) is one
    for earlier in (
        3,
        5,
    ):  # also one that it was never on: a client may have sent something there, and given up
        with pytest.raises(RequestError) as caught:
            sessions.get(one.token, peer=earlier)
        assert caught.value.code == "unknown_session"
    assert sessions.get(one.token, peer=8) is one, "what the earlier ones asked has changed nothing"


def test_a_connection_with_another_key_does_not_take_a_session_over() -> None:
    sessions = Sessions()
    one = sessions.add(1, "a", 1, None, 0, "key", peer=1)
    with pytest.raises(RequestError):
        sessions.get(one.token, "other", 2)
    assert one.peer == 1 and sessions.get(one.token, "key", 1) is one


def engine(number: int, identity: str, **parts: str) -> ServerSession:
    made = ServerSession(number, number, "engine", 1, None, 0, 0)
    made.identity, made.parts = identity, {"model": "m", **parts}
    return made


def test_a_session_hears_which_parts_keep_it_from_the_nearest_engine_of_its_model() -> None:
    here = engine(1, "a", revision="1", positions="short")
    far = engine(2, "b", revision="2", positions="long")
    near = engine(3, "c", revision="1", positions="long")
    other_model = engine(4, "d", revision="9")
    other_model.parts = {"model": "n"}
    same = engine(5, "a", revision="1", positions="short")
    assert nearest_difference(here, [here, far, near, other_model, same]) == ["positions"]
    assert nearest_difference(here, [here, same, other_model]) == []
    assert nearest_difference(ServerSession(6, 6, "old", 1, None, 0, 0), [here, far]) == []


def test_operators_see_each_identity_of_a_model_against_the_first() -> None:
    sessions = [
        engine(1, "a", revision="1"),
        engine(2, "a", revision="1"),
        engine(3, "b", revision="2", extra="x"),
    ]
    (pair,) = not_shared([*sessions, ServerSession(4, 4, "old", 1, None, 0, 0)])
    assert (pair.model, pair.identities, pair.sessions) == ("m", ("a", "b"), ([1, 2], [3]))
    assert pair.differs == {"revision": ("1", "2"), "extra": ("not said", "x")}
    assert not_shared(sessions[:2]) == []


def test_a_status_has_a_limited_number_of_pairs_and_of_text() -> None:
    sessions = [
        engine(number, f"i{number}", revision=str(number) * 1000) for number in range(1, 60)
    ]
    pairs = not_shared(sessions)
    assert len(pairs) == MOST_PAIRS
    assert all(len(text) < 200 for text in pairs[0].differs["revision"])


# --- with a real server


def status_of(server: ServerProcess) -> Any:
    return server.ask()


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
    Heartbeat.keep(connection)
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
