"""The oracle says yes to right bytes wherever they lie, and no to every wrong one: what all engine
tests rest on."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import pytest
import torch

from kvkeep.engine.models.model import Model, Rank, Segment
from kvkeep.errors import SettingsError
from kvkeep_lab.simulation import oracle
from kvkeep_lab.simulation.oracle import OracleModel, WrongBytes

BLOCK_TOKENS = 4
NUM_BLOCKS = 24

# heads or latent, TP, PP
CUTS = [
    (heads, tp_size, pp_size)
    for heads, tp_sizes in [(4, (1, 2, 4, 8)), (1, (1, 2)), (6, (1, 3)), ("mla", (1, 2, 4, 8))]
    for tp_size in tp_sizes
    for pp_size in (1, 2)
]


def model_of(heads: int | str = 4, **options: int) -> OracleModel:
    if heads == "mla":
        return OracleModel(use_mla=True, **options)  # type: ignore[arg-type]
    return OracleModel(num_kv_heads=int(heads), **options)  # type: ignore[arg-type]


def ranks_of(model: OracleModel, tp_size: int = 1, pp_size: int = 1) -> list[Rank]:
    strategies = [model.strategy(tp_size, pp_size, rank) for rank in range(tp_size * pp_size)]
    return [
        Rank(strategy, model.allocate_kv(strategy, NUM_BLOCKS, BLOCK_TOKENS))
        for strategy in strategies
    ]


def segment(
    tokens: Sequence[int],
    blocks: Sequence[int],
    start: int = 0,
    name: str = "a",
    salt: str | None = None,
) -> Segment:
    """From `start` to the end of `tokens`."""
    return Segment(name, salt, tokens, start, len(tokens) - start, blocks)


def step(model: OracleModel, ranks: Sequence[Rank], *segments: Segment) -> torch.Tensor:
    return model.forward(segments, ranks, BLOCK_TOKENS)


def kv_of(ranks: Sequence[Rank], blocks: Sequence[int], count: int) -> list[torch.Tensor]:
    """The KV of the first `count` positions, in the order of ranks and layers."""
    return [kv[list(blocks)].flatten(0, 1)[:count] for rank in ranks for kv in rank.kv.values()]


def wrong(model: OracleModel, ranks: Sequence[Rank], *segments: Segment) -> str:
    before = model.checked_segments
    with pytest.raises(WrongBytes) as caught:
        step(model, ranks, *segments)
    assert model.checked_segments == before
    return str(caught.value)


# --- right bytes pass -----------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "tp_size", "pp_size"), CUTS)
def test_right_bytes_pass_in_pieces_over_scattered_blocks(
    heads: int | str, tp_size: int, pp_size: int
) -> None:
    model = model_of(heads, num_layers=3)
    ranks = ranks_of(model, tp_size, pp_size)
    first, second, third = list(range(10)), [5, 5, 5], [7] * 9
    step(model, ranks, segment(first[:3], [17]), segment(second, [3], name="b", salt="other"))
    step(
        model,
        ranks,
        segment(first[:9], [17, 2, 11], 3),
        segment([*second, 1], [3], 3, "b", "other"),
    )
    step(model, ranks, segment(third, [23, 0, 9], name="c"), segment(first, [17, 2, 11], 9))
    read = 3 + 3 + 9 + 4 + 9 + 10
    held = sum(
        len(rank.kv) * kv.shape[2] for rank in ranks for kv in [next(iter(rank.kv.values()))]
    )
    assert model.checked_bytes == read * held * model.words * 8
    assert model.checked_segments == 6


def test_a_block_filled_by_one_segment_is_read_by_another_of_the_step() -> None:
    model = model_of()
    ranks = ranks_of(model, 2, 2)
    tokens = list(range(8))
    step(
        model,
        ranks,
        segment([*tokens, 99], [4, 9, 1], 8, "reader"),
        segment(tokens, [4, 9], name="writer"),
    )
    assert model.checked_segments == 2


def test_no_segments_no_logits() -> None:
    model = model_of()
    assert step(model, ranks_of(model)).shape == (0, model.vocab_size)
    assert model.checked_segments == model.checked_bytes == 0


def test_each_rank_holds_its_layers_and_heads() -> None:
    model: Model = OracleModel(num_layers=3, num_kv_heads=4, words=2)
    shapes = []
    for rank in range(4):
        kv = model.allocate_kv(model.strategy(2, 2, rank), 5, 16)
        shapes.append({name: tuple(tensor.shape) for name, tensor in kv.items()})
        assert not any(tensor.any() for tensor in kv.values())
    shape = (5, 16, 2, 2)
    assert shapes == [{"layers.0": shape}] * 2 + [{"layers.1": shape, "layers.2": shape}] * 2


# --- wrong bytes do not ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "tp_size", "pp_size"), [(2, 1, 1), (2, 2, 2), (2, 4, 1), ("mla", 2, 1)]
)
def test_each_single_flipped_bit_is_caught_and_its_place_named(
    heads: int | str, tp_size: int, pp_size: int
) -> None:
    model = model_of(heads)
    ranks = ranks_of(model, tp_size, pp_size)
    tokens, blocks = [8, 6, 7, 5, 3, 0, 9], [13, 6]
    step(model, ranks, segment(tokens[:6], blocks))
    bits = random.Random(5)
    for rank in ranks:
        for name, kv in rank.kv.items():
            for position in range(6):
                for head in range(kv.shape[2]):
                    for word in range(kv.shape[3]):
                        block, offset = blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
                        right = kv[block, offset, head, word].clone()
                        bit = bits.randrange(64)
                        kv[block, offset, head, word] ^= torch.tensor(
                            1 << bit if bit < 63 else -(1 << 63)
                        )
                        message = wrong(model, ranks, segment(tokens, blocks, 6))
                        kv[block, offset, head, word] = right
                        place = (
                            f"position {position}, block {block}, offset {offset}, {name}, "
                            f"rank {rank.strategy.rank} "
                        )
                        assert "request 'a' of tenant default" in message and place in message
                        assert message.endswith("1 flipped bits")
                        expected, found = (
                            words.split() for words in re.findall(r"\[([0-9a-f ]+)\]", message)
                        )
                        assert int(expected[word], 16) ^ int(found[word], 16) == 1 << bit
                        assert int(expected[word], 16) == int(right) % 2**64
    step(model, ranks, segment(tokens, blocks, 6))


def test_swapped_shards_are_caught() -> None:
    model = model_of()
    ranks = ranks_of(model, 4)
    step(model, ranks, segment(list(range(8)), [3, 5]))
    step(model, ranks, segment(list(range(8)), [3, 5], 7, "same prefix"))
    left, right = ranks[1].kv["layers.1"], ranks[2].kv["layers.1"]
    left[5], right[5] = right[5].clone(), left[5].clone()
    readers = (
        segment(list(range(9)), [3, 5, 1], 8),
        segment(list(range(9)), [3, 5, 1], 8, "same prefix"),
    )
    message = wrong(model, ranks, *readers)
    assert "position 4, block 5, offset 0, layers.1, rank 1 (TP 1, PP 0), KV head 1:" in message
    assert message.endswith("swapped, bytes of the same request, position 4, layers.1, KV head 2")


def test_swapped_layers_and_blocks_are_caught() -> None:
    model = model_of()
    tokens = [1] * 8  # all tokens alike, and still no position is like another
    for swap_layers in (True, False):
        (rank,) = ranks = ranks_of(model)
        step(model, ranks, segment(tokens, [3, 5]))
        first, second = rank.kv["layers.0"], rank.kv["layers.1"]
        if swap_layers:
            first[3], second[3] = second[3].clone(), first[3].clone()
        else:
            first[3], first[5] = first[5].clone(), first[3].clone()
        message = wrong(model, ranks, segment([*tokens, 1], [3, 5, 1], 8))
        assert (
            "position 0, layers.1, KV head 0" if swap_layers else "position 4, layers.0, KV head 0"
        ) in message


def test_ranks_that_share_memory_are_caught() -> None:
    model = model_of()
    ranks = ranks_of(model, 2)
    shared = [ranks[0], Rank(ranks[1].strategy, ranks[0].kv)]
    assert "rank 0 (TP 0, PP 0), KV head 0" in wrong(model, shared, segment([1], [0]))


def test_two_requests_given_one_block_are_caught() -> None:
    model = model_of()
    message = wrong(
        model, ranks_of(model), segment([1, 2], [3], name="a"), segment([1, 3], [3], name="b")
    )
    assert (
        "request 'a'" in message
        and "position 1" in message
        and "bytes of request 'b', position 1" in message
    )


def test_a_stale_block_is_caught() -> None:
    model = model_of()
    ranks = ranks_of(model, 2)
    step(model, ranks, segment([1, 2, 3, 4], [7], name="old"))
    # The new request's first block was to be loaded into block 7, but never was.
    message = wrong(model, ranks, segment([4, 3, 2, 1, 0], [7, 8], 4, "new"))
    assert "request 'new'" in message and "position 0, block 7, offset 0" in message
    assert message.endswith(
        "stale or swapped, bytes of request 'old', position 0, layers.0, KV head 0"
    )


def test_a_block_whose_own_prefix_is_another_is_caught() -> None:
    model = model_of()
    ranks = ranks_of(model)
    same = [9, 9, 9, 9]
    step(model, ranks, segment([1, 2, 3, 4, *same], [7, 8], name="old"))
    step(model, ranks, segment([4, 3, 2, 1], [2], name="new"))
    message = wrong(model, ranks, segment([4, 3, 2, 1, *same, 0], [2, 8, 3], 8, "new"))
    assert "position 4, block 8" in message and "bytes of request 'old', position 4" in message


@pytest.mark.parametrize(
    ("salt", "other"), [(None, "x"), ("x", ""), ("x", "y"), ("default", None), ("\udc80", "\udc81")]
)
def test_another_tenants_block_of_the_same_tokens_is_caught(
    salt: str | None, other: str | None
) -> None:
    model = model_of()
    ranks = ranks_of(model)
    step(model, ranks, segment([1, 2, 3, 4], [7], name="theirs", salt=other))
    message = wrong(model, ranks, segment([1, 2, 3, 4, 5], [7, 8], 4, "mine", salt))
    assert "bytes of another tenant, " in message and "request 'theirs', position 0" in message


def test_a_block_of_zeros_is_caught() -> None:
    model = model_of("mla")
    ranks = ranks_of(model, 2)
    step(model, ranks, segment(list(range(8)), [7, 8]))
    ranks[1].kv["layers.1"][8] = 0
    message = wrong(model, ranks, segment(list(range(9)), [7, 8, 9], 8))
    assert "position 4, block 8, offset 0, layers.1, rank 1" in message
    assert message.endswith("all zero, so never written")


def test_bytes_of_nobody_are_called_unknown() -> None:
    model = model_of()
    ranks = ranks_of(model)
    step(model, ranks, segment([1, 2, 3, 4], [7]))
    ranks[0].kv["layers.0"][7, 3] = 0x0123456789ABCDEF
    message = wrong(model, ranks, segment([1, 2, 3, 4, 5], [7, 8], 4))
    assert (
        "offset 3" in message
        and "found [0123456789abcdef 0123456789abcdef]: unknown bytes" in message
    )


def test_the_second_segment_of_a_step_is_named() -> None:
    model = model_of()
    ranks = ranks_of(model)
    message = wrong(
        model, ranks, segment([1, 2, 3], [1], name="a"), segment([1, 2, 3], [2], 1, "b")
    )
    assert "request 'b'" in message and "position 0, block 2" in message


@pytest.mark.parametrize("options", [{"seed": 1}, {"revision": "fine-tuned"}])
def test_another_models_bytes_are_caught(options: dict[str, int]) -> None:
    ranks = ranks_of(model_of())
    step(model_of(), ranks, segment([1, 2, 3, 4], [7]))
    step(model_of(), ranks, segment([1, 2, 3, 4, 5], [7, 8], 4))
    assert "unknown bytes" in wrong(model_of(**options), ranks, segment([1, 2, 3, 4, 5], [7, 8], 4))


# --- what the bytes depend on ---------------------------------------------------------------------


def test_kv_does_not_depend_on_later_tokens_pieces_or_request() -> None:
    tokens, blocks = list(range(50, 90)), list(range(10, -1, -1))
    at_once, in_pieces, longer = (ranks_of(model_of(), 2, 2) for _ in range(3))
    step(model_of(), at_once, segment(tokens, blocks))
    model = model_of()
    for end in range(1, 41):
        step(model, in_pieces, segment(tokens[:end], blocks, end - 1, name="b"))
    step(model_of(), longer, segment([*tokens, 77], blocks, name="c"))
    for others in (in_pieces, longer):
        pairs = zip(kv_of(at_once, blocks, 40), kv_of(others, blocks, 40), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def mix(value: int) -> int:
    """splitmix64's finaliser, one number at a time."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def series(key: int, index: int) -> int:
    return mix((key + index * 0x9E3779B97F4A7C15) % 2**64)


