"""kvkeep beside another connector in vLLM's own MultiConnector, with vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

import shelf
import torch
from engine_parts import BLOCK, Engine, answer_to, one_rank, request
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.outputs import KVConnectorOutput

import kvkeep.vllm.scheduler
import kvkeep.vllm.siblings
import kvkeep.vllm.worker
from kvkeep.errors import SettingsError
from kvkeep.vllm.connector import KVKeepConnector
from kvkeep.vllm.messages import Reports
from kvkeep.vllm.registration import InactiveScheduler
from kvkeep.vllm.siblings import SiblingLoads, keys_of_siblings, siblings_of
from kvkeep_lab.simulation.cache import SimulatedCache

PROMPT = list(range(100, 123))
COUNT = {"num_kvkeep_extra_cached_tokens": None}
SHELF = {"kv_connector": "Shelf", "kv_connector_module_path": "shelf", "kv_role": "kv_both"}


class SiblingEngine(Engine):
    """vLLM calls MultiConnector, and that calls the Shelf and us."""

    alone = False
    ours_first = True
    # it has computed from what the Shelf spoiled: vLLM hears of it after the step, as always
    is_hurt = False

    def __init__(self, cache: SimulatedCache, **options: Any) -> None:
        super().__init__(cache, change=self._nest, **options)

    def _nest(self, config: Any) -> None:
        own = config.kv_transfer_config
        child = {"kv_connector": "KVKeepConnector", "kv_role": "kv_both"}
        child["kv_connector_extra_config"] = own.kv_connector_extra_config
        children = [child, SHELF] if self.ours_first else [SHELF, child]
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": children},
        )
        config.scheduler_config.disable_hybrid_kv_cache_manager = True

    def _start(self) -> None:
        self.rank: Any
        with (
            one_rank(),
            set_current_vllm_config(self.config),
            mock.patch.object(kvkeep.vllm.worker, "WorkerAdapter", self._make_worker),
        ):
            self.rank = MultiConnector(self.config, KVConnectorRole.WORKER, self.kv_cache_config)
            self.rank.register_kv_caches(self.kv)
        with self._in_process():
            handshake = self.rank.get_handshake_metadata()
            if handshake is not None:
                self.scheduler.connector.set_xfer_handshake_metadata({0: handshake})

    @contextmanager
    def _in_process(self) -> Iterator[None]:
        group = {"has_kv_transfer_group": lambda: True, "get_kv_transfer_group": lambda: self.rank}
        with (
            mock.patch.multiple(kvkeep.vllm.siblings, **group),
            mock.patch.multiple(kvkeep.vllm.worker, **group),
            mock.patch.object(
                kvkeep.vllm.scheduler,
                "SchedulerAdapter",
                lambda shape, _: self.cache.lookup_side(shape),
            ),
        ):
            yield

    def step(self, delivers: bool = True) -> Any:
        with self._in_process():
            return super().step(delivers)

    def results(self, scheduled: Any) -> KVConnectorOutput:
        output = super().results(scheduled)
        if self.apart and output.kv_connector_worker_meta is not None:
            own: Reports = next(
                each
                for each in output.kv_connector_worker_meta.metadata
                if isinstance(each, Reports | None)
            )
            if own is not None:
                own.handshakes = [replace(each, name="") for each in own.handshakes]
        return output

    def check_kv(
        self, kv: torch.Tensor, table: Sequence[int], values: list[int], places: range, name: str
    ) -> None:
        if not shelf.Shelf.fails:
            super().check_kv(kv, table, values, places, name)

    @property
    def shelf(self) -> Any:
        return next(
            each for each in self.scheduler.connector._connectors if isinstance(each, shelf.Shelf)
        )


a_request = request  # where a fixture's `request` hides it


@pytest.fixture(params=[True, False], ids=["ours first", "ours last"])
def engine(
    request: pytest.FixtureRequest, way: str, cache: SimulatedCache, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], SiblingEngine]]:
    monkeypatch.setattr(SiblingEngine, "ours_first", request.param)
    made: list[SiblingEngine] = []

    def make(*, is_active: bool = False) -> SiblingEngine:
        made.append(SiblingEngine(cache))
        if is_active:
            made[-1].run(a_request([1, 2, 3], "first"))
        return made[-1]

    yield make
    shelf.Shelf.offers, shelf.Shelf.fails = 0, False
    for each in made:
        each.settle()
    for each in made:
        each.check_nothing_left()
        each.rank.shutdown()
        each.scheduler.shutdown()


def set_shelf(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    for name, value in values.items():
        monkeypatch.setattr(shelf.Shelf, name, value)


@pytest.mark.parametrize("shakes_hands", [False, True])
def test_an_engine_hits_once_its_first_step_has_brought_the_handshakes(
    engine: Callable[..., SiblingEngine], monkeypatch: pytest.MonkeyPatch, shakes_hands: bool
) -> None:
    """Its handshake does not come at start-up, and the sibling's is not taken for it."""
    set_shelf(monkeypatch, shakes_hands=shakes_hands)
    first, second = engine(), engine()
    assert isinstance(first.half, InactiveScheduler)
    first.run(request([1, 2, 3], "first", params=COUNT))
    second.run(request([1, 2, 3], "first"))
    assert first.params["first"] == {"num_kvkeep_extra_cached_tokens": 0}
    assert first.run(request(PROMPT, "a")).answers["a"] == answer_to(PROMPT)
    assert second.run(request(PROMPT, "b", params=COUNT)).answers["b"] == answer_to(PROMPT)
    assert second.params["b"] == {"num_kvkeep_extra_cached_tokens": len(PROMPT) // BLOCK * BLOCK}
    assert second.shelf.heard == [shelf.ShelfHandshake()] * shakes_hands
    assert second.shelf.finished == ["first", "b"]


def test_a_failed_load_is_computed(engine: Callable[..., SiblingEngine]) -> None:
    first, second = engine(is_active=True), engine(is_active=True)
    first.run(request(PROMPT))
    second.worker.failing = lambda load: [2]
    assert second.run(request(PROMPT, "b", params=COUNT)).answers["b"] == answer_to(PROMPT)
    assert second.params["b"] == {"num_kvkeep_extra_cached_tokens": 2 * BLOCK}


def test_what_a_sibling_brings_is_stored_when_the_step_has_shown_that_it_is_good(
    engine: Callable[..., SiblingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engine(is_active=True), engine(is_active=True)
    set_shelf(monkeypatch, offers=3 * BLOCK)
    assert first.run(request(PROMPT, "a", max_tokens=6)).answers["a"] == answer_to(PROMPT, 6)
    set_shelf(monkeypatch, offers=0)
    assert second.run(request(PROMPT, "b", params=COUNT)).answers["b"] == answer_to(PROMPT)
    assert second.params["b"] == {"num_kvkeep_extra_cached_tokens": len(PROMPT) // BLOCK * BLOCK}


def test_what_a_sibling_failed_to_load_and_what_was_computed_from_it_is_never_stored(
    engine: Callable[..., SiblingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by a request that shared those blocks. The second engine's oracle sees every byte that it
    loads."""
    first, second = engine(), engine()
    first.run(request(range(300, 309), "warm"))
    before = len(first.worker.began)
    set_shelf(monkeypatch, offers=3 * BLOCK, fails=True)
    first.add(request(PROMPT, "a", max_tokens=6), request([*PROMPT, 7, 8, 9], "b", max_tokens=6))
    in_steps, load_in_step = list[int](), SiblingLoads.load_in_step

    def note(loads: SiblingLoads) -> None:
        in_steps.append(loads.step)
        load_in_step(loads)

    monkeypatch.setattr(SiblingLoads, "load_in_step", note)
    for _ in range(20):
        if in_steps:
            break
        first.step()
    else:
        raise AssertionError("the sibling loaded nothing")
    set_shelf(monkeypatch, offers=0)
    for _ in range(3):
        first.step()
    assert not [asked for what, asked in first.worker.began[before:] if what == "store"]
    first.run()
    set_shelf(monkeypatch, fails=False)
    assert second.run(request(PROMPT, "c"), request([*PROMPT, 7, 8, 9], "d")).answers == {
        "c": answer_to(PROMPT),
        "d": answer_to([*PROMPT, 7, 8, 9]),
    }


def test_a_reset_before_the_handshakes_holds(engine: Callable[..., SiblingEngine]) -> None:
    """The weights may have changed: what was stored before is not found."""
    first, second = engine(is_active=True), engine()
    first.run(request(PROMPT))
    assert second.scheduler.connector.reset_cache()
    second.run(request([1, 2, 3], "first"))
    second.run(request(PROMPT, "b", params=COUNT))
    assert second.params["b"] == {"num_kvkeep_extra_cached_tokens": 0}


# --- what is refused ------------------------------------------------------------------------------


def outer(policy: str, *children: dict[str, Any]) -> Any:
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": list(children)},
    )
    return mock.Mock(kv_transfer_config=transfer)


OWN = {
    "kv_connector": "KVKeepConnector",
    "kv_connector_module_path": "kvkeep.vllm",
    "kv_role": "kv_both",
}


def check(config: Any, policy: str = "recompute") -> tuple[str, ...]:
    child = mock.Mock(kv_transfer_config=KVTransferConfig(**OWN))
    with mock.patch.object(
        kvkeep.vllm.siblings, "get_current_vllm_config_or_none", return_value=config
    ):
        return siblings_of(child, KVKeepConnector, policy)


def test_another_policy_in_the_outer_config_is_refused_with_what_to_write() -> None:
    with pytest.raises(
        SettingsError, match='"kv_load_failure_policy": "recompute" beside "kv_connector"'
    ):
        check(outer("fail", OWN, SHELF))
    with pytest.raises(SettingsError, match='"kv_load_failure_policy": "fail" beside'):
        check(outer("recompute", OWN, SHELF), policy="fail")
    assert check(outer("recompute", OWN, SHELF)) == ("Shelf",)
    assert check(outer("fail", SHELF, OWN), policy="fail") == ("Shelf",)


@pytest.mark.parametrize("name", ["KVKeepConnector", "LMCacheMPConnector"])
def test_two_of_our_connectors_are_refused_under_whatever_name(name: str) -> None:
    with pytest.raises(SettingsError, match="2 kvkeep connectors"):
        check(outer("recompute", OWN, SHELF, OWN | {"kv_connector": name}))


def test_a_connector_that_vllm_calls_itself_has_no_siblings() -> None:
    config = mock.Mock(kv_transfer_config=KVTransferConfig(**OWN))
    for current in (config, None, mock.Mock(kv_transfer_config=None)):
        with mock.patch.object(
            kvkeep.vllm.siblings, "get_current_vllm_config_or_none", lambda each=current: each
        ):
            assert siblings_of(config, KVKeepConnector, "recompute") == ()


def test_a_key_that_a_sibling_returns_is_left_to_it(engine: Callable[..., SiblingEngine]) -> None:
    """Two children that return the same key end the engine: MultiConnector raises."""
    assert keys_of_siblings(("Shelf", "NixlConnector")) == set()
    both = {"num_lmcache_extra_cached_tokens": None, **COUNT}
    one = engine()
    one.run(request(PROMPT, "a", params=both))
    assert set(one.params["a"]) == set(both)
    assert one.half is not None
    one.half.keys_of_siblings = keys_of_siblings(("LMCacheMPConnector",))
    one.run(request(PROMPT, "b", params=both))
    assert set(one.params["b"]) == set(COUNT)


def test_steps_end_in_the_order_in_which_they_were_built() -> None:
    loads = SiblingLoads()
    loads.end_step()  # of a step before all that this knows of
    assert not loads.may_have_failed and loads.step == 1
    loads.load_in_step()
    loads.build_step()
    loads.build_step()
    assert loads.may_have_failed and loads.step == 3
    loads.end_step()
    assert not loads.may_have_failed
