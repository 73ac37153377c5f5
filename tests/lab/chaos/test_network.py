"""Byte pipes with the faults of streams under the client's real transport."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from kvkeep.client.transport import StreamTransport
from kvkeep.errors import ProtocolError
from kvkeep.wire.frames import Header, decode_header, encode
from kvkeep.wire.messages import Ping
from kvkeep.wire.stream import Stream
from kvkeep_lab.chaos.mutants import planted
from kvkeep_lab.chaos.network import FAMILIES, OWN_UID, STRANGER_UID, ChaosNetwork, Stranger
from kvkeep_lab.chaos.record import Record, Violation
from kvkeep_lab.chaos.sockets import ChaosListener, ChaosSocket
from kvkeep_lab.simulation.simulation import Process, Simulation

PAYLOAD = b"p" * 64
SECOND_US = 1_000_000


def message(number: int) -> list[bytes]:
    return [bytes(frame) for frame in encode(Header(1, number), Ping(), [PAYLOAD])]


class Echo:
    """A server that sends back what comes, unless told to do `otherwise`."""

    def __init__(self, network: ChaosNetwork, uid: int = OWN_UID) -> None:
        self.received: list[list[bytes]] = []
        self.reads = True
        self.otherwise: Callable[[ChaosSocket, list[bytes]], None] | None = None
        self.process = Process(network.simulation, "echo")
        self._network = network
        self._streams: list[Stream] = []
        self._listeners: list[ChaosListener] = []
        for family in FAMILIES:
            self._listeners.append(network.listen(self.process, family, uid, self.rouse))

    def rouse(self) -> None:
        """In an event of its own: whoever has changed something is in the middle of it."""
        self._network.simulation.after(10, self.serve)

    def serve(self) -> None:
        for listener in self._listeners:
            while not listener.is_closed and listener.is_ready(1):
                self._streams.append(Stream(listener.accept()[0], 1 << 20))  # type: ignore[arg-type]
        for stream in [stream for stream in self._streams if self.reads and not stream.is_over]:
            stream.flush()
            stream.read()
            while (frames := stream.next()) is not None:
                self.received.append(frames)
                if self.otherwise is not None:
                    self.otherwise(stream.socket, frames)  # type: ignore[arg-type]
                else:
                    stream.send(frames)

    def end(self) -> None:
        self._network.end_process(self.process)


class World:
    def __init__(self, **rates: float) -> None:
        self.simulation = Simulation(1)
        self.record = Record(self.simulation)
        self.network = ChaosNetwork(self.simulation, 1, rates, self.record)
        self.process = Process(self.simulation, "client")
        self.transport = self.network.transport(self.process)
        self.echo = Echo(self.network)
        self.answers: list[list[bytes]] = []
        self.losses = 0
        self.to_send: list[int] = []
        self.sent: list[int] = []
        self.process.begin(self._run)

    def run(self, numbers: range = range(0), duration_us: int = 3 * SECOND_US) -> None:
        self.to_send += numbers
        self.simulation.run(duration_us)

    def _run(self) -> None:
        while True:
            while self.to_send and self.transport.send(message(self.to_send[0])):
                self.sent.append(self.to_send.pop(0))
            self.transport.wait(1)
            while (frames := self.transport.receive()) is not None:
                self.answers.append(frames)
            self.losses += self.transport.lost()


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**rates: float) -> World:
        worlds.append(World(**rates))
        return worlds[-1]

    yield make
    for world in worlds:
        world.simulation.close()


def test_without_faults_all_arrive_as_they_were(make: Callable[..., World]) -> None:
    world = make()
    world.run(range(200))
    assert world.echo.received == world.answers == [message(number) for number in range(200)]
    assert not world.record.faults and not world.losses


def test_late_ones_are_late_and_in_order(make: Callable[..., World]) -> None:
    world = make(late_message=1.0)
    world.run(range(5), duration_us=45_000)
    assert not world.echo.received
    world.run(duration_us=30 * SECOND_US)
    assert world.answers == [message(number) for number in range(5)]


def test_the_rest_of_half_a_message_comes_later(make: Callable[..., World]) -> None:
    world = make(half_message=1.0)
    world.run(range(20), duration_us=20 * SECOND_US)
    assert world.answers == [message(number) for number in range(20)] and not world.losses


def test_a_connection_that_is_cut_loses_messages_and_the_next_one_goes_on_with_whole_ones(
    make: Callable[..., World],
) -> None:
    world = make(cut_connection=0.05)
    world.run(range(200), duration_us=20 * SECOND_US)
    numbers = [decode_header(frames).number for frames in world.answers]
    assert world.losses > 3 and world.record.faults["cut_connection"] >= world.losses
    assert numbers == sorted(set(numbers)) and 5 < len(numbers) < 200
    assert all(
        frames == message(number) for frames, number in zip(world.answers, numbers, strict=True)
    )


@pytest.mark.parametrize("fault", ["corrupted_message", "flipped_payload_bit"])
def test_a_flipped_bit_is_in_a_message_or_in_a_payload(
    make: Callable[..., World], fault: str
) -> None:
    world = make(**{fault: 0.2})
    world.run(range(200), duration_us=20 * SECOND_US)
    assert world.record.faults[fault] > 10
    assert any(frames[2] != PAYLOAD for frames in world.echo.received) == (
        fault == "flipped_payload_bit"
    )
    for frames in world.echo.received:
        if fault == "flipped_payload_bit":
            assert frames[:2] == message(decode_header(frames).number)[:2]
        elif frames not in [message(number) for number in range(200)]:
            with pytest.raises(ProtocolError):
                decode_header(frames)


def test_a_server_that_is_gone_is_noticed_and_the_next_one_found(
    make: Callable[..., World],
) -> None:
    world = make()
    world.run(range(1))
    world.echo.end()
    world.run(range(1, 2))
    assert world.losses == 1 and world.to_send == [1]
    world.echo = Echo(world.network)
    world.run()
    assert world.answers == [message(0), message(1)]


def test_a_server_that_does_not_read_costs_bounded_memory_and_no_time(
    make: Callable[..., World],
) -> None:
    world = make()
    world.run(range(1))
    world.echo.reads = False
    world.run(range(1, 600), duration_us=2 * SECOND_US)
    stream = world.transport._stream
    assert stream is not None and 0 < stream.unsent_bytes <= 17 << 20 and not world.losses
    world.echo.reads = True
    world.echo.rouse()
    world.run(duration_us=5 * SECOND_US)
    assert world.answers == [message(number) for number in range(600)]


def test_a_stalled_connection_goes_on_later(make: Callable[..., World]) -> None:
    world = make()
    world.run(range(1))
    assert world.network.stall(random.Random(1), SECOND_US) and world.network.stall(
        random.Random(2), SECOND_US
    )
    world.run(range(1, 3), duration_us=SECOND_US // 2)
    assert len(world.answers) == 1
    world.run(duration_us=2 * SECOND_US)
    assert len(world.answers) == 3 and not world.losses


# -- who is there


@pytest.mark.parametrize("families", [FAMILIES, FAMILIES[:1], FAMILIES[1:]])
def test_nothing_is_said_to_a_server_of_another_user_until_the_right_one_is_back(
    make: Callable[..., World], families: tuple[int, ...]
) -> None:
    world = make()
    world.run(range(1))
    world.echo.end()
    stranger = Stranger(world.network, families)
    world.run(range(1, 2), duration_us=10 * SECOND_US)
    assert world.to_send == [1] and "another user" in world.transport.refusal()
    stranger.leave()
    world.echo = Echo(world.network)
    world.run()
    assert world.answers == [message(0), message(1)] and world.transport.refusal() == ""


def test_with_a_stranger_at_the_unix_socket_the_server_is_found_by_tcp(
    make: Callable[..., World],
) -> None:
    world = make()
    world.echo.end()
    Stranger(world.network, FAMILIES[:1])
    echo = Echo.__new__(Echo)
    echo.__dict__ |= world.echo.__dict__ | {"received": [], "_streams": []}
    echo._listeners = [world.network.listen(echo.process, FAMILIES[1], OWN_UID, echo.rouse)]
    world.run(range(3))
    assert echo.received == world.answers == [message(number) for number in range(3)]


@pytest.mark.parametrize("mutant", ["skip-proof", "prove-too-late"])
def test_a_word_to_a_stranger_is_noticed(make: Callable[..., World], mutant: str) -> None:
    world = make()
    world.echo.end()
    if mutant == "skip-proof":
        Stranger(world.network, FAMILIES)
    else:  # one that does not accept: so the kernel cannot tell whose the connection is
        world.network.listen(
            Process(world.simulation, "slow"), FAMILIES[1], STRANGER_UID, lambda: None
        )
    with planted(mutant), pytest.raises(Violation, match="client sends to a process of"):
        world.run(range(1))


def test_a_uid_is_that_of_whoever_listens(make: Callable[..., World]) -> None:
    world = make()
    world.echo.end()
    Echo(world.network, STRANGER_UID)
    world.run(range(1))
    assert world.to_send == [0]


# -- what transports must not do


def half_an_answer_then_the_end(end: ChaosSocket, frames: list[bytes]) -> None:
    end.send(b"".join(frames)[:50])
    end.close()


def test_half_an_answer_of_a_lost_connection_is_not_put_before_the_next(
    make: Callable[..., World],
) -> None:
    for mutant in ("", "keep-lost-bytes"):
        world = make()
        world.echo.otherwise = half_an_answer_then_the_end
        with planted(mutant):
            world.run(range(1))
            assert world.losses == 1 and not world.answers
            world.echo.otherwise = None
            world.run(range(1, 2), duration_us=SECOND_US)
        assert (world.answers == [message(1)]) == (not mutant)


def test_a_connection_can_be_given_up(make: Callable[..., World]) -> None:
    world = make()
    world.run(range(1))
    before = world.transport._stream
    assert isinstance(world.transport, StreamTransport)
    world.transport.reconnect()
    world.run(range(1, 2))
    assert world.losses == 1 and world.transport._stream is not before
    assert world.answers == [message(0), message(1)]


def test_a_dead_process_has_no_connections(make: Callable[..., World]) -> None:
    world = make()
    world.run(range(1))
    world.process.kill()
    world.network.end_process(world.process)
    world.run()
    assert all(stream.is_over for stream in world.echo._streams)
