"""Keys: pinned literals, what they bind, that no two inputs share an encoding, and pieces equal the
whole."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from enum import Enum
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvkeep.kv.keys
from kvkeep.errors import RequestError
from kvkeep.kv import native
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.keys import (
    KEY_BYTES,
    NATIVE_FROM_BLOCKS,
    KeyChain,
    keys_from_engine_hashes,
    root_key,
)

IDENTITY = ModelIdentity(
    model="org/model-8b",
    revision="a1b2c3",
    kv_dtype="bfloat16",
    block_tokens=4,
    content="LBHNC/32x8x128",
)
ROOT = root_key(IDENTITY, "alice")

tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=70)
extras_maps = st.dictionaries(st.integers(0, 20), st.binary(max_size=20), max_size=6)


def chain_of(
    tokens: Any, extras: dict[int, bytes] | None = None, *, root: bytes = ROOT, block: int = 4
) -> KeyChain:
    chain = KeyChain(root, block)
    chain.extend(tokens, extras)
    return chain


def reference_keys(tokens: list[int], extras: dict[int, bytes], block: int) -> bytes:
    """The definition of a key, word by word and slowly."""
    key, keys = ROOT, b""
    for index in range(len(tokens) // block):
        words = b"".join(
            t.to_bytes(4, "little") for t in tokens[index * block : (index + 1) * block]
        )
        if index in extras:
            data, person = (
                key + block.to_bytes(4, "little") + words + extras[index],
                b"kvkeep.block+",
            )
        else:
            data, person = key + words, b"kvkeep.block"
        key = blake2b(data, digest_size=16, person=person).digest()
        keys += key
    return keys


def test_known_answers() -> None:
    assert ROOT.hex() == "d5022a1d561d57c441acc5b6d44b3c2b"
    assert (
        root_key(IDENTITY, None, lora="adapter", extra=b"x").hex()
        == "f72f9d34a8871db7f674699bb69ca783"
    )
    chain = chain_of([1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 9], {1: b"image"})
    assert chain.key(0).hex() == "f911df80ee41817b52467f0f751d92ae"
    assert chain.key(1).hex() == "b305ae6b971e537fd1e9a38abf908aed"
    assert (
        keys_from_engine_hashes(ROOT, [bytes(range(32))]).hex()
        == "8b9645e4406b140236dba307c71459f4"
    )


def test_keys_are_stable_across_processes_and_hash_seeds() -> None:
    program = (
        "from kvkeep.kv.identity import ModelIdentity, tenant_of\n"
        "from kvkeep.kv.keys import KeyChain, root_key\n"
        "i = ModelIdentity(model='org/model-8b', revision='a1b2c3', kv_dtype='bfloat16', block_tokens=4,\n"
        "                  content='LBHNC/32x8x128')\n"
        "c = KeyChain(root_key(i, 'alice'), 4)\n"
        "c.extend(range(100), {3: b'x', 1: b'y', 40: b'z'})\n"
        "print(c.keys().hex(), tenant_of('alice'))\n"
    )
    source = str(Path(kvkeep.kv.keys.__file__).parents[2])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": source},
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout
        for seed in ("0", "1", "4711")
    }  # fmt: skip
    here = chain_of(list(range(100)), {3: b"x", 1: b"y", 40: b"z"}).keys().hex()
    assert len(outputs) == 1
    assert outputs.pop().startswith(here + " t-")


def test_every_input_of_the_root_changes_it() -> None:
    changed = {
        "model": "org/model-8B", "revision": "a1b2c4", "kv_dtype": "float16", "block_tokens": 8,
        "content": "LBNHC/32x8x128", "details": (("attention", "x"),), "layout_version": 1,
    }  # fmt: skip
    assert set(changed) == set(IDENTITY.__struct_fields__), (
        "a new field of the identity belongs here"
    )
    roots = [ROOT]
    roots += [
        root_key(msgspec.structs.replace(IDENTITY, **{k: v}), "alice") for k, v in changed.items()
    ]
    roots += [
        root_key(IDENTITY, salt)
        for salt in (None, "Alice", "alice ", "alice\0", "default", "\ud800")
    ]
    roots += [root_key(IDENTITY, "alice", lora=lora) for lora in ("a", "b", "\udcff")]
    roots += [root_key(IDENTITY, "alice", extra=extra) for extra in (b"a", b"b", b"\0", b"\0\0")]
    assert len(set(roots)) == len(roots)
    assert all(len(root) == KEY_BYTES for root in roots)


def test_no_salt_and_the_empty_salt_are_one() -> None:
    assert root_key(IDENTITY, None) == root_key(IDENTITY, "")


@pytest.mark.parametrize(
    "parts",
    [
        ("ab", "cd", b"ef"),
        ("abcd", "", b"ef"),
        ("", "abcd", b"ef"),
        ("ab", "cdef", b""),
        ("", "", b"abcdef"),
    ],
)
def test_moving_bytes_between_fields_changes_the_root(parts: tuple[str, str, bytes]) -> None:
    salt, lora, extra = parts
    others = [("abc", "d", b"ef"), ("a", "bcd", b"ef"), ("ab", "cde", b"f"), ("abcdef", "", b"")]
    assert root_key(IDENTITY, salt, lora=lora, extra=extra) not in {
        root_key(IDENTITY, s, lora=x, extra=e) for s, x, e in others
    }


def test_moving_bytes_between_identity_fields_changes_the_root() -> None:
    texts = [("ab", "cd"), ("abc", "d"), ("a", "bcd"), ("cd", "ab")]
    roots = {
        root_key(msgspec.structs.replace(IDENTITY, model=model, revision=revision), None)
        for model, revision in texts
    }
    assert len(roots) == len(texts)


def test_a_salt_cannot_imitate_the_encoding_of_the_fields_after_it() -> None:
    def field(name: bytes, value: bytes) -> bytes:
        return len(name).to_bytes(4, "little") + name + len(value).to_bytes(8, "little") + value

    forged = (b"alice" + field(b"lora", b"adapter")).decode()
    assert root_key(IDENTITY, forged) != root_key(IDENTITY, "alice", lora="adapter")
    forged_extra = field(b"extra", b"")
    assert root_key(IDENTITY, "alice", extra=forged_extra) != ROOT


@given(st.tuples(*[st.text(st.characters(), max_size=6)] * 2, st.binary(max_size=6)),
       st.tuples(*[st.text(st.characters(), max_size=6)] * 2, st.binary(max_size=6)))  # fmt: skip
def test_only_equal_inputs_make_equal_roots(
    one: tuple[str, str, bytes], other: tuple[str, str, bytes]
) -> None:
    roots = [root_key(IDENTITY, salt, lora=lora, extra=extra) for salt, lora, extra in (one, other)]
    assert (roots[0] == roots[1]) == (one == other)


@pytest.mark.parametrize(
    ("field", "value"),
    [("salt", 5), ("salt", 0), ("salt", b"alice"), ("lora", None), ("extra", 5), ("extra", "x")],
)
def test_bad_inputs_of_the_root_are_refused_by_name(field: str, value: Any) -> None:
    arguments: dict[str, Any] = {"salt": "alice", "lora": "", "extra": b"", field: value}
    with pytest.raises(RequestError, match=field) as caught:
        root_key(IDENTITY, **arguments)
    assert caught.value.field == field


@pytest.mark.parametrize("is_native", [True, False])
# 28 tokens fill what is hashed at once
@pytest.mark.parametrize("block", [1, 2, 16, 27, 28, 29, 32, 60, 61, 256, 1024])
def test_both_roads_follow_the_definition(
    monkeypatch: pytest.MonkeyPatch, block: int, is_native: bool
) -> None:
    if is_native and not native.available:
        pytest.skip("the C kernel was not built")
    monkeypatch.setattr(native, "available", is_native)
    rng = np.random.default_rng(block)
    for blocks in (1, NATIVE_FROM_BLOCKS - 1, NATIVE_FROM_BLOCKS, 40):
        tokens = rng.integers(0, 2**32, blocks * block + block // 2).tolist()
        assert chain_of(tokens, block=block).keys() == reference_keys(tokens, {}, block)
        extras = {blocks // 2: b"image"}
        assert chain_of(tokens, extras, block=block).keys() == reference_keys(tokens, extras, block)


@given(tokens_lists, extras_maps, st.integers(1, 9))
def test_keys_follow_their_definition(
    tokens: list[int], extras: dict[int, bytes], block: int
) -> None:
    chain = chain_of(tokens, extras, block=block)
    assert chain.keys() == reference_keys(tokens, extras, block)
    assert len(chain) == len(tokens) // block
    assert chain.num_tokens == len(tokens)


@given(tokens_lists, extras_maps, st.integers(1, 9), st.lists(st.integers(0, 70)))
def test_pieces_make_the_same_keys_as_the_whole(
    tokens: list[int], extras: dict[int, bytes], block: int, cuts: list[int]
) -> None:
    whole = chain_of(tokens, extras, block=block)
    chain = KeyChain(ROOT, block)
    for start, stop in pairwise([0, *sorted(cuts), max([len(tokens), *cuts])]):
        # Content arrives with the piece that brings the first of its block's tokens, or before.
        due = {i: content for i, content in extras.items() if len(chain) <= i and i * block < stop}
        chain.extend(tokens[start:stop], due)
    assert chain.keys() == whole.keys()
    assert chain.num_tokens == len(tokens)


@given(tokens_lists, st.data())
def test_a_token_changes_its_block_and_all_after_it(tokens: list[int], data: st.DataObject) -> None:
    full = tokens[: len(tokens) // 4 * 4]
    if not full:
        return
    where = data.draw(st.integers(0, len(full) - 1))
    other = list(full)
    other[where] ^= 1 << data.draw(st.integers(0, 31))
    one, two = chain_of(full), chain_of(other)
    for index in range(len(one)):
        assert (one.key(index) == two.key(index)) == (index < where // 4)


def test_a_prefix_has_a_prefix_of_the_keys_and_position_counts() -> None:
    chain = chain_of([7] * 40)
    assert chain_of([7] * 24).keys() == chain.keys(0, 6)
    assert len({chain.key(index) for index in range(10)}) == 10, (
        "equal blocks at other positions differ"
    )


def test_order_of_tokens_and_root_count() -> None:
    assert chain_of([1, 2, 3, 4]).keys() != chain_of([4, 3, 2, 1]).keys()
    other = root_key(IDENTITY, "bob")
    assert chain_of([1, 2, 3, 4]).keys() != chain_of([1, 2, 3, 4], root=other).keys()


def test_keys_are_addressed_by_block() -> None:
    chain = chain_of(range(12))
    assert chain.keys() == chain.key(0) + chain.key(1) + chain.key(2)
    assert chain.keys(1) == chain.keys(1, 3) == chain.key(1) + chain.key(2)
    assert chain.keys(3) == chain.keys(1, 1) == b""
    for start, stop in ((-1, 2), (0, 4), (2, 1), (4, None)):
        with pytest.raises(IndexError, match="chain of 3"):
            chain.keys(start, stop)
    for index in (-1, 3):
        with pytest.raises(IndexError):
            chain.key(index)


def test_content_is_told_from_tokens_and_from_no_content() -> None:
    def words(*tokens: int) -> bytes:
        return array("I", tokens).tobytes()

    keys = [
        chain_of([1, 2, 3, 4]).key(0),
        chain_of([1, 2, 3, 4], {0: b""}).key(0),
        chain_of([1, 2, 3, 4], {0: b"\0"}).key(0),
        chain_of([1, 2, 3, 4], {0: words(5)}).key(0),
        chain_of([1, 2, 3, 4, 5], block=5).key(0),
        chain_of([1, 2, 3, 4, 5], {0: b""}, block=5).key(0),
        chain_of([1, 2, 3], {0: words(4, 5)}, block=3).key(0),
        chain_of([5, 1, 2, 3, 4], block=5).key(0),  # the 5 where content would put its block size
        chain_of([4, 1, 2, 3, 4], block=5).key(0),
        keys_from_engine_hashes(ROOT, [words(1, 2, 3, 4)]),
    ]
    assert len(set(keys)) == len(keys)
    assert root_key(IDENTITY, "alice", extra=b"image") != ROOT


def test_content_changes_its_block_and_all_after_it() -> None:
    plain, image = chain_of(range(16)), chain_of(range(16), {1: b"image"})
    assert [plain.key(i) == image.key(i) for i in range(4)] == [True, False, False, False]
    assert chain_of(range(16), {2: b"image"}).key(2) != image.key(2)


def test_content_that_comes_too_late_or_changes_is_refused_and_nothing_changes() -> None:
    chain = chain_of(range(6), {1: b"image"})
    before = chain.keys()
    for extras in (
        {0: b"late"},
        {1: b"other"},
        {-1: b""},
        {True: b""},
        {"1": b""},
        {2: "text"},
        {2: None},
    ):
        with pytest.raises(RequestError, match="extras") as caught:
            chain.extend([6, 7], extras)  # type: ignore[arg-type]
        assert caught.value.field == "extras"
    chain.extend([6, 7], {1: b"image"})  # the same again is no contradiction
    assert chain.keys(0, 1) == before
    assert chain.keys() == chain_of(range(8), {1: b"image"}).keys()


def test_all_kinds_of_integer_rows_agree() -> None:
    torch = pytest.importorskip("torch")

    tokens = [0, 1, 2**31, 2**32 - 1, 5, 6, 7, 8]
    rows = [
        tokens, tuple(tokens), array("I", tokens), array("q", tokens), np.array(tokens),
        np.array(tokens, dtype=np.uint32), np.array(tokens, dtype=">u8"), np.array([tokens, tokens]).T[:, 0],
        [np.int64(token) for token in tokens], torch.tensor(tokens),
    ]  # fmt: skip
    assert {chain_of(row).keys() for row in rows} == {reference_keys(tokens, {}, 4)}
    small = [3, 1, 0, 2]
    as_int32, as_uint8 = torch.tensor(small, dtype=torch.int32), np.array(small, np.uint8)
    assert chain_of(as_int32).keys() == chain_of(as_uint8).keys() == reference_keys(small, {}, 4)
    assert chain_of([]).keys() == chain_of(np.array([], np.int64)).keys() == b""


@pytest.mark.parametrize(
    "bad",
    [
        [1, -1], [1, 2**32], [1, 2**80], [1, 1.0], [1, True], [False], [1, "2"], [1, None], [[1]],
        [1, np.True_], [np.float32(1)], [np.int64(-1)], np.array([1.0]), np.array([True]), np.array([[1]]),
        np.array(1), np.array([-1]), np.array([2**32]), np.array([2**63], np.uint64), np.array([1], object),
        array("d", [1.0]), array("i", [-1]), b"1234", bytearray(4), memoryview(b"1234"), "1234", None, 5,
    ],
    ids=lambda bad: type(bad).__name__ if isinstance(bad, memoryview) else repr(bad),
)  # fmt: skip
def test_what_is_no_token_is_refused_and_nothing_changes(bad: Any) -> None:
    chain = chain_of([1, 2])
    with pytest.raises(RequestError, match="tokens are integers from 0 to 4294967295") as caught:
        chain.extend(bad, {0: b"x"})
    assert (caught.value.code, caught.value.field) == ("bad_tokens", "tokens")
    chain.extend([3, 4])
    assert chain.keys() == reference_keys([1, 2, 3, 4], {}, 4)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([5, -1], "token 1 is -1"), ([5, 2**32], "token 1 is 4294967296"),
        ([5, 1, True], "token 2 is a bool"), ([5, 1.5], "token 1 is a float"),
        (np.array([5, -7]), "token 1 is -7"), (np.array([5.0]), "array of float64"),
    ],
)  # fmt: skip
def test_the_message_names_the_first_wrong_token(bad: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        chain_of(bad)


def test_a_bool_among_many_tokens_is_found() -> None:
    tokens = [*range(1000), True, *range(1000)]
    with pytest.raises(RequestError, match="token 1000 is a bool"):
        chain_of(tokens)
    assert len(chain_of([int(token) for token in tokens])) == 500


def test_a_tensor_that_cannot_be_read_is_refused() -> None:
    torch = pytest.importorskip("torch")

    with pytest.raises(RequestError, match="cannot be read as an array"):
        chain_of(torch.zeros(4, requires_grad=True))


@pytest.mark.parametrize(
    ("root", "block"),
    [(b"short", 4), ("x" * 16, 4), (ROOT, 0), (ROOT, True), (ROOT, 4.0), (ROOT, 2**20)],
)
def test_a_chain_needs_a_root_and_a_block_size(root: Any, block: Any) -> None:
    with pytest.raises(RequestError, match=r"root|block_tokens"):
        KeyChain(root, block)


def test_engine_hashes_are_bound_to_the_root_one_by_one() -> None:
    hashes = [bytes([i]) * 32 for i in range(5)]
    keys = keys_from_engine_hashes(ROOT, hashes)
    assert len(keys) == 5 * KEY_BYTES
    pad = blake2b(ROOT, digest_size=KEY_BYTES, person=b"kvkeep.engine").digest()
    assert keys == b"".join(bytes(a ^ b for a, b in zip(pad, h, strict=False)) for h in hashes)
    assert keys_from_engine_hashes(ROOT, hashes[:2]) == keys[: 2 * KEY_BYTES]
    other = keys_from_engine_hashes(root_key(IDENTITY, "bob"), hashes)
    parts = {row[i : i + KEY_BYTES] for row in (keys, other) for i in range(0, len(row), KEY_BYTES)}
    assert len(parts) == 10
    assert keys_from_engine_hashes(ROOT, []) == b""
    longer = [hashes[0], hashes[1] + b"more", *hashes[2:]]
    assert keys_from_engine_hashes(ROOT, longer) == keys, (
        "of each the first bytes count, however long it is"
    )


def test_engine_hashes_that_are_too_short_or_no_bytes_are_refused() -> None:
    for bad in (b"", bytes(15), "x" * 32, 7, None):
        with pytest.raises(RequestError, match="engine hash 1"):
            keys_from_engine_hashes(ROOT, [bytes(32), bad])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="root"):
        keys_from_engine_hashes(b"", [])


def test_what_equals_another_identity_has_its_root_whoever_asks_first() -> None:
    class Kind(str, Enum):  # noqa: UP042  (a StrEnum would print as its value)
        BF16 = "bfloat16"

    for number, order in enumerate([(Kind.BF16, "bfloat16"), ("bfloat16", Kind.BF16)]):
        identities = [
            msgspec.structs.replace(IDENTITY, model=f"m{number}", kv_dtype=each) for each in order
        ]
        assert identities[0] == identities[1]
        assert len({root_key(each, None) for each in identities}) == 1
        plain = msgspec.structs.replace(
            IDENTITY, model=f"m{number}", kv_dtype="bfloat16", revision="other"
        )
        assert root_key(plain, None) != root_key(identities[0], None)
