"""The daemon: sockets, signals and the loop around the service.

One thread does everything that touches the store. A second fills the pool segment by segment, so
that the server answers from its first moment on; a third runs HTTP. Both hand their work to the
loop by `run_in_loop`."""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from kvkeep.errors import PoolError
from kvkeep.server.auth import Authority, Caller
from kvkeep.server.connections import Connections
from kvkeep.server.host_memory import allow_many_files, warn_of_disk, warn_of_small_pool
from kvkeep.server.limits import ClientLimits
from kvkeep.server.listeners import Listeners
from kvkeep.server.quotas import QuotaFile, apply_kept
from kvkeep.server.scrub import Scrub, Scrubber
from kvkeep.server.service import Service
from kvkeep.server.settings import Settings
from kvkeep.server.stranger_log import StrangerLog
from kvkeep.server.warm import open_store
from kvkeep.store.plans import Limits
from kvkeep.store.store import OLD_SESSIONS, Store
from kvkeep.tiers.memory import Pool
from kvkeep.units import format_size
from kvkeep.wire.messages import PoolPlace, WireLimits
from kvkeep.wire.tls import tls_files

log = logging.getLogger(__name__)

T = TypeVar("T")


class Daemon:
    """Everything one server process has. `run` serves until `stop`; `close` removes what was
    made."""

    def __init__(self, settings: Settings, *, fresh: bool = False) -> None:
        self.settings = settings
        self.epoch = secrets.randbits(63)
        self.started = time.time()
        self.ready = threading.Event()
        self.degraded = ""  # why the pool is smaller than asked for, if it is
        self.lost = (
            False  # whether the pool's lock was removed under us: from then on there are no hits
        )
        self.last_turn = time.monotonic()
        self.busy_since: float | None = (
            None  # when the turn under way began; None while the loop waits for work
        )
        self._stopping = self._is_over = False
        self._filler: threading.Thread | None = None
        self._scrubber: Scrubber | None = None
        self._duties: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.strangers = StrangerLog()
        self.quotas = QuotaFile(settings.state_dir / settings.name / "quotas.json")
        allow_many_files()
        self.pool = Pool(
            settings.shm_dir,
            settings.name,
            settings.pool_size,
            settings.slab_size,
            self.epoch,
            keep=settings.keep_pool,
            fresh=fresh,
            may_shrink=settings.pool_size_is_auto,
        )
        warn_of_disk(settings.shm_dir)
        if settings.pool_size_is_auto:
            warn_of_small_pool(self.pool)
            self.settings = replace(
                settings, pool_size=self.pool.pool_bytes, slab_size=self.pool.slab_bytes
            )
        try:
            self.store = self._make_store()
            if not self.pool.filled_bytes:
                # The first segment is there before anyone can connect: who stores at once finds
                # room.
                self.store.add_slabs(*self.pool.fill_next())
            self.service = self._make_service()
            self.authority = Authority(tls_files(settings), settings.authorized_clients)
            self._listeners = Listeners(settings.address, for_others=bool(settings.trusted_users))
            self.address = self._listeners.address
            self._connections = Connections(
                self._listeners,
                2 * settings.max_sessions,
                settings.max_frame_size,
                authority=self.authority,
                trusted_users=settings.trusted_users,
                counters=self.service.counters,
                strangers=self.strangers,
            )
            self._waker, self._wake = socket.socketpair()
            self._waker.setblocking(False)
            self._wake.setblocking(False)
            self._connections.also_wait_for(self._waker.fileno())
        except BaseException:
            # guard: whatever it is, nothing of a server that does not start may stay behind
            self.close(keep=self.pool.is_left)  # but what was there before
            raise

    def run(self) -> None:
        """Serves until `stop` is called, then gives sessions in the middle of a load or store time
        to finish."""
        scrub = Scrub(
            self.store, self.pool.segments, self.service.counters, self.warm_start.adoption.rows
        )
        self._scrubber = Scrubber(scrub, self.run_in_loop)
        self._scrubber.start()
        self._filler = threading.Thread(target=self._fill_pool, name="kvkeep-fill", daemon=True)
        self._filler.start()
        gc.collect()
        gc.freeze()  # what is there from the start stays: no collection need ever look at it again
        log.info(
            "serving on %s, pool %s in %s",
            self.address,
            format_size(self.pool.pool_bytes),
            self.pool.directory,
        )
        while not self._stopping:
            self._turn(self.settings.session_check_interval)
        self.service.draining = True
        deadline = time.monotonic() + self.settings.shutdown_grace
        while time.monotonic() < deadline and self._is_in_use():
            self._turn(0.05)
        self._connections.wait(
            0
        )  # requests that came meanwhile are answered, and need not wait for a deadline
        self._connections.serve(self._answer)
        self._is_over = True
        while not self._duties.empty():  # nor need who asked by HTTP
            self._duties.get()()
        log.info("stopped")

    def stop(self) -> None:
        """Asks the loop to end. Safe from a signal handler and from any thread."""
        self._stopping = True
        self._rouse()

    @property
    def stopping(self) -> bool:
        """Whether the server was asked to stop and takes no new sessions."""
        return self._stopping

    def run_in_loop(self, duty: Callable[[], T]) -> Future[T]:
        """Runs something in the loop's thread, the only one that may touch the store."""
        future: Future[T] = Future()

        def carry_out() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(duty())
            except BaseException as error:
                # guard: whatever it is belongs to whoever waits for the result
                future.set_exception(error)

        self._duties.put(carry_out)
        self._rouse()
        if self._is_over:
            future.cancel()  # if nobody has carried it out, nobody will
        return future

    def do_in_loop(self, duty: Callable[[], object]) -> None:
        """The same for what nobody waits for: a fault is counted and logged."""

        def look(future: Future[object]) -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                self.service.counters.internal_errors += 1
                log.error("something that the loop had to do failed", exc_info=error)

        self.run_in_loop(duty).add_done_callback(look)

    def close(self, *, keep: bool = False) -> None:
        """Closes sockets and removes the pool; or, with `keep`, leaves it to the next server if
        there is something in it."""
        self._stopping = True
        if self._scrubber is not None:
            self._scrubber.stop()
        if self._filler is not None:
            # or it would put its next segment into a directory that is being removed
            self._filler.join()
        if hasattr(self, "_listeners"):
            self._listeners.close()
        if hasattr(self, "_connections"):
            self._connections.close()
        if hasattr(self, "_wake"):
            self._wake.close()
            self._waker.close()
        keep = (
            keep
            and self.pool.is_kept
            and (not hasattr(self, "store") or len(self.store.blocks.table) > 0)
        )
        if keep and hasattr(self, "service"):
            self.service.sessions.leave_all()
            blocks, directory = len(self.store.blocks.table), self.pool.directory
            log.info(
                "%d blocks stay in %s for the next server; `rm -r %s` removes them",
                blocks,
                directory,
                directory,
            )
        if not keep:
            if hasattr(self, "store") and len(self.store.blocks.table):
                log.info(
                    "%d blocks are removed; SIGTERM and `kvkeep drain` keep them",
                    len(self.store.blocks.table),
                )
            self.pool.leave_nothing()
        for session in self.service.sessions.all() if hasattr(self, "service") else []:
            self.service.sessions.remove(session)
        self.pool.close(keep=keep)

    def now_ms(self) -> int:
        return int(time.monotonic() * 1000)

    # -- the loop

    def _turn(self, timeout_s: float) -> None:
        """Waits for something to do, does it, and every now and then looks for dead sessions."""
        now = time.monotonic()
        due = self.last_turn + self.settings.session_check_interval
        self.busy_since = None
        self._connections.wait(max(0.0, min(timeout_s, due - now)))
        self.busy_since = time.monotonic()
        self._connections.serve(self._answer)
        with contextlib.suppress(BlockingIOError):
            self._waker.recv(4096)
        if self.store.has_to_tidy:
            self.do_in_loop(lambda: self.store.tidy(self.now_ms()))
        for _ in range(
            self._duties.qsize()
        ):  # those that come meanwhile wait until engines have had their turn
            self._duties.get()()
        if time.monotonic() >= due:
            if self.authority.reload():
                self._connections.check_certificates()
                if self.authority.callers is not None:
                    self.service.bar(self.authority.callers, self.now_ms())
            self.service.end_dead_sessions(self.now_ms())
            self._connections.tend(self.service.sessions.is_on)
            self._look_after_lock()
            self.last_turn = time.monotonic()
        self.service.counters.turns.add((time.monotonic() - self.busy_since) * 1e6)

    def _answer(self, frames: list[bytes], caller: Caller, peer: int) -> list[Any] | None:
        return self.service.handle(frames, self.now_ms(), caller, peer)

    def _look_after_lock(self) -> None:
        """Without its lock file the server is dead to whoever comes, and the pool deserted: it
        stops admitting."""
        if not self.lost and self.pool.is_unlocked():
            self.lost = self.service.draining = True
            log.error(
                "the lock file in %s was removed under this server: it finds and stores nothing more; restart it",
                self.pool.directory,
            )

    def _is_in_use(self) -> bool:
        """Whether a session of ours reads or writes. For those of an old server nobody waits: the
        next one will not touch what they hold either."""
        sessions = self.store.sessions.items()
        return any(
            held.writes or held.leases for number, held in sessions if number != OLD_SESSIONS
        )

    def _rouse(self) -> None:
        """Ends the loop's wait. A full buffer will wake it just as well; a closed one has no loop
        behind it."""
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def _fill_pool(self) -> None:
        while not self._stopping:
            try:
                first, count = self.pool.fill_next()
                if not count:
                    break
                self.do_in_loop(lambda first=first, count=count: self.store.add_slabs(first, count))  # type: ignore[misc]
            except (PoolError, OSError) as error:
                self.degraded = str(error)
                log.error("%s", error)
                break
        self.do_in_loop(self.ready.set)

    # -- construction

    def _make_store(self) -> Store:
        limits = Limits(
            blocks_per_request=self.settings.max_blocks_per_request,
            leases_per_session=self.settings.max_leases_per_session,
            writing_blocks_per_session=self.settings.max_writing_blocks_per_session,
            sessions=self.settings.max_sessions,
            layouts=self.settings.max_layouts,
            tenants=self.settings.max_tenants,
        )
        store, self.warm_start = open_store(self.pool, limits, self.now_ms())
        self.kept_quotas = self.quotas.load()
        self.quotas.check_writable()
        self.settings = apply_kept(
            store, self.settings, self.kept_quotas, self.quotas.path, self.now_ms()
        )
        return store

    def _make_service(self) -> Service:
        settings = self.settings
        return Service(
            self.store,
            self.pool.segments,
            PoolPlace(str(self.pool.directory), "", self.pool.segment_bytes, self.pool.pool_bytes),
            WireLimits(
                settings.max_frame_size,
                settings.max_blocks_per_request,
                settings.max_leases_per_session,
                settings.max_writing_blocks_per_session,
            ),
            self.epoch,
            self.pool.watch,
            int(settings.network_session_timeout * 1000),
            settings.verify,
            ClientLimits(
                settings.max_sessions_per_client,
                settings.max_requests_per_second,
                settings.max_network_rate,
            ),
            self.pool.old_sessions,
            int(settings.network_lease_timeout * 1000),
        )
