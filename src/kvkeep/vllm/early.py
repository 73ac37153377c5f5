"""Requests that arrive before the workers have said how they keep KV.

A connector that vLLM calls itself has its workers' handshakes before the first request. Beside
siblings they come with the results of the first step (see siblings.py), and only then can the
server be asked. So the first requests wait for a moment, as they do for an answer of the server:
vLLM makes empty steps meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvkeep.client.options import CONNECT_PATIENCE_MS


class EarlyRequests:
    """Those of one engine. None is held for longer than the first of them may wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[str, Any] = {}
        self._until_s: float | None = None  # when waiting ends; counted from the first lookup
        self.is_over = False  # nothing more is held

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, request: Any) -> None:
        if not self.is_over:
            self._held[request.request_id] = request

    def drop(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def may_wait(self) -> bool:
        now_s = self._clock()
        if self._until_s is None:
            self._until_s = now_s + CONNECT_PATIENCE_MS / 1000
        return now_s < self._until_s

    def end(self) -> list[Any]:
        """All that are held. From now on none is."""
        held, self._held, self.is_over = list(self._held.values()), {}, True
        return held
