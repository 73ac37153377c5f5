"""Who may connect over TLS: certificates of our CA, the list of authorized clients, and the tenants
they are bound to.

    TLS handshake ──► names of a verified certificate ──► Authority.caller_of ──► Caller, or None

The list, the certificate, its key and the CA are read again when they change: clients are added and
revoked, and certificates are renewed, without a restart."""

from __future__ import annotations

import logging
import os
import re
import ssl
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from kvkeep.errors import RequestError, SettingsError
from kvkeep.kv.identity import is_tenant, tenant_of
from kvkeep.wire.secret_files import UNWRITABLE, check_directory, key_lines, read_text
from kvkeep.wire.tls import FINGERPRINT, TlsFiles, server_context, stat_of

log = logging.getLogger(__name__)

CLIENT_FILE: Final = ".client"
LOG_INTERVAL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Caller:
    """The client that sent a message. `key`: the name in its certificate that matched the list.
    `tenants`: patterns of the tenants it may name; None for all. `admin`: it may administer over
    HTTPS. Without TLS: ANYONE."""

    key: str = ""
    name: str = ""
    tenants: tuple[str, ...] | None = None
    revoked: bool = False
    admin: bool = False

    def may_name(self, tenant: str) -> bool:
        return self.tenants is None or any(_matches(tenant, pattern) for pattern in self.tenants)

    def check_tenant(self, tenant: str) -> None:
        """`forbidden_tenant` for a tenant that this client is not bound to."""
        if self.may_name(tenant):
            return
        raise RequestError(
            "forbidden_tenant",
            "this client's certificate is bound to other tenants",
            field="tenant",
            hint="add the tenant to tenants= of this client in the server's authorized_clients",
        )


ANYONE: Final = Caller()


def _matches(tenant: str, pattern: str) -> bool:
    return tenant.startswith(pattern[:-1]) if pattern.endswith("*") else tenant == pattern


def read_authorized(path: Path, complain: Callable[[str], None]) -> dict[str, Caller]:
    """All clients in a file, or in the files *.client of a directory, by name. Invalid lines are
    ignored and reported to `complain`. SettingsError if nothing can be read, or if other users
    could have written it."""
    try:
        status = os.stat(path)
        is_directory = stat.S_ISDIR(status.st_mode)
        if is_directory:
            check_directory(path, status)
        files = _client_files(path) if is_directory else [path]
    except OSError as error:
        hint = (
            "check that it exists and that the server's user may read it: "
            f"chown -R {os.geteuid()} {path}"
        )
        raise SettingsError(f"{path} cannot be read: {error.strerror}", hint) from error
    callers: dict[str, Caller] = {}
    for file in files:
        try:
            lines = key_lines(read_text(file, UNWRITABLE, ours=True))
        except SettingsError as error:
            if file == path:
                raise
            complain(f"{error.message} ({error.hint})")  # one of many files
            continue
        for number, line in enumerate(lines, start=1):
            try:
                caller = read_line(line)
            except ValueError as error:
                complain(f"{file}, client {number}: {error}")  # not quoted: it may hold a salt
                continue
            if caller.key in callers:
                complain(f"{file}, client {number}: {caller.key} is authorized already")
                continue
            callers[caller.key] = caller
    return callers


def _client_files(directory: Path) -> list[Path]:
    """The files *.client, without those that begin with a dot, which an editor or a copy in
    progress makes. OSError if we may not list the directory."""
    names = [name for name in sorted(os.listdir(directory)) if name.endswith(CLIENT_FILE)]
    return [directory / name for name in names if not name.startswith(".")]


def read_line(line: str) -> Caller:
    """A line `NAME [tenants=a,b] [admin]`. ValueError says what is wrong."""
    name, *options = line.split()
    if name.lower().startswith(FINGERPRINT):
        # openssl writes AB:CD:...
        name = name.lower().replace(":", "").replace("sha256", FINGERPRINT, 1)
        if not re.fullmatch(r"[0-9a-f]{64}", name.removeprefix(FINGERPRINT)):
            raise ValueError("sha256: is not followed by the 64 hex digits of a fingerprint")
    elif not name.isprintable() or len(name) > 256 or name.startswith("tenants="):
        raise ValueError("the line does not begin with a certificate's name of 1 to 256 characters")
    tenants: tuple[str, ...] | None = None
    is_admin = False
    for option in options:
        what, _, value = option.partition("=")
        if option == "admin" and not is_admin:
            is_admin = True
        elif what == "tenants" and tenants is None:
            tenants = tuple(_tenant(each) for each in value.split(","))
        else:
            raise ValueError("only tenants=a,b and admin may follow the name, each once")
    return Caller(name, name, tenants, admin=is_admin)


def _tenant(text: str) -> str:
    """A tenant id, a prefix of one and *, or salt: and the percent-encoded salt."""
    if text.startswith("salt:") and len(text) > len("salt:"):
        return tenant_of(unquote(text.removeprefix("salt:")))
    if not is_tenant(text) and not re.fullmatch(r"(t-[0-9a-f]{0,32})?\*", text):
        raise ValueError("a tenant is an id, a prefix of one and *, or salt: and its salt")
    return text


