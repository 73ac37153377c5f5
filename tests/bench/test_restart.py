"""The restart benchmark runs, and says what it must in the form it must. How fast is not a test's
business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.bench import restart
from kvkeep.client.cache import Cache
from kvkeep.errors import SettingsError
from kvkeep.units import MIB


def test_all_that_was_ready_is_found_again_and_right(
    without_unit: Callable[..., list[str]],
) -> None:
    result = restart.run(bytes=16 * MIB, block_bytes=4096)
    assert (result["blocks"], result["bytes"]) == (4096, 16 * MIB) and without_unit(result) == []
    assert (
        result["hit_again"],
        result["hit_fraction"],
        result["wrong_bytes"],
        result["dropped"],
    ) == (4096, 1.0, 0, 0)
    assert min(result["serving_again_s"], result["process_started_s"], result["adoption_s"]) > 0


def test_a_wrong_byte_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    get, seen = Cache.get, list[Any]()

    def harmed(*given: Any) -> Any:
        seen.append(get(*given).copy())
        if len(seen) == 2:
            seen[-1][5, 7] ^= 1 << 9
        return seen[-1]

    monkeypatch.setattr(Cache, "get", harmed)
    result = restart.run(bytes=MIB, block_bytes=4096)
    assert (len(seen), result["hit_again"], result["wrong_bytes"]) == (4, 256, 1)


@pytest.mark.parametrize(
    ("options", "said"), [({"bytes": 1000}, "not one chain"), ({"block_bytes": 100}, "4096")]
)
def test_what_makes_no_sense_is_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        restart.run(**options)
