"""The scheduler's side in vLLM: its calls in our words, its requests in our trackers.

Nothing here holds a block: vLLM may give a block to another request while it is still being stored,
and every step says which blocks it may write into, so that workers save what they have not copied
yet. Whatever is stored begins when the step that computes it is over."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.hints import Hints
from kvkeep.client.options import CONNECT_PATIENCE_MS, ClientOptions
from kvkeep.client.outage import Outage
from kvkeep.client.requests import Finished
from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.client.sources import NO_BLOCK
from kvkeep.connector.cost_model import CostModel, LoadWhen
from kvkeep.connector.group_layout import GroupLayout
from kvkeep.connector.planner import BLOCKS_TOGETHER, CachePlanner
from kvkeep.connector.step import Job
from kvkeep.kv.identity import differing_parts
from kvkeep.kv.shape import BlockShape
from kvkeep.units import format_size
from kvkeep.vllm import versions
from kvkeep.vllm.arrivals import Arrivals, Known
from kvkeep.vllm.early import EarlyRequests
from kvkeep.vllm.events import CacheEvents, event_groups
from kvkeep.vllm.groups import layout_of
from kvkeep.vllm.messages import Handshake, Step
from kvkeep.vllm.siblings import SiblingLoads, holds_one_of, keys_of_siblings
from kvkeep.vllm.stats import KVKeepStats, counts_of
from kvkeep.vllm.step_loads import StepLoads
from kvkeep.vllm.worker import WorkerSide, find_here, is_alone, may_wait

log = logging.getLogger(__name__)

_IDLE_WAIT_MS = 2  # where vLLM itself would sleep for one, and then some
_NULL_BLOCK = 0  # stands in vLLM's tables where a request needs no block


class SchedulerConnector:
    """One for each engine. Until the workers have said what blocks are like, and if they refused,
    it does nothing."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        options: ClientOptions,
        load_when: LoadWhen = "faster",
    ) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._options, self._worth = options, CostModel(load_when)
        self._side: CachePlanner | None = None
        self._worker: WorkerSide | None = None  # the only one, if it is in this process
        self._known: dict[str, Known] = {}
        self._alive: set[str] = set()  # all requests, also those that are not cached
        self._written: list[
            int
        ] = []  # blocks that the next step may write into, some of them more than once
        self._all_withdrawn = False
        self._is_idle = (
            True  # the last step computed nothing, or is over and there is no other request
        )
        self._under_way = 0  # steps whose results have not come
        self._uncounted_steps = 0  # those at most that were made before requests were cached
        self._has_waited = False  # since then, for an answer
        self._may_wait = True
        self._loaded: set[str] = set()  # requests whose loads have ended, until vLLM looks at them
        self._loaded_first = False  # the next step skips all requests that are not loaded
        self._is_reset = False  # and nothing was computed since
        self._is_refused = False  # by a worker, after vLLM had slept
        self._sleeps = 0  # of all workers
        self._lost: dict[str, list[int]] = {}
        self._handshakes: list[Handshake] = []  # as long as some are missing
        self._early = EarlyRequests()
        self._generation = b""
        self._has_siblings = False
        self._sibling_loads = SiblingLoads()
        self.keys_of_siblings: set[str] = set()  # in `kv_transfer_params`
        self._counts: Counter[str] = Counter()
        self._rank_outages: dict[int, Outage] = {}  # as those ranks report them
        self.faults = 0
        self.tables = versions.BlockTables()
        self.step_loads = StepLoads(vllm_config)
        self.events = CacheEvents(vllm_config)

    # -- start-up

    def take_handshakes(self, handshakes: Sequence[Handshake]) -> None:
        """Those that came with a step's results: one of each worker, sooner or later. After that,
        only from a worker that cannot go on."""
        if not handshakes:
            return
        if self._side is not None:
            self._refuse(sorted({each.refusal for each in handshakes if each.shape is None}))
            return
        self._handshakes += [each for each in handshakes if not each.is_pending]
        if len(self._handshakes) >= self._vllm_config.parallel_config.world_size:
            collected, self._handshakes = self._handshakes, []
            self.shake_hands(collected, patience_ms=0)
        elif any(each.is_pending for each in handshakes):
            self._wait_for_weights()

    def shake_hands(
        self, handshakes: Sequence[Handshake], patience_ms: int = CONNECT_PATIENCE_MS
    ) -> None:
        """What the workers have found out. If they agree, requests are cached from now on. vLLM
        hands it over once more when it is woken up, slept or not."""
        if self._side is not None:
            self._wake_up(handshakes)
            return
        if any(each.is_pending for each in handshakes):
            self._handshakes = [each for each in handshakes if not each.is_pending]
            self._wait_for_weights()
            return
        refusals = self._refusals(handshakes)
        if refusals:
            log.error("kvkeep: this engine is served without the cache: %s", "; ".join(refusals))
            self._early.end()
            return
        shape = handshakes[0].shape
        assert shape is not None
        self._start(shape, handshakes[0], patience_ms)

    def _wait_for_weights(self) -> None:
        """No request waits for them: until they are known the engine is served without the
        cache."""
        if not self._early.is_over:
            log.info(
                "kvkeep: the weights of %s are hashed for the first time on this host; the cache is used from then on",
                self._vllm_config.model_config.model,
            )
        self._early.end()

    def _start(self, shape: BlockShape, handshake: Handshake, patience_ms: int) -> None:
        self._pieces: GroupLayout = layout_of(self._vllm_config, self._kv_cache_config)
        block_tokens = [group.block_tokens for group in self._pieces.groups]
        tokens = versions.hash_tokens(self._kv_cache_config, block_tokens)
        self._event_groups = event_groups(self._kv_cache_config, self._pieces, tokens)
        self._adapter = SchedulerAdapter(shape, self._options)
        self._block_bytes, world_size = (
            sum(shape.shard_bytes),
            self._vllm_config.parallel_config.world_size,
        )
        policy = self._vllm_config.kv_transfer_config.kv_load_failure_policy
        side = CachePlanner(self._adapter, self._pieces, world_size, self._worth, policy)
        self._arrivals = Arrivals(self._vllm_config, shape.identity, tokens, side, self._known)
        self._arrivals.generation = self._generation
        if self._adapter.connection.wait_until_up(patience_ms):
            log.info("kvkeep: connected to %s", self._options.address)
        log.info(
            "kvkeep: identity %s: model %s, weights %s, blocks of %d tokens and %s, attention %s, keys from %s",
            *(shape.digest, shape.identity.model, shape.identity.revision[:12]),
            *(self._pieces.block_tokens, format_size(sum(shape.shard_bytes))),
            dict(shape.identity.details)["attention"],
            "vLLM's hashes" if self._arrivals.uses_hashes else "tokens",
        )
        self._side = side
        self._has_siblings = bool(handshake.siblings)
        self.keys_of_siblings = keys_of_siblings(handshake.siblings)
        self._worker = find_here(handshake.name) if world_size == 1 else None
        if self._worker is not None:
            self._worker.join()
            if not patience_ms:  # a step or two are under way that were not counted
                self._is_idle, self._uncounted_steps = False, 2
        # When a step begins vLLM zeroes new blocks of some models, and other connectors read what
        # they have to store.
        zeroes = getattr(self._kv_cache_config, "needs_kv_cache_zeroing", True)
        may_load_in_step = is_alone(self._worker) and self._pieces.whole and not zeroes
        self._may_wait = may_wait(self._vllm_config)
        self.step_loads.worker = self._worker if may_load_in_step and self._may_wait else None

    def _refusals(self, handshakes: Sequence[Handshake]) -> list[str]:
        refusals = {each.refusal for each in handshakes if each.shape is None}
        shapes = [each.shape for each in handshakes if each.shape is not None]
        others = [shape for shape in shapes[1:] if shape.fingerprint != shapes[0].fingerprint]
        refusals |= {_difference(shapes[0], other) for other in others}
        if len(handshakes) != self._vllm_config.parallel_config.world_size:
            refusals.add("not all of its workers said how they keep KV")
        return sorted(refusals)

    def _wake_up(self, handshakes: Sequence[Handshake]) -> None:
        """The workers' memory was taken away and is there again. Before that vLLM resets its prefix
        cache and, with `reset_cache`, this connector: while it sleeps its weights may be replaced
        (always at level 2, and at level 1 by whoever trains them), and no key would tell. So what
        was stored before is not found any more. Should vLLM not have asked for that, it happens
        here."""
        sleeps = sum(each.sleeps for each in handshakes)
        if sleeps != self._sleeps and not self._is_reset:
            self.reset()
        self._sleeps = sleeps
        self._refuse(self._refusals(handshakes))

    def _refuse(self, reasons: Sequence[str]) -> None:
        """If there are any: no request is cached any more."""
        if reasons:
            self._is_refused = True
            log.error(
                "kvkeep: from now on this engine is served without the cache: %s",
                "; ".join(reasons),
            )
            self._forget(*self._known)

    # -- a request's way

    def arrive(self, request: Any) -> None:
        self._alive.add(request.request_id)
        if self._is_refused:
            return
        if self._side is None or self._early:
            self._early.hold(request)
        else:
            self._arrivals.arrive(request)

    def _is_starting(self) -> bool:
        """Whether requests that came before the handshakes still wait for them, or for the first
        connection."""
        is_ready = self._side is not None and not self._adapter.connection.coming_up
        if not is_ready and self._early.may_wait():
            return True
        for request in self._early.end():
            if self._side is not None:
                self._arrivals.arrive(request)
        return False

    def lookup(self, request: Any, local_tokens: int) -> int | None:
        """How many tokens after the first `local_tokens` can be loaded; None: not known yet, or
        vLLM is to skip the request in this step."""
        self._loaded.discard(request.request_id)
        if self._loaded_first:
            return None
        if self._early and self._is_starting():
            return None
        known = self._known.get(request.request_id)
        if self._side is None or known is None:
            return 0
        known.local_tokens, known.asked_in = local_tokens, self._sibling_loads.step
        if not self._arrivals.grow(known):
            return 0
        self._is_idle |= not (self._under_way or self._uncounted_steps) and len(self._alive) == 1
        if self._is_idle and self._worker is not None and self._side.stores:
            self._take_in(self._worker.stores_handed_over(), counted=False)
        known.in_step = self._may_load_in_step(known)
        # Of a prompt that is there as a whole one token is computed, not a block: that is a step of
        # decoding, for which vLLM has a CUDA graph. Where there are windows or states, what the
        # last token begins with must be computed.
        limit = (request.num_tokens - (not self._pieces.whole)) // self._pieces.block_tokens
        blocks = local_tokens // self._pieces.block_tokens
        found = self._side.lookup(request.request_id, blocks, limit)
        if found is None and self._is_idle and self._may_wait and not self._has_waited:
            self._has_waited = True
            self._side.wait(request.request_id, _IDLE_WAIT_MS)
            found = self._side.lookup(request.request_id, blocks, limit)
        if not found:
            return found
        known.in_step &= self.step_loads.is_short(
            self._worth.expected_s(found), found * self._block_bytes
        )
        if known.in_step:
            self.step_loads.fetch_ahead(
                request.request_id, *self._side.found(request.request_id, blocks, found)
            )
        # In the background vLLM leaves the last token out of its own accord.
        most: int = request.num_tokens - known.in_step
        return min((blocks + found) * self._pieces.block_tokens, most) - local_tokens

    def loads_in_step(self, request: Any) -> bool:
        """Whether what was found is there when the step begins, so that vLLM need not wait for
        it."""
        return request.request_id in self._known and self._known[request.request_id].in_step

    def _may_load_in_step(self, known: Known) -> bool:
        """It is the only one, nothing is loaded, stored or computed, and vLLM itself brings no part
        of a block."""
        alone = (
            self._is_idle and len(self._alive) == 1 and self._side is not None and self._side.idle
        )
        return (
            alone
            and not known.local_tokens % self._pieces.block_tokens
            and self.step_loads.may_load(known.request)
        )

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], loaded_tokens: int) -> None:
        """vLLM has given the request all these blocks, and waits for a load if that is to bring any
        tokens."""
        self._early.drop(request.request_id)
        self._loaded.discard(request.request_id)
        if self._side is None:
            return
        known = self._known.get(request.request_id)
        try:
            self.tables.allocated(request.request_id, tables)
            computed = request.num_computed_tokens or (known.local_tokens if known else 0)
            for table, group in zip(tables, self._pieces.groups, strict=True):
                self._written += table[computed // group.block_tokens :]
            if loaded_tokens:
                assert known is not None
                job = self._prepare_load(known, tables, loaded_tokens)
                if known.in_step:
                    self._load_in_step(job, known, tables)
            else:
                self.step_loads.drop_ahead()
                if known is not None:
                    self._arrivals.hold(known, known.local_tokens)
                self._side.no_load(request.request_id)
        except Exception:
            # guard: vLLM waits for this load; it must hear of it, and it hears that it failed
            self._failed("kvkeep: a load could not be prepared")
            self._all_withdrawn = True
            if loaded_tokens:
                first = (known.local_tokens if known else 0) // self._pieces.block_tokens
                rows = self._pieces.rows(tables, first, max(map(len, tables)), _NULL_BLOCK)
                lost = rows[rows != NO_BLOCK].tolist()
                if known is not None and known.in_step:
                    self.step_loads.fell_short(request, known.local_tokens, lost)
                else:
                    self._lost[request.request_id] = lost
                self._forget(
                    request.request_id
                )  # or vLLM asks again, is offered the same, and so on for ever

    def _prepare_load(
        self, known: Known, tables: Sequence[Sequence[int]], loaded_tokens: int
    ) -> Job:
        assert self._side is not None
        first = known.local_tokens // self._pieces.block_tokens
        stop = -(-(known.local_tokens + loaded_tokens) // self._pieces.block_tokens)
        is_whole = known.local_tokens + loaded_tokens == stop * self._pieces.block_tokens
        assert is_whole or known.in_step, "vLLM takes what it was offered, or nothing"
        rows = self._pieces.rows(tables, first, stop, _NULL_BLOCK)
        rows = self._pieces.without_tokens(rows, known.local_tokens, first)
        job = self._side.prepare_load(known.request.request_id, first, rows)
        self._note(job, known)
        self._counts["hit_tokens"] += loaded_tokens
        return job

    def _load_in_step(self, job: Job, known: Known, tables: Sequence[Sequence[int]]) -> None:
        """Now, and waits for it: the engine has nothing else to do."""
        assert self._side is not None
        self._take_in([self.step_loads.load_now(self._side, job)], counted=False)
        if job.failed:
            there = job.first_block + job.good_blocks()
            self.step_loads.fell_short(
                known.request, there * self._pieces.block_tokens, list(tables[0][there:])
            )

    def end(self, request: Any) -> dict[str, Any] | None:
        """The request is over. What its `kv_transfer_params` are now."""
        known = self._known.pop(request.request_id, None)
        self._alive.discard(request.request_id)
        self._loaded.discard(request.request_id)
        self._early.drop(request.request_id)
        self.step_loads.drop_ahead()
        if self._side is None:
            return Hints.of(request.kv_transfer_params).reply(0)
        try:
            # The last token's place may hold the KV of a guess that was wrong.
            computed = min(
                request.num_computed_tokens, max(request.num_prompt_tokens, request.num_tokens - 1)
            )
            if known is not None and computed:
                self._store(known, computed, after_step=False)
        except Exception:
            # guard: whatever becomes of a store, the request is over, and so is what it holds
            self._failed("kvkeep: a store could not be prepared")
        self.tables.forget(request.request_id)
        return self._side.end(request.request_id, request.kv_transfer_params)

    # -- steps

    def build_step(self, scheduled: Any) -> Step:
        try:
            self.step_loads.drop_ahead()
            self.step_loads.correct(scheduled)
            return Step() if self._side is None else self._build_step(self._side, scheduled)
        except Exception:
            # guard: raised again; it is computed, and nobody knows any more which blocks are whose
            self._is_idle, self._under_way = False, self._under_way + 1
            if self._side is not None:
                self.events.completed(self._side.drop_stores())
            self._forget(*self._known)
            raise
        finally:
            self._sibling_loads.build_step()

    def _build_step(self, side: CachePlanner, scheduled: Any) -> Step:
        cached = scheduled.scheduled_cached_reqs
        for request_id, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if more is not None and request_id not in cached.resumed_req_ids:
                self.tables.grown(request_id, more)
                self._written += chain(*more)
        # States that vLLM copies for itself go into blocks that no table shows.
        if scheduled.kv_cache_block_copies:
            self._written += (copy.dst_block_id for copy in scheduled.kv_cache_block_copies)
        self._written += scheduled.new_block_ids_to_zero or ()
        work = scheduled.num_scheduled_tokens
        is_new = bool(scheduled.scheduled_new_reqs or cached.resumed_req_ids)
        if is_new and self._has_siblings:
            self._look_for_sibling_loads(work)
        self._store_computed(work)
        jobs = side.build_step(
            self._written, tokens=scheduled.total_num_scheduled_tokens, requests=len(work)
        )
        self._is_idle = not (scheduled.total_num_scheduled_tokens or self._uncounted_steps)
        self._has_waited = False
        self._is_reset &= self._is_idle
        self._under_way += 1
        # Before 0.32, vLLM's scan of waiting requests stops at the first one that does not fit. If
        # that one needs blocks that loaded requests behind it hold, nothing is ever computed again.
        # While that lasts, `lookup` makes vLLM skip every request that it asks about in every other
        # step, so that the scan reaches the loaded ones.
        self._loaded_first = self._is_idle and bool(self._loaded) and not self._loaded_first
        step = Step(jobs, self._lost, self._all_withdrawn, self._is_idle)
        self._written, self._lost, self._all_withdrawn = [], {}, False
        return step

    def _store_computed(self, work: Mapping[str, int]) -> None:
        """Prepares the stores of what a step computes that computes so many tokens of each
        request."""
        for request_id, count in work.items():
            known = self._known.get(request_id)
            if (
                known is None
                or (computed := known.request.num_computed_tokens + count) < known.next_store
            ):
                continue
            try:
                self._arrivals.hold(known, computed)
                self._store(known, computed, after_step=True)
            except Exception:
                # guard: the others' blocks are stored, and loads that vLLM waits for go out
                self._failed("kvkeep: a store could not be prepared")
                self._forget(request_id)

    def complete(self, reports: Sequence[Finished]) -> set[str]:
        """A step has ended, and this came with its results. Requests whose loads have ended
        besides, all of them well: vLLM has not been told."""
        if self._uncounted_steps:  # they were made first, so they end first
            self._uncounted_steps -= 1
        else:
            self._under_way = max(0, self._under_way - 1)
        if self._side is None:
            return set()
        arrived, more = self._worker.hand_over() if self._worker is not None else (set(), [])
        try:
            for some, counted in ((more, False), (reports, True)):
                if some:
                    self._take_in(some, counted=counted)
        except Exception:  # guard: vLLM waits for what has arrived, and nobody would tell it again
            self._failed("kvkeep: the results of a step could not be taken in")
        return arrived

    def tell_loaded(self, request_ids: Collection[str]) -> None:
        """These requests' loads have ended, well or not, and vLLM reads that next."""
        self._loaded |= self._alive & set(request_ids)

    def _take_in(self, reports: Sequence[Finished], *, counted: bool = True) -> None:
        """`counted`: in the worker's own statistics."""
        assert self._side is not None
        self._counts.update({} if counted else counts_of(reports))
        completed = self._side.complete(reports)
        self._counts["loaded_blocks"] += sum(job.good_blocks() for job in completed.loads)
        self.events.completed(completed)

    def _store(self, known: Known, computed_tokens: int, *, after_step: bool) -> None:
        """Stores what is computed by now, or by the end of the step. Tokens that are only guessed
        have no key yet."""
        assert self._side is not None
        request_id, pieces = known.request.request_id, self._pieces
        if self._sibling_loads.may_have_failed:
            return  # the next step looks again
        if not self._arrivals.grow(known) or (
            not self._side.knows_stored(request_id) and after_step
        ):
            return  # in the latter case the next step looks again
        # Old blocks of a window and old states are gone soon: only full attention can wait for
        # company.
        at_once = (
            not pieces.whole or not after_step or computed_tokens <= known.request.num_prompt_tokens
        )
        blocks = min(computed_tokens // pieces.block_tokens, self._side.known_blocks(request_id))
        stored = self._side.stored_blocks(request_id)
        # Of a prompt every new block is heard of, also where there is nothing to store
        # (CachePlanner.hold).
        is_prompt = computed_tokens < known.request.num_prompt_tokens
        together = BLOCKS_TOGETHER if pieces.whole else 1
        known.next_store = (
            blocks + 1 if is_prompt else max(blocks, stored) + together
        ) * pieces.block_tokens
        if blocks <= stored:
            return

        def rows(start: int, stop: int) -> NDArray[np.int64]:
            table = pieces.rows(self.tables.of(request_id), start, stop, _NULL_BLOCK)
            return table if pieces.whole else pieces.without_states(table, computed_tokens, start)

        job = self._side.prepare_store(
            request_id, rows, blocks, at_once=at_once, after_step=after_step
        )
        if job is not None:
            self._note(job, known)

    # -- siblings

    def _look_for_sibling_loads(self, work: Iterable[str]) -> None:
        """A request that has tokens which neither vLLM nor we had, in the step that asked for them,
        has them loaded by a sibling in that step. What a sibling loads in the background is there,
        or known to have failed, before its request is scheduled."""
        asked = (known for name in work if (known := self._known.get(name)))
        asked = (known for known in asked if known.asked_in == self._sibling_loads.step)
        if any(known.request.num_computed_tokens > known.local_tokens for known in asked):
            self._sibling_loads.load_in_step()

    def distrust(self, block_ids: Collection[int] | None, reports: Sequence[Finished]) -> None:
        """Loads of these blocks failed, by our own reports or by siblings. What a sibling left in a
        block, and what was computed from that, is not stored."""
        if not block_ids or not self._has_siblings:
            return
        own = {each for report in reports for failed in report.failed.values() for each in failed}
        theirs = set(block_ids) - own
        if theirs:
            self._forget(
                *[name for name in self._known if holds_one_of(self.tables.of(name), theirs)]
            )

    # -- the rest

    def reset(self) -> bool:
        """Nothing that was stored so far is found again by this engine, nor by others what it
        stores from now on: whoever asks for this may have changed the weights."""
        self._generation = os.urandom(16)
        if self._side is not None:
            self._arrivals.generation = self._generation
        self._is_reset = True
        self._forget(*self._known)
        self.events.reset()
        return True

    def hear_outages(self, outages: Mapping[int, tuple[str, str] | None]) -> None:
        """Ranks have lost the server, or found it again. That is said here once, and not again if
        the scheduler's own connection has said it."""
        for rank, trouble in outages.items():
            outage = self._rank_outages.setdefault(rank, Outage(self._options.address))
            if trouble is not None:
                outage.begin(*trouble)
            elif outage.told:
                outage.end()

    def stats(self) -> KVKeepStats | None:
        """vLLM asks for them at the end of each step, also of one without any news; nothing else
        tells of that."""
        self._sibling_loads.end_step()
        if (side := self._side) is None:
            return None
        side.worth.end_step()
        if self._arrivals.lookups or side.failed_lookups or side.skipped_loads:
            self._counts.update(lookups=self._arrivals.lookups, lookup_failures=side.failed_lookups)
            self._counts.update(
                skipped_loads=side.skipped_loads, skipped_tokens=side.skipped_tokens
            )
            self._arrivals.lookups = side.failed_lookups = side.skipped_loads = (
                side.skipped_tokens
            ) = 0
        if not any(self._counts.values()):  # most steps
            return None
        counts, self._counts = +self._counts, Counter()
        answering = self._adapter.connection.answering and (
            self._worker is None or self._worker.is_answered
        )
        return KVKeepStats.of(**counts, connected=int(answering), **self._worth.figures())

    def close(self) -> None:
        if self._side is not None:
            self._side.close()

    def _failed(self, message: str) -> None:
        log.exception(message)
        self.faults += 1

    def _note(self, job: Job, known: Known) -> None:
        try:
            self.events.prepared(job, known.request, self._event_groups)
        except Exception:
            # guard: the job goes out with the next step, whether or not there is an event of it
            self._failed("kvkeep: the event of a job could not be noted")

    def _forget(self, *request_ids: str) -> None:
        self.step_loads.drop_ahead()
        for request_id in request_ids:
            self._arrivals.forget(request_id)


def _difference(one: BlockShape, other: BlockShape) -> str:
    """Why two ranks of one engine cannot hold parts of the same blocks."""
    here, there = one.parts, other.parts
    differs = [
        f"{name} ({here.get(name)} | {there.get(name)})" for name in differing_parts(here, there)
    ]
    return f"its ranks do not agree on {', '.join(differs)}"
