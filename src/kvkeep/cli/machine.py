"""On what a benchmark ran: a number without its machine means nothing."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

from kvkeep import __version__
from kvkeep.units import KIB, format_size


def describe() -> dict[str, str | int]:
    """Processor, cores that this process may use, memory, and versions. Nothing that names the
    machine."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _memory(),
        "python": platform.python_version(),
        "kvkeep": __version__,
    }


def _memory() -> str:
    total = _field("/proc/meminfo", "MemTotal").split()
    return format_size(int(total[0]) * KIB) if total else "unknown"


def _field(path: str, name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""
