"""What is sent to an engine under load: prompts of random tokens, the same for every connector.

    mixed           prefix 0 + own │ all its own │ prefix 1 + own │ all its own │ prefix 2 + own │ …
    fresh           all its own    │ all its own │ …                                  as long as those of mixed
    decode_loads    a few short prompts with long answers, and meanwhile, at a steady pace, large prefix + own
    decode_stores   the same, and meanwhile large prompts that are all their own

Prefixes come back in turns. What is sent between two requests with the same prefix is more than the
engine has blocks for, so that its own cache has lost the prefix by then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvkeep.bench.vllm_setup import ServedModel
from kvkeep.units import MIB
from kvkeep_lab.bench.vllm_lanes import Lane

_GRAIN_TOKENS = 32  # prefixes end with a block, on a CPU and on a GPU
_WARM_ANSWER_TOKENS = 8  # together with the prompt's last token less than a block
_POOL_SPARE = 1.5  # for peers that evict before their memory is full
# what comes between a prefix and its return, as a multiple of what the engine holds
_LOST_SPARE = 1.5
_STRIDE = 5  # from one request's length to that of the next with a prefix
_DECODED_TOKENS = 1024  # of an answer, in some 20 s
_PROMPTS, _PREFIXES, _LARGE_PREFIXES, _DECODERS, _LARGE = range(5)  # kinds of random numbers


@dataclass(frozen=True)
class Sizes:
    """
    at_a_time                  requests under way, half of them with one of `prefixes` prefixes
    shortest_tokens, longest   of a prompt; its last `own_tokens` are new in any case
    answer_tokens              from, to
    engine_tokens              what the engine's KV memory holds, far less than comes between a prefix and its return
    batch_tokens               what it computes in a step at most

    decoders                   requests that decode all the time: so many, of
    decoder_tokens             a prompt, and an answer of
    decoder_answer_tokens
    large_tokens               of the prompts that come every `every_s`, with one of `large_prefixes` or without
    """

    at_a_time: int
    shortest_tokens: int
    longest_tokens: int
    own_tokens: int
    answer_tokens: tuple[int, int]
    prefixes: int
    engine_tokens: int
    batch_tokens: int
    decoders: int
    decoder_tokens: int
    decoder_answer_tokens: int
    large_tokens: int
    large_prefixes: int
    every_s: float

    @property
    def most_tokens(self) -> int:
        """Of a prompt with its answer."""
        longest = self.longest_tokens + self.answer_tokens[1]
        return max(longest, self.decoder_tokens + self.decoder_answer_tokens)

    @property
    def lost_after_tokens(self) -> int:
        """An engine that holds no more than this has lost a prefix when it comes back."""
        return int(2 * sum(self.lengths()) / _LOST_SPARE)

    def least_engine_tokens(self, decodes: bool) -> int:
        """An engine must hold one request; if it decodes, those that do, and the large prefixes in
        its own cache."""
        if not decodes:
            return self.most_tokens
        decoding = self.decoders * (
            self.decoder_tokens + min(self.decoder_answer_tokens, _DECODED_TOKENS)
        )
        return max(self.most_tokens, decoding + (self.large_prefixes + 1) * self.large_tokens)

    def fewer_prefixes(self) -> Iterator[int]:
        """From so many down, those with which all lengths come in turns."""
        return (prefixes for prefixes in range(self.prefixes, 1, -1) if prefixes % _STRIDE)

    def lengths(self) -> list[int]:
        """Of one prompt for each prefix: as many between 4,000 and 8,000 as between 8,000 and
        16,000."""
        at = (np.arange(self.prefixes) + 0.5) / self.prefixes
        lengths = self.shortest_tokens * (self.longest_tokens / self.shortest_tokens) ** at
        return [_whole(length) for length in lengths]


SIZES = {
    "cpu": Sizes(8, 200, 800, 32, (16, 32), 8, 3072, 1024, 4, 32, 256, 512, 2, 1.0),
    "cuda": Sizes(32, 4000, 16000, 256, (64, 128), 16, 160_000, 8192, 16, 128, 4096, 8192, 4, 0.25),
}


def _whole(tokens: float) -> int:
    return round(tokens / _GRAIN_TOKENS) * _GRAIN_TOKENS


@dataclass(frozen=True)
class Traffic:
    """Prompts are made from their place, so a longer lane begins as a shorter one."""

    sizes: Sizes
    model: ServedModel

    # -- stored before it is measured

    def prefixes(self) -> Lane:
        """Each prefix once. The last token of a prompt is always computed, so there is one more."""
        prompts = [[*self._prefix(at), 0] for at in range(self.sizes.prefixes)]
        return Lane(prompts, [_WARM_ANSWER_TOKENS] * len(prompts), self.sizes.at_a_time)

    def large_prefixes(self) -> Lane:
        prompts = [[*self._large_prefix(at), 0] for at in range(self.sizes.large_prefixes)]
        return Lane(prompts, [_WARM_ANSWER_TOKENS] * len(prompts), 1)

    # -- measured

    def requests(self, scenario: str, turn: int, count: int) -> Lane:
        """`mixed` or `fresh`. An answer's length is the same in both."""
        prompts, answers = [], []
        for at in range(count):
            rng = np.random.default_rng([_PROMPTS, int(scenario == "mixed"), turn, at])
            prefix = (
                self._prefix(at // 2 % self.sizes.prefixes)
                if scenario == "mixed" and at % 2 == 0
                else []
            )
            prompts.append(prefix + self._tokens(rng, self._length(at) - len(prefix)))
            answers.append(
                int(
                    np.random.default_rng([turn, at]).integers(
                        *self.sizes.answer_tokens, endpoint=True
                    )
                )
            )
        return Lane(prompts, answers, self.sizes.at_a_time)

    def reused_tokens(self, scenario: str, count: int) -> int:
        """What could be found of the first so many prompts."""
        if scenario == "mixed":
            return sum(self._length(at) - self.sizes.own_tokens for at in range(0, count, 2))
        return (
            count * (self.sizes.large_tokens - self.sizes.own_tokens)
            if scenario == "decode_loads"
            else 0
        )

    def decode(self, scenario: str, turn: int, seconds: float) -> list[Lane]:
        """Those that decode, and the large prompts that arrive meanwhile; `scenario` is one of the
        two kinds."""
        sizes = self.sizes
        rng = np.random.default_rng([_DECODERS, turn])
        short = [
            self._tokens(rng, sizes.decoder_tokens)
            for _ in range(sizes.decoders * (1 + int(seconds)))
        ]
        large = []
        for at in range(int(seconds / sizes.every_s) + 1):
            prefix = (
                self._large_prefix(at % sizes.large_prefixes) if scenario == "decode_loads" else []
            )
            rng = np.random.default_rng([_LARGE, int(scenario == "decode_loads"), turn, at])
            large.append(prefix + self._tokens(rng, sizes.large_tokens - len(prefix)))
        return [
            Lane(short, [sizes.decoder_answer_tokens] * len(short), sizes.decoders),
            Lane(
                large, [1] * len(large), every_s=sizes.every_s, is_new=scenario == "decode_stores"
            ),
        ]

    # -- memory

    @property
    def pool_bytes(self) -> int:
        """Enough that of all that comes between a prefix and its return nothing is evicted."""
        tokens = 2 * sum(self.sizes.lengths()) + self.sizes.at_a_time * self.sizes.answer_tokens[1]
        return int(_POOL_SPARE * tokens) * self.model.kv_token_bytes + 256 * MIB

    @property
    def decode_pool_bytes(self) -> int:
        tokens = 4 * self.sizes.large_prefixes * self.sizes.large_tokens
        return int(_POOL_SPARE * tokens) * self.model.kv_token_bytes + 256 * MIB

    # -- tokens

    def _length(self, at: int) -> int:
        """Pairs of a reused and a fresh prompt are as long as each other; neighbouring pairs are
        not."""
        lengths = self.sizes.lengths()
        return lengths[at // 2 * _STRIDE % len(lengths)]

    def _prefix(self, at: int) -> list[int]:
        length = self._length(2 * at) - self.sizes.own_tokens
        return self._tokens(np.random.default_rng([_PREFIXES, at]), length)

    def _large_prefix(self, at: int) -> list[int]:
        length = self.sizes.large_tokens - self.sizes.own_tokens
        return self._tokens(np.random.default_rng([_LARGE_PREFIXES, at]), length)

    def _tokens(self, rng: np.random.Generator, count: int) -> list[int]:
        tokens: list[int] = rng.integers(0, self.model.vocab_size, count).tolist()
        return tokens
