"""Every error that kvkeep raises or sends, as one tree.

    KVKeepError
    ├── SettingsError        a setting is unknown, malformed or contradicts another
    ├── PoolError            the shared-memory pool cannot be made, opened, shared or copied
    │   ├── UntrustedPool    it belongs to another user, or others may write it: it is not mapped
    │   └── DirectoryInUse   another process owns its directory
    ├── TierError            a tier cannot be made or opened, or failed
    │   └── TierFault        its device is missing, full or fails: a server starts without it
    ├── ProtocolError        a peer sent what the protocol does not allow
    ├── DeviceError          a GPU's driver, compiler or memory refused something
    ├── RequestError         a request that was understood and refused; travels as an error reply
    └── Unavailable          the server cannot be reached, or did not answer before the deadline

A cache fault never reaches an engine as an exception: the client turns each into a counted miss.
These classes are for people (command line, admin API, `kvkeep.connect()`, `LLM`), so each carries a
hint that says what to do next."""

from __future__ import annotations


class KVKeepError(Exception):
    """The root of the tree. `hint` is one sentence on the remedy, or empty where the message says
    it all."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class SettingsError(KVKeepError):
    """A setting is unknown, malformed or contradicts another one."""


class PoolError(KVKeepError):
    """The shared-memory pool cannot be made, opened, shared or copied."""


class UntrustedPool(PoolError):
    """It belongs to a user who is not trusted, or others may write it."""


class DirectoryInUse(PoolError):
    """Another process owns the directory. `is_left`: it is one that an earlier server started, and
    that server has ended."""

    def __init__(self, message: str, hint: str, *, is_left: bool) -> None:
        super().__init__(message, hint)
        self.is_left = is_left


class TierError(KVKeepError):
    """A tier beyond memory cannot be made or opened, or failed."""


class TierFault(TierError):
    """The tier's device is missing, full or fails. It is no mistake in the settings."""


class DeviceError(KVKeepError):
    """A GPU's driver, compiler or memory refused something."""


class ProtocolError(KVKeepError):
    """A peer sent something that the protocol does not allow."""


class RequestError(KVKeepError):
    """A request that was understood and refused. `code` is machine-readable, `field` names what was
    wrong."""

    def __init__(self, code: str, message: str, *, field: str = "", hint: str = "") -> None:
        super().__init__(message, hint)
        self.code = code
        self.field = field


class Unavailable(KVKeepError):
    """The server cannot be reached, or did not answer before the deadline."""
