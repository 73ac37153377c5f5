"""The vLLM connector. vLLM finds it by name through the entry point `kvkeep` of
`vllm.general_plugins`, or by module path: `--kv-transfer-config '{"kv_connector":
"KVKeepConnector", "kv_role": "kv_both"}'`.

connector.py     the class that vLLM makes, with vLLM's method names
registration.py  the scheduler's half until every worker has registered its KV
scheduler.py     the scheduler's half
worker.py        a worker's half
messages.py      what the halves send each other through vLLM
step_loads.py    loads of a request that is alone, before its step
keys.py          keys of a request's blocks
identity.py      which engines share blocks
attention.py     how attention backends write KV
groups.py        cache groups, and where their blocks lie
siblings.py      other connectors in a MultiConnector
events.py        KV events for routers
stats.py         counts for vLLM's log and /metrics
versions.py      differences between vLLM's releases
releases.py      which of them are served
stand_in.py      when kvkeep answers to LMCache's name

Importing this imports no vLLM: `KVKeepConnector` is loaded when it is first used.
`LMCacheMPConnector` is another name for it, for `--kv-offloading-backend lmcache`."""

from __future__ import annotations

import functools
from typing import Any

from kvkeep.connector.options import client_options
from kvkeep.vllm import stand_in

_NAMES = ("KVKeepConnector", stand_in.NAME)


def register() -> None:
    """Makes the connector known to vLLM by its name. vLLM calls this in each of its processes,
    perhaps twice."""
    _register("KVKeepConnector")
    if stand_in.reason():
        _register(stand_in.NAME)
    _check_settings_early()


def _register(name: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory._registry.pop(name, None)
    KVConnectorFactory.register_connector(name, "kvkeep.vllm.connector", "KVKeepConnector")


def _check_settings_early() -> None:
    """Refuses a bad extra config before the model is loaded. vLLM makes the connector after that,
    but asks its factory for the class, with the config, while it checks its own options."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    original = KVConnectorFactory.get_connector_class
    if getattr(original, "checks_kvkeep", False):
        return

    @functools.wraps(original)
    def get_connector_class(config: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(config, *args, **kwargs)
        if getattr(found, "__module__", "") == "kvkeep.vllm.connector":
            client_options(config.kv_connector_extra_config)
        return found

    get_connector_class.checks_kvkeep = True  # type: ignore[attr-defined]
    KVConnectorFactory.get_connector_class = staticmethod(get_connector_class)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvkeep.vllm.connector import KVKeepConnector

    # MultiConnector asks by the class's name for what belongs to its statistics
    _register("KVKeepConnector")
    return KVKeepConnector
