"""Tests for replies that nobody reads: they are limited by bytes, whatever the number of connections."""

from __future__ import annotations

import pytest

from kvkeep.errors import RequestError
from kvkeep.server.backlog import _CONNECTIONS_REMEMBERED, MARK_BYTES, Backlog

LARGE = MARK_BYTES


class Network:
    """Replies that leave when they are told to."""

    def __init__(self, **limits: int) -> None:
        self.backlog = Backlog(**limits)
        self.left: set[int] = set()
        self._next = 0

    def send(self, peer: bytes, session: int, client: str, nbytes: int = LARGE) -> int:
        self._next += 1
        number = self._next
        if self.backlog.wants_mark(peer, nbytes):
            self.backlog.add(peer, session, client, lambda: number in self.left)
        return number


def is_refused(backlog: Backlog, session: int, client: str) -> bool:
    try:
        backlog.check(session, client)
    except RequestError:
        return True
    return False


def test_the_refusal_says_what_to_do() -> None:
    with pytest.raises(RequestError) as caught:
        Backlog(total_bytes=0).check(1, "k")
    assert (caught.value.code, caught.value.field) == ("too_fast", "replies") and "read replies" in caught.value.hint


def test_a_session_is_refused_until_what_it_asked_for_has_left() -> None:
    net = Network(session_bytes=2 * LARGE)
    first = net.send(b"a", 1, "k")
    assert not is_refused(net.backlog, 1, "k")
    net.send(b"a", 1, "k")
    assert is_refused(net.backlog, 1, "k") and not is_refused(net.backlog, 2, "k")
    net.left.add(first)
    assert not is_refused(net.backlog, 1, "k") and net.backlog.nbytes == LARGE


def test_several_connections_count_together() -> None:
    net = Network(session_bytes=3 * LARGE)
    for peer in (b"a", b"b", b"c"):
        assert not is_refused(net.backlog, 1, "k")
        net.send(peer, 1, "k")
    assert is_refused(net.backlog, 1, "k")


def test_a_connection_that_is_stuck_does_not_hide_that_another_is_not() -> None:
    net = Network(session_bytes=2 * LARGE)
    net.send(b"old", 1, "k")
    second = net.send(b"new", 1, "k")
    assert is_refused(net.backlog, 1, "k")
    net.left.add(second)
    assert not is_refused(net.backlog, 1, "k")


def test_sessions_of_a_client_count_together_and_those_of_another_do_not() -> None:
    net = Network(client_bytes=3 * LARGE)
    for session in (1, 2, 3):
        net.send(bytes([session]), session, "greedy")
    assert is_refused(net.backlog, 4, "greedy") and not is_refused(net.backlog, 5, "calm")


def test_all_together_are_limited_too() -> None:
    net = Network(total_bytes=3 * LARGE)
    sent = [net.send(bytes([at]), at, str(at)) for at in range(3)]
    assert is_refused(net.backlog, 9, "calm")
    net.left.update(sent)
    assert not is_refused(net.backlog, 9, "calm") and net.backlog.nbytes == 0
    assert not net.backlog._marked and not net.backlog._held, "nothing is remembered of what has left"


def test_small_replies_are_marked_together_and_all_counted() -> None:
    backlog = Backlog()
    marked = [backlog.wants_mark(b"a", MARK_BYTES // 4) for _ in range(4)]
    assert marked == [False, False, False, True]
    backlog.add(b"a", 1, "k", lambda: False)
    assert backlog.nbytes == MARK_BYTES
    assert not backlog.wants_mark(b"a", 1), "and counting begins anew"


def test_connections_that_came_and_went_are_forgotten() -> None:
    backlog = Backlog()
    for number in range(100_000):
        backlog.wants_mark(number.to_bytes(5, "big"), 1)
    assert len(backlog._unmarked) < 5_000


def test_however_many_connections_there_are_little_of_each_is_not_counted() -> None:
    """Nothing ever leaves; the connections take turns, so that each is forgotten again and again."""
    net = Network(total_bytes=1 << 60)
    connections, rounds, nbytes = 3 * _CONNECTIONS_REMEMBERED, 8, MARK_BYTES // 4
    for _ in range(rounds):
        for number in range(connections):
            net.send(number.to_bytes(5, "big"), number, "k", nbytes)
    assert connections * (rounds * nbytes - MARK_BYTES) < net.backlog.waiting_bytes()
    assert len(net.backlog._unmarked) <= _CONNECTIONS_REMEMBERED


def test_what_waits_is_told_without_what_has_left() -> None:
    net = Network()
    first = net.send(b"a", 1, "k")
    net.send(b"b", 2, "k")
    assert net.backlog.waiting_bytes() == 2 * LARGE
    net.left.add(first)
    assert net.backlog.waiting_bytes() == LARGE


@pytest.mark.parametrize("limits", [{}, {"session_bytes": 1 << 40}])
def test_our_own_clients_come_nowhere_near(limits: dict[str, int]) -> None:
    """Each thread of theirs reads a reply of 8 MiB before it asks for the next."""
    net = Network(**limits)
    for _ in range(4):
        net.send(b"a", 1, "k", 8 << 20)
        assert not is_refused(net.backlog, 1, "k")