class Authority:
    """Decides which certificates may connect, with which tenants, and which may administer. The
    loop's thread uses it; the HTTP thread reads `trust`, then `http_context`, and calls `is_admin`.

    `context` is for new connections of engines, `http_context` for HTTPS, where a client may show
    no certificate; None without files, and then every client is ANYONE. `callers` is the list by
    name; None without a list, and then every certificate of the CA may connect. `trust` grows when
    a CA is removed from tls_ca: connections that were verified before must be closed."""

    def __init__(
        self,
        files: TlsFiles | None,
        authorized_clients: Path | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files, self._list, self._clock = files, authorized_clients, clock
        self._problems: dict[str, list[str]] = {}  # by what was read
        self._said: dict[str, list[str]] = {}
        self._said_at = self._tried_at = 0.0
        self.context: ssl.SSLContext | None = None
        self.http_context: ssl.SSLContext | None = None
        self.callers: dict[str, Caller] | None = None
        self.trust = 0
        if files is not None:
            self._files_signature = _signature_of(files)
            self.context = server_context(files)
            self.http_context = server_context(files, ssl.CERT_OPTIONAL)
            self._trusted = _certificates_in(files.ca)
        if files is not None and authorized_clients is not None:
            self._list_signature = _signature_of(authorized_clients)
            self.callers = read_authorized(authorized_clients, _refuse_start)
            count = len(self.callers)
            log.info("engines need a certificate: %d names are in %s", count, authorized_clients)
            if not self.callers:
                log.warning("no client is authorized: in a directory, files *%s count", CLIENT_FILE)

    def caller_of(self, names: tuple[str, ...]) -> Caller | None:
        """The client whose certificate has these names (see `peer_names`), by the current list. The
        line of its fingerprint precedes those of its other names. None: not authorized."""
        if self.context is None:
            return ANYONE
        readable = next(iter(names[1:] or names), "")
        callers = self.callers  # read once: the loop's thread may replace it
        if callers is None:
            return Caller(readable, readable) if names else None
        known = next((callers[name] for name in names if name in callers), None)
        return known and replace(known, name=readable)

    def is_admin(self, names: tuple[str, ...], trust: int) -> bool:
        """Whether a certificate with these names may administer, by the current list. `trust` is its
        value before the certificate was verified: not if a CA was removed since then."""
        caller = self.caller_of(names)
        return caller is not None and caller.admin and trust == self.trust

    def reload(self) -> bool:
        """Reads changed files again, and now and then those that could not be used. True if
        anything changed. A file that cannot be used changes nothing; an invalid line authorizes no
        client."""
        has_other_files = self._files is not None and self._reload_files(self._files)
        has_other_list = self.callers is not None and self._reload_list(self.callers)
        self._say()
        return has_other_files or has_other_list

    def _reload_files(self, files: TlsFiles) -> bool:
        signature, now = _signature_of(files), self._clock()
        # A certificate that is not valid yet becomes valid without a change.
        is_due = self._problems.get("tls") and now - self._tried_at >= LOG_INTERVAL_S
        if signature == self._files_signature and not is_due:
            return False
        self._files_signature, self._tried_at = signature, now
        try:
            context, http_context = server_context(files), server_context(files, ssl.CERT_OPTIONAL)
            trusted = _certificates_in(files.ca)
        except SettingsError as error:
            self._problems["tls"] = [
                f"{error.message}; the files that were read before stay in use ({error.hint})"
            ]
            return False
        self._problems["tls"] = []
        self.context, self.http_context = context, http_context
        self.trust += not trusted >= self._trusted  # last: a reader of it has the new contexts
        self._trusted = trusted
        log.info("tls_cert, tls_key and tls_ca were read again")
        return True

    def _reload_list(self, before: dict[str, Caller]) -> bool:
        assert self._list is not None
        signature = _signature_of(self._list)
        if signature == self._list_signature and not self._problems.get("authorized_clients"):
            return False
        problems: list[str] = []
        self._list_signature = signature
        try:
            callers = read_authorized(self._list, lambda each: problems.append(f"{each}; ignored"))
        except SettingsError as error:
            callers = before
            problems = [
                f"{error.message}; the last list stays in use, and no client can be revoked "
                f"({error.hint})"
            ]
        self._problems["authorized_clients"] = problems
        if callers == before:
            return False
        added, removed = len(callers.keys() - before.keys()), len(before.keys() - callers.keys())
        self.callers = callers
        text = "authorized_clients was read again: %d names, %d new, %d revoked"
        log.info(text, len(callers), added, removed)
        return True

    def _say(self) -> None:
        """Logs problems when they change, and then once a minute."""
        now = self._clock()
        if self._problems != self._said or now - self._said_at >= LOG_INTERVAL_S:
            for what, problems in self._problems.items():
                for problem in problems:
                    log.error("%s: %s", what, problem)
            self._said, self._said_at = dict(self._problems), now


def _refuse_start(problem: str) -> None:
    raise SettingsError(
        f"authorized_clients: {problem}",
        'a line is "NAME [tenants=a,b] [admin]", as `kvkeep keygen` writes it',
    )


def _certificates_in(path: Path) -> set[str]:
    return set(
        re.findall(r"-----BEGIN [^-]*CERTIFICATE-----.*?-----END", read_text(path), re.DOTALL)
    )


def _signature_of(what: Path | TlsFiles) -> list[object]:
    """A value that changes when one of the TLS files does, or the list: its file, or the directory
    and each file in it."""
    if isinstance(what, TlsFiles):
        return [stat_of(file) for file in (what.cert, what.key, what.ca)]
    signature = [stat_of(what)]
    try:
        files = _client_files(what)
    except OSError as error:  # a plain file, too
        return [*signature, error.errno]
    return [*signature, *(stat_of(file) for file in files)]