def test_bytes_are_those_of_a_plain_implementation() -> None:
    secret = blake2b(b"7/seed-7", digest_size=32, person=b"kvkeep.oracle").digest()
    key = blake2b(b"salt", digest_size=16, key=secret).digest()
    token_key, state_key = (int.from_bytes(half, "little") for half in (key[:8], key[8:]))
    tokens, total, expected = [5, 0, 70_000, 5, 256, 5], 0, []
    for position, token in enumerate(tokens):
        total = (total + mix(series(token_key, position) ^ token)) % 2**64
        state = mix(total ^ state_key)
        # Layer 1 of 2, all of 4 heads, 2 words: the lanes 8 to 15.
        expected.append(
            [
                mix(state ^ series(int.from_bytes(secret[:8], "little"), lane))
                for lane in range(8, 16)
            ]
        )
    model = model_of(seed=7)
    (rank,) = ranks = ranks_of(model)
    step(model, ranks, segment(tokens[:4], [9, 4], salt="salt"))
    step(model, ranks, segment(tokens, [9, 4], 4, salt="salt"))
    found = rank.kv["layers.1"][[9, 4]].reshape(8, 8)[:6]
    assert [[word % 2**64 for word in row] for row in found.tolist()] == expected


def test_no_two_words_are_alike() -> None:
    model = model_of(num_layers=3, words=3)
    (rank,) = ranks = ranks_of(model)
    step(
        model,
        ranks,
        *(segment([1] * 12, [i, i + 1, i + 2], name=f"{i}", salt=f"{i}") for i in range(0, 24, 3)),
    )
    words = torch.stack(list(rank.kv.values())).flatten()
    assert len(set(words.tolist())) == words.numel() == 3 * NUM_BLOCKS * BLOCK_TOKENS * 4 * 3


