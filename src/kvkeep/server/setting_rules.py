"""What only shows when all settings are known: each value is fine alone, together they cannot be meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kvkeep.errors import SettingsError
from kvkeep.units import KIB
from kvkeep.wire.address import is_loopback, split_host, tcp_host
from kvkeep.wire.tls import tls_files

if TYPE_CHECKING:
    from kvkeep.server.settings import Setting, Settings

MIN_KEY_BYTES: Final = 16  # no block key is shorter, so a request takes at least this many bytes a block


def check_together(settings: Settings, table: Mapping[str, Setting]) -> None:
    """SettingsError for what contradicts, and for an address that others can reach with nothing to keep them out."""
    check_reach(settings)
    tcp = tcp_host(settings.address)
    http = split_host(settings.http_address)
    if tcp is not None and tcp[1] == http[1] != 0:
        raise SettingsError(f"address and http_address both use port {http[1]}", "give each a port of its own")
    if settings.slab_size % (4 * KIB):
        raise SettingsError(
            f"slab_size = {settings.slab_size} is no multiple of 4KiB", "use a round size such as 64MiB"
        )
    if None not in (settings.default_quota, settings.default_limit) and settings.default_limit < settings.default_quota:  # type: ignore[operator]
        shown = table["default_limit"].kind.show
        raise SettingsError(
            f"default_limit = {shown(settings.default_limit)} is less than default_quota = "
            f"{shown(settings.default_quota)}",
            "a tenant cannot be promised more than it may use: lower default_quota, or raise default_limit",
        )
    for name, least, why in (
        ("pool_size", settings.slab_size, "slab_size: the pool must hold at least one slab"),
        (
            "max_frame_size",
            settings.max_blocks_per_request * MIN_KEY_BYTES,
            "max_blocks_per_request: a message must hold the keys of that many blocks",
        ),
        (
            "network_session_timeout",
            settings.session_check_interval,
            "session_check_interval: silence is not noticed more often than sessions are checked",
        ),
    ):
        if getattr(settings, name) < least:
            shown = table[name].kind.show
            raise SettingsError(f"{name} = {shown(getattr(settings, name))} is less than {shown(least)}, set by {why}")


def check_reach(settings: Settings) -> None:
    """TLS needs all three files. Beyond loopback engines need TLS, and HTTP a token or a list of certificates."""
    has_tls = tls_files(settings) is not None
    if not has_tls and settings.authorized_clients is not None:
        raise SettingsError(
            "authorized_clients is set and tls_cert is not", "set tls_cert, tls_key and tls_ca: it names certificates"
        )
    tcp = tcp_host(settings.address)
    if not has_tls and tcp is not None and not is_loopback(tcp[0]):
        raise SettingsError(
            f'address = "{settings.address}" is reachable from other hosts, and tls_cert is not set',
            "make certificates with `kvkeep keygen`, set tls_cert, tls_key and tls_ca; or use localhost, 127.0.0.1 or "
            "[::1]",
        )
    if not settings.http_is_local and settings.admin_token is None and settings.authorized_clients is None:
        raise SettingsError(
            f'http_address = "{settings.http_address}" is reachable from other hosts, and admin_token is not set',
            "make one with `kvkeep keygen --admin-token` and set admin_token; or set authorized_clients, and let "
            "certificates administer; or use localhost, 127.0.0.1 or [::1]",
        )
