"""Mutual TLS for connections beyond this host: each side shows a certificate and verifies the
other's.

    tls_cert   our certificate and any intermediate ones, PEM   every user may read it
    tls_key    the private key of that certificate, PEM         only owner and group may read it
    tls_ca     the CAs whose certificates we accept, PEM        only its owner may write it

TLS 1.3 only. In TLS 1.3 the client's handshake ends before the server has verified the client's
certificate: a client learns that it was rejected by an SSLError from its first read.
`handshake_problem` explains that error, too."""

from __future__ import annotations

import hashlib
import math
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from kvkeep.errors import SettingsError
from kvkeep.wire.secret_files import PRIVATE, UNWRITABLE, at_home, read_text

FINGERPRINT: Final = "sha256:"
_MAX_NAME_CHARS = 256
_NAME_KINDS = ("DNS", "URI", "IP Address")

# X509_V_ERR_..., for which the ssl module has no names.
_NOT_YET_VALID, _EXPIRED, _WRONG_PURPOSE = 9, 10, 26
_UNTRUSTED = (2, 18, 19, 20, 21)
_WRONG_HOST = (62, 64)


@dataclass(frozen=True)
class TlsFiles:
    """The three files that TLS needs, on either side."""

    cert: Path
    key: Path
    ca: Path


def tls_files(given: object) -> TlsFiles | None:
    """The files that a server's settings or a client's options name; None where TLS is off.
    SettingsError if some are set and others are not."""
    paths = {name: getattr(given, name) for name in ("tls_cert", "tls_key", "tls_ca")}
    are_set = [name for name, path in paths.items() if path is not None]
    if not are_set:
        return None
    if missing := [name for name in paths if name not in are_set]:
        raise SettingsError(
            f"{are_set[0]} is set and {missing[0]} is not",
            "set tls_cert, tls_key and tls_ca, as `kvkeep keygen` says, or none",
        )
    return TlsFiles(*(at_home(str(path)) for path in paths.values()))


def server_context(files: TlsFiles, clients: ssl.VerifyMode = ssl.CERT_REQUIRED) -> ssl.SSLContext:
    """A context that asks every client for a certificate of `files.ca`; with CERT_OPTIONAL a client
    may show none. SettingsError names the file that cannot be used, also if our certificate has
    expired or is not for a server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = clients
    context.num_tickets = 0  # no resumption: each connection is verified anew
    trust_ca(context, files.ca)
    _check_own_certificate(context, files.cert, show_own(context, files.cert, files.key))
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """A context that shows our certificate and verifies that of the server, and its host name.
    SettingsError names the file that cannot be used. Cached until a file changes."""
    return _client_context(files, *(stat_of(path) for path in (files.cert, files.key, files.ca)))


@lru_cache(maxsize=4)
def _client_context(files: TlsFiles, *stats: object) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # with CERT_REQUIRED and check_hostname
    context.hostname_checks_common_name = False
    trust_ca(context, files.ca)
    show_own(context, files.cert, files.key)
    return context


def stat_of(path: Path) -> object:
    """A value that changes when the file is changed or replaced, or becomes unreadable."""
    try:
        one = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        return str(path), getattr(error, "errno", 0)
    return str(path), one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns


def peer_names(connected: ssl.SSLSocket | ssl.SSLObject) -> tuple[str, ...]:
    """Names of the peer's verified certificate: its fingerprint "sha256:HEX", then its common name,
    DNS, URI and IP names. () if it showed none. Names that no list can hold, or that pose as a
    fingerprint, are left out."""
    der = connected.getpeercert(binary_form=True)
    if not der:
        return ()
    described: Any = connected.getpeercert() or {}  # nested tuples of text
    subject = [pair for rdn in described.get("subject", ()) for pair in rdn]
    names: list[str] = [value for kind, value in subject if kind == "commonName"]
    others = described.get("subjectAltName", ())
    names += [value for wanted in _NAME_KINDS for kind, value in others if kind == wanted]
    good = (name for name in names if name and name.isprintable() and len(name) <= _MAX_NAME_CHARS)
    honest = (name for name in good if not name.lower().startswith(FINGERPRINT))
    return tuple(dict.fromkeys([FINGERPRINT + hashlib.sha256(der).hexdigest(), *honest]))


def certificate_text(names: tuple[str, ...]) -> str:
    """For a log line: the common name of a certificate with these `peer_names`, and how its
    fingerprint begins."""
    fingerprint, *others = names
    short = f"{fingerprint[: len(FINGERPRINT) + 16]}…"
    return f"{others[0][:64]} ({short})" if others else short


def peer_expiry_s(connected: ssl.SSLSocket | ssl.SSLObject) -> float:
    """When the peer's verified certificate expires, in seconds since 1970; infinity if it showed
    none."""
    described: Any = connected.getpeercert() or {}
    return ssl.cert_time_to_seconds(described["notAfter"]) if "notAfter" in described else math.inf


def handshake_problem(error: ssl.SSLError) -> str:
    """What is wrong, and what to do about it, in one sentence. "It" is the other side."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _verification_problem(error)
    reason = _reason(error)
    for reasons, problem in _PROBLEMS:
        if any(each in reason for each in reasons):
            return problem
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return (
            "it closed the connection during the TLS handshake (its log may say why; a peer "
            "without TLS does this)"
        )
    return f"the TLS handshake failed: {reason.replace('_', ' ').lower()}"


def _reason(error: ssl.SSLError) -> str:
    """OpenSSL's reason, such as WRONG_VERSION_NUMBER, or else the error's text."""
    return getattr(error, "reason", None) or str(error).partition(" (_ssl")[0]


