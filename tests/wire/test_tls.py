"""Mutual TLS over real sockets: who gets in, what each side says when it does not, and which files
are refused."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvkeep.cli.certificates import Issued, issue, new_authority
from kvkeep.errors import SettingsError
from kvkeep.testing.process import wait_for
from kvkeep.wire.tls import (
    TlsFiles,
    client_context,
    handshake_problem,
    peer_names,
    server_context,
    tls_files,
)

HOSTS = ("cache.example", "127.0.0.1", "::1")
CA, OTHER_CA = new_authority(10), new_authority(10)
SERVER, CLIENT = issue(CA, "kvkeep server", HOSTS, days=5), issue(CA, "engine-1", days=5)
LONG_AGO = datetime.now(UTC) - timedelta(days=9)
LATER = datetime.now(UTC) + timedelta(days=3)

Write = Callable[..., TlsFiles]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Puts a certificate, its key and the CA to be trusted into files."""

    def written(issued: Issued, ca: Issued = CA, key: str = "") -> TlsFiles:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        files = TlsFiles(directory / "cert.pem", directory / "own.key", directory / "ca.pem")
        for path, text in (
            (files.cert, issued.cert),
            (files.key, key or issued.key),
            (files.ca, ca.cert),
        ):
            path.write_text(text)
            path.chmod(0o600)
        return files

    return written


class Side:
    """One end of a connection that does not block, as server and client use it."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self.socket = connected
        self.error: ssl.SSLError | None = None
        self.read = b""
        self._greeted = False

    def step(self) -> None:
        """Goes on until the other side has to: the handshake, one byte out, one byte in."""
        if self.error is not None or self.read:
            return
        try:
            self.socket.do_handshake()
            if not self._greeted:
                self.socket.send(b"!")
                self._greeted = True
            self.read = self.socket.recv(1)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except ssl.SSLError as error:
            self.error = error
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:  # the other side is gone
            pass


def connect(
    server: ssl.SSLContext, client: ssl.SSLContext, host: str = "cache.example"
) -> tuple[Side, Side]:
    """Both ends after all has been said. The test closes them by losing them."""
    here, there = socket.socketpair()
    for end in (here, there):
        end.setblocking(False)
    sides = (
        Side(server.wrap_socket(here, server_side=True, do_handshake_on_connect=False)),
        Side(client.wrap_socket(there, server_hostname=host, do_handshake_on_connect=False)),
    )
    for _ in range(20):
        for side in sides:
            side.step()
        for side in sides:
            wait_for(side.socket, 0)
    return sides


def problems(
    server: ssl.SSLContext, client: ssl.SSLContext, host: str = "cache.example"
) -> tuple[str, str]:
    """What each side says is wrong; neither hears a word of the other's."""
    sides = connect(server, client, host)
    assert not any(side.read for side in sides[:1]), (
        "the server listened to a client that it does not know"
    )
    said = [handshake_problem(side.error) if side.error else "" for side in sides]
    for side in sides:
        side.socket.close()
    return said[0], said[1]


@pytest.mark.parametrize("host", HOSTS)
def test_a_certificate_of_the_ca_gets_in_and_tells_its_names(write: Write, host: str) -> None:
    server, client = connect(server_context(write(SERVER)), client_context(write(CLIENT)), host)
    assert (server.read, client.read) == (b"!", b"!")
    assert server.socket.version() == "TLSv1.3"
    assert peer_names(server.socket) == (CLIENT.fingerprint, "engine-1")
    assert peer_names(client.socket) == (
        SERVER.fingerprint,
        "kvkeep server",
        "cache.example",
        "127.0.0.1",
        "0:0:0:0:0:0:0:1",
    )
    server.socket.close()
    client.socket.close()


def test_who_does_not_speak_tls_1_3_gets_no_further(write: Write) -> None:
    old = client_context(write(CLIENT))
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    here, there = problems(server_context(write(SERVER)), old)
    assert "does not speak TLS 1.3" in here and "does not speak TLS 1.3" in there


