"""The small public API: ten lines that work, mistakes that say what they are, and a server that may
be absent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvkeep
from kvkeep.client import cache as module
from kvkeep.client.options import ClientOptions
from kvkeep.errors import RequestError, Unavailable
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m
from kvkeep_lab.simulation.tiers import SimulatedTiers

NOWHERE = "tcp://127.0.0.1:1"
TOKENS = list(range(10))  # two full blocks of four, and two tokens more
_models = itertools.count()
Connect = Callable[..., kvkeep.Cache]


def settings(**changes: Any) -> dict[str, Any]:
    """For a model that no other test uses."""
    model = f"c{next(_models)}"
    return {
        "model": model,
        "revision": "1",
        "block_tokens": 4,
        "block_shape": (2, 3),
        "dtype": "float32",
    } | changes


@pytest.fixture
def connect(server: ServerProcess) -> Iterator[Connect]:
    made: list[kvkeep.Cache] = []

    def make(**changes: Any) -> kvkeep.Cache:
        patient = {
            "required": True,
            "wait_ms": 20_000,
            "options": ClientOptions(lookup_deadline_ms=20_000),
        }
        made.append(kvkeep.connect(server.address, **settings(**patient | changes)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def blocks(count: int = 2, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(count).random((count, 2, 3)).astype(dtype)


def test_the_example_in_the_docstring_works(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module.__doc__ is not None
    example = module.__doc__.split("\n\n", 1)[1]
    assert len(example.strip().splitlines()) <= 10
    monkeypatch.setattr(module, "ClientOptions", lambda: ClientOptions(address=server.address))
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["blocks"].shape == (4, 2, 16, 8, 64)
    assert (names["blocks"] == 1).all()
    names["cache"].close()


def test_blocks_come_back_bit_for_bit_and_only_full_ones_count(connect: Connect) -> None:
    cache = connect()
    given = blocks()
    given[1, 0, 0] = np.float32(np.nan)
    assert cache.put(TOKENS, given) == 2
    assert cache.put(TOKENS, given) == 0
    assert cache.contains(TOKENS) == 2
    assert cache.get(TOKENS).tobytes() == given.tobytes()
    assert cache.get([*TOKENS[:4], 99, 99, 99, 99]).tobytes() == given[:1].tobytes()
    assert cache.get([7, *TOKENS]).shape == (0, 2, 3)
    assert cache.get([]).shape == (0, 2, 3)
    assert cache.put([1, 2, 3], np.empty((0, 2, 3), "float32")) == 0


def test_an_array_that_came_back_is_the_callers_own(connect: Connect) -> None:
    cache = connect()
    cache.put(TOKENS, blocks())
    first = cache.get(TOKENS)
    first[:] = 0
    assert (cache.get(TOKENS) == blocks()).all()


@pytest.mark.parametrize("how", ["read-only", "transposed", "list", "every second"])
def test_any_array_of_the_right_shape_can_be_put(connect: Connect, how: str) -> None:
    given: Any = blocks()
    if how == "read-only":
        given.flags.writeable = False
    elif how == "transposed":
        given = np.asfortranarray(given)
    elif how == "list":
        given = given.tolist()
    else:
        given = np.repeat(given, 2, axis=0)[::2]
    cache = connect()
    assert cache.put(TOKENS, given) == 2
    assert (cache.get(TOKENS) == blocks()).all()


@pytest.mark.parametrize("shape", [(1, 2, 3), (3, 2, 3), (2, 3, 2), (2, 6), (12,)])
def test_a_wrong_shape_is_refused_with_what_was_expected(
    connect: Connect, shape: tuple[int, ...]
) -> None:
    with pytest.raises(
        RequestError, match=r"10 tokens have 2 full blocks of shape \(2, 3\)"
    ) as caught:
        connect().put(TOKENS, np.zeros(shape, "float32"))
    assert (caught.value.code, caught.value.field) == ("bad_shape", "blocks")


def test_numbers_of_another_type_are_refused_and_not_rounded(connect: Connect) -> None:
    with pytest.raises(RequestError, match="float64, this cache keeps float32") as caught:
        connect().put(TOKENS, blocks(dtype="float64"))
    assert "astype('float32')" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"block_shape": (2, 0)}, "bad_shape"),
        ({"block_shape": (-1, -2)}, "bad_shape"),
        ({"dtype": object}, "bad_dtype"),
        ({"model": ""}, "bad_identity"),
        ({"revision": ""}, "bad_identity"),
        ({"block_tokens": 0}, "bad_identity"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_before_it_connects(
    changes: dict[str, Any], code: str
) -> None:
    with pytest.raises(RequestError) as caught:
        kvkeep.connect(NOWHERE, **settings(**changes))
    assert caught.value.code == code


def test_tokens_that_are_none_raise(connect: Connect) -> None:
    with pytest.raises(RequestError, match="tokens are integers"):
        connect().get([1, 2, -3, 4])


# -- who shares with whom


def test_salts_isolate(connect: Connect) -> None:
    cache = connect()
    assert cache.put(TOKENS, blocks(), salt="alice") == 2
    for other in (None, "", "bob", "Alice"):
        assert cache.contains(TOKENS, salt=other) == 0
        assert len(cache.get(TOKENS, salt=other)) == 0
    assert cache.put(TOKENS, blocks() + 1, salt="bob") == 2
    assert (cache.get(TOKENS, salt="alice") == blocks()).all()
    assert (cache.get(TOKENS, salt="bob") == blocks() + 1).all()


def test_an_empty_salt_is_no_salt(connect: Connect) -> None:
    cache = connect()
    cache.put(TOKENS, blocks(), salt="")
    assert cache.contains(TOKENS) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"model": "another"},
        {"revision": "2"},
        {"dtype": "int32"},
        {"dtype": ">f4"},
        {"block_tokens": 2},
        {"block_shape": (3, 2)},
    ],
    ids=repr,
)
def test_any_change_of_what_the_bytes_mean_is_a_miss(
    connect: Connect, change: dict[str, Any]
) -> None:
    base = settings()
    first, second = connect(**base), connect(**(base | change))
    assert first.put(TOKENS, blocks()) == 2
    assert second.contains(TOKENS) == 0
    assert connect(**base).contains(TOKENS) == 2


def test_types_that_share_a_short_name_are_told_apart(connect: Connect) -> None:
    base = settings(block_shape=(6,))
    first = connect(**(base | {"dtype": [("a", "<f4")]}))
    assert first.put(TOKENS, np.zeros((2, 6), [("a", "<f4")])) == 2
    assert connect(**(base | {"dtype": [("b", "<i4")]})).contains(TOKENS) == 0


def test_hints_reach_the_server(simulation: Callable[..., Any]) -> None:
    sim = simulation()
    cache = sim.cache()
    cache.put(list(range(4)), np.zeros((1, 1000), np.uint8), salt="s", priority=90, ttl_ms=5_000)
    (prepared,) = [request for request in sim.recorder.came if isinstance(request, m.PrepareStore)]
    assert (prepared.tenant, prepared.priority, prepared.ttl_ms) == (tenant_of("s"), 90, 5_000)


def test_nothing_is_held_after_a_call(simulation: Callable[..., Any]) -> None:
    sim = simulation(shared_memory=True)
    cache, given = sim.cache(), np.ones((2, 1000), np.uint8)
    for _ in range(3):
        cache.put(list(range(8)), given)
        assert (cache.get(list(range(8))) == given).all()
        assert "owed=0" in repr(cache.connection), (
            "the server is told at once, not when somebody comes by"
        )
        assert cache.contains(list(range(8))) == 2
        assert "owed=0" in repr(cache.connection)
    sim.run(20)
    assert sim.held() == [(0, 0)]


# -- the server


def test_an_absent_server_is_a_counted_miss() -> None:
    with kvkeep.connect(NOWHERE, **settings(wait_ms=1)) as cache:
        assert not cache.connected
        assert cache.put(TOKENS, blocks()) == 0
        assert cache.get(TOKENS).shape == (0, 2, 3)
        assert cache.contains(TOKENS) == 0
        assert cache.connection.counters.failures["not_connected"] == 3


def test_a_server_that_is_required_and_absent_raises_with_the_remedy() -> None:
    with pytest.raises(Unavailable) as caught:
        kvkeep.connect(NOWHERE, **settings(required=True, wait_ms=1))
    assert NOWHERE in caught.value.message
    assert "`kvkeep serve`" in caught.value.hint


def test_a_server_that_refuses_is_quoted(server: ServerProcess) -> None:
    with pytest.raises(Unavailable, match="does not fit a slab"):
        kvkeep.connect(
            server.address, **settings(block_shape=(1 << 20,), required=True, wait_ms=500)
        )


def test_the_address_given_beats_that_of_the_options(server: ServerProcess) -> None:
    options = ClientOptions(address=NOWHERE, shared_memory=False)
    with kvkeep.connect(
        server.address, **settings(required=True, options=options, wait_ms=20_000)
    ) as cache:
        assert cache.connection.options.address == server.address
        assert cache.connection.segments is None, "the other options hold"


def test_a_closed_cache_misses() -> None:
    cache = kvkeep.connect(NOWHERE, **settings(wait_ms=1))
    cache.close()
    assert cache.put(TOKENS, blocks()) == 0
    assert len(cache.get(TOKENS)) == 0


# -- blocks on a tier


def tiered(simulation: Callable[..., Any], **options: Any) -> tuple[Any, kvkeep.Cache]:
    """A cache whose four blocks are on a tier only, ten milliseconds each."""
    sim = simulation()
    tiers = SimulatedTiers(sim.server, block_ms=10)
    sim.network.serve(tiers)
    cache = sim.cache(**options)
    assert cache.put(list(range(16)), np.full((4, 1000), 7, dtype=np.uint8)) == 4
    assert tiers.take_down() == 4
    return sim, cache


@pytest.mark.parametrize(
    ("policy", "blocks"), [("timeout=200", 4), ("timeout=25", 2), ("wait", 4), ("best_effort", 0)]
)
def test_blocks_on_a_tier_come_back_within_patience(
    simulation: Callable[..., Any], policy: str, blocks: int
) -> None:
    sim, cache = tiered(simulation, tier_patience=policy)
    began_ms = sim.network.clock.now_ms
    found = cache.get(list(range(16)))
    assert found.shape == (blocks, 1000) and (found == 7).all()
    assert sim.network.clock.now_ms - began_ms <= 50
    sim.run(20)
    assert sim.held() == [(0, 0)] * len(sim.held())


def test_prefetch_says_how_many_blocks_are_on_their_way(simulation: Callable[..., Any]) -> None:
    sim, cache = tiered(simulation, tier_patience="best_effort")
    assert cache.prefetch(list(range(16))) == 4
    sim.run(50)
    assert cache.contains(list(range(16))) == 4
    assert cache.prefetch(list(range(16))) == 0
    plain = simulation().cache()
    assert plain.prefetch(list(range(16))) == 0, "that server has no tier"
