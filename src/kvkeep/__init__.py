"""kvkeep: a KV-cache server for LLM inference. `kvkeep.connect()` is the door for Python users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.client.cache import Cache, connect

__version__ = "0.1.0"
__all__ = ["Cache", "__version__", "connect"]


def __getattr__(name: str) -> Any:
    """Loads the client when it is first asked for: importing a part of kvkeep must not load all of
    it."""
    if name in ("Cache", "connect"):
        from kvkeep.client import cache

        return getattr(cache, name)
    raise AttributeError(f"module 'kvkeep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
