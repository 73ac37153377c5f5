"""A session: made step by step, kept, made again; and whatever the server does, nothing raises and
nobody waits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvkeep.client.calls import Call
from kvkeep.client.connection import Connection
from kvkeep.client.options import ClientOptions
from kvkeep.kv.checksum import checksum
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.shape import BlockShape
from kvkeep.store.plans import Limits
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, encode
from kvkeep_lab.simulation.wire import Faults

Make = Callable[..., Any]
IDENTITY = ModelIdentity(model="sim", revision="1", kv_dtype="|u1", block_tokens=4, content="sim")


def keys(count: int, name: str = "k") -> bytes:
    return b"".join(f"{name}{at}".encode().ljust(16, b".") for at in range(count))


def look_up(connection: Connection, count: int = 2, deadline_ms: int = 200) -> Call:
    assert connection.layout is not None
    return connection.call(m.Lookup("default", connection.layout.layout, keys(count)), deadline_ms)


def prepare(connection: Connection, count: int = 2, deadline_ms: int = 200) -> Call:
    assert connection.layout is not None
    return connection.call(
        m.PrepareStore("default", connection.layout.layout, 0, b"", keys(count)), deadline_ms
    )


def store_blocks(sim: Any, count: int = 2) -> None:
    """Blocks of zeros, by another client."""
    connection = sim.connected()
    call = prepare(connection, count)
    assert isinstance(connection.wait(call), m.Prepared)
    blocks = [bytes(1000)] * count
    assert isinstance(connection.wait(connection.call(m.Put(call.number, 0), 200, blocks)), m.Done)
    sums = b"".join(checksum(block).to_bytes(8, "little") for block in blocks)
    assert connection.wait(connection.call(m.CompleteStore(call.number, sums), 200)) == m.Done(
        count
    )


# -- the handshake


def test_a_session_is_made_in_three_steps_and_nothing_is_sent_before_it_is(sim: Any) -> None:
    sim.network.faults = Faults(delay_ms=(10, 10))
    connection = sim.connection()
    states = [connection.state]
    while not connection.up:
        assert look_up_before_up(connection) == "not_connected"
        sim.run(10)
        if connection.state != states[-1]:
            states.append(connection.state)
    assert states == ["down", "greeting", "attaching", "opening", "up"]
    assert [type(request) for request in sim.recorder.came] == [m.Hello, m.Attach, m.OpenLayout]
    assert (connection.epoch, connection.counters.sessions) == (1, 1)


def look_up_before_up(connection: Connection) -> str:
    call = connection.call(m.Lookup("default", 0, keys(1)), 200)
    assert call.done and call.reply is None
    return call.failure


@pytest.mark.parametrize("step", [m.Hello, m.Attach, m.OpenLayout])
def test_a_refusal_at_any_step_is_explained_tried_again_and_leaves_no_session_behind(
    sim: Any, step: type, passing: object, caplog: pytest.LogCaptureFixture
) -> None:
    sim.network.faults = Faults(delay_ms=(1, 5))
    refused = m.Refused("too_many", "there are too many of you", "", "raise --max-of-you")
    sim.recorder.instead = lambda header, request: refused if isinstance(request, step) else passing
    connection = sim.connection()
    sim.run(2_000)
    assert not connection.up
    assert connection.counters.failures["too_many"] > 5, "it tries again"
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "there are too many of you (raise --max-of-you)" in warnings[0]
    assert len(sim.store.sessions) <= 1, "sessions of failed handshakes are ended"
    sim.recorder.instead = None
    sim.run(500)
    assert connection.up
    assert len(sim.store.sessions) == 1


def test_a_block_too_large_for_the_server_is_refused_in_its_words(sim: Any) -> None:
    connection = sim.connection(1 << 20)
    assert not connection.wait_until_up(1_000)
    assert "does not fit a slab" in connection.refusal
    assert "--slab-size" in connection.refusal


def test_a_server_of_another_protocol_version_is_named_and_not_used(
    sim: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(header: Header, request: m.Request) -> Any:
        return encode(
            Header(header.session, header.number, version=m.PROTOCOL_VERSION + 1), m.Done()
        )

    sim.recorder.instead = answer
    connection = sim.connection()
    assert not connection.wait_until_up(1_000)
    assert f"protocol version {m.PROTOCOL_VERSION + 1}" in connection.refusal
    assert "same kvkeep release" in caplog.text
    sim.recorder.instead = None
    assert connection.wait_until_up(1_000), "an upgraded server is found"


@pytest.mark.parametrize(
    "reply",
    [
        m.Done(),
        m.Found(1, b"", b""),
        m.LayoutOpened(1, 4096, [0]),
        m.LayoutOpened(1, 4096, []),
        m.LayoutOpened(1, 4096, [-1]),
        m.LayoutOpened(1, 999, [0]),
        m.Refused("", ""),
    ],
    ids=repr,
)
@pytest.mark.parametrize("step", [m.Hello, m.Attach, m.OpenLayout])
def test_a_wrong_reply_in_the_handshake_never_holds_it_up(
    sim: Any, step: type, reply: m.Reply, passing: object
) -> None:
    is_right = step is m.OpenLayout and reply == m.LayoutOpened(1, 4096, [0])
    sim.recorder.instead = lambda header, request: reply if isinstance(request, step) else passing
    connection = sim.connection()
    assert connection.wait_until_up(1_000) == is_right
    sim.recorder.instead = None
    assert connection.wait_until_up(1_000)
    assert "internal_error" not in connection.counters.failures


@pytest.mark.parametrize("session", [-1, -(2**63)])
def test_a_session_number_that_no_header_can_carry_is_refused(sim: Any, session: int) -> None:
    pool, limits = m.PoolPlace("", "", 1, 1), m.WireLimits(1 << 20, 1, 1, 1)
    sim.recorder.instead = lambda *_: m.Welcome(session, 1, "", pool, limits, [], True)
    connection = sim.connection()
    assert not connection.wait_until_up(500)
    assert connection.counters.failures.keys() == {"protocol"}


def test_a_silent_server_is_asked_again_after_each_deadline(sim: Any) -> None:
    sim.recorder.instead = lambda *_: None
    connection = sim.connection(handshake_deadline_ms=200)
    sim.run(1_000)
    assert 3 <= sim.recorder.count(m.Hello) <= 6
    assert connection.state in ("down", "greeting")


# -- the session


def test_a_new_server_is_noticed_and_calls_on_their_way_to_the_old_one_fail(sim: Any) -> None:
    connection = sim.connected()
    sim.recorder.instead = lambda *_: None
    call = look_up(connection, deadline_ms=60_000)
    sim.run(10)
    sim.replace_server(epoch=2)
    sim.run(1_000)
    assert (call.failure, call.reply) == ("session_lost", None)
    assert (connection.epoch, connection.counters.sessions) == (2, 2)


def test_a_session_that_the_server_forgot_is_made_again(sim: Any) -> None:
    connection = sim.connected()
    session = sim.server.service.sessions.all()[0].token
    sim.server.service.handle(encode(Header(session, 1_000), m.Goodbye()), 0)
    call = look_up(connection)
    assert connection.wait(call) is None
    assert call.failure == "unknown_session"
    assert connection.epoch == 0
    sim.run(500)
    assert connection.up
    assert len(sim.store.sessions) == 1


def reached(connection: Connection, epoch: int, session: int = 0) -> bool:
    with connection.pool(epoch, session) as pool:
        return pool is not None


def test_memory_stays_mapped_and_fenced_until_the_last_copy_has_ended(simulation: Make) -> None:
    sim = simulation(shared_memory=True)
    connection = sim.connected()
    lock = sim.server.service.sessions.all()[0].watch
    with connection.pool(1) as pool:
        assert pool is not None
        connection.start_over()  # as when the server is another one
        assert lock.is_held(), "the server may not take a slot that is being written"
        assert len(pool[0].view(0, 64)) == 64
    assert not lock.is_held()


def test_a_forked_child_is_not_connected_and_does_not_hang(
    simulation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = simulation()
    connection = sim.connected()
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as if this were the child
    call = connection.call(m.Ping(), 60_000)
    assert (connection.wait(call), call.failure) == (None, "forked")
    connection.poll()
    connection.close()
    monkeypatch.undo()
    assert connection.up, "and the parent is none the worse for it"


def test_slots_are_only_reached_in_the_session_and_epoch_that_gave_them(simulation: Make) -> None:
    sim = simulation(shared_memory=True)
    connection = sim.connected()
    call = look_up(connection)
    assert reached(connection, 1)
    assert reached(connection, call.epoch, call.session)
    assert not reached(connection, 2)
    assert not reached(connection, call.epoch, call.session + 1)
    sim.replace_server(epoch=2)
    sim.run(1_000)
    assert connection.up
    assert not reached(connection, call.epoch, call.session)
    assert reached(connection, 2)


def test_a_server_whose_pool_others_may_write_gets_no_session(
    simulation: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Not on the network plane either: it is not who it says."""
    caplog.set_level(logging.WARNING)
    sim = simulation(shared_memory=True)
    directory = sim.pools[0].directory
    directory.chmod(0o777)
    connection = sim.connection()
    assert not connection.wait_until_up(2_000)
    assert connection.segments is None and connection.counters.failures.keys() == {"untrusted_pool"}
    [told] = caplog.messages
    assert (
        f"tcp://cache:5555 is not trusted: {directory} can be written by other users (mode 0777)"
        in told
    )
    assert connection.refusal.startswith(str(directory)) and not connection.coming_up
    assert (
        sim.recorder.count(m.Attach) == sim.recorder.count(m.OpenLayout) == 0
        and not sim.store.sessions
    )
    directory.chmod(0o700)
    assert connection.wait_until_up(2_000) and connection.segments is not None, (
        "as soon as it is not so"
    )


