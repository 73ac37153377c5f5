"""Options are checked where they are made, and the one that is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest

from kvkeep.client.options import DEFAULT_ADDRESS, ClientOptions
from kvkeep.errors import SettingsError


def test_the_defaults_reach_a_server_on_this_host() -> None:
    assert ClientOptions().address == DEFAULT_ADDRESS == "tcp://localhost:5555"


@pytest.mark.parametrize("option", ["lookup_deadline_ms", "ping_interval_ms", "failures_to_open"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "100", True, None])
def test_a_number_that_is_none_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=option):
        ClientOptions(**{option: value})
