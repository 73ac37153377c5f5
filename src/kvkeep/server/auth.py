"""Who may connect: CURVE keys, which of them are authorized, and what becomes of everybody else.

    a connection ── CURVE handshake, in ZMQ's thread ──► ZAP request ──► Gate.answer ──► 200 and the key, or 400
    a message ───── with the key that the handshake proved ────────────► Gate.receive ──► frames and their Caller

Without a key the handshake ends and nothing of ours ever sees a byte of the peer's. The list of authorized keys is read
again when it changes; every message is held against the list as it is now, so a key that was taken out is out at once,
on connections that are open as well.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvkeep.errors import RequestError, SettingsError
from kvkeep.kv.identity import is_tenant, tenant_of
from kvkeep.server.counters import Counters
from kvkeep.wire.auth import UNWRITABLE, check_directory, is_key, key_lines, read_pair, read_text

log = logging.getLogger(__name__)

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"  # the protocol's own name for it
ZAP_DOMAIN: Final = b"kvkeep"
PUBLIC_KEY: Final = ".pub"
LOG_INTERVAL_S: Final = 60.0
_EVENTS_A_TURN = 256
_PARTS_BETWEEN_LOOKS = 1 << 16  # some 50 ms of reading
_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # those of keys are counted by ZAP
)
_CRYPTOGRAPHIC, _MECHANISM = 0x11000001, 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_...; pyzmq has no names for these values


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a message. `tenants`: patterns of the tenants it may name; None for all. Without CURVE: ANYONE."""

    key: str = ""
    name: str = ""
    tenants: tuple[str, ...] | None = None
    revoked: bool = False

    def check_tenant(self, tenant: str) -> None:
        """`forbidden_tenant` for one that this key is not bound to."""
        if self.tenants is None or any(_matches(tenant, pattern) for pattern in self.tenants):
            return
        raise RequestError(
            "forbidden_tenant",
            "this client's key is bound to other tenants",
            field="tenant",
            hint="add the tenant to tenants= of this key in the server's authorized_keys",
        )


ANYONE: Final = Caller()
NOBODY: Final = Caller("nobody", revoked=True)


def _matches(tenant: str, pattern: str) -> bool:
    return tenant.startswith(pattern[:-1]) if pattern.endswith("*") else tenant == pattern


def read_authorized(path: Path, complain: Callable[[str], None]) -> dict[str, Caller]:
    """All keys in a file, or in the files *.pub of a directory, by key. What is wrong with a line goes to `complain`,
    and the line counts for nothing. SettingsError if nothing can be read, or if others could have written it."""
    try:
        status = os.stat(path)
        is_directory = stat.S_ISDIR(status.st_mode)
        if is_directory:
            check_directory(path, status)
        files = _key_files(path) if is_directory else [path]
    except OSError as error:
        hint = "see that it is there and that the server's user may read it"
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
                complain(f"{file}, key {number}: {error}")  # the line is not quoted: it may have a salt in it
                continue
            if caller.key in callers:
                complain(f"{file}, key {number}: this key is authorized already, as {callers[caller.key].name}")
                continue
            callers[caller.key] = caller
    return callers


def _key_files(directory: Path) -> list[Path]:
    """Those that count. What begins with a dot is an editor's, or half copied. OSError if we may not look."""
    names = sorted(os.listdir(directory))
    return [directory / name for name in names if name.endswith(PUBLIC_KEY) and not name.startswith(".")]


def read_line(line: str) -> Caller:
    """A line `public-key name [tenants=a,b]`. ValueError says what is wrong."""
    key, *rest = line.split()
    if not is_key(key):
        raise ValueError("the line does not begin with a public key of 40 characters")
    if not rest or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", rest[0]):
        raise ValueError("the key is not followed by a name of letters, digits, dots, - and _, at most 64")
    name, options = rest[0], rest[1:]
    tenants: tuple[str, ...] | None = None
    for option in options:
        what, _, value = option.partition("=")
        if what != "tenants" or tenants is not None:
            raise ValueError("after the name there may be tenants=a,b once, and nothing else")
        tenants = tuple(_tenant(each) for each in value.split(","))
    return Caller(key, name, tenants)


