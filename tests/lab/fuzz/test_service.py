"""The target of the service: it is quiet on the code as it is, goes deep, and notices bugs that are
planted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from kvkeep.errors import ProtocolError, RequestError
from kvkeep.server import network
from kvkeep.server.auth import ANYONE, Caller
from kvkeep.server.service import Service
from kvkeep.server.sessions import ServerSession
from kvkeep.store.store import Store
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, decode_request, encode
from kvkeep_lab.fuzz.choices import Leak, random_inputs
from kvkeep_lab.fuzz.service import Siege, run_service
from kvkeep_lab.fuzz.wire import FRAME_BYTES


def run_all(count: int = 400, seed: int = 21) -> None:
    for data in random_inputs(seed, count, longest=400):
        run_service(data)


def test_it_is_quiet_and_goes_deep() -> None:
    counted: Counter[str] = Counter()
    refusals: set[str] = set()
    for data in random_inputs(23, 400, longest=400):
        siege = Siege(data)
        counted["messages"] += siege.run().messages
        counters = siege.server.service.counters
        refusals |= counters.refusals.keys()
        for name in (
            "stored_blocks",
            "hit_blocks",
            "abandoned_stores",
            "bad_frames",
            "sessions_died",
        ):
            counted[name] += getattr(counters, name)
    assert counted["messages"] > 4000
    assert counted["stored_blocks"] > 1000 and counted["hit_blocks"] > 800, (
        "more than those of the good client"
    )
    assert min(counted.values()) > 0, counted
    assert len(refusals) > 20 and "internal_error" not in refusals


@pytest.mark.parametrize("flood", [False, True])
def test_malformed_frames_are_those_that_the_service_could_not_read(flood: bool) -> None:
    """Counted message by message, over restarts, and the good client's messages are none of
    them."""
    messages = malformed = 0
    for data in random_inputs(22, 60, longest=1_500):
        siege = Siege(data, flood=flood)
        refused: list[bool] = []

        def counting(
            frames: list[bytes], *rest: Any, refused: list[bool] = refused, siege: Siege = siege
        ) -> Any:
            try:
                decode_request(decode_header(frames), frames, FRAME_BYTES)
                refused.append(False)
            except ProtocolError:
                refused.append(True)
            except RequestError as error:
                refused.append(error.code != "protocol_version")
            return Service.handle(siege.server.service, frames, *rest)

        before = siege.messages
        siege.server.service.handle = counting  # type: ignore[method-assign]
        siege._restart = lambda: None  # type: ignore[method-assign]
        ran = siege.run()
        assert ran == (siege.messages, sum(refused)) and len(refused) >= ran.messages - before
        messages, malformed = messages + ran.messages, malformed + ran.malformed_frames
    share = malformed / messages
    assert 0.3 < share < 0.8 if flood else 0.01 < share < 0.2, share


def test_malformed_frames_are_counted_over_restarts() -> None:
    siege = Siege(b"")
    for server in range(2):
        siege._say([b"nonsense"], ANYONE)
        siege._say(encode(Header(0, 1), m.Ping()), ANYONE)
        siege._restart()
        assert siege.malformed_frames == server + 1
    assert siege.run() == (siege.messages, 2)


def test_an_internal_error_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Service._finish

    def clumsy(
        self: Service, session: ServerSession, number: int, request: m.Finish, now_ms: int
    ) -> m.Reply:
        assert len(request.key) == 16
        return real(self, session, number, request, now_ms)

    monkeypatch.setattr(Service, "_finish", clumsy)
    with pytest.raises(AssertionError, match=r"internal.error"):
        run_all()


def test_a_range_that_is_not_checked_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def clumsy(
        session: ServerSession,
        request: m.Fetch,
        memory: network.PoolMemory,
        frame_bytes: int,
        caller: Caller,
    ) -> list[bytes]:
        lease = session.network_leases[request.lease]
        return [
            memory.view(
                int(lease.slots[request.start]), lease.layout.shard_bytes[request.shard]
            ).tobytes()
        ]

    monkeypatch.setattr(network, "fetch", clumsy)
    with pytest.raises(AssertionError, match=r"internal.error"):
        run_all()


def test_a_lease_that_is_not_given_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Store, session: int, leases: Sequence[int], now_ms: int) -> set[int]:
        held = self.sessions[session].leases
        return {lease for lease in leases if held.pop(lease, None) is not None}

    monkeypatch.setattr(Store, "release_all", forgetful)
    with pytest.raises(AssertionError):
        run_all()


def test_a_session_that_stays_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "end_dead_sessions", lambda self, now_ms: 0)
    with pytest.raises(Leak, match="gone"):
        run_all(1)


def test_anothers_bytes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = network.put

    def astray(session: ServerSession, request: m.Put, payload: Any, memory: Any) -> int:
        memory.view(0, 64)[:] = 7
        return real(session, request, payload, memory)

    monkeypatch.setattr(network, "put", astray)
    with pytest.raises(AssertionError):
        run_all()
