"""Tests for the simulated network: it does to messages what it was told, at about the rates it was
told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvkeep_lab.simulation.wire import Faults, SimulatedNetwork, SimulatedTransport

MESSAGES = 4_000


class Echo:
    """A server that notes what it gets and when, and sends it back."""

    def __init__(self, answers: bool = True) -> None:
        self.got: list[tuple[int, list[bytes]]] = []
        self._answers = answers

    def handle(self, frames: Sequence[bytes], now_ms: int) -> list[bytes] | None:
        self.got.append((now_ms, list(frames)))
        return list(frames) if self._answers else None

    @property
    def numbers(self) -> list[int]:
        return [int.from_bytes(frames[0]) for _, frames in self.got]


def send_all(seed: int, faults: Faults, count: int = MESSAGES) -> tuple[SimulatedNetwork, Echo]:
    """One way only: numbered messages, all sent at once, all delivered."""
    network, server = SimulatedNetwork(seed, faults), Echo(answers=False)
    network.serve(server)
    transport = network.transport()
    for number in range(count):
        assert transport.send([number.to_bytes(4), b"body"])
    network.run_until(10_000)
    return network, server


def received(transport: SimulatedTransport) -> list[list[bytes]]:
    messages = []
    while (message := transport.receive()) is not None:
        messages.append(message)
    return messages


def test_without_faults_everything_arrives_once_and_in_order() -> None:
    network, server = send_all(1, Faults())
    assert server.numbers == list(range(MESSAGES))
    assert network.counts == {"sent": MESSAGES, "lost": 0, "corrupted": 0}


def test_about_the_given_share_is_lost() -> None:
    network, server = send_all(1, Faults(loss=0.2))
    assert len(server.got) == MESSAGES - network.counts["lost"]
    assert 0.17 < network.counts["lost"] / MESSAGES < 0.23


def test_about_the_given_share_has_one_bit_flipped() -> None:
    network, server = send_all(1, Faults(corruption=0.1))
    flipped = 0
    for number, (_, frames) in enumerate(server.got):
        bits = sum(
            (a ^ b).bit_count()
            for a, b in zip(b"".join(frames), number.to_bytes(4) + b"body", strict=True)
        )
        assert bits <= 1
        flipped += bits
    assert flipped == network.counts["corrupted"]
    assert 0.08 < flipped / MESSAGES < 0.12


def test_a_message_without_bytes_cannot_be_corrupted() -> None:
    network, server = SimulatedNetwork(1, Faults(corruption=1.0)), Echo(answers=False)
    network.serve(server)
    network.transport().send([b"", b""])
    network.run_until(1)
    assert server.got == [(0, [b"", b""])]
    assert network.counts["corrupted"] == 0


def test_different_delays_keep_the_order_of_one_client() -> None:
    _, server = send_all(1, Faults(delay_ms=(5, 40)))
    assert server.numbers == list(range(MESSAGES))
    times = [at_ms for at_ms, _ in server.got]
    assert times == sorted(times) and 5 <= min(times) < max(times) == 40


def test_answers_keep_their_order_too() -> None:
    network, server = SimulatedNetwork(1), Echo()
    network.serve(server)
    transport = network.transport()
    for number in range(100):
        transport.send([number.to_bytes(4)])
    network.faults = Faults(delay_ms=(5, 40))
    network.run_until(100)
    assert [int.from_bytes(frames[0]) for frames in received(transport)] == list(range(100))


def test_one_client_does_not_wait_for_the_messages_of_another() -> None:
    network, server = SimulatedNetwork(1, Faults(delay_ms=(20, 20))), Echo(answers=False)
    network.serve(server)
    network.transport().send([(1).to_bytes(4)])
    network.faults = Faults()
    network.transport().send([(2).to_bytes(4)])
    network.run_until(100)
    assert [at_ms for at_ms, _ in server.got] == [0, 20] and server.numbers == [2, 1]


def test_answers_suffer_like_requests() -> None:
    network = SimulatedNetwork(1, Faults(loss=0.5))
    network.serve(Echo())
    transport = network.transport()
    for _ in range(MESSAGES):
        transport.send([b"x"])
    network.run_until(1)
    assert 0.22 < len(received(transport)) / MESSAGES < 0.28, "half of the half that got there"


@pytest.mark.parametrize("seed", [0, 7, 123_456])
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    faults = Faults(loss=0.1, corruption=0.1, delay_ms=(0, 30))
    first, second = send_all(seed, faults, 500)[1], send_all(seed, faults, 500)[1]
    assert first.got == second.got


def test_another_seed_gives_another_run() -> None:
    faults = Faults(loss=0.1, delay_ms=(0, 30))
    assert send_all(1, faults, 500)[1].got != send_all(2, faults, 500)[1].got


def test_what_is_sent_later_changed_is_sent_as_it_was() -> None:
    network, server = SimulatedNetwork(1), Echo(answers=False)
    network.serve(server)
    block = bytearray(b"before")
    network.transport().send([block])
    block[:] = b"after!"
    network.run_until(1)
    assert server.got[0][1] == [b"before"]


def test_nobody_serves_and_nobody_answers() -> None:
    network = SimulatedNetwork(1)
    transport = network.transport()
    assert transport.send([b"x"])
    network.run_until(100)
    assert transport.receive() is None


def test_each_client_gets_its_own_answers() -> None:
    network = SimulatedNetwork(1)
    network.serve(Echo())
    first, second = network.transport(), network.transport()
    first.send([b"first"])
    second.send([b"second"])
    network.run_until(1)
    assert (received(first), received(second)) == ([[b"first"]], [[b"second"]])


def test_waiting_ends_when_something_has_come() -> None:
    network = SimulatedNetwork(1, Faults(delay_ms=(10, 10)))
    network.serve(Echo())
    transport = network.transport()
    transport.send([b"x"])
    transport.wait(1_000)
    assert network.clock.now_ms == 20, "ten there, ten back"
    assert transport.receive() == [b"x"]


def test_waiting_in_vain_takes_the_whole_time() -> None:
    network = SimulatedNetwork(1)
    network.transport().wait(1_000)
    assert network.clock.now_ms == 1_000


def test_a_closed_transport_has_nothing_to_receive() -> None:
    network = SimulatedNetwork(1)
    network.serve(Echo())
    transport = network.transport()
    transport.send([b"x"])
    network.run_until(1)
    transport.close()
    assert transport.receive() is None
