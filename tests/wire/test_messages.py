"""Tests for the protocol as prose and as types: they say the same."""

from __future__ import annotations

import re
from typing import Any, get_args

import msgspec
import pytest

from kvkeep.wire import messages as m

REQUESTS = get_args(m.Request)
REPLIES = get_args(m.Reply)


def name_of(message: Any) -> str:
    return str(message.__name__)


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=name_of)
def test_the_prose_mentions_every_message(message: type[m.Message]) -> None:
    assert m.__doc__ and re.search(rf"\b{message.__name__}\b", m.__doc__)


@pytest.mark.parametrize("message", REQUESTS, ids=name_of)
def test_a_request_says_what_answers_it(message: type[m.Message]) -> None:
    said = re.findall(r"Answered by\s+(\w+)", message.__doc__ or "")
    assert len(said) == 1
    assert said[0] in {name_of(reply) for reply in REPLIES} - {"Refused"}


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=name_of)
def test_the_tag_of_a_message_is_its_name(message: type[m.Message]) -> None:
    assert message.__struct_config__.tag == message.__name__


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=name_of)
def test_a_message_is_frozen_and_takes_no_unknown_field(message: type[m.Message]) -> None:
    assert message.__struct_config__.frozen
    assert message.__struct_config__.forbid_unknown_fields


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (m.Release([1]), {"type", "leases"}),
        (m.Release([1], [16]), {"type", "leases", "loaded_tokens"}),
        (m.Lookup("t", 1, b"k"), {"type", "tenant", "layout", "keys"}),
        (m.Lookup("t", 1, b"k", 0, 5), {"type", "tenant", "layout", "keys", "patience_ms"}),
        (m.Lookup("t", 1, b"k", trace="00"), {"type", "tenant", "layout", "keys", "trace"}),
        (m.CompleteStore(1, b"c"), {"type", "write", "checksums"}),
        (m.Found(1, b"s", b"c"), {"type", "blocks", "slots", "checksums"}),
        (m.OpenLayout(b"f", [8]), {"type", "fingerprint", "shard_bytes"}),
        (m.LayoutOpened(1, 8, [0]), {"type", "layout", "slot_bytes", "shard_offsets"}),
    ],
)
def test_a_field_at_its_default_is_not_sent_to_peers_that_may_not_know_it(
    message: m.Message, fields: set[str]
) -> None:
    assert set(msgspec.msgpack.decode(msgspec.msgpack.encode(message))) == fields


def test_every_message_is_a_request_a_reply_or_part_of_one() -> None:
    defined = {
        each for each in vars(m).values() if isinstance(each, type) and issubclass(each, m.Message)
    }
    assert defined - {m.Message} == {*REQUESTS, *REPLIES, m.PoolPlace, m.WireLimits}


def test_the_prose_names_the_version_and_the_limit_of_lists() -> None:
    assert m.__doc__ and m.__doc__.startswith(f"The protocol, version {m.PROTOCOL_VERSION}.")
    assert f"{m.MAX_LIST_ITEMS:,}" in m.__doc__
