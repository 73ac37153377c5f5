"""Calls end once, the breaker opens in silence, and debts are said until they are confirmed."""

from __future__ import annotations

from kvkeep.client.calls import Breaker, Call, Calls, ClientCounters, Debts, gives
from kvkeep.wire import messages as m


def test_a_call_is_done_with_a_reply_or_with_a_failure() -> None:
    assert not Call(1, 100).done
    assert Call(1, 100, reply=m.Done()).done
    assert Call(1, 100, failure="deadline").done


def test_calls_are_told_apart_by_identity() -> None:
    first, second = Call(1, 100), Call(1, 100)
    assert first != second
    assert len({first, second}) == 2


def test_the_breaker_opens_in_silence_and_counts_openings() -> None:
    breaker = Breaker()
    breaker.hear()
    breaker.expire(Call(1, 100, words=0))
    assert not breaker.is_open, "it has spoken since"
    for number in (2, 3, 4):
        breaker.expire(Call(number, 100, words=1))
    assert breaker.is_open
    assert breaker.opened == 1, "what an open breaker meets opens nothing"
    breaker.hear()
    assert not breaker.is_open
    breaker.expire(Call(5, 100, words=1))
    assert not breaker.is_open
    breaker.expire(Call(6, 100, words=2))
    assert breaker.is_open and breaker.opened == 2


def test_calls_are_there_until_they_are_removed() -> None:
    calls, some = Calls(), [Call(number, 100 * number) for number in (1, 2, 3, 4)]
    for call in some:
        calls.add(call)
    assert calls.get(2) is some[1] and calls.overdue(99) == [] and calls.overdue(300) == some[:3]
    calls.remove(some[1])
    calls.remove(some[1])
    assert calls.get(2) is None and calls.overdue(300) == [some[0], some[2]]
    assert calls.all(but=some[3]) == [some[0], some[2]]
    calls.end_all("gone")
    assert calls.all() == calls.overdue(1000) == []
    assert [call.failure for call in some] == ["gone", "", "gone", "gone"]


def test_bulk_counts_while_it_has_time() -> None:
    calls = Calls()
    calls.add(Call(1, 100))
    assert not calls.awaits_bulk(50)
    calls.add(Call(2, 100, bulk=True))
    assert calls.awaits_bulk(99) and not calls.awaits_bulk(100)


def test_what_is_given() -> None:
    assert gives(m.Lookup("t", 1, b"")) == "lease" and gives(m.Ping()) == ""
    assert gives(m.PrepareStore("t", 1, 0, b"", b"")) == "write"


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
    for number, given in enumerate(["lease", "write", "", "lease"]):
        debts.add(Call(number, 0, given))
    assert debts
    debts.pay(0, send)
    assert send.messages == [m.Release([0, 3]), m.AbandonStore([1])]
    assert debts, "said, not confirmed"
    for _, call in send.sent:
        call.reply = m.Done()
    debts.pay(10_000, send)
    assert len(send.sent) == 2 and not debts


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


def test_tokens_that_were_loaded_go_with_their_lease_until_it_is_confirmed() -> None:
    debts, send = Debts(), Sender()
    for number, tokens in ((5, 0), (2, 32)):
        debts.add(Call(number, 0, "lease", loaded_tokens=tokens))
    debts.pay(0, send)
    send.sent[0][1].failure = "deadline"
    debts.pay(2_000, send)
    assert send.messages == [m.Release([2, 5], [32, 0])] * 2


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
