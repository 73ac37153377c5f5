"""How a model's KV is spread over an engine's ranks: who stores which shard, and who loads it.

Tensor-parallel ranks are numbered contiguously, and a run of `replicas` neighbours in one group can
hold the same bytes: with MLA the whole group, with grouped-query attention as many as share a KV
head. One of them stores, all load.

    TP=4, PP=2, two KV heads, so replicas = 2:

    rank      0   1   2   3 │ 4   5   6   7
    pp_rank   0   0   0   0 │ 1   1   1   1
    tp_rank   0   1   2   3 │ 0   1   2   3
    kv_rank   0   0   1   1 │ 2   2   3   3       the shard: stored under this number, loaded from it
    stores    ●   ·   ●   · │ ●   ·   ●   ·

Engines of several tensor-parallel sizes share blocks if all cut KV heads into the same number of
shards (`cut_into`). A rank then holds several neighbouring ones:

    eight KV heads, four shards     0     1     2     3
    heads                          0 1   2 3   4 5   6 7
    rank at TP=1                   0     0     0     0
    rank at TP=2                   0     0     1     1
    rank at TP=4                   0     1     2     3
"""

from __future__ import annotations

import msgspec

from kvkeep.errors import SettingsError


class ParallelStrategy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's place in the engine and in its KV. Build it with `of`; contradictions raise
    SettingsError.

    Invariants: world_size == tp_size * pp_size; `replicas` divides tp_size, so that no shard spans
    two pipeline stages; kv_rank == rank // replicas. Of all ranks, exactly one `stores` each shard
    0..kv_shards-1."""

    use_mla: bool
    tp_size: int
    pp_size: int
    world_size: int
    rank: int
    kv_world_size: int
    kv_rank: int
    shards_per_rank: int = 1

    @classmethod
    def of(
        cls,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        rank: int = 0,
        use_mla: bool = False,
        num_kv_heads: int | None = None,
        kv_tp_replicas: int | None = None,
    ) -> ParallelStrategy:
        """The strategy of `rank`, from what engines know of themselves.

        `num_kv_heads` is the model's total. `kv_tp_replicas`, where the engine says it, beats what
        would be derived from MLA and heads. An engine that also splits the context over its TP
        ranks must say it (1 is always right): neighbours then hold different tokens, whatever heads
        they share."""
        _check_at_least("tp_size", tp_size, 1)
        _check_at_least("pp_size", pp_size, 1)
        replicas = _replicas(tp_size, use_mla, num_kv_heads, kv_tp_replicas)
        _check_at_least("rank", rank, 0)
        world_size = tp_size * pp_size
        return cls(
            use_mla=use_mla,
            tp_size=tp_size,
            pp_size=pp_size,
            world_size=world_size,
            rank=rank,
            kv_world_size=world_size // replicas,
            kv_rank=rank // replicas,
        )

    def cut_into(self, tp_shards: int | None, num_kv_heads: int) -> ParallelStrategy:
        """This strategy with KV heads cut into `tp_shards` shards, or into one for each head where
        there are fewer heads. None, and any number with MLA, which has no heads to cut: a shard for
        each rank. `num_kv_heads` is the model's total."""
        if tp_shards is None or self.use_mla:
            return self
        _check_at_least("tp_shards", tp_shards, 1)
        _check_at_least("num_kv_heads", num_kv_heads, 1)
        shards, ranks = min(tp_shards, num_kv_heads), self.tp_size // self.replicas
        if shards % ranks or num_kv_heads % shards:
            raise _refusal(
                f"{num_kv_heads} KV heads on {ranks} ranks cannot be cut into {shards} shards"
                " (kvkeep.tp_shards)",
                "set kvkeep.tp_shards to the largest tensor-parallel size among engines that share:"
                " it must divide the KV heads and be a multiple of each of their sizes",
            )
        return msgspec.structs.replace(self, shards_per_rank=shards // ranks)

    def __post_init__(self) -> None:
        if type(self.use_mla) is not bool:
            raise _refusal(f"use_mla must be true or false, not {self.use_mla!r}")
        for field in ("tp_size", "pp_size", "world_size", "kv_world_size", "shards_per_rank"):
            _check_at_least(field, getattr(self, field), 1)
        for field in ("rank", "kv_rank"):
            _check_at_least(field, getattr(self, field), 0)
        if self.world_size != self.tp_size * self.pp_size:
            raise _refusal(
                f"world_size is {self.world_size}, but tp_size * pp_size is {self.tp_size} * {self.pp_size}",
                "data-parallel replicas are engines of their own and do not count",
            )
        if self.rank >= self.world_size:
            raise _refusal(f"rank is {self.rank}, but the {self.world_size} ranks count from 0")
        if self.kv_world_size * self.replicas != self.world_size or self.tp_size % self.replicas:
            raise _refusal(
                f"kv_world_size {self.kv_world_size} does not cut TP groups of {self.tp_size} into equal runs"
            )
        if self.kv_rank != self.rank // self.replicas:
            raise _refusal(
                f"kv_rank is {self.kv_rank}, but rank {self.rank} holds shard {self.rank // self.replicas} "
                f"({self.replicas} replicas of each)"
            )

    @property
    def replicas(self) -> int:
        """How many neighbouring ranks hold the same bytes."""
        return self.world_size // self.kv_world_size

    @property
    def kv_shards(self) -> int:
        """How many shards all ranks hold together."""
        return self.kv_world_size * self.shards_per_rank

    @property
    def shards(self) -> range:
        """The shards that this rank holds."""
        first = self.kv_rank * self.shards_per_rank
        return range(first, first + self.shards_per_rank)

    @property
    def cut(self) -> str:
        """How a block is divided, for the fingerprint of a layout. Ranks that hold the same bytes
        are one shard, so MLA is divided alike at every tensor-parallel size."""
        return f"heads in {self.kv_shards // self.pp_size}, layers in {self.pp_size}"

    @property
    def tp_rank(self) -> int:
        """This rank's place in its tensor-parallel group."""
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        """The pipeline stage of this rank."""
        return self.rank // self.tp_size

    @property
    def stores(self) -> bool:
        """Whether this rank stores its shards. Every rank loads its own."""
        return self.rank % self.replicas == 0


def _replicas(
    tp_size: int, use_mla: bool, num_kv_heads: int | None, kv_tp_replicas: int | None
) -> int:
    if kv_tp_replicas is not None:
        _check_at_least("kv_tp_replicas", kv_tp_replicas, 1)
        if tp_size % kv_tp_replicas:
            raise _refusal(f"kv_tp_replicas {kv_tp_replicas} does not divide tp_size {tp_size}")
        return kv_tp_replicas
    if use_mla:
        return tp_size
    if num_kv_heads is None:
        return 1
    _check_at_least("num_kv_heads", num_kv_heads, 1)
    if num_kv_heads >= tp_size:
        return 1
    if tp_size % num_kv_heads:
        raise _refusal(
            f"{num_kv_heads} KV heads (num_kv_heads) do not spread evenly over tp_size {tp_size}",
            "choose a tp_size that divides the KV heads or is a multiple of them",
        )
    return tp_size // num_kv_heads


def _check_at_least(field: str, value: object, least: int) -> None:
    # a bool is an int to isinstance, and a mistake here
    if type(value) is not int or value < least:
        raise _refusal(f"{field} must be an integer of at least {least}, not {value!r}")


def _refusal(problem: str, hint: str = "") -> SettingsError:
    return SettingsError(f"parallel strategy: {problem}", hint)
