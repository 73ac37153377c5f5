"""What a user says about KV offloading, as plain data: the names vLLM's users know, checked once.

    kv_offloading_size, kv_offloading_backend ──┐
                                                ├── resolve ──► KVTransferConfig ──► client_options, load_mode
    kv_transfer_config ─────────────────────────┘

Every refusal is a SettingsError that names the key and its value, and says what to write instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvkeep.client.options import ClientOptions
from kvkeep.errors import SettingsError
from kvkeep.server.setting_kinds import ADDRESS, split_host
from kvkeep.units import GIB

NATIVE, KVKEEP = "NativeConnector", "KVKeepConnector"
CPU_BYTES = "cpu_bytes_to_use"

_CONNECTORS = {"native": NATIVE, "kvkeep": KVKEEP}  # by backend
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
_POLICIES = ("recompute", "fail")
_MODES = ("async", "sync")
_ELSEWHERE = {  # vLLM's names for what is called otherwise here
    "lmcache": 'this is vLLM\'s name for an external server; here it is "kvkeep"',
    "LMCacheMPConnector": f"this is vLLM's name for an external server's connector; here it is {KVKEEP}",
    "OffloadingConnector": f"this is vLLM's name for the in-process connector; here it is {NATIVE}",
}
_DEFAULT_HOST, _DEFAULT_PORT = "localhost", 5555
_HOST = "a host name, or an IPv4 or IPv6 address"
_PREFIX = "kvkeep."
_OPTIONS = {option.name: str(option.type) for option in dataclasses.fields(ClientOptions) if option.name != "address"}
KNOWN_KEYS = [_PREFIX + name for name in ("address", "host", "port", "load", *_OPTIONS)]


@dataclass(frozen=True)
class KVTransferConfig:
    """How KV leaves and enters an engine. A connector without a role has the only one that there is today, kv_both."""

    kv_connector: str | None = None
    kv_role: str | None = None
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    kv_load_failure_policy: str = "recompute"

    def __post_init__(self) -> None:
        if self.kv_connector is not None:
            _check_one_of("kv_connector", self.kv_connector, _CONNECTORS.values())
            object.__setattr__(self, "kv_role", "kv_both" if self.kv_role is None else self.kv_role)
        if self.kv_role is not None:
            _check_one_of("kv_role", self.kv_role, _ROLES)
            if self.kv_role != "kv_both":
                problem = f"kv_role = {self.kv_role!r} is not supported: our connectors store and load"
                raise SettingsError(problem, 'use "kv_both"')
        _check_one_of("kv_load_failure_policy", self.kv_load_failure_policy, _POLICIES)
        extra = self.kv_connector_extra_config
        if not isinstance(extra, Mapping) or not all(isinstance(key, str) for key in extra):
            raise _refusal("kv_connector_extra_config", extra, "an object with names as keys")
        object.__setattr__(self, "kv_connector_extra_config", dict(extra))  # ours: what was given may change

    @classmethod
    def of(cls, value: KVTransferConfig | Mapping[str, Any] | str | None) -> KVTransferConfig | None:
        """Whatever a user may have written. None stays None: nothing is said."""
        if value is None or isinstance(value, KVTransferConfig):
            return value
        if isinstance(value, str):
            return cls.from_json(value)
        if not isinstance(value, Mapping):
            raise _refusal("kv_transfer_config", value, "an object or JSON text of one")
        known = [each.name for each in dataclasses.fields(cls)]
        for key in value:
            if key not in known:
                raise _unknown("kv_transfer_config", key, known)
        return cls(**value)

    @classmethod
    def from_json(cls, text: str) -> KVTransferConfig:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            hint = 'write for example {"kv_connector": "KVKeepConnector", "kv_role": "kv_both"}'
            raise SettingsError(f"kv_transfer_config is no JSON: {error}", hint) from None
        config = cls.of(value) if isinstance(value, dict) else None
        if config is None:
            raise _refusal("kv_transfer_config", value, "an object")
        return config


def resolve(
    kv_offloading_backend: str = "kvkeep",
    kv_offloading_size: float | None = None,
    given: KVTransferConfig | None = None,
) -> KVTransferConfig | None:
    """The connector that the user's words amount to. None, or `given` as it is, if the size does not ask for one.

    The size is in GiB and, as in vLLM, that of all ranks together. It is passed on to the in-process connector only:
    an external server's capacity is its own. Keys that the user has set stay as they are.
    """
    _check_one_of("kv_offloading_backend", kv_offloading_backend, _CONNECTORS)
    if kv_offloading_size is None:
        return given
    size_bytes = _size_bytes(kv_offloading_size)
    config, connector = given or KVTransferConfig(), _CONNECTORS[kv_offloading_backend]
    if config.kv_connector not in (None, connector):
        raise SettingsError(
            f"kv_offloading_size with kv_offloading_backend = {kv_offloading_backend!r} asks for {connector}, "
            f"kv_transfer_config for {config.kv_connector}: they contradict each other",
            "leave one of them out",
        )
    extra = config.kv_connector_extra_config
    if connector == NATIVE:
        extra = {CPU_BYTES: size_bytes, **extra}
    return dataclasses.replace(config, kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra)


def client_options(extra: Mapping[str, Any]) -> ClientOptions:
    """What a connector's extra config says to the client. Keys of other software are left alone."""
    for key in extra:
        if key.startswith(_PREFIX) and key not in KNOWN_KEYS:
            raise _unknown("kv_connector_extra_config", key, KNOWN_KEYS)
    chosen = {name: _option(_PREFIX + name, extra[_PREFIX + name]) for name in _OPTIONS if _PREFIX + name in extra}
    address = _address(extra)
    return ClientOptions(**chosen) if address is None else ClientOptions(address=address, **chosen)


