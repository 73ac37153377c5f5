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
    entries = [Entry("a", "1"), Entry("b", "2"), Entry("c", "3")]
    log.sync(entries, 0)
    tier.drop(["v1/control/clears/1"])
    for _ in range(60):
        log.sync([], 0)
    assert SharedLog(tier).sync([], 0) == entries


def test_a_log_that_was_lost_is_joined_with_what_others_wrote_meanwhile(tier: CheckedTier) -> None:
    """A service without persistence was started again, and a new host cleared a tenant before the
    old ones looked."""
    old, other, new = SharedLog(tier), SharedLog(tier), SharedLog(tier)
    entries = [Entry("a", "1"), Entry("b", "2")]
    assert old.sync(entries, 0) == other.sync([], 0)
    before = old.digest(1)
    tier.delete("v1/control/clears/")
    assert new.sync([Entry("c", "3")], 0) == [Entry("c", "3")]
    joined = [Entry("c", "3"), *entries]
    assert old.sync([], 0) == joined, "it hears what it did not know, and loses nothing"
    assert new.sync([], 0) == other.sync([], 0) == SharedLog(tier).sync([], 0) == joined
    assert old.digest(1) == new.digest(1) != before, "numbers mean something else"
    assert old.digest(3) == new.digest(3) is not None and old.digest(4) is None


def test_what_is_confirmed_of_one_log_is_not_of_another(tier: CheckedTier) -> None:
    clears = SharedLog(tier)
    clears.sync([Entry("a", "1")], 0)
    one, two = Hosts(tier, "one", clears.mark), Hosts(tier, "two", clears.mark)
    one.confirm(0)
    two.confirm(1)
    assert one.lacking(1) == []
    tier.delete("v1/control/clears/")
    SharedLog(tier).sync([Entry("b", "2")], 0)
    clears.sync([], 0)
    assert one.lacking(1) == one.lacking(2) == ["two"]
    two.confirm(2)
    assert one.lacking(1) == one.lacking(2) == []


def test_an_entry_of_another_release_is_an_error_and_no_end_of_the_log(tier: CheckedTier) -> None:
    log = SharedLog(tier)
    log.sync([Entry("a", "1"), Entry("b", "2")], 0)
    medium = tier.medium
    value = memoryview(bytearray(1000))
    (nbytes,) = medium.read([Part("v1/control/clears/2", [value])])
    value[4] += 1  # the version
    medium.drop(["v1/control/clears/2"])
    medium.write([Part("v1/control/clears/2", [value[:nbytes]])])
    for reader in (SharedLog(tier), log):
        with pytest.raises(TierError, match="another release of kvkeep wrote it"):
            reader.sync([], 0)
