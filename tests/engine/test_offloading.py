"""What users say about offloading: what it amounts to, and what is refused in words that help."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.engine.offloading import KVTransferConfig, resolve
from kvkeep.errors import SettingsError
from kvkeep.units import GIB


def refusal(does: Callable[[], object]) -> str:
    """Message and hint of the SettingsError. Each refusal has both."""
    with pytest.raises(SettingsError) as caught:
        does()
    assert caught.value.hint
    return str(caught.value)


# --- KVTransferConfig -----------------------------------------------------------------------------


def test_nothing_said_is_no_connector_and_recompute() -> None:
    config = KVTransferConfig()
    assert (config.kv_connector, config.kv_role, config.kv_load_failure_policy) == (
        None,
        None,
        "recompute",
    )
    assert config.kv_connector_extra_config == {}


@pytest.mark.parametrize("connector", ["KVKeepConnector", "NativeConnector"])
def test_a_connector_without_a_role_has_the_only_one_there_is(connector: str) -> None:
    assert KVTransferConfig(connector) == KVTransferConfig(connector, "kv_both")


def test_an_unknown_connector_is_refused_with_the_known_ones() -> None:
    said = refusal(lambda: KVTransferConfig("NixlConnector", "kv_both"))
    assert all(
        word in said
        for word in ("kv_connector", "'NixlConnector'", '"NativeConnector"', '"KVKeepConnector"')
    )


def test_vllms_name_of_the_in_process_connector_is_refused_with_ours() -> None:
    assert "here it is NativeConnector" in refusal(
        lambda: KVTransferConfig("OffloadingConnector", "kv_both")
    )


def test_m4_vllms_name_of_an_external_servers_connector_is_ours() -> None:
    config = KVTransferConfig(
        "LMCacheMPConnector", kv_connector_extra_config={"lmcache.mp.port": 7}
    )
    assert config == KVTransferConfig("KVKeepConnector", "kv_both", {"lmcache.mp.port": 7})
    assert KVTransferConfig.of({"kv_connector": "LMCacheMPConnector"}) == KVTransferConfig(
        "KVKeepConnector"
    )
    assert resolve("kvkeep", 4, KVTransferConfig("LMCacheMPConnector")) == KVTransferConfig(
        "KVKeepConnector"
    )


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_role_that_connectors_do_not_have_yet_is_refused(role: str) -> None:
    said = refusal(lambda: KVTransferConfig("KVKeepConnector", role))
    assert f"kv_role = '{role}' is not supported" in said and '"kv_both"' in said


@pytest.mark.parametrize("role", ["both", "", 1, True])
def test_an_unknown_role_is_refused_with_the_known_ones(role: Any) -> None:
    said = refusal(lambda: KVTransferConfig("KVKeepConnector", role))
    assert f"kv_role = {role!r}" in said and '"kv_both", "kv_producer", "kv_consumer"' in said


@pytest.mark.parametrize("policy", ["retry", None, ["fail"]])
def test_an_unknown_policy_is_refused_with_the_known_ones(policy: Any) -> None:
    said = refusal(lambda: KVTransferConfig(kv_load_failure_policy=policy))
    assert f"kv_load_failure_policy = {policy!r}" in said and '"recompute", "fail"' in said


@pytest.mark.parametrize("extra", [None, [], "a=b", {1: 2}])
def test_extra_config_that_is_no_object_is_refused(extra: Any) -> None:
    assert "kv_connector_extra_config" in refusal(
        lambda: KVTransferConfig(kv_connector_extra_config=extra)
    )


def test_extra_config_is_a_copy_that_can_cross_processes() -> None:
    mine = {"kvkeep.port": 7}
    config = KVTransferConfig("KVKeepConnector", kv_connector_extra_config=mine)
    mine["kvkeep.port"] = 8
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.kv_connector_extra_config == {"kvkeep.port": 7}


def test_of_takes_nothing_an_instance_an_object_and_json() -> None:
    words = {
        "kv_connector": "KVKeepConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
    }
    config = KVTransferConfig("KVKeepConnector", "kv_both", {}, "fail")
    assert KVTransferConfig.of(None) is None
    assert KVTransferConfig.of(config) is config
    assert KVTransferConfig.of(words) == KVTransferConfig.of(json.dumps(words)) == config
    assert KVTransferConfig.from_json(json.dumps(words)) == config


@pytest.mark.parametrize("value", [{"kv_conector": "x"}, '{"kv_conector": "x"}'])
def test_an_unknown_key_is_refused_with_the_nearest(value: Any) -> None:
    said = refusal(lambda: KVTransferConfig.of(value))
    assert "unknown key 'kv_conector'" in said and "nearest known one is 'kv_connector'" in said


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '"KVKeepConnector"', "1", "[" * 100_000])
def test_json_that_is_no_object_is_refused(text: str) -> None:
    assert "kv_transfer_config" in refusal(lambda: KVTransferConfig.of(text))


@pytest.mark.parametrize("value", [1, [], b"{}", True])
def test_what_is_neither_object_nor_text_is_refused(value: Any) -> None:
    assert "kv_transfer_config" in refusal(lambda: KVTransferConfig.of(value))


def test_a_key_that_is_no_name_is_refused() -> None:
    assert "unknown key 1" in refusal(lambda: KVTransferConfig.of({1: 2}))  # type: ignore[dict-item]


# --- resolve --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["native", "kvkeep"])
def test_without_a_size_offloading_is_off_whatever_the_backend(backend: str) -> None:
    given = KVTransferConfig("NativeConnector")
    assert resolve(backend, None, None) is None
    assert resolve(backend, None, given) is given
    assert resolve() is None


def test_native_is_the_in_process_connector_with_the_size_in_bytes() -> None:
    config = resolve("native", 1.5)
    assert config == KVTransferConfig(
        "NativeConnector", "kv_both", {"cpu_bytes_to_use": 3 * GIB // 2}
    )
    assert type(config.kv_connector_extra_config["cpu_bytes_to_use"]) is int


def test_the_external_server_is_the_default_and_is_not_told_the_size() -> None:
    assert resolve(kv_offloading_size=4) == KVTransferConfig("KVKeepConnector", "kv_both", {})


def test_what_the_user_gave_stays_as_it_is() -> None:
    extra: dict[str, Any] = {"cpu_bytes_to_use": 7, "kvkeep.verify": False, "other": {"a": 1}}
    given = KVTransferConfig(kv_connector_extra_config=extra, kv_load_failure_policy="fail")
    before = pickle.dumps(given)
    for backend, connector in (("native", "NativeConnector"), ("kvkeep", "KVKeepConnector")):
        config = resolve(backend, 4, given)
        assert config == KVTransferConfig(connector, "kv_both", extra, "fail")
    assert pickle.dumps(given) == before


def test_the_size_joins_the_users_other_keys_without_touching_them() -> None:
    given = KVTransferConfig("NativeConnector", kv_connector_extra_config={"other": 1})
    config = resolve("native", 1, given)
    assert config is not None and config.kv_connector_extra_config == {
        "other": 1,
        "cpu_bytes_to_use": GIB,
    }
    assert given.kv_connector_extra_config == {"other": 1}


@pytest.mark.parametrize(
    ("backend", "other"), [("native", "KVKeepConnector"), ("kvkeep", "NativeConnector")]
)
def test_a_size_and_another_connector_contradict_each_other(backend: str, other: str) -> None:
    said = refusal(lambda: resolve(backend, 4, KVTransferConfig(other)))
    assert "kv_offloading_size" in said and "kv_transfer_config" in said and "contradict" in said
    assert other in said and "leave one of them out" in said


@pytest.mark.parametrize("size", [None, 4])
def test_an_unknown_backend_is_always_refused(size: float | None) -> None:
    said = refusal(lambda: resolve("disk", size))
    assert "kv_offloading_backend = 'disk'" in said and '"native", "kvkeep"' in said


def test_m4_vllms_name_of_the_backend_is_our_server_and_is_not_told_the_size() -> None:
    assert (
        resolve("lmcache", 4)
        == resolve("kvkeep", 4)
        == KVTransferConfig("KVKeepConnector", "kv_both", {})
    )
    assert resolve("lmcache", None) is None
    assert "contradict" in refusal(
        lambda: resolve("lmcache", 4, KVTransferConfig("NativeConnector"))
    )


@pytest.mark.parametrize("backend", ["native", "kvkeep"])
@pytest.mark.parametrize(
    "size",
    [
        0,
        0.0,
        -1,
        float("nan"),
        float("inf"),
        -float("inf"),
        True,
        False,
        "4",
        [4],
        1e-12,
        1e308,
        10**400,
    ],
)
def test_a_size_that_is_none_is_refused(backend: str, size: Any) -> None:
    assert "kv_offloading_size" in refusal(lambda: resolve(backend, size))