def load_mode(extra: Mapping[str, Any]) -> Literal["async", "sync"]:
    """Whether the engine goes on with other requests while blocks are loaded (async), or waits in the step (sync)."""
    mode = extra.get("kvkeep.load", "async")
    _check_one_of("kvkeep.load", mode, _MODES)
    return "sync" if mode == "sync" else "async"


def _size_bytes(size_gib: object) -> int:
    expected = "a size in GiB greater than 0"
    if isinstance(size_gib, bool) or not isinstance(size_gib, int | float):
        raise _refusal("kv_offloading_size", size_gib, expected)
    try:
        size_bytes = float(size_gib) * GIB
    except OverflowError:
        size_bytes = math.inf
    if not math.isfinite(size_bytes) or size_bytes < 1:  # NaN is not finite either
        raise _refusal("kv_offloading_size", size_gib, expected)
    return int(size_bytes)


def _option(key: str, value: object) -> Any:
    """The value, if it is one for that option of the client."""
    match _OPTIONS[key.removeprefix(_PREFIX)]:
        case "int":
            good, expected = type(value) is int and value >= 1, "a whole number of at least 1"
        case "bool":
            good, expected = isinstance(value, bool), "true or false"
        case "bool | None":
            good, expected = value is None or isinstance(value, bool), "true, false or null"
        case _:
            good, expected = isinstance(value, str), "text"
    if not good:
        raise _refusal(key, value, expected)
    return value


def _address(extra: Mapping[str, Any]) -> str | None:
    """Where the server is, in our own words or those of other servers. None if nothing is said."""
    address = extra.get("kvkeep.address")
    own = [key for key in ("kvkeep.host", "kvkeep.port") if extra.get(key) is not None]
    if address is not None:
        if own:
            raise SettingsError(f"kvkeep.address and {own[0]} contradict each other", "leave one of them out")
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
        text: str = ADDRESS.parse(address if isinstance(address, str) else "")
        if text.startswith("tcp://"):  # a server may listen on any host and port, a client cannot connect to them
            host, port = split_host(text.removeprefix("tcp://"))
            text = f"tcp://{_host('kvkeep.address', host)}:{_port('kvkeep.address', port)}"
    except (ValueError, SettingsError):
        raise _refusal("kvkeep.address", address, ADDRESS.expected) from None
    return text


def _host(key: str, value: object) -> str:
    """A host as it stands in an address, IPv6 in brackets."""
    text = value.removeprefix("tcp://") if isinstance(value, str) else ""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in bare or bare != text:
        try:
            return f"[{ipaddress.IPv6Address(bare if '%' not in bare else '')}]"
        except ValueError:
            raise _refusal(key, value, _HOST, "a port goes into a key of its own") from None
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", text):
        raise _refusal(key, value, _HOST, "another kind of address goes into kvkeep.address")
    return text


def _port(key: str, value: object) -> int:
    number = int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,5}", value) else value
    if type(number) is not int or not 1 <= number <= 65535:
        raise _refusal(key, value, "a port from 1 to 65535")
    return number


def _check_one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    names = list(allowed)
    if not isinstance(value, str) or value not in names:
        hint = _ELSEWHERE.get(value, "") if isinstance(value, str) else ""
        raise _refusal(name, value, "one of " + ", ".join(f'"{each}"' for each in names), hint)


def _refusal(name: str, value: object, expected: str, hint: str = "") -> SettingsError:
    return SettingsError(f"{name} = {value!r}: expected {expected}", hint or "leave it out for the default")


def _unknown(where: str, key: object, known: list[str]) -> SettingsError:
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
    return SettingsError(f"{where} has the unknown key {key!r}", f"the nearest known one is {near[0]!r}")