def test_a_message_made_for_the_layout_of_an_earlier_server_is_not_sent(sim: Any) -> None:
    connection = sim.connected()
    call = connection.call(m.Lookup("default", 77, keys(1)), 200)
    assert call.failure == "session_lost"
    assert sim.recorder.count(m.Lookup) == 0


def test_a_ping_keeps_a_quiet_session_alive(sim: Any) -> None:
    sim.connected(ping_interval_ms=500)
    sim.run(60_000, step_ms=100)
    assert sim.server.service.end_dead_sessions(sim.network.clock.now_ms) == 0
    assert 100 <= sim.recorder.count(m.Ping) <= 121


def test_a_message_longer_than_the_server_takes_is_not_sent(sim: Any) -> None:
    connection = sim.connected()
    assert connection.layout is not None
    call = connection.call(m.Lookup("default", connection.layout.layout, bytes(2 << 20)), 200)
    assert call.failure == "frame_too_large"
    assert sim.recorder.count(m.Lookup) == 0


# -- deadlines and the breaker


def test_a_call_ends_at_its_deadline_and_its_late_reply_is_ignored(sim: Any) -> None:
    connection = sim.connected()
    before_ms = sim.network.clock.now_ms
    sim.network.faults = Faults(delay_ms=(150, 150))
    call = look_up(connection, deadline_ms=200)
    assert connection.wait(call) is None
    assert (call.failure, sim.network.clock.now_ms - before_ms) == ("deadline", 200)
    sim.network.faults = Faults()
    sim.run(300)
    assert connection.counters.late_replies == 1
    assert (call.failure, call.reply) == ("deadline", None)


