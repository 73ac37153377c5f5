"""Which releases of vLLM are served."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

import vllm
from kvkeep.vllm import versions
from kvkeep.vllm.releases import NEWEST, OLDEST, SUPPORTED, refusal


@pytest.mark.parametrize(
    "version", ["0.26.0", "0.30.0rc1", "0.33.0", "0.33.1", "0.33.1.dev5+g1", vllm.__version__]
)
@pytest.mark.parametrize("allowed", [False, True])
def test_a_release_in_the_range_is_served(version: str, allowed: bool) -> None:
    assert refusal(version, allowed) == ""


@pytest.mark.parametrize("version", ["0.25.1", "0.9.2", "0.0.1"])
@pytest.mark.parametrize("allowed", [False, True])
def test_an_older_one_is_refused_whatever_is_allowed(version: str, allowed: bool) -> None:
    said = refusal(version, allowed)
    assert version in said and SUPPORTED in said
    assert "allow_untested" not in said, "that would not help"


@pytest.mark.parametrize("version", ["0.34.0", "0.34.0.dev1+g1234", "1.0.0", "nonsense", "", "dev"])
def test_a_newer_or_unknown_one_needs_a_word(version: str) -> None:
    said = refusal(version, False)
    assert version in said and SUPPORTED in said and "kvkeep.allow_untested_vllm" in said
    assert refusal(version, True) == ""


def test_the_range_is_the_one_that_is_said() -> None:
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    assert f"{oldest} to {newest}" == SUPPORTED
    assert SUPPORTED in (versions.__doc__ or "")
