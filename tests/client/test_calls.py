"""Calls end once, the breaker counts in a row, and debts are said until they are confirmed."""

from __future__ import annotations

from kvkeep.client.calls import Breaker, Call, ClientCounters, Debts
from kvkeep.wire import messages as m


def test_a_call_is_done_with_a_reply_or_with_a_failure() -> None:
    assert not Call(1, 100).done
    assert Call(1, 100, reply=m.Done()).done
    assert Call(1, 100, failure="deadline").done


def test_calls_are_told_apart_by_identity() -> None:
    first, second = Call(1, 100), Call(1, 100)
    assert first != second
    assert len({first, second}) == 2


def test_the_breaker_opens_after_failures_in_a_row_and_counts_openings() -> None:
    breaker = Breaker(3)
    for _ in range(2):
        breaker.fail()
    breaker.succeed()
    for _ in range(2):
        breaker.fail()
    assert not breaker.is_open
    for _ in range(5):
        breaker.fail()
    assert breaker.is_open
    assert breaker.opened == 1, "further failures of an open breaker open nothing"
    breaker.succeed()
    assert not breaker.is_open


def test_failures_are_counted_by_reason() -> None:
    counters = ClientCounters()
    for reason in ("deadline", "deadline", "pool"):
        counters.fail(reason)
    assert counters.failures == {"deadline": 2, "pool": 1}


class Sender:
    """Takes what debts send, and answers as told."""

    def __init__(self) -> None:
        self.sent: list[tuple[m.Message, Call]] = []

    def __call__(self, message: m.Message, deadline_ms: int) -> Call:
        call = Call(len(self.sent), deadline_ms)
        self.sent.append((message, call))
        return call

    @property
    def messages(self) -> list[m.Message]:
        return [message for message, _ in self.sent]


def test_debts_are_paid_together_and_once_when_confirmed() -> None:
    debts, send = Debts(), Sender()
    for number, gives in enumerate(["lease", "write", "", "lease"]):
        debts.add(Call(number, 0, gives))
    debts.pay(0, send)
    assert send.messages == [m.Release([0, 3]), m.AbandonStore([1])]
    for _, call in send.sent:
        call.reply = m.Done()
    debts.pay(10_000, send)
    assert len(send.sent) == 2


def test_an_unconfirmed_debt_is_said_again_after_a_while() -> None:
    debts, send = Debts(), Sender()
    debts.add(Call(7, 0, "lease"))
    debts.pay(0, send)
    debts.pay(5_000, send)
    assert len(send.sent) == 1, "still on its way"
    send.sent[0][1].failure = "deadline"
    debts.pay(6_100, send)
    assert send.messages == [m.Release([7])] * 2
    send.sent[1][1].reply = m.Found(0, b"", b"")
    debts.pay(6_101, send)
    assert len(send.sent) == 2, "not in every poll"
    debts.pay(7_200, send)
    assert send.messages == [m.Release([7])] * 3, "only Done confirms"


def test_a_new_debt_does_not_wait_for_the_interval_of_older_ones() -> None:
    debts, send = Debts(), Sender()
    debts.add(Call(1, 0, "lease"))
    debts.pay(0, send)
    debts.add(Call(2, 0, "write"))
    debts.pay(1, send)
    assert send.messages == [m.Release([1]), m.AbandonStore([2])]


def test_one_message_names_no_more_than_the_protocol_allows() -> None:
    debts, send = Debts(), Sender()
    for number in range(m.MAX_LIST_ITEMS + 5):
        debts.add(Call(number, 0, "lease"))
    debts.pay(0, send)
    debts.pay(2_000, send)
    sizes = [len(message.leases) for message in send.messages if isinstance(message, m.Release)]
    assert sizes == [m.MAX_LIST_ITEMS, 5]


def test_debts_of_a_session_that_is_over_are_forgotten() -> None:
    debts, send = Debts(), Sender()
    debts.add(Call(1, 0, "lease"))
    debts.pay(0, send)
    debts.add(Call(2, 0, "write"))
    debts.clear()
    debts.pay(10_000, send)
    assert len(send.sent) == 1
