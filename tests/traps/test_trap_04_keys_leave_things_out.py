"""Trap 4: keys leave out adapters, embeddings, weights and dtype; half a file of another dtype is
read."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engines import GQA, KEY, counting, prompt, seed, serve, without_cache
from patience import patient_engine

import kvkeep
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.keys import KeyChain, root_key
from kvkeep.testing.process import ServerProcess

TOKENS = list(range(64))
IDENTITY = ModelIdentity(model="m", revision="1", kv_dtype="bf16", block_tokens=16, content="l")


def connect(
    server: ServerProcess, dtype: str, revision: str = "1", block_tokens: int = 16
) -> kvkeep.Cache:
    options: dict[str, Any] = {
        "model": "m",
        "block_shape": (2, 64),
        "required": True,
        "wait_ms": 20_000,
    }
    return kvkeep.connect(
        server.address, revision=revision, block_tokens=block_tokens, dtype=dtype, **options
    )


def test_a_reader_of_another_dtype_finds_nothing(server: ServerProcess) -> None:
    """16 bits were stored; a reader of 8 bits would be content with half of them."""
    with (
        connect(server, "uint16") as wide,
        connect(server, "uint8") as narrow,
        connect(server, "int16") as like,
    ):
        assert wide.put(TOKENS, np.ones((4, 2, 64), "uint16")) == 4
        assert wide.contains(TOKENS) == 4
        assert narrow.contains(TOKENS) == like.contains(TOKENS) == 0
        assert narrow.put(TOKENS, np.full((4, 2, 64), 2, "uint8")) == 4
        assert (narrow.get(TOKENS) == 2).all() and (wide.get(TOKENS) == 1).all()


def test_another_revision_or_block_size_finds_nothing(server: ServerProcess) -> None:
    with (
        connect(server, "float32") as one,
        connect(server, "float32", "2") as two,
        connect(server, "float32", "1", 8) as c,
    ):
        assert one.put(TOKENS, np.ones((4, 2, 64), "float32")) == 4
        assert (one.contains(TOKENS), two.contains(TOKENS), c.contains(TOKENS)) == (4, 0, 0)


def test_engines_with_other_weights_under_the_same_name_share_nothing(
    server: ServerProcess,
) -> None:
    tokens = prompt(22)
    weights = [
        {"seed": seed(), "dtype": dtype} for dtype in (torch.float64, torch.float64, torch.float32)
    ]
    for each in weights:
        with patient_engine(server, GQA, **each) as llm:
            [answer] = serve(llm, [counting(tokens)])
        assert answer.kv_transfer_params == {KEY: 0}, "the tokens are the same, the weights are not"
        assert [answer.token_ids] == without_cache(GQA, [tokens], **each)


@pytest.mark.parametrize(
    "other",
    [
        root_key(IDENTITY, None, lora="adapter"),
        root_key(IDENTITY, "salt"),
        root_key(IDENTITY, None, extra=b"anything else that the engine hashes"),
        *(
            root_key(msgspec.structs.replace(IDENTITY, **{name: "x"}), None)
            for name in ("model", "revision", "kv_dtype", "content")
        ),
    ],
)
def test_a_root_binds_all_that_changes_bytes(other: bytes) -> None:
    mine, theirs = KeyChain(root_key(IDENTITY, None), 16), KeyChain(other, 16)
    for chain in (mine, theirs):
        chain.extend(TOKENS)
    assert not {mine.key(at) for at in range(4)} & {theirs.key(at) for at in range(4)}


def test_what_stands_behind_placeholder_tokens_is_in_the_key() -> None:
    """Prompt embeddings and images: the same tokens, other content, other blocks from there on."""
    chains = [KeyChain(root_key(IDENTITY, None), 16) for _ in range(3)]
    for chain, extras in zip(chains, ({}, {1: b"a cat"}, {1: b"a dog"}), strict=True):
        chain.extend(TOKENS, extras)
    assert len({chain.key(0) for chain in chains}) == 1
    assert all(len({chain.key(at) for chain in chains}) == 3 for at in (1, 2, 3))