def test_a_call_in_silence_opens_the_breaker_and_a_ping_closes_it(sim: Any) -> None:
    connection = sim.connected(ping_interval_ms=60_000)
    sim.lose_everything()
    assert not connection.breaker.is_open
    connection.wait(look_up(connection))
    before_ms = sim.network.clock.now_ms
    assert look_up(connection).failure == "breaker_open"
    assert sim.network.clock.now_ms == before_ms
    sim.network.faults = Faults()
    sim.run(62_000, step_ms=100)
    assert not connection.breaker.is_open
    assert isinstance(connection.wait(look_up(connection)), m.Found)
    assert connection.breaker.opened == 1


def test_what_was_lost_with_a_silent_connection_ends_no_call_of_the_next(
    sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, lost = sim.connected(ping_interval_ms=200), False

    def reconnect() -> None:
        nonlocal lost
        lost = True

    def was_lost() -> bool:
        nonlocal lost
        was, lost = lost, False
        return was

    monkeypatch.setattr(sim.transports[-1], "reconnect", reconnect)
    monkeypatch.setattr(sim.transports[-1], "lost", was_lost)
    sim.lose_everything()
    sim.run(2_000)
    assert connection.breaker.is_open
    sim.network.faults = Faults()
    while connection.breaker.is_open:
        sim.run(10)
    assert isinstance(connection.wait(look_up(connection)), m.Found)
    assert "unreachable" not in connection.counters.failures


def test_a_late_answer_closes_the_breaker_at_once(sim: Any) -> None:
    connection = sim.connected(ping_interval_ms=60_000)
    sim.network.faults = Faults(delay_ms=(150, 150))
    connection.wait(look_up(connection, deadline_ms=200))
    assert connection.breaker.is_open
    sim.run(150)
    assert connection.counters.late_replies == 1 and not connection.breaker.is_open


def test_one_slow_answer_among_others_opens_nothing(sim: Any) -> None:
    """The server speaks: whatever is wrong, it is wrong with this call alone."""
    connection = sim.connected(ping_interval_ms=60_000)
    sim.lose_everything()
    slow, other = look_up(connection, deadline_ms=200), prepare(connection, 3, deadline_ms=5_000)
    sim.network.faults = Faults()
    assert isinstance(connection.wait(look_up(connection)), m.Found)
    assert connection.wait(slow) is None
    assert slow.failure == "deadline" and not connection.breaker.is_open and not other.done


def test_on_a_slow_link_nothing_is_silent_while_blocks_are_on_their_way(sim: Any) -> None:
    """What is sent after them waits for them, and so does every answer."""
    connection = sim.connected(ping_interval_ms=60_000)
    sim.lose_everything()
    fetch = connection.call(m.Fetch(99, 0, 0, 1), 5_000)
    assert connection.wait(look_up(connection, deadline_ms=200)) is None
    assert not connection.breaker.is_open and not fetch.done
    connection.wait(fetch)
    assert fetch.failure == "deadline" and connection.breaker.is_open, (
        "its own deadline passed in silence"
    )


def test_a_call_ends_whatever_goes_wrong_with_its_reply(
    sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = sim.connected()

    def fail(*_: Any) -> Any:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr("kvkeep.client.connection.decode_reply", fail)
    call = look_up(connection)
    connection.wait(call)
    assert call.failure == "session_lost"
    sim.run(1_000)
    assert connection.up and isinstance(connection.wait(look_up(connection)), m.Found)


def test_what_is_on_its_way_ends_with_the_first_call_that_meets_silence(sim: Any) -> None:
    """A store has a deadline of seconds: nobody waits that long for a server that says nothing."""
    connection = sim.connected(ping_interval_ms=60_000)
    sim.lose_everything()
    lookup, store = look_up(connection, deadline_ms=200), prepare(connection, 3, deadline_ms=5_000)
    before_ms = sim.network.clock.now_ms
    connection.wait(lookup)
    assert (lookup.failure, store.failure) == ("deadline", "breaker_open")
    assert sim.network.clock.now_ms - before_ms == 200
    sim.network.faults = Faults()
    sim.run(62_000, step_ms=100)
    assert sim.held() == [(0, 0)], "what it may have been given is given back"


# -- giving back


def test_what_a_call_gave_is_given_back_after_its_reply(sim: Any) -> None:
    store_blocks(sim)
    connection = sim.connected()
    lookup, write = look_up(connection), prepare(connection, 3)
    assert isinstance(connection.wait(lookup), m.Found)
    assert isinstance(connection.wait(write), m.Prepared)
    assert (1, 1) in sim.held()
    connection.give_up(lookup)
    connection.give_up(write)
    sim.run(50)
    assert sim.held() == [(0, 0), (0, 0)]
    assert lookup.reply is not None, "what was answered stays answered"


def test_what_a_call_will_have_given_is_given_back_before_its_reply(sim: Any) -> None:
    store_blocks(sim)
    connection = sim.connected()
    sim.network.faults = Faults(delay_ms=(20, 20))
    lookup, write = look_up(connection), prepare(connection, 3)
    connection.give_up(lookup)
    connection.give_up(write)
    assert (lookup.failure, write.failure) == ("given_up", "given_up")
    sim.run(200)
    assert sim.held() == [(0, 0), (0, 0)]
    assert connection.counters.late_replies == 2


@pytest.mark.parametrize("kind", [m.Release, m.AbandonStore])
def test_giving_back_is_said_again_until_it_is_confirmed(
    sim: Any, kind: type, passing: object
) -> None:
    store_blocks(sim)
    connection = sim.connected()
    calls = [look_up(connection), prepare(connection, 3)]
    for call in calls:
        connection.wait(call)
    sim.recorder.instead = lambda header, request: None if isinstance(request, kind) else passing
    for call in calls:
        connection.give_up(call)
    sim.run(5_000)
    said = sim.recorder.count(kind)
    assert 4 <= said <= 6
    sim.recorder.instead = None
    sim.run(5_000)
    assert sim.recorder.count(kind) == said + 1
    assert sim.held() == [(0, 0), (0, 0)]


def test_a_call_past_its_deadline_gives_back_what_it_may_have_got(
    sim: Any, passing: object
) -> None:
    connection = sim.connected()

    def carry_out_and_lose_the_reply(header: Header, request: m.Request) -> Any:
        if not isinstance(request, m.PrepareStore):
            return passing
        frames = encode(Header(header.session, header.number), request)
        sim.server.service.handle(frames, sim.network.clock.now_ms)
        return None

    sim.recorder.instead = carry_out_and_lose_the_reply
    call = prepare(connection)
    while not call.done:
        sim.network.run_until(sim.network.clock.now_ms + 10)
        assert sim.held() in ([(0, 0)], [(0, 1)])
        connection.poll()
    assert call.failure == "deadline"
    sim.run(200)
    assert sim.held() == [(0, 0)]


def test_debts_of_a_session_die_with_it(sim: Any) -> None:
    connection = sim.connected()
    call = look_up(connection)
    connection.wait(call)
    sim.replace_server(epoch=2)
    sim.run(1_000)
    connection.give_up(call)
    sim.run(1_000)
    assert sim.recorder.count(m.Release) == 0


# -- the end


def test_close_says_goodbye_and_lets_go_of_the_lock(simulation: Make) -> None:
    sim = simulation(shared_memory=True)
    connection = sim.connected()
    assert connection.segments is not None
    session = sim.server.service.sessions.all()[0]
    assert session.watch.is_held()
    connection.close()
    assert sim.recorder.count(m.Goodbye) == 1
    assert not sim.store.sessions
    assert connection.shared_pool is None
    connection.close()
    connection.poll()
    assert not connection.wait_until_up(1_000)
    assert connection.call(m.Ping(), 100).failure == "not_connected"
    assert sim.recorder.count(m.Goodbye) == 1


def test_close_of_a_session_that_nobody_knows_opens_no_other(sim: Any) -> None:
    connection = sim.connected()
    sim.run(1_000)
    sim.replace_server(epoch=2)
    connection.close()
    sim.network.run_until(sim.network.clock.now_ms + 100)
    assert (sim.recorder.count(m.Goodbye), sim.recorder.count(m.Hello)) == (1, 0)


def test_close_waits_for_a_silent_server_no_longer_than_a_deadline(sim: Any) -> None:
    connection = sim.connected(lookup_deadline_ms=200)
    call = look_up(connection, deadline_ms=60_000)
    sim.lose_everything()
    before_ms = sim.network.clock.now_ms
    connection.close()
    assert sim.network.clock.now_ms - before_ms == 200
    assert call.failure == "breaker_open"


# -- what people are told


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_outage_is_told_once_with_the_address_and_the_remedy(
    sim: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sim.network.serve(None)
    connection = sim.connection()
    sim.run(60_000)
    (warning,) = warnings(caplog)
    assert "tcp://cache:5555" in warning
    assert "`kvkeep serve`" in warning
    sim.network.serve(sim.recorder)
    sim.run(1_000)
    assert connection.up
    assert warnings(caplog)[1:] == ["kvkeep: connected to tcp://cache:5555"]


def test_a_moments_silence_is_counted_and_not_told(
    sim: Any, caplog: pytest.LogCaptureFixture
) -> None:
    connection = sim.connected(ping_interval_ms=1_000)
    sim.lose_everything()
    connection.wait(look_up(connection))
    assert connection.breaker.opened == 1
    sim.network.faults = Faults()
    sim.run(1_500)
    assert connection.answering and warnings(caplog) == []


def test_what_was_refused_once_is_not_the_reason_of_an_outage(
    sim: Any, caplog: pytest.LogCaptureFixture
) -> None:
    connection = sim.connected()
    assert connection.wait(connection.call(m.Fetch(99, 0, 0, 1), 200)) is None
    assert connection.refusal
    sim.network.serve(None)
    sim.run(30_000)
    assert (
        "does not answer" in warnings(caplog)[0] and connection.refusal not in warnings(caplog)[0]
    )


def test_an_outage_in_the_middle_is_told_once_too(
    sim: Any, caplog: pytest.LogCaptureFixture
) -> None:
    connection = sim.connected()
    for outage in range(1, 3):
        sim.network.serve(None)
        sim.run(30_000)
        told = [
            "the server at tcp://cache:5555 does not answer" in text for text in warnings(caplog)
        ]
        assert told == [True, False] * (outage - 1) + [True]
        sim.network.serve(sim.recorder)
        sim.run(2_000)
        assert connection.up and not connection.breaker.is_open
        assert warnings(caplog)[-1] == "kvkeep: connected to tcp://cache:5555"


def test_a_first_connection_is_no_news(sim: Any, caplog: pytest.LogCaptureFixture) -> None:
    sim.connected()
    assert warnings(caplog) == []


class Deaf:
    """A transport that reaches nobody."""

    def __init__(self) -> None:
        self.sent = 0

    def send(self, frames: Sequence[Any]) -> bool:
        self.sent += 1
        return False

    def receive(self) -> list[bytes] | None:
        return None

    def wait(self, timeout_ms: int) -> None: ...

    def lost(self) -> bool:
        return False

    def reconnect(self) -> None: ...

    def refusal(self) -> str:
        return ""

    def close(self) -> None: ...


def connection_over(transport: Any, clock: Callable[[], int]) -> Connection:
    return Connection(
        BlockShape(IDENTITY, (1000,)), ClientOptions(address="tcp://cache:5555"), transport, clock
    )


def test_an_address_where_nobody_listens_is_tried_quickly_then_patiently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_ms, transport = [0], Deaf()
    connection = connection_over(transport, lambda: now_ms[0])
    for now_ms[0] in range(100):
        connection.poll()
    assert transport.sent >= 4
    assert warnings(caplog) == [], "a socket that was only just made is no outage"
    for now_ms[0] in range(100, 60_000, 20):
        connection.poll()
    assert transport.sent <= 130
    assert len(warnings(caplog)) == 1


# -- a server that does us harm


class Broken(Deaf):
    def receive(self) -> list[bytes] | None:
        raise RuntimeError("this cannot happen")


def test_a_fault_inside_is_counted_logged_once_and_never_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection = connection_over(Broken(), lambda: 0)
    for _ in range(100):
        connection.poll()
    assert connection.counters.failures == {"internal_error": 100}
    assert len(warnings(caplog)) == 1
    assert "this cannot happen" in caplog.text


class Flood(Deaf):
    def receive(self) -> list[bytes] | None:
        return [b"noise"]


def test_a_flood_of_messages_does_not_keep_the_engine() -> None:
    connection = connection_over(Flood(), lambda: 0)
    connection.poll()
    assert connection.counters.failures["protocol"] > 100


def test_limits_of_sessions_are_not_used_up_by_a_client_that_cannot_be_served(
    simulation: Make,
) -> None:
    sim = simulation(limits=Limits(sessions=3))
    sim.connection(
        1 << 20
    )  # its blocks are too large: refused after Hello and Attach, again and again
    sim.run(5_000)
    sim.connected()
    sim.connected()
