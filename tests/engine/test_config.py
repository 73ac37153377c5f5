"""What an engine can be told, and what it refuses with a message that names it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from kvkeep.engine.config import EngineConfig
from kvkeep.errors import RequestError, SettingsError

INTEGERS = [option.name for option in fields(EngineConfig) if option.type == "int"]
FLAGS = [option.name for option in fields(EngineConfig) if option.type == "bool"]


def test_defaults_are_fine_and_frozen() -> None:
    config = EngineConfig()
    assert config.world_size == 1 and not config.sync_loads
    assert config.kv_load_failure_policy == "recompute"
    with pytest.raises(FrozenInstanceError):
        config.num_blocks = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "8", None])
def test_a_bad_integer_is_named(name: str, value: object) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(SettingsError, match=f"^{name} must be an integer of at least 1"):
        EngineConfig(**options)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_a_bad_flag_is_named(name: str, value: object) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(SettingsError, match=f"^{name} must be true or false"):
        EngineConfig(**options)


@pytest.mark.parametrize("value", ["", "Recompute", "retry", None])
def test_a_bad_policy_is_named_and_the_good_ones_told(value: Any) -> None:
    with pytest.raises(SettingsError, match="kv_load_failure_policy") as refusal:
        EngineConfig(kv_load_failure_policy=value)
    assert refusal.value.hint == "allowed are recompute and fail"


def test_every_option_is_explained() -> None:
    text = EngineConfig.__doc__ or ""
    assert all(f"    {option.name} " in text for option in fields(EngineConfig))
    assert len(INTEGERS) + len(FLAGS) + 1 == len(fields(EngineConfig))


def test_world_size() -> None:
    assert EngineConfig(tensor_parallel_size=4, pipeline_parallel_size=2).world_size == 8


@pytest.mark.parametrize(
    ("chunked", "budget", "most"),
    [(True, 2048, 32), (True, 10, 32), (False, 10, 10), (False, 99, 32)],
)
def test_how_long_a_request_can_get(chunked: bool, budget: int, most: int) -> None:
    sizes: dict[str, Any] = {"num_blocks": 9, "block_tokens": 4, "max_num_batched_tokens": budget}
    config = EngineConfig(**sizes, enable_chunked_prefill=chunked)
    assert config.max_tokens == most
    config.check_length(most - 3, 3)
    with pytest.raises(RequestError) as refusal:
        config.check_length(most - 3, 4)
    assert (refusal.value.code, refusal.value.field) == ("too_long", "prompt")
    assert f"{most} at most" in refusal.value.message
    assert ("max_num_batched_tokens" if most == 10 else "num_blocks") in refusal.value.hint
