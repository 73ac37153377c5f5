"""What the server's log looks like: a line an event on stderr, for people or as JSON.

Text that came from outside (an engine's name for itself) can hold anything; control characters are
escaped, so that nobody can forge a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_ESCAPES = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)]} | {
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def set_up(level: str, as_json: bool) -> None:
    """Sends our own events from `level` on to stderr, and warnings of libraries with them."""
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
    return (
        datetime.fromtimestamp(record.created, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )
