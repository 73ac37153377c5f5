"""What a person can set about a server: one table, read once, frozen.

    defaults  <  TOML file  <  environment (KVKEEP_POOL_SIZE)  <  flags (--pool-size 8GiB)

Each line of `Settings` is the single source for one setting: its name, type, default, limits, help
and whether it is `live`, that is, may change while the server runs. Documentation, `kvkeep status`
and the admin API are made from it. Whatever a source says that is unknown or malformed stops the
start with a `SettingsError` that names the source, also where a later one would have overruled it:
a mistake that waits is worse than one that shows."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self, get_type_hints

from kvkeep.client.options import replaced
from kvkeep.errors import SettingsError
from kvkeep.server.setting_kinds import (
    ADDRESS,
    AUTO_SIZE,
    COUNT,
    DIRECTORY,
    DURATION,
    FILE,
    HTTP_ADDRESS,
    LOG_LEVEL,
    NAME,
    QUOTA,
    SIZE,
    SWITCH,
    USERS,
    Kind,
)
from kvkeep.tiers.free_memory import pool_room
from kvkeep.tiers.memory import auto_size, slab_bytes_for
from kvkeep.units import GIB, KIB, MIB, TIB
from kvkeep.wire.address import is_loopback, split_host, tcp_host
from kvkeep.wire.tls import tls_files

ENV_PREFIX: Final = "KVKEEP_"
MIN_KEY_BYTES: Final = (
    16  # no block key is shorter, so a request takes at least this many bytes a block
)
AUTO: Final = "(auto"  # in the source of a size that was not given but found
# Variables with our prefix that are no settings: where the file is, whether to use the C kernel,
# where the command line finds the admin API, and the certificates of clients.
ENV_OTHERS: Final = frozenset(
    {"KVKEEP_CONFIG", "KVKEEP_NATIVE", "KVKEEP_AS_LMCACHE", "KVKEEP_HTTP"}
    | {"KVKEEP_CLIENT_TLS_CERT", "KVKEEP_CLIENT_TLS_KEY", "KVKEEP_CLIENT_TLS_CA"}
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

# Kubernetes gives every container variables named after the Services of its namespace, so a Service
# called kvkeep, or kvkeep-something, looks like settings of ours. Those that end in _PORT hold an
# address, such as tcp://10.0.0.1:5555: a plain number there is somebody's mistake and not ignored.
_KUBERNETES_NAME: Final = re.compile(
    r"KVKEEP(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)"
)
_KUBERNETES_PORT: Final = re.compile(r"KVKEEP(_[A-Z0-9_]+)?_PORT=(tcp|udp|sctp)://.*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Setting:
    """A line of the table. `default` is text, read like any source; `low` and `high` are
    inclusive."""

    kind: Kind
    default: str
    help: str
    live: bool = False
    low: float | None = None
    high: float | None = None

    def parse(self, name: str, text: str, source: str, quote: str = '"') -> Any:
        """The value of `text`, or a SettingsError that names setting, value, source and what is
        expected."""
        try:
            value = self.kind.parse(text)
            below = value is not None and self.low is not None and value < self.low
            above = value is not None and self.high is not None and value > self.high
            if below or above:
                raise ValueError
        except ValueError as error:
            why = f"{error}; " if self.kind is USERS else ""
            raise SettingsError(
                f"{name} = {quote}{text}{quote} ({source}): {why}expected {self.expected}"
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


class Row(NamedTuple):
    """A setting as people see it: `value` is text that would set it again."""

    name: str
    value: str
    source: str
    live: bool
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a server was told, made by `load`. Sizes are bytes, durations seconds; None is auto or
    none."""

    address: Annotated[str, Setting(ADDRESS, "tcp://localhost:5555", "Where engines connect.")]
    http_address: Annotated[
        str, Setting(HTTP_ADDRESS, "127.0.0.1:5556", "Where health, metrics and the admin API are.")
    ]
    tls_cert: Annotated[
        Path | None,
        Setting(
            FILE,
            "none",
            "File of the server's certificate; engines need one of their own then. HTTP beyond loopback is HTTPS then.",
        ),
    ]
    tls_key: Annotated[Path | None, Setting(FILE, "none", "File of the certificate's private key.")]
    tls_ca: Annotated[
        Path | None, Setting(FILE, "none", "File of the CAs whose certificates engines may show.")
    ]
    authorized_clients: Annotated[
        Path | None,
        Setting(
            FILE,
            "none",
            "File or directory of the certificate names that may connect, or administer; none: all of the CA.",
        ),
    ]
    admin_token: Annotated[
        Path | None,
        Setting(
            FILE,
            "none",
            "File of the token that every request to the admin API must carry; none: changes only.",
        ),
    ]
    trusted_users: Annotated[
        tuple[int, ...],
        Setting(
            USERS, "none", "Users of this host, beside our own and root, whose engines may connect."
        ),
    ]
    name: Annotated[
        str,
        Setting(NAME, "default", "Names this server's pool and state among others on the host."),
    ]
    pool_size: Annotated[
        int,
        Setting(
            AUTO_SIZE,
            "auto",
            "Memory for blocks, in whole slabs; auto is what a server before left, or a quarter of free memory.",
            low=MIB,
            high=64 * TIB,
        ),
    ]
    shm_dir: Annotated[
        Path, Setting(DIRECTORY, "/dev/shm", "The memory file system that holds the pool.")
    ]
    slab_size: Annotated[
        int,
        Setting(
            AUTO_SIZE,
            "auto",
            "Unit in which the pool is shared among block sizes.",
            low=64 * KIB,
            high=64 * GIB,
        ),
    ]
    state_dir: Annotated[
        Path,
        Setting(
            DIRECTORY,
            "~/.local/state/kvkeep",
            "What outlives a restart of the host, such as quotas.",
        ),
    ]
    default_quota: Annotated[
        int | None,
        Setting(
            QUOTA, "none", "Bytes promised to each tenant without a quota of its own.", live=True
        ),
    ]
    default_limit: Annotated[
        int | None,
        Setting(
            QUOTA,
            "none",
            "Bytes that each tenant without a limit of its own may use at most; 0: nothing is stored.",
            live=True,
            high=64 * TIB,
        ),
    ]
    max_sessions: Annotated[
        int, Setting(COUNT, "256", "Engine processes connected at one time.", low=1, high=65536)
    ]
    max_sessions_per_client: Annotated[
        int,
        Setting(
            COUNT,
            "128",
            "Sessions of one certificate or, without TLS, of one process.",
            low=1,
            high=65536,
        ),
    ]
    max_requests_per_second: Annotated[
        int,
        Setting(
            COUNT, "20000", "Requests that one session may send in a second.", low=1, high=1 << 24
        ),
    ]
    max_network_rate: Annotated[
        int | None,
        Setting(
            QUOTA,
            "none",
            "Bytes of blocks that one session may move through the socket in a second.",
            low=KIB,
        ),
    ]
    max_frame_size: Annotated[
        int, Setting(SIZE, "64MiB", "Longest message accepted.", low=64 * KIB, high=2 * GIB - 1)
    ]
    max_blocks_per_request: Annotated[
        int,
        Setting(COUNT, "65536", "Blocks that one lookup or store may name.", low=1, high=1 << 24),
    ]
    max_leases_per_session: Annotated[
        int,
        Setting(
            COUNT,
            "4096",
            "Lookups whose blocks one session may hold at a time.",
            low=1,
            high=1 << 24,
        ),
    ]
    max_writing_blocks_per_session: Annotated[
        int,
        Setting(COUNT, "65536", "Blocks that one session may have in flight.", low=1, high=1 << 24),
    ]
    max_layouts: Annotated[
        int, Setting(COUNT, "64", "Different block layouts in one pool.", low=1, high=65536)
    ]
    max_tenants: Annotated[
        int, Setting(COUNT, "100000", "Tenants known at one time.", low=1, high=1 << 24)
    ]
    session_check_interval: Annotated[
        float,
        Setting(DURATION, "1s", "How often dead sessions are looked for.", low=0.01, high=3600),
    ]
    network_session_timeout: Annotated[
        float,
        Setting(
            DURATION,
            "30s",
            "Silence after which a session on another host has ended.",
            low=0.1,
            high=86400,
        ),
    ]
    network_lease_timeout: Annotated[
        float,
        Setting(
            DURATION,
            "60s",
            "Age at which a lease or write of a network session ends.",
            low=0.1,
            high=86400,
        ),
    ]
    shutdown_grace: Annotated[
        float,
        Setting(
            DURATION,
            "10s",
            "Time for requests in progress when the server stops.",
            low=0,
            high=3600,
        ),
    ]
    keep_pool: Annotated[
        bool,
        Setting(
            SWITCH, "true", "Leave the pool and its index to the next server, which adopts them."
        ),
    ]
    verify: Annotated[
        bool,
        Setting(
            SWITCH,
            "true",
            "Have every engine check what it loads; off: as its own option says.",
            live=True,
        ),
    ]
    log_level: Annotated[
        str, Setting(LOG_LEVEL, "info", "Least severity that is logged.", live=True)
    ]
    log_json: Annotated[bool, Setting(SWITCH, "false", "Log one JSON object a line.")]
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
        """Settings from all sources, later ones first. Reads the file and, for "auto", what memory
        is free and, unless `fresh`, how large the pool is that can be adopted.

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
            sources["pool_size"] += f" {AUTO}, as the server before)" if is_left else f" {AUTO})"
        if values["slab_size"] is None:
            values["slab_size"] = slab_bytes_for(values["pool_size"])
            sources["slab_size"] += f" {AUTO})"
        settings = cls(**values, sources=sources)
        _check_together(settings)
        return settings

    @property
    def made_token(self) -> Path:
        """The file of the token that the server makes for itself where `admin_token` is not set."""
        return made_token(self.state_dir, self.name)

    @property
    def http_is_local(self) -> bool:
        """Whether `http_address` is reached from this host alone."""
        return is_loopback(split_host(self.http_address)[0])

    @property
    def http_has_tls(self) -> bool:
        """Whether `http_address` speaks HTTPS. On loopback it does not: local commands need no
        certificates."""
        return self.tls_cert is not None and not self.http_is_local

    @property
    def pool_size_is_auto(self) -> bool:
        """Whether no source gave a size for the pool."""
        return AUTO in self.sources.get("pool_size", "")

    def changed(self, name: str, text: str) -> Self:
        """A copy with one live setting changed. Raises SettingsError where it is unknown or not
        live."""
        return self.changed_all({name: text})

    def changed_all(self, changes: Mapping[str, str]) -> Self:
        """A copy with several live settings changed, which must fit together when all are."""
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
        settings = replace(
            self,
            **values,
            sources={**self.sources, **dict.fromkeys(values, "changed while running")},
        )
        _check_together(settings)
        return settings

    def describe(self) -> list[Row]:
        """One row a setting, in the order of the table."""
        return [
            Row(
                name,
                line.kind.show(getattr(self, name)),
                self.sources.get(name, ""),
                line.live,
                line.help,
            )
            for name, line in TABLE.items()
        ]


def made_token(state_dir: Path, name: str) -> Path:
    """See `Settings.made_token`."""
    return state_dir / name / "admin.token"


def _auto_pool_size(shm_dir: Path, name: str, adopt: bool) -> tuple[int, bool]:
    """See `auto_size`. SettingsError if no pool fits at all."""
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


def _read_table() -> dict[str, Setting]:
    hints = get_type_hints(Settings, include_extras=True)
    return {f.name: hints[f.name].__metadata__[0] for f in fields(Settings) if f.name != "sources"}


TABLE: Final[Mapping[str, Setting]] = _read_table()


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
        if key in TABLE and TABLE[key].kind is USERS and isinstance(value, list):
            value = ",".join(map(str, value)) or "none"
        if key not in TABLE and isinstance(value, dict):
            raise SettingsError(
                f"[{key}] ({source}): settings stand at the top level, in no table",
                f"remove the line [{key}]",
            )
        if key not in TABLE:
            raise _unknown(key, source, "{}".format)
        if not isinstance(value, str | int | float):
            raise SettingsError(
                f"{key} ({source}): expected {TABLE[key].expected}, not a table, list or date"
            )
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if not isinstance(
            value, str
        ):  # what is wrong with it is said as it stands in the file, without quotes
            TABLE[key].parse(key, text, source, quote="")
        yield key, text, source


def _from_env(env: Mapping[str, str]) -> Given:
    for variable in sorted(env):
        if (
            not variable.startswith(ENV_PREFIX)
            or variable in ENV_OTHERS
            or _is_kubernetes(variable, env[variable])
        ):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if variable != _variable(name) or name not in TABLE:
            raise _unknown(variable, "environment", _variable)
        yield name, env[variable], f"environment {variable}"


def _from_argv(argv: Sequence[str]) -> Given:
    """`--name value`, `--name=value`, `--switch` and `--no-switch`; of one given twice the last
    counts."""
    rest = iter(argv)
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
    """The error for an unknown name: with its replacement, or with the nearest known name as its
    source spells it."""
    for name, instead in _REPLACED.items():
        if given == spell(name):
            return replaced(f"{given} ({source})", instead)
    known = [spell(name) for name in TABLE]
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.0)
    return SettingsError(
        f'unknown setting "{given}" ({source})', f"the nearest known one is {near[0]}"
    )


# --- rules about several settings: each value is valid alone, the combination is not --------------


def _check_together(settings: Settings) -> None:
    """Raises SettingsError for settings that contradict each other, and as `_check_reach` does."""
    _check_reach(settings)
    tcp = tcp_host(settings.address)
    http = split_host(settings.http_address)
    if tcp is not None and tcp[1] == http[1] != 0:
        raise SettingsError(
            f"address and http_address both use port {http[1]}", "give each a port of its own"
        )
    if settings.slab_size % (4 * KIB):
        raise SettingsError(
            f"slab_size = {settings.slab_size} is no multiple of 4KiB",
            "use a round size such as 64MiB",
        )
    quota, limit = settings.default_quota, settings.default_limit
    if quota is not None and limit is not None and limit < quota:
        raise SettingsError(
            f"default_limit = {QUOTA.show(limit)} is less than default_quota = {QUOTA.show(quota)}",
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
        value, show = getattr(settings, name), TABLE[name].kind.show
        if value < least:
            raise SettingsError(f"{name} = {show(value)} is less than {show(least)}, set by {why}")


def _check_reach(settings: Settings) -> None:
    """Raises SettingsError for an address that other hosts reach without proof of who they are.

    Beyond loopback engines need TLS, which takes all three files, and HTTP needs a token or a list
    of certificates."""
    has_tls = tls_files(settings) is not None
    if not has_tls and settings.authorized_clients is not None:
        raise SettingsError(
            "authorized_clients is set and tls_cert is not",
            "set tls_cert, tls_key and tls_ca: it names certificates",
        )
    tcp = tcp_host(settings.address)
    if not has_tls and tcp is not None and not is_loopback(tcp[0]):
        raise SettingsError(
            f'address = "{settings.address}" is reachable from other hosts, and tls_cert is not set',
            "make certificates with `kvkeep keygen`, set tls_cert, tls_key and tls_ca; or use "
            "localhost, 127.0.0.1 or [::1]",
        )
    has_guard = settings.admin_token is not None or settings.authorized_clients is not None
    if not settings.http_is_local and not has_guard:
        raise SettingsError(
            f'http_address = "{settings.http_address}" is reachable from other hosts, and admin_token is not set',
            "make one with `kvkeep keygen --admin-token` and set admin_token; or set "
            "authorized_clients, and let certificates administer; or use localhost, 127.0.0.1 or "
            "[::1]",
        )
