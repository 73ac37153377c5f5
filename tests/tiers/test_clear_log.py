"""The log of clears that hosts share, on a real directory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvkeep.errors import TierError
from kvkeep.tiers import checked_tier, clear_log
from kvkeep.tiers.checked_tier import CheckedTier
from kvkeep.tiers.clear_log import ALL, START, Entry, Hosts, SharedLog, generation
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
    begun = [generation(at, each) for at, each in enumerate((first, second, third), start=1)]
    assert one.generations("a") == ["0", *begun[:2]]
    assert one.generations("b") == ["0", *begun[1:]]
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


def test_a_log_begins_once(tier: CheckedTier) -> None:
    one, two = SharedLog(tier), SharedLog(tier)
    one.begin()
    (begin,) = one.sync([], 0)
    assert begin.name == START
    two.begin()
    one.begin()
    assert two.sync([], 0) == one.sync([], 0) == [begin]


def test_a_log_that_all_hosts_have_forgotten_begins_with_other_generations(
    tier: CheckedTier,
) -> None:
    """What was stored before has been cleared since, or not: nobody knows."""
    before, after = SharedLog(tier), SharedLog(tier)
    before.begin()
    before.sync([], 0)
    tier.delete("v1/control/clears/")
    after.begin()
    assert after.generations("a")[-1] not in before.generations("a")


def test_a_log_that_cannot_begin_is_not_one_without_clears(
    tier: CheckedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "write", lambda parts: [False] * len(parts))
    with pytest.raises(TierError, match="no room"):
        SharedLog(tier).begin()


def test_a_hole_is_found_and_what_another_host_appends_is_none(
    tier: CheckedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, other = SharedLog(tier), SharedLog(tier)
    entries = [Entry("a", str(number)) for number in range(5)]
    log.sync(entries[:3], 0)
    assert not log.has_more()
    read = tier.read

    def read_late(parts: Sequence[Part]) -> list[int]:
        """The other host appends two, of which the second is seen, and not the first."""
        monkeypatch.setattr(tier, "read", read)
        other.sync(entries, 0)
        return [-1, *read(parts)[1:]]

    monkeypatch.setattr(tier, "read", read_late)
    assert not log.has_more()
    assert log.sync([], 0) == entries
    tier.drop(["v1/control/clears/2"])
    fresh = SharedLog(tier)
    assert fresh.sync([], 0) == entries[:1] and fresh.has_more()
    fresh.sync([Entry(START, "fills it")], 0)
    assert fresh.sync([], 0) == [entries[0], Entry(START, "fills it"), *entries[2:]]
    assert not fresh.has_more()
    assert len({*fresh.generations("b"), *log.generations("b")}) == 2, (
        "of tenants never cleared, too"
    )


def test_an_entry_that_others_may_not_have_seen_is_looked_for_soon(tier: CheckedTier) -> None:
    one, two = SharedLog(tier), SharedLog(tier)
    entries = [Entry("a", "1"), Entry("b", "2")]
    two.sync([], 0)
    one.sync(entries, 0)
    tier.drop(["v1/control/clears/1"])
    assert two.sync([], 0) == []
    for _ in range(3):
        one.sync([], 0, check_soon=True)
    assert two.sync([], 0) == entries


def test_a_host_that_has_left_is_not_waited_for_until_it_joins_again(tier: CheckedTier) -> None:
    one, two = Hosts(tier, "one"), Hosts(tier, "two")
    one.join()
    two.join()
    Hosts(tier, "two").join()  # the same host, after it was killed
    assert one.names() == ["one", "two"] and one.lacking(1) == ["two"]
    assert one.lacking(1, ["two", "three"]) == ["two", "three"]
    two.leave()
    assert one.names() == ["one"] and one.lacking(1) == []
    assert one.present_and_gone() == (["one"], ["two"]), "its blocks are still there"
    again = Hosts(tier, "two")
    again.join()
    assert one.names() == ["one", "two"] and one.lacking(1) == ["two"]
    again.leave()
    assert Hosts(tier, "three").names() == ["one"]


def test_a_host_whose_entry_is_lost_is_soon_in_the_list_again(tier: CheckedTier) -> None:
    hosts = [Hosts(tier, name) for name in ("one", "two", "three")]
    for host in hosts:
        host.join()
    tier.drop(["v1/control/hosts/2"])
    new = Hosts(tier, "new")
    new.join()
    assert "two" not in new.names()
    for _ in range(3):
        hosts[1].names()
    assert new.names() == ["one", "new", "three", "two"]


def test_hosts_say_how_much_of_the_log_they_know(tier: CheckedTier) -> None:
    one, two = Hosts(tier, "one"), Hosts(tier, "two")
    one.join()
    two.join()
    assert one.most_known() == {}
    for entries in (1, 2, 3):
        two.say_known(entries)
        assert one.most_known() == {"two": entries}
    one.say_known(2)
    one.forget_known(["two"])
    assert two.most_known() == {"one": 2}


def test_what_hosts_tell_each_other_has_a_format_of_its_own(
    tier: CheckedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, hosts, block = SharedLog(tier), Hosts(tier, "one"), bytearray(5)
    log.sync([Entry("a", "1")], 0)
    hosts.join()
    hosts.say_known(1)
    tier.write([Part("v1/tenant/0/layout/key", [memoryview(b"block")])])
    with monkeypatch.context() as patch:
        patch.setattr(checked_tier, "VERSION", 2)
        assert SharedLog(tier).sync([], 0) == [Entry("a", "1")], "blocks have another format"
        assert Hosts(tier, "two").names() == ["one"] and hosts.most_known() == {"one": 1}
        assert tier.read([Part("v1/tenant/0/layout/key", [memoryview(block)])]) == [-1]
    assert tier.read([Part("v1/tenant/0/layout/key", [memoryview(block)])]) == [5]
    names = hosts.names()
    monkeypatch.setattr(checked_tier, "CONTROL_VERSION", 2)
    monkeypatch.setattr(clear_log, "CONTROL_VERSION", 2)
    assert tier.read([Part("v1/tenant/0/layout/key", [memoryview(block)])]) == [5]
    with pytest.raises(TierError, match=r"\(format 1, this release reads 2\)"):
        SharedLog(tier).sync([], 0)
    monkeypatch.setattr(hosts, "names", lambda: names)
    with pytest.raises(TierError, match=r"\(format 1, this release reads 2\)"):
        hosts.most_known()
