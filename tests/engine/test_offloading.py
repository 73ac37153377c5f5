"""The users' options for offloading: what they mean, and what is refused with a hint."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.engine.offloading import KVTransferConfig, resolve
from kvkeep.errors import SettingsError
from kvkeep.units import GIB

Words = dict[str, Any]


def refusal(does: Callable[[], object]) -> str:
    """Message and hint of the SettingsError. Each refusal has both."""
    with pytest.raises(SettingsError) as caught:
        does()
    assert caught.value.hint
    return str(caught.value)


# --- KVTransferConfig -----------------------------------------------------------------------------


def test_the_default_is_no_connector_and_recompute() -> None:
    assert KVTransferConfig() == KVTransferConfig(None, None, {}, "recompute")


@pytest.mark.parametrize("connector", ["KVKeepConnector", "NativeConnector"])
def test_a_connector_without_a_role_has_the_only_one_there_is(connector: str) -> None:
    config = KVTransferConfig(connector)
    assert (config.kv_connector, config.kv_role) == (connector, "kv_both")


def test_m4_vllms_name_of_an_external_servers_connector_is_ours() -> None:
    extra = {"lmcache.mp.port": 7}
    config = KVTransferConfig("LMCacheMPConnector", kv_connector_extra_config=extra)
    assert config == KVTransferConfig("KVKeepConnector", "kv_both", extra)
    ours = KVTransferConfig("KVKeepConnector")
    assert KVTransferConfig.of({"kv_connector": "LMCacheMPConnector"}) == ours
    assert resolve("kvkeep", 4, KVTransferConfig("LMCacheMPConnector")) == ours


ROLES = '"kv_both", "kv_producer", "kv_consumer"'
POLICIES = '"recompute", "fail"'
CONNECTORS = ('"NativeConnector"', '"KVKeepConnector"')


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("kv_connector", "NixlConnector", CONNECTORS),
        ("kv_connector", "OffloadingConnector", ["here it is NativeConnector"]),
        ("kv_role", "kv_producer", ["is not supported", '"kv_both"']),
        ("kv_role", "kv_consumer", ["is not supported", '"kv_both"']),
        *(("kv_role", role, [ROLES]) for role in ("both", "", 1, True)),
        *(("kv_load_failure_policy", policy, [POLICIES]) for policy in ("retry", None, ["fail"])),
    ],
)
def test_an_unknown_value_is_refused_with_the_known_ones(
    field: str, value: Any, said: list[str]
) -> None:
    words = {"kv_connector": "KVKeepConnector", field: value}
    message = refusal(lambda: KVTransferConfig(**words))
    assert all(each in message for each in (f"{field} = {value!r}", *said))


@pytest.mark.parametrize("extra", [None, [], "a=b", {1: 2}])
def test_extra_config_that_is_no_object_is_refused(extra: Any) -> None:
    message = refusal(lambda: KVTransferConfig(kv_connector_extra_config=extra))
    assert "kv_connector_extra_config" in message


def test_extra_config_is_a_copy_that_can_cross_processes() -> None:
    mine = {"kvkeep.port": 7}
    config = KVTransferConfig("KVKeepConnector", kv_connector_extra_config=mine)
    mine["kvkeep.port"] = 8
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.kv_connector_extra_config == {"kvkeep.port": 7}


def test_of_takes_nothing_an_instance_an_object_and_json() -> None:
    words: Words = {"kv_connector": "KVKeepConnector", "kv_role": "kv_both"}
    words["kv_load_failure_policy"] = "fail"
    config = KVTransferConfig("KVKeepConnector", "kv_both", {}, "fail")
    assert KVTransferConfig.of(None) is None
    assert KVTransferConfig.of(config) is config
    assert KVTransferConfig.of(words) == KVTransferConfig.of(json.dumps(words)) == config
    assert KVTransferConfig.from_json(json.dumps(words)) == config


@pytest.mark.parametrize("value", [{"kv_conector": "x"}, '{"kv_conector": "x"}'])
def test_an_unknown_key_is_refused_with_the_nearest(value: Any) -> None:
    said = refusal(lambda: KVTransferConfig.of(value))
    assert "unknown key 'kv_conector'" in said and "nearest known one is 'kv_connector'" in said


NOT_OBJECTS = ["", "{", "null", "[]", '"KVKeepConnector"', "1", "[" * 100_000]


@pytest.mark.parametrize("value", [*NOT_OBJECTS, 1, [], b"{}", True, {1: 2}])
def test_a_value_that_is_no_object_of_names_is_refused(value: Any) -> None:
    message = refusal(lambda: KVTransferConfig.of(value))
    assert ("unknown key 1" if value == {1: 2} else "kv_transfer_config") in message


# --- resolve --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["native", "kvkeep", "lmcache"])
def test_without_a_size_offloading_is_off_whatever_the_backend(backend: str) -> None:
    given = KVTransferConfig("NativeConnector")
    assert resolve(backend, None, None) is None
    assert resolve(backend, None, given) is given
    assert resolve() is None


def test_native_is_the_in_process_connector_with_the_size_in_bytes() -> None:
    config = resolve("native", 1.5)
    extra = {"cpu_bytes_to_use": 3 * GIB // 2}
    assert config == KVTransferConfig("NativeConnector", "kv_both", extra)
    assert type(config.kv_connector_extra_config["cpu_bytes_to_use"]) is int


def test_m4_the_external_server_is_the_default_and_is_not_told_the_size() -> None:
    """vLLM's name of the backend is our server, too."""
    config = KVTransferConfig("KVKeepConnector", "kv_both", {})
    assert resolve(kv_offloading_size=4) == resolve("kvkeep", 4) == resolve("lmcache", 4) == config


