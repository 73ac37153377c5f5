"""What a client can be told. The defaults are right for a server on the same host."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields

from kvkeep.errors import SettingsError
from kvkeep.wire.peers import OVERFLOW_UID, USERS_FORMAT, parse_users

DEFAULT_ADDRESS = "tcp://localhost:5555"

# At start-up: a server that is there answers at once; one that is not must not keep an engine from starting.
CONNECT_PATIENCE_MS = 500


def default_address() -> str:
    """Where the server is if nobody says: as the environment has it, like the server itself."""
    return os.environ.get("KVKEEP_ADDRESS") or DEFAULT_ADDRESS


def default_curve_key() -> str | None:
    """Our key if nobody says. The server's own setting is KVKEEP_CURVE_KEY: both may be in one environment."""
    return os.environ.get("KVKEEP_CLIENT_KEY") or None


def default_server_key() -> str | None:
    return os.environ.get("KVKEEP_SERVER_KEY") or None


def default_trusted_users() -> tuple[int, ...]:
    """As the environment has it, like the server's setting of the same name."""
    text = os.environ.get("KVKEEP_TRUSTED_USERS", "")
    try:
        return parse_users(text)
    except ValueError as error:
        raise SettingsError(f'KVKEEP_TRUSTED_USERS = "{text}": {error}', f"expected {USERS_FORMAT}") from None


@dataclass(frozen=True)
class ClientOptions:
    """Deadlines are what a caller waits at most; after that the answer is a miss."""

    address: str = field(default_factory=default_address)
    client: str = "kvkeep-python"
    lookup_deadline_ms: int = 100  # a server that is there needs less than one; one that is not delays requests
    store_deadline_ms: int = 5_000
    handshake_deadline_ms: int = 2_000
    ping_interval_ms: int = 1_000
    reconnect_interval_ms: int = 500
    verify: bool = True  # False: take and check no checksums, unless the server asks for them
    gpu_staging_bytes: int = 512 << 20  # GPU memory through which blocks go, where an engine is on one
    shared_memory: bool = True  # False: move bytes through the socket even on the same host
    trusted_users: tuple[int, ...] = field(default_factory=default_trusted_users)  # whose server is as good as our own
    curve_key: str | None = field(default_factory=default_curve_key)  # file of our secret key; None: no encryption
    server_key: str | None = field(default_factory=default_server_key)  # the server's public key, or a file of it

    def __post_init__(self) -> None:
        """Raises SettingsError, naming the option, for a deadline, an interval, a count or a user that is none."""
        for option in fields(self):
            value = getattr(self, option.name)
            if option.type == "int" and (type(value) is not int or value < 1):
                raise SettingsError(f"{option.name} must be an integer of at least 1, not {value!r}")
        users = self.trusted_users
        if not isinstance(users, tuple) or any(type(uid) is not int or uid in (-1, OVERFLOW_UID) for uid in users):
            raise SettingsError(f"trusted_users must be a tuple of user ids, without {OVERFLOW_UID}, not {users!r}")
        if (self.curve_key is None) != (self.server_key is None):
            there, missing = ("curve_key", "server_key") if self.curve_key else ("server_key", "curve_key")
            raise SettingsError(
                f"{there} is given and {missing} is not", "give both, as `kvkeep keygen` printed them, or neither"
            )
