"""Who may connect over TLS: certificates of our CA, the list of authorized clients, and the tenants
they are bound to.

    a TLS handshake ──► names of a verified certificate ──► Authority.caller_of ──► Caller, or None:
    not authorized

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
    """Who sent a message. `key`: the name in its certificate that matched the list. `tenants`:
    patterns of the tenants it may name; None for all. `admin`: it administers over HTTPS. Without
    TLS: ANYONE."""

    key: str = ""
    name: str = ""
    tenants: tuple[str, ...] | None = None
    revoked: bool = False
    admin: bool = False

    def check_tenant(self, tenant: str) -> None:
        """`forbidden_tenant` for one that this client is not bound to."""
        if self.tenants is None or any(_matches(tenant, pattern) for pattern in self.tenants):
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
    """All clients in a file, or in the files *.client of a directory, by name. What is wrong with a
    line goes to `complain`, and the line counts for nothing. SettingsError if nothing can be read,
    or if others could have written it."""
    try:
        status = os.stat(path)
        is_directory = stat.S_ISDIR(status.st_mode)
        if is_directory:
            check_directory(path, status)
        files = _client_files(path) if is_directory else [path]
    except OSError as error:
        hint = f"see that it is there and that the server's user may read it: chown -R {os.geteuid()} {path}"
        raise SettingsError(f"{path} cannot be read: {error.strerror}", hint) from error
    callers: dict[str, Caller] = {}
    for file in files:
        try:
            lines = key_lines(read_text(file, UNWRITABLE, ours=True))
        except SettingsError as error:
            if file == path:
                raise
            complain(f"{error.message} ({error.hint})")  # one of many: the others count
            continue
        for number, line in enumerate(lines, start=1):
            try:
                caller = read_line(line)
            except ValueError as error:
                complain(
                    f"{file}, client {number}: {error}"
                )  # the line is not quoted: it may have a salt in it
                continue
            if caller.key in callers:
                complain(f"{file}, client {number}: {caller.key} is authorized already")
                continue
            callers[caller.key] = caller
    return callers


def _client_files(directory: Path) -> list[Path]:
    """Those that count. What begins with a dot is an editor's, or half copied. OSError if we may
    not look."""
    names = sorted(os.listdir(directory))
    return [
        directory / name
        for name in names
        if name.endswith(CLIENT_FILE) and not name.startswith(".")
    ]


def read_line(line: str) -> Caller:
    """A line `NAME [tenants=a,b] [admin]`. ValueError says what is wrong."""
    name, *options = line.split()
    if name.lower().startswith(FINGERPRINT):
        name = (
            name.lower().replace(":", "").replace("sha256", FINGERPRINT, 1)
        )  # openssl writes AB:CD:...
        if not re.fullmatch(r"[0-9a-f]{64}", name.removeprefix(FINGERPRINT)):
            raise ValueError(
                "sha256: is not followed by the 64 hexadecimal digits of a certificate's fingerprint"
            )
    elif not name.isprintable() or len(name) > 256 or name.startswith("tenants="):
        raise ValueError(
            "the line does not begin with a name that a certificate can have, at most 256 characters"
        )
    tenants: tuple[str, ...] | None = None
    is_admin = False
    for option in options:
        what, _, value = option.partition("=")
        if option == "admin" and not is_admin:
            is_admin = True
        elif what == "tenants" and tenants is None:
            tenants = tuple(_tenant(each) for each in value.split(","))
        else:
            raise ValueError(
                "after the name there may be tenants=a,b and admin, each once, and nothing else"
            )
    return Caller(name, name, tenants, admin=is_admin)


def _tenant(text: str) -> str:
    """A tenant id, a beginning of one and *, or salt: and the salt itself, odd characters
    percent-encoded."""
    if text.startswith("salt:") and len(text) > len("salt:"):
        return tenant_of(unquote(text.removeprefix("salt:")))
    if not is_tenant(text) and not re.fullmatch(r"(t-[0-9a-f]{0,32})?\*", text):
        raise ValueError(
            "a tenant is named by its id, by the beginning of one and *, or by salt: and its salt"
        )
    return text


class Authority:
    """Decides which certificates are let in, with which tenants, and which administer. The loop's
    thread uses it; the HTTP thread reads `trust`, then `http_context`, and calls `is_admin`.

    `context` is for new connections of engines, `http_context` for those over HTTPS, which may come
    without a certificate; None without files, and then everybody is ANYONE. `callers` is the list
    by name; None without a list, and then every certificate of the CA is let in. `trust` grows when
    a CA was removed from tls_ca: connections that were verified before have to be closed, and to be
    verified again."""

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
            self.context, self.http_context = (
                server_context(files),
                server_context(files, ssl.CERT_OPTIONAL),
            )
            self._trusted = _certificates_in(files.ca)
        if files is not None and authorized_clients is not None:
            self._list_signature = _signature_of(authorized_clients)
            self.callers = read_authorized(authorized_clients, _refuse_start)
            log.info(
                "engines need a certificate: %d names are in %s",
                len(self.callers),
                authorized_clients,
            )
            if not self.callers:
                log.warning("nobody is authorized: of a directory, files *%s are read", CLIENT_FILE)

    def caller_of(self, names: tuple[str, ...]) -> Caller | None:
        """Who has a certificate with these names (see `peer_names`), as the list says now. The line
        of its fingerprint counts before those of its other names. None: not authorized."""
        if self.context is None:
            return ANYONE
        readable = next(iter(names[1:] or names), "")
        callers = self.callers  # one list: the loop's thread may put another in its place
        if callers is None:
            return Caller(readable, readable) if names else None
        known = next((callers[name] for name in names if name in callers), None)
        return known and replace(known, name=readable)

    def is_admin(self, names: tuple[str, ...], trust: int) -> bool:
        """Whether a certificate with these names administers, as the list says now. `trust` is what
        it was before the certificate was verified: not if a CA was removed since then."""
        caller = self.caller_of(names)
        return caller is not None and caller.admin and trust == self.trust

    def reload(self) -> bool:
        """Reads what changed, and now and then what could not be used. True if anything is
        different now. A file that cannot be used changes nothing; a line that cannot be read
        authorizes nobody."""
        has_other_files = self._files is not None and self._reload_files(self._files)
        has_other_list = self.callers is not None and self._reload_list(self.callers)
        self._say()
        return has_other_files or has_other_list

    def _reload_files(self, files: TlsFiles) -> bool:
        signature, now = _signature_of(files), self._clock()
        is_due = (
            self._problems.get("tls") and now - self._tried_at >= LOG_INTERVAL_S
        )  # a date may heal by itself
        if signature == self._files_signature and not is_due:
            return False
        self._files_signature, self._tried_at = signature, now
        try:
            context, http_context = server_context(files), server_context(files, ssl.CERT_OPTIONAL)
            trusted = _certificates_in(files.ca)
        except SettingsError as error:
            self._problems["tls"] = [
                f"{error.message}; the files that were read before stay in force ({error.hint})"
            ]
            return False
        self._problems["tls"] = []
        self.context, self.http_context = context, http_context
        self.trust += not trusted >= self._trusted  # last: whoever sees it has the new contexts
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
            callers = read_authorized(
                self._list, lambda problem: problems.append(f"{problem}; ignored")
            )
        except SettingsError as error:
            callers = before
            problems = [
                f"{error.message}; those authorized before stay so, and nobody can be revoked ({error.hint})"
            ]
        self._problems["authorized_clients"] = problems
        if callers == before:
            return False
        added, removed = len(callers.keys() - before.keys()), len(before.keys() - callers.keys())
        self.callers = callers
        log.info(
            "authorized_clients was read again: %d names, %d new, %d revoked",
            len(callers),
            added,
            removed,
        )
        return True

    def _say(self) -> None:
        """Logs what cannot be used when that changes, and then every minute as long as it is so."""
        now = self._clock()
        if self._problems != self._said or now - self._said_at >= LOG_INTERVAL_S:
            for what, problems in self._problems.items():
                for problem in problems:
                    log.error("%s: %s", what, problem)
            self._said, self._said_at = dict(self._problems), now


def _refuse_start(problem: str) -> None:
    raise SettingsError(
        f"authorized_clients: {problem}",
        'a line is "NAME", with tenants=a,b and admin behind it or not, as `kvkeep keygen` writes it',
    )


def _certificates_in(path: Path) -> set[str]:
    return set(
        re.findall(r"-----BEGIN [^-]*CERTIFICATE-----.*?-----END", read_text(path), re.DOTALL)
    )


def _signature_of(what: Path | TlsFiles) -> list[object]:
    """What changes when a list does (of the file, or of the directory and each file in it), or one
    of the TLS files. What cannot be looked at is in it by its error, so that it hides no change of
    the others."""
    if isinstance(what, TlsFiles):
        return [stat_of(file) for file in (what.cert, what.key, what.ca)]
    signature = [stat_of(what)]
    try:
        files = _client_files(what)
    except OSError as error:  # a plain file, too
        return [*signature, error.errno]
    return [*signature, *(stat_of(file) for file in files)]
