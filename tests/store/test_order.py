"""Who goes first: leaves before parents, tails before heads, hints before age."""

from __future__ import annotations

import gc
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvkeep.store import operators
from kvkeep.store import order as module
from kvkeep.store.order import Queue

Hands = Callable[..., Any]


# What is put, used, finished and waited for (ms), in order; after "left" what is there.
LIVES = {
    "tails": (4, "put abcd, put x, left a ab abc x, put xyz, left a x xy xyz"),
    "the least recently used": (4, "put ab, put xy, use ab, put mn, left a ab m mn"),
    "a use keeps the head only": (4, "put abc, use a, put x, put xyz, left a x xy xyz"),
    # x goes, then ab, and a is now as young as ab was: older than m
    "a parent inherits its child's last use": (
        3,
        "put ab, put x, use ab, put m, put mn, left a m mn, put mno, left m mn mno",
    ),
    "a finished session": (4, "put ab, put xy, finish xy, put mn, left a ab m mn"),
    "not one that is used again": (
        4,
        "put ab, put xy, finish xy, use xy, put mn, left x xy m mn",
    ),
    "lower priorities whatever their age": (
        3,
        "put a priority=60, put b priority=40, put c priority=50, put d priority=100,"
        " put e priority=100, left a d e",
    ),
    "hints before priorities": (
        3,
        "put a priority=0, put b priority=100, put c priority=90 ttl_ms=5, finish b, wait 5,"
        " put d, left a b d, put e, left a d e",
    ),
    "the expired and not a moment sooner": (
        3,
        "put a, put b ttl_ms=10, put c ttl_ms=50, wait 9, put d, left b c d, wait 50, put e,"
        " put f, left d e f",
    ),
    "what expired while leased, afterwards": (
        3,
        "put a, put b ttl_ms=10, lease b, put c, wait 20, put d, left b c d, release, put e,"
        " left c d e",
    ),
}


@pytest.mark.parametrize("first", LIVES)
def test_who_goes_first(hand: Hands, first: str) -> None:
    slots, life = LIVES[first]
    h, lease = hand(slots), 0
    for step in life.split(", "):
        match step.split():
            case ["put", chain, *hints]:
                h.put(chain, **{name: int(value) for name, value in (e.split("=") for e in hints)})
            case ["use", chain]:
                h.lookup(chain)
            case ["finish", chain]:
                assert h.finish(chain) and not h.finish("nothere")
            case ["wait", ms]:
                h.now_ms += int(ms)
            case ["lease", chain]:
                lease, _ = h.lease(chain)
            case ["release"]:
                h.store.release(1, lease, h.now_ms)
            case ["left", *chains]:
                assert h.chains() == set(chains)
            case _:
                raise AssertionError(step)


def test_half_written_blocks_are_as_young_as_any(hand: Hands) -> None:
    h = hand(3, shard_bytes=(64, 64))
    h.put("a")
    write, _ = h.prepare("b", shard=0)
    h.complete(write)
    h.put("c")
    h.put("d")
    write, plan = h.prepare("b", shard=1)
    h.complete(write)
    assert len(plan.positions) == 1 and h.chains() == {"b", "c", "d"}
    h.put("efg")
    assert h.chains() == {"e", "ef", "efg"}


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_a_rank_that_is_behind_another_completes_what_that_one_began(
    hand: Hands, behind: int
) -> None:
    """A full pool, and two ranks that store the same chains, one of them some stores later than the
    other."""
    h = hand(20, shard_bytes=(64, 64))
    for old in range(20):
        h.put(chr(ord("a") + old))
    names = [f"{chr(0x100 + 2 * at)}{chr(0x101 + 2 * at)}" for at in range(30)]
    for at in range(len(names) + behind):
        for shard, chains in (
            (0, names[at : at + 1]),
            (1, names[max(0, at - behind) : max(0, at - behind + 1)]),
        ):
            for chain in chains:
                write, _ = h.prepare(chain, shard=shard)
                if write in h.store.sessions[1].writes:
                    h.complete(write)
    assert h.chains() == {part for name in names[-10:] for part in (name[:1], name)}
    assert [h.lookup(name).blocks for name in names[-10:]] == [2] * 10, "all of it is whole"


def test_what_a_missing_rank_leaves_undone_is_not_waited_for(hand: Hands) -> None:
    h = hand(80, shard_bytes=(64, 64))
    for number in range(60):
        h.put(chr(0x100 + number))
    whole = h.chains()
    for number in range(200):
        write, _ = h.prepare(chr(0x400 + number), shard=0, priority=100)
        h.complete(write)
    assert h.chains() >= whole, "they take what was free, and then each other's place"
    for number in range(80):
        h.put(chr(0x800 + number))
    assert h.chains() == {chr(0x800 + number) for number in range(80)}, (
        "and go like others, whatever their priority"
    )


def test_queues_do_not_grow_with_what_has_passed_through(hand: Hands) -> None:
    h = hand(4)
    h.quota("t", 4)
    for i in range(5000):
        h.put(chr(0x100 + i), ttl_ms=1_000_000)
        if i % 5 == 0:
            operators.clear(h.store, "t")
    assert h.store.blocks.order.entries < 4000