def test_the_users_keys_stay_as_they_are() -> None:
    extra: Words = {"cpu_bytes_to_use": 7, "kvkeep.verify": False, "other": {"a": 1}}
    given = KVTransferConfig(kv_connector_extra_config=extra, kv_load_failure_policy="fail")
    before = pickle.dumps(given)
    for backend, connector in (("native", "NativeConnector"), ("kvkeep", "KVKeepConnector")):
        config = resolve(backend, 4, given)
        assert config == KVTransferConfig(connector, "kv_both", extra, "fail")
    assert pickle.dumps(given) == before


def test_the_size_joins_the_users_other_keys_without_touching_them() -> None:
    given = KVTransferConfig("NativeConnector", kv_connector_extra_config={"other": 1})
    config = resolve("native", 1, given)
    joined = {"other": 1, "cpu_bytes_to_use": GIB}
    assert config is not None and config.kv_connector_extra_config == joined
    assert given.kv_connector_extra_config == {"other": 1}


@pytest.mark.parametrize(
    ("backend", "other"),
    [("native", "KVKeepConnector"), ("kvkeep", "NativeConnector"), ("lmcache", "NativeConnector")],
)
def test_a_size_and_another_connector_contradict_each_other(backend: str, other: str) -> None:
    said = refusal(lambda: resolve(backend, 4, KVTransferConfig(other)))
    assert "kv_offloading_size" in said and "kv_transfer_config" in said and "contradict" in said
    assert other in said and "leave one of them out" in said


@pytest.mark.parametrize("size", [None, 4])
def test_an_unknown_backend_is_always_refused(size: float | None) -> None:
    said = refusal(lambda: resolve("disk", size))
    assert "kv_offloading_backend = 'disk'" in said and '"native", "kvkeep"' in said


BAD_NUMBERS = [0, 0.0, -1, 1e-12, 1e308, 10**400, float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("backend", ["native", "kvkeep"])
@pytest.mark.parametrize("size", [*BAD_NUMBERS, True, False, "4", [4]])
def test_a_size_that_is_none_is_refused(backend: str, size: Any) -> None:
    assert "kv_offloading_size" in refusal(lambda: resolve(backend, size))
