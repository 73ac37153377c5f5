"""The tier on a Mooncake cluster, with the real master and store node: as check_tier() says, and in
faults of each part."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from services import Relay, free_port
from shared_services import MooncakeCluster, Neighbour, service

from kvkeep.errors import SettingsError, TierError
from kvkeep.testing.clock import eventually
from kvkeep.testing.tiers import PLACE, check_tier
from kvkeep.tiers import mooncake
from kvkeep.tiers.checked_tier import CheckedTier
from kvkeep.tiers.mooncake import open_mooncake
from kvkeep.tiers.tier import Part, Tier
from kvkeep.units import MIB


@pytest.fixture(scope="module", autouse=True)
def _brief_and_quiet() -> Iterator[None]:
    """The client reads these once, when the first test loads it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in mooncake.environment(1.0).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    """One for all tests that leave it as it is."""
    with service("mooncake", tmp_path_factory.mktemp("mooncake")) as cluster:
        yield cluster


@pytest.fixture
def neighbour(running: MooncakeCluster) -> Iterator[Neighbour]:
    """Another program, in an empty cluster."""
    made = Neighbour(running)
    made.client.remove_all(True)
    yield made
    made.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[MooncakeCluster]:
    """A cluster that a test may destroy."""
    with service("mooncake", tmp_path) as cluster:
        yield cluster


def writes(tier: Tier, name: str, data: bytes) -> bool:
    """Whether it does. Connections that are kept for the next call may fail first, once each."""
    try:
        return tier.write([part(name, data)]) == [True] and read(tier, name, len(data)) == data
    except TierError:
        return False


class FaultyCluster:
    """Faults of one real cluster; bytes go to its node through a relay."""

    def __init__(self, cluster: MooncakeCluster, relay: Relay, neighbour: Neighbour) -> None:
        self.cluster, self.relay, self.neighbour = cluster, relay, neighbour

    @contextmanager
    def during(self, fault: str) -> Iterator[None]:
        if fault == "stall":
            with self.cluster.node.paused():
                yield
        elif fault == "half":
            with self.relay.cutting_after(4500):
                yield
        else:
            self.neighbour.client.batch_is_exist(self.cluster.names())  # leased: not evicted now
            self.neighbour.fill()
            try:
                yield
            finally:
                self.neighbour.client.remove_by_regex("^filler/", True)

    def garble(self) -> None:
        for name in self.cluster.names():
            data = bytearray(self.neighbour.client.get(name))
            data[90 if len(data) > 90 else 0] ^= 4
            self.neighbour.replace(name, bytes(data))


def part(name: str, data: bytes) -> Part:
    return Part(f"{PLACE}/{name}", [memoryview(data)])


def read(tier: Tier, name: str, nbytes: int) -> bytes | None:
    view = memoryview(bytearray(nbytes))
    (found,) = tier.read([Part(f"{PLACE}/{name}", [view])])
    return None if found < 0 else view[:found].tobytes()


