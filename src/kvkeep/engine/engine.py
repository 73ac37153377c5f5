"""The engine: requests go in, steps run, answers come out. `LLM` is the door for users; this is
what is behind it."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.connector.cost_model import CostModel
from kvkeep.connector.group_layout import CacheGroup, GroupLayout
from kvkeep.connector.planner import CachePlanner
from kvkeep.connector.request_trace import start_tracing
from kvkeep.engine.backends import CacheBackend
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.models.model import Model
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.request import Request
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.step import Step
from kvkeep.engine.workers import Workers
from kvkeep.errors import RequestError
from kvkeep.kv.keys import KeyChain, root_key

_PAUSE_S = 0.0002
_FLUSH_TIMEOUT_S = 10.0


class Engine:
    """One model on its workers, with a scheduler and perhaps an external cache. Call `step` until
    `busy` is False."""

    def __init__(
        self, model: Model, config: EngineConfig | None = None, backend: CacheBackend | None = None
    ) -> None:
        self.config = config or EngineConfig()
        tracing = start_tracing(backend is not None and backend.tracing)
        self.workers = Workers(model, self.config, backend)
        self.backend = backend
        planner = None
        if backend is not None:
            cache = backend.lookup_side(self.workers.shape)
            layout = GroupLayout([CacheGroup("full", self.config.block_tokens)])
            costs = CostModel(backend.load_when, loads_in_step=self.config.sync_loads)
            policy = self.config.kv_load_failure_policy
            ranks = self.config.world_size
            planner = CachePlanner(cache, layout, ranks, costs, policy, tracing)
            backend.connect()
        self.scheduler = Scheduler(self.config, planner)
        # whether the last step computed nothing: everybody waits for a lookup or a load
        self.waits = False
        # a step has failed, and what follows from that was not done to the end
        self._is_torn = False
        self._requests: dict[str, Request] = {}
        self._numbers = itertools.count()

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._requests)

    @property
    def has_jobs(self) -> bool:
        """Whether blocks are on their way from or to the external cache."""
        return self.scheduler.planner is not None and not self.scheduler.planner.idle

    def add(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        salt: str | None = None,
        priority: int = 0,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> Request:
        """Takes a request. RequestError, naming the field, for one that cannot be served; nothing
        has changed then."""
        name = self._new_name() if request_id is None else request_id
        if not isinstance(name, str):
            raise RequestError(
                "bad_request", f"a request's id is a text, not {name!r}", field="request_id"
            )
        if name in self._requests and not self._requests[name].finish_reason:
            raise RequestError(
                "duplicate", f"a request {name!r} is being served", field="request_id"
            )
        if type(priority) is not int:
            raise RequestError(
                "bad_request", f"priority must be an integer, not {priority!r}", field="priority"
            )
        if sampling is not None and not isinstance(sampling, SamplingParams):
            problem = f"sampling is a {type(sampling).__name__}"
            raise RequestError(
                "bad_sampling", problem, field="sampling", hint="pass a SamplingParams"
            )
        checked = self._check_tokens(tokens)
        chain = KeyChain(root_key(self.workers.shape.identity, salt), self.config.block_tokens)
        request = Request(
            request_id=name,
            tokens=checked,
            sampling=sampling or SamplingParams(),
            chain=chain,
            salt=salt,
            priority=priority,
            kv_transfer_params=kv_transfer_params,
        )
        self._requests[name] = request
        try:
            self.scheduler.add(request)
        except BaseException:  # guard: whoever was refused, or interrupted, is not being served
            del self._requests[name]
            raise
        return request

    def abort(self, request_id: str) -> None:
        """Ends a request now. One that is not there, or not any more, is none to end."""
        request = self._requests.get(request_id)
        if request is not None:
            self.scheduler.abort(request)

    def step(self) -> list[Request]:
        """Runs one step. Returns the requests that have ended."""
        if self._is_torn:
            self._mend(None)
        running: Step | None = None  # while workers are at it
        try:
            step = running = self.scheduler.schedule()
            output = self.workers.run(step)
            running = None
            self.scheduler.update_from_output(step, output)
            self.workers.forget_reports()
        except BaseException:
            # guard: whatever it is (no memory, Ctrl-C), what the step was to compute is not there
            self._is_torn = True
            self._mend(running)
            raise
        self.waits = not step.segments
        for request in self.scheduler.finished:
            # its id may be somebody else's after an abort
            if self._requests.get(request.request_id) is request:
                del self._requests[request.request_id]
        return self.scheduler.take_finished()

    def _mend(self, running: Step | None) -> None:
        """A step has failed: on the workers, or, with None, while it was made or its outcome was
        taken in."""
        if running is not None:
            self.scheduler.undo(running)
        else:
            self.scheduler.start_over(self._requests.values())
        if self.scheduler.planner is not None:
            self.workers.give_up(self.scheduler.planner.handed_out)
        self._is_torn = False

    def pause(self) -> None:
        """For whoever runs steps in a loop: lets others work while every request waits for the
        cache."""
        if self.waits:
            time.sleep(_PAUSE_S)

    def flush(self, timeout_s: float = _FLUSH_TIMEOUT_S) -> bool:
        """Waits until everything that was computed is stored. False if that takes too long."""
        deadline = time.monotonic() + timeout_s
        while self.has_jobs and time.monotonic() < deadline:
            self.step()
            self.pause()
        return not self.has_jobs

    def close(self) -> None:
        """Ends what is unfinished, stores what is computed, and lets go of the cache."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self.flush()
        self.workers.close()
        if self.scheduler.planner is not None:
            self.scheduler.planner.close()
        if self.backend is not None:
            self.backend.close()

    def check_integrity(self) -> None:
        """Raises AssertionError if the engine contradicts itself. Between steps only."""
        self.scheduler.check_integrity()

    def _new_name(self) -> str:
        """One that no user has chosen."""
        return next(
            name for number in self._numbers if (name := f"request-{number}") not in self._requests
        )

    def _check_tokens(self, tokens: Sequence[int]) -> list[int]:
        vocab_size = self.workers.model.vocab_size
        try:
            checked = [operator.index(token) for token in tokens]  # numpy's integers too
            flawed = any(isinstance(token, bool) for token in tokens)
        except TypeError:
            flawed = True
        if flawed:
            hint = "generate takes a list of prompts, each a list of integers"
            raise RequestError(
                "bad_tokens", "a prompt is a list of token ids", field="prompt", hint=hint
            )
        if not checked:
            raise RequestError(
                "bad_tokens", "the prompt is empty", field="prompt", hint="send at least one token"
            )
        if min(checked) < 0 or max(checked) >= vocab_size:
            wrong = next(at for at, token in enumerate(checked) if not 0 <= token < vocab_size)
            problem = f"number {wrong} of the prompt is no token of this model"
            raise RequestError(
                "bad_tokens", problem, field="prompt", hint=f"there are 0 to {vocab_size - 1}"
            )
        return checked
