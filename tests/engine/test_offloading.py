"""What users say about offloading: what it amounts to, and what is refused in words that help."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvkeep.client.options import ClientOptions
from kvkeep.engine.offloading import KVTransferConfig, client_options, load_mode, resolve
from kvkeep.errors import SettingsError
from kvkeep.units import GIB


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVKEEP_ADDRESS", raising=False)


def refusal(does: Callable[[], object]) -> str:
    """Message and hint of the SettingsError. Each refusal has both."""
    with pytest.raises(SettingsError) as caught:
        does()
    assert caught.value.hint
    return str(caught.value)


# --- KVTransferConfig -------------------------------------------------------------------------------------------


def test_nothing_said_is_no_connector_and_recompute() -> None:
    config = KVTransferConfig()
    assert (config.kv_connector, config.kv_role, config.kv_load_failure_policy) == (None, None, "recompute")
    assert config.kv_connector_extra_config == {}


@pytest.mark.parametrize("connector", ["KVKeepConnector", "NativeConnector"])
def test_a_connector_without_a_role_has_the_only_one_there_is(connector: str) -> None:
    assert KVTransferConfig(connector) == KVTransferConfig(connector, "kv_both")


def test_an_unknown_connector_is_refused_with_the_known_ones() -> None:
    said = refusal(lambda: KVTransferConfig("NixlConnector", "kv_both"))
    assert all(word in said for word in ("kv_connector", "'NixlConnector'", '"NativeConnector"', '"KVKeepConnector"'))


@pytest.mark.parametrize(
    ("theirs", "ours"), [("LMCacheMPConnector", "KVKeepConnector"), ("OffloadingConnector", "NativeConnector")]
)
def test_vllms_name_of_a_connector_is_refused_with_ours(theirs: str, ours: str) -> None:
    assert f"here it is {ours}" in refusal(lambda: KVTransferConfig(theirs, "kv_both"))


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
    assert "kv_connector_extra_config" in refusal(lambda: KVTransferConfig(kv_connector_extra_config=extra))


def test_extra_config_is_a_copy_that_can_cross_processes() -> None:
    mine = {"kvkeep.port": 7}
    config = KVTransferConfig("KVKeepConnector", kv_connector_extra_config=mine)
    mine["kvkeep.port"] = 8
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.kv_connector_extra_config == {"kvkeep.port": 7}


def test_of_takes_nothing_an_instance_an_object_and_json() -> None:
    words = {"kv_connector": "KVKeepConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
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


# --- resolve ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["native", "kvkeep"])
def test_without_a_size_offloading_is_off_whatever_the_backend(backend: str) -> None:
    given = KVTransferConfig("NativeConnector")
    assert resolve(backend, None, None) is None
    assert resolve(backend, None, given) is given
    assert resolve() is None


def test_native_is_the_in_process_connector_with_the_size_in_bytes() -> None:
    config = resolve("native", 1.5)
    assert config == KVTransferConfig("NativeConnector", "kv_both", {"cpu_bytes_to_use": 3 * GIB // 2})
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
    assert config is not None and config.kv_connector_extra_config == {"other": 1, "cpu_bytes_to_use": GIB}
    assert given.kv_connector_extra_config == {"other": 1}


@pytest.mark.parametrize(("backend", "other"), [("native", "KVKeepConnector"), ("kvkeep", "NativeConnector")])
def test_a_size_and_another_connector_contradict_each_other(backend: str, other: str) -> None:
    said = refusal(lambda: resolve(backend, 4, KVTransferConfig(other)))
    assert "kv_offloading_size" in said and "kv_transfer_config" in said and "contradict" in said
    assert other in said and "leave one of them out" in said


@pytest.mark.parametrize("size", [None, 4])
def test_an_unknown_backend_is_always_refused(size: float | None) -> None:
    said = refusal(lambda: resolve("disk", size))
    assert "kv_offloading_backend = 'disk'" in said and '"native", "kvkeep"' in said


def test_vllms_name_of_the_backend_is_refused_with_ours() -> None:
    said = refusal(lambda: resolve("lmcache", 4))
    assert "vLLM's name for an external server" in said and '"kvkeep"' in said


@pytest.mark.parametrize("backend", ["native", "kvkeep"])
@pytest.mark.parametrize(
    "size", [0, 0.0, -1, float("nan"), float("inf"), -float("inf"), True, False, "4", [4], 1e-12, 1e308, 10**400]
)
def test_a_size_that_is_none_is_refused(backend: str, size: Any) -> None:
    assert "kv_offloading_size" in refusal(lambda: resolve(backend, size))


# --- client_options ---------------------------------------------------------------------------------------------


def address(**extra: Any) -> str:
    """Of extra config in which `_` stands for the dots."""
    named = {key.replace("lmcache_mp_", "lmcache.mp.").replace("kvkeep_", "kvkeep."): extra[key] for key in extra}
    return client_options(named).address


def test_without_a_word_the_address_is_the_default() -> None:
    assert client_options({}) == ClientOptions()
    assert client_options({}).address == "tcp://localhost:5555"


def test_without_a_word_the_environment_says_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_ADDRESS", "tcp://cache:7")
    assert client_options({}).address == "tcp://cache:7"
    assert address(kvkeep_port=8) == "tcp://localhost:8"


@pytest.mark.parametrize(
    "given", ["tcp://cache:7", "tcp://10.0.0.1:65535", "tcp://[::1]:1", "ipc:///run/kv", "ipc://@kv"]
)
def test_an_address_is_taken_as_it_is(given: str) -> None:
    assert address(kvkeep_address=given) == given


@pytest.mark.parametrize(
    "given", ["", "cache:7", "cache", "tcp://cache", "tcp://:7", "tcp://*:7", "tcp://cache:0", "tcp://cache:65536"]
)
def test_an_address_nobody_can_connect_to_is_refused(given: str) -> None:
    said = refusal(lambda: address(kvkeep_address=given))
    assert f"kvkeep.address = {given!r}" in said and "tcp://host:port" in said


@pytest.mark.parametrize(
    "given", ["http://cache:7", "ipc://kv", "tcp://[:::]:7", "tcp://a b:7", 7, True, ["tcp://a:7"]]
)
def test_an_address_of_no_known_kind_is_refused(given: Any) -> None:
    assert "kvkeep.address" in refusal(lambda: address(kvkeep_address=given))


@pytest.mark.parametrize("prefix", ["kvkeep_", "lmcache_mp_"])
@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("cache", 7, "tcp://cache:7"),
        ("tcp://cache", 7, "tcp://cache:7"),
        ("tcp://kv_cache.svc", "7", "tcp://kv_cache.svc:7"),
        ("cache", None, "tcp://cache:5555"),
        (None, 7, "tcp://localhost:7"),
        ("::1", 7, "tcp://[::1]:7"),
        ("[::1]", 7, "tcp://[::1]:7"),
        ("tcp://[fd00::2]", 65535, "tcp://[fd00::2]:65535"),
        ("tcp://fd00::2", 1, "tcp://[fd00::2]:1"),
        (None, None, "tcp://localhost:5555"),
    ],
)
def test_host_and_port_make_an_address(prefix: str, host: Any, port: Any, expected: str) -> None:
    assert address(**{f"{prefix}host": host, f"{prefix}port": port}) == expected
    given = {f"{prefix}{name}": value for name, value in (("host", host), ("port", port)) if value is not None}
    assert address(**given) == expected


def test_our_own_keys_win_over_those_of_other_servers() -> None:
    assert address(kvkeep_host="a", lmcache_mp_host="b", lmcache_mp_port=7) == "tcp://a:7"
    assert address(kvkeep_port=8, lmcache_mp_host="b", lmcache_mp_port=7) == "tcp://b:8"
    assert address(kvkeep_address="tcp://c:9", lmcache_mp_host="b", lmcache_mp_port=7) == "tcp://c:9"


@pytest.mark.parametrize("other", [{"kvkeep.host": "b"}, {"kvkeep.port": 7}])
def test_an_address_and_a_host_or_port_contradict_each_other(other: dict[str, Any]) -> None:
    said = refusal(lambda: client_options({"kvkeep.address": "tcp://a:7", **other}))
    assert "contradict" in said and next(iter(other)) in said


@pytest.mark.parametrize("key", ["kvkeep.host", "lmcache.mp.host"])
@pytest.mark.parametrize(
    "host",
    ["", "tcp://", "cache:7", "a b", "*", "[::1", ":::", "[cache]", "fe80::1%a b", "ipc:///run/kv", "-a", 7, True],
)
def test_a_host_that_is_none_is_refused(key: str, host: Any) -> None:
    assert f"{key} = {host!r}" in refusal(lambda: client_options({key: host}))


def test_a_port_within_the_host_is_told_its_place() -> None:
    assert "port goes into a key of its own" in refusal(lambda: client_options({"kvkeep.host": "cache:7"}))


@pytest.mark.parametrize("key", ["kvkeep.port", "lmcache.mp.port"])
@pytest.mark.parametrize("port", [0, -1, 65536, True, 5555.0, "", "x", "65536", "٣", [7]])
def test_a_port_that_is_none_is_refused(key: str, port: Any) -> None:
    said = refusal(lambda: client_options({key: port}))
    assert f"{key} = {port!r}" in said and "1 to 65535" in said


def test_every_option_of_the_client_can_be_set() -> None:
    chosen = ClientOptions(
        address="tcp://cache:7",
        client="engine-1",
        lookup_deadline_ms=11,
        store_deadline_ms=12,
        handshake_deadline_ms=13,
        ping_interval_ms=14,
        reconnect_interval_ms=15,
        failures_to_open=16,
        verify=False,
        shared_memory=False,
    )
    extra = {f"kvkeep.{name}": value for name, value in vars(chosen).items()}
    assert client_options(extra) == chosen
    assert all(value != vars(ClientOptions())[name] for name, value in vars(chosen).items())  # or it proves nothing


def test_verify_can_be_left_to_the_server() -> None:
    assert client_options({"kvkeep.verify": None}).verify is None


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("kvkeep.lookup_deadline_ms", 0, "at least 1"),
        ("kvkeep.lookup_deadline_ms", 1.5, "a whole number"),
        ("kvkeep.lookup_deadline_ms", True, "a whole number"),
        ("kvkeep.store_deadline_ms", "5", "a whole number"),
        ("kvkeep.failures_to_open", None, "a whole number"),
        ("kvkeep.verify", "false", "true, false or null"),
        ("kvkeep.verify", 0, "true, false or null"),
        ("kvkeep.shared_memory", None, "true or false"),
        ("kvkeep.shared_memory", 1, "true or false"),
        ("kvkeep.client", 7, "text"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_key(key: str, value: Any, expected: str) -> None:
    said = refusal(lambda: client_options({key: value}))
    assert f"{key} = {value!r}" in said and expected in said


@pytest.mark.parametrize(
    ("key", "near"), [("kvkeep.adress", "kvkeep.address"), ("kvkeep.lookup_deadline", "kvkeep.lookup_deadline_ms")]
)
def test_an_unknown_key_of_ours_is_refused_with_the_nearest(key: str, near: str) -> None:
    said = refusal(lambda: client_options({key: 1}))
    assert f"unknown key {key!r}" in said and f"nearest known one is {near!r}" in said


def test_keys_of_other_software_are_left_alone() -> None:
    extra = {"cpu_bytes_to_use": 7, "lmcache.mp.timeout": "x", "lookup_deadline_ms": "x", "kvkeeper": 1}
    assert client_options(extra) == ClientOptions()


def test_what_the_user_gave_is_not_touched() -> None:
    extra: Mapping[str, Any] = {"kvkeep.host": "a", "kvkeep.load": "sync", "other": 1}
    client_options(extra)
    assert extra == {"kvkeep.host": "a", "kvkeep.load": "sync", "other": 1}


# --- load_mode --------------------------------------------------------------------------------------------------


def test_loads_are_asynchronous_unless_told_otherwise() -> None:
    assert load_mode({}) == "async"
    assert load_mode({"kvkeep.load": "async"}) == "async"
    assert load_mode({"kvkeep.load": "sync"}) == "sync"


@pytest.mark.parametrize("mode", ["lazy", "", None, True, ["sync"]])
def test_an_unknown_load_mode_is_refused_with_the_known_ones(mode: Any) -> None:
    said = refusal(lambda: load_mode({"kvkeep.load": mode}))
    assert f"kvkeep.load = {mode!r}" in said and '"async", "sync"' in said
