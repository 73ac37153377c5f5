"""A whole server inside the engine's process: no sockets and no HTTP, but the same service, store
and pool.

    connection ── transport.send ──► service.handle ──► store    requests: one at a time, by a lock
         └──────── copies ─────────► pool in shared memory       blocks: clients copy, as usual

A request has been answered when `send` returns. A forked child can neither use nor close the
server. A process that was killed leaves its pool behind; the next one to start removes it."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvkeep.client.connection import Connection
from kvkeep.client.options import ClientOptions
from kvkeep.client.threads import monotonic_ms
from kvkeep.errors import PoolError
from kvkeep.kv.shape import BlockShape
from kvkeep.server.service import Service
from kvkeep.store.plans import Limits
from kvkeep.store.store import Store
from kvkeep.tiers.memory import Pool, slab_bytes_for
from kvkeep.units import MIB, format_size
from kvkeep.wire.messages import PoolPlace, WireLimits

log = logging.getLogger(__name__)

_FRAME_BYTES = 64 * MIB
_SESSION_CHECK_MS = 1_000
_LEFT_BEHIND_S = 5  # a pool younger than that may only not have its lock yet


class EmbeddedServer:
    """Serves connections of this process until `close`, garbage collection, or the process's end.

    Memory beyond the pool's first segment is allocated in the background. When `ready` is set all
    of it is there, or `degraded` says why not. The lock `turn` protects service and store."""

    def __init__(
        self, pool_bytes: int, directory: Path = Path("/dev/shm"), slab_bytes: int | None = None
    ) -> None:
        self.ready = threading.Event()
        self.degraded = ""
        self.next_check_ms = 0
        self.turn = threading.Condition(threading.Lock())
        self._pid = os.getpid()
        self._over = False
        self._filling = threading.Lock()
        epoch, limits = secrets.randbits(63), Limits()
        self.pool = pool = _make_pool(
            pool_bytes, directory, slab_bytes or slab_bytes_for(pool_bytes), epoch
        )
        self.store = Store(pool.pool_bytes, pool.slab_bytes, limits, presence=pool.make_presence())
        self.store.add_slabs(0, pool.filled_bytes // pool.slab_bytes)
        place = PoolPlace(str(pool.directory), "", pool.segment_bytes, pool.pool_bytes)
        wire = WireLimits(
            _FRAME_BYTES,
            limits.blocks_per_request,
            limits.leases_per_session,
            limits.writing_blocks_per_session,
        )
        self.service = Service(self.store, pool.segments, place, wire, epoch, pool.watch)
        _servers.add(self)
        threading.Thread(target=self._fill, name="kvkeep-fill", daemon=True).start()

    def __del__(self) -> None:
        if hasattr(self, "service"):
            self.close()

    @property
    def serving(self) -> bool:
        """Whether this is the process that made it, before `close`."""
        return not self._over and os.getpid() == self._pid

    def transport(self) -> EmbeddedTransport:
        """A transport to this server. Each connection needs its own."""
        return EmbeddedTransport(self)

    def connection(self, shape: BlockShape, options: ClientOptions | None = None) -> Connection:
        """A connection for an adapter or a cache, with a name in place of an address."""
        address = f"inproc://{self.pool.directory.name}"
        named = dataclasses.replace(options or ClientOptions(), address=address)
        return Connection(shape, named, self.transport())

    def handle(self, frames: Sequence[Any], inbox: deque[list[bytes]]) -> bool:
        """Carries out one request and puts the reply into the inbox. False if the server is closed,
        or this is a forked child."""
        if not self.serving:  # first: in a forked child the lock may never be released
            return False
        request = [bytes(frame) for frame in frames]  # copied, as by a network
        with self.turn:
            if self._over:
                return False
            now_ms = monotonic_ms()
            if now_ms >= self.next_check_ms:
                self.next_check_ms = now_ms + _SESSION_CHECK_MS
                self.service.end_dead_sessions(now_ms)
            reply = self.service.handle(request, now_ms)
            if reply is not None:
                inbox.append([bytes(frame) for frame in reply])
                self.turn.notify_all()
        return True

    def close(self) -> None:
        """Ends all sessions and removes the pool. Calls fail from now on; copies under way use
        mappings of their own, which no new server gets."""
        if not self.serving:
            return
        self._over = True
        with self._filling, self.turn:
            for session in self.service.sessions.all():
                self.store.close_session(session.number, monotonic_ms())
                self.service.sessions.remove(session)
            self.pool.close()

    def _fill(self) -> None:
        count = 1
        while count:
            with self._filling:  # `close` waits for one segment at most
                if self._over:
                    break
                try:
                    first, count = self.pool.fill_next()
                except (PoolError, OSError) as error:
                    self.degraded = str(error)
                    log.error("%s", error)
                    break
            with self.turn:
                self.store.add_slabs(first, count)
        self.ready.set()


class EmbeddedTransport:
    """A Transport. Safe to use from several threads; the garbage collector may close it, since that
    takes no lock."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._inbox: deque[list[bytes]] = deque()
        self._closed = False
        self._served = True  # when last asked

    def send(self, frames: Sequence[Any]) -> bool:
        return not self._closed and self._server.handle(frames, self._inbox)

    def receive(self) -> list[bytes] | None:
        try:
            return self._inbox.popleft()
        except IndexError:
            return None

    def wait(self, timeout_ms: int) -> None:
        if not self._server.serving:
            time.sleep(max(0, timeout_ms) / 1000)
        elif not self._inbox:
            with self._server.turn:
                self._server.turn.wait_for(lambda: bool(self._inbox), timeout_ms / 1000)

    def lost(self) -> bool:
        served, self._served = self._served, self._server.serving
        return served and not self._served

    def reconnect(self) -> None: ...

    def refusal(self) -> str:
        return ""

    def close(self) -> None:
        self._closed = True
        self._inbox.clear()
        self._server.next_check_ms = 0  # the next request ends a session without Goodbye


_servers: weakref.WeakSet[EmbeddedServer] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for server in list(_servers):
        server.close()


def _make_pool(pool_bytes: int, directory: Path, slab_bytes: int, epoch: int) -> Pool:
    """A pool with a unique name and its first segment."""
    if pool_bytes < slab_bytes:
        pool, slab = format_size(pool_bytes), format_size(slab_bytes)
        problem = f"a pool of {pool} has no room for one slab of {slab}"
        raise PoolError(problem, "use a larger kv_offloading_size")
    _remove_deserted_pools(directory)
    name = f"embedded-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        made = Pool(directory, name, pool_bytes, slab_bytes, epoch)
        with contextlib.ExitStack() as undo:
            undo.callback(made.close)
            made.fill_next()
            undo.pop_all()
    except PoolError as error:  # its hint names flags of the daemon
        larger = f"make {directory} or the memory limit larger (in Docker: --shm-size, --memory)"
        hint = f"use a smaller kv_offloading_size, or {larger}"
        raise PoolError(error.message, hint) from error
    return made


def _remove_deserted_pools(directory: Path) -> None:
    """Removes pools of processes that were killed: only a deserted one can be owned, and owning it
    empties it."""
    for path in directory.glob("kvkeep-embedded-*"):
        with contextlib.suppress(PoolError, OSError):
            if time.time() - path.stat().st_mtime > _LEFT_BEHIND_S:
                Pool(directory, path.name.removeprefix("kvkeep-"), 0, MIB, 0).close()
