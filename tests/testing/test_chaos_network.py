from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvkeep.errors import ProtocolError
from kvkeep.testing.chaos_network import ChaosNetwork, ChaosTransport
from kvkeep.testing.chaos_record import Record
from kvkeep.testing.simulation import Process, Simulation
from kvkeep.wire.frames import Header, decode_header, encode
from kvkeep.wire.messages import Ping

PAYLOAD = b"p" * 64
MESSAGE = [bytes(frame) for frame in encode(Header(1, 2), Ping(), [PAYLOAD])]


class Echo:
    """Sends back what comes."""

    def __init__(self, network: ChaosNetwork) -> None:
        self.received: list[list[bytes]] = []
        self._network = network

    def receive(self, sender: ChaosTransport, message: list[bytes]) -> None:
        self.received.append(message)
        self._network.to_client(sender, MESSAGE)


class World:
    def __init__(self, **rates: float) -> None:
        self.simulation = Simulation(1)
        self.record = Record(self.simulation)
        self.network = ChaosNetwork(self.simulation, 1, rates, self.record)
        self.echo = Echo(self.network)
        self.network.listen(self.echo)
        self.process = Process(self.simulation, "p")
        self.transport = self.network.transport(self.process)
        self.answers: list[list[bytes]] = []

    def send(self, times: int, duration_us: int = 3_000_000) -> None:
        def run() -> None:
            for _ in range(times):
                self.transport.send(MESSAGE)
            while True:
                self.transport.wait(1)
                while message := self.transport.receive():
                    self.answers.append(message)

        self.process.begin(run)
        self.simulation.run(duration_us)
        self.simulation.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.simulation.close()


def test_without_faults_all_arrive_as_they_were(world: World) -> None:
    world.send(20)
    assert world.echo.received == [MESSAGE] * 20
    assert world.answers == [MESSAGE] * 20
    assert not world.record.faults


def test_lost() -> None:
    world = World(lost_message=1.0)
    world.send(5)
    assert not world.echo.received
    assert world.record.faults["lost_message"] == 5


def test_duplicated() -> None:
    world = World(duplicated_message=1.0)
    world.send(5)
    assert len(world.echo.received) == 10
    assert len(world.answers) == 20


def test_late() -> None:
    world = World(late_message=1.0)
    world.send(5, duration_us=40_000)
    assert not world.echo.received


def test_corrupted_is_noticed_by_whoever_reads_it() -> None:
    world = World(corrupted_message=1.0)
    world.send(10)
    for message in world.echo.received:
        with pytest.raises(ProtocolError):
            decode_header(message)
        assert message[2] == PAYLOAD


def test_a_bit_of_a_payload_is_flipped_and_nothing_else() -> None:
    world = World(flipped_payload_bit=1.0)
    world.send(10)
    for message in world.echo.received:
        assert message[:2] == MESSAGE[:2]
        different = [a ^ b for a, b in zip(message[2], PAYLOAD, strict=True) if a != b]
        assert len(different) == 1
        assert different[0].bit_count() == 1


def test_a_server_that_is_gone_is_noticed_and_the_next_one_found(world: World) -> None:
    world.network.listen(None)
    assert world.transport.lost()
    assert not world.transport.lost(), "it is said once"
    assert not world.transport.send(MESSAGE)
    world.network.listen(world.echo)
    assert not world.transport.send(MESSAGE), "that takes a moment"
    world.simulation.run(200_000)
    assert world.transport.send(MESSAGE)


def test_a_dead_process_gets_and_sends_nothing(world: World) -> None:
    world.process.kill()
    assert not world.transport.send(MESSAGE)
    world.transport.take(MESSAGE)
    assert world.transport.receive() is None