@pytest.mark.parametrize("slots", [None, 4])
def test_the_queue_of_a_tenant_without_blocks_is_forgotten(hand: Hands, slots: int | None) -> None:
    h = hand(4, default_quota=slots)
    h.put("ab")
    operators.clear(h.store)
    assert h.store.blocks.order.entries == (1 if slots is None else 0), "the shared queue stays"


def test_blocks_that_were_all_used_again_are_put_in_order_a_few_a_turn(
    hand: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    h = hand(100)
    words = [chr(0x100 + i) for i in range(100)]
    for word in words:
        h.put(word)
    for word in reversed(words):
        h.lookup(word)
    order, ranked = h.store.blocks.order, [0]
    rank, order.looks_a_turn = order.rank, 8

    def counted(row: int, now_ms: int) -> int:
        ranked[-1] += 1
        return rank(row, now_ms)

    monkeypatch.setattr(order, "rank", counted)
    assert h.put("X") == 1 and order.behind, "there is no room yet: the oldest is not known"
    while h.store.has_to_tidy:
        ranked.append(0)
        h.store.tidy(h.now_ms)
    assert max(ranked) <= 9 and len(ranked) > 12
    assert h.put("X") == 0 and h.chains() == {*words[:-1], "X"}, (
        "the one that was used longest ago went"
    )


def test_a_tenant_over_its_limit_keeps_what_fits_though_all_of_it_was_used_again(
    hand: Hands,
) -> None:
    h = hand(100)
    words = [chr(0x100 + i) for i in range(100)]
    operators.set_limit(h.store, "t", 100 * 4096, h.now_ms)
    for word in words:
        h.put(word)
    for word in reversed(words):
        h.lookup(word)
    h.store.blocks.order.looks_a_turn = 8
    operators.set_limit(h.store, "t", 40 * 4096, h.now_ms)
    while h.store.has_to_tidy:
        h.store.tidy(h.now_ms)
    assert h.chains() == set(words[:40])


def test_a_long_queue_of_a_tenant_without_blocks_is_freed_in_pieces(
    hand: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_DISCARDED_A_TURN", 8)
    h = hand(50, default_quota=50)
    for i in range(50):
        h.put(chr(0x100 + i))
    order = h.store.blocks.order
    while h.store.tidy(h.now_ms):
        pass
    operators.clear(h.store)
    lengths = [sum(map(len, order.discarded))]
    while h.store.has_to_tidy:
        h.store.tidy(h.now_ms)
        lengths.append(sum(map(len, order.discarded)))
    assert lengths == [50, 42, 34, 26, 18, 10, 2, 0]


def pop_all(queue: Queue) -> list[int]:
    popped = []
    while (entry := queue.lowest()) >= 0:
        popped.append(entry)
        queue.drop_lowest()
    return popped


def test_a_long_queue_gets_shorter_a_few_entries_a_push() -> None:
    queue, looked_at = Queue(), list[int]()

    def counts(entry: int) -> bool:
        looked_at.append(entry)
        return entry >= 10_000

    for entry in range(10_000):
        queue.push(entry, 100_000, counts)
    assert not looked_at
    for entry in range(10_000, 14_000):
        before = len(looked_at)
        queue.push(entry, 9_000, counts)
        assert len(looked_at) - before <= 4
    assert pop_all(queue) == list(range(10_000, 14_000))


def test_the_order_holds_while_a_queue_gets_shorter() -> None:
    chance, queue = Random(2), Queue()
    entries = chance.sample(range(1 << 40), 3000)
    for entry in entries[:2500]:
        queue.push(entry, 5000, lambda _: True)
    for entry in entries[2500:]:
        queue.push(entry, 1000, lambda _: True)
    assert queue.former and queue.heap and len(queue) == 3000
    assert pop_all(queue) == sorted(entries)


@pytest.mark.parametrize("count", [1, 2, 32, 33, 200])
def test_short_and_long_queues_have_the_same_order(count: int) -> None:
    chance, queue = Random(count), Queue()
    entries = chance.sample(range(10_000), count)
    for entry in entries:
        queue.push(entry, 5000, lambda _: True)
    assert len(queue) == count and sorted(queue.entries()) == sorted(entries)
    assert queue.first(255)[0] == min(entries) and len(queue.first(20)) == min(20, count)
    queue.replace_lowest(20_000)
    assert pop_all(queue) == [*sorted(entries)[1:], 20_000]
    queue.push(5, 5000, lambda _: True)
    assert pop_all(queue) == [5]


def test_the_garbage_collector_does_not_look_at_the_queues_of_many_tenants(hand: Hands) -> None:
    h = hand(400, default_quota=1)
    for number in range(200):
        h.put("ab", f"tenant-{number}")
    gc.collect()
    before = len(gc.get_objects())
    for number in range(200, 400):
        h.put("a", f"tenant-{number}")
    gc.collect()
    assert len(gc.get_objects()) - before < 50
