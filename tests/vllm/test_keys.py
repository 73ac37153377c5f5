"""Keys of vLLM's own requests: equal exactly where the KV is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

import torch
from engine_parts import request
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from kvkeep.errors import KVKeepError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.keys import KEY_BYTES, root_key
from kvkeep.vllm.keys import EngineKeys, OwnKeys, TokensChanged

HASH_TOKENS = 4
TOKENS = list(range(100, 150))
IDENTITY = ModelIdentity(
    model="m", revision="r", kv_dtype="float32", block_tokens=HASH_TOKENS, content="l"
)


def root_of(identity: ModelIdentity, asked: Any, generation: bytes, adapter: str) -> bytes:
    return root_key(identity, asked.cache_salt, lora=adapter, extra=generation)


def adapter_of(asked: Any) -> str:
    lora = asked.lora_request
    return "" if lora is None else repr((lora.lora_name, lora.lora_path))


def engine_keys(
    asked: Any, block_tokens: int = HASH_TOKENS, root: bytes | None = None
) -> EngineKeys:
    return EngineKeys(
        root or root_of(IDENTITY, asked, b"", adapter_of(asked)), asked, block_tokens, HASH_TOKENS
    )


def own_keys(asked: Any, block_tokens: int = HASH_TOKENS, root: bytes | None = None) -> OwnKeys:
    return OwnKeys(root or root_of(IDENTITY, asked, b"", adapter_of(asked)), asked, block_tokens)


BOTH = pytest.mark.parametrize("keys_of", [engine_keys, own_keys])
Kind = Callable[..., EngineKeys | OwnKeys]


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def picture(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def adapter(name: str = "style", path: str = "/adapters/one") -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=1, lora_path=path)


@BOTH
def test_equal_prefixes_have_equal_keys_and_no_others(keys_of: Kind) -> None:
    one, two = (
        split(keys_of(request(TOKENS)).grow()),
        split(keys_of(request([*TOKENS[:30], 7, *TOKENS[31:]])).grow()),
    )
    assert len(one) == len(two) == len(TOKENS) // HASH_TOKENS == len(set(one))
    assert one[:7] == two[:7]
    assert not set(one[7:]) & set(two), "a token changes its block and all that follow"
    assert split(keys_of(request(TOKENS[:30])).grow()) == one[:7]


DIFFERENT: dict[str, dict[str, Any]] = {
    "plain": {},
    "a salt": {"cache_salt": "alice"},
    "another salt": {"cache_salt": "bob"},
    "an adapter": {"lora_request": adapter()},
    "another adapter": {"lora_request": adapter("tone")},
    "an adapter of that name elsewhere": {"lora_request": adapter(path="/adapters/two")},
    "an adapter, with a salt": {"lora_request": adapter(), "cache_salt": "alice"},
    "an image": {"mm_features": [picture("hash-1", 0, 8)]},
    "another image": {"mm_features": [picture("hash-2", 0, 8)]},
    "the image, one token later": {"mm_features": [picture("hash-1", 1, 8)]},
    "two images": {"mm_features": [picture("hash-1", 0, 3), picture("hash-2", 3, 8)]},
    "an image, with a salt": {"mm_features": [picture("hash-1", 0, 8)], "cache_salt": "alice"},
    "embeddings": {"prompt_embeds": torch.zeros(50, 8)},
    "other embeddings": {"prompt_embeds": torch.ones(50, 8)},
}


@BOTH
def test_whatever_changes_kv_changes_every_key_from_there_on(keys_of: Kind) -> None:
    seen: dict[bytes, str] = {}
    for what, given in DIFFERENT.items():
        once, again = (split(keys_of(request(TOKENS, **given)).grow()) for _ in range(2))
        assert once == again, what
        for key in once:
            assert key not in seen, f"{what} has a key of {seen.get(key)}"
        seen |= dict.fromkeys(once, what)


@BOTH
def test_an_adapter_that_is_trained_further_is_another_one(keys_of: Kind) -> None:
    asked = request(TOKENS, lora_request=adapter())
    one, two = (
        split(keys_of(asked, root=root_of(IDENTITY, asked, b"", each)).grow())
        for each in ("1", "2")
    )
    assert not set(one) & set(two)


@BOTH
def test_an_image_in_the_middle_leaves_the_blocks_before_it_alone(keys_of: Kind) -> None:
    plain = split(keys_of(request(TOKENS)).grow())
    seen = split(keys_of(request(TOKENS, mm_features=[picture("hash-1", 21, 6)])).grow())
    assert seen[:5] == plain[:5]
    assert not set(seen[5:]) & set(plain)


@BOTH
def test_embeddings_that_differ_late_share_what_comes_before(keys_of: Kind) -> None:
    one, two = torch.zeros(50, 8), torch.zeros(50, 8)
    two[33, 0] = 1
    first, second = (
        split(keys_of(request(TOKENS, prompt_embeds=each)).grow()) for each in (one, two)
    )
    assert first[:8] == second[:8] and not set(first[8:]) & set(second)


@BOTH
@pytest.mark.parametrize("field", ModelIdentity.__struct_fields__)
def test_every_fact_about_the_model_is_in_every_key(keys_of: Kind, field: str) -> None:
    asked = request(TOKENS)
    value = getattr(IDENTITY, field)
    changed = (
        (("attention", "x"),)
        if field == "details"
        else value + 1
        if isinstance(value, int)
        else value + "x"
    )
    other = msgspec.structs.replace(IDENTITY, **{field: changed})
    one, two = (
        split(keys_of(asked, root=root_of(each, asked, b"", "")).grow())
        for each in (IDENTITY, other)
    )
    assert not set(one) & set(two)


@BOTH
def test_after_a_reset_all_keys_are_others(keys_of: Kind) -> None:
    asked = request(TOKENS)
    one, two = (
        split(keys_of(asked, root=root_of(IDENTITY, asked, each, "")).grow())
        for each in (b"", b"again")
    )
    assert not set(one) & set(two)


def test_the_two_kinds_never_meet() -> None:
    assert not set(split(engine_keys(request(TOKENS)).grow())) & set(
        split(own_keys(request(TOKENS)).grow())
    )


@BOTH
@pytest.mark.parametrize("blocks", [1, 4])
def test_growing_token_by_token_gives_what_all_at_once_gives(keys_of: Kind, blocks: int) -> None:
    given: dict[str, Any] = {"cache_salt": "s", "mm_features": [picture("hash-1", 3, 10)]}
    asked = request(TOKENS[:10], **given)
    growing = keys_of(asked, blocks * HASH_TOKENS)
    keys = growing.grow()
    for token in TOKENS[10:]:
        asked.append_output_token_ids(token)
        keys += growing.grow()
        assert len(keys) == asked.num_tokens // (blocks * HASH_TOKENS) * KEY_BYTES
    assert growing.grow() == b""
    assert keys == keys_of(request(TOKENS, **given), blocks * HASH_TOKENS).grow() != b""


@BOTH
def test_a_coarser_block_stands_for_all_of_its_tokens(keys_of: Kind) -> None:
    coarse = split(keys_of(request(TOKENS), 4 * HASH_TOKENS).grow())
    assert len(coarse) == 3
    for changed in range(48):
        other = split(
            keys_of(request([*TOKENS[:changed], 7, *TOKENS[changed + 1 :]]), 4 * HASH_TOKENS).grow()
        )
        assert [one == two for one, two in zip(coarse, other, strict=True)] == [
            at < changed // 16 for at in range(3)
        ]
    if keys_of is engine_keys:
        assert coarse == split(keys_of(request(TOKENS)).grow())[3::4]


def test_hashes_of_another_size_are_refused() -> None:
    asked = request(TOKENS)
    with pytest.raises(KVKeepError, match="12 hashes of 8 tokens"):
        EngineKeys(root_of(IDENTITY, asked, b"", ""), asked, 8, 8)
    with pytest.raises(KVKeepError, match="hashes"):
        EngineKeys(root_of(IDENTITY, asked, b"", ""), asked, 6, HASH_TOKENS)


def test_hashes_that_changed_under_us_are_noticed() -> None:
    for change in ("other", "fewer"):
        asked = request(TOKENS)
        keys = engine_keys(asked)
        keys.grow()
        if change == "other":
            asked.block_hashes[-1] = b"x" * 32
        else:
            del asked.block_hashes[-1]
        with pytest.raises(TokensChanged):
            keys.grow()


def test_tokens_that_changed_under_us_are_noticed() -> None:
    asked = request(TOKENS)
    keys = own_keys(asked)
    keys.grow()
    asked._all_token_ids[47] += 1
    with pytest.raises(TokensChanged):
        keys.grow()
    asked = request(TOKENS)
    keys = own_keys(asked)
    keys.grow()
    del asked._all_token_ids[40:]
    with pytest.raises(TokensChanged):
        keys.grow()


@BOTH
@pytest.mark.parametrize(
    "salt", ["", "a" * 100_000, "\ud800", "x\x00y", "🔑", "('lora', 'style')", "@/\\"], ids=ascii
)
def test_any_text_may_be_a_salt(keys_of: Kind, salt: str) -> None:
    try:
        asked = request(TOKENS, cache_salt=salt)
    except UnicodeEncodeError:
        pytest.skip("vLLM's own hashes do not take this salt")
    keys = keys_of(asked).grow()
    assert len(keys) == 12 * KEY_BYTES
    assert (keys == keys_of(request(TOKENS)).grow()) == (salt == ""), (
        "no salt and an empty one are the same to vLLM"
    )


@BOTH
def test_a_salt_cannot_pass_for_an_adapter_nor_a_token_for_a_salt(keys_of: Kind) -> None:
    lora = split(keys_of(request(TOKENS, lora_request=adapter())).grow())
    for salt in (
        "style",
        "/adapters/one",
        repr(("style", "/adapters/one")),
        "('lora', 'style', '/adapters/one')",
    ):
        assert not set(lora) & set(split(keys_of(request(TOKENS, cache_salt=salt)).grow()))