def test_replicas_are_identical_and_shards_are_the_whole_cut_up() -> None:
    tokens, blocks = [3, 1, 4, 1, 5], [9, 2]
    whole = ranks_of(model_of())
    step(model_of(), whole, segment(tokens, blocks))
    for tp_size in (2, 4, 8):
        ranks = ranks_of(model_of(), tp_size)
        step(model_of(), ranks, segment(tokens, blocks))
        replicas = ranks[0].strategy.replicas
        assert replicas == max(1, tp_size // 4)
        for name in ("layers.0", "layers.1"):
            joined = torch.cat([rank.kv[name] for rank in ranks], dim=2)
            assert torch.equal(joined, whole[0].kv[name].repeat_interleave(replicas, dim=2))
    latent = ranks_of(model_of("mla"), 8)
    step(model_of("mla"), latent, segment(tokens, blocks))
    assert latent[0].kv["layers.0"].shape[2] == 1 and latent[0].kv["layers.0"].any()
    assert all(
        torch.equal(latent[0].kv[name], rank.kv[name]) for rank in latent for name in rank.kv
    )


def test_no_salt_and_an_empty_one_are_one_tenant() -> None:
    model = model_of()
    ranks = ranks_of(model)
    step(model, ranks, segment([1, 2, 3, 4], [7], name="none"))
    step(model, ranks, segment([1, 2, 3, 4, 5], [7, 8], 4, "empty", ""))
    assert model.checked_segments == 2


IN_ANOTHER_PROCESS = """
import sys
from kvkeep.engine.models.model import Rank, Segment
from kvkeep_lab.simulation.oracle import OracleModel
model = OracleModel(3)
strategy = model.strategy(1, 1, 0)
kv = model.allocate_kv(strategy, 4, 4)
logits = model.forward([Segment("r", "s\\udc80", [1, 2, 70000], 0, 3, [2])], [Rank(strategy, kv)], 4)
print([kv["layers.1"][2].tolist(), logits.tolist(), model.identity(4)])
"""


def test_another_process_gives_the_same_bytes() -> None:
    outputs = set()
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS]
        outputs.add(
            subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            ).stdout
        )
    assert len(outputs) == 1
    model = OracleModel(3)
    (rank,) = ranks = ranks_of(model)
    logits = step(model, ranks, segment([1, 2, 70000], [2], name="q", salt="s\udc80"))
    here = [rank.kv["layers.1"][2].tolist(), logits.tolist(), model.identity(4)]
    assert outputs == {f"{here}\n"}


