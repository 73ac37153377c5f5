"""What a user says about KV offloading, as plain data: the names vLLM's users know, checked once.

    kv_offloading_size, kv_offloading_backend ─┐
                                               ├─ resolve ─► KVTransferConfig
    kv_transfer_config ────────────────────────┘             └─► connector/options.py

Every refusal is a SettingsError that names the key and its value, and says what to write instead.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvkeep.connector.options import POLICIES, check_one_of, refusal, unknown
from kvkeep.errors import SettingsError
from kvkeep.units import GIB

NATIVE, KVKEEP = "NativeConnector", "KVKeepConnector"
CPU_BYTES = "cpu_bytes_to_use"

# By backend; vLLM's users say the last.
_CONNECTORS = {"native": NATIVE, "kvkeep": KVKEEP, "lmcache": KVKEEP}
_ALIASES = {"LMCacheMPConnector": KVKEEP}  # vLLM's name for an external server's connector
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
_ELSEWHERE = {  # vLLM's names for what is called otherwise here
    "OffloadingConnector": f"this is vLLM's name for the in-process connector; here it is {NATIVE}",
}


@dataclass(frozen=True)
class KVTransferConfig:
    """How KV leaves and enters an engine. A connector without a role has the only one that there is
    today, kv_both."""

    kv_connector: str | None = None
    kv_role: str | None = None
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    kv_load_failure_policy: str = "recompute"

    def __post_init__(self) -> None:
        if self.kv_connector is not None:
            connectors = dict.fromkeys(_CONNECTORS.values())
            check_one_of("kv_connector", self.kv_connector, [*connectors, *_ALIASES], _ELSEWHERE)
            object.__setattr__(
                self, "kv_connector", _ALIASES.get(self.kv_connector, self.kv_connector)
            )
            object.__setattr__(self, "kv_role", "kv_both" if self.kv_role is None else self.kv_role)
        if self.kv_role is not None:
            check_one_of("kv_role", self.kv_role, _ROLES)
            if self.kv_role != "kv_both":
                problem = (
                    f"kv_role = {self.kv_role!r} is not supported: our connectors store and load"
                )
                raise SettingsError(problem, 'use "kv_both"')
        check_one_of("kv_load_failure_policy", self.kv_load_failure_policy, POLICIES)
        extra = self.kv_connector_extra_config
        if not isinstance(extra, Mapping) or not all(isinstance(key, str) for key in extra):
            raise refusal("kv_connector_extra_config", extra, "an object with names as keys")
        # ours: what was given may change
        object.__setattr__(self, "kv_connector_extra_config", dict(extra))

    @classmethod
    def of(
        cls, value: KVTransferConfig | Mapping[str, Any] | str | None
    ) -> KVTransferConfig | None:
        """Whatever a user may have written. None stays None: nothing is said."""
        if value is None or isinstance(value, KVTransferConfig):
            return value
        if isinstance(value, str):
            return cls.from_json(value)
        if not isinstance(value, Mapping):
            raise refusal("kv_transfer_config", value, "an object or JSON text of one")
        known = [each.name for each in dataclasses.fields(cls)]
        for key in value:
            if key not in known:
                raise unknown("kv_transfer_config", key, known)
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
            raise refusal("kv_transfer_config", value, "an object")
        return config


def resolve(
    kv_offloading_backend: str = "kvkeep",
    kv_offloading_size: float | None = None,
    given: KVTransferConfig | None = None,
) -> KVTransferConfig | None:
    """The connector that the user's words amount to. None, or `given` as it is, if the size does
    not ask for one.

    The size is in GiB and, as in vLLM, that of all ranks together. It is passed on to the
    in-process connector only: an external server's capacity is its own. Keys that the user has set
    stay as they are."""
    check_one_of("kv_offloading_backend", kv_offloading_backend, _CONNECTORS, _ELSEWHERE)
    if kv_offloading_size is None:
        return given
    size_bytes = _size_bytes(kv_offloading_size)
    config, connector = given or KVTransferConfig(), _CONNECTORS[kv_offloading_backend]
    if config.kv_connector not in (None, connector):
        raise SettingsError(
            f"kv_offloading_size with kv_offloading_backend = {kv_offloading_backend!r} asks for"
            f" {connector}, kv_transfer_config for {config.kv_connector}: they contradict each other",
            "leave one of them out",
        )
    extra = config.kv_connector_extra_config
    if connector == NATIVE:
        extra = {CPU_BYTES: size_bytes, **extra}
    return dataclasses.replace(
        config, kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra
    )


def _size_bytes(size_gib: object) -> int:
    expected = "a size in GiB greater than 0"
    if isinstance(size_gib, bool) or not isinstance(size_gib, int | float):
        raise refusal("kv_offloading_size", size_gib, expected)
    try:
        size_bytes = float(size_gib) * GIB
    except OverflowError:
        size_bytes = math.inf
    if not math.isfinite(size_bytes) or size_bytes < 1:  # NaN is not finite either
        raise refusal("kv_offloading_size", size_gib, expected)
    return int(size_bytes)
