"""What a session on the server's host holds: the lock that proves it alive, and the pool's
memory."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Collection
from pathlib import Path

from kvkeep.client.threads import Threads
from kvkeep.wire.messages import Welcome
from kvkeep.wire.pool_files import PoolFiles, hold, is_owned
from kvkeep.wire.segments import Segments, segment_name

_SERVER_LOCK = "daemon.lock"

log = logging.getLogger(__name__)


class SharedPool:
    """Taken before Attach, let go of when the session is over and the last copy has ended.

    Whoever holds it (`hold`, `unhold`, in any thread) may touch the pool's memory: it stays mapped,
    and the session's lock stays ours until then, whatever becomes of the session meanwhile."""

    def __init__(
        self,
        descriptor: int,
        server_lock: int,
        epoch: int,
        segments: Segments,
        threads: Threads = threading,
    ) -> None:
        self._descriptor = descriptor
        self._server_lock = server_lock
        self._close_server_lock = weakref.finalize(self, os.close, server_lock)
        self._epoch = epoch
        self._holders = 1  # the session itself
        self._over = False
        self._counting = threads.Lock()
        self.segments = segments

    @classmethod
    def attach(
        cls, welcome: Welcome, threads: Threads = threading, trusted_users: Collection[int] = ()
    ) -> SharedPool | None:
        """None if the pool is not really here or its lock cannot be had: then bytes go through the
        socket. UntrustedPool if it is here, and its directory, locks or first segment are not a
        trusted user's alone: then neither is the server."""
        place = welcome.pool
        with contextlib.ExitStack() as opened:
            try:
                files = PoolFiles(Path(place.directory), trusted_users)
            except (OSError, ValueError):
                return None
            opened.callback(files.close)
            if not place.lock or not files.is_of(welcome.epoch):
                return None
            files.check()
            try:
                descriptor = hold(Path(Path(place.lock).name), files.open)
                opened.callback(os.close, descriptor)
                server_lock = files.open(_SERVER_LOCK, os.O_RDONLY)
                opened.callback(os.close, server_lock)
            except (OSError, ValueError) as error:
                log.warning(
                    "kvkeep: shared memory cannot be used (%s); blocks go through the socket", error
                )
                return None
            with contextlib.suppress(FileNotFoundError):  # the server has not made it yet
                os.close(files.open(segment_name(0), os.O_RDWR))
            segments = Segments(files, place.segment_bytes, place.pool_bytes, welcome.epoch)
            opened.pop_all()
            return cls(descriptor, server_lock, welcome.epoch, segments, threads)

    @property
    def holders(self) -> int:
        """The session, unless it is over, and each copy under way."""
        return self._holders

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
            self.segments.files.close()

    def let_go(self) -> None:
        """The session is over. Said again it means nothing."""
        with self._counting:
            again, self._over = self._over, True
        if not again:
            self.unhold()

    def server_is_gone(self) -> bool:
        """Whether the server's process is dead, by the kernel's word: nobody holds the pool's lock
        any more, or another has taken the pool. (Its memory is not free until we let go of it, so a
        new server may be waiting for us.)

        The lock is asked for where it was when the session began, not by its name: a server whose
        lock file somebody has removed or moved is alive, and as soon as we let go it would give
        away what is leased to us. What cannot be told, for want of files that we may open, is not
        so."""
        if not is_owned(self._server_lock):
            return True
        files = self.segments.files
        try:  # with another lock file there, it is not told which server the epoch is of
            return (
                files.has(_SERVER_LOCK, self._server_lock)
                and files.epoch() != f"{self._epoch:016x}"
            )
        except (OSError, ValueError):
            return False