def _tenant(text: str) -> str:
    """A tenant id, a beginning of one and *, or salt: and the salt itself, odd characters percent-encoded."""
    if text.startswith("salt:") and len(text) > len("salt:"):
        return tenant_of(unquote(text.removeprefix("salt:")))
    if not is_tenant(text) and not re.fullmatch(r"(t-[0-9a-f]{0,32})?\*", text):
        raise ValueError("a tenant is named by its id, by the beginning of one and *, or by salt: and its salt")
    return text


class Gate:
    """The server's side of CURVE, in the loop's thread. Without a key it lets everybody in, as ANYONE."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        curve_key: Path | None,
        authorized_keys: Path | None,
        counters: Callable[[], Counters],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._curve_key = curve_key
        self._path = authorized_keys
        self._counters = counters
        self._clock = clock
        self._said_at: dict[str, float] = {}  # by reason
        self._unsaid: Counter[str] = Counter()
        self._signature: list[object] = []
        self._problems: list[str] = []
        self._problems_said_at = 0.0
        self._zap: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._last: zmq.Frame | None = None  # the first frame of the last message
        self._secret = b""
        self._guarded = 0
        self.callers: dict[str, Caller] = {}
        if curve_key is not None:
            assert authorized_keys is not None
            self._signature = _signature_of(authorized_keys)
            self.callers = read_authorized(authorized_keys, _refuse_start)
            say = log.info if self.callers else log.warning
            say("engines need a key: %d are authorized in %s", len(self.callers), authorized_keys)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What the loop has to poll for us."""
        return [socket for socket in (self._zap, self._monitor) if socket is not None]

    def guard(self, router: zmq.Socket[bytes]) -> None:
        """Makes the socket ask for keys. Before it is bound: there is no moment at which anybody gets in without."""
        if self._curve_key is None:
            return
        if self._zap is None:
            self._secret = read_pair(self._curve_key)[1].encode()
            self._zap = self._context.socket(zmq.ROUTER)
            self._zap.bind(ZAP_ENDPOINT)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self._router = router
        self._guarded += 1
        endpoint = f"inproc://kvkeep.handshakes.{self._guarded}"  # a name of its own: the last one may not be free yet
        router.monitor(endpoint, _FAILURES)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # with a limit, ZMQ's own thread would wait for us at it
        self._monitor.connect(endpoint)

    def leave(self) -> None:
        """Before the guarded socket is closed and another is guarded in its place."""
        if self._router is not None and self._monitor is not None:
            self._router.disable_monitor()
            self._monitor.close(linger=0)
            self._router = self._monitor = None

    def receive(
        self, router: zmq.Socket[bytes], look: Callable[[], None] = lambda: None
    ) -> tuple[bytes, list[bytes], Caller | None]:
        """The next message: whose connection it came by, its frames, who sent it. None for a message that no key came
        with, which is answered by nothing. zmq.Again if there is none. `look` is called now and then within a message
        of very many parts; what it raises ends the message."""
        first = self._last = router.recv(zmq.NOBLOCK, copy=False)
        frames = _parts(router, look)  # the rest is there: ZMQ delivers messages whole
        return first.bytes, frames, ANYONE if self._zap is None else self._caller(first)

    def last_address(self) -> str:
        """Where the last message came from; "" if ZMQ does not say."""
        try:
            return str(self._last.get("Peer-Address")) if self._last is not None else ""
        except zmq.ZMQError:
            return ""

    def _caller(self, frame: zmq.Frame) -> Caller | None:
        try:
            key = str(frame.get("User-Id"))
        except zmq.ZMQError:
            self._fail("no_key")
            return None
        return self.caller_of(key)

    def caller_of(self, key: str | None) -> Caller:
        """Who has that key, as far as the list says so now; None: of whom nobody knows anything, and who has no
        session."""
        if key is None:
            return NOBODY
        if not key and self._curve_key is None:
            return ANYONE
        known = self.callers.get(key)
        if known is None:
            self._fail("revoked_key")
        return known or Caller(key, revoked=True)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Does what there is to do on one of our sockets."""
        for _ in range(_EVENTS_A_TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if socket is self._zap:
                socket.send_multipart(self.answer(frames), zmq.NOBLOCK)
            else:
                self._note_handshake(frames)

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """The reply to a ZAP request: 200 and the key for one that is authorized, 400 for everything else."""
        at = frames.index(b"") + 1
        request = frames[at:]
        number = request[1] if len(request) > 1 else b""
        key = ""
        if len(request) == 7 and request[5] == b"CURVE" and len(request[6]) == 32:
            key = z85.encode(request[6]).decode()
        if key in self.callers:
            return [*frames[:at], b"1.0", number, b"200", b"", key.encode(), b""]
        self._fail("unknown_key", request[3].decode(errors="replace") if len(request) > 3 else "")
        return [*frames[:at], b"1.0", number, b"400", b"not authorized", b"", b""]

    def reload(self) -> bool:
        """Reads the list again if it changed, or was not whole when last read. True if others are authorized now. One
        that cannot be read changes nothing; a line that cannot be read authorizes nobody."""
        if self._path is None or ((signature := _signature_of(self._path)) == self._signature and not self._problems):
            return False
        problems: list[str] = []
        self._signature = signature
        try:
            callers = read_authorized(self._path, lambda problem: problems.append(f"{problem}; ignored"))
        except SettingsError as error:
            callers = self.callers
            problems = [f"{error.message}; those authorized before stay so, and nobody can be revoked ({error.hint})"]
        self._say(problems)
        if callers == self.callers:
            return False
        added, removed = len(callers.keys() - self.callers.keys()), len(self.callers.keys() - callers.keys())
        self.callers = callers
        log.info("authorized_keys was read again: %d keys, %d new, %d revoked", len(callers), added, removed)
        return True

    def _say(self, problems: list[str]) -> None:
        """Says what is wrong with the list when that changes, and then every minute as long as it is."""
        now = self._clock()
        if problems != self._problems or now - self._problems_said_at >= LOG_INTERVAL_S:
            for problem in problems:
                log.error("authorized_keys: %s", problem)
            self._problems, self._problems_said_at = problems, now

    def close(self) -> None:
        if self._router is not None and not self._router.closed:
            self._router.disable_monitor()
        for socket in self.sockets:
            socket.close(linger=0)

    def _note_handshake(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)
        reasons = {_CRYPTOGRAPHIC: "cryptographic", _MECHANISM: "mechanism"}
        broken_off = event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        self._fail("broken_off" if broken_off else reasons.get(event["value"], "protocol"))

    def _fail(self, reason: str, address: str = "") -> None:
        """Counts, and says so once a minute at most for each reason: who knocks must not fill our disk."""
        self._counters().fail_auth(reason)
        self._unsaid[reason] += 1
        now = self._clock()
        if reason not in self._said_at or now - self._said_at[reason] >= LOG_INTERVAL_S:
            where = f" from {address}" if address else ""
            count = self._unsaid.pop(reason)
            log.warning("a peer%s was turned away (%s); %d since this was last said", where, reason, count)
            self._said_at[reason] = now


def _parts(router: zmq.Socket[bytes], look: Callable[[], None]) -> list[bytes]:
    """One message, or the rest of one. To read a million parts takes a second, in which others come in."""
    parts = [router.recv(zmq.NOBLOCK)]
    while router.getsockopt(zmq.RCVMORE):
        parts.append(router.recv(zmq.NOBLOCK))
        if len(parts) % _PARTS_BETWEEN_LOOKS == 0:
            look()
    return parts


def _refuse_start(problem: str) -> None:
    raise SettingsError(
        f"authorized_keys: {problem}", 'a line is "public-key name", as in the .pub files of `kvkeep keygen`'
    )


def _signature_of(path: Path) -> list[object]:
    """What changes when the list does: of the file, or of the directory and each file in it. What cannot be looked at
    is in it by its error, so that it hides no change of the others."""
    signature = [_stat_of(path)]
    try:
        files = _key_files(path)
    except OSError as error:  # a plain file, too
        return [*signature, error.errno]
    return [*signature, *(_stat_of(file) for file in files)]


def _stat_of(file: Path) -> object:
    try:
        one = os.stat(file)
    except OSError as error:
        return str(file), error.errno
    return str(file), one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns
