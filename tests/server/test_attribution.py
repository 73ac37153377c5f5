"""Planted causes of misses are named right, and the outcomes of every request add up to the blocks
of its prompt, in lives with faults too."""

from __future__ import annotations

from typing import Any

import pytest

from kvkeep.client.options import ClientOptions, parse_patience
from kvkeep.connector.planner import CachePlanner
from kvkeep.connector.request_state import RequestState
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.engine import Engine
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import addresses
from kvkeep.server.explain import RequestShown
from kvkeep.store.operators import clear, set_default_limit, set_quota
from kvkeep_lab.fuzz.engine import Fuzz
from kvkeep_lab.simulation.cache import CacheFaults, SimulatedCache
from kvkeep_lab.simulation.oracle import OracleModel

PROMPT = list(range(41))  # ten blocks and a token
CONFIG = EngineConfig(block_tokens=4, num_blocks=64, enable_prefix_caching=False)
MOST = 1 << 10


class World:
    """A server in simulated time, and engines without a prefix cache of their own."""

    def __init__(self, faults: CacheFaults | None = None, **cache: Any) -> None:
        self.cache = SimulatedCache(1, faults, **cache)

    def engine(self, model: OracleModel | None = None, **config: Any) -> Engine:
        return Engine(model or OracleModel(), EngineConfig(**vars(CONFIG) | config), self.cache)

    @property
    def explanations(self) -> Any:
        return self.cache.server.service.explanations

    def ask(self, engine: Engine, prompt: list[int] = PROMPT, **more: Any) -> RequestShown:
        """Serves it to its end. What the server has to say of it, some time later."""
        request = engine.add(prompt, SamplingParams(max_tokens=1), **more)
        for _ in range(5_000):
            if not (engine.busy or engine.has_jobs):
                break
            engine.step()
            self.cache.pass_time(2)
        assert request.finish_reason == "length"
        self.pass_time()
        shown: RequestShown = self.explanations.find(request.request_id)
        assert sum(shown.outcomes.values()) == shown.blocks == -(-len(prompt) // 4)
        return shown

    def pass_time(self) -> None:
        """As much as a connection needs to be made anew, and to report."""
        for _ in range(20):
            self.cache.pass_time(100)


def limit(world: World, nbytes: int | None) -> None:
    set_default_limit(world.cache.server.store, nbytes, 0)


def promise_all_but(world: World, blocks: int) -> None:
    """Another tenant has a quota that leaves memory for this number of blocks to all others."""
    store = world.cache.server.store
    set_quota(store, tenant_of("bob"), store.pool_bytes - blocks * slot_bytes(world), 0)


def slot_bytes(world: World) -> int:
    return next(iter(world.cache.server.store.layouts)).slot_bytes


def test_what_was_never_stored_and_what_was_loaded() -> None:
    world = World()
    engine = world.engine()
    first, second = world.ask(engine), world.ask(engine)
    assert first.outcomes == {"never_stored": 10, "last": 1}
    assert second.outcomes == {"loaded": 10, "last": 1}
    assert (second.tokens_loaded, second.tokens_computed, second.prompt_tokens) == (40, 1, 41)
    assert second.engine == "python" and second.model == "oracle"


def test_what_the_engine_had_itself() -> None:
    world = World()
    engine = world.engine(enable_prefix_caching=True)
    world.ask(engine)
    assert world.ask(engine).outcomes == {"local": 10, "last": 1}


def test_what_was_evicted_when_and_for_whom() -> None:
    world = World(pool_bytes=1 << 16)
    engine = world.engine()
    world.ask(engine)
    store = world.cache.server.store
    number = 0
    while store.eviction.evictions < 10:
        number += 1
        world.ask(engine, [100 + number, *range(41, 80)], salt="bob")
    shown = world.ask(engine)
    assert shown.outcomes["evicted"] + shown.outcomes.get("loaded", 0) == 10
    assert shown.evicted is not None and shown.evicted.by == tenant_of("bob")
    assert 0 < shown.evicted.newest_s <= shown.evicted.oldest_s < 600
    assert store.blocks.departures is not None
    assert store.blocks.departures.counts["others"] >= shown.outcomes["evicted"]
    assert store.blocks.departures.age_s is not None


def test_what_is_over_a_limit() -> None:
    world = World()
    engine = world.engine()
    world.ask(engine, PROMPT[:5])
    limit(world, 4 * slot_bytes(world))
    world.ask(engine)
    assert world.ask(engine).outcomes == {"loaded": 4, "over_limit": 6, "last": 1}
    assert world.ask(engine, [7, *PROMPT], salt="bob").outcomes == {"never_stored": 10, "last": 1}


def test_what_another_tenant_was_promised_the_room_for() -> None:
    world = World()
    engine = world.engine()
    world.ask(engine, PROMPT[:5])
    promise_all_but(world, 4)
    assert world.ask(engine).outcomes == {"loaded": 1, "never_stored": 9, "last": 1}
    assert world.ask(engine).outcomes == {"loaded": 4, "no_room": 6, "last": 1}


def test_what_its_tenant_may_not_hold_for_loads() -> None:
    world = World()
    engine = world.engine()
    world.ask(engine)
    promise_all_but(world, 4)
    assert world.ask(engine).outcomes == {"loaded": 4, "withheld": 6, "last": 1}
    assert world.ask(engine, [*PROMPT[:12], 7]).outcomes == {"loaded": 3, "last": 1}


def test_another_salt() -> None:
    world = World()
    engine = world.engine()
    world.ask(engine, salt="alice")
    shown = world.ask(engine, salt="bob")
    assert shown.outcomes == {"other_salt": 10, "last": 1}
    assert "alice" not in str(shown) and tenant_of("alice") not in str(shown)
    assert world.ask(engine, [5, *PROMPT], salt="bob").outcomes == {"never_stored": 10, "last": 1}


def test_another_identity_and_which_part_differs() -> None:
    world = World()
    world.ask(world.engine())
    shown = world.ask(world.engine(OracleModel(revision="a fine-tune")))
    assert shown.outcomes == {"other_identity": 10, "last": 1} and shown.differs == ["revision"]
    assert "revision" in shown.text


def test_a_server_that_was_away() -> None:
    world = World()
    engine = world.engine()
    world.ask(engine)
    world.cache.stop_server()
    request = engine.add(PROMPT, SamplingParams(max_tokens=1))
    while engine.busy or engine.has_jobs:
        engine.step()
        world.cache.pass_time(2)
    assert request.finish_reason == "length"
    world.cache.restart_server()
    world.pass_time()
    shown = world.explanations.find(request.request_id)
    assert shown.outcomes == {"unreachable": 10, "last": 1}
    assert world.ask(engine).outcomes == {"never_stored": 10, "last": 1}, "the new one is empty"


def test_a_tier_that_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    for policy, expected in (
        ("timeout=55", {"loaded": 5, "too_late": 5, "last": 1}),
        ("best_effort", {"too_late": 10, "last": 1}),
    ):
        monkeypatch.setattr(ClientOptions, "patience_ms", parse_patience(policy))
        world = World()
        tiers = world.cache.add_tier(10)
        world.ask(world.engine())
        tiers.take_down()
        assert world.ask(world.engine()).outcomes == expected, policy


def test_loads_that_fail() -> None:
    world = World(CacheFaults(load_loss=1.0))
    engine = world.engine()
    world.ask(engine)
    assert world.ask(engine).outcomes == {"load_failed": 10, "last": 1}


def test_what_was_cleared() -> None:
    world = World()
    engine = world.engine()
    world.ask(engine)
    store = world.cache.server.store
    clear(store, "default")
    while store.tidy(0):
        pass
    assert world.ask(engine).outcomes == {"dropped": 10, "last": 1}


def test_what_is_being_written() -> None:
    world = World()
    engine = world.engine()
    world.ask(engine, PROMPT[:5])
    store, layout = world.cache.server.store, next(iter(world.cache.server.store.layouts))
    ahead = engine.add(PROMPT, SamplingParams(max_tokens=1))
    keys = addresses(bytes(ahead.keys), layout.fingerprint)
    engine.abort(ahead.request_id)
    session, first, more = max(store.sessions), keys[:16], keys[16 : 4 * 16]
    store.prepare_store(session, 1 << 40, "default", layout.number, 0, first, more, 0)
    shown = world.ask(engine)
    assert shown.outcomes == {"loaded": 1, "being_written": 3, "never_stored": 6, "last": 1}


def test_the_last_requests_are_kept_the_newest_first() -> None:
    world = World()
    engine = world.engine()
    names = [world.ask(engine, [at, *PROMPT]).request for at in range(3)]
    assert [each.request for each in world.explanations.last(2)] == names[:0:-1]
    assert world.explanations.find(names[0]).request == names[0]


@pytest.mark.parametrize("seed", range(20, 32))
def test_outcomes_add_up_in_lives_with_faults(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: dict[tuple[str, int], int] = {}
    finish = CachePlanner.finish_request

    def finished(planner: CachePlanner, state: RequestState) -> Any:
        block_tokens = planner._layout.block_tokens
        ended[state.request_id, state.prompt_tokens] = -(-state.prompt_tokens // block_tokens)
        return finish(planner, state)

    monkeypatch.setattr(CachePlanner, "finish_request", finished)
    seen: list[RequestShown] = []
    fuzz = Fuzz(seed)
    restart = fuzz.cache.restart_server

    def keep() -> None:
        seen.extend(fuzz.cache.server.service.explanations.last(MOST))

    def restart_and_keep() -> None:
        keep()
        restart()

    fuzz.cache.restart_server = restart_and_keep  # type: ignore[method-assign]
    fuzz.run()
    keep()
    assert ended and seen
    for shown in seen:
        assert sum(shown.outcomes.values()) == shown.blocks
        assert sum(count for _, count in shown.runs) == shown.blocks
        assert shown.blocks == ended[shown.request, shown.prompt_tokens]
        assert "lacked" not in shown.outcomes
