"""Ranks that store at different times against a real server, and models that differ: which blocks
can be seen, and with which bytes.

A block's bytes are a function of its key and its shard, so that a shard in the wrong place, or a
block of another engine, is noticed. Ranks are threads of this process, each with a WorkerAdapter, a
session and tensors of its own. test_engine_sharding.py shows the rest with whole engines."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from engines import Since, eventually

from kvkeep.client.options import ClientOptions
from kvkeep.client.requests import Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.client.scheduler import Answer, Lookup, SchedulerAdapter
from kvkeep.client.worker import WorkerAdapter
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.keys import KeyChain, root_key
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.shape import BlockShape
from kvkeep.testing.process import ServerProcess

BLOCKS, BLOCK_TOKENS = 8, 4  # blocks of a rank, tokens of a block
SIZE, LAYERS = 16, 4  # numbers of a head, layers of the model
PROMPT = list(range(BLOCK_TOKENS * 5))
_models = itertools.count()


def patient(address: str) -> ClientOptions:
    """What is found is asserted, not how soon on a busy machine."""
    return ClientOptions(address=address, lookup_deadline_ms=60_000, store_deadline_ms=60_000)


@dataclass(frozen=True)
class Model:
    """How an engine is cut, and what it computes with."""

    tp: int = 1
    pp: int = 1
    kv_heads: int = 8
    name: str = "m"
    revision: str = "1"
    dtype: str = "float32"
    block_tokens: int = BLOCK_TOKENS
    layout: str = "NHD"

    @property
    def strategies(self) -> list[ParallelStrategy]:
        cut = {"tp_size": self.tp, "pp_size": self.pp, "num_kv_heads": self.kv_heads}
        return [ParallelStrategy.of(rank=rank, **cut) for rank in range(self.tp * self.pp)]

    def tensors(self) -> list[Any]:
        heads = max(1, self.kv_heads // self.tp)
        shape = (BLOCKS, 2, self.block_tokens, heads, SIZE)
        dtype = getattr(torch, self.dtype)
        return [torch.zeros(shape, dtype=dtype) for _ in range(LAYERS // self.pp)]

    @property
    def shape(self) -> BlockShape:
        shards = self.strategies[0].kv_world_size
        nbytes = sum(tensor[0].nbytes for tensor in self.tensors())
        identity = ModelIdentity(
            model=self.name,
            revision=self.revision,
            kv_dtype=self.dtype,
            block_tokens=self.block_tokens,
            content=f"{self.layout} {LAYERS} {self.kv_heads} {SIZE}",
        )
        return BlockShape(identity, (nbytes,) * shards, cut=self.strategies[0].cut)

    def keys(self) -> bytes:
        chain = KeyChain(root_key(self.shape.identity, None), self.block_tokens)
        chain.extend(PROMPT)
        return chain.keys()


def oracle(key: bytes, shard: int, nbytes: int) -> bytes:
    """What a shard of a block must hold."""
    return hashlib.shake_128(
        key + shard.to_bytes(4, "little") + nbytes.to_bytes(8, "little")
    ).digest(nbytes)


class Rank:
    """One worker of an engine."""

    def __init__(self, model: Model, strategy: ParallelStrategy, address: str) -> None:
        self.strategy = strategy
        self.tensors = model.tensors()
        self.worker = WorkerAdapter(model.shape, strategy, patient(address))
        self.worker.register_kv_caches(
            {f"layer{i}": tensor for i, tensor in enumerate(self.tensors)}
        )

    def compute(self, block: int, key: bytes) -> None:
        """Fills a block with what this rank's shard of it must hold."""
        content = oracle(key, self.strategy.kv_rank, self._nbytes)
        for tensor, part in zip(
            self.tensors,
            np.frombuffer(content, np.uint8).reshape(len(self.tensors), -1),
            strict=True,
        ):
            tensor[block].view(torch.uint8).flatten().copy_(torch.from_numpy(part.copy()))

    def is_right(self, block: int, key: bytes) -> bool:
        held = b"".join(
            tensor[block].view(torch.uint8).numpy().tobytes() for tensor in self.tensors
        )
        return held == oracle(key, self.strategy.kv_rank, self._nbytes)

    def forget(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()

    def finish(self) -> Finished:
        seen = [Finished()]

        def something() -> bool:
            seen[0] = self.worker.poll()
            return bool(seen[0].stored or seen[0].loads)

        assert eventually(something)
        return seen[0]

    @property
    def _nbytes(self) -> int:
        return self.worker.shape.shard_bytes[self.strategy.kv_rank]


class Engine:
    """A scheduler and all ranks of one engine."""

    def __init__(self, model: Model, address: str) -> None:
        self.model = model
        self.scheduler = SchedulerAdapter(model.shape, patient(address))
        self.ranks = [Rank(model, strategy, address) for strategy in model.strategies]
        connections = [self.scheduler.connection, *(rank.worker.connection for rank in self.ranks)]
        assert eventually(lambda: all(connection.up for connection in connections)), connections[
            0
        ].refusal

    def store(self, keys: bytes, ranks: list[Rank] | None = None) -> list[int]:
        """Every rank computes and stores; how many blocks each wrote."""
        ids = np.arange(len(keys) // 16)
        chosen = self.ranks if ranks is None else ranks
        for rank in chosen:
            for block in ids.tolist():
                rank.compute(block, keys[block * 16 : block * 16 + 16])
            rank.worker.store("s", StoreRequest("default", b"", keys, ids))
        with ThreadPoolExecutor(len(chosen)) as pool:
            return [finished.stored["s"] for finished in pool.map(Rank.finish, chosen)]

    def lookup(self, keys: bytes) -> tuple[Lookup, Answer]:
        lookup = self.scheduler.lookup(None, keys)
        assert eventually(lambda: self.scheduler.answer(lookup) is not None)
        assert lookup.answer is not None
        return lookup, lookup.answer

    def hits(self, keys: bytes) -> int:
        request, answer = self.lookup(keys)
        self.scheduler.release(request)
        assert not answer.failure
        return answer.blocks

    def load(self, keys: bytes) -> int:
        """Every rank forgets, loads what is there and checks every byte. Returns how many blocks
        came."""
        request, answer = self.lookup(keys)
        ids = np.arange(answer.blocks)[::-1].copy()
        for rank in self.ranks:
            rank.forget()
            load = LoadRequest(
                "default", keys, 0, ids, answer.epoch, answer.slots, answer.checksums
            )
            rank.worker.load("l", load)
        for rank in self.ranks:
            assert rank.finish() == Finished(rank.strategy.rank, loads={"l": LoadOutcome()})
            for at, block in enumerate(ids.tolist()):
                assert rank.is_right(block, keys[at * 16 : at * 16 + 16]), (
                    f"rank {rank.strategy.rank} block {at}"
                )
        self.scheduler.release(request)
        return answer.blocks

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.close()
        self.scheduler.close()


@pytest.fixture
def start(server: ServerProcess) -> Iterator[Callable[[Model], Engine]]:
    made: list[Engine] = []

    def make(model: Model) -> Engine:
        made.append(Engine(model, server.address))
        return made[-1]

    yield make
    for each in made:
        each.close()


Start = Callable[[Model], Engine]


def fresh(**cut: Any) -> Model:
    """A model that no other test uses."""
    return Model(name=f"m{next(_models)}", **cut)


def named(cut: dict[str, Any]) -> str:
    return "-".join(f"{name}{value}" for name, value in cut.items())


@pytest.mark.parametrize("cut", [{"tp": 4, "pp": 2}, {"tp": 8, "pp": 1, "kv_heads": 4}], ids=named)
def test_a_block_is_seen_when_its_last_shard_is_in_and_no_sooner(
    start: Start, cut: dict[str, Any]
) -> None:
    model = fresh(**cut)
    engine, keys = start(model), model.keys()
    storing = [rank for rank in engine.ranks if rank.strategy.stores]
    for rank in reversed(storing):
        assert engine.hits(keys) == 0
        assert engine.store(keys, [rank]) == [5]
    assert engine.load(keys) == 5


def test_shards_that_arrive_unevenly_show_what_all_of_them_have(start: Start) -> None:
    model = fresh(tp=2)
    engine, keys = start(model), model.keys()
    first, second = engine.ranks
    assert engine.store(keys, [first]) == [5]
    assert engine.store(keys[: 2 * 16], [second]) == [2]
    assert engine.load(keys) == 2
    assert engine.store(keys, [second]) == [3]
    assert engine.load(keys) == 5


def test_all_ranks_of_two_replicas_storing_at_once_write_each_shard_once(
    start: Start, server: ServerProcess
) -> None:
    model = fresh(tp=2, pp=2)
    replicas, keys, grown = [start(model), start(model)], model.keys(), Since(server)
    with ThreadPoolExecutor(2) as pool:
        written = list(pool.map(lambda replica: replica.store(keys), replicas))
    assert [sum(counts) for counts in zip(*written, strict=True)] == [5] * 4
    assert grown("stored_blocks") == 20
    for replica in replicas:
        assert eventually(lambda replica=replica: replica.hits(keys) == 5)
        assert replica.load(keys) == 5


# -- models that never share


@pytest.mark.parametrize(
    "change",
    [
        {"name": "another"},
        {"revision": "2"},
        {"dtype": "int32"},
        {"dtype": "bfloat16"},
        {"block_tokens": 2},
        {"layout": "HND"},
        {"kv_heads": 4},
    ],
    ids=named,
)
def test_any_change_of_the_model_is_a_miss(start: Start, change: dict[str, Any]) -> None:
    base = {"name": f"m{next(_models)}"}
    model, other = Model(**base), Model(**(base | change))
    start(model).store(model.keys())
    assert start(other).hits(other.keys()) == 0
    assert start(model).load(model.keys()) == 5, "an equal engine hits"


def test_a_worker_that_lays_its_tensors_out_otherwise_is_refused_not_fed(
    server: ServerProcess,
) -> None:
    """Identity, block size and checksums agree: only the order of the dimensions in memory differs,
    and with it the meaning of every byte."""
    identity = ModelIdentity(
        model="careless", revision="1", kv_dtype="float32", block_tokens=4, content="as ever"
    )
    shape = BlockShape(identity, (2 * 4 * 8 * 16 * 4,))
    tokens_major = torch.zeros((8, 2, 4, 8, 16))
    heads_major = torch.zeros((8, 2, 8, 4, 16)).transpose(2, 3)
    assert tokens_major.shape == heads_major.shape
    first, second = (
        WorkerAdapter(shape, ParallelStrategy.of(), patient(server.address)) for _ in "ab"
    )
    first.register_kv_caches({"layer": tokens_major})
    assert first.connection.wait_until_up(10_000)
    second.register_kv_caches({"layer": heads_major})
    assert not second.connection.wait_until_up(300)
    assert "BlockShape.cut" in second.connection.refusal
    third = WorkerAdapter(shape, ParallelStrategy.of(), patient(server.address))
    third.register_kv_caches({"layer": torch.zeros((20, 2, 4, 8, 16))})
    assert third.connection.wait_until_up(10_000), "another number of blocks is no other layout"
    for worker in (first, second, third):
        worker.close()
