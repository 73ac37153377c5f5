"""A request in, a reply out: the daemon's logic, without sockets, threads or a clock of its own.

Every request gets exactly one reply; bytes that are not a message get none. A fault of ours is
answered too, counted and logged: it must neither stop the server nor leave an engine waiting."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from kvkeep import __version__
from kvkeep.errors import ProtocolError, RequestError
from kvkeep.kv.checksum import ABSENT, has_checksum
from kvkeep.kv.identity import check_tenant
from kvkeep.kv.keys import KEY_BYTES, addresses
from kvkeep.kv.shape import DIGEST_CHARS
from kvkeep.server import network
from kvkeep.server.attribution import Attribution
from kvkeep.server.auth import ANYONE, Caller
from kvkeep.server.counters import Counters
from kvkeep.server.explain import Explanations, printable
from kvkeep.server.figures import Figures, plausible
from kvkeep.server.limits import NO_LIMITS, ClientLimits, Paces, check_sessions, client_of
from kvkeep.server.log_limits import LineLimit
from kvkeep.server.pool_events import PoolEvents
from kvkeep.server.recording import Recorder
from kvkeep.server.request_spans import trace_request
from kvkeep.server.sessions import (
    NetworkLease,
    NetworkWrite,
    ServerSession,
    Sessions,
    nearest_difference,
)
from kvkeep.store.store import OLD_SESSIONS, Store
from kvkeep.store.table import NO_ROW, READY
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, decode_request, encode
from kvkeep.wire.pool_files import Watch

if TYPE_CHECKING:
    from kvkeep.wire.tracing import Tracing

log = logging.getLogger(__name__)

FINGERPRINT_BYTES = 16
_KEYS_EXPLAINED = 8192  # of the reports of one message: three milliseconds
LINES_A_MINUTE = 30  # that one client can cause; further ones are logged at level debug
_LOGGED_CHARS = 120  # of a text that a client chose
_MESSAGE_CHARS = 1_000  # of a refusal, which may quote the request


_NAMES_TENANT = m.Lookup | m.Prefetch | m.Finish | m.PrepareStore | m.ReportBad | m.DescribeBlocks

_NOT_RECORDED = m.DescribeBlocks | m.PoolEvents  # prompts and salts, and questions about them


class Tiers(Protocol):
    """What the service asks of the tiers below memory. No call waits for I/O."""

    def coming(
        self,
        session: int,
        tenant: str,
        layout: int,
        keys: bytes,
        hit_blocks: int,
        patience_ms: int,
        now_ms: int,
        again: bool,
        trace: str = "",
    ) -> tuple[int, int]:
        """Begins to bring up what a tier has of these blocks (the store's addresses) after the
        first `hit_blocks`, which are in memory. Returns how many of them are coming, and in how
        many milliseconds the last is expected; (0, 0) if none are. `again`: a client that waits
        asks once more. `trace`: the span that waits."""

    def orders(self, fingerprint: bytes) -> dict[int, bytes]:
        """How the tiers' blocks of this layout order their bytes: shard -> digest."""

    def stored(self, row: int, blocks: int) -> None:
        """Notes that an engine has stored the last `blocks` blocks of the chain that ends in
        `row`."""

    def prefetch(self, session: int, tenant: str, layout: int, keys: bytes, now_ms: int) -> int:
        """Begins to bring up all that a tier has of these blocks and memory lacks. Returns how many
        blocks are coming; those that were under way already count too."""

    def stores(self) -> list[Store]:
        """The indexes of the disks that are in use."""


class Service:
    """The protocol's server side over a store and its memory. `tiers` is set by a server that has
    any, and `tracing` by one that exports spans, before its first session."""

    def __init__(
        self,
        store: Store,
        memory: network.PoolMemory,
        place: m.PoolPlace,
        limits: m.WireLimits,
        epoch: int,
        make_watch: Callable[[int], Watch | None],
        network_timeout_ms: int = 30_000,
        verify: bool = True,
        client_limits: ClientLimits = NO_LIMITS,
        old_sessions: Callable[[], int] = lambda: 0,
        network_lease_ms: int = 60_000,
    ) -> None:
        self.store = store
        self.sessions = Sessions()
        self.counters = Counters()
        self.attribution = Attribution(store)
        self.explanations = Explanations(self.attribution)
        self.epoch = epoch
        self.verify = verify
        self.tiers: Tiers | None = None
        self.layout_models: dict[bytes, str] = {}  # by fingerprint: under which name a model counts
        self.recorder: Recorder | None = None  # while an operator records requests
        self.tracing: Tracing | None = None
        self.draining = False
        self.events: PoolEvents | None = None  # nothing is kept before an engine asks
        self._memory = memory
        self._place = place
        self._limits = limits
        self._make_watch = make_watch
        self._network_timeout_ms = network_timeout_ms
        self._network_lease_ms = network_lease_ms
        self._client_limits = client_limits
        self._paces = Paces(client_limits)
        self._old_sessions = old_sessions
        self._lines = LineLimit(LINES_A_MINUTE)
        self._handlers: dict[type, Callable[..., m.Reply]] = {
            m.Attach: self._attach,
            m.Ping: lambda *_: m.Done(),
            m.OpenLayout: self._open_layout,
            m.Lookup: self._lookup,
            m.Prefetch: self._prefetch,
            m.Release: self._release,
            m.ReportRequests: self._report,
            m.Finish: self._finish,
            m.PrepareStore: self._prepare_store,
            m.CompleteStore: self._complete_store,
            m.AbandonStore: self._abandon_store,
            m.ReportBad: self._report_bad,
            m.DescribeBlocks: self._describe,
            m.Goodbye: self._goodbye,
        }

    def handle(
        self, frames: Sequence[bytes], now_ms: int, caller: Caller = ANYONE, peer: int = 0
    ) -> list[Any] | None:
        """Carries out one request of the caller on the connection `peer`. Returns the frames of the
        reply."""
        started = time.perf_counter()
        try:
            header = decode_header(frames)
        except ProtocolError:
            self.counters.bad_frames += 1
            return None
        payload: list[bytes] = []
        kind = "unreadable"
        request: m.Request | None = None
        reply: m.Reply
        try:
            request = decode_request(header, frames, self._limits.frame_bytes)
            kind = type(request).__name__
            reply, payload = self._answer(header, request, frames[2:], now_ms, caller, peer)
        except RequestError as error:
            self.counters.refuse(error.code)
            reply = m.Refused(error.code, error.message[:_MESSAGE_CHARS], error.field, error.hint)
        except Exception:
            # guard: a fault of ours in one request must neither end the server nor go unanswered
            self.counters.internal_errors += 1
            self.counters.refuse("internal_error")
            log.exception("a %s request failed inside the server", kind)
            reply = m.Refused(
                "internal_error", "the server failed on this request", hint="see the server's log"
            )
        took_us = (time.perf_counter() - started) * 1e6
        self.counters.latency[kind].add(took_us)
        if self.tracing is not None:
            trace_request(self.tracing, request, reply, took_us)
        encoded = encode(Header(header.session, header.number), reply, payload)
        is_recorded = request is not None and not isinstance(request, _NOT_RECORDED)
        if self.recorder is not None and is_recorded:
            nbytes = len(frames[1]) + len(encoded[1])
            self.recorder.note(
                now_ms, header.session, header.number, request, reply, took_us, nbytes
            )
        return encoded

    def end_dead_sessions(self, now_ms: int) -> int:
        """Releases what dead processes held. Returns how many died."""
        died = 0
        for session in self.sessions.all():
            try:
                if session.is_gone(now_ms, self._network_timeout_ms):
                    self._lose(session, now_ms)
                    died += 1
                    continue
                oldest_ms = now_ms - self._network_lease_ms
                if ended := network.end_aged(session, self.store, oldest_ms, now_ms):
                    self.counters.expired_leases += ended
                    text = f"held {ended} leases and writes too long; they are ended"
                    self._log(logging.WARNING, session, text, now_ms)
            except Exception:
                # guard: a fault with one session must neither end the server nor keep the others
                self.counters.internal_errors += 1
                log.exception("session %d (%s, pid %d) could not be checked", *_names(session))
        if OLD_SESSIONS in self.store.sessions and not self._old_sessions():
            log.info("the last process of the old server is gone; the blocks it held are free")
            self.store.close_session(OLD_SESSIONS, now_ms)
        return died

    def _lose(self, session: ServerSession, now_ms: int) -> None:
        """Ends a session without Goodbye. One that held nothing may be of an engine that stopped in
        order: vLLM kills its own processes then."""
        held = self.store.sessions[session.number]
        if held.leases or held.writes:
            text = f"died; its {len(held.leases)} leases and {len(held.writes)} writes are free"
            self._log(logging.WARNING, session, text, now_ms)
            self.counters.sessions_died += 1
        else:
            self._log(logging.INFO, session, "is gone; it held nothing", now_ms)
            self.counters.sessions_vanished += 1
        self._end(session, now_ms)

    def bar(self, authorized: Container[str], now_ms: int) -> None:
        """Ends the sessions of keys that are no longer authorized. A process that has the pool
        mapped cannot be made to unmap it: its requests are refused, but its slots stay its own
        until the process is gone."""
        for session in self.sessions.all():
            if not session.key or session.key in authorized:
                continue
            if session.plane != m.SHARED_MEMORY:
                self._end(session, now_ms)
            elif not self.sessions.bar(session):
                continue
            key = session.key[:_LOGGED_CHARS]
            log.warning(
                "session %d (%s, pid %d) ends: its certificate %s is not authorized now",
                *_names(session),
                key,
            )

    # -- sessions

    def _answer(
        self,
        header: Header,
        request: m.Request,
        payload: Sequence[bytes],
        now_ms: int,
        caller: Caller,
        peer: int,
    ) -> tuple[m.Reply, list[bytes]]:
        if isinstance(request, m.Hello):
            return self._hello(request, now_ms, caller, peer), []
        session = self.sessions.get(header.session, caller.key, peer)
        session.last_seen_ms = now_ms
        if not isinstance(request, m.Goodbye):  # which a session says once, and which frees
            session.pace.check_request(now_ms)
        if not session.plane and not isinstance(request, m.Attach | m.Ping | m.Goodbye):
            raise RequestError(
                "not_attached", "this session has not said Attach", hint="choose a data plane first"
            )
        if isinstance(request, m.Fetch):
            session.pace.check_network(now_ms)
            sent = network.fetch(session, request, self._memory, self._limits.frame_bytes, caller)
            nbytes = sum(map(len, sent))
            session.pace.count_network(nbytes)
            self.counters.network_bytes_out += nbytes
            return m.Done(len(sent)), sent
        if isinstance(request, m.PoolEvents):
            return self._pool_events(session, request, caller), []
        if isinstance(request, m.Put | m.CompleteStore) and request.write in session.write_tenants:
            caller.check_tenant(session.write_tenants[request.write])
        if isinstance(request, m.Put):
            session.pace.check_network(now_ms)
            nbytes = network.put(session, request, payload, self._memory)
            session.pace.count_network(nbytes)
            self.counters.network_bytes_in += nbytes
            return m.Done(len(payload)), []
        if isinstance(request, _NAMES_TENANT):
            _check_tenant(request.tenant)
            caller.check_tenant(request.tenant)
        if isinstance(request, m.ReportRequests):
            for each in request.requests:
                _check_tenant(each.tenant)
                caller.check_tenant(each.tenant)
        return self._handlers[type(request)](session, header.number, request, now_ms), []

    def _hello(self, request: m.Hello, now_ms: int, caller: Caller, peer: int) -> m.Welcome:
        if caller.revoked:
            raise RequestError(
                "revoked_key",
                "this client's certificate was revoked",
                hint="use a certificate that is in the server's authorized_clients",
            )
        if self.draining:
            raise RequestError(
                "shutting_down", "the server is shutting down", hint="connect to the next one"
            )
        client = client_of(caller.key, request.pid)
        pace = self._paces.begin(client, now_ms)
        number = self.sessions.next_number()
        try:
            check_sessions(self._client_limits, self.sessions.all(), caller.key, request.pid)
            self.store.open_session(number)
        except RequestError:
            self._paces.end(client, pace, now_ms)
            raise
        watch = None
        try:
            watch = self._make_watch(number)
        except OSError as error:
            # Without a lock there is no shared memory, but there is the network.
            if self._lines.allows(client, now_ms / 1000):
                text = "session %d gets no shared memory, its lock file cannot be made: %s"
                log.warning(text, number, error)
        name = printable(request.client[:_LOGGED_CHARS])
        session = self.sessions.add(
            number, name, request.pid, watch, now_ms, caller.key, pace, peer
        )
        self.counters.sessions_opened += 1
        lock = str(watch.path) if watch else ""
        return m.Welcome(
            session=session.token,
            epoch=self.epoch,
            server=f"kvkeep {__version__}",
            pool=msgspec.structs.replace(self._place, lock=lock),
            limits=self._limits,
            capabilities=self._capabilities(),
            verify=self.verify,
        )

    def _capabilities(self) -> list[str]:
        tiers = [m.TIERS] if self.tiers else []
        traces = [m.TRACES] if self.tracing else []
        return [*m.CAPABILITIES, *tiers, *traces]

    def _attach(
        self, session: ServerSession, number: int, request: m.Attach, now_ms: int
    ) -> m.Reply:
        if request.plane not in (m.SHARED_MEMORY, m.NETWORK):
            raise RequestError(
                "bad_plane", f"no data plane is called {request.plane!r}", field="plane"
            )
        if session.plane:
            raise RequestError(
                "attached", f"this session uses {session.plane} already", field="plane"
            )
        if request.plane == m.SHARED_MEMORY and not (session.watch and session.watch.is_held()):
            raise RequestError(
                "lock_not_held",
                "the session's lock is not held",
                field="plane",
                hint="take the lock before Attach",
            )
        session.plane = request.plane
        self._log(logging.INFO, session, "attached", now_ms)
        return m.Done()

    def _goodbye(
        self, session: ServerSession, number: int, request: m.Goodbye, now_ms: int
    ) -> m.Reply:
        self._log(logging.INFO, session, "ended", now_ms)
        self._end(session, now_ms)
        self.counters.sessions_ended += 1
        return m.Done()

    def _end(self, session: ServerSession, now_ms: int) -> None:
        if self.recorder is not None:
            self.recorder.note_end(now_ms, session.token)
        self.store.close_session(session.number, now_ms)
        self.sessions.remove(session)
        self._paces.end(session.owner, session.pace, now_ms)

    def _open_layout(
        self, session: ServerSession, number: int, request: m.OpenLayout, now_ms: int
    ) -> m.Reply:
        if len(request.fingerprint) != FINGERPRINT_BYTES:
            raise RequestError(
                "bad_fingerprint",
                f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(request.fingerprint)}",
                field="fingerprint",
            )
        largest = max(request.shard_bytes, default=0)
        if session.plane == m.NETWORK and largest > self._limits.frame_bytes:
            raise RequestError(
                "shard_too_large",
                f"a shard of {largest} bytes cannot cross the network in frames of "
                f"{self._limits.frame_bytes}",
                field="shard_bytes",
                hint="raise --max-frame-size, use fewer tokens a block, or run the engine on the "
                "server's host",
            )
        shard_bytes = tuple(request.shard_bytes)
        layout = self.store.open_layout(session.number, request.fingerprint, shard_bytes)
        if self.tiers is not None:
            self.store.layouts.inherit(layout, self.tiers.orders(request.fingerprint))
        if request.physical:
            shards = (request.shard, *request.further_shards)
            self.store.layouts.agree(layout, shards, request.physical)
        session.layout = layout.number
        self._note_model(request)
        differs = self._introduce(session, request, now_ms)
        return m.LayoutOpened(layout.number, layout.slot_bytes, list(layout.shard_offsets), differs)

    def _note_model(self, request: m.OpenLayout) -> None:
        """Remembers whose the blocks of a layout are, as long as the layout is there."""
        there = {each.fingerprint for each in self.store.layouts}
        known = {each: name for each, name in self.layout_models.items() if each in there}
        if model := _model(request.parts):
            known[request.fingerprint] = self.counters.models.name_of(model)
        self.layout_models = known

    def _introduce(self, session: ServerSession, request: m.OpenLayout, now_ms: int) -> list[str]:
        """Records the session's identity. Returns which parts of it keep the session from sharing
        with the most similar engine of its model."""
        session.parts = {printable(name): printable(text) for name, text in request.parts.items()}
        session.role = printable(request.role)
        session.identity = request.fingerprint.hex()[:DIGEST_CHARS]
        differs = nearest_difference(session, self.sessions.all())
        role, model = session.role or "a client", session.parts.get("model", "unknown")
        text = f"is {role} of model {model[:_LOGGED_CHARS]}, identity {session.identity}"
        if differs:
            parts = ", ".join(differs)[:_LOGGED_CHARS]
            text += f"; other engines of that model do not share with it: {parts} differ"
        self._log(logging.INFO, session, text, now_ms)
        return differs

    def _log(self, level: int, session: ServerSession, text: str, now_ms: int) -> None:
        """Logs what a session did. A client causes at most LINES_A_MINUTE lines at that level."""
        if not self._lines.allows(session.owner, now_ms / 1000):
            level = logging.DEBUG
        log.log(level, "session %d (%s, pid %d) %s", *_names(session), text)

    # -- loads

    def _lookup(
        self, session: ServerSession, number: int, request: m.Lookup, now_ms: int
    ) -> m.Reply:
        store, layout, skip = self.store, request.layout, request.skip
        keys = self._addresses(layout, request.keys)
        is_explained = session.role == m.SCHEDULER
        if self.draining:
            if is_explained:
                session.missed.append((number, len(keys) // KEY_BYTES, -1, 0, 0, 0, now_ms))
            keys, skip = b"", 0
        withheld = store.withheld_blocks
        hit = store.lookup(session.number, number, request.tenant, layout, keys, skip, now_ms)
        slots = hit.slots.tobytes()
        if session.plane == m.NETWORK and slots:
            session.network_leases[number] = NetworkLease(
                store.layouts.get(layout), hit.slots, request.tenant, now_ms
            )
            slots = b""
        coming, again_ms = self._bring_up(session, request, keys, hit.blocks, now_ms)
        if is_explained and hit.blocks * KEY_BYTES < len(keys):
            known = self.attribution.known(request.tenant, keys, hit.blocks)
            withheld = store.withheld_blocks - withheld
            asked = len(keys) // KEY_BYTES
            session.missed.append((number, asked, hit.blocks, known, withheld, coming, now_ms))
        if not request.patience_ms > 0:
            coming = again_ms = 0  # the client may not know these fields
        self._count_lookup(request, hit.blocks, coming)
        return m.Found(hit.blocks, slots, hit.checksums.tobytes(), coming, again_ms)

    def _count_lookup(self, request: m.Lookup, hit_blocks: int, coming: int) -> None:
        """A question that is asked again is counted once. Blocks that are coming are no misses;
        they count as hits when they are found."""
        counters = self.counters
        if request.found_before >= 0:
            found = max(0, hit_blocks - request.found_before)
            counters.hit_blocks += found
            counters.tenants.count_more(request.tenant, found)
            return
        asked = len(request.keys) // KEY_BYTES
        counters.lookups += 1
        counters.lookup_blocks += asked
        counters.hit_blocks += hit_blocks
        missed = asked - hit_blocks - coming
        counters.tenants.count_lookup(request.tenant, hit_blocks, missed)

    def _bring_up(
        self, session: ServerSession, request: m.Lookup, keys: bytes, hit_blocks: int, now_ms: int
    ) -> tuple[int, int]:
        """What the tiers bring beyond the hit. A client without patience is not told: blocks come
        up for the next lookup."""
        if self.tiers is None or not keys:
            return 0, 0
        patience_ms = max(0, request.patience_ms)
        try:
            coming = self.tiers.coming(
                session.number,
                request.tenant,
                request.layout,
                keys,
                hit_blocks,
                patience_ms,
                now_ms,
                request.found_before >= 0,
                request.trace,
            )
        except Exception:
            # guard: the lease is given; a fault of a tier must not take the answer from memory
            self.counters.internal_errors += 1
            log.exception("the tiers failed on a lookup; it is answered from memory")
            return 0, 0
        blocks, again_ms = coming
        most = len(keys) // KEY_BYTES - hit_blocks
        return (min(blocks, most), again_ms) if blocks > 0 else (0, 0)

    def _prefetch(
        self, session: ServerSession, number: int, request: m.Prefetch, now_ms: int
    ) -> m.Reply:
        keys = self._addresses(request.layout, request.keys)
        self.store.check_keys(keys)
        if self.tiers is None or self.draining:
            return m.Done()
        tenant, layout = request.tenant, request.layout
        return m.Done(self.tiers.prefetch(session.number, tenant, layout, keys, now_ms))

    def _release(
        self, session: ServerSession, number: int, request: m.Release, now_ms: int
    ) -> m.Reply:
        loaded: dict[str, int] = {}
        tokens = dict(zip(request.leases, request.loaded_tokens, strict=False))
        for lease, count in tokens.items():
            if count and (tenant := self.store.tenant_of_lease(session.number, lease)):
                loaded[tenant] = loaded.get(tenant, 0) + plausible(count)
        for lease in request.leases:
            session.network_leases.pop(lease, None)
        released = self.store.release_all(session.number, request.leases, now_ms)
        for tenant, count in loaded.items():
            for figures in self._figures(session):
                figures.loaded_tokens += count
            self.counters.tenants.count_loaded(tenant, count)
        return m.Done(len(released))

    def _figures(self, session: ServerSession) -> tuple[Figures, ...]:
        """Where to count what an engine loaded and computed, but for its tenants."""
        return self.counters, self.counters.models.of(_model(session.parts)), session.figures

    def _report(
        self, session: ServerSession, number: int, request: m.ReportRequests, now_ms: int
    ) -> m.Reply:
        places = self._figures(session)
        named = {lookup for report in request.requests for lookup in report.lookups}
        missed = {each[0]: each for each in session.missed if each[0] in named}
        left = _KEYS_EXPLAINED
        for report in request.requests:
            for figures in places:
                figures.count_report(report)
            self.counters.tenants.count_report(report)
            self.store.check_keys(report.keys)
            keys = report.keys[: left // max(1, len(report.lookups)) * KEY_BYTES]
            left -= len(keys) // KEY_BYTES * len(report.lookups)
            keys = self._addresses(session.layout, keys) if keys else b""
            shown = self.explanations.add(session, report, missed, keys, time.time())
            if log.isEnabledFor(logging.DEBUG):
                text = "request %s of tenant %s in session %d (%s, pid %d): %s"
                log.debug(text, shown.request, report.tenant, *_names(session), shown.text)
        return m.Done(len(request.requests))

    def _finish(
        self, session: ServerSession, number: int, request: m.Finish, now_ms: int
    ) -> m.Reply:
        address = self._addresses(request.layout, request.key)
        return m.Done(int(self.store.finish(session.number, request.tenant, address, now_ms)))

    def _report_bad(
        self, session: ServerSession, number: int, request: m.ReportBad, now_ms: int
    ) -> m.Reply:
        """Checks the block here: a client with bad memory must not cost others a good block."""
        tenant = self.store.tenants.get(request.tenant)
        table, address = self.store.blocks.table, self._addresses(request.layout, request.key)
        row = tenant.index.get(address) if tenant else NO_ROW
        if row == NO_ROW or table.state[row] != READY:
            self.counters.fail_load("gone")
            return m.Done(0)
        layout = self.store.layouts[table.layout[row]]
        for shard, expected in enumerate(layout.checks[table.check[row]].tolist()):
            if expected == ABSENT:
                continue
            area = self._memory.view(
                table.slot[row] + layout.shard_offsets[shard], layout.shard_bytes[shard]
            )
            if has_checksum(area, expected):
                continue
            text = "a block of tenant %s does not match its checksum; it is dropped"
            if expected:
                self.counters.bad_blocks += 1
                self.counters.fail_load("bad_in_pool")
                log.error(text, request.tenant)
            else:  # not bad, but useless to a client that verifies
                text = "a block of tenant %s was stored without a checksum; it is dropped"
                log.info(text, request.tenant)
            return m.Done(self.store.drop_blocks(request.tenant, [address]))
        self.counters.fail_load("bad_in_engine")
        return m.Done(0)

    # -- stores

    def _prepare_store(
        self, session: ServerSession, number: int, request: m.PrepareStore, now_ms: int
    ) -> m.Reply:
        if self.draining:
            raise RequestError(
                "shutting_down", "the server is shutting down and stores nothing more"
            )
        plan = self.store.prepare_store(
            session.number,
            number,
            request.tenant,
            request.layout,
            request.shard,
            self._addresses(request.layout, request.parent),
            self._addresses(request.layout, request.keys),
            now_ms,
            request.priority,
            request.ttl_ms,
            request.further_shards,
        )
        self.counters.refused_blocks += plan.refused
        self.counters.orphan_blocks += plan.refused if plan.orphan else 0
        slots = plan.slots.tobytes()
        if slots:
            session.write_tenants[number] = request.tenant
        if session.plane == m.NETWORK and slots:
            layout = self.store.layouts.get(request.layout)
            shards = (request.shard, *request.further_shards)
            arrived = np.zeros((len(plan.slots), len(shards)), dtype=np.bool_)
            checksums = np.zeros((len(plan.slots), len(shards)), dtype=np.uint64)
            session.network_writes[number] = NetworkWrite(
                layout, shards, plan.slots, arrived, checksums, now_ms
            )
            slots = b""
        return m.Prepared(
            plan.positions.tobytes(), slots, plan.refused, plan.orphan, apart=plan.apart
        )

    def _complete_store(
        self, session: ServerSession, number: int, request: m.CompleteStore, now_ms: int
    ) -> m.Reply:
        if len(request.checksums) % 8:
            raise RequestError("bad_checksums", "checksums are 8 bytes each", field="checksums")
        checksums = np.frombuffer(request.checksums, dtype="<u8")
        if session.plane == m.NETWORK:
            network.check_arrived(session, request.write, checksums)
        stored = self.store.complete_store(session.number, request.write, checksums, now_ms)
        session.network_writes.pop(request.write, None)
        session.write_tenants.pop(request.write, None)
        self.counters.stored_blocks += stored.blocks
        self.counters.stored_bytes += stored.nbytes
        if self.tiers is not None:
            self.tiers.stored(stored.last_row, stored.blocks)
        return m.Done(stored.blocks)

    def _abandon_store(
        self, session: ServerSession, number: int, request: m.AbandonStore, now_ms: int
    ) -> m.Reply:
        abandoned = self.store.abandon_all(session.number, request.writes, now_ms)
        for write in request.writes:
            session.network_writes.pop(write, None)
            session.write_tenants.pop(write, None)
        self.counters.abandoned_stores += len(abandoned)
        return m.Done(len(abandoned))

    # -- events

    def _describe(
        self, session: ServerSession, number: int, request: m.DescribeBlocks, now_ms: int
    ) -> m.Reply:
        events = self._events_for(session)
        keys = self._addresses(request.layout, request.keys)
        self.store.check_keys(keys)
        layout = self.store.layouts.get(request.layout)
        return m.Done(events.describe(request.tenant, layout, keys, request.descriptions))

    def _pool_events(
        self, session: ServerSession, request: m.PoolEvents, caller: Caller
    ) -> m.Reply:
        events = self._events_for(session)
        fingerprint = self.store.layouts.get(request.layout).fingerprint
        if request.cursor < 0:
            return events.since(request.after, fingerprint, caller.may_name)
        return events.content(request.after, request.cursor, fingerprint, caller.may_name)

    def _events_for(self, session: ServerSession) -> PoolEvents:
        if session.plane != m.SHARED_MEMORY:
            raise RequestError(
                "not_local",
                "the pool's events are for engines that have its memory mapped",
                hint="run the engine on the server's host, with its shared memory",
            )
        if self.events is None:
            self.events = PoolEvents(self._stores)
        return self.events

    def _stores(self) -> list[Store]:
        return [self.store, *(self.tiers.stores() if self.tiers is not None else ())]

    def _addresses(self, layout: int, keys: bytes) -> bytes:
        """The store's addresses of blocks of this layout. Bytes that are not a whole number of keys
        go to the store unchanged, which refuses them."""
        fingerprint = self.store.layouts.get(layout).fingerprint
        return keys if len(keys) % KEY_BYTES else addresses(keys, fingerprint)


def _model(parts: Mapping[str, str]) -> str:
    return printable(parts.get("model", "")[:_LOGGED_CHARS])


def _check_tenant(tenant: str) -> None:
    check_tenant(tenant, "send kvkeep.kv.identity.tenant_of(salt), never the salt itself")


def _names(session: ServerSession) -> tuple[int, str, int]:
    return session.number, session.client, session.pid
