"""What a connector's extra config says, checked once: the same keys for the reference engine and
for vLLM.

    kv_connector_extra_config ──┬──► client_options            where the server is, and how long to wait for it
                                ├──► load_mode                 auto, async or sync
                                ├──► load_when                 faster or always
                                ├──► load_failure_policy       recompute or fail
                                ├──► tp_shards                 how many shards KV heads are cut into
                                ├──► tracing                   whether spans of requests are exported
                                └──► revision, allow_untested  read by vLLM's connector alone

Every refusal is a SettingsError that names the key and its value, and says what to write instead.
Keys of other software are left alone."""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from kvkeep.client.options import ClientOptions, parse_patience, replaced
from kvkeep.connector.cost_model import LoadWhen
from kvkeep.errors import SettingsError
from kvkeep.wire.address import ADDRESS_FORMAT, parse_address, split_host
from kvkeep.wire.peers import parse_users

LoadMode = Literal["auto", "async", "sync"]

MAX_TP_SHARDS = 256
POLICIES = ("recompute", "fail")

_MODES: tuple[LoadMode, ...] = ("auto", "async", "sync")
_WHEN = ("faster", "always")
_DEFAULT_HOST, _DEFAULT_PORT = "localhost", 5555
_HOST = "a host name, or an IPv4 or IPv6 address"
_PREFIX = "kvkeep."
_OWN = (
    "address",
    "host",
    "port",
    "load",
    "load_when",
    "load_failure_policy",
    "tp_shards",
    "tracing",
    "revision",
    "allow_untested_vllm",
)
_OPTIONS = {
    option.name: str(option.type)
    for option in dataclasses.fields(ClientOptions)
    if option.name != "address"
}
_REPLACED = ("kvkeep.curve_key", "kvkeep.server_key")
KNOWN_KEYS = [_PREFIX + name for name in (*_OWN, *_OPTIONS)]


def client_options(extra: Mapping[str, Any], engine: str = "python") -> ClientOptions:
    """What the extra config says to the client. Refuses a bad value of any key of ours, whoever it
    is that reads it. `engine` is the client's name unless the config has one."""
    for key in extra:
        if key in _REPLACED:
            raise replaced(
                f"{key} (kv_connector_extra_config)",
                "set kvkeep.tls_cert, kvkeep.tls_key and kvkeep.tls_ca",
            )
        if key.startswith(_PREFIX) and key not in KNOWN_KEYS:
            raise unknown("kv_connector_extra_config", key, KNOWN_KEYS)
    checks = (load_mode, load_when, load_failure_policy, tp_shards, tracing)
    for check in (*checks, revision, allow_untested):
        check(extra)
    chosen = {
        name: _option(_PREFIX + name, extra[_PREFIX + name])
        for name in _OPTIONS
        if _PREFIX + name in extra
    }
    chosen.setdefault("client", engine)
    address = _address(extra)
    return ClientOptions(**chosen) if address is None else ClientOptions(address=address, **chosen)


def load_mode(extra: Mapping[str, Any]) -> LoadMode:
    """Whether the engine goes on with other requests while blocks are loaded (async), or waits in
    the step (sync). Auto is async, but for an engine that has no other request, if its connector
    knows of that."""
    mode = extra.get("kvkeep.load", "auto")
    check_one_of("kvkeep.load", mode, _MODES)
    return next(each for each in _MODES if each == mode)


def load_when(extra: Mapping[str, Any]) -> LoadWhen:
    """Whether blocks are loaded where that was measured to be faster than computing them, or
    always."""
    when = extra.get("kvkeep.load_when", "faster")
    check_one_of("kvkeep.load_when", when, _WHEN)
    return "always" if when == "always" else "faster"


def load_failure_policy(extra: Mapping[str, Any]) -> str:
    """What becomes of a request whose blocks cannot be loaded: they are computed (recompute), or it
    ends (fail)."""
    policy = extra.get("kvkeep.load_failure_policy", "recompute")
    check_one_of("kvkeep.load_failure_policy", policy, POLICIES)
    return str(policy)


def tp_shards(extra: Mapping[str, Any]) -> int | None:
    """How many shards KV heads are cut into: the largest tensor-parallel size among engines that
    share blocks. None: a shard for each rank."""
    count = extra.get("kvkeep.tp_shards")
    if count is not None and (type(count) is not int or not 1 <= count <= MAX_TP_SHARDS):
        raise refusal("kvkeep.tp_shards", count, f"a whole number from 1 to {MAX_TP_SHARDS}")
    return count


def tracing(extra: Mapping[str, Any]) -> bool:
    """Whether spans of requests go to a collector."""
    is_on = extra.get("kvkeep.tracing", False)
    if not isinstance(is_on, bool):
        raise refusal("kvkeep.tracing", is_on, "true or false")
    return is_on


