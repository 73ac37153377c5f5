"""The log of clears that hosts share, on a real directory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.errors import TierError
from kvkeep.tiers.checked_tier import CheckedTier
from kvkeep.tiers.clear_log import ALL, Entry, Hosts, SharedLog
from kvkeep.tiers.file_tier import FileTier
from kvkeep.tiers.tier import Part
from kvkeep.units import MIB


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[CheckedTier]:
    made = CheckedTier(FileTier(tmp_path / "kv", 64 * MIB))
    yield made
    made.close()


def test_every_host_reads_all_entries_in_one_order(tier: CheckedTier) -> None:
    one, two = SharedLog(tier), SharedLog(tier)
    first, second, third = Entry("a", "1"), Entry(ALL, "2"), Entry("b", "3")
    assert one.sync([first], 0) == [first]
    assert two.sync([second, third], 0) == [first, second, third]
    assert one.sync([], 1) == [second, third]
    assert one.generations("a") == [0, 1, 2] and one.generations("b") == [0, 2, 3]
    assert SharedLog(tier).sync([], 0) == [first, second, third]


def test_a_clear_that_is_appended_again_is_one_entry(tier: CheckedTier) -> None:
    clear = Entry("a", "1")
    SharedLog(tier).sync([clear], 0)
    assert SharedLog(tier).sync([clear], 0) == [clear]


def test_hosts_that_append_at_once_lose_none(tier: CheckedTier) -> None:
    start = threading.Barrier(4)

    def append(host: int) -> None:
        log = SharedLog(tier)
        start.wait()
        for number in range(20):
            log.sync([Entry("a", f"{host}-{number}")], 0)

    threads = [threading.Thread(target=append, args=(host,)) for host in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokens = [each.token for each in SharedLog(tier).sync([], 0)]
    assert sorted(tokens) == sorted(f"{host}-{number}" for host in range(4) for number in range(20))


def test_many_entries(tier: CheckedTier) -> None:
    clears = [Entry("a", str(number)) for number in range(150)]
    SharedLog(tier).sync(clears, 0)
    assert SharedLog(tier).sync([], 100) == clears[100:]


def test_hosts_confirm_what_they_have_carried_out(tier: CheckedTier) -> None:
    one, two = Hosts(tier, "one"), Hosts(tier, "two")
    one.confirm(0)
    two.confirm(0)
    assert one.lacking(1) == ["two"] and two.lacking(1) == ["one"]
    two.confirm(3)
    assert one.lacking(1) == one.lacking(3) == [] and one.lacking(4) == ["two"]
    again = Hosts(tier, "two")  # the next process of that host
    again.confirm(200)
    assert one.lacking(200) == [] and again.lacking(1) == ["one"]


def test_entries_that_a_service_has_evicted_are_written_again(tier: CheckedTier) -> None:
    log = SharedLog(tier)
    log.sync([Entry("a", "1"), Entry("b", "2")], 0)
    tier.delete("v1/control/clears/")
    for _ in range(60):
        log.sync([], 0)
    assert len(SharedLog(tier).sync([], 0)) == 2


def test_an_entry_of_another_release_is_an_error_and_no_end_of_the_log(tier: CheckedTier) -> None:
    log = SharedLog(tier)
    log.sync([Entry("a", "1"), Entry("b", "2")], 0)
    medium = tier.medium
    value = memoryview(bytearray(1000))
    (nbytes,) = medium.read([Part("v1/control/clears/2", [value])])
    value[4] += 1  # the version
    medium.drop(["v1/control/clears/2"])
    medium.write([Part("v1/control/clears/2", [value[:nbytes]])])
    with pytest.raises(TierError, match="another release of kvkeep wrote it"):
        SharedLog(tier).sync([], 0)
    assert log.sync([], 0) == [Entry("a", "1"), Entry("b", "2")], "it is known already"
