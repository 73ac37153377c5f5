"""Addresses of services that hold a tier, such as valkey://host:6379/0?timeout=2s, and what they
may not have in them: passwords.

An address is in settings, logs and `kvkeep tiers`. Credentials are in the environment, or in a file
that the environment names: KVKEEP_VALKEY_PASSWORD or KVKEEP_VALKEY_PASSWORD_FILE. CREDENTIALS lists
these variables: the server refuses others that begin with KVKEEP_."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from kvkeep.errors import SettingsError
from kvkeep.tiers.tier_address import has_credentials
from kvkeep.units import parse_duration
from kvkeep.wire.secret_files import PRIVATE, read_text

DEFAULT_TIMEOUT_S = 2.0
USERNAME: Final = "KVKEEP_VALKEY_USERNAME"
PASSWORD: Final = "KVKEEP_VALKEY_PASSWORD"
S3_CREDENTIALS: Final = (
    "KVKEEP_S3_ACCESS_KEY_ID",
    "KVKEEP_S3_SECRET_ACCESS_KEY",
    "KVKEEP_S3_SESSION_TOKEN",
)
CREDENTIALS: Final = frozenset(
    variable + form for variable in (USERNAME, PASSWORD, *S3_CREDENTIALS) for form in ("", "_FILE")
)
_LONGEST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ServiceAddress:
    scheme: str
    host: str
    port: int
    path: str  # without the slash at its beginning
    timeout_s: float  # for one answer of the service
    options: Mapping[str, str]

    @classmethod
    def parse(
        cls, text: str, schemes: Sequence[str], known: Sequence[str], default_port: int
    ) -> ServiceAddress:
        """SettingsError says what is wrong; it does not quote the address, which may have a
        password in it."""
        try:
            url = urlsplit(text)
            port = url.port or default_port
            is_secret = has_credentials(url.netloc) or has_credentials(url.query)
        except ValueError:
            raise _wrong(text, "its host or port cannot be read") from None
        if url.scheme not in schemes:
            raise _wrong(text, f"expected {schemes[0]}://host")
        if is_secret:
            raise SettingsError(
                f"the address of a {url.scheme}:// tier has credentials in it",
                "addresses are logged: put credentials into the environment or a file",
            )
        if not url.hostname or url.fragment:
            raise _wrong(text, "expected a host, and nothing after #")
        options = dict(parse_qsl(url.query, keep_blank_values=True))
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise _wrong(text, f"unknown option {unknown[0]!r}; known: {', '.join(known)}")
        try:
            timeout_s = parse_duration(options.pop("timeout", f"{DEFAULT_TIMEOUT_S:g}s"))
        except ValueError as error:
            raise _wrong(text, f"timeout: expected {error}") from None
        if not 0 < timeout_s <= _LONGEST_TIMEOUT_S:
            raise _wrong(text, f"timeout: expected at most {_LONGEST_TIMEOUT_S:g}s")
        path = unquote(url.path).strip("/")
        return cls(url.scheme, url.hostname, port, path, timeout_s, options)

    @property
    def database(self) -> int:
        """The number that the path is; 0 if there is none."""
        if not re.fullmatch(r"[0-9]{0,4}", self.path):
            raise _wrong(f"{self.scheme}://", "the path is the number of a database, such as /0")
        return int(self.path or 0)

    def yes(self, option: str) -> bool:
        """Whether this option is set to yes."""
        value = self.options.get(option, "no")
        if value not in ("yes", "no"):
            raise _wrong(f"{self.scheme}://", f"{option}: expected yes or no")
        return value == "yes"


def credential(variable: str) -> str | None:
    """The value of a variable, or what is in the file that `<variable>_FILE` names. The file must
    not be readable by other users."""
    path = os.environ.get(f"{variable}_FILE")
    if path:
        return read_text(Path(path), PRIVATE).strip()
    return os.environ.get(variable) or None


def given_credentials() -> dict[str, str]:
    """Those variables with credentials that are set here, for a process that needs them."""
    return {name: os.environ[name] for name in CREDENTIALS if name in os.environ}


def _wrong(text: str, why: str) -> SettingsError:
    scheme = text.partition("://")[0]
    named = scheme if re.fullmatch(r"[a-z0-9]{1,20}", scheme) else "shared"
    return SettingsError(f"the address of a {named}:// tier: {why}")