def test_what_is_not_there_is_not_printed(
    neighbour: Neighbour, running: MooncakeCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """Servers read the summaries of all hosts each second, also of those that have none."""
    with closing(open_mooncake(running.address)) as tier:
        capfd.readouterr()
        assert read(tier, "absent", 8) is None
        assert "absent" not in capfd.readouterr().err


def test_a_cluster_is_a_tier(own: MooncakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    # Connections that are kept for the next call fail once each after they were cut.
    monkeypatch.setenv("MC_TCP_ENABLE_CONNECTION_POOL", "0")
    neighbour, segment = Neighbour(own), own.segment()
    relay = Relay(segment["tcp_data_port"], segment["tcp_data_host"])
    own.set_segment(segment | {"tcp_data_host": "127.0.0.1", "tcp_data_port": relay.port})

    def make() -> tuple[Tier, FaultyCluster]:
        neighbour.client.remove_all(True)
        tier = CheckedTier(open_mooncake(own.address))
        return tier, FaultyCluster(own, relay, neighbour)

    with closing(relay), closing(neighbour):
        check_tier(make)


def test_leading_stops_at_a_hole(running: MooncakeCluster, neighbour: Neighbour) -> None:
    names = [f"{PLACE}/{number}" for number in range(50)]
    with closing(open_mooncake(running.address)) as tier:
        for holes in ([], [0], [49], [17, 30], range(20, 50)):
            tier.delete("v1/")
            parts = [Part(name, [memoryview(b"x")]) for name in names]
            tier.write([each for at, each in enumerate(parts) if at not in holes])
            assert tier.leading(names) == min(holes, default=50), holes


def test_a_deletion_takes_its_prefix_and_no_pattern(
    running: MooncakeCluster, neighbour: Neighbour
) -> None:
    """What was just asked for is leased by the master, and deleted all the same."""
    names = ["v1/a.*/x", "v1/ab/x", "v1/a?/x", "v1/[ab]/x", "v1/(a|b)+/x", "v1/^a$/x", "xv1/ab/x"]
    with closing(open_mooncake(running.address)) as tier:
        tier.write([Part(name, [memoryview(b"x")]) for name in names])
        for gone, name in enumerate(names[:-1], start=1):
            assert tier.delete(name.removesuffix("x")) == 1
            assert [tier.leading([each]) for each in names] == [0] * gone + [1] * (7 - gone)
        tier.drop([names[-1], "v1/none"])
        assert tier.leading(names[-1:]) == 0 and tier.usage().blocks == 0


def test_ranges_of_a_long_object(
    running: MooncakeCluster, neighbour: Neighbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "_SCRATCH_BYTES", 10_000)
    data = os.urandom(100_000)
    with closing(open_mooncake(running.address)) as tier:
        assert tier.write([part("a", data)]) == [True]
        for offset, nbytes in ((0, 99_999), (1, 99_999), (55_555, 100_000), (99_999, 2)):
            views = [memoryview(bytearray(size)) for size in (7, 0, 9_993, nbytes)]
            (found,) = tier.read([Part(f"{PLACE}/a", views, offset)])
            expected = data[offset : offset + 10_000 + nbytes]
            assert (found, b"".join(views)[:found]) == (len(expected), expected)
        beyond = Part(f"{PLACE}/a", [memoryview(bytearray(5))], 100_000)
        assert tier.read([beyond, Part(f"{PLACE}/none", beyond.views, 3)]) == [0, -1]


@pytest.mark.parametrize("left", [10, 63, 64, 900, 2000])
def test_a_damaged_object_is_a_miss_and_makes_room_for_the_right_one(
    running: MooncakeCluster, neighbour: Neighbour, left: int
) -> None:
    data = os.urandom(1000)
    with closing(CheckedTier(open_mooncake(running.address))) as tier:
        tier.write([part("a", data)])
        stored = neighbour.client.get(f"{PLACE}/a")
        neighbour.replace(f"{PLACE}/a", (stored + bytes(1000))[:left])
        # What follows a whole block does no harm.
        assert read(tier, "a", 1000) == (data if left > 1064 else None)
        assert tier.leading([f"{PLACE}/a"]) == (left > 1064), "what is no block is in the way"
        assert tier.write([part("a", data)]) == [True]
        assert read(tier, "a", 1000) == data


def test_a_full_cluster_evicts_and_loses_nothing_else(
    running: MooncakeCluster, neighbour: Neighbour
) -> None:
    with closing(CheckedTier(open_mooncake(running.address))) as tier:
        blocks = {str(number): os.urandom(MIB) for number in range(100)}
        for name, data in blocks.items():
            tier.write([part(name, data)])
        found = {name: read(tier, name, MIB) for name in blocks}
        there = {name: data for name, data in found.items() if data is not None}
        assert 0 < len(there) < 64 and there == {name: blocks[name] for name in there}
        assert sum(map(len, there.values())) <= tier.usage().capacity_bytes < 70 * MIB


def test_a_paused_node_is_an_error_after_the_timeout(
    running: MooncakeCluster, neighbour: Neighbour
) -> None:
    with closing(CheckedTier(open_mooncake(running.address))) as tier:
        tier.write([part("a", b"first")])
        with running.node.paused():
            started = time.monotonic()
            for call in (
                lambda: tier.read([part("a", bytearray(5))]),
                lambda: tier.write([part("b", bytes(1000))]),
            ):
                with pytest.raises(TierError, match="a store node did not answer"):
                    call()
            assert time.monotonic() < started + 8, "the client's own limit is 30 seconds"
            assert tier.leading([f"{PLACE}/a"]) == 1, "the master answers"
        assert eventually(lambda: writes(tier, "b", b"other"))
        assert read(tier, "b", 5) == b"other" and read(tier, "a", 5) == b"first"


def test_a_killed_node_costs_what_it_had(own: MooncakeCluster) -> None:
    """Objects of the other node are read and written, also in one call with those that are lost."""
    blocks = {str(number): os.urandom(5000) for number in range(40)}
    parts = [part(name, data) for name, data in blocks.items()]
    with closing(CheckedTier(open_mooncake(own.address))) as tier:
        first = own.node
        own.start_node()
        assert eventually(lambda: own.ask("/get_all_segments").count(":") == 2)
        assert tier.write(parts) == [True] * 40
        first.kill()
        found = tier.read([part(name, bytearray(5000)) for name in blocks])
        assert 0 < found.count(5000) < 40 and found.count(-1) == 40 - found.count(5000)
        for (name, data), nbytes in zip(blocks.items(), found, strict=True):
            if nbytes > 0:
                assert read(tier, name, 5000) == data
        assert eventually(lambda: tier.leading([each.name for each in parts]) < 40, limit_s=40)
        assert eventually(lambda: all(writes(tier, *block) for block in blocks.items()), 40)
        assert {name: read(tier, name, 5000) for name in blocks} == blocks


def test_a_killed_master_is_an_error_and_the_next_one_serves(own: MooncakeCluster) -> None:
    with closing(CheckedTier(open_mooncake(own.address))) as tier:
        tier.write([part("a", b"first")])
        usage = tier.usage()
        own.master.kill()
        for call in (
            lambda: tier.read([part("a", bytearray(5))]),
            lambda: tier.write([part("b", bytes(1000))]),
            lambda: tier.leading([f"{PLACE}/a"]),
            lambda: tier.delete("v1/"),
        ):
            with pytest.raises(TierError, match="the master did not answer"):
                call()
        assert tier.usage() == usage, "it says what it knew last"
        with pytest.raises(TierError, match="cannot be reached"):
            open_mooncake(own.address)
        own.start_master()
        # Once the node has joined again.
        assert eventually(lambda: writes(tier, "b", b"other"), limit_s=40)
        assert read(tier, "b", 5) == b"other"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("?metadata=redis://127.0.0.1", "metadata: expected http"),
        ("?metadata=http://", "metadata: expected http"),
        ("?metadata=http://host:x", "metadata: expected http"),
        ("?metrics=http", "metrics: expected a port"),
        ("?protocol=rdma", "unknown option 'protocol'"),
        ("?timeout=0s", "timeout: expected"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(more: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        open_mooncake(f"mooncake://127.0.0.1{more}")


def test_an_address_with_nothing_behind_it_is_an_error(running: MooncakeCluster) -> None:
    with pytest.raises(TierError, match="cannot be reached"):
        open_mooncake(f"mooncake://127.0.0.1:{free_port()}")
    unused = f"metadata=http://127.0.0.1:{free_port()}/metadata"
    with pytest.raises(TierError, match="cannot be reached"):
        open_mooncake(f"mooncake://127.0.0.1:{running.rpc}?{unused}")


def test_a_client_that_does_not_load_is_an_error_with_a_remedy(
    running: MooncakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(TierError, match="cannot be loaded") as caught:
        open_mooncake(running.address)
    assert "libraries" in caught.value.hint
