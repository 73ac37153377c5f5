"""A lock that nobody can keep from the others by taking it again and again."""

from __future__ import annotations

import threading

from kvkeep.client.threads import FairLock
from kvkeep.testing.clock import eventually


def test_who_has_it_may_take_it_again_while_others_wait() -> None:
    turns, order = FairLock(), []

    def other() -> None:
        with turns:
            order.append("other")

    thread = threading.Thread(target=other)
    with turns:
        thread.start()
        assert eventually(lambda: "waited for" in repr(turns)), "it stands in line"
        with turns, turns:
            order.append("inside")
        order.append("outside")
    thread.join()
    assert order == ["inside", "outside", "other"]


def test_who_takes_it_again_and_again_has_it_after_whoever_came_meanwhile() -> None:
    turns, order = FairLock(), []

    def other() -> None:
        with turns:
            order.append("other")

    for _ in range(100):
        order.clear()
        thread = threading.Thread(target=other)
        with turns:
            thread.start()
            assert eventually(lambda: "waited for" in repr(turns))
            order.append("first")
        with turns:
            order.append("second")
        thread.join()
        assert order == ["first", "other", "second"]


def test_one_thread_has_it_at_a_time() -> None:
    turns, inside, counted = FairLock(), [0], [0]

    def work() -> None:
        for _ in range(2_000):
            with turns, turns:
                inside[0] += 1
                assert inside[0] == 1
                counted[0] += 1
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted == [8_000]


def test_an_error_inside_gives_it_back() -> None:
    turns = FairLock()
    try:
        with turns, turns:
            raise KeyError
    except KeyError:
        pass
    thread = threading.Thread(target=turns.__enter__)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
