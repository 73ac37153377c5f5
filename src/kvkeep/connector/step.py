"""What the planner sends to every worker with a step, and what comes back.

A job is a load or a store of one request's blocks. Every rank does its shard of the job and reports
it once; the job has ended when all ranks have. Blocks that failed to load are known as soon as one
rank reports them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvkeep.client.calls import Call
from kvkeep.client.requests import Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.client.scheduler import Answer, Lookup
from kvkeep.connector.request_state import RequestState
from kvkeep.wire.messages import RequestReport


@dataclass(frozen=True)
class StepMetadata:
    """The jobs that begin with this step, by number.

    stores         of blocks that were computed before this step
    stores_after   of blocks that this step computes: they begin when it is over
    withdrawn      engine blocks that this step may write into, and that stores under way may not
                   have read yet
    requests       whose loads they are; for engines whose workers report requests
    """

    loads: Mapping[int, LoadRequest] = field(default_factory=dict)
    stores: Mapping[int, StoreRequest] = field(default_factory=dict)
    stores_after: Mapping[int, StoreRequest] = field(default_factory=dict)
    withdrawn: Sequence[int] = ()
    requests: Mapping[int, str] = field(default_factory=dict)


NOTHING = StepMetadata()  # for most steps


@dataclass
class Job:
    """One load or store under way. The engine blocks of a load belong to it until it has ended.
    Those of a store are only read; an engine that needs one before says so
    (`StepMetadata.withdrawn`).

    blocks       how many of the request's; with several groups each is several engine blocks
    whole        the leading blocks of a load are of use when a later one has failed
    reports      the ranks that have reported it
    outcome      what came of a load on the ranks that have reported it
    incomplete   some rank left out a part of a store
    """

    number: int
    request: RequestState
    first_block: int
    block_ids: list[int]
    is_load: bool
    blocks: int = 0
    whole: bool = True
    reports: set[int] = field(default_factory=set)
    outcome: LoadOutcome = field(default_factory=LoadOutcome)
    incomplete: bool = False

    def __post_init__(self) -> None:
        self.blocks = self.blocks or len(self.block_ids)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def places(self) -> range:
        """Which of the request's blocks it loads or stores."""
        return range(self.first_block, self.first_block + self.blocks)

    def good_blocks(self) -> int:
        """How many leading blocks every rank has loaded. Those after a bad one do not count: they
        are computed again."""
        failed = self.outcome.failed
        if not failed:
            return self.blocks
        if not self.whole:
            return 0
        return next((at for at, block in enumerate(self.block_ids) if block in failed), self.blocks)


class LookupSide(Protocol):
    """What the planner asks of a cache: `kvkeep.client.scheduler.SchedulerAdapter`, or a simulation
    of it."""

    def lookup(self, salt: str | None, keys: bytes, skip: int = 0, trace: str = "") -> Lookup: ...
    def answer(self, lookup: Lookup) -> Answer | None: ...
    def lacks(self, key: bytes) -> bool: ...
    def wait(self, lookup: Lookup, milliseconds: int) -> None: ...
    def release(self, lookup: Lookup, loaded_tokens: int = 0) -> None: ...
    def wait_for_tier(self, lookup: Lookup, most_ms: float | None = None) -> bool: ...
    def prefetch(self, salt: str | None, keys: bytes) -> None: ...
    def finish_conversation(self, salt: str | None, last_key: bytes) -> None: ...
    def report(self, report: RequestReport, lacked_by: Sequence[Call]) -> None: ...
    def close(self) -> None: ...


class JobSide(Protocol):
    """The part of a worker's side that takes jobs. Where a call raises an Exception, the job has
    not begun."""

    def withdraw(self, block_ids: Sequence[int] | None) -> None: ...
    def store_all(self, requests: Mapping[Any, StoreRequest]) -> None: ...
    def load(self, job: Hashable, request: LoadRequest) -> None: ...


class TransferSide(JobSide, Protocol):
    """What a worker asks of a cache: `kvkeep.client.worker.WorkerAdapter`, or a simulation of
    it."""

    def register_kv_caches(
        self, layers: Mapping[str, Any] | Sequence[Any], block_dim: int = 0
    ) -> None: ...
    def poll(self) -> Finished: ...
    def close(self) -> None: ...


@dataclass
class Completed:
    """What the workers' reports of one step amount to."""

    loads: list[Job] = field(default_factory=list)
    stores: list[Job] = field(default_factory=list)
    invalid_block_ids: set[int] = field(default_factory=set)


def begin(step: StepMetadata, cache: JobSide) -> None:
    """Begins a step on one worker, before anything is written: what stores have not read by now is
    saved from being overwritten, and only then loads begin."""
    save(step, cache)
    for number, load in step.loads.items():
        cache.load(number, load)


def save(step: StepMetadata, cache: JobSide) -> None:
    """The first half of it, where an engine itself writes between the two. What is stored was
    computed before."""
    if step.stores:
        cache.store_all(step.stores)
    if step.withdrawn:
        cache.withdraw(step.withdrawn)
