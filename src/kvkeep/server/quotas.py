"""Quotas and limits that were set at run time, kept on disk so that they survive a restart.

The file holds tenant ids (digests, never salts) and bytes. It is replaced whole and synced, so a
crash leaves the old one or the new one."""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import msgspec

from kvkeep.errors import RequestError, SettingsError
from kvkeep.kv.identity import is_tenant
from kvkeep.server.settings import TABLE, Settings
from kvkeep.store.operators import restore
from kvkeep.store.store import Store
from kvkeep.units import format_size

log = logging.getLogger(__name__)


@dataclass
class KeptQuotas:
    """Quotas and limits of tenants, and the defaults if they were set at run time."""

    tenants: dict[str, int] = field(default_factory=dict)
    default_set: bool = False
    default_bytes: int | None = None
    limits: dict[str, int] = field(default_factory=dict)
    default_limit_set: bool = False
    default_limit_bytes: int | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What is not set is left out, so that an earlier release can read a file without limits."""

    version: int
    tenants: dict[str, int]
    default_set: bool = False
    default_bytes: int | None = None
    limits: dict[str, int] = {}
    default_limit_set: bool = False
    default_limit_bytes: int | None = None


_KEPT = [each.name for each in fields(KeptQuotas)]


class QuotaFile:
    """Reads and replaces the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> KeptQuotas:
        """What is kept; nothing without a file. SettingsError if the file is invalid."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return KeptQuotas()
        except OSError as error:
            raise SettingsError(
                f"cannot read {self.path}: {error.strerror}", "check --state-dir"
            ) from error
        try:
            kept = msgspec.json.decode(data, type=_File)
            if kept.version != 1:
                raise msgspec.ValidationError(f"version {kept.version} is unknown")
            for kind, by_tenant in (("quota", kept.tenants), ("limit", kept.limits)):
                for tenant, nbytes in by_tenant.items():
                    if not is_tenant(tenant) or nbytes < 0:
                        raise msgspec.ValidationError(f"{tenant!r}: {nbytes} is not a {kind}")
            for default in (kept.default_bytes, kept.default_limit_bytes):
                if default is not None and default < 0:
                    raise msgspec.ValidationError(f"{default} is not a size")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SettingsError(
                f"{self.path} cannot be read: {error}",
                "repair it, or remove it to start without the quotas kept there",
            ) from error
        return KeptQuotas(**{name: getattr(kept, name) for name in _KEPT})

    def check_writable(self) -> None:
        """Makes the directory. SettingsError at the start if no file can be made in it."""
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
        """Replaces the file. OSError if that fails, and then the old one stays."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self.path.with_suffix(".new")
        data = msgspec.json.format(
            msgspec.json.encode(_File(1, **{name: getattr(quotas, name) for name in _KEPT}))
        )
        with open(draft, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.path)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)  # or a crash of the host might restore the old file
        finally:
            os.close(directory)


def apply_kept(
    store: Store, settings: Settings, kept: KeptQuotas, path: Path, now_ms: int = 0
) -> Settings:
    """Puts the defaults and what is kept in force at start. Returns the settings, with kept defaults
    in them.

    Quotas that no longer fit are reduced, with a warning; the file stays as it is, so that they are
    in force again with a larger pool. A given default quota that exceeds a given pool size stops
    the start."""
    _check_given(settings, kept, store.pool_bytes)
    if kept.default_set:
        settings = _overrule(settings, "default_quota", kept.default_bytes, path)
    if kept.default_limit_set:
        settings = _overrule(settings, "default_limit", kept.default_limit_bytes, path)
    settings = _lower_to_limit(settings)
    try:
        restore(
            store, kept.tenants, kept.limits, settings.default_quota, settings.default_limit, now_ms
        )
    except RequestError as error:
        raise SettingsError(
            f"quotas and limits kept in {path}: {error.message}", error.hint
        ) from error
    _warn_of_quotas(store, path)
    return settings


def _check_given(settings: Settings, kept: KeptQuotas, pool_bytes: int) -> None:
    quota_bytes, source = settings.default_quota, settings.sources.get("default_quota", "default")
    are_given = not kept.default_set and not settings.pool_size_is_auto
    if are_given and quota_bytes is not None and quota_bytes > pool_bytes:
        raise SettingsError(
            f"default_quota = {format_size(quota_bytes)} ({source}) does not fit a pool of "
            f"{format_size(pool_bytes)}",
            "lower it, or use a larger --pool-size",
        )


def _overrule(settings: Settings, name: str, value: int | None, path: Path) -> Settings:
    """The settings with a default that was set at run time."""
    if settings.sources.get(name, "default") != "default":
        shown = TABLE[name].kind.show(value)
        log.warning("%s = %s was set at run time (%s) and overrides the given", name, shown, path)
    return _with(settings, name, value, f"kept in {path}")


def _lower_to_limit(settings: Settings) -> Settings:
    """Lowers a default quota that exceeds the default limit: one may be kept, the other given."""
    quota_bytes, limit_bytes = settings.default_quota, settings.default_limit
    if quota_bytes is None or limit_bytes is None or quota_bytes <= limit_bytes:
        return settings
    log.warning(
        "default_quota = %s (%s) is more than default_limit = %s (%s): the quota in force is the "
        "limit. Set them with `kvkeep settings set default_quota ...` or `default_limit`",
        *(format_size(quota_bytes), settings.sources.get("default_quota", "default")),
        *(format_size(limit_bytes), settings.sources.get("default_limit", "default")),
    )
    source = settings.sources.get("default_quota", "default") + ", lowered to default_limit"
    return _with(settings, "default_quota", limit_bytes, source)


def _with(settings: Settings, name: str, value: int | None, source: str) -> Settings:
    return replace(settings, **{name: value}, sources={**settings.sources, name: source})  # type: ignore[arg-type]


def _warn_of_quotas(store: Store, path: Path) -> None:
    """Warns of quotas that are not in force in full, with the remedy."""
    tenants, pool = store.tenants, format_size(store.pool_bytes)
    default_bytes = tenants.default_quota_bytes
    if default_bytes is not None and default_bytes > store.pool_bytes:
        log.warning(
            "default_quota = %s does not fit a pool of %s: the quota in force is the pool. Lower "
            "it, or use a larger --pool-size",
            format_size(default_bytes),
            pool,
        )
    own = [tenant for tenant in tenants if tenant.own_quota_bytes is not None]
    promised, in_force = tenants.promised_bytes(), sum(tenant.quota_bytes or 0 for tenant in own)
    if tenants.is_scaled:
        log.warning(
            "the quotas of %d tenants kept in %s are %s together and do not fit a pool of %s: they "
            "are scaled down to %s together. With a --pool-size of %s they are in force in full; "
            "or lower them with `kvkeep tenants set-quota`, which `kvkeep tenants list` shows",
            *(len(own), path, format_size(promised)),
            *(pool, format_size(in_force), format_size(promised)),
        )
    capped = sum(
        tenant.limit_bytes is not None and (tenant.own_quota_bytes or 0) > tenant.limit_bytes
        for tenant in own
    )
    if capped:
        log.warning(
            "the quotas of %d tenants are more than default_limit: the quota in force is the limit. "
            "Give those tenants limits of their own with `kvkeep tenants set-limit`, or lower "
            "their quotas",
            capped,
        )
