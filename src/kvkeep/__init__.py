"""kvkeep: a KV-cache server for LLM inference. `kvkeep.connect()` is the door for Python users."""

__version__ = "0.1.0"

from kvkeep.client.cache import Cache, connect

__all__ = ["Cache", "__version__", "connect"]
