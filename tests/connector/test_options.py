"""What a connector's extra config says: what it amounts to, and what is refused in words that
help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvkeep.client.options import ClientOptions
from kvkeep.connector.options import (
    allow_untested,
    client_options,
    load_failure_policy,
    load_mode,
    load_when,
    revision,
    tp_shards,
    tracing,
)
from kvkeep.errors import SettingsError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "KVKEEP_ADDRESS",
        "KVKEEP_CLIENT_KEY",
        "KVKEEP_SERVER_KEY",
        "KVKEEP_TRUSTED_USERS",
    ):
        monkeypatch.delenv(name, raising=False)


def refusal(does: Callable[[], object]) -> str:
    """Message and hint of the SettingsError. Each refusal has both."""
    with pytest.raises(SettingsError) as caught:
        does()
    assert caught.value.hint
    return str(caught.value)


# --- client_options -------------------------------------------------------------------------------


def address(**extra: Any) -> str:
    """Of extra config in which `_` stands for the dots."""
    named = {
        key.replace("lmcache_mp_", "lmcache.mp.").replace("kvkeep_", "kvkeep."): extra[key]
        for key in extra
    }
    return client_options(named).address


def test_without_a_word_the_address_is_the_default() -> None:
    assert client_options({}) == ClientOptions()
    assert client_options({}).address == "tcp://localhost:5555"


def test_without_a_word_the_environment_says_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_ADDRESS", "tcp://cache:7")
    assert client_options({}).address == "tcp://cache:7"
    assert address(kvkeep_port=8) == "tcp://localhost:8"


@pytest.mark.parametrize(
    "given",
    ["tcp://cache:7", "tcp://10.0.0.1:65535", "tcp://[::1]:1", "ipc:///run/kv", "ipc://@kv"],
)
def test_an_address_is_taken_as_it_is(given: str) -> None:
    assert address(kvkeep_address=given) == given


@pytest.mark.parametrize(
    "given",
    [
        "",
        "cache:7",
        "cache",
        "tcp://cache",
        "tcp://:7",
        "tcp://*:7",
        "tcp://cache:0",
        "tcp://cache:65536",
    ],
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
    given = {
        f"{prefix}{name}": value
        for name, value in (("host", host), ("port", port))
        if value is not None
    }
    assert address(**given) == expected


def test_our_own_keys_win_over_those_of_other_servers() -> None:
    assert address(kvkeep_host="a", lmcache_mp_host="b", lmcache_mp_port=7) == "tcp://a:7"
    assert address(kvkeep_port=8, lmcache_mp_host="b", lmcache_mp_port=7) == "tcp://b:8"
    assert (
        address(kvkeep_address="tcp://c:9", lmcache_mp_host="b", lmcache_mp_port=7) == "tcp://c:9"
    )


@pytest.mark.parametrize("other", [{"kvkeep.host": "b"}, {"kvkeep.port": 7}])
def test_an_address_and_a_host_or_port_contradict_each_other(other: dict[str, Any]) -> None:
    said = refusal(lambda: client_options({"kvkeep.address": "tcp://a:7", **other}))
    assert "contradict" in said and next(iter(other)) in said


@pytest.mark.parametrize("key", ["kvkeep.host", "lmcache.mp.host"])
@pytest.mark.parametrize(
    "host",
    [
        "",
        "tcp://",
        "cache:7",
        "a b",
        "*",
        "[::1",
        ":::",
        "[cache]",
        "fe80::1%a b",
        "ipc:///run/kv",
        "-a",
        7,
        True,
    ],
)
def test_a_host_that_is_none_is_refused(key: str, host: Any) -> None:
    assert f"{key} = {host!r}" in refusal(lambda: client_options({key: host}))


def test_a_port_within_the_host_is_told_its_place() -> None:
    assert "port goes into a key of its own" in refusal(
        lambda: client_options({"kvkeep.host": "cache:7"})
    )


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
        verify=False,
        gpu_staging_bytes=17,
        tier_patience="wait",
        shared_memory=False,
        trusted_users=(1000, 1001),
        tls_cert="/keys/engine.pem",
        tls_key="/keys/engine.key",
        tls_ca="/keys/ca.pem",
    )
    extra = {f"kvkeep.{name}": value for name, value in vars(chosen).items()}
    assert client_options(extra) == chosen
    assert all(
        value != vars(ClientOptions())[name] for name, value in vars(chosen).items()
    )  # or it proves nothing


@pytest.mark.parametrize("users", [["root", 7], ["0", "7"], "root,7", (0, 7)])
def test_users_are_ids_or_names(users: Any) -> None:
    assert client_options({"kvkeep.trusted_users": users}).trusted_users == (0, 7)


def test_one_tls_file_without_the_others_is_refused() -> None:
    said = refusal(lambda: client_options({"kvkeep.tls_cert": "/keys/engine.pem"}))
    assert "tls_cert is set and tls_key is not" in said
    assert client_options({"kvkeep.tls_cert": None, "kvkeep.tls_key": None}) == ClientOptions()


@pytest.mark.parametrize("old", ["kvkeep.curve_key", "kvkeep.server_key"])
@pytest.mark.parametrize("value", ["/keys/engine.key", None])
def test_keys_of_earlier_releases_are_refused_by_name(old: str, value: Any) -> None:
    said = refusal(lambda: client_options({old: value}))
    assert f"{old} (kv_connector_extra_config) does not exist any more" in said
    assert "kvkeep.tls_cert, kvkeep.tls_key and kvkeep.tls_ca" in said and "migration guide" in said


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("kvkeep.lookup_deadline_ms", 0, "at least 1"),
        ("kvkeep.lookup_deadline_ms", 1.5, "a whole number"),
        ("kvkeep.lookup_deadline_ms", True, "a whole number"),
        ("kvkeep.store_deadline_ms", "5", "a whole number"),
        ("kvkeep.reconnect_interval_ms", None, "a whole number"),
        ("kvkeep.verify", "false", "true or false"),
        ("kvkeep.verify", None, "true or false"),
        ("kvkeep.shared_memory", None, "true or false"),
        ("kvkeep.shared_memory", 1, "true or false"),
        ("kvkeep.client", 7, "text"),
        ("kvkeep.tier_patience", 200, "timeout=200"),
        ("kvkeep.tier_patience", "timeout=soon", "timeout=200"),
        ("kvkeep.tier_patience", None, "best_effort"),
        ("kvkeep.trusted_users", ["no such user"], "a list of user ids or names"),
        ("kvkeep.trusted_users", [1000, -1], "a list of user ids or names"),
        ("kvkeep.trusted_users", [True], "a list of user ids or names"),
        ("kvkeep.trusted_users", [65534], "a list of user ids or names"),
        ("kvkeep.trusted_users", {"1000": 1}, "a list of user ids or names"),
        ("kvkeep.tls_cert", 7, "text, or null"),
        ("kvkeep.tls_ca", "", "text, or null"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_key(
    key: str, value: Any, expected: str
) -> None:
    said = refusal(lambda: client_options({key: value}))
    assert f"{key} = {value!r}" in said and expected in said


@pytest.mark.parametrize(
    ("key", "near"),
    [("kvkeep.adress", "kvkeep.address"), ("kvkeep.lookup_deadline", "kvkeep.lookup_deadline_ms")],
)
def test_an_unknown_key_of_ours_is_refused_with_the_nearest(key: str, near: str) -> None:
    said = refusal(lambda: client_options({key: 1}))
    assert f"unknown key {key!r}" in said and f"nearest known one is {near!r}" in said


def test_keys_of_other_software_are_left_alone() -> None:
    extra = {
        "cpu_bytes_to_use": 7,
        "lmcache.mp.timeout": "x",
        "lookup_deadline_ms": "x",
        "kvkeeper": 1,
    }
    assert client_options(extra) == ClientOptions()


def test_what_the_user_gave_is_not_touched() -> None:
    extra: Mapping[str, Any] = {"kvkeep.host": "a", "kvkeep.load": "sync", "other": 1}
    client_options(extra)
    assert extra == {"kvkeep.host": "a", "kvkeep.load": "sync", "other": 1}


# --- load_mode, load_when -------------------------------------------------------------------------


def test_loads_are_asynchronous_unless_told_otherwise() -> None:
    assert load_mode({}) == "auto"
    assert load_mode({"kvkeep.load": "async"}) == "async"
    assert load_mode({"kvkeep.load": "sync"}) == "sync"


@pytest.mark.parametrize("mode", ["lazy", "", None, True, ["sync"]])
def test_an_unknown_load_mode_is_refused_with_the_known_ones(mode: Any) -> None:
    said = refusal(lambda: load_mode({"kvkeep.load": mode}))
    assert f"kvkeep.load = {mode!r}" in said and '"auto", "async", "sync"' in said


def test_loads_are_done_where_they_are_faster_unless_told_otherwise() -> None:
    assert load_when({}) == "faster"
    assert load_when({"kvkeep.load_when": "faster"}) == "faster"
    assert load_when({"kvkeep.load_when": "always"}) == "always"


@pytest.mark.parametrize("when", ["never", "", None, True, ["always"]])
def test_an_unknown_time_to_load_is_refused_with_the_known_ones(when: Any) -> None:
    said = refusal(lambda: load_when({"kvkeep.load_when": when}))
    assert f"kvkeep.load_when = {when!r}" in said and '"faster", "always"' in said


# --- load_failure_policy, revision, allow_untested ------------------------------------------------


def test_what_cannot_be_loaded_is_computed_unless_told_otherwise() -> None:
    assert load_failure_policy({}) == "recompute"
    assert load_failure_policy({"kvkeep.load_failure_policy": "recompute"}) == "recompute"
    assert load_failure_policy({"kvkeep.load_failure_policy": "fail"}) == "fail"


@pytest.mark.parametrize("policy", ["retry", "", None, True, ["fail"]])
def test_an_unknown_policy_is_refused_with_the_known_ones(policy: Any) -> None:
    said = refusal(lambda: load_failure_policy({"kvkeep.load_failure_policy": policy}))
    assert f"kvkeep.load_failure_policy = {policy!r}" in said and '"recompute", "fail"' in said


def test_weights_have_no_name_of_the_users_unless_given() -> None:
    assert revision({}) is revision({"kvkeep.revision": None}) is None
    assert revision({"kvkeep.revision": "tuned-2"}) == "tuned-2"


@pytest.mark.parametrize("name", ["", "2\n", "\ud800", 2, True, b"2", ["2"]])
def test_a_revision_that_is_no_name_is_refused(name: Any) -> None:
    assert f"kvkeep.revision = {name!r}" in refusal(lambda: revision({"kvkeep.revision": name}))


def test_releases_that_were_not_tested_are_not_tried_unless_told_to() -> None:
    assert allow_untested({}) is False
    assert allow_untested({"kvkeep.allow_untested_vllm": True}) is True


@pytest.mark.parametrize("allowed", ["true", 1, None])
def test_a_permission_that_is_neither_true_nor_false_is_refused(allowed: Any) -> None:
    said = refusal(lambda: allow_untested({"kvkeep.allow_untested_vllm": allowed}))
    assert f"kvkeep.allow_untested_vllm = {allowed!r}" in said and "true or false" in said


@pytest.mark.parametrize(
    "name", ["load", "load_when", "load_failure_policy", "revision", "allow_untested_vllm"]
)
def test_a_bad_value_is_refused_also_where_another_reads_it(name: str) -> None:
    assert f"kvkeep.{name} = ['?']" in refusal(lambda: client_options({f"kvkeep.{name}": ["?"]}))


# --- tracing --------------------------------------------------------------------------------------


def test_requests_are_not_traced_unless_asked_for() -> None:
    assert not tracing({}) and tracing({"kvkeep.tracing": True})
    assert not tracing({"kvkeep.tracing": False})


@pytest.mark.parametrize("value", ["true", 1, None, "http://localhost:4318"])
def test_tracing_is_a_switch_and_no_address(value: Any) -> None:
    said = refusal(lambda: client_options({"kvkeep.tracing": value}))
    assert f"kvkeep.tracing = {value!r}" in said and "true or false" in said


# --- tp_shards ------------------------------------------------------------------------------------


def test_each_rank_has_a_shard_unless_told_otherwise() -> None:
    assert tp_shards({}) is None and tp_shards({"kvkeep.tp_shards": 4}) == 4


@pytest.mark.parametrize("count", [0, -1, 257, "4", 4.0, True])
def test_a_number_of_shards_that_makes_no_sense_is_refused(count: Any) -> None:
    said = refusal(lambda: tp_shards({"kvkeep.tp_shards": count}))
    assert f"kvkeep.tp_shards = {count!r}" in said
    with pytest.raises(SettingsError):
        client_options({"kvkeep.tp_shards": count})
