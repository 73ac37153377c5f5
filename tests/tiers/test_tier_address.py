"""Addresses of tiers: what they mean, that they are shown as they are parsed, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.tiers.tier_address import TierAddress, parse_tiers, show_tiers


def test_an_address_is_a_directory_and_a_size() -> None:
    assert parse_tiers("disk:///var/lib/kvkeep?size=200GiB") == (
        TierAddress(Path("/var/lib/kvkeep"), 200 << 30),
    )
    assert parse_tiers("none") == parse_tiers("") == ()


def test_a_shared_directory() -> None:
    (tier,) = parse_tiers("file:///srv/kv?size=2TiB")
    assert (tier.scheme, tier.directory, tier.size_bytes) == ("file", Path("/srv/kv"), 2 << 40)
    assert tier.is_shared and str(tier) == "file:///srv/kv?size=2TiB"
    assert not parse_tiers("disk:///a?size=1GiB")[0].is_shared


@pytest.mark.parametrize("size", ["200GiB", "16777217", "1.5TiB"])
def test_several_are_shown_as_they_are_parsed(size: str) -> None:
    tiers = parse_tiers(f"disk:///a?size={size}, disk:///with%20space?size=1GiB")
    assert parse_tiers(show_tiers(tiers)) == tiers
    assert tiers[1].directory == Path("/with space")
    assert show_tiers(()) == "none"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("/var/lib/kvkeep", "does not begin with one of disk://, file://"),
        ("file:///a", "exactly one option"),
        ("file://user:secret@host/a?size=1GiB", "no user or password"),
        ("file:///a?size=1GiB,file:///b?size=1GiB", "one shared tier at most"),
        ("file:///a?size=1GiB,disk:///a?size=1GiB", "same directory"),
        ("disk://var/lib?size=1GiB", "no absolute path"),
        ("disk:///?size=1GiB", "no absolute path"),
        ("disk:///a", "size"),
        ("disk:///a?size=1GiB&rate=2", "exactly one option"),
        ("disk:///a?size=plenty", "size=plenty"),
        ("disk:///a?size=1MiB", "less than 16MiB"),
        ("s3://bucket?max_age=old", "max_age=old is not a duration"),
        ("s3://bucket?max_age=9m", "less than 10m"),
        ("disk:///a?size=1GiB,disk:///a?size=2GiB", "same directory"),
        ("disk:///a?size=1GiB,disk:///b/..//a?size=1GiB", "same directory"),
        ("disk:///a%0a?size=1GiB", "cannot be printed"),
    ],
)
def test_what_is_wrong_is_said(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("?", r"\?")):
        parse_tiers(text)
