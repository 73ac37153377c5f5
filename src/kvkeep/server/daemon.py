"""The daemon: sockets, signals and the loop around the service.

One thread does all that touches the store. A second fills the pool segment by segment, so that the
server answers from the start; a third runs HTTP. Both hand work to the loop by `run_in_loop`."""

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
from typing import TYPE_CHECKING, Any, TypeVar

from kvkeep.errors import PoolError
from kvkeep.server.auth import Authority, Caller
from kvkeep.server.connections import Connections
from kvkeep.server.limits import ClientLimits
from kvkeep.server.listeners import Listeners
from kvkeep.server.log_limits import StrangerLog
from kvkeep.server.movement import MOST_SILENCE_S, Movement
from kvkeep.server.quotas import QuotaFile, apply_kept
from kvkeep.server.scrub import Scrub, Scrubber
from kvkeep.server.service import Service
from kvkeep.server.settings import Settings
from kvkeep.server.startup import (
    allow_many_files,
    open_store,
    open_tiers,
    warn_of_disk,
    warn_of_small_pool,
)
from kvkeep.store.operators import clear
from kvkeep.store.plans import Limits
from kvkeep.store.store import OLD_SESSIONS, Store
from kvkeep.tiers.memory import Pool
from kvkeep.units import format_size
from kvkeep.wire.messages import PoolPlace, WireLimits
from kvkeep.wire.tls import tls_files

if TYPE_CHECKING:
    from kvkeep.wire.tracing import Tracing

log = logging.getLogger(__name__)

SERVICE = "kvkeep-server"  # in traces, unless OTEL_SERVICE_NAME says otherwise

T = TypeVar("T")


