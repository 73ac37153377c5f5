"""What a client can be told. The defaults are right for a server on the same host."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields

from kvkeep.errors import SettingsError

DEFAULT_ADDRESS = "tcp://localhost:5555"

# At start-up: a server that is there answers at once; one that is not must not keep an engine from starting.
CONNECT_PATIENCE_MS = 500


def default_address() -> str:
    """Where the server is if nobody says: as the environment has it, like the server itself."""
    return os.environ.get("KVKEEP_ADDRESS") or DEFAULT_ADDRESS


@dataclass(frozen=True)
class ClientOptions:
    """Deadlines are what a caller waits at most; after that the answer is a miss."""

    address: str = field(default_factory=default_address)
    client: str = "kvkeep-python"
    lookup_deadline_ms: int = 500
    store_deadline_ms: int = 5_000
    handshake_deadline_ms: int = 2_000
    ping_interval_ms: int = 1_000
    reconnect_interval_ms: int = 500
    failures_to_open: int = 3  # consecutive failures after which the breaker answers at once
    verify: bool | None = None  # None: as the server says
    gpu_staging_bytes: int = 512 << 20  # GPU memory through which blocks go, where an engine is on one
    shared_memory: bool = True  # False: move bytes through the socket even on the same host

    def __post_init__(self) -> None:
        """Raises SettingsError, naming the option, for a deadline, an interval or a count that is none."""
        for option in fields(self):
            value = getattr(self, option.name)
            if option.type == "int" and (type(value) is not int or value < 1):
                raise SettingsError(f"{option.name} must be an integer of at least 1, not {value!r}")
