"""Quotas that were set at run time, kept on disk so that they survive a restart.

The file holds tenant ids (digests, never salts) and bytes. It is replaced whole and synced, so a crash leaves the
old one or the new one.
"""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from kvkeep.errors import RequestError, SettingsError
from kvkeep.kv.identity import is_tenant
from kvkeep.server.settings import TABLE, Settings
from kvkeep.store.operators import set_default_quota, set_quota
from kvkeep.store.store import Store
from kvkeep.units import format_size

log = logging.getLogger(__name__)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    tenants: dict[str, int]
    default_set: bool = False
    default_bytes: int | None = None


@dataclass
class KeptQuotas:
    """Quotas of tenants, and the default if it was set at run time."""

    tenants: dict[str, int] = field(default_factory=dict)
    default_set: bool = False
    default_bytes: int | None = None


class QuotaFile:
    """Reads and replaces the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> KeptQuotas:
        """What is kept; nothing if there is no file. SettingsError if there is one that cannot be trusted."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return KeptQuotas()
        except OSError as error:
            raise SettingsError(f"cannot read {self.path}: {error.strerror}", "check --state-dir") from error
        try:
            kept = msgspec.json.decode(data, type=_File)
            if kept.version != 1:
                raise msgspec.ValidationError(f"version {kept.version} is unknown")
            for tenant, quota_bytes in kept.tenants.items():
                if not is_tenant(tenant) or quota_bytes < 0:
                    raise msgspec.ValidationError(f"{tenant!r}: {quota_bytes} is no quota of a tenant")
            if kept.default_bytes is not None and kept.default_bytes < 0:
                raise msgspec.ValidationError(f"{kept.default_bytes} is no default quota")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SettingsError(
                f"{self.path} cannot be read: {error}", "mend it, or remove it to start without the quotas kept there"
            ) from error
        return KeptQuotas(kept.tenants, kept.default_set, kept.default_bytes)

    def check_writable(self) -> None:
        """Makes the directory. SettingsError if no file can be made in it: better now than at the first change."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=self.path.parent):
                pass
        except OSError as error:
            raise SettingsError(
                f"cannot write to {self.path.parent}: {error.strerror}",
                "quotas are kept there: choose a --state-dir that can be written",
            ) from error

    def save(self, quotas: KeptQuotas) -> None:
        """Replaces the file. OSError if that fails; then the old one is still there."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self.path.with_suffix(".new")
        data = msgspec.json.format(
            msgspec.json.encode(_File(1, quotas.tenants, quotas.default_set, quotas.default_bytes))
        )
        with open(draft, "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # who has how much is the operator's business
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.path)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)  # or a crash of the host might bring the old name back
        finally:
            os.close(directory)


def apply_kept(store: Store, settings: Settings, kept: KeptQuotas, path: Path) -> Settings:
    """Puts the default quota and the kept ones in force at start-up. Returns the settings, with a kept default in them.

    What does not fit stops the start: to drop a promise silently would be worse than not to serve.
    """
    if kept.default_set:
        text = TABLE["default_quota"].kind.show(kept.default_bytes)
        if settings.sources.get("default_quota", "default") != "default":
            log.warning("default_quota = %s was set at run time (%s) and overrules the one given", text, path)
        settings = settings.changed("default_quota", text)
        settings = replace(settings, sources={**settings.sources, "default_quota": f"kept in {path}"})
    pool = format_size(store.pool_bytes)
    try:
        set_default_quota(store, settings.default_quota, 0)
    except RequestError as error:
        source = settings.sources.get("default_quota", "default")
        raise SettingsError(
            f"default_quota = {format_size(settings.default_quota or 0)} ({source}) does not fit a pool of {pool}",
            "lower it, or use a larger --pool-size",
        ) from error
    for tenant, quota_bytes in kept.tenants.items():
        try:
            set_quota(store, tenant, quota_bytes, 0)
        except RequestError as error:
            raise SettingsError(
                f"the quotas kept in {path} do not fit a pool of {pool}: {error.message}",
                "use a --pool-size as large as before, or lower or remove quotas in that file",
            ) from error
    return settings
