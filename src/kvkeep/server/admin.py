"""What operators ask for and change while the server runs.

Called from any thread but the loop's. What touches the store runs in the loop's thread, in short
pieces, and is waited for with a limit; files are written in the caller's thread, so that a slow
disk delays no engine."""

from __future__ import annotations

import contextlib
import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from kvkeep.errors import RequestError
from kvkeep.kv.identity import check_tenant
from kvkeep.server.clearing import Clearing
from kvkeep.server.daemon import Daemon
from kvkeep.server.explain import RequestShown
from kvkeep.server.lower_tier import TierShown
from kvkeep.server.movement import Movement
from kvkeep.server.prefetches import PrefetchShown
from kvkeep.server.quotas import KeptQuotas
from kvkeep.server.recording import STOPPED, Recorder, Taken, check_wanted
from kvkeep.server.settings import TABLE, Settings, SettingShown
from kvkeep.server.status import (
    Snapshot,
    Status,
    TenantShown,
    take,
    tenant_shown,
    tenants_shown,
)
from kvkeep.server.verification import VerificationShown
from kvkeep.store.operators import (
    check_default_limit,
    check_default_quota,
    check_limit,
    check_quota,
    set_default_limit,
    set_default_quota,
    set_limit,
    set_quota,
)
from kvkeep.store.store import Store
from kvkeep.store.tenants import Tenant
from kvkeep.units import format_size

log = logging.getLogger(__name__)

T = TypeVar("T")

_HOSTS_WAIT_S = 8.0  # for hosts that share a tier: more than it takes them to confirm a clear
LOOP_WAIT_S = 4.0  # less than our commands wait, so that they get this error
_TENANTS_SHOWN_A_TURN = 128
_LOOK_EVERY_S = 0.01


@dataclass(frozen=True)
class TenantList:
    """The largest tenants first. `total` counts those that were left out as well."""

    total: int
    tenants: list[TenantShown]


@dataclass(frozen=True)
class Drain:
    """A server that drains: what it waits for, how long at most, and what it will leave."""

    leases: int
    writes: int
    blocks: int
    grace_s: float
    keeps_pool: bool


