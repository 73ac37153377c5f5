"""The scheduler's side of the seam: what an engine's scheduler says to its external cache, and
when.

    arrive ──► lookup ──► prepare_load ──► build_step ──► complete      the prefix that the server has
                          prepare_store ──► build_step ──► complete     the blocks that were computed
    end        the request is over; what it learns about the cache

The engine decides about its blocks, this side about the server's. No call here blocks, and none
raises for what a server, a network or a request's params did. The rules:

- A lookup is sent on arrival, and asking again is free. Nobody waits to hear of what the server
  surely lacks.
- Two requests that miss the same block load it once: the second is told to wait, and then has it in
  the prefix cache.
- What is sooner computed than loaded is not loaded (cost_model.py). That is decided once, when the
  answer is there.
- A request whose load failed is not offered a hit again, so that it cannot fail for ever.
- Only what is computed and verified is stored, also generated tokens; what the server has is not.
- A salt goes with every lookup, load and store: its keys are made with it, its blocks belong to its
  tenant.
- A lease is held until the last worker has read from it, also when the request is gone before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.hints import Hints
from kvkeep.client.requests import Finished, LoadRequest, StoreRequest
from kvkeep.client.sources import NO_BLOCK
from kvkeep.connector.cost_model import CostModel
from kvkeep.connector.group_layout import GroupLayout
from kvkeep.connector.readers import Readers
from kvkeep.connector.recoveries import Recoveries
from kvkeep.connector.request_state import RequestState, usable_tenant
from kvkeep.connector.step import NOTHING, Completed, Job, LookupSide, StepMetadata
from kvkeep.kv.keys import KEY_BYTES

log = logging.getLogger(__name__)

BlockIds = Sequence[int] | NDArray[np.int64]  # of one piece, or a row for each

# generated blocks that are stored in one go; nobody can ask for them before the answer is known
BLOCKS_TOGETHER = 8


class CachePlanner:
    """One for each engine. `world_size` is the number of workers that report each job. Without a
    `worth`, all that can be loaded is."""

    def __init__(
        self,
        cache: LookupSide,
        pieces: GroupLayout,
        world_size: int,
        worth: CostModel | None = None,
        load_failure_policy: str = "recompute",
    ) -> None:
        self._cache, self._pieces, self._world_size = cache, pieces, world_size
        self._trackers: dict[str, RequestState] = {}
        self._jobs: dict[int, Job] = {}
        self._owners: dict[int, RequestState] = {}  # of jobs
        self._loading: dict[int, Job] = {}  # those of the jobs that bring blocks here
        self._readers = Readers()
        self._next_job = self._next_tracker = 0
        self._loads: dict[int, LoadRequest] = {}
        self._stores: dict[int, StoreRequest] = {}
        self._stores_after: dict[int, StoreRequest] = {}
        self._recoveries = Recoveries(load_failure_policy, pieces.block_tokens)
        self.worth = worth or CostModel("always")
        self.failed_lookups = self.skipped_loads = self.skipped_tokens = 0  # for whoever counts

    @property
    def idle(self) -> bool:
        """Whether no job is waiting for a step or under way."""
        return not self._jobs

    @property
    def stores(self) -> bool:
        """Whether a store is among them."""
        return len(self._jobs) > len(self._loading)

    @property
    def jobs(self) -> Sequence[Job]:
        return list(self._jobs.values())

    @property
    def handed_out(self) -> Sequence[Job]:
        """Those that do not wait for the next step: one has taken them to the workers, or was
        to."""
        waiting = self._loads.keys() | self._stores.keys() | self._stores_after.keys()
        return [job for number, job in self._jobs.items() if number not in waiting]

    # -- a request's way

    def arrive(
        self,
        request_id: str,
        salt: str | None,
        params: object,
        keys: bytes,
        local_blocks: int = 0,
        *,
        reads: bool = True,
        prompt_blocks: int | None = None,
    ) -> None:
        """A request has come, with the keys of its full blocks: those of its prompt, unless
        `prompt_blocks` says that some hold generated tokens. Asks at once for those that the engine
        does not have, unless the request must not read from a cache."""
        self._next_tracker += 1
        prompt_blocks = len(keys) // KEY_BYTES if prompt_blocks is None else prompt_blocks
        about = (salt, usable_tenant(salt), Hints.of(params), prompt_blocks, bytearray(keys))
        tracker = RequestState(self._next_tracker, request_id, *about)
        tracker.offers = reads
        self._trackers[request_id] = tracker
        if tracker.tenant and reads and local_blocks < tracker.num_blocks:
            self._ask(tracker, local_blocks, tracker.num_blocks)

    def extend(self, request_id: str, keys: bytes) -> None:
        """More of the request's blocks are full, and these are their keys."""
        tracker = self._trackers.get(request_id)
        if tracker is not None:
            tracker.keys += keys

    def known_blocks(self, request_id: str) -> int:
        """How many of the request's blocks have keys here."""
        return tracker.num_blocks if (tracker := self._trackers.get(request_id)) else 0

    def stored_blocks(self, request_id: str) -> int:
        """How many of its first blocks need no store."""
        return tracker.stored if (tracker := self._trackers.get(request_id)) else 0

    def skipped_blocks(self, request_id: str) -> int:
        """How many blocks the server had that are not worth a load for the request."""
        return tracker.skipped if (tracker := self._trackers.get(request_id)) else 0

    def lookup(self, request_id: str, local_blocks: int, limit_blocks: int) -> int | None:
        """How many blocks after the first `local_blocks` are to be loaded, `limit_blocks` in all at
        most; None: not yet known, ask in the next step. Idempotent and free: the server is asked
        once."""
        tracker = self._trackers.get(request_id)
        if (
            tracker is None
            or not (tracker.tenant and tracker.offers)
            or local_blocks >= limit_blocks
        ):
            return 0
        if tracker.declined_after is not None and local_blocks >= tracker.declined_after:
            return 0
        left = limit_blocks - local_blocks
        if self.worth.is_too_little(left, left * self._pieces.block_tokens):
            return 0  # whatever the server has: nobody need wait for its answer
        if tracker.loads or self._is_being_loaded(tracker, local_blocks):
            return None
        keys, skip = tracker.asked or (b"", 0)
        if len(keys) < limit_blocks * KEY_BYTES or skip > local_blocks:
            keys, skip = self._ask(tracker, local_blocks, tracker.num_blocks)
        answer = self._cache.lookup(tracker.number, tracker.salt, keys, skip)
        if answer is None:
            tracker.answer = None
            # With several pieces the answer tells what of the local blocks need not be stored.
            seen = self._pieces.whole or not local_blocks
            return 0 if seen and self._cache.lacks(tracker.key(local_blocks)) else None
        if answer.failure and answer is not tracker.answer:
            self.failed_lookups += 1
        tracker.answer = answer
        usable = self._pieces.usable(answer.checksums, answer.skip, local_blocks, limit_blocks)
        # What cannot be used for lack of a piece is computed here, and offered again with the
        # pieces that it has here.
        tracker.stored = max(tracker.stored, answer.blocks if self._pieces.whole else usable)
        return usable - local_blocks if self._is_worth(tracker, local_blocks, usable) else 0

    def wait(self, request_id: str, milliseconds: int) -> None:
        """Waits for the answer to a lookup, so long at most; for an engine that has nothing else to
        do. Not while anything is loaded: the engine has to hear of that."""
        tracker = self._trackers.get(request_id)
        if tracker is not None and not self._loading:
            self._cache.wait(tracker.number, milliseconds)

    def found(
        self, request_id: str, local_blocks: int, blocks: int
    ) -> tuple[int, NDArray[np.int64]]:
        """Where the server has what `lookup` told: its epoch, and the slots of so many blocks after
        the first ones. The lease that keeps them lasts until they are loaded, or until `no_load` or
        `end`."""
        answer = self._trackers[request_id].answer
        assert answer is not None
        return answer.epoch, answer.slots[local_blocks - answer.skip :][:blocks]

    def prepare_load(self, request_id: str, local_blocks: int, block_ids: BlockIds) -> Job:
        """Loads the blocks after the `local_blocks` first ones into these, beginning with the next
        step."""
        tracker = self._trackers[request_id]
        tracker.hold(local_blocks)
        table = np.atleast_2d(np.asarray(block_ids, dtype=np.int64))
        load = tracker.load_of(local_blocks, table)
        job = self._new_job(tracker, local_blocks, table, is_load=True)
        self._loads[job.number] = load
        self.worth.begin_load(job.number, job.blocks, job.blocks * self._pieces.block_tokens)
        return job

    def take_load(self, job: Job) -> LoadRequest:
        """The load that was prepared, for an engine that makes it now and not with the step."""
        return self._loads.pop(job.number)

    def no_load(self, request_id: str) -> None:
        """The request begins without a load: what the server promised may go. An answer that nobody
        has waited for is still to tell what need not be stored."""
        tracker = self._trackers.get(request_id)
        if tracker is None or tracker.asked is None or tracker.loads:
            return
        if tracker.answer is not None or not self._pieces.whole:
            self._let_go(tracker)

    def knows_stored(self, request_id: str) -> bool:
        """Whether it is known by now how many of its first blocks need no store."""
        tracker = self._trackers.get(request_id)
        if tracker is None or tracker.asked is None or tracker.answer is not None or tracker.loads:
            return True
        if not self._cache.lacks(
            tracker.key(tracker.stored)
        ):  # else whatever the answer is, it changes nothing
            answer = self._cache.lookup(tracker.number, tracker.salt, *tracker.asked)
            if answer is None:
                return False
            self.failed_lookups += bool(answer.failure)
            tracker.stored = max(tracker.stored, answer.blocks if self._pieces.whole else 0)
        self._let_go(tracker)
        return True

    def prepare_store(
        self,
        request_id: str,
        block_ids: Sequence[int] | Callable[[int, int], NDArray[np.int64]],
        computed_blocks: int,
        *,
        at_once: bool = True,
        after_step: bool = False,
    ) -> Job | None:
        """Stores what is computed of the request's blocks and not stored, beginning with the next
        step, or at its end if that step computes it. If it need not be at once, only several
        together: each job is a round trip or two for every worker. `block_ids` are those of the
        whole request, or what gives the table of blocks start..stop-1."""
        tracker = self._trackers.get(request_id)
        if tracker is None or not (tracker.tenant and tracker.stores):
            return None
        if not self.knows_stored(request_id):
            self._let_go(
                tracker
            )  # an answer would come too late, and a lease must not last until this store is over
        if computed_blocks - tracker.stored < (1 if at_once else BLOCKS_TOGETHER):
            return None
        if computed_blocks < tracker.retry_from and not at_once:
            return None
        first = tracker.stored
        ids = (
            block_ids(first, computed_blocks)
            if callable(block_ids)
            else block_ids[first:computed_blocks]
        )
        table = np.atleast_2d(np.asarray(ids, dtype=np.int64))
        request = StoreRequest(
            tracker.tenant,
            tracker.key(first - 1),
            tracker.keys_of(first, computed_blocks),
            table.squeeze(0) if len(table) == 1 else table,
            tracker.params.priority,
            tracker.params.ttl_ms,
        )
        job = self._new_job(tracker, first, table, is_load=False, after_step=after_step)
        (self._stores_after if after_step else self._stores)[job.number] = request
        tracker.stored = computed_blocks
        return job

    def hold(self, request_id: str, blocks: int) -> None:
        """The request has its first `blocks` blocks, found in the engine's own cache or computed.
        If a preemption takes them away and they are loaded later, the cache has not given the
        request anything. Both engines say this when a request begins, and whenever it has computed
        more of its prompt."""
        if tracker := self._trackers.get(request_id):
            tracker.hold(blocks)

    def loaded_blocks(self, request_id: str) -> int:
        """How many blocks of the request's prompt the server gave it (tracker.py has the rules)."""
        return tracker.loaded if (tracker := self._trackers.get(request_id)) else 0

    def forget(self, request_id: str) -> None:
        """Nothing more of the request is loaded or stored. What it was given so far still counts
        when it ends."""
        if tracker := self._trackers.get(request_id):
            tracker.offers = tracker.stores = False
            if tracker.asked is not None and not tracker.loads:
                self._let_go(tracker)

    def end(self, request_id: str, params: object = None) -> dict[str, int] | None:
        """The request is over, whatever its state. What its `kv_transfer_params` are now; None: it
        had none. `params` are those it came with, for one that never arrived here: the cache gave
        it nothing."""
        tracker = self._trackers.pop(request_id, None)
        if tracker is None:
            return Hints.of(params).reply(0)
        tracker.ended = True
        if tracker.asked is not None and not tracker.loads:
            self._let_go(tracker)  # stores may go on for as long as the engine is idle
        self._end_session(tracker)
        return tracker.reply(self._pieces.block_tokens)

    # -- steps

    def build_step(
        self, written_blocks: Collection[int] = (), *, tokens: int = 0, requests: int = 0
    ) -> StepMetadata:
        """The jobs that were prepared since the last step, for every worker. It may write into
        these blocks, where an engine gives them to others before they are stored, and computes so
        many `tokens` of so many `requests`."""
        self.worth.begin_step(tokens, requests)
        self._recoveries.tell(more_to_come=bool(self._loading))
        withdrawn = self._readers.among(written_blocks) if written_blocks else []
        if not (self._loads or self._stores or self._stores_after or withdrawn):
            return NOTHING  # most steps
        whose = {number: self._jobs[number].request_id for number in self._loads}
        for number in self._stores_after:  # from now on they are under way
            self._readers.add(number, self._jobs[number].block_ids)
        metadata = StepMetadata(self._loads, self._stores, self._stores_after, withdrawn, whose)
        self._loads, self._stores, self._stores_after = (
            {},
            {},
            {},
        )  # only now: if it fails, loads go with the next step
        return metadata

    def drop_stores(self) -> Completed:
        """What waits for a step is not stored: one was lost, and by the next one blocks may be
        somebody else's."""
        waiting, self._stores, self._stores_after = [*self._stores, *self._stores_after], {}, {}
        dropped = [self._jobs[number] for number in waiting]
        with ExitStack() as ending:  # each job ends, also if ending another one fails
            for job in dropped:
                job.incomplete = True
                ending.callback(self._end_job, job)
        return Completed(stores=dropped)

    def complete(self, reports: Sequence[Finished]) -> Completed:
        """Takes in what workers report. A job that nobody knows is nobody's business."""
        completed = Completed()
        for report in reports:
            for number, block_ids in report.failed.items():
                job = self._jobs.get(number)  # type: ignore[call-overload]
                if job is not None:
                    job.failed.update(block_ids)
                    completed.invalid_block_ids.update(block_ids)
                    self._owners[job.number].offers = False
            for number in report.incomplete:
                job = self._jobs.get(number)  # type: ignore[call-overload]
                if job is not None:
                    job.incomplete = True
            for number in (*report.loaded, *report.stored):
                job = self._jobs.get(number)  # type: ignore[call-overload]
                if job is not None:
                    job.reports.add(report.rank)
                    if number in report.seconds:
                        job.took_s = max(job.took_s or 0.0, report.seconds[number])
                    if len(job.reports) == self._world_size:
                        self._end_job(job)
                        (completed.loads if job.is_load else completed.stores).append(job)
        self._recoveries.tell(more_to_come=bool(self._loading))
        return completed

    def close(self) -> None:
        self._cache.close()

    # -- inside

    def _ask(self, tracker: RequestState, skip: int, stop: int) -> tuple[bytes, int]:
        tracker.asked = (tracker.keys_of(0, stop), skip)
        self._cache.lookup(tracker.number, tracker.salt, *tracker.asked)
        return tracker.asked

    def _is_worth(self, tracker: RequestState, local_blocks: int, usable: int) -> bool:
        """Whether blocks local_blocks..usable-1 are loaded. If not, the server need not keep them
        for us: they are computed, and it has them already."""
        extra = usable - local_blocks
        if extra == 0 or tracker.accepted_after == local_blocks:
            return True
        tokens = extra * self._pieces.block_tokens
        if self.worth.decide(extra, tokens):
            tracker.accepted_after, tracker.declined_after, tracker.skipped = local_blocks, None, 0
            return True
        self._let_go(tracker)
        tracker.declined_after, tracker.skipped = local_blocks, extra
        self.skipped_loads += 1
        self.skipped_tokens += tokens
        return False

    def _is_being_loaded(self, tracker: RequestState, block: int) -> bool:
        key = tracker.key(block)  # it stands for all tokens up to its end: no other place has it
        return any(
            block in job.places and self._owners[number].key(block) == key
            for number, job in self._loading.items()
        )

    def _new_job(
        self,
        tracker: RequestState,
        first_block: int,
        table: NDArray[np.int64],
        *,
        is_load: bool,
        after_step: bool = False,
    ) -> Job:
        self._next_job += 1
        block_ids, blocks = table[table != NO_BLOCK].tolist(), table.shape[1]
        job = Job(
            self._next_job,
            tracker.request_id,
            first_block,
            block_ids,
            is_load,
            blocks,
            self._pieces.whole,
        )
        if not is_load and not after_step:
            self._readers.add(job.number, block_ids)
        self._jobs[job.number], self._owners[job.number] = job, tracker
        tracker.jobs += 1
        if is_load:
            tracker.loads += 1
            self._loading[job.number] = job
        return job

    def _end_job(self, job: Job) -> None:
        del self._jobs[job.number]
        self._loading.pop(job.number, None)
        tracker = self._owners.pop(job.number)
        tracker.jobs -= 1
        if not job.is_load:
            self._readers.remove(job.number)
        if job.is_load:
            tracker.loads -= 1
            self.worth.end_load(job.number, None if job.failed else job.took_s)
            good = job.good_blocks()
            tracker.count_loaded(job.first_block + good)
            if good < job.blocks and not tracker.ended:
                self._recoveries.add(job)
            if good < job.blocks:  # what the server had from there on was no good, and ours will be
                tracker.stored = min(tracker.stored, job.first_block + good)
            used = 0 if tracker.ended else good
            self._let_go(tracker, used * self._pieces.block_tokens)
        elif job.incomplete and not self._pieces.whole:
            # Windows and states of the earlier blocks are gone: without them they would be of no
            # use to anybody, and in the way of those who have them.
            tracker.stores = False
        elif job.incomplete:
            # The server was away, or is another one, or had no room. It takes no block without
            # those before it, so all are offered again; those that it has it will not take twice.
            tracker.stored = 0
            tracker.retry_from = job.first_block + job.blocks + BLOCKS_TOGETHER
        if tracker.ended:
            self._end_session(tracker)

    def _let_go(self, tracker: RequestState, loaded_tokens: int = 0) -> None:
        self._cache.release(tracker.number, loaded_tokens)
        tracker.asked = tracker.answer = tracker.accepted_after = None

    def _end_session(self, tracker: RequestState) -> None:
        """Tells the server, once the last job is over: a lease may still be read from, a block
        still be stored."""
        if tracker.jobs == 0:
            last_key = tracker.key(tracker.stored - 1)
            self._cache.finish_request(
                tracker.number, tracker.salt, last_key, tracker.params.session_finished
            )
