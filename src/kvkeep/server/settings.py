"""What a person can set about a server: one table, read once, frozen.

    defaults  <  TOML file  <  environment (KVKEEP_POOL_SIZE)  <  flags (--pool-size 8GiB)

Each field of `Settings` is the single source for one setting: its name, type, default, limits, help
and whether it is `live`, that is, may change while the server runs. Documentation, `kvkeep status`
and the admin API are made from it. An unknown name or malformed value in any source stops the start
with a `SettingsError` that names the source, even where a later source overrides it."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Self

from kvkeep.client.options import replaced
from kvkeep.errors import SettingsError
from kvkeep.tiers.free_memory import pool_room
from kvkeep.tiers.memory import auto_size, slab_bytes_for
from kvkeep.tiers.service_address import CREDENTIALS
from kvkeep.tiers.tier_address import TIER_FORMAT, TierAddress, parse_tiers, quote_tiers, show_tiers
from kvkeep.units import (
    DURATION_FORMAT,
    GIB,
    KIB,
    MIB,
    SIZE_FORMAT,
    TIB,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)
from kvkeep.wire.address import ADDRESS_FORMAT, is_loopback, parse_address, split_host, tcp_host
from kvkeep.wire.peers import USERS_FORMAT, parse_users
from kvkeep.wire.tls import tls_files

ENV_PREFIX: Final = "KVKEEP_"
MIN_KEY_BYTES: Final = 16  # a request takes at least as many bytes for each block
AUTO: Final = "(auto"  # in the source of a size that no source gave
# Variables with our prefix that are not settings: the path of the file, the native kernel, where
# the command line finds the admin API, the certificates of clients, and the credentials of tiers.
ENV_OTHERS: Final = frozenset(
    {"KVKEEP_CONFIG", "KVKEEP_NATIVE", "KVKEEP_AS_LMCACHE", "KVKEEP_HTTP"}
    | {"KVKEEP_CLIENT_TLS_CERT", "KVKEEP_CLIENT_TLS_KEY", "KVKEEP_CLIENT_TLS_CA"}
    | CREDENTIALS
)
# Settings of earlier releases, and what replaces each.
_OF_CLIENTS: Final = (
    "set KVKEEP_CLIENT_TLS_CERT, KVKEEP_CLIENT_TLS_KEY and KVKEEP_CLIENT_TLS_CA for clients"
)
_REPLACED: Final = {
    "curve_key": "set tls_cert, tls_key and tls_ca to files that `kvkeep keygen` makes",
    "authorized_keys": "set authorized_clients to a list of certificate names",
    "client_key": _OF_CLIENTS,
    "server_key": _OF_CLIENTS,
}

# What people try, and the setting that they mean.
_MEANT: Final = {"port": "address", "host": "address", "http_port": "http_address"}

# Kubernetes gives every container variables named after the Services of its namespace, so a Service
# called kvkeep, or kvkeep-something, looks like settings of ours. Variables that end in _PORT hold
# an address, such as tcp://10.0.0.1:5555: a plain number there is a mistake, and is not ignored.
_KUBERNETES_NAME: Final = re.compile(
    r"KVKEEP(_[A-Z0-9_]+)?_"
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)"
)
_KUBERNETES_PORT: Final = re.compile(r"KVKEEP(_[A-Z0-9_]+)?_PORT=(tcp|udp|sctp)://.*", re.DOTALL)


# -- kinds of values: how each is parsed, shown and described. `show` is the inverse of `parse`.


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of value. `parse` raises ValueError; `expected` completes "expected ...". An error
    shows refused text as `quote` does."""

    expected: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str
    show_limit: Callable[[Any], str] = str
    quote: Callable[[str], str] = '"{}"'.format


def _exact_size(size_bytes: int) -> str:
    """Human where that loses nothing, else a whole number of the largest unit that divides it."""
    text = format_size(size_bytes)
    if parse_size(text) == size_bytes:
        return text
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, ""))
    return next(f"{size_bytes // scale}{unit}" for scale, unit in units if size_bytes % scale == 0)