def revision(extra: Mapping[str, Any]) -> str | None:
    """What the user calls these weights, where that is more than can be seen of them. None if
    nothing is said."""
    text = extra.get("kvkeep.revision")
    if text is not None and (not isinstance(text, str) or not text or not text.isprintable()):
        raise refusal("kvkeep.revision", text, "printable text that is not empty")
    return text


def allow_untested(extra: Mapping[str, Any]) -> bool:
    """Whether a release of vLLM that the connector was not tested with is tried all the same."""
    allowed = extra.get("kvkeep.allow_untested_vllm", False)
    if not isinstance(allowed, bool):
        raise refusal("kvkeep.allow_untested_vllm", allowed, "true or false")
    return allowed


def check_one_of(
    name: str, value: object, allowed: Iterable[str], hints: Mapping[str, str] | None = None
) -> None:
    """Refuses a value that is none of those. `hints` has what to say about some that are often
    meant."""
    names = list(allowed)
    if not isinstance(value, str) or value not in names:
        hint = (hints or {}).get(value, "") if isinstance(value, str) else ""
        raise refusal(name, value, "one of " + ", ".join(f'"{each}"' for each in names), hint)


def refusal(name: str, value: object, expected: str, hint: str = "") -> SettingsError:
    return SettingsError(
        f"{name} = {value!r}: expected {expected}", hint or "leave it out for the default"
    )


def unknown(where: str, key: object, known: list[str]) -> SettingsError:
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
    return SettingsError(
        f"{where} has the unknown key {key!r}", f"the nearest known one is {near[0]!r}"
    )


def _option(key: str, value: object) -> Any:
    """The value, if it is one for that option of the client."""
    if key == "kvkeep.tier_patience":
        parse_patience(value, key)
    match _OPTIONS[key.removeprefix(_PREFIX)]:
        case "tuple[int, ...]":
            return _users(key, value)
        case "int":
            good, expected = type(value) is int and value >= 1, "a whole number of at least 1"
        case "bool":
            good, expected = isinstance(value, bool), "true or false"
        case "str | None":
            good, expected = (
                value is None or (isinstance(value, str) and bool(value)),
                "text, or null",
            )
        case _:
            good, expected = isinstance(value, str), "text"
    if not good:
        raise refusal(key, value, expected)
    return value


def _users(key: str, value: object) -> tuple[int, ...]:
    users = value if isinstance(value, list | tuple) else [value]
    try:
        if any(type(user) not in (int, str) for user in users):
            raise ValueError
        return parse_users(",".join(map(str, users)))
    except ValueError:
        raise refusal(key, value, "a list of user ids or names that this host knows") from None


def _address(extra: Mapping[str, Any]) -> str | None:
    """Where the server is, in our own words or those of other servers. None if nothing is said."""
    address = extra.get("kvkeep.address")
    own = [key for key in ("kvkeep.host", "kvkeep.port") if extra.get(key) is not None]
    if address is not None:
        if own:
            raise SettingsError(
                f"kvkeep.address and {own[0]} contradict each other", "leave one of them out"
            )
        return _checked_address(address)
    host_key = "kvkeep.host" if "kvkeep.host" in own else "lmcache.mp.host"
    port_key = "kvkeep.port" if "kvkeep.port" in own else "lmcache.mp.port"
    host, port = extra.get(host_key), extra.get(port_key)
    if host is None and port is None:
        return None
    host = _DEFAULT_HOST if host is None else _host(host_key, host)
    return f"tcp://{host}:{_DEFAULT_PORT if port is None else _port(port_key, port)}"


def _checked_address(address: object) -> str:
    try:
        text = parse_address(address if isinstance(address, str) else "")
        # a server may listen on any host and port, a client cannot connect to them
        if text.startswith("tcp://"):
            host, port = split_host(text.removeprefix("tcp://"))
            text = f"tcp://{_host('kvkeep.address', host)}:{_port('kvkeep.address', port)}"
    except (ValueError, SettingsError):
        raise refusal("kvkeep.address", address, ADDRESS_FORMAT) from None
    return text


def _host(key: str, value: object) -> str:
    """A host as it stands in an address, IPv6 in brackets."""
    text = value.removeprefix("tcp://") if isinstance(value, str) else ""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in bare or bare != text:
        try:
            return f"[{ipaddress.IPv6Address(bare if '%' not in bare else '')}]"
        except ValueError:
            raise refusal(key, value, _HOST, "a port goes into a key of its own") from None
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", text):
        raise refusal(key, value, _HOST, "another kind of address goes into kvkeep.address")
    return text


def _port(key: str, value: object) -> int:
    number = int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,5}", value) else value
    if type(number) is not int or not 1 <= number <= 65535:
        raise refusal(key, value, "a port from 1 to 65535")
    return number
