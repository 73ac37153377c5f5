"""Tests for sessions: what a server remembers of an engine process, and when it is gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvkeep.errors import RequestError
from kvkeep.server.sessions import ServerSession, Sessions
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
