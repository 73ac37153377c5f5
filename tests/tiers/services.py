"""Real services for tests of shared tiers, and a relay that cuts what goes to them.

A service is a process on a free loopback port, with a directory of its own. Where its program is
not installed, the tests that need it are skipped with the program's name."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

_START_S = 30.0


def program(*names: str) -> str:
    """The path of the first of these programs that is installed; skips the test if none is."""
    for name in names:
        path = shutil.which(name) or shutil.which(name, path=Path(sys.executable).parent)
        if path is not None:
            return path
    pytest.skip(f"NOT TESTED: {' or '.join(names)} is not installed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Service:
    """One process that listens on `port`. `log` is what it has printed."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        port: int,
        environment: dict[str, str] | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port, self._log_file = port, directory / "printed"
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | (environment or {}),
            )
        self._wait_until_it_listens(command[0])

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)  # it has stopped
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _wait_until_it_listens(self, name: str) -> None:
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)
        self.kill()
        pytest.fail(f"{name} does not listen on port {self.port}: {self.log}")


class Relay:
    """Passes connections to `port` on, until it is told to cut them."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = host, port
        self._left: int | None = None  # bytes that still go to the service, of all connections
        self._open = True
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    @contextmanager
    def cutting_after(self, nbytes: int) -> Iterator[None]:
        """Inside: the service gets that many more bytes, and then all connections are closed."""
        self._left = nbytes
        try:
            yield
        finally:
            self._left = None

    def close(self) -> None:
        self._open = False
        _end(self._listener)
        self._cut()
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    def _run(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        while self._open:
            with contextlib.suppress(OSError):
                near, _ = self._listener.accept()
                if self._left == 0:
                    near.close()
                    continue
                far = socket.create_connection(self._target)
                self._ends += [near, far]
                self._run(self._to_service, near, far)
                self._run(self._pass_on, far, near)

    def _to_service(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(4096):
                with self._lock:
                    if self._left is not None:
                        data = data[: self._left]
                        self._left -= len(data)
                    far.sendall(data)
                    if self._left == 0:
                        self._cut()
        _end(far)

    def _pass_on(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                near.sendall(data)
        _end(near)

    def _cut(self) -> None:
        for end in self._ends:
            _end(end)


class RelayProcess:
    """A relay in a process of its own, for clients that hold Python's lock while they wait."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._ask(""))

    @contextmanager
    def cutting_after(self, nbytes: int) -> Iterator[None]:
        self._ask(str(nbytes))
        try:
            yield
        finally:
            self._ask("none")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, said: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        if said:
            print(said, file=self._process.stdin, flush=True)
        return self._process.stdout.readline()


def _serve(relay: Relay) -> None:
    """What a RelayProcess runs: says its port, and obeys lines."""
    print(relay.port, flush=True)
    with contextlib.ExitStack() as cuts:
        for line in sys.stdin:
            cuts.close()
            if line.strip() != "none":
                cuts.enter_context(relay.cutting_after(int(line)))
            print("done", flush=True)


def _end(side: socket.socket) -> None:
    with contextlib.suppress(OSError):
        side.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    _serve(Relay(int(sys.argv[1])))
