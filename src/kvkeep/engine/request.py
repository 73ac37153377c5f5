"""One request: what was asked, how far it is, and what it cost."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvkeep.client.hints import Hints
from kvkeep.connector.request_state import RequestState
from kvkeep.connector.step import Job
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.kv.keys import KeyChain


class Status(enum.Enum):
    """WAITING ──────────────► RUNNING ──► FINISHED
      │  ▲                │  ▲
      ▼  │                ▼  │
    LOADING            (preempted: WAITING again, with nothing computed)
    """

    WAITING = "waiting"
    LOADING = "loading"  # its prefix is on its way from the external cache
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class RequestMetrics:
    """What a request cost, and what the caches gave it."""

    arrived_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    finished_s: float | None = None
    local_cached_tokens: int = 0  # of its first admission: later ones find its own blocks
    external_cached_tokens: int = 0  # really loaded and used
    # that the external cache had, and that are computed because a load would take longer
    skipped_tokens: int = 0
    failed_loads: int = 0
    preemptions: int = 0

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_s is None else (self.first_token_s - self.arrived_s) * 1e3


@dataclass(eq=False, kw_only=True)
class Request(RequestState):
    """`tokens` are those of the prompt and all that were generated. Of them the first
    `num_computed_tokens` have their KV in `block_ids`; of those blocks the first
    `remembered_blocks` are in the prefix cache."""

    tokens: list[int]
    sampling: SamplingParams
    chain: KeyChain  # the keys of its full blocks; the salt is in their root
    salt: str | None = None
    priority: int = 0  # lower ones are served first
    kv_transfer_params: Mapping[str, Any] | None = None
    number: int = 0  # in the order of arrival
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    remembered_blocks: int = 0
    load: Job | None = None
    local_blocks: int = 0  # of this admission
    admitted: bool = False  # at least once
    finish_reason: str = ""  # "length", "stop", "abort", "error"
    error: str = ""
    reply_params: dict[str, int] | None = None  # the kv_transfer_params that go back
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    # what follows from the rest
    hints: Hints = field(init=False)
    keys: bytearray = field(init=False)
    prompt_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.chain.extend(self.tokens)
        self.hints = Hints.of(self.kv_transfer_params)
        self.keys = bytearray(self.chain.keys())
        self.prompt_blocks = max(0, self.prompt_tokens - 1) // self.chain.block_tokens
        super().__post_init__()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def order(self) -> tuple[int, int]:
        """Who is served first, and preempted last."""
        return self.priority, self.number

    def append(self, token: int) -> bytes:
        """Adds a generated token. Returns the keys of the blocks that are full with it: one or
        none."""
        known = len(self.chain)
        self.tokens.append(token)
        self.chain.extend([token])
        return self.chain.keys(known)

    def stop_reason(self) -> str:
        """Why generation ends here; empty if it does not."""
        if self.tokens[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if self.num_tokens - self.prompt_tokens >= self.sampling.max_tokens else ""
