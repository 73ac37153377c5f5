"""Plans for chaos runs that are about one thing."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvkeep.engine.config import EngineConfig
from kvkeep_lab.chaos.plan import (
    Arrival,
    Cut,
    DiskItem,
    EngineItem,
    Item,
    Moment,
    Plan,
    Rate,
    draw,
)

MakePlan = Callable[..., Plan]


@pytest.fixture
def quiet() -> Iterator[None]:
    """The faults are wanted: what clients and server log about them is of no use."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


@pytest.fixture
def make_plan(quiet: None) -> MakePlan:
    """A plan with these faults only, the requests of a drawn one, and two engines, unless told
    otherwise."""

    def make(
        *faults: Item,
        seed: int = 2,
        engines: Sequence[EngineItem] | None = None,
        pool_blocks: int = 40,
        **changed: object,
    ) -> Plan:
        drawn = draw(seed)
        arrivals = [item for item in drawn.items if isinstance(item, Arrival)]
        engines = (
            engines or [EngineItem(0, shared_memory=True, kept=False, longest_step_us=3_000)] * 2
        )
        assert all(isinstance(item, Rate | Moment | DiskItem) for item in faults)
        items = (*engines, *arrivals, *faults)
        config = EngineConfig(
            block_tokens=4, num_blocks=60, max_num_batched_tokens=64, enable_prefix_caching=False
        )
        changed.setdefault("cuts", (Cut(config, drawn.cuts[0].use_mla),))
        return dataclasses.replace(drawn, items=items, pool_blocks=pool_blocks, **changed)  # type: ignore[arg-type]

    return make
