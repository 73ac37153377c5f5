"""A server that answers whatever it likes: nothing raises, nobody waits past a deadline, no byte is
believed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.client.conftest import Transfer

from kvkeep.client.rank_memory import GroupMemory
from kvkeep.client.requests import LoadRequest, StoreRequest
from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.kv.runs import BlockRuns
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, encode

Make = Callable[..., Any]
REPLIES = [m.Welcome, m.Done, m.LayoutOpened, m.Found, m.Prepared, m.PoolChanges, m.Refused]
INTEGERS = [-(2**63), -1, 0, 1, 2, 3, 4096, 2**31, 2**62, 2**63 - 1, 2**64 - 1]
CODES = ["", "unknown_session", "deadline", "shutting_down", "\x00", "no such code"]


def random_value(rng: random.Random, kind: Any) -> Any:
    if kind is int:
        return rng.choice(INTEGERS)
    if kind is bool:
        return rng.random() < 0.5
    if kind is str:
        return rng.choice(CODES)
    if kind is bytes:
        return rng.randbytes(rng.choice([0, 1, 4, 7, 8, 12, 16, 24, 32]))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return random_message(rng, kind)
    (item,) = kind.__args__
    return [random_value(rng, item) for _ in range(rng.randrange(4))]


def random_message(rng: random.Random, kind: type) -> Any:
    return kind(*(random_value(rng, field.type) for field in msgspec.structs.fields(kind)))


def with_one_field_changed(rng: random.Random, frames: list[Any]) -> m.Reply:
    reply = msgspec.msgpack.Decoder(m.Reply).decode(frames[1])
    field = rng.choice(msgspec.structs.fields(reply))
    return msgspec.structs.replace(reply, **{field.name: random_value(rng, field.type)})


class Hostile:
    """Answers rightly, with one field changed, with any reply at all, with noise, or not."""

    def __init__(self, service: Any, rng: random.Random) -> None:
        self.service, self.rng = service, rng

    def handle(self, frames: Any, now_ms: int) -> list[Any] | None:
        reply = self.service.handle(frames, now_ms)
        kind = self.rng.choices(
            ["right", "changed", "random", "noise", "version", "silence"], [60, 12, 12, 5, 5, 6]
        )[0]
        if reply is None or kind == "right":
            return reply
        number = decode_header(frames).number
        match kind:
            case "changed":
                return encode(Header(0, number), with_one_field_changed(self.rng, reply), reply[2:])
            case "random":
                return encode(Header(0, number), random_message(self.rng, self.rng.choice(REPLIES)))
            case "version":
                return encode(Header(0, number, version=self.rng.choice([0, 2, 9])), m.Done())
            case "noise":
                return self.noise(number)
        return None

    def noise(self, number: int) -> list[bytes]:
        head, body = encode(Header(0, number), m.Done())
        damaged = [head, self.rng.randbytes(20)]
        choices = [
            [],
            [b""],
            [self.rng.randbytes(28)],
            [head],
            damaged,
            [head, body, b"extra", b""],
        ]
        return self.rng.choice(choices)


@pytest.mark.parametrize("shared_memory", [False, True], ids=["network", "shared_memory"])
@pytest.mark.parametrize("seed", range(25))
def test_nothing_raises_whatever_the_server_answers(
    simulation: Make, seed: int, shared_memory: bool
) -> None:
    sim, rng = simulation(shared_memory=shared_memory), random.Random(seed)
    hostile = Hostile(sim.recorder, rng)
    sim.network.serve(hostile)
    connection = sim.connection(1000, verify=True)  # and a server that says otherwise is not heard
    scheduler = SchedulerAdapter(connection.shape, connection=connection)
    engine = np.random.default_rng(seed).integers(0, 256, (8, 1000), dtype=np.uint8)
    kept, ids = engine.copy(), np.arange(4)
    transfer = Transfer(connection, [GroupMemory(BlockRuns.of([engine]))], 0)
    connection.wait_until_up(2_000)
    got = 0
    for turn in range(40):
        keys = b"".join(f"{turn % 3}/{at}".encode().ljust(16, b".") for at in range(4))
        before_ms = sim.network.clock.now_ms
        transfer.store(StoreRequest("default", b"", keys, ids))
        assert (engine == kept).all(), "a store reads, and no more"
        lookup = scheduler.lookup(None, keys)
        while (answer := scheduler.answer(lookup)) is None:
            sim.transports[-1].wait(20)
        assert 0 <= answer.blocks <= 4
        targets = np.arange(4, 4 + answer.blocks)
        loaded = transfer.load(
            LoadRequest("default", keys, 0, targets, answer.epoch, answer.slots, answer.checksums)
        )
        assert (engine[targets[loaded]] == kept[:4][: len(loaded)][loaded]).all(), (
            "a loaded block has the right bytes"
        )
        engine[:] = kept
        got += int(loaded.sum())
        scheduler.release(lookup)
        sim.run(rng.randrange(0, 400))
        assert sim.network.clock.now_ms - before_ms < 5_000
    assert "internal_error" not in connection.counters.failures
    # A wrong layout number is believed for as long as the session lasts: it costs misses, and
    # nothing else.
    assert got > 0 or "unknown_layout" in connection.counters.failures
    sim.replace_server(epoch=2)
    sim.run(4_000)
    assert connection.up, "an honest server is found again"
    assert transfer.store(StoreRequest("default", b"", keys, ids)) == 4