# --- logits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [4, "mla"])
def test_logits_depend_on_the_prefix_alone(heads: int | str) -> None:
    tokens = list(range(11))
    reference = step(model_of(heads), ranks_of(model_of(heads)), segment(tokens, [0, 1, 2]))
    assert reference.dtype == torch.float64 and reference.shape == (1, 257)
    assert len(set(reference.flatten().tolist())) == 257
    for tp_size, pp_size in [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (4, 2)]:
        model = model_of(heads)
        ranks = ranks_of(model, tp_size, pp_size)
        step(model, ranks, segment(tokens[:5], [8, 3, 20]))
        logits = step(model, ranks, segment([4], [5], name="b"), segment(tokens, [8, 3, 20], 5))
        assert torch.equal(logits[1], reference[0])
        assert not torch.equal(logits[0], logits[1])


def test_greedy_tokens_are_spread_over_the_vocabulary() -> None:
    model = model_of(vocab_size=8)
    ranks = ranks_of(model)
    drawn = [
        int(step(model, ranks, segment([token], [0], name=f"{token}")).argmax())
        for token in range(400)
    ]
    assert all(drawn.count(token) > 20 for token in range(8))


def test_logits_come_from_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the check switched off, every wrong word moves them."""
    model = model_of()
    (rank,) = ranks = ranks_of(model)
    reader = segment([1, 2, 3, 4, 5, 6], [7, 8], 5)
    step(model, ranks, segment([1, 2, 3, 4, 5], [7, 8]))
    right = step(model, ranks, reader)
    monkeypatch.setattr(oracle.np, "array_equal", lambda one, other: True)
    for kv in rank.kv.values():
        for index in np.ndindex(4, 4, 2):
            kv[7][index] ^= 1 << 40
            assert not torch.equal(step(model, ranks, reader), right)
            kv[7][index] ^= 1 << 40
        kv[7] = kv[7].flip(0)
        assert not torch.equal(step(model, ranks, reader), right)
        kv[7] = kv[7].flip(0)
    assert torch.equal(step(model, ranks, reader), right)


# --- what it remembers ----------------------------------------------------------------------------


@pytest.mark.parametrize("salt", [None, "x"])
def test_a_request_id_used_again_starts_over(salt: str | None) -> None:
    model, fresh = model_of(), model_of()
    ranks, expected = ranks_of(model), ranks_of(fresh)
    step(model, ranks, segment([1, 2, 3, 4, 5, 6], [7, 8]))
    step(model, ranks, segment([1, 2], [7]))  # shorter: still the same request
    for tokens in ([1, 2, 3, 4, 9], [1, 2, 3, 4, 9, 6, 7], [3]):
        step(model, ranks, segment(tokens, [1, 2], salt=salt))
        step(fresh, expected, segment(tokens, [1, 2], name=f"{len(tokens)}", salt=salt))
        pairs = zip(kv_of(ranks, [1, 2], 8), kv_of(expected, [1, 2], 8), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_a_request_id_used_again_by_another_tenant_starts_over() -> None:
    model = model_of()
    ranks = ranks_of(model)
    step(model, ranks, segment([1, 2, 3, 4], [7], salt="x"))
    assert "position 0" in wrong(model, ranks, segment([1, 2, 3, 4, 5], [7, 8], 4, salt="y"))


def test_tokens_changed_in_place_are_noticed() -> None:
    model = model_of()
    ranks = ranks_of(model)
    tokens = [1, 2, 3, 4, 5]
    step(model, ranks, segment(tokens, [7, 8]))
    tokens[1] = 9
    assert "position 1," in wrong(model, ranks, segment(tokens, [7, 8], 4))


def test_memory_is_bounded_and_forgetting_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "MAX_KNOWN_REQUESTS", 3)
    model = model_of()
    ranks = ranks_of(model)
    for i in range(20):
        step(model, ranks, segment([i] * 4, [i], name=f"{i}"))
        assert len(model._known) <= 3
    step(model, ranks, *(segment([i] * 5, [i, 20 + i % 4], 4, name=f"{i}") for i in range(4)))
    monkeypatch.setattr(oracle, "MAX_KNOWN_WORDS", 600)
    for i in range(4):
        step(model, ranks, segment([i] * 5, [i, 20 + i], 4, name=f"{i}"))
        step(model, ranks, segment([i] * 5, [i, 20 + i], 4, name=f"{i}"))
        assert model._known_words == sum(known.words.size for known in model._known.values()) <= 600
    ranks[0].kv["layers.0"][0] = 5
    message = wrong(
        model, ranks, *(segment([i] * 5, [i, 20 + i], 4, name=f"{i}") for i in range(4))
    )
    assert "request '0'" in message and "unknown bytes" in message


# --- nonsense -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        Segment("a", None, [1, 2, 3], 0, 4, [0]),
        Segment("a", None, [1, 2, 3], 3, 0, [0]),
        Segment("a", None, [1, 2, 3], -1, 2, [0]),
        Segment("a", None, [1] * 5, 0, 5, [0]),
        Segment("a", None, [1, 2, 3], 0, 3, [-1]),
        Segment("a", None, [1, 2, 3], 0, 3, [NUM_BLOCKS]),
        Segment("a", None, [1, 2, 3], 0, 3, []),
    ],
)
def test_segments_that_make_no_sense_are_refused(bad: Segment) -> None:
    model = model_of()
    with pytest.raises(ValueError, match="request 'a' has"):
        step(model, ranks_of(model), bad)


def test_ranks_that_make_no_sense_are_refused() -> None:
    model = model_of()
    ranks, good = ranks_of(model, 2, 2), segment([1], [0])
    for some in ([], ranks[:3], [*ranks[:3], ranks[0]]):
        with pytest.raises(ValueError, match="each rank"):
            step(model, some, good)
    with pytest.raises(ValueError, match="rank 0 holds layers"):
        step(model, [Rank(ranks[0].strategy, ranks[2].kv), *ranks[1:]], good)
    with pytest.raises(ValueError, match="KV of blocks"):
        model.forward([good], ranks, BLOCK_TOKENS * 2)


@pytest.mark.parametrize(
    ("heads", "tp_size", "pp_size"), [(4, 3, 1), (4, 6, 1), (6, 4, 1), (4, 1, 3), ("mla", 2, 3)]
)
def test_cuts_that_do_not_work_out_are_refused(
    heads: int | str, tp_size: int, pp_size: int
) -> None:
    with pytest.raises(SettingsError):
        model_of(heads).strategy(tp_size, pp_size, 0)


@pytest.mark.parametrize("field", ["vocab_size", "num_layers", "num_kv_heads", "words"])
def test_a_model_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(SettingsError):
        OracleModel(**{field: 0})


def test_identity_tells_models_apart_and_the_cut_is_not_in_it() -> None:
    models = [
        model_of(4),
        model_of(2),
        model_of(4, seed=1),
        model_of(4, num_layers=3),
        model_of(4, words=3),
    ]
    assert len({model.identity(16) for model in models}) == len(models)
    model = model_of(2)
    assert model.strategy(4, 2, 0).kv_world_size == 4
    cuts = [model.strategy(*sizes, 0).cut for sizes in ((1, 1), (2, 1), (1, 2), (4, 1))]
    assert len(set(cuts)) == 3 and cuts[1] == cuts[3], (
        "two heads are two shards, however many ranks hold them"
    )