def _exact_duration(seconds: float) -> str:
    """Human where that loses nothing, else in the smallest unit."""
    text = format_duration(seconds)
    return text if parse_duration(text) == seconds else f"{round(seconds * 1e6)}us"


def _size_or(word: str) -> Kind:
    """A size, or `word`, which is None in the settings."""
    return Kind(
        f'{SIZE_FORMAT}, or "{word}"',
        lambda text: None if text.strip().lower() == word else parse_size(text),
        lambda value: word if value is None else _exact_size(value),
        format_size,
    )


def _one_of(*words: str) -> Kind:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError
        return text.lower()

    return Kind(f"one of {', '.join(words)}", parse)


def _parse_count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()):
        raise ValueError
    return int(text)


def _parse_switch(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        raise ValueError
    return word in ("true", "yes", "on", "1")


def _parse_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise ValueError
    return text


def _parse_directory(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:  # no home directory
        raise ValueError from error
    if not path.is_absolute() or not text.isprintable():
        raise ValueError
    return path


def _parse_file(text: str) -> Path | None:
    return None if text.strip().lower() == "none" else _parse_directory(text)


def _parse_http_address(text: str) -> str:
    split_host(text)
    return text


SIZE = Kind(SIZE_FORMAT, parse_size, _exact_size, format_size)
COUNT = Kind("a whole number", _parse_count)
DURATION = Kind(DURATION_FORMAT, parse_duration, _exact_duration, format_duration)
SWITCH = Kind("true or false", _parse_switch, lambda on: "true" if on else "false")
NAME = Kind("letters, digits, - and _, at most 64", _parse_name)
DIRECTORY = Kind("an absolute path", _parse_directory)
ADDRESS = Kind(ADDRESS_FORMAT, parse_address)
FILE = Kind(
    'an absolute path, or "none"', _parse_file, lambda path: "none" if path is None else str(path)
)
HTTP_ADDRESS = Kind("host:port", _parse_http_address)
USERS = Kind(USERS_FORMAT, parse_users, lambda users: ",".join(map(str, users)) or "none")
TIERS = Kind(TIER_FORMAT, parse_tiers, show_tiers, quote=quote_tiers)
AUTO_SIZE = _size_or("auto")
QUOTA = _size_or("none")
LOG_LEVEL = _one_of("debug", "info", "warning", "error")


# -- the table


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `default` is text, parsed like any source; `low` and `high` are inclusive."""

    kind: Kind
    default: str
    help: str
    live: bool = False
    low: float | None = None
    high: float | None = None

    def parse(self, name: str, text: str, source: str, is_quoted: bool = True) -> Any:
        """The value of `text`. SettingsError names the setting, value, source and what is
        expected."""
        try:
            value = self.kind.parse(text)
            below = value is not None and self.low is not None and value < self.low
            above = value is not None and self.high is not None and value > self.high
            if below or above:
                raise ValueError
        except ValueError as error:
            why = f"{error}; " if self.kind in (USERS, TIERS) and str(error) else ""
            shown = self.kind.quote(text) if is_quoted else text
            raise SettingsError(
                f"{name} = {shown} ({source}): {why}expected {self.expected}"
            ) from None
        return value

    @property
    def expected(self) -> str:
        """What a value looks like, limits included."""
        parts = [self.kind.expected]
        if self.low is not None:
            parts.append(f"at least {self.kind.show_limit(self.low)}")
        if self.high is not None:
            parts.append(f"at most {self.kind.show_limit(self.high)}")
        return ", ".join(parts)


@dataclass(frozen=True)
class SettingShown:
    """A setting as people see it: `value` is text that would set it again, `source` where it came
    from."""

    name: str
    value: str
    source: str
    live: bool
    help: str


def _setting(kind: Kind, default: str, help: str, **more: Any) -> Any:
    """A field of Settings: a Setting, whose other fields are `more`."""
    return field(metadata={"setting": Setting(kind, default, help, **more)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one server, made by `load`. Sizes are bytes, durations seconds; None is auto
    or none."""

    address: str = _setting(ADDRESS, "tcp://localhost:5555", "Address for engines.")
    http_address: str = _setting(
        HTTP_ADDRESS, "127.0.0.1:5556", "Address of health, metrics and the admin API."
    )
    tls_cert: Path | None = _setting(
        FILE, "none", "File of the server's certificate. Turns on TLS, and HTTPS beyond loopback."
    )
    tls_key: Path | None = _setting(FILE, "none", "File of the certificate's private key.")
    tls_ca: Path | None = _setting(
        FILE, "none", "File of the CAs whose certificates engines may show."
    )
    authorized_clients: Path | None = _setting(
        FILE,
        "none",
        "File or directory of certificate names that may connect; none: all of the CA.",
    )
    admin_token: Path | None = _setting(
        FILE, "none", "File of the token that every admin request must carry; none: changes only."
    )
    trusted_users: tuple[int, ...] = _setting(
        USERS,
        "none",
        "Users of this host, besides the server's own and root, whose engines may connect.",
    )
    name: str = _setting(NAME, "default", "Names this server's pool and state on the host.")
    pool_size: int = _setting(
        AUTO_SIZE,
        "auto",
        "Memory for blocks; auto: what the last server left, or a quarter of free memory.",
        low=MIB,
        high=64 * TIB,
    )
    shm_dir: Path = _setting(DIRECTORY, "/dev/shm", "The memory file system that holds the pool.")
    slab_size: int = _setting(
        AUTO_SIZE,
        "auto",
        "Unit in which the pool is divided among block sizes.",
        low=64 * KIB,
        high=64 * GIB,
    )
    tier: tuple[TierAddress, ...] = _setting(
        TIERS,
        "none",
        "Disks, and a tier that hosts share, below memory. May be given several times.",
    )
    tier_keys: Path | None = _setting(
        FILE, "none", "File of the secrets that encrypt the shared tier; none: not encrypted."
    )
    state_dir: Path = _setting(
        DIRECTORY,
        "~/.local/state/kvkeep",
        "Directory for what survives a restart of the host, such as quotas.",
    )
    default_quota: int | None = _setting(
        QUOTA, "none", "Bytes promised to each tenant without an own quota.", live=True
    )
    default_limit: int | None = _setting(
        QUOTA,
        "none",
        "Most bytes that a tenant without a limit of its own may use; 0: nothing is stored.",
        live=True,
        high=64 * TIB,
    )
    max_sessions: int = _setting(
        COUNT, "256", "Engine processes connected at one time.", low=1, high=65536
    )
    max_sessions_per_client: int = _setting(
        COUNT, "128", "Sessions of one certificate or, without TLS, process.", low=1, high=65536
    )
    max_requests_per_second: int = _setting(
        COUNT, "20000", "Requests that one session may send in a second.", low=1, high=1 << 24
    )
    max_network_rate: int | None = _setting(
        QUOTA, "none", "Bytes of blocks that one session may send or fetch in a second.", low=KIB
    )
    max_frame_size: int = _setting(
        SIZE, "64MiB", "Longest message accepted.", low=64 * KIB, high=2 * GIB - 1
    )
    max_blocks_per_request: int = _setting(
        COUNT, "65536", "Blocks that one lookup or store may name.", low=1, high=1 << 24
    )
    max_leases_per_session: int = _setting(
        COUNT, "4096", "Lookups whose blocks one session may hold.", low=1, high=1 << 24
    )
    max_writing_blocks_per_session: int = _setting(
        COUNT, "65536", "Blocks that one session may be writing at a time.", low=1, high=1 << 24
    )
    max_layouts: int = _setting(
        COUNT, "64", "Different block layouts in one pool.", low=1, high=65536
    )
    max_tenants: int = _setting(COUNT, "100000", "Tenants known at one time.", low=1, high=1 << 24)
    session_check_interval: float = _setting(
        DURATION,
        "1s",
        "How often the server looks for dead sessions and changed files.",
        low=0.01,
        high=3600,
    )
    network_session_timeout: float = _setting(
        DURATION, "30s", "Silence that ends a session on another host.", low=0.1, high=86400
    )
    network_lease_timeout: float = _setting(
        DURATION, "60s", "Age that ends a lease or write of a network session.", low=0.1, high=86400
    )
    shutdown_grace: float = _setting(
        DURATION, "10s", "Time for requests in progress when the server stops.", low=0, high=3600
    )
    keep_pool: bool = _setting(
        SWITCH, "true", "Keep the pool and its index for the next server to adopt."
    )
    verify: bool = _setting(
        SWITCH,
        "true",
        "Have every engine verify its loads; off: as its own option says.",
        live=True,
    )
    log_level: str = _setting(LOG_LEVEL, "info", "Lowest severity that is logged.", live=True)
    log_json: bool = _setting(SWITCH, "false", "Log one JSON object per line.")
    tracing: bool = _setting(
        SWITCH, "false", "Export spans of traced requests to the collector that OTEL_* names."
    )
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def load(
        cls,
        config: Path | None,
        env: Mapping[str, str],
        argv: Sequence[str],
        *,
        fresh: bool = False,
    ) -> Self:
        """Settings from all sources; a later one overrides. For "auto", looks at the free memory
        and, unless `fresh`, at the pool that can be adopted.

        `config` None means the file that KVKEEP_CONFIG names, if any. Raises SettingsError and
        nothing else."""
        if config is None and "KVKEEP_CONFIG" in env:
            config = Path(env["KVKEEP_CONFIG"])
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for given in (_from_defaults(env), _from_file(config), _from_env(env), _from_argv(argv)):
            for name, text, source in given:
                values[name] = TABLE[name].parse(name, text, source)
                sources[name] = source
        if values["pool_size"] is None:
            adopt = values["keep_pool"] and not fresh
            values["pool_size"], is_left = _auto_pool_size(values["shm_dir"], values["name"], adopt)
            sources["pool_size"] += f" {AUTO}, as the last server)" if is_left else f" {AUTO})"
        if values["slab_size"] is None:
            values["slab_size"] = slab_bytes_for(values["pool_size"])
            sources["slab_size"] += f" {AUTO})"
        settings = cls(**values, sources=sources)
        _check_together(settings)
        return settings

    @property
    def made_token(self) -> Path:
        return made_token(self.state_dir, self.name)

    @property
    def http_is_local(self) -> bool:
        """Whether `http_address` is reached from this host alone."""
        return is_loopback(split_host(self.http_address)[0])

    @property
    def http_has_tls(self) -> bool:
        """Whether `http_address` speaks HTTPS. On loopback local commands need no certificates."""
        return self.tls_cert is not None and not self.http_is_local

    @property
    def pool_size_is_auto(self) -> bool:
        """Whether no source gave a size for the pool."""
        return AUTO in self.sources.get("pool_size", "")

    @property
    def slab_size_is_auto(self) -> bool:
        """Whether no source gave a size for slabs."""
        return AUTO in self.sources.get("slab_size", "")

    def changed(self, changes: Mapping[str, str]) -> Self:
        """A copy with live settings changed. SettingsError if one is unknown or not live, or if
        they do not fit together."""
        values: dict[str, Any] = {}
        for name, text in changes.items():
            if name not in TABLE:
                raise _unknown(name, "change", "{}".format)
            if not TABLE[name].live:
                live = ", ".join(other for other in TABLE if TABLE[other].live)
                raise SettingsError(
                    f"{name} cannot change while the server runs",
                    f"restart with it; these can change: {live}",
                )
            values[name] = TABLE[name].parse(name, text, "change")
        sources = {**self.sources, **dict.fromkeys(values, "changed while running")}
        settings = replace(self, **values, sources=sources)
        _check_together(settings)
        return settings

    def describe(self) -> list[SettingShown]:
        """All settings, in the order of the table."""
        rows = []
        for name, line in TABLE.items():
            value = line.kind.show(getattr(self, name))
            source = self.sources.get(name, "")
            rows.append(SettingShown(name, value, source, line.live, line.help))
        return rows


def made_token(state_dir: Path, name: str) -> Path:
    """The file of the token that a server makes for itself where `admin_token` is not set."""
    return state_dir / name / "admin.token"


def _auto_pool_size(shm_dir: Path, name: str, adopt: bool) -> tuple[int, bool]:
    """The size, and whether it is that of an old pool. SettingsError if no pool fits."""
    try:
        nbytes, is_left = auto_size(shm_dir, name, adopt=adopt)
        room = pool_room(shm_dir)
    except OSError as error:
        raise SettingsError(
            f"shm_dir = {shm_dir} cannot be used: {error.strerror}",
            "choose a --shm-dir that exists, such as /dev/shm",
        ) from error
    if not nbytes:
        raise SettingsError(f"there is no room for a pool: {room.reason}", room.remedy)
    return nbytes, is_left


TABLE: Final[Mapping[str, Setting]] = {
    each.name: each.metadata["setting"] for each in fields(Settings) if "setting" in each.metadata
}


# --- the sources: each yields (name, text, where it was found) ------------------------------------

Given = Iterator[tuple[str, str, str]]


def _from_defaults(env: Mapping[str, str]) -> Given:
    for name, line in TABLE.items():
        yield name, line.default, "default"
    state_home = env.get("XDG_STATE_HOME", "")
    if state_home.startswith("/"):  # the XDG specification has relative paths ignored
        yield "state_dir", f"{state_home}/kvkeep", "default"


def _from_file(config: Path | None) -> Given:
    if config is None:
        return
    try:
        with config.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise SettingsError(
            f"settings file {config} cannot be read: {error.strerror}",
            "check the path in --config or KVKEEP_CONFIG",
        ) from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise SettingsError(
            f"settings file {config} is not valid TOML: {error}",
            'a line looks like pool_size = "8GiB" or max_sessions = 64, in UTF-8',
        ) from error
    for key, value in document.items():
        source = f"file {config}"
        if key in TABLE and TABLE[key].kind in (USERS, TIERS) and isinstance(value, list):
            value = ",".join(map(str, value)) or "none"
        if key not in TABLE and isinstance(value, dict):
            raise SettingsError(
                f"[{key}] ({source}): settings stand at the top level, not in a table",
                f"remove the line [{key}]",
            )
        if key not in TABLE:
            raise _unknown(key, source, "{}".format)
        if not isinstance(value, str | int | float):
            raise SettingsError(
                f"{key} ({source}): expected {TABLE[key].expected}, not a table, list or date"
            )
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if not isinstance(value, str):  # an error shows it as it stands in the file, unquoted
            TABLE[key].parse(key, text, source, is_quoted=False)
        yield key, text, source


def _from_env(env: Mapping[str, str]) -> Given:
    for variable in sorted(env):
        is_other = variable in ENV_OTHERS or _is_kubernetes(variable, env[variable])
        if is_other or not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if variable != _variable(name) or name not in TABLE:
            raise _unknown(variable, "environment", _variable)
        yield name, env[variable], f"environment {variable}"


def _from_argv(argv: Sequence[str]) -> Given:
    """`--name value`, `--name=value`, `--switch` and `--no-switch`; of a flag given twice the last
    counts, and of --tier all."""
    rest, tiers = iter(argv), list[str]()
    for argument in rest:
        flag, equals, text = argument.partition("=")
        if not flag.startswith("--") or flag == "--":
            raise SettingsError(
                f'unexpected argument "{argument}"', "settings are given as --name value"
            )
        positive = "--" + flag.removeprefix("--no-")
        if flag.startswith("--no-") and not equals and _is_switch(positive):
            yield _flag_name(positive), "false", f"flag {flag}"
            continue
        name = _flag_name(flag)
        if name not in TABLE or flag != _flag(name):
            raise _unknown(flag, "flags", _flag)
        if not equals:
            text = "true" if _is_switch(flag) else next(rest, "--")
        if text.startswith("--"):
            raise SettingsError(f"{flag} needs a value: expected {TABLE[name].expected}")
        if TABLE[name].kind is TIERS:
            tiers.append(text)
            text = ",".join(tiers)
        yield name, text, f"flag {flag}"


def _is_kubernetes(variable: str, value: str) -> bool:
    return bool(
        _KUBERNETES_NAME.fullmatch(variable) or _KUBERNETES_PORT.fullmatch(f"{variable}={value}")
    )


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _flag_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _is_switch(flag: str) -> bool:
    line = TABLE.get(_flag_name(flag))
    return line is not None and line.kind is SWITCH


def _unknown(given: str, source: str, spell: Callable[[str], str]) -> SettingsError:
    """The error for an unknown name, with its replacement or the nearest known name, as `spell`
    writes it."""
    for name, instead in _REPLACED.items():
        if given == spell(name):
            return replaced(f"{given} ({source})", instead)
    for name, meant in _MEANT.items():
        if given == spell(name):
            return SettingsError(
                f'unknown setting "{given}" ({source})',
                f"host and port stand in {spell(meant)}, such as {TABLE[meant].default}",
            )
    known = {spell(name).lower(): spell(name) for name in TABLE}
    (near,) = difflib.get_close_matches(given.lower(), known, n=1, cutoff=0.0)
    return SettingsError(
        f'unknown setting "{given}" ({source})', f"the nearest known one is {known[near]}"
    )


# --- rules about several settings: each value is valid alone, the combination is not --------------


def _check_together(settings: Settings) -> None:
    """Raises SettingsError for settings that contradict each other."""
    _check_reach(settings)
    tcp = tcp_host(settings.address)
    http = split_host(settings.http_address)
    if tcp is not None and tcp[1] == http[1] != 0:
        raise SettingsError(
            f"address and http_address both use port {http[1]}", "give each a port of its own"
        )
    if settings.slab_size % (4 * KIB):
        raise SettingsError(
            f"slab_size = {settings.slab_size} is not a multiple of 4KiB",
            "use a round size such as 64MiB",
        )
    quota, limit = settings.default_quota, settings.default_limit
    if quota is not None and limit is not None and limit < quota:
        raise SettingsError(
            f"default_limit = {QUOTA.show(limit)} is less than default_quota = {QUOTA.show(quota)}",
            "a tenant cannot be promised more than it may use: lower default_quota, or raise "
            "default_limit",
        )
    if settings.tier_keys is not None and not any(tier.is_shared for tier in settings.tier):
        raise SettingsError(
            "tier_keys is set, and tier names none that hosts share",
            "unset tier_keys: it does not encrypt disks. For those use an encrypted device",
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
        value, show = getattr(settings, name), TABLE[name].kind.show
        if value < least:
            raise SettingsError(f"{name} = {show(value)} is less than {show(least)}, set by {why}")


def _check_reach(settings: Settings) -> None:
    """Raises SettingsError for an address that other hosts reach without authentication: beyond
    loopback engines need TLS, and HTTP needs a token or a list of certificates."""
    has_tls = tls_files(settings) is not None
    if not has_tls and settings.authorized_clients is not None:
        raise SettingsError(
            "authorized_clients is set and tls_cert is not",
            "set tls_cert, tls_key and tls_ca: it names certificates",
        )
    tcp = tcp_host(settings.address)
    if not has_tls and tcp is not None and not is_loopback(tcp[0]):
        raise SettingsError(
            f'address = "{settings.address}" is reachable from other hosts, and tls_cert is not '
            "set",
            "make certificates with `kvkeep keygen`, set tls_cert, tls_key and tls_ca; or use "
            "localhost, 127.0.0.1 or [::1]",
        )
    has_guard = settings.admin_token is not None or settings.authorized_clients is not None
    if not settings.http_is_local and not has_guard:
        raise SettingsError(
            f'http_address = "{settings.http_address}" is reachable from other hosts, and '
            "admin_token is not set",
            "make one with `kvkeep keygen --admin-token` and set admin_token; or set "
            "authorized_clients, with the right admin; or use localhost, 127.0.0.1 or [::1]",
        )
