"""What a session on the server's host holds: the lock that proves it alive, and the pool's memory."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from pathlib import Path

from kvkeep.client.threads import Threads
from kvkeep.wire.liveness import hold, is_owned
from kvkeep.wire.messages import Welcome
from kvkeep.wire.segments import EPOCH_FILE, Segments, is_same_pool

_SERVER_LOCK = "daemon.lock"

log = logging.getLogger(__name__)


class Fence:
    """Taken before Attach, let go of when the session is over and the last copy has ended.

    Whoever holds it (`hold`, `unhold`, in any thread) may touch the pool's memory: it stays mapped, and the session's
    lock stays ours until then, whatever becomes of the session meanwhile.
    """

    def __init__(
        self,
        descriptor: int,
        server_lock: int,
        directory: Path,
        epoch: int,
        segments: Segments,
        threads: Threads = threading,
    ) -> None:
        self._descriptor = descriptor
        self._server_lock = server_lock
        self._close_server_lock = weakref.finalize(self, os.close, server_lock)
        self._directory = directory
        self._epoch = epoch
        self._holders = 1  # the session itself
        self._over = False
        self._counting = threads.Lock()
        self.segments = segments

    @classmethod
    def take(cls, welcome: Welcome, threads: Threads = threading) -> Fence | None:
        """None if the pool is not really here or its lock cannot be had: then bytes go through the socket."""
        place = welcome.pool
        directory = Path(place.directory)
        if not place.lock or not is_same_pool(directory, welcome.epoch):
            return None
        descriptor = -1
        try:
            descriptor = hold(Path(place.lock))
            server_lock = os.open(directory / _SERVER_LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            if descriptor >= 0:
                os.close(descriptor)
            log.warning("kvkeep: shared memory cannot be used (%s); blocks go through the socket", error)
            return None
        segments = Segments(directory, place.segment_bytes, place.pool_bytes, welcome.epoch)
        return cls(descriptor, server_lock, directory, welcome.epoch, segments, threads)

    def hold(self) -> bool:
        """False if the session is over: then it is not held."""
        with self._counting:
            self._holders += not self._over
            return not self._over

    def unhold(self) -> None:
        with self._counting:
            self._holders -= 1
            last = not self._holders
        if last:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._close_server_lock()
            self.segments.close()

    def let_go(self) -> None:
        """The session is over. Said again it means nothing."""
        with self._counting:
            again, self._over = self._over, True
        if not again:
            self.unhold()

    def server_is_gone(self) -> bool:
        """Whether the server's process is dead, by the kernel's word: nobody holds the pool's lock any more, or another
        has taken the pool. (Its memory is not free until we let go of it, so a new server may be waiting for us.)

        The lock is asked for where it was when the session began, not by its name: a server whose lock file somebody
        has removed or moved is alive, and as soon as we let go it would give away what is leased to us. What cannot be
        told, for want of files that we may open, is not so.
        """
        if not is_owned(self._server_lock):
            return True
        try:
            lock = os.stat(self._directory / _SERVER_LOCK, follow_symlinks=False)
            is_here = os.path.samestat(lock, os.fstat(self._server_lock))  # else another pool lies there
            return is_here and (self._directory / EPOCH_FILE).read_text() != f"{self._epoch:016x}"
        except (OSError, ValueError):
            return False