class Admin:
    """One for each daemon: changes go one after the other."""

    def __init__(self, daemon: Daemon, loop_wait_s: float = LOOP_WAIT_S) -> None:
        self.daemon = daemon
        self._loop_wait_s = loop_wait_s
        self._changing = threading.Lock()

    def in_loop(self, duty: Callable[[], T]) -> T:
        """Runs `duty` in the loop's thread. `loop_busy` if it did not begin in time; it is cancelled
        then."""
        future = self.daemon.run_in_loop(duty)
        with contextlib.suppress(TimeoutError, CancelledError):
            return future.result(self._loop_wait_s)
        if future.cancel():
            raise RequestError(
                "loop_busy",
                f"the server's loop did not answer within {self._loop_wait_s:g} s; nothing was "
                "done",
                hint="try again; if that does not help, see the server's log",
            )
        try:
            return future.result(self._loop_wait_s)
        except TimeoutError:
            raise RequestError(
                "outcome_unknown",
                "the request is still being carried out",
                hint="ask for the status later",
            ) from None

    # -- asking

    def snapshot(self) -> Snapshot:
        return self.in_loop(lambda: take(self.daemon))

    def status(self) -> Status:
        return self.snapshot().status

    def tenants(self, limit: int) -> TenantList:
        """Ranks tenants in the caller's thread and reads a few at a time: there may be 100,000."""
        store, counts = self.daemon.store, self.daemon.service.counters.tenants
        tenants = self.in_loop(lambda: list(store.tenants))
        largest = heapq.nlargest(limit, tenants, key=attrgetter("usage_bytes"))
        shown: list[TenantShown] = []
        for at in range(0, len(largest), _TENANTS_SHOWN_A_TURN):
            some = largest[at : at + _TENANTS_SHOWN_A_TURN]
            shown += self.in_loop(partial(tenants_shown, some, counts))
        return TenantList(len(tenants), shown)

    def tenant(self, tenant: str) -> TenantShown:
        _check_tenant(tenant)
        store, counts = self.daemon.store, self.daemon.service.counters.tenants
        return self.in_loop(lambda: tenant_shown(_known(store, tenant), counts))

    def tiers(self) -> list[TierShown]:
        movement = self.daemon.movement
        return self.in_loop(movement.shown) if movement is not None else []

    def prefetches(self) -> list[PrefetchShown]:
        movement = self.daemon.movement
        return self.in_loop(movement.prefetches.shown) if movement is not None else []

    def last_requests(self, most: int) -> list[RequestShown]:
        explanations = self.daemon.service.explanations
        return self.in_loop(lambda: explanations.last(most))

    def explain(self, request: str) -> list[RequestShown]:
        explanations = self.daemon.service.explanations
        return self.in_loop(lambda: [explanations.find(request)])

    def settings(self) -> list[SettingShown]:
        return self.daemon.settings.describe()

    # -- recording

    def record(self, seconds: float, most_bytes: int) -> int:
        """Begins to record requests. Returns the number by which the recording is taken."""
        check_wanted(seconds, most_bytes)
        daemon, kept = self.daemon, self.daemon.kept_quotas

        def begin() -> Recorder:
            service, now_ms = daemon.service, daemon.now_ms()
            if service.recorder is not None and not service.recorder.is_over(now_ms):
                raise RequestError(
                    "recording",
                    "another `kvkeep record` records this server's requests",
                    hint="wait until it has ended; one that was killed ends after 10 seconds",
                )
            sessions = service.sessions.all()
            service.recorder = Recorder(daemon.store, sessions, kept, seconds, most_bytes, now_ms)
            return service.recorder

        recorder = self.in_loop(begin)
        log.info("recording requests for %g s: an operator asked for it", seconds)
        return recorder.number

    def take_recorded(self, number: int) -> Taken:
        """The next lines of a recording. With its last ones the server forgets it."""
        recorder = self._recorder(number)
        taken = recorder.describe(self.in_loop(lambda: recorder.collect(self.daemon.now_ms())))
        if taken.ended:
            self.in_loop(lambda: self._forget(recorder))
            log.info("the recording of requests has ended: %s", taken.ended)
        return taken

    def stop_recording(self, number: int) -> None:
        """What waits can still be taken."""
        recorder = self._recorder(number)
        self.in_loop(lambda: recorder.end(STOPPED))

    def _recorder(self, number: int) -> Recorder:
        recorder = self.daemon.service.recorder
        if recorder is None or recorder.number != number:
            raise RequestError(
                "unknown_recording", "there is no such recording; it has ended, or was not taken"
            )
        return recorder

    def _forget(self, recorder: Recorder) -> None:
        if self.daemon.service.recorder is recorder:
            self.daemon.service.recorder = None

    # -- changing

    def set_quota(self, tenant: str, quota_bytes: int | None) -> None:
        """Gives a tenant a quota of its own, or with None the default again. Saved before it takes
        effect."""
        self._set_own("quota", "tenants", tenant, quota_bytes, check_quota, set_quota)

    def set_limit(self, tenant: str, limit_bytes: int | None) -> None:
        """Gives a tenant a limit of its own, or with None the default again. Saved before it takes
        effect, and in effect before the blocks beyond it are evicted, a few at a time, even if the
        caller no longer waits."""
        self._set_own("limit", "limits", tenant, limit_bytes, check_limit, set_limit)

    def _set_own(
        self,
        what: str,
        kept_in: str,
        tenant: str,
        nbytes: int | None,
        check: Callable[[Store, str, int | None], None],
        put_in_force: Callable[[Store, str, int | None, int], object],
    ) -> None:
        """`kept_in` is the field of KeptQuotas."""
        _check_tenant(tenant)
        store, now_ms = self.daemon.store, self.daemon.now_ms()
        with self._one_change_at_a_time():
            self.in_loop(lambda: check(store, tenant, nbytes))
            before = self.daemon.kept_quotas
            own = {name: each for name, each in getattr(before, kept_in).items() if name != tenant}
            own |= {} if nbytes is None else {tenant: nbytes}
            changed: dict[str, Any] = {kept_in: own}
            with self._saved(replace(before, **changed)):
                self.in_loop(lambda: put_in_force(store, tenant, nbytes, now_ms))
            self._follow([tenant])
            self._tidy()
        shown = "the default" if nbytes is None else format_size(nbytes)
        log.info("%s of tenant %s: %s", what, tenant, shown)

    def change_settings(self, changes: Mapping[str, str]) -> list[SettingShown]:
        """Changes live settings, all or none. Default quota and limit are saved like a tenant's;
        others last until the server stops."""
        store = self.daemon.store
        with self._one_change_at_a_time():
            changed, kept = self.daemon.settings.changed(changes), self.daemon.kept_quotas
            if "default_quota" in changes:
                self.in_loop(lambda: check_default_quota(store, changed.default_quota))
                kept = replace(kept, default_set=True, default_bytes=changed.default_quota)
            if "default_limit" in changes:
                self.in_loop(lambda: check_default_limit(store, changed.default_limit))
                kept = replace(
                    kept, default_limit_set=True, default_limit_bytes=changed.default_limit
                )
            with self._saved(kept) if kept != self.daemon.kept_quotas else contextlib.nullcontext():
                self.in_loop(lambda: self._put_in_force(changed))
            self._follow([])
            self._tidy()
        for name in changes:
            log.info("%s = %s", name, TABLE[name].kind.show(getattr(changed, name)))
        return self.settings()

    def prefetch(self, tenant: str, most_bytes: int | None) -> PrefetchShown:
        """Begins to bring the blocks that a tenant used last from disks to memory."""
        _check_tenant(tenant)
        prefetches = self._movement().prefetches
        begun = self.in_loop(lambda: replace(prefetches.begin(tenant, most_bytes)))
        log.info("prefetch %d of tenant %s: an operator asked for it", begun.number, tenant)
        return begun

    def cancel_prefetch(self, number: int) -> PrefetchShown:
        prefetches = self._movement().prefetches
        return self.in_loop(lambda: replace(prefetches.cancel(number)))

    def cancel_prefetches(self) -> int:
        """Cancels all, those of engines too. Returns how many of operators ran."""
        return self.in_loop(self._movement().prefetches.cancel_all)

    def verify(self) -> list[VerificationShown]:
        """Begins to check all blocks on disks, or continues what has begun."""
        begun = self.in_loop(self._movement().begin_verification)
        log.info("verifying all blocks on disks: an operator asked for it")
        return begun

    def verifications(self) -> list[VerificationShown]:
        movement = self.daemon.movement
        return self.in_loop(movement.verifications) if movement is not None else []

    def cancel_verifications(self) -> list[VerificationShown]:
        return self.in_loop(self._movement().cancel_verification)

    def drain(self) -> Drain:
        """Stops the server: it admits nothing more, and ends with its last lease and write, or when
        its grace is over."""
        now, settings = self.status(), self.daemon.settings  # first: the loop may end at once
        log.info("draining: an operator asked for it")
        self.daemon.stop()
        blocks = now.pool.blocks["ready"]
        return Drain(now.leases, now.writes, blocks, settings.shutdown_grace, settings.keep_pool)

    def clear(self, tenant: str) -> int:
        """Takes all blocks that the tenant has now out of use at once, then frees their memory.
        Returns how many."""
        _check_tenant(tenant)
        try:
            dropped = self.in_loop(lambda: self.daemon.clear(tenant))
        except RequestError:
            self._check_that_disks_clear()  # one that is set aside may know the tenant
            raise
        self._tidy()
        self._wait_for_clears()
        log.info("cleared %d blocks of tenant %s", dropped, tenant)
        return dropped

    def clear_all(self) -> int:
        """Takes all blocks out of use. Returns how many there were in memory, or on disks if those
        are more."""
        store, movement = self.daemon.store, self.daemon.movement
        clearing = self.in_loop(movement.clear_all if movement else partial(Clearing, store))
        while self.in_loop(clearing.turn):
            pass
        dropped = max(clearing.in_memory, clearing.on_disks)
        self._tidy()
        self._wait_for_clears()
        log.info("cleared all %d blocks", dropped)
        return dropped

    def unreached(self) -> list[str]:
        """Other hosts that have not carried out the last clear."""
        movement = self.daemon.movement
        return self.in_loop(lambda: movement.unreached) if movement is not None else []

    # -- inside

    def _movement(self) -> Movement:
        """Of a server that has disks, perhaps set aside: a shared tier does not tell what it has."""
        movement = self.daemon.movement
        if movement is None or all(tier.is_shared for tier in self.daemon.settings.tier):
            raise RequestError(
                "no_tiers",
                "the server has no disk below memory",
                hint="start it with --tier 'disk:///path?size=200GiB'",
            )
        return movement

    def _follow(self, tenants: Sequence[str]) -> None:
        """Puts changed quotas and limits in force on disks."""
        if (movement := self.daemon.movement) is not None:
            self.in_loop(lambda: movement.follow_quotas(tenants))

    def _tidy(self) -> None:
        """Completes what a change has begun, in pieces between engines' requests."""
        store = self.daemon.store
        while self.in_loop(lambda: store.tidy(self.daemon.now_ms())):
            pass

    def _wait_for_clears(self) -> None:
        """Waits until neither a restart nor another host can bring back what was cleared."""
        self._check_that_disks_clear()
        movement = self.daemon.movement
        deadline = time.monotonic() + self._loop_wait_s + _HOSTS_WAIT_S
        while movement is not None and self.in_loop(lambda: movement.is_clearing):
            if time.monotonic() > deadline:
                raise RequestError(
                    "outcome_unknown",
                    "the blocks are out of use here, but a tier has not confirmed it: they could "
                    "come back with a restart, or be used by other hosts",
                    hint="see `kvkeep tiers`; clear again when the tier answers, or after a restart",
                )
            time.sleep(_LOOK_EVERY_S)

    def _check_that_disks_clear(self) -> None:
        movement = self.daemon.movement
        if movement is not None and (names := self.in_loop(lambda: movement.not_clearable)):
            raise RequestError(
                "outcome_unknown",
                f"the blocks are out of use, but a disk is set aside ({', '.join(names)}): its "
                "blocks could come back with a restart",
                hint="clear again when a server uses that disk, or remove its directory",
            )

    def _put_in_force(self, changed: Settings) -> None:
        daemon = self.daemon
        if changed.default_quota != daemon.settings.default_quota:
            set_default_quota(daemon.store, changed.default_quota, daemon.now_ms())
        if changed.default_limit != daemon.settings.default_limit:
            set_default_limit(daemon.store, changed.default_limit, daemon.now_ms())
        daemon.service.verify = changed.verify
        logging.getLogger("kvkeep").setLevel(changed.log_level.upper())
        daemon.settings = changed

    @contextlib.contextmanager
    def _one_change_at_a_time(self) -> Iterator[None]:
        if not self._changing.acquire(timeout=self._loop_wait_s):
            raise RequestError("loop_busy", "another change is being saved", hint="try again")
        try:
            yield
        finally:
            self._changing.release()

    @contextlib.contextmanager
    def _saved(self, kept: KeptQuotas) -> Iterator[None]:
        """Saves `kept` before the body puts it in force, and restores the file if the body fails."""
        before = self.daemon.kept_quotas
        try:
            self.daemon.quotas.save(kept)
        except OSError as error:
            raise RequestError(
                "not_saved",
                f"{self.daemon.quotas.path} cannot be written: {error.strerror}; nothing was "
                "changed",
                hint="check that --state-dir can be written and has room",
            ) from error
        try:
            yield
        except RequestError as error:
            if error.code != "outcome_unknown":
                self.daemon.quotas.save(before)
            else:  # it is being put in force, and the next change must not take it back
                self.daemon.kept_quotas = kept
            raise
        self.daemon.kept_quotas = kept


def _check_tenant(tenant: str) -> None:
    check_tenant(tenant, "`kvkeep tenants id` makes it from a salt")


def _known(store: Store, tenant: str) -> Tenant:
    check_quota(store, tenant, None)  # raises unknown_tenant
    owner = store.tenants.get(tenant)
    assert owner is not None
    return owner
