"""From logits to the next token.

Sampling is a pure function of (seed, position, logits): what else was in the batch, in which order,
and whether the request was preempted and computed again leave no trace. The noise is drawn on the
CPU in float64, so it is the same on every machine."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from kvkeep.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 1e6
MAX_TOKENS = 2**31


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it ends. RequestError, naming the field, for a
    bad value.

    temperature     0 takes the likeliest token; above, the higher the more even
    seed            left out, a random one is drawn here, once: a request computed again gives the same tokens, and
                    requests that are to differ each need params of their own
    top_k           only so many of the likeliest tokens may be drawn, and those level with the last of them
    stop_token_ids  the request ends after one of these
    """

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int | None = None
    top_k: int | None = None
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, least=1, most=MAX_TOKENS)
        if (
            type(self.temperature) not in (int, float)
            or not 0 <= self.temperature <= MAX_TEMPERATURE
        ):
            raise _refusal("temperature", f"must be a number from 0 to {MAX_TEMPERATURE:g}")
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbits(63))  # frozen to everybody else
        _check_int("seed", self.seed, least=0, most=MAX_SEED)
        if self.top_k is not None:
            _check_int("top_k", self.top_k, least=1, most=MAX_TOKENS)
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Sequence):
            raise _refusal(
                "stop_token_ids", f"must be a list of token ids, not {self.stop_token_ids!r}"
            )
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, least=0, most=MAX_TOKENS)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


def sample(logits_row: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The token at `position` of the request, given the logits [vocab_size] after the tokens before
    it."""
    if params.temperature == 0:
        return int(logits_row.argmax())
    logits = logits_row.to("cpu", torch.float64)
    # With the likeliest at 0, a tiny temperature drives the others to -inf, and none to inf.
    scores = (logits - logits.max()) / params.temperature
    if params.top_k is not None and params.top_k < len(scores):
        least = scores.topk(params.top_k).values[-1]
        scores = scores.masked_fill(scores < least, -math.inf)
    # Adding Gumbel noise and taking the largest draws from softmax(scores) exactly.
    noise = -torch.log(
        -torch.log(
            torch.rand(len(scores), generator=_generator(params, position), dtype=torch.float64)
        )
    )
    return int((scores + noise).argmax())


def _generator(params: SamplingParams, position: int) -> torch.Generator:
    digest = blake2b(
        f"{params.seed} {position}".encode(), digest_size=8, person=b"kvkeep.sample"
    ).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") & MAX_SEED)


def _check_int(field: str, value: object, *, least: int, most: int) -> None:
    if type(value) is int and value > most:  # not quoted: it may have too many digits to be printed
        raise _refusal(field, f"is more than {most}")
    # a bool is an int to isinstance, and a mistake here
    if type(value) is not int or value < least:
        raise _refusal(field, f"must be an integer of at least {least}, not {value!r}")


def _refusal(field: str, problem: str) -> RequestError:
    return RequestError("bad_sampling", f"sampling: {field} {problem}", field=field)
