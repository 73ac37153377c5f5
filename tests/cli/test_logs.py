from __future__ import annotations

import json
import logging
import sys

from kvkeep.cli.logs import JsonLines, PlainLines


def record(message: str, *args: object, failed: bool = False) -> logging.LogRecord:
    info = None
    if failed:
        try:
            raise ValueError("inside")
        except ValueError:
            info = sys.exc_info()
    return logging.LogRecord("kvkeep.x", logging.WARNING, "x.py", 1, message, args, info)


def test_plain_lines_cannot_be_forged() -> None:
    line = PlainLines().format(
        record("session %s attached", "x\n2026 info kvkeep: all is well\x1b[2J\u2028")
    )
    assert line.count("\n") == 0 and "\x1b" not in line and "\u2028" not in line
    assert "warning kvkeep.x: session x\\x0a2026" in line


def test_json_lines_are_one_object_each() -> None:
    line = JsonLines().format(record("a\nb", failed=True))
    event = json.loads(line)
    assert line.count("\n") == 0
    assert (
        event["message"] == "a\nb"
        and event["level"] == "warning"
        and "ValueError: inside" in event["traceback"]
    )


def test_a_traceback_follows_on_lines_of_its_own() -> None:
    assert PlainLines().format(record("failed", failed=True)).endswith("ValueError: inside")
