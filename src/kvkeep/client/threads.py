"""What this package uses of `threading` and `time`, so that a simulation can decide who runs
when."""

from __future__ import annotations

import time
from typing import Any, Protocol


def monotonic_ms() -> int:
    return int(time.monotonic() * 1000)


class Threads(Protocol):
    """The module `threading`, or `kvkeep_lab.simulation.threads`."""

    @property
    def Thread(self) -> Any: ...
    @property
    def Lock(self) -> Any: ...
    @property
    def RLock(self) -> Any: ...
    @property
    def Condition(self) -> Any: ...
    @property
    def Event(self) -> Any: ...

    def get_ident(self) -> int: ...
