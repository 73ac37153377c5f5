"""A real server in a process of its own, for tests, benchmarks and demos."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvkeep.errors import Unavailable

_numbers = itertools.count()
_ENDS_IN_S = 60


def wait_for(file: Any, timeout_ms: int, *, readable: bool = True, writable: bool = False) -> bool:
    """Waits until a file or socket is ready. By poll: select takes no descriptor beyond 1,023, and
    a process that has run many simulations has more."""
    poll = select.poll()
    poll.register(file, (select.POLLIN if readable else 0) | (select.POLLOUT if writable else 0))
    return bool(poll.poll(timeout_ms))


class ServerProcess:
    """`kvkeep serve` on free ports, with a pool and state of its own; all of it is gone when the
    block ends.

    with ServerProcess("--pool-size", "1GiB") as server:
        cache = kvkeep.connect(server.address, ...)
    """

    def __init__(self, *flags: str, name: str | None = None, state_dir: Path | None = None) -> None:
        self._flags = flags
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
            env=_clean_environment(),
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
            *("--name", self.name, "--state-dir", str(self.state_dir), *self._flags),
        ]

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> str:
        """Ends the server and returns what it wrote to its log."""
        if self.process is None:
            return ""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.communicate(timeout=_ENDS_IN_S)
        except subprocess.TimeoutExpired:  # raised again; nobody else would end it
            self.process.kill()
            self.process.communicate()
            raise
        finally:
            self.process = None
            self._said = self.log()
            self._log.close()
        return self._said

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


def _clean_environment() -> dict[str, str]:
    """The caller's own kvkeep settings are not meant for this server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
