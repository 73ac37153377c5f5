"""Fuzz target of everything that is read once at the edge: settings, connector options, params,
keys, quotas, units."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from kvkeep.client.hints import EXTRA_CACHED_TOKENS, Hints
from kvkeep.connector.options import KNOWN_KEYS, client_options
from kvkeep.errors import SettingsError
from kvkeep.server.auth import read_authorized, read_line
from kvkeep.server.quotas import QuotaFile
from kvkeep.server.settings import TABLE, Settings
from kvkeep.units import format_duration, format_size, parse_duration, parse_size
from kvkeep.wire.address import parse_address, split_host
from kvkeep.wire.secret_files import read_token
from kvkeep.wire.tls import TlsFiles, client_context, server_context
from kvkeep_lab.fuzz.choices import TEXTS, Choices, Ran, memory_directory

_VALUES: tuple[str, ...] = (*TEXTS, "1GiB", "64MiB", "true", "off", "10s", "250us", "/tmp", "0")
_VALUES += ("99999999999999999999", "auto", "-1")
_VALUES += ("127.0.0.1:0", "ipc:///tmp/x", "debug", "1.5TiB", "~", "~nobody/x")
_LINES: tuple[str, ...] = (
    "host-a",
    "host-a tenants=default,t-*",
    "spiffe://x/y tenants=salt:%ff",
    "sha256:" + "AB:" * 31 + "AB",
    "# no",
    "",
)
_LINES += (
    "-----BEGIN CERTIFICATE-----",
    "AAAA",
    "-----END CERTIFICATE-----",
    "-----BEGIN PRIVATE KEY-----",
    "sha256:0",
)
_PARAMS = (
    *EXTRA_CACHED_TOKENS,
    "kvkeep_priority",
    "kvkeep_ttl_ms",
    "kvkeep_session_finished",
    "kvkeep_prefetch",
)


@cache
def _scratch() -> Path:
    """A file that each input writes anew, in memory."""
    directory = memory_directory()
    _KEPT.append(directory)
    return Path(directory.name) / "file"


_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # until the process ends


def run_config(data: bytes) -> Ran:
    """One reader and something to read: a value, or an error that is made for it."""
    choices = Choices(data)
    choices.pick(_READERS)(choices)
    return Ran(1)


def _settings(choices: Choices) -> None:
    """From all three sources. What was read is shown so that it would be read again."""
    lines, env, argv = [], {}, []
    for _ in range(choices.byte() % 6):
        name = choices.pick([*TABLE, "unknown", "KVKEEP"])
        text = choices.pick(_VALUES) if choices.byte() % 4 else choices.text()
        match choices.below(4):
            case 0:
                lines.append(f"{name} = {text}")
            case 1:
                lines.append(f'{name} = "{text}"')
            case 2:
                env["KVKEEP_" + name.upper()] = text
            case _:
                flag = "--" + choices.pick(("", "", "no-")) + name.replace("_", "-")
                argv += [f"{flag}={text}"] if choices.byte() % 2 else [flag, text]
    content = "\n".join(lines).encode(errors="surrogatepass" if choices.byte() % 2 else "replace")
    _scratch().write_bytes(content + choices.rest())
    try:
        settings = Settings.load(_scratch(), env, argv)
    except SettingsError:
        return
    for row in settings.describe():
        assert TABLE[row.name].parse(row.name, row.value, "again") == getattr(settings, row.name), (
            row
        )


def _toml(choices: Choices) -> None:
    _scratch().write_bytes(choices.rest())
    with contextlib.suppress(SettingsError):
        Settings.load(_scratch(), {}, [])


def _options(choices: Choices) -> None:
    keys = [*KNOWN_KEYS, "lmcache.mp.host", "lmcache.mp.port", "other", "kvkeep.", "kvkeep.adress"]
    extra = {}
    for _ in range(choices.byte() % 5):
        extra[choices.pick(keys)] = choices.pick(_VALUES) if choices.byte() % 2 else choices.value()
    with contextlib.suppress(SettingsError):
        client_options(extra)


def _params(choices: Choices) -> None:
    params = {choices.pick(_PARAMS): choices.value() for _ in range(choices.byte() % 5)}
    read = Hints.of(params if choices.byte() % 4 else choices.value())
    assert 0 <= read.priority <= 100 and read.ttl_ms >= 0
    read.reply(3)


def _keys(choices: Choices) -> None:
    lines = [
        choices.pick(_LINES) if choices.byte() % 3 else choices.text()
        for _ in range(choices.byte() % 5)
    ]
    content = "\n".join(lines).encode(errors="surrogatepass" if choices.byte() % 2 else "replace")
    _scratch().write_bytes(content + choices.take(choices.byte()))
    os.chmod(_scratch(), choices.pick((0o600, 0o600, 0o644, 0o666)))
    with contextlib.suppress(SettingsError):
        read_token(_scratch())
    for context_of in (server_context, client_context):
        with contextlib.suppress(SettingsError):
            context_of(TlsFiles(_scratch(), _scratch(), _scratch()))
    problems: list[str] = []
    with contextlib.suppress(SettingsError):
        read_authorized(_scratch(), problems.append)
    for line in lines:
        if line.split():
            with contextlib.suppress(ValueError):
                read_line(line)
    os.chmod(_scratch(), 0o600)


def _quotas(choices: Choices) -> None:
    beginning = choices.pick(
        (b"", b'{"version": 1, "tenants": {', b'{"version": 1, "tenants": {"default": 5}, "default')
    )
    _scratch().write_bytes(beginning + choices.rest())
    with contextlib.suppress(SettingsError):
        kept = QuotaFile(_scratch()).load()
        assert all(quota >= 0 for quota in kept.tenants.values())


def _units(choices: Choices) -> None:
    text = (
        choices.pick(_VALUES)
        if choices.byte() % 2
        else choices.rest().decode(errors="surrogateescape")
    )
    for parse in (parse_size, parse_duration, parse_address, split_host):
        with contextlib.suppress(ValueError):
            parse(text)
    with contextlib.suppress(ValueError):
        assert parse_size(format_size(parse_size(text))) >= 0
    with contextlib.suppress(ValueError):
        assert parse_duration(format_duration(parse_duration(text))) >= 0


_READERS: tuple[Callable[[Choices], None], ...]
_READERS = (_settings, _options, _params, _keys, _quotas, _units, _toml)
