"""Processes that tests, benchmarks and demos start: a real server, and programs that speak JSON."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvkeep.errors import KVKeepError, Unavailable

_numbers = itertools.count()
_LAST_WORD_WITHIN_S = 3.0  # pipes close before the last line of a log is written
_SHOWN_LINES = 30
# The server listens on loopback: a proxy from the environment is for the world outside.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def wait_for(file: Any, timeout_ms: int, *, readable: bool = True, writable: bool = False) -> bool:
    """Waits until a file or socket is ready. By poll: select takes no descriptor beyond 1,023, and
    a process that has run many simulations has more."""
    poll = select.poll()
    poll.register(file, (select.POLLIN if readable else 0) | (select.POLLOUT if writable else 0))
    return bool(poll.poll(timeout_ms))


class ServerProcess:
    """`kvkeep serve` on free ports, with a pool and state of its own; all of it is gone when the
    block ends. `environment`: variables for it beside the caller's, of which it gets no KVKEEP_*.
    `flags` may be changed: they are those of the next `start`.

    with ServerProcess("--pool-size", "1GiB") as server:
        cache = kvkeep.connect(server.address, ...)
    """

    def __init__(
        self,
        *flags: str,
        name: str | None = None,
        state_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.flags = flags
        self._environment = environment or {}
        self._shm_dir = Path(
            flags[flags.index("--shm-dir") + 1] if "--shm-dir" in flags else "/dev/shm"
        )
        self.name = name or f"p{os.getpid()}-{next(_numbers)}"
        self._own_state = (
            tempfile.TemporaryDirectory(prefix="kvkeep-") if state_dir is None else None
        )
        self.state_dir = Path(self._own_state.name) if self._own_state else state_dir
        self.address = ""
        self.http = ""
        self.process: subprocess.Popen[str] | None = None
        self._said = ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def pool(self) -> Path:
        """The pool's directory."""
        return self._shm_dir / f"kvkeep-{self.name}"

    def start(self, *more: str) -> ServerProcess:
        """Starts the server and waits for its word that it serves; Unavailable, with what it said,
        if it does not. `more` are flags for this time only."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (not a pipe: unread, it would block the server)
        self.process = subprocess.Popen(
            [*self.command(), *more],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_clean_environment() | dict(self._environment),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            said = self.stop().strip()
            self._clean_up()
            raise Unavailable(f"the server did not start: {said}")
        ready = json.loads(line)
        self.address, self.http = ready["address"], ready["http"]
        return self

    def command(self) -> Sequence[str]:
        return [
            *(sys.executable, "-m", "kvkeep.cli.main", "serve", "--json"),
            *("--address", self.address or "tcp://127.0.0.1:0", "--http-address", "127.0.0.1:0"),
            *("--name", self.name, "--state-dir", str(self.state_dir), *self.flags),
        ]

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM, within_s: float = 60.0) -> str:
        """Ends the server and returns what it wrote to its log. TimeoutExpired if it had to be
        killed."""
        if self.process is None:
            return ""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:  # raised again; nobody else would end it
            self.process.kill()
            self.process.communicate()
            raise
        finally:
            self.process = None
            self._said = self.log()
            self._log.close()
        return self._said

    def ask(self, path: str = "/v1/status", within_s: float = 30.0) -> Any:
        """What the admin API answers to GET with the token that the server has made. Unavailable if
        it does not answer."""
        # Its import takes half a second, also of each program that speaks JSON.
        from kvkeep.server.settings import made_token

        assert self.state_dir is not None
        request = urllib.request.Request(f"http://{self.http}{path}")
        if (token := made_token(self.state_dir, self.name)).exists():
            request.add_header("Authorization", f"Bearer {token.read_text().strip()}")
        try:
            with _opener.open(request, timeout=within_s) as reply:
                return json.load(reply)
        except OSError as error:
            raise Unavailable(f"the server does not answer: {error}") from None

    def log(self) -> str:
        """What the server has written to its log."""
        if self._log.closed:
            return self._said
        with os.fdopen(os.dup(self._log.fileno())) as log:
            log.seek(0)
            return log.read()

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.send(signal.SIGCONT)  # a paused process cannot end
        try:
            self.stop()
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        if self._own_state:
            self._own_state.cleanup()
        # A server leaves its pool behind, for a next one of the same name; there will be none.
        shutil.rmtree(self.pool, ignore_errors=True)


class JsonProcess:
    """A Python program in a process of its own that reads and writes lines of JSON. `program` is
    what the interpreter runs: ("-m", module), or ("-c", text); `inside` goes before the interpreter.
    It ends when its input does.

    It leads a process group of its own, so that Ctrl-C reaches the caller alone, and `end` kills
    what it has started too. Its stderr is kept, and is part of the error if it ends early."""

    def __init__(
        self,
        name: str,
        program: Sequence[str],
        environment: Mapping[str, str] | None = None,
        inside: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  (not a pipe: unread, it would block the process)
        self._popen = subprocess.Popen(
            [*inside, sys.executable, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=None if environment is None else dict(environment),
            process_group=0,
        )
        self._unread = b""
        self._last_log = ""

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """KVKeepError, with its log, if the process has ended."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(message).encode() + b"\n")
            self._popen.stdin.flush()
        except OSError:
            raise self._ended() from None

    def receive(self, within_s: float = float("inf")) -> dict[str, Any]:
        """The next line. KVKeepError, with its log, if the process ends or says nothing."""
        assert self._popen.stdout is not None
        until = time.monotonic() + within_s
        while b"\n" not in self._unread:
            # What the process has started may hold the pipe open after its end.
            has_ended = self.exit_code() is not None
            if wait_for(self._popen.stdout, 0 if has_ended else 1_000):
                more = os.read(self._popen.stdout.fileno(), 1 << 20)
                if not more:
                    raise self._ended()
                self._unread += more
            elif has_ended:
                raise self._ended()
            elif time.monotonic() > until:
                raise self.failure(f"said nothing for {within_s:g} s")
        line, _, self._unread = self._unread.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said

    def signal(self, number: signal.Signals) -> None:
        """To the process alone. One that has ended gets none."""
        if self.exit_code() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the process and all that it has started, and does not wait for it."""
        if self._popen.returncode is None:  # not reaped yet, so the number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def exit_code(self, within_s: float = 0.0) -> int | None:
        """Negative after a signal; None if the process still runs after that time."""
        until = time.monotonic() + within_s
        while self._popen.returncode is None:
            # WNOWAIT: until `end` the number stays taken, and `kill` meets nobody else.
            done = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if done is not None:
                code = done.si_status
                return code if done.si_code == os.CLD_EXITED else -code
            if time.monotonic() > until:
                return None
            time.sleep(0.02)
        return self._popen.returncode

    def close_input(self) -> None:
        """Tells the process to end."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):  # it may be gone already
            self._popen.stdin.close()

    def end(self, within_s: float = 0.0) -> int:
        """Closes its input, waits for its end as long as that, and kills what is left. Returns its
        exit code. A second call does nothing."""
        if self._popen.returncode is None:
            with self._stderr, self._popen:
                try:
                    self.close_input()
                    self.exit_code(within_s)
                finally:
                    self.kill()
                    self._last_log = self.log()
        return self._popen.returncode

    def log(self) -> str:
        """What it has written to stderr."""
        if self._stderr.closed:
            return self._last_log
        # Not by reading on: the process writes where the file was read last.
        descriptor = self._stderr.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def failure(self, what: str) -> KVKeepError:
        """An error that says `what` and the end of its log."""
        said = "\n".join(self.log().strip().splitlines()[-_SHOWN_LINES:])
        return KVKeepError(f"{self.name} {what}. It said:\n{said or '(nothing)'}")

    def _ended(self) -> KVKeepError:
        code = self.exit_code(_LAST_WORD_WITHIN_S)
        return self.failure("closed its output" if code is None else f"ended with exit code {code}")


def _clean_environment() -> dict[str, str]:
    """The caller's own kvkeep settings are not meant for this server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
