"""What a session on the server's host holds: the lock that proves it alive, and the pool's memory."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from kvkeep.wire.liveness import hold
from kvkeep.wire.messages import Welcome
from kvkeep.wire.segments import Segments, is_same_pool

log = logging.getLogger(__name__)


class Fence:
    """Taken before Attach, let go of when the session is over. Copies under way keep their mapping alive."""

    def __init__(self, descriptor: int, segments: Segments) -> None:
        self._descriptor = descriptor
        self.segments = segments

    @classmethod
    def take(cls, welcome: Welcome) -> Fence | None:
        """None if the pool is not really here or its lock cannot be had: then bytes go through the socket."""
        place = welcome.pool
        directory = Path(place.directory)
        if not place.lock or not is_same_pool(directory, welcome.epoch):
            return None
        try:
            descriptor = hold(Path(place.lock))
        except (OSError, ValueError) as error:
            log.warning("kvkeep: shared memory cannot be used (%s); blocks go through the socket", error)
            return None
        return cls(descriptor, Segments(directory, place.segment_bytes, place.pool_bytes, welcome.epoch))

    def let_go(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
