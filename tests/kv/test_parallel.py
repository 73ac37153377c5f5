"""ParallelStrategy against a naive enumeration that hands out layers and heads to ranks, one by
one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvkeep.errors import SettingsError
from kvkeep.kv.parallel import ParallelStrategy

MAX_WORLD = 16


FACTORIZATIONS = [
    (tp_size, world // tp_size)
    for world in range(1, MAX_WORLD + 1)
    for tp_size in range(1, world + 1)
    if world % tp_size == 0
]


def contents(tp_size: int, pp_size: int, heads: int | None) -> list[tuple[int, frozenset[int]]]:
    """What each rank holds: its pipeline stage and its KV heads (None for MLA: one latent, held by
    all).

    Written from the rules of tensor parallelism alone: stages one after the other, and within a
    stage the heads dealt out in order, each rank taking its share or, with too few heads, each head
    going to its run of ranks."""
    held = []
    for stage in range(pp_size):
        for place in range(tp_size):
            if heads is None:
                mine = {0}
            else:
                # one per head, or one per rank where ranks outnumber heads
                cards = max(heads, tp_size)
                mine = {
                    card * heads // cards
                    for card in range(cards)
                    if card * tp_size // cards == place
                }
            held.append((stage, frozenset(mine)))
    return held


def check_against(
    held: list[tuple[int, frozenset[int]]], strategies: list[ParallelStrategy]
) -> None:
    # in order of first appearance, which is the order of shards
    distinct = list(dict.fromkeys(held))
    stored: dict[int, tuple[int, frozenset[int]]] = {}
    for rank, strategy in enumerate(strategies):
        assert strategy.rank == rank
        assert strategy.world_size == len(held)
        assert strategy.kv_world_size == len(distinct)
        assert strategy.kv_rank == distinct.index(held[rank])
        assert strategy.stores == (held.index(held[rank]) == rank)
        assert strategy.replicas == held.count(held[rank])
        if strategy.stores:
            assert strategy.kv_rank not in stored, "a shard is stored once"
            stored[strategy.kv_rank] = held[rank]
    assert sorted(stored) == list(range(len(distinct)))
    for rank, strategy in enumerate(strategies):
        assert stored[strategy.kv_rank] == held[rank], (
            "every rank loads what it would have computed"
        )


@pytest.mark.parametrize(("tp_size", "pp_size"), FACTORIZATIONS)
def test_mla_has_one_shard_per_stage(tp_size: int, pp_size: int) -> None:
    strategies = [
        ParallelStrategy.of(
            tp_size=tp_size, pp_size=pp_size, rank=rank, use_mla=True, num_kv_heads=tp_size
        )
        for rank in range(tp_size * pp_size)
    ]
    check_against(contents(tp_size, pp_size, None), strategies)
    assert sum(strategy.stores for strategy in strategies) == pp_size


@pytest.mark.parametrize(("tp_size", "pp_size"), FACTORIZATIONS)
def test_heads_decide_the_shards(tp_size: int, pp_size: int) -> None:
    legal = [heads for heads in range(1, 17) if heads % tp_size == 0 or tp_size % heads == 0]
    for heads in legal:
        strategies = [
            ParallelStrategy.of(tp_size=tp_size, pp_size=pp_size, rank=rank, num_kv_heads=heads)
            for rank in range(tp_size * pp_size)
        ]
        check_against(contents(tp_size, pp_size, heads), strategies)


@pytest.mark.parametrize(("tp_size", "pp_size"), FACTORIZATIONS)
def test_without_a_word_on_replicas_every_rank_has_its_shard(tp_size: int, pp_size: int) -> None:
    for rank in range(tp_size * pp_size):
        strategy = ParallelStrategy.of(tp_size=tp_size, pp_size=pp_size, rank=rank)
        assert (strategy.kv_rank, strategy.kv_world_size) == (rank, tp_size * pp_size)
        assert strategy.stores


@pytest.mark.parametrize(("tp_size", "pp_size"), FACTORIZATIONS)
def test_what_the_engine_says_of_replicas_wins(tp_size: int, pp_size: int) -> None:
    for replicas in (n for n in range(1, tp_size + 1) if tp_size % n == 0):
        for use_mla in (False, True):
            strategies = [
                ParallelStrategy.of(
                    tp_size=tp_size, pp_size=pp_size, rank=rank, use_mla=use_mla, num_kv_heads=1,
                    kv_tp_replicas=replicas,
                )
                for rank in range(tp_size * pp_size)
            ]  # fmt: skip
            check_against(contents(tp_size, pp_size, tp_size // replicas), strategies)


def test_tensor_parallel_ranks_are_contiguous() -> None:
    ranks = [
        ParallelStrategy.of(tp_size=4, pp_size=2, rank=rank, use_mla=True) for rank in range(8)
    ]
    assert [s.pp_rank for s in ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [s.tp_rank for s in ranks] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [s.kv_rank for s in ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [s.stores for s in ranks] == [True, False, False, False, True, False, False, False]


def test_the_picture_in_the_module() -> None:
    ranks = [
        ParallelStrategy.of(tp_size=4, pp_size=2, rank=rank, num_kv_heads=2) for rank in range(8)
    ]
    assert [s.kv_rank for s in ranks] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [s.stores for s in ranks] == [True, False] * 4


def test_eight_ranks_of_mla_make_one_store() -> None:
    assert (
        sum(ParallelStrategy.of(tp_size=8, rank=rank, use_mla=True).stores for rank in range(8))
        == 1
    )


def test_a_strategy_survives_the_wire() -> None:
    strategy = ParallelStrategy.of(tp_size=4, pp_size=2, rank=5, num_kv_heads=2)
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(strategy), type=ParallelStrategy) == strategy
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tp_size": 0}, "tp_size"),
        ({"tp_size": True}, "tp_size"),
        ({"tp_size": 2.0}, "tp_size"),
        ({"pp_size": -1}, "pp_size"),
        ({"rank": -1}, "rank"),
        ({"rank": 8}, "rank is 8, but the 8 ranks"),
        ({"rank": None}, "rank"),
        ({"use_mla": 1}, "use_mla"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"num_kv_heads": 3}, "3 KV heads"),
        ({"kv_tp_replicas": 0}, "kv_tp_replicas"),
        ({"kv_tp_replicas": 3}, "does not divide tp_size 4"),
        ({"kv_tp_replicas": 8}, "does not divide tp_size 4"),
    ],
)
def test_bad_arguments_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        ParallelStrategy.of(**{"tp_size": 4, "pp_size": 2, **changes})


FIELDS: dict[str, Any] = {
    "use_mla": False, "tp_size": 4, "pp_size": 2, "world_size": 8, "rank": 5,
    "kv_world_size": 4, "kv_rank": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("world_size", 4), ("world_size", 16), ("rank", 8), ("rank", 6),
        ("kv_world_size", 8), ("kv_world_size", 3), ("kv_world_size", 16), ("kv_world_size", 1),
        ("kv_rank", 5), ("kv_rank", -1), ("tp_size", 2), ("use_mla", 0),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other_are_refused(field: str, value: object) -> None:
    ParallelStrategy(**FIELDS)
    with pytest.raises(SettingsError, match="parallel strategy"):
        ParallelStrategy(**{**FIELDS, field: value})


@pytest.mark.parametrize(
    ("tp_size", "heads", "tp_shards", "shards"),
    [
        (1, 8, 4, [[0, 1, 2, 3]]),
        (2, 8, 4, [[0, 1], [2, 3]]),
        (4, 8, 4, [[0], [1], [2], [3]]),
        (3, 12, 6, [[0, 1], [2, 3], [4, 5]]),
        (2, 4, 16, [[0, 1], [2, 3]]),  # a shard for each head is the most
        (4, 2, 8, [[0], [0], [1], [1]]),  # two ranks hold each head
    ],
)
def test_ranks_of_every_size_hold_neighbouring_shards_of_the_same_cut(
    tp_size: int, heads: int, tp_shards: int, shards: list[list[int]]
) -> None:
    ranks = [
        ParallelStrategy.of(tp_size=tp_size, pp_size=2, rank=rank, num_kv_heads=heads)
        for rank in range(2 * tp_size)
    ]
    cut = [each.cut_into(tp_shards, heads) for each in ranks]
    count = min(tp_shards, heads)
    assert [list(each.shards) for each in cut[:tp_size]] == shards
    assert [[shard - count for shard in each.shards] for each in cut[tp_size:]] == shards
    assert {(each.kv_shards, each.cut) for each in cut} == {
        (2 * count, f"heads in {count}, layers in 2")
    }
    stored = [shard for each in cut if each.stores for shard in each.shards]
    assert stored == list(range(2 * count))


def test_without_a_number_of_shards_and_with_mla_nothing_changes() -> None:
    plain, mla = (ParallelStrategy.of(tp_size=2, use_mla=mla) for mla in (False, True))
    assert plain.cut_into(None, 4) == plain and mla.cut_into(4, 1) == mla
    assert (plain.cut_into(2, 4), list(plain.shards)) == (plain, [0])


@pytest.mark.parametrize(("tp_size", "heads", "tp_shards"), [(4, 8, 2), (2, 8, 3), (2, 6, 4)])
def test_a_number_of_shards_that_does_not_fit_is_refused(
    tp_size: int, heads: int, tp_shards: int
) -> None:
    strategy = ParallelStrategy.of(tp_size=tp_size, num_kv_heads=heads)
    with pytest.raises(SettingsError, match=r"kvkeep\.tp_shards") as refused:
        strategy.cut_into(tp_shards, heads)
    assert "largest tensor-parallel size" in refused.value.hint