_PROBLEMS: Final = (
    (("PEER_DID_NOT_RETURN",), "it showed no certificate (set tls_cert, tls_key and tls_ca there)"),
    (("CERTIFICATE_REQUIRED",), "it asks for a certificate (set tls_cert, tls_key and tls_ca here)"),
    (("ALERT_UNKNOWN_CA",), "it rejected our certificate (its tls_ca must hold the CA that signed our tls_cert)"),
    (("ALERT_CERTIFICATE_EXPIRED",), "it rejected our certificate, which has expired (renew tls_cert here)"),
    (
        ("ALERT_BAD_CERT", "ALERT_CERTIFICATE", "ALERT_UNSUPPORTED_CERT", "ACCESS_DENIED", "ALERT_DECRYPT"),
        "it rejected our certificate (its log says why; see tls_cert here and tls_ca there)",
    ),
    (("PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL"), "it does not speak TLS 1.3 (use a newer TLS library there)"),
    (
        ("WRONG_VERSION", "HTTP_REQUEST", "RECORD_TYPE", "RECORD_LAYER", "UNKNOWN_PROTOCOL", "UNEXPECTED_MESSAGE",
         "LENGTH_TOO_LONG", "PROXY_REQUEST", "NOT_SSL"),
        "it does not speak TLS (set tls_cert, tls_key and tls_ca there, or check the address)",
    ),
)  # fmt: skip


def _verification_problem(error: ssl.SSLCertVerificationError) -> str:
    code = error.verify_code
    if code in _UNTRUSTED:
        return (
            "its certificate is not signed by a CA that we trust (our tls_ca must hold the CA that "
            "signed it)"
        )
    if code in _WRONG_HOST:
        return (
            "its certificate does not name the host that we connect to (make one with "
            "`kvkeep keygen --host HOST`, or use a name in it as the address)"
        )
    if code == _EXPIRED:
        return "its certificate has expired (renew it there, or set the clock here)"
    if code == _NOT_YET_VALID:
        return "its certificate is not valid yet (set the clock, here or where it was made)"
    if code == _WRONG_PURPOSE:
        return (
            "its certificate is for another purpose (a server needs serverAuth, a client "
            "clientAuth)"
        )
    return f"its certificate cannot be verified: {error.verify_message}"


def trust_ca(context: ssl.SSLContext, path: Path) -> None:
    """Has a context accept certificates of the CAs in this file, and TLS 1.3 alone."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _trust(context, "tls_ca", path, _read("tls_ca", path, UNWRITABLE, "CERTIFICATE"))


def show_own(context: ssl.SSLContext, cert_path: Path, key_path: Path) -> str:
    """Has a context show our certificate, and returns that. No file is opened twice: what was
    checked is what is used."""
    cert = _read("tls_cert", cert_path, UNWRITABLE, "CERTIFICATE")
    key = _read("tls_key", key_path, PRIVATE, "PRIVATE KEY")

    def refuse_to_ask() -> str:
        raise SettingsError(
            f"tls_key: {key_path} is protected by a passphrase", "write the key without one"
        )

    try:
        with _in_memory(cert) as cert_file, _in_memory(key) as key_file:
            context.load_cert_chain(cert_file, key_file, password=refuse_to_ask)
    except ssl.SSLError as error:
        # Raises if the certificate is at fault.
        _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "tls_cert", cert_path, cert)
        if "MISMATCH" in _reason(error):
            raise SettingsError(
                f"tls_key: {key_path} does not belong to the certificate in {cert_path}",
                "name the key that was made with this certificate",
            ) from None
        raise _unusable("tls_key", key_path, error) from None
    return cert


def _read(setting: str, path: Path, forbidden: int, label: str) -> str:
    try:
        text = read_text(path, forbidden, ours=True)
    except SettingsError as error:
        raise SettingsError(f"{setting}: {error.message}", error.hint) from error
    if f"{label}-----" not in text:
        hint = (
            f'a PEM file holds a line "-----BEGIN {label}-----"; `kvkeep keygen` makes such files'
        )
        raise SettingsError(f"{setting}: {path} holds no {label.lower()} in PEM", hint)
    return text


def _trust(context: ssl.SSLContext, setting: str, path: Path, text: str) -> None:
    try:
        # Comments may be in UTF-8.
        context.load_verify_locations(cadata=text.encode("ascii", "replace").decode())
    except ssl.SSLError as error:
        raise _unusable(setting, path, error) from None


def _unusable(setting: str, path: Path, error: ssl.SSLError) -> SettingsError:
    reason = _reason(error).replace("_", " ").lower()
    return SettingsError(
        f"{setting}: {path} cannot be used: {reason}",
        "check that the file is whole; `kvkeep keygen` makes such files",
    )


@contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """A path of this text, for OpenSSL, which takes nothing else."""
    descriptor = os.memfd_create("kvkeep-tls")
    try:
        with os.fdopen(descriptor, "w", closefd=False) as file:
            file.write(text)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _check_own_certificate(context: ssl.SSLContext, path: Path, cert: str) -> None:
    """Shows our certificate to a client in this process that trusts it: only its dates and its
    purpose can fail then, and no client could use a server with such a certificate."""
    judge = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    judge.check_hostname = False
    judge.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _trust(judge, "tls_cert", path, cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = judge.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (client, server, client):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise SettingsError(
            f"tls_cert: {path} cannot be used by a server: {error.verify_message}",
            "renew it: `kvkeep keygen` or your CA makes one for serverAuth",
        ) from None
