from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from kvkeep.client.hints import Hints
from kvkeep.client.requests import LoadOutcome, LoadRequest, StoreRequest
from kvkeep.connector.request_state import RequestState
from kvkeep.connector.step import Job, StepMetadata, begin


class Recorder:
    """A worker's cache that remembers what was begun, in order."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, Hashable, Any]] = []

    def load(self, job: Hashable, request: LoadRequest) -> None:
        self.begun.append(("load", job, request))

    def store_all(self, requests: Mapping[Any, StoreRequest]) -> None:
        for job, request in requests.items():
            self.store(job, request)

    def store(self, job: Hashable, request: StoreRequest) -> None:
        self.begun.append(("store", job, request))

    def withdraw(self, block_ids: Any) -> None:
        self.begun.append(("withdraw", 0, block_ids))


def job(block_ids: list[int], failed: set[int]) -> Job:
    return Job(
        1,
        RequestState("r", None, Hints(), bytearray(), 0),
        0,
        block_ids,
        is_load=True,
        outcome=LoadOutcome(frozenset(failed)),
    )


def test_good_blocks_end_at_the_first_bad_one() -> None:
    assert job([7, 3, 9], set()).good_blocks() == 3
    assert job([7, 3, 9], {7}).good_blocks() == 0
    assert job([7, 3, 9], {3}).good_blocks() == 1
    assert job([7, 3, 9], {9}).good_blocks() == 2
    assert job([7, 3, 9], {9, 3}).good_blocks() == 1
    assert job([7, 3, 9], {7, 3, 9}).good_blocks() == 0
    assert job([], set()).good_blocks() == 0


def test_blocks_of_others_do_not_matter() -> None:
    assert job([7, 3], {1, 2}).good_blocks() == 2


def test_what_is_stored_begins_first_then_blocks_are_withdrawn_then_loads_write_into_them() -> None:
    none = np.empty(0, dtype=np.int64)
    load = LoadRequest("default", b"", 0, none, 1, none, np.empty((0, 1), dtype=np.uint64))
    store = StoreRequest("default", b"", b"", none)
    cache = Recorder()
    step = StepMetadata({4: load, 9: load}, {2: store, 3: store}, {5: store}, [7, 8])
    begin(step, cache)  # type: ignore[arg-type]
    expected: list[tuple[str, Hashable]] = [
        ("store", 2),
        ("store", 3),
        ("withdraw", 0),
        ("load", 4),
        ("load", 9),
    ]
    assert [(kind, number) for kind, number, _ in cache.begun] == expected
    assert cache.begun[0][2] is store and cache.begun[2][2] == [7, 8] and cache.begun[3][2] is load


def test_an_empty_step_begins_nothing() -> None:
    cache = Recorder()
    begin(StepMetadata(), cache)  # type: ignore[arg-type]
    assert cache.begun == []


def test_steps_do_not_share_their_jobs() -> None:
    one, two = StepMetadata(), StepMetadata()
    assert one.loads is not two.loads and one.stores is not two.stores
