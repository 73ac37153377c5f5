"""The vLLM connector. vLLM finds it by name through the entry point `kvkeep` of
`vllm.general_plugins`, or by module path: `--kv-transfer-config '{"kv_connector":
"KVKeepConnector", "kv_role": "kv_both"}'`.

Importing this imports no vLLM: `KVKeepConnector` is loaded when it is asked for.
`LMCacheMPConnector` is another name for it, so that `--kv-offloading-backend lmcache` reaches our
server (stand_in.py says when)."""

from __future__ import annotations

from typing import Any

from kvkeep.vllm import stand_in

_NAMES = ("KVKeepConnector", stand_in.NAME)


def register() -> None:
    """Makes the connector known to vLLM by its name. vLLM calls this in each of its processes,
    perhaps twice."""
    _register("KVKeepConnector")
    if stand_in.reason():
        _register(stand_in.NAME)


def _register(name: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory._registry.pop(name, None)
    KVConnectorFactory.register_connector(name, "kvkeep.vllm.connector", "KVKeepConnector")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvkeep.vllm.connector import KVKeepConnector

    _register(
        "KVKeepConnector"
    )  # MultiConnector asks by the class's name for what belongs to its statistics
    return KVKeepConnector
