"""Model identity and tenant ids: what is accepted, what is refused, and that no two salts share an
id."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import RequestError
from kvkeep.kv.identity import (
    DEFAULT_TENANT,
    LAYOUT_VERSION,
    MAX_DETAILS,
    MAX_TEXT_CHARS,
    ModelIdentity,
    differing_parts,
    is_tenant,
    tenant_of,
)

FIELDS: dict[str, Any] = {
    "model": "org/model-8b",
    "revision": "a1b2c3",
    "kv_dtype": "bfloat16",
    "block_tokens": 16,
    "content": "LBHNC/32x8x128",
    "details": (("attention", "FLASH_ATTN"), ("positions", "llama3")),
}

any_text = st.text(st.characters())  # lone surrogates included


def test_equal_fields_make_equal_frozen_identities() -> None:
    identity = ModelIdentity(**FIELDS)
    assert identity == ModelIdentity(**FIELDS)
    assert hash(identity) == hash(ModelIdentity(**FIELDS))
    assert identity.layout_version == LAYOUT_VERSION
    with pytest.raises(AttributeError):
        identity.model = "other"  # type: ignore[misc]


def test_an_identity_survives_the_wire() -> None:
    identity = ModelIdentity(**FIELDS)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(identity), type=ModelIdentity) == identity


@pytest.mark.parametrize("field", ["model", "revision", "kv_dtype", "content"])
@pytest.mark.parametrize("value", ["", None, 7, b"bytes", "x" * (MAX_TEXT_CHARS + 1), "\ud800"])
def test_bad_texts_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        ModelIdentity(**{**FIELDS, field: value})
    assert caught.value.field == field
    assert caught.value.code == "bad_identity"


@pytest.mark.parametrize("field", ["block_tokens", "layout_version"])
@pytest.mark.parametrize("value", [0, -1, 2**40, True, 16.0, "16", None])
def test_bad_counts_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        ModelIdentity(**{**FIELDS, field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["model", "revision", "kv_dtype", "block_tokens", "content"])
def test_nothing_that_decides_the_bytes_has_a_default(field: str) -> None:
    with pytest.raises(TypeError, match=field):
        ModelIdentity(**{name: value for name, value in FIELDS.items() if name != field})


@pytest.mark.parametrize(
    "details",
    [
        None,
        ["attention"],
        (("attention",),),
        (("attention", ""),),
        (("attention", 7),),
        (("Attention", "x"),),
        (("", "x"),),
        (("a" * 65, "x"),),
        (("attention", "x"), ("attention", "y")),
        (("model", "x"),),
        tuple((f"part{number}", "x") for number in range(MAX_DETAILS + 1)),
    ],
)
def test_bad_details_are_refused_by_name(details: Any) -> None:
    with pytest.raises(RequestError, match="details") as caught:
        ModelIdentity(**{**FIELDS, "details": details})
    assert caught.value.field.startswith("details")


def test_two_identities_are_equal_exactly_where_their_parts_are() -> None:
    one = ModelIdentity(**FIELDS)
    turned = ModelIdentity(**{**FIELDS, "details": FIELDS["details"][::-1]})
    assert one.parts == turned.parts and differing_parts(one.parts, turned.parts) == []
    other = ModelIdentity(**{**FIELDS, "revision": "x", "details": FIELDS["details"][:1]})
    assert differing_parts(one.parts, other.parts) == ["revision", "positions"]


@pytest.mark.parametrize(
    ("salt", "tenant"),
    [
        (None, "default"),
        ("", "default"),
        ("alice", "t-31d04e1329dd2891502a7382d3706f4d"),
        ("default", "t-d842a100d67cd0ded3347dc3e31802a7"),
        ("\ud800", "t-1670e6e5c3fc93b44d805d9d0a65e337"),
    ],
)
def test_known_tenants(salt: str | None, tenant: str) -> None:
    assert tenant_of(salt) == tenant
    assert is_tenant(tenant)


@given(any_text)
def test_every_salt_has_a_tenant(salt: str) -> None:
    tenant = tenant_of(salt)
    assert is_tenant(tenant)
    assert (tenant == DEFAULT_TENANT) == (salt == "")
    assert tenant.isascii()


@given(any_text, any_text)
def test_tenants_are_equal_only_for_equal_salts(one: str, other: str) -> None:
    assert (tenant_of(one) == tenant_of(other)) == (one == other)


def test_salts_that_look_alike_stay_apart() -> None:
    # Composed and decomposed, a character and its two surrogates, a trailing NUL, a tenant's own
    # id.
    salts = [
        "é", "e\u0301", "\U00010000", "\ud800\udc00", "a", "a\0", " a", "A", "default",
        tenant_of("a"),
    ]  # fmt: skip
    assert len({tenant_of(salt) for salt in salts}) == len(salts)


@pytest.mark.parametrize(
    "text",
    ["", "t-", "Default", "default\n", "t-" + "0" * 31, "t-" + "0" * 33, "t-" + "A" * 32,
     "t-" + "0" * 32 + "\n", "t-" + "٠" * 32, "../default", None, 5, b"default"],
)  # fmt: skip
def test_what_is_no_tenant(text: object) -> None:
    assert not is_tenant(text)