class Daemon:
    """All that one server process has. `run` serves until `stop`; `close` removes what was made."""

    def __init__(self, settings: Settings, *, fresh: bool = False) -> None:
        self.settings = settings
        self.epoch = secrets.randbits(63)
        self.started = time.time()
        self.ready = threading.Event()
        self.degraded = ""  # why the pool is smaller than asked for, if it is
        self.lost = False  # the pool's lock file was removed: there are no hits any more
        self.http_address = ""
        self.last_turn = time.monotonic()
        self.busy_since: float | None = None  # when the turn began; None while the loop waits
        self._stopping = self._is_over = False
        self.tracing: Tracing | None = None
        if settings.tracing:
            from kvkeep.wire.tracing import Tracing

            self.tracing = Tracing(SERVICE)
        self.movement: Movement | None = None
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
            any_slab=settings.slab_size_is_auto,
        )
        warn_of_disk(settings.shm_dir)
        if settings.pool_size_is_auto:
            warn_of_small_pool(self.pool)
        if settings.pool_size_is_auto or settings.slab_size_is_auto:
            self.settings = replace(
                settings, pool_size=self.pool.pool_bytes, slab_size=self.pool.slab_bytes
            )
        try:
            self.store = self._make_store()
            if not self.pool.filled_bytes:
                # The first segment is there before an engine can connect, so that it can store.
                self.store.add_slabs(*self.pool.fill_next())
            self.service = self._make_service()
            self.movement = open_tiers(self.settings, self.pool, self.store, self.epoch)
            self.service.tiers = self.movement
            self.service.tracing = self.tracing
            self._listen()
        except BaseException:
            # guard: a server that does not start leaves nothing behind but the old pool
            self.close(keep=self.pool.is_left)
            raise

    def _listen(self) -> None:
        """Opens the address for engines. The loop waits for them, for its waker and for tiers."""
        settings = self.settings
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
        for descriptor in self.movement.filenos if self.movement else ():
            self._connections.also_wait_for(descriptor)
        if self.movement is not None:
            self.movement.started = self._connections.also_wait_for
            self.movement.tracing = self.tracing

    def run(self) -> None:
        """Serves until `stop` is called, then waits for loads and stores in progress."""
        scrub = Scrub(
            self.store, self.pool.segments, self.service.counters, self.warm_start.adoption.rows
        )
        self._scrubber = Scrubber(scrub, self.run_in_loop)
        self._scrubber.start()
        self._filler = threading.Thread(target=self._fill_pool, name="kvkeep-fill", daemon=True)
        self._filler.start()
        gc.collect()
        gc.freeze()  # what exists at the start stays: no collection need look at it again
        size = format_size(self.pool.pool_bytes)
        log.info("serving on %s, pool %s in %s", self.address, size, self.pool.directory)
        while not self._stopping:
            self._turn(self.settings.session_check_interval)
        self.service.draining = True
        if self.movement is not None:
            self.movement.prefetches.cancel_all()
            self.movement.cancel_verification()
        deadline = time.monotonic() + self.settings.shutdown_grace
        while time.monotonic() < deadline and self._is_in_use():
            self._turn(0.05)
        # Requests that arrived meanwhile, by sockets and by HTTP, are answered.
        self._connections.wait(0)
        self._connections.serve(self._answer)
        self._is_over = True
        while not self._duties.empty():
            self._duties.get()()
        log.info("stopped")

    def stop(self) -> None:
        """Asks the loop to end. Safe from a signal handler and from any thread."""
        self._stopping = True
        self._wake_loop()

    @property
    def stopping(self) -> bool:
        """Whether the server was asked to stop and accepts no new sessions."""
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
                # guard: it is raised where the result is awaited
                future.set_exception(error)

        self._duties.put(carry_out)
        self._wake_loop()
        if self._is_over:
            future.cancel()  # the loop will not carry it out
        return future

    def do_in_loop(self, duty: Callable[[], object]) -> None:
        """The same where no caller awaits the result: a fault is counted and logged."""

        def look(future: Future[object]) -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                self.service.counters.internal_errors += 1
                log.error("background task failed", exc_info=error)

        self.run_in_loop(duty).add_done_callback(look)

    def close(self, *, keep: bool = False) -> None:
        """Closes sockets and removes the pool; with `keep`, leaves a pool that has blocks to the
        next server."""
        self._stopping = True
        if self._scrubber is not None:
            self._scrubber.stop()
        if self._filler is not None:
            self._filler.join()  # before the pool's directory is removed
        if self.movement is not None:
            self.movement.close(self.now_ms())
        if hasattr(self, "_listeners"):
            self._listeners.close()
        if hasattr(self, "_connections"):
            self._connections.close()
        if self.tracing is not None:
            self.tracing.close()
        if hasattr(self, "_wake"):
            self._wake.close()
            self._waker.close()
        blocks = len(self.store.blocks.table) if hasattr(self, "store") else None
        keep = keep and self.pool.is_kept and blocks != 0
        if keep and hasattr(self, "service"):
            self.service.sessions.leave_all()
            text = "%d blocks stay in %s for the next server; `rm -r %s` removes them"
            log.info(text, blocks, self.pool.directory, self.pool.directory)
        if not keep:
            if blocks:
                log.info("%d blocks are removed; SIGTERM and `kvkeep drain` keep them", blocks)
            self.pool.leave_nothing()
        for session in self.service.sessions.all() if hasattr(self, "service") else []:
            self.service.sessions.remove(session)
        self.pool.close(keep=keep)

    def clear(self, tenant: str) -> int:
        """Takes all blocks of a tenant out of use, in memory and on disk. Returns how many there
        were in memory, or on disk if those are more. For the loop's thread."""
        on_disk = self.movement.clear(tenant) if self.movement is not None else 0
        if self.store.tenants.get(tenant) is None and (on_disk or self._has_shared_tier):
            return on_disk  # memory does not know the tenant any more
        return max(on_disk, clear(self.store, tenant))

    @property
    def _has_shared_tier(self) -> bool:
        return any(tier.is_shared for tier in self.settings.tier)

    def now_ms(self) -> int:
        return int(time.monotonic() * 1000)

    # -- the loop

    def _turn(self, timeout_s: float) -> None:
        """Waits for something to do, does it, and now and then looks for dead sessions."""
        now = time.monotonic()
        due = self.last_turn + self.settings.session_check_interval
        if self.movement is not None:  # no wait while it has to do: requests come in between
            timeout_s = 0.0 if self.movement.has_to_do else min(timeout_s, MOST_SILENCE_S)
        self.busy_since = None
        others = self._connections.wait(max(0.0, min(timeout_s, due - now)))
        self.busy_since = time.monotonic()
        self._connections.serve(self._answer)
        if self._waker.fileno() in others:
            self._waker.recv(4096)
        if self.movement is not None:
            self.movement.turn(self.now_ms())
        if self.store.has_to_tidy:
            self.do_in_loop(lambda: self.store.tidy(self.now_ms()))
        for _ in range(self._duties.qsize()):  # later ones wait until engines have been served
            self._duties.get()()
        if time.monotonic() >= due:
            if self.authority.reload():
                self._connections.check_certificates()
                if self.authority.callers is not None:
                    self.service.bar(self.authority.callers, self.now_ms())
            self.service.end_dead_sessions(self.now_ms())
            self._connections.tend(self.service.sessions.is_on)
            self._check_lock()
            self.last_turn = time.monotonic()
        took_us = (time.monotonic() - self.busy_since) * 1e6
        self.service.counters.turns.add(took_us)
        if self.service.recorder is not None:
            self.service.recorder.note_turn(self.now_ms(), took_us)

    def _answer(self, frames: list[bytes], caller: Caller, peer: int) -> list[Any] | None:
        return self.service.handle(frames, self.now_ms(), caller, peer)

    def _check_lock(self) -> None:
        """Without its lock file other servers take this one for dead and the pool for deserted, so
        it stops admitting."""
        if not self.lost and self.pool.is_unlocked():
            self.lost = self.service.draining = True
            log.error(
                "the lock file in %s was removed: this server finds and stores nothing more; "
                "restart it",
                self.pool.directory,
            )

    def _is_in_use(self) -> bool:
        """Whether a session of this server reads or writes. Those of an old server are not waited
        for: the next server does not touch what they hold either."""
        if self.movement is not None and self.movement.has_to_do:
            return True  # blocks are on their way to a disk
        return any(
            held.writes or held.leases
            for number, held in self.store.sessions.items()
            if number != OLD_SESSIONS
        )

    def _wake_loop(self) -> None:
        """Ends the loop's wait. A full buffer wakes it as well."""
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
        size_bytes = sum(tier.size_bytes for tier in self.settings.tier)
        on_disk = None if self._has_shared_tier else size_bytes
        store, self.warm_start = open_store(self.pool, limits, self.now_ms(), on_disk)
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
