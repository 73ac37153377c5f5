"""The vLLM connector. vLLM finds it by name through the entry point `kvkeep` of `vllm.general_plugins`, or by module
path: `--kv-transfer-config '{"kv_connector": "KVKeepConnector", "kv_role": "kv_both"}'`.

Importing this imports no vLLM: `KVKeepConnector` is loaded when it is asked for. `LMCacheMPConnector` is another name
for it, so that `--kv-offloading-backend lmcache` reaches our server.
"""

from __future__ import annotations

from typing import Any

_NAMES = ("KVKeepConnector", "LMCacheMPConnector")


def register() -> None:
    """Makes the connector known to vLLM by its name. vLLM calls this in each of its processes, perhaps twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVKeepConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVKeepConnector", "kvkeep.vllm.connector", "KVKeepConnector")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvkeep.vllm.connector import KVKeepConnector

    return KVKeepConnector