def test_no_session_is_resumed(write: Write) -> None:
    """A ticket would let in a certificate that was verified under another CA."""
    server, client = connect(server_context(write(SERVER)), client_context(write(CLIENT)))
    assert (
        client.read and client.socket.session is not None and not client.socket.session.has_ticket
    )
    server.socket.close()
    client.socket.close()


def test_a_client_of_another_ca_is_turned_away(write: Write) -> None:
    stranger = write(issue(OTHER_CA, "engine-1", days=5))
    here, there = problems(server_context(write(SERVER)), client_context(stranger))
    assert "its certificate is not signed by a CA that we trust" in here
    assert "it rejected our certificate" in there and "tls_ca" in there


def test_a_server_of_another_ca_is_left(write: Write) -> None:
    impostor = write(issue(OTHER_CA, "kvkeep server", HOSTS, days=5), ca=CA)
    here, there = problems(server_context(impostor), client_context(write(CLIENT)))
    assert "its certificate is not signed by a CA that we trust" in there
    assert "it rejected our certificate" in here


@pytest.mark.parametrize("host", ["other.example", "192.0.2.7", "kvkeep server"])
def test_a_server_of_another_name_is_left(write: Write, host: str) -> None:
    """The last one is its common name, which does not count."""
    _, there = problems(server_context(write(SERVER)), client_context(write(CLIENT)), host)
    assert "does not name the host that we connect to" in there and "--host" in there


def test_a_client_without_a_certificate_is_turned_away(write: Write) -> None:
    nameless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nameless.load_verify_locations(cadata=CA.cert)
    here, there = problems(server_context(write(SERVER)), nameless)
    assert "showed no certificate" in here and "asks for a certificate" in there


def test_peer_names_without_a_certificate_are_none() -> None:
    assert peer_names(SimpleNamespace(getpeercert=lambda binary_form=False: None)) == ()  # type: ignore[arg-type]


def test_certificates_out_of_their_time_are_named(write: Write) -> None:
    server = server_context(write(SERVER))
    here, there = problems(server, client_context(write(issue(CA, "a", days=1, now=LONG_AGO))))
    assert "its certificate has expired" in here and "our certificate, which has expired" in there
    here, there = problems(server, client_context(write(issue(CA, "a", days=1, now=LATER))))
    assert "not valid yet" in here and "clock" in here and "it rejected our certificate" in there


def test_a_certificate_serves_its_own_purpose_alone(write: Write) -> None:
    """A client cannot pass for a server, nor one that took the server's files for a client."""
    here, there = problems(server_context(write(SERVER)), client_context(write(SERVER)))
    assert "for another purpose" in here and "it rejected our certificate" in there
    with pytest.raises(SettingsError, match="unsuitable certificate purpose"):
        server_context(write(CLIENT))
    posing = server_context(write(SERVER))
    client_files = write(CLIENT)
    posing.load_cert_chain(client_files.cert, client_files.key)
    assert "for another purpose" in problems(posing, client_context(write(CLIENT)))[1]


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f", bytes(64), b"\x16\x03\x01"]
)
def test_who_does_not_speak_tls_is_told_apart(write: Write, first: bytes) -> None:
    for wrap in (
        lambda end: server_context(write(SERVER)).wrap_socket(end, server_side=True),
        lambda end: client_context(write(CLIENT)).wrap_socket(end, server_hostname="cache.example"),
    ):
        here, there = socket.socketpair()
        there.sendall(first)
        there.shutdown(socket.SHUT_WR)
        with pytest.raises(ssl.SSLError) as caught:
            wrap(here)
        said = handshake_problem(caught.value)
        assert "it does not speak TLS (" in said or (
            len(first) == 3 and "closed the connection" in said
        )
        here.close()
        there.close()


