"""What a client can be told. The defaults are right for a server on the same host."""

from __future__ import annotations

import os
import re
from dataclasses import InitVar, dataclass, field, fields

from kvkeep.errors import SettingsError
from kvkeep.wire.peers import OVERFLOW_UID, USERS_FORMAT, parse_users
from kvkeep.wire.tls import tls_files

DEFAULT_ADDRESS = "tcp://localhost:5555"

# How long a request waits for blocks that a server brings up from a slower tier.
BEST_EFFORT, TIMEOUT, WAIT = "best_effort", "timeout=", "wait"
LONGEST_WAIT_MS = 10_000  # with "wait": a tier that never delivers must not stop a request

# At start-up: a server that is there answers at once; one that is not must not keep an engine from
# starting.
CONNECT_PATIENCE_MS = 500


def default_address() -> str:
    """Where the server is if nobody says: as the environment has it, like the server itself."""
    return os.environ.get("KVKEEP_ADDRESS") or DEFAULT_ADDRESS


def default_tls(which: str) -> str | None:
    """The file that the environment names, if any. Refuses the variables of earlier releases."""
    for old in ("KVKEEP_CLIENT_KEY", "KVKEEP_SERVER_KEY"):
        if os.environ.get(old):
            raise replaced(
                old, "set KVKEEP_CLIENT_TLS_CERT, KVKEEP_CLIENT_TLS_KEY and KVKEEP_CLIENT_TLS_CA"
            )
    return os.environ.get(f"KVKEEP_CLIENT_TLS_{which}") or None


def replaced(old: str, instead: str) -> SettingsError:
    """The error for a setting of an earlier release."""
    return SettingsError(
        f"{old} does not exist any more", f"{instead}: the migration guide says how"
    )


def default_trusted_users() -> tuple[int, ...]:
    """As the environment has it, like the server's setting of the same name."""
    text = os.environ.get("KVKEEP_TRUSTED_USERS", "")
    try:
        return parse_users(text)
    except ValueError as error:
        raise SettingsError(
            f'KVKEEP_TRUSTED_USERS = "{text}": {error}', f"expected {USERS_FORMAT}"
        ) from None


def parse_patience(text: object, name: str = "tier_patience") -> int:
    """Milliseconds that a request waits at most for blocks from a tier. Raises SettingsError, which
    names the option."""
    if text == BEST_EFFORT:
        return 0
    if text == WAIT:
        return LONGEST_WAIT_MS
    figure = text.removeprefix(TIMEOUT) if isinstance(text, str) else ""
    if isinstance(text, str) and text.startswith(TIMEOUT) and re.fullmatch("[0-9]{1,7}", figure):
        return int(figure)
    raise SettingsError(
        f'{name} = {text!r}: expected "best_effort", "timeout=200" (milliseconds) or "wait"',
        "leave it out for the default",
    )


@dataclass(frozen=True)
class ClientOptions:
    """Deadlines are what a caller waits at most; after that the answer is a miss."""

    address: str = field(default_factory=default_address)
    client: str = "python"  # what uses the cache, as operators see it
    # a server that is there needs less than one; one that is not delays requests
    lookup_deadline_ms: int = 100
    store_deadline_ms: int = 5_000
    handshake_deadline_ms: int = 2_000
    ping_interval_ms: int = 1_000
    reconnect_interval_ms: int = 500
    verify: bool = True  # False: take and check no checksums, unless the server asks for them
    # GPU memory through which blocks go, where an engine is on one
    gpu_staging_bytes: int = 512 << 20
    tier_patience: str = "timeout=200"  # or "best_effort", or "wait"
    shared_memory: bool = True  # False: move bytes through the socket even on the same host
    # whose server is as good as our own
    trusted_users: tuple[int, ...] = field(default_factory=default_trusted_users)
    # file of our certificate; None: no TLS
    tls_cert: str | None = field(default_factory=lambda: default_tls("CERT"))
    # file of its private key
    tls_key: str | None = field(default_factory=lambda: default_tls("KEY"))
    # file of the CA that signed the server's
    tls_ca: str | None = field(default_factory=lambda: default_tls("CA"))
    curve_key: InitVar[None] = None  # of earlier releases: refused by name
    server_key: InitVar[None] = None

    def __post_init__(self, curve_key: object, server_key: object) -> None:
        """Raises SettingsError, naming the option, for a deadline, an interval, a count or a user
        that is none, and for TLS without all of its files."""
        for option in fields(self):
            value = getattr(self, option.name)
            if option.type == "int" and (type(value) is not int or value < 1):
                raise SettingsError(
                    f"{option.name} must be an integer of at least 1, not {value!r}"
                )
        parse_patience(self.tier_patience)
        users = self.trusted_users
        if not isinstance(users, tuple) or any(
            type(uid) is not int or uid in (-1, OVERFLOW_UID) for uid in users
        ):
            raise SettingsError(
                f"trusted_users must be a tuple of user ids, without {OVERFLOW_UID}, not {users!r}"
            )
        for old, value in (("curve_key", curve_key), ("server_key", server_key)):
            if value is not None:
                raise replaced(old, "give tls_cert, tls_key and tls_ca")
        tls_files(self)

    @property
    def patience_ms(self) -> int:
        """How long a request waits at most for blocks from a tier; 0: not at all."""
        return parse_patience(self.tier_patience)
