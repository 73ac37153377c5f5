"""Quotas that were set at run time, kept on disk so that they survive a restart.

The file holds tenant ids (digests, never salts) and bytes. It is replaced whole and synced, so a crash leaves the
old one or the new one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvkeep.errors import SettingsError
from kvkeep.kv.identity import is_tenant


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
        except msgspec.DecodeError as error:
            raise SettingsError(
                f"{self.path} cannot be read: {error}", "mend it, or remove it to start without the quotas kept there"
            ) from error
        return KeptQuotas(kept.tenants, kept.default_set, kept.default_bytes)

    def save(self, quotas: KeptQuotas) -> None:
        """Replaces the file. OSError if that fails; then the old one is still there."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self.path.with_suffix(".new")
        data = msgspec.json.format(
            msgspec.json.encode(_File(1, quotas.tenants, quotas.default_set, quotas.default_bytes))
        )
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.path)