def test_any_other_error_is_told_by_its_reason() -> None:
    error = ssl.SSLError(1, "words")
    error.reason = "SOMETHING_ELSE"
    assert handshake_problem(error) == "the TLS handshake failed: something else"
    assert "words" in handshake_problem(ssl.SSLError(1, "words"))


# -- names


def odd_certificate(common_name: str, others: list[x509.GeneralName]) -> Issued:
    """What a careless CA might sign."""
    ca = x509.load_pem_x509_certificate(CA.cert.encode())
    ca_key = serialization.load_pem_private_key(CA.key.encode(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(ca.subject)
        .public_key(key.public_key())
    )
    builder = (
        builder.serial_number(7)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
    )
    builder = builder.add_extension(x509.SubjectAlternativeName(others), critical=False)
    pem = builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Issued(pem.decode(), secret.decode())


def test_names_come_in_order_and_none_passes_for_a_fingerprint_or_breaks_a_log(
    write: Write,
) -> None:
    uri = "spiffe://example/engine"
    others = [x509.UniformResourceIdentifier(each) for each in (CLIENT.fingerprint, uri, "x" * 257)]
    odd = odd_certificate(
        "two\nlines", [*others, x509.DNSName("b.example"), x509.RFC822Name("a@b.example")]
    )
    server, client = connect(server_context(write(SERVER)), client_context(write(odd)))
    assert peer_names(server.socket) == (odd.fingerprint, "b.example", uri)
    server.socket.close()
    client.socket.close()
    posing = odd_certificate(CLIENT.fingerprint.upper()[:64], [x509.DNSName("b.example")])
    server, client = connect(server_context(write(SERVER)), client_context(write(posing)))
    assert peer_names(server.socket) == (posing.fingerprint, "b.example")
    server.socket.close()
    client.socket.close()


# -- files


Context = Callable[[TlsFiles], ssl.SSLContext]
BOTH = pytest.mark.parametrize("context", [server_context, client_context])


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(SettingsError) as caught:
        make()
    assert caught.value.hint
    return str(caught.value)


def fitting(context: Context) -> Issued:
    return SERVER if context is server_context else CLIENT


@BOTH
@pytest.mark.parametrize("mode", [0o604, 0o620, 0o644, 0o666])
def test_a_key_that_others_can_reach_is_refused_with_the_remedy(
    write: Write, context: Context, mode: int
) -> None:
    files = write(fitting(context))
    files.key.chmod(mode)
    said = refusal(lambda: context(files))
    assert (
        f"tls_key: {files.key} is open to other users" in said and f"chmod 600 {files.key}" in said
    )


@BOTH
@pytest.mark.parametrize("which", ["ca", "cert"])
def test_a_file_that_others_can_write_is_refused_and_one_that_they_can_read_is_not(
    write: Write, context: Context, which: str
) -> None:
    files = write(fitting(context))
    getattr(files, which).chmod(0o664)
    assert f"tls_{which}" in refusal(lambda: context(files))
    getattr(files, which).chmod(0o644)
    files.key.chmod(0o440)
    context(files)


@BOTH
@pytest.mark.parametrize("which", ["cert", "key", "ca"])
def test_a_file_of_another_user_is_refused(
    write: Write, context: Context, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write(fitting(context))
    if os.geteuid() == 0:
        os.chown(getattr(files, which), 65534, -1)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
    said = refusal(lambda: context(files))
    assert "belongs to another user" in said and (f"tls_{which}" in said or os.geteuid() != 0)


@BOTH
def test_a_key_of_another_certificate_is_refused(write: Write, context: Context) -> None:
    files = write(fitting(context), key=issue(CA, "other", days=5).key)
    said = refusal(lambda: context(files))
    assert f"tls_key: {files.key} does not belong to the certificate in {files.cert}" in said


BROKEN = "-----BEGIN {0}-----\nAAAA\n-----END {0}-----\n"


@BOTH
@pytest.mark.parametrize(
    ("which", "text", "words"),
    [
        ("cert", "", "holds no certificate"),
        ("cert", CLIENT.key, "holds no certificate"),
        ("cert", BROKEN.format("CERTIFICATE"), "cannot be used"),
        ("ca", "nonsense", "holds no certificate"),
        ("ca", BROKEN.format("CERTIFICATE"), "cannot be used"),
        ("key", CLIENT.cert, "holds no private key"),
        ("key", BROKEN.format("PRIVATE KEY"), "cannot be used"),
        ("key", BROKEN.format("CERTIFICATE"), "holds no private key"),
    ],
)
def test_a_file_that_is_no_pem_is_named(
    write: Write, context: Context, which: str, text: str, words: str
) -> None:
    files = write(fitting(context))
    getattr(files, which).write_text(text)
    said = refusal(lambda: context(files))
    assert f"tls_{which}: {getattr(files, which)} {words}" in said and "_ssl.c" not in said


@BOTH
def test_a_missing_file_is_named(write: Write, context: Context) -> None:
    files = write(fitting(context))
    files.ca.unlink()
    assert f"tls_ca: {files.ca} cannot be read" in refusal(lambda: context(files))


@BOTH
def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(
    write: Write, context: Context
) -> None:
    files = write(fitting(context))
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    assert "protected by a passphrase" in refusal(lambda: context(files))


def test_a_server_does_not_start_with_a_certificate_that_no_client_would_take(write: Write) -> None:
    for now, words in (
        (LONG_AGO, "certificate has expired"),
        (LATER, "certificate is not yet valid"),
    ):
        files = write(issue(CA, "kvkeep server", HOSTS, days=1, now=now))
        said = refusal(lambda files=files: server_context(files))  # type: ignore[misc]
        assert f"tls_cert: {files.cert} cannot be used by a server: {words}" in said
    server_context(
        write(issue(OTHER_CA, "kvkeep server", HOSTS, days=1), ca=CA)
    )  # clients may trust another CA


def test_comments_around_certificates_may_be_in_any_language(write: Write) -> None:
    files = write(SERVER)
    files.ca.write_text(f"Zertifikat für Größe\n{OTHER_CA.cert}\n# ещё\n{CA.cert}")
    server, client = connect(server_context(files), client_context(write(CLIENT)))
    assert server.read == b"!"
    server.socket.close()
    client.socket.close()


def test_a_client_reads_its_files_again_only_when_one_has_changed(write: Write) -> None:
    """A client connects anew ten times a second while its server is away."""
    files = write(CLIENT)
    first = client_context(files)
    assert client_context(files) is first
    for path in (files.cert, files.key, files.ca):
        path.touch()
        assert client_context(files) is not first
        first = client_context(files)
    files.ca.unlink()
    assert "tls_ca" in refusal(lambda: client_context(files))
    files.ca.write_text(OTHER_CA.cert)
    assert client_context(files).get_ca_certs() != first.get_ca_certs()


def test_no_descriptor_stays_open(write: Write) -> None:
    files, broken = write(SERVER), write(SERVER, key=CLIENT.key)
    before = os.listdir("/proc/self/fd")
    server_context(files)
    refusal(lambda: server_context(broken))
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_all_three_files_or_none() -> None:
    assert tls_files(SimpleNamespace(tls_cert=None, tls_key=None, tls_ca=None)) is None
    given = {"tls_cert": "/a", "tls_key": Path("/b"), "tls_ca": "~/c"}
    assert tls_files(SimpleNamespace(**given)) == TlsFiles(
        Path("/a"), Path("/b"), Path.home() / "c"
    )
    for missing in given:
        said = refusal(
            lambda missing=missing: tls_files(SimpleNamespace(**{**given, missing: None}))
        )  # type: ignore[misc]
        assert f"is set and {missing} is not" in said and "kvkeep keygen" in said
