"""The log of clears that hosts share, on a real directory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvkeep.errors import TierError
from kvkeep.tiers.checked_tier import CheckedTier
from kvkeep.tiers.clear_log import ALL, START, Entry, Hosts, SharedLog
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
    marks = [one.mark(number) for number in (1, 2, 3)]
    assert one.generations("a") == marks[:2] and one.generations("b") == marks[1:]
    assert two.generations("a") == marks[:2]
    assert SharedLog(tier).sync([], 0) == [first, second, third]


def test_a_clear_that_is_appended_again_is_one_entry(tier: CheckedTier) -> None:
    clear = Entry("a", "1")
    SharedLog(tier).sync([clear], 0)
    assert SharedLog(tier).sync([clear], 0) == [clear]


def test_a_number_that_is_given_again_begins_another_generation(tier: CheckedTier) -> None:
    """The service has lost a clear, and the only host that knew it is gone. What that host stored
    after the clear is from before the next one."""
    gone, other = SharedLog(tier), SharedLog(tier)
    gone.sync([Entry(ALL, "1")], 0)
    tier.delete("v1/control/clears/")
    other.sync([Entry(ALL, "2")], 0)
    assert gone.generations("a")[-1] not in other.generations("a")


def test_clears_in_another_order_begin_other_generations(tier: CheckedTier) -> None:
    first, second = Entry("a", "1"), Entry(ALL, "2")
    log = SharedLog(tier)
    log.sync([first, second], 0)
    before = log.generations("a")
    tier.delete("v1/control/clears/")
    again = SharedLog(tier)
    again.sync([second, first], 0)
    assert not set(before) & set(again.generations("a"))


def test_a_log_begins_once_and_is_never_without_an_entry(tier: CheckedTier) -> None:
    """What is on the tier may be older than the log, and have been cleared since."""
    one, two = SharedLog(tier), SharedLog(tier)
    one.begin()
    (begin,) = one.sync([], 0)
    assert begin.name == START
    two.begin()
    one.begin()
    assert two.sync([], 0) == one.sync([], 0) == [begin]
    tier.delete("v1/control/clears/")
    after = SharedLog(tier)
    after.begin()
    assert after.generations("a")[-1] not in one.generations("a")


def test_clears_behind_a_missing_one_are_not_overlooked(tier: CheckedTier) -> None:
    entries = [Entry("a", "1"), Entry("b", "2"), Entry("c", "3")]
    log = SharedLog(tier)
    log.sync(entries, 0)
    tier.drop(["v1/control/clears/2"])
    assert SharedLog(tier).sync([], 0) == entries[:1], "a host that has not begun"
    fresh = SharedLog(tier)
    fresh.begin()
    assert [each.name for each in fresh.sync([], 0)] == ["a", START, "c"]
    assert fresh.generations("b")[-1] not in log.generations("b")


def test_what_others_append_meanwhile_is_no_gap(
    tier: CheckedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [Entry("a", str(number)) for number in range(4)]
    other, fresh = SharedLog(tier), SharedLog(tier)
    other.sync(entries[:1], 0)
    read = tier.read

    def read_late(parts: Sequence[Part]) -> list[int]:
        """Whoever looks for a gap sees what was appended after it had read the log."""
        if len(parts) > 1:
            monkeypatch.setattr(tier, "read", read)
            other.sync(entries, 0)
        return read(parts)

    monkeypatch.setattr(tier, "read", read_late)
    fresh.begin()
    assert fresh.sync([], 0) == entries


def test_a_log_that_cannot_begin_is_not_one_without_clears(
    tier: CheckedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "write", lambda parts: [False] * len(parts))
    with pytest.raises(TierError, match="no room"):
        SharedLog(tier).begin()


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
    one.join()
    two.join()
    assert one.lacking(1) == ["two"] and two.lacking(1) == ["one"]
    two.confirm(3)
    assert one.lacking(1) == one.lacking(3) == [] and one.lacking(4) == ["two"]
    again = Hosts(tier, "two")  # the next process of that host
    again.join()
    again.confirm(200)
    assert one.lacking(200) == [] and again.lacking(1) == ["one"]


def test_hosts_that_a_service_has_lost_are_soon_in_the_list_again(tier: CheckedTier) -> None:
    """One that is up enters itself. One that is down is entered by a host that knows it."""
    hosts = [Hosts(tier, name) for name in ("one", "two", "three")]
    for host in hosts:
        host.join()
    tier.drop(["v1/control/hosts/2"])
    new = Hosts(tier, "new")
    new.join()
    assert "two" not in new.names()
    for _ in range(3):
        hosts[1].names()
    assert "two" in new.names()
    tier.delete("v1/control/hosts/")
    again = Hosts(tier, "one")
    again.join(["two", "three", "one"])
    assert again.lacking(1) == ["two", "three"]


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
    one.join()
    two.join()
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
