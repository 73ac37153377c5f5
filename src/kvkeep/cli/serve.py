"""`kvkeep serve`: a server in the foreground, from its settings to its orderly end, and its log."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from kvkeep.cli.output import APP, help_section, note
from kvkeep.errors import SettingsError
from kvkeep.server.settings import ENV_PREFIX, TABLE, Settings
from kvkeep.units import MIB, format_size

if TYPE_CHECKING:
    from kvkeep.server.daemon import Daemon
    from kvkeep.server.http_server import HttpServer

_FIRST_PROGRESS_AFTER_S = 2.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MESSAGE_BYTES, _KEPT_BYTES = 4 * MIB, 32 * MIB


class ServeCommand(TyperCommand):
    """Adds all settings to the help page; Settings.load reads them."""

    def get_help(self, ctx: Any) -> str:
        rows = []
        for name, line in TABLE.items():
            text = f"{line.help} [default: {line.default}]{' (live)' * line.live}"
            rows.append((f"--{name.replace('_', '-')}", text))
        return help_section(
            super().get_help(ctx),
            f"Settings, as a flag, as {ENV_PREFIX}NAME in the environment, or as a name in FILE",
            rows,
            "Settings marked (live) can change while the server runs: `kvkeep settings set`.",
        )


app = typer.Typer(**APP)


@app.command(
    cls=ServeCommand, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def serve(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Read settings from this TOML file.")] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Start empty and do not adopt the previous server's pool."),
    ] = False,
    ready_json: Annotated[
        bool, typer.Option("--json", help="Report as a line of JSON that the server is ready.")
    ] = False,
) -> None:
    """Run a server until SIGTERM, which keeps its pool for the next one, or SIGINT, which removes
    it."""
    # Not at the top: every other command would load the server.
    from kvkeep.server.daemon import Daemon
    from kvkeep.server.listeners import check_free

    keep_freed_memory()
    signals = Signals()
    settings = Settings.load(config, os.environ, context.args, fresh=fresh)
    set_up_logging(settings.log_level, settings.log_json)
    check_free(settings.address)
    check_free(f"tcp://{settings.http_address}", f"{settings.http_address} for HTTP")
    daemon = Daemon(settings, fresh=fresh)
    front = Front(daemon, ready_json)
    try:
        signals.then(daemon.stop)
        front.start()
        daemon.run()
        front.join()
        if front.failure is not None:
            raise front.failure
    finally:
        front.stop()
        keep = settings.keep_pool if front.has_opened else daemon.pool.is_left
        daemon.close(keep=keep and not signals.at_terminal)


def keep_freed_memory() -> None:
    """Makes malloc keep up to 32 MiB of freed memory for the next messages. By default malloc
    returns memory of this size to the kernel at once, and page faults take a fifth of the time of a
    lookup of 8,192 blocks."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MESSAGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class Front:
    """What operators see of a server: HTTP, and the line that it is ready. In a thread: engines are
    served while the web framework is still being loaded."""

    def __init__(self, daemon: Daemon, ready_json: bool) -> None:
        self.failure: BaseException | None = None
        self.has_opened = False
        self._daemon = daemon
        self._ready_json = ready_json
        self._http: HttpServer | None = None
        self._thread = threading.Thread(target=self._open, name="kvkeep-front", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def stop(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        if self._http is not None:
            self._http.stop()

    def _open(self) -> None:
        try:
            from kvkeep.server.http_server import HttpServer

            self._http = HttpServer(self._daemon)
            self._http.start()
            _say_ready(self._daemon, self._http, self._ready_json)
            self.has_opened = True
            threading.Thread(target=_report_progress, args=(self._daemon,), daemon=True).start()
        except BaseException as error:  # guard: raised again by `serve`, when the loop has ended
            self.failure = error
            self._daemon.stop()


_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """The first SIGTERM, SIGINT or SIGHUP asks for an orderly end; the second does not wait for it.

    SIGTERM comes from a supervisor that will start the server again: the pool is kept. The other
    two come from a terminal (`at_terminal`): it is removed. The second signal raises SystemExit, so
    that the caller's `finally` runs. A third one ends the process at once."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._asked = False
        self.at_terminal = False
        for number in _ENDING:
            # nohup ignores SIGHUP. (Shells ignore SIGINT for background jobs, where it counts.)
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._received)

    def then(self, stop: Callable[[], None]) -> None:
        """Sets what the first signal calls."""
        self._stop = stop

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.at_terminal |= number != signal.SIGTERM
        if self._stop is not None and not self._asked:
            self._asked = True
            self._stop()
            return
        for each in _ENDING:
            signal.signal(each, signal.SIG_DFL)
        raise SystemExit(128 + number)


def _say_ready(daemon: Daemon, http: HttpServer, as_json: bool) -> None:
    """Prints the line. The sockets listen; requests wait for the loop, which is about to start."""
    pool_bytes = daemon.pool.pool_bytes
    if as_json:
        said = {
            "address": daemon.address,
            "http": http.address,
            "pid": os.getpid(),
            "pool_bytes": pool_bytes,
            "name": daemon.settings.name,
        }
        line = json.dumps(said)
    else:
        size = format_size(pool_bytes)
        url = http.address if daemon.settings.http_has_tls else f"http://{http.address}"
        line = f"kvkeep is serving: engines on {daemon.address}, HTTP on {url}, pool {size}"
    try:
        print(line, flush=True)
    except OSError as error:
        raise SettingsError(f"stdout cannot be written: {error.strerror}") from error
    if sys.stdout.isatty():
        note("stop it with Ctrl-C")


def _report_progress(daemon: Daemon) -> None:
    """Prints how far a pool is filled that takes a while."""
    waited, total = False, format_size(daemon.pool.pool_bytes)
    while not daemon.ready.wait(_FIRST_PROGRESS_AFTER_S) and not daemon.stopping:
        waited = True
        note(f"filling the pool: {format_size(daemon.pool.filled_bytes)} of {total}")
    if waited and daemon.ready.is_set():
        note(f"the pool is filled: {format_size(daemon.pool.filled_bytes)}")


# -- the log: a line an event on stderr, for people or as JSON

_ESCAPES = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)]} | {
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def set_up_logging(level: str, as_json: bool) -> None:
    """Sends our events from `level` on, and warnings of libraries, to stderr. Control characters in
    text from outside are escaped, so that a client's name cannot forge a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else PlainLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("kvkeep").setLevel(level.upper())


class PlainLines(logging.Formatter):
    """`2026-01-31T12:00:00.000Z info kvkeep.server.daemon: serving ...`; a traceback follows on
    lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().translate(_ESCAPES)
        line = f"{_time(record)} {record.levelname.lower()} {record.name}: {message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, and a traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
