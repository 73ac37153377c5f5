"""Bugs to plant: each is one that somebody could have written. `kvkeep chaos --mutants` finds the
seed that sees it.

A simulation that finds nothing wrong proves nothing until it is known what it would find.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvkeep.client.calls import Call, Calls, Debts
from kvkeep.client.connection import Connection
from kvkeep.client.loads import Load
from kvkeep.client.requests import LoadOutcome
from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.client.shared_pool import SharedPool
from kvkeep.client.transport import StreamTransport
from kvkeep.client.worker import WorkerAdapter
from kvkeep.engine.blocks import BlockPool
from kvkeep.server import network
from kvkeep.server import shared as shared_tier
from kvkeep.server.connections import Connections
from kvkeep.server.movement import Movement
from kvkeep.server.service import Service
from kvkeep.server.sessions import ServerSession
from kvkeep.server.shared import RecentKeys, Shared
from kvkeep.store import adopt
from kvkeep.store.blocks import Blocks
from kvkeep.store.eviction import Eviction
from kvkeep.store.order import EvictionOrder
from kvkeep.store.store import MOVING, Store
from kvkeep.store.table import EVICTING, FREE, NO_ROW
from kvkeep.store.tenants import Tenant
from kvkeep.tiers import mover_process
from kvkeep.tiers.clear_log import START, SharedLog
from kvkeep.tiers.disk_index import DiskIndex
from kvkeep.tiers.memory import Pool
from kvkeep.wire import frames
from kvkeep.wire.frames import HEADER_BYTES
from kvkeep.wire.messages import SHARED_MEMORY
from kvkeep.wire.stream import Stream

Patch = tuple[Any, str, Any]


@dataclass(frozen=True)
class Mutant:
    """What is wrong, in words, and what is put in the place of what."""

    bug: str
    patches: Callable[[], list[Patch]]


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """With this bug in the code of this process; none if there is no name."""
    patches = MUTANTS[name].patches() if name else []
    before = [(where, attribute, where.__dict__[attribute]) for where, attribute, _ in patches]
    for where, attribute, wrong in patches:
        setattr(where, attribute, wrong)
    try:
        yield
    finally:
        for where, attribute, right in before:
            setattr(where, attribute, right)


# -- the client


def _ignore_epoch() -> list[Patch]:
    """Slots are taken for those of the server that is there now, whoever gave them."""

    def pool(self: Connection, epoch: int, session: int = 0) -> Any:
        return right_pool(self, self.epoch)

    def take_sound(self: Load, epoch: int) -> None:
        self._requests = [replace(request, epoch=epoch) for request in self._requests]
        right_take(self, epoch)

    right_pool, right_take = Connection.pool, Load._take_sound
    is_stale: Patch = (SchedulerAdapter, "_is_stale", lambda self, lookup: False)
    return [(Connection, "pool", pool), (Load, "_take_sound", take_sound), is_stale]


def _miss_checksum() -> list[Patch]:
    return [(Connection, "verify", property(lambda self: False))]


def _forget_lease() -> list[Patch]:
    def release(self: SchedulerAdapter, lookup: Any, loaded_tokens: int = 0) -> None:
        pass

    return [(SchedulerAdapter, "release", release)]


def _say_once() -> list[Patch]:
    def pay(self: Debts, now_ms: int, send: Any) -> None:
        self._said.clear()
        right(self, now_ms, send)

    right = Debts.pay
    return [(Debts, "pay", pay)]


def _no_deadline() -> list[Patch]:
    return [(Connection, "_expire", lambda self, now_ms: None)]


class _Guesses(Calls):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls._calls

    def get(self, number: int) -> Call | None:
        return super().get(number) or next(iter(self._calls.values()), None)


def _accept_stale_answer() -> list[Patch]:
    """A reply to something that nobody waits for any more is taken for the next one."""

    def receive(self: Connection) -> None:
        calls = self._calls
        self._calls = _Guesses(calls)
        right(self)
        calls._calls, self._calls = self._calls._calls, calls

    right = Connection._receive
    return [(Connection, "_receive", receive)]


def _report_early() -> list[Patch]:
    """A load is reported when it begins."""

    def load(self: WorkerAdapter, job: Any, request: Any) -> None:
        right(self, job, request)
        with self._wake:
            self._end_load(job, LoadOutcome())

    right = WorkerAdapter.load
    return [(WorkerAdapter, "load", load)]


def _believe_bad_blocks() -> list[Patch]:
    """A block that does not match is reported to the server, and used."""

    def finish(self: Load) -> Any:
        loaded = right(self)
        for each in loaded:
            each[:] = True
        return loaded

    right = Load.finish
    return [(Load, "finish", finish)]


def _skip_fence() -> list[Patch]:
    """The lock falls with the session, while copies are under way."""

    def let_go(self: SharedPool) -> None:
        import os

        if not self._over and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        right(self)

    right = SharedPool.let_go
    return [(SharedPool, "let_go", let_go)]


def _reuse_engine_blocks() -> list[Patch]:
    """The engine frees blocks while they are being loaded."""

    def share(self: BlockPool, block_ids: Any) -> None:
        right(self, block_ids)
        for block in block_ids:
            if self._refs[block] == 2 and block not in self._key_of:
                self._refs[block] = 1

    right = BlockPool.share
    return [(BlockPool, "share", share)]


def _overwrite_unread_blocks() -> list[Patch]:
    """The engine writes into blocks that stores have not read yet, and tells nobody."""
    return [(BlockPool, "take_given", lambda self: set())]


# -- the transport


def _skip_proof() -> list[Patch]:
    return [(StreamTransport, "_is_run_by_friend", lambda self, stream: True)]


def _prove_too_late() -> list[Patch]:
    """A peer whose user is not known yet is taken for a friend."""

    def is_run_by_friend(self: StreamTransport, stream: Stream) -> bool:
        return self._peer_uid(stream.socket) is None or right(self, stream)

    right = StreamTransport._is_run_by_friend
    return [(StreamTransport, "_is_run_by_friend", is_run_by_friend)]


def _half_is_whole() -> list[Patch]:
    """A message is taken when its header is there and some of the rest."""

    def missing_bytes(self: Stream) -> int:
        missing = right(self)
        return 0 if self._sizes is not None and self._read_bytes > HEADER_BYTES else missing

    def take(self: Stream, nbytes: int) -> bytes:
        there = min(nbytes, self._read_bytes)
        return right_take(self, there) if there else b""

    right, right_take = Stream._missing_bytes, Stream._take
    return [(Stream, "_missing_bytes", missing_bytes), (Stream, "_take", take)]


def _drop_unsent() -> list[Patch]:
    """What the socket did not take at once is forgotten."""

    def flush(self: Stream) -> None:
        right(self)
        self._unsent.clear()
        self._unsent_bytes = 0

    right = Stream.flush
    return [(Stream, "flush", flush)]


def _keep_lost_bytes() -> list[Patch]:
    """What came over a connection that is lost is read before what comes over the next."""

    def drop(self: StreamTransport) -> None:
        self._kept = b"".join(self._stream._pieces) if self._stream is not None else b""  # type: ignore[attr-defined]
        right_drop(self)

    def begin(self: StreamTransport) -> None:
        right_begin(self)
        if self._stream is not None:
            self._stream._keep(getattr(self, "_kept", b""))

    right_drop, right_begin = StreamTransport._drop, StreamTransport._begin
    return [(StreamTransport, "_drop", drop), (StreamTransport, "_begin", begin)]


def _stay_deaf() -> list[Patch]:
    return [(StreamTransport, "reconnect", lambda self: None)]


def _read_on() -> list[Patch]:
    """The server reads from peers that do not take its replies."""

    def serve(self: Connections, peer: Any, answer: Any, until_s: float) -> None:
        if peer.caller is not None:
            peer.stream.read()
        right(self, peer, answer, until_s)

    right = Connections._serve
    return [(Connections, "_serve", serve)]


# -- the server


def _free_on_timeout() -> list[Patch]:
    """Silence ends a session on this host, too."""

    def is_gone(self: ServerSession, now_ms: int, network_timeout_ms: int) -> bool:
        if self.plane == SHARED_MEMORY and now_ms - self.last_seen_ms > network_timeout_ms:
            return True
        return right(self, now_ms, network_timeout_ms)

    right = ServerSession.is_gone
    return [(ServerSession, "is_gone", is_gone)]


def _trust_the_network() -> list[Patch]:
    return [(network, "check_arrived", lambda session, number, checksums: None)]


def _skip_crc() -> list[Patch]:
    return [(frames, "crc32", lambda data, value=0: 0)]


def _forget_the_dead() -> list[Patch]:
    return [(Service, "end_dead_sessions", lambda self, now_ms: 0)]


def _reuse_session_number() -> list[Patch]:
    """A session's leases and writes are found under the number of another."""

    def hello(self: Service, *request: Any) -> Any:
        self.sessions._next = 1
        self.store.sessions.pop(1, None)
        return right(self, *request)

    right = Service._hello
    return [(Service, "_hello", hello)]


# -- the store


def _publish_early() -> list[Patch]:
    """A block is visible with its first shard."""

    def shards_arrived(self: Blocks, rows: list[int], mask: int, layout: Any) -> None:
        for row in rows:
            if row in self.shards_in:
                self.shards_in[row] = (1 << layout.shards) - 1
        right(self, rows, mask, layout)

    right: Any = Blocks.shards_arrived
    return [(Blocks, "shards_arrived", shards_arrived)]


def _evict_pinned() -> list[Patch]:
    def evictable(self: EvictionOrder, row: int) -> bool:
        table = self._table
        return table.first_child[row] == NO_ROW and table.state[row] not in (FREE, EVICTING)

    return [(EvictionOrder, "evictable", evictable)]


def _release_without_unpin() -> list[Patch]:
    def release(self: Store, session: int, lease: int, now_ms: int) -> bool:
        return self._session(session).leases.pop(lease, NO_ROW) != NO_ROW

    return [(Store, "release", release)]


def _quota_off_by_one() -> list[Patch]:
    def may_lose(self: Tenant, nbytes: int) -> bool:
        return self.quota_bytes is None or self.usage_bytes >= self.quota_bytes

    def limit(
        self: Eviction, tenant: Tenant, row: int, slot_bytes: int, available: int, wanted: int
    ) -> int:
        return wanted - available

    return [(Tenant, "may_lose", may_lose), (Eviction, "_limit", limit)]


def _drop_under_readers() -> list[Patch]:
    """What operators clear is free at once, whoever reads or writes it."""

    def free_evicting(self: Blocks, row: int) -> None:
        pins, self.table.pins[row] = self.table.pins[row], 0
        right(self, row)
        self.table.pins[row] = pins

    right = Blocks._free_evicting
    return [(Blocks, "_free_evicting", free_evicting)]


# -- the next server


def _skip_seal() -> list[Patch]:
    return [(adopt._Found, "_check_seals", lambda self, good: None)]


def _skip_ghost() -> list[Patch]:
    """Processes of the old server's sessions are taken for dead."""
    return [(Pool, "old_sessions", lambda self: 0)]


# -- the disk


def _trust_the_disk() -> list[Patch]:
    """Blocks from the disk are not compared with their checksums."""

    def verify(job: Any, addresses: Any, first: int) -> Any:
        return np.ones(len(addresses), np.bool_)

    return [(mover_process, "_verify", verify)]


def _acknowledge_unsynced() -> list[Patch]:
    return [(mover_process.MoverProcess, "_sync", lambda self, sync: None)]


def _forget_clears() -> list[Patch]:
    """The log of the disk does not learn what was cleared, nor which slots that freed."""

    def take_out(self: DiskIndex, tenants: list[str]) -> int:
        count = right(self, tenants)
        self.store.slabs.given = array("q")
        return count

    right = DiskIndex.take_out
    forget: Patch = (DiskIndex, "_note_clear", lambda self, name: None)
    return [(DiskIndex, "take_out", take_out), forget]


def _keep_promotions() -> list[Patch]:
    """What hangs below a block that cannot be read keeps its slots."""
    return [(Movement, "_give_up", lambda self, promotion, now_ms: None)]


def _forget_disk_lease() -> list[Patch]:
    return [(DiskIndex, "release", lambda self, number, now_ms: None)]


def _free_under_mover() -> list[Patch]:
    """The slots of a mover that is being killed are free before it has ended."""

    def put_aside(self: Movement, disk: Any, why: str) -> None:
        right(self, disk, why)
        for number in self._store.sessions[MOVING].writes.copy():
            self._store.abandon_store(MOVING, number, 0)

    right = Movement.put_aside
    return [(Movement, "put_aside", put_aside)]


def _promote_after_clear() -> list[Patch]:
    """The index of the disk keeps finding what was cleared."""
    return [(DiskIndex, "clear", lambda self, tenant: 0)]


# -- the shared tier


def _stay_deaf_to_clears() -> list[Patch]:
    """What others clear is confirmed, and its generation is not used."""

    def take_clears(self: Shared, syncing: Any, result: Any) -> None:
        before = {**self._generations}
        own = {START, *(each.name for each in self._clears)}
        right(self, syncing, result)
        for name in {each.name for each in result.clears} - own:
            self._generations[name] = before.get(name, (0, ""))

    right = Shared._take_clears
    return [(Shared, "_take_clears", take_clears)]


def _confirm_unheard() -> list[Patch]:
    """What others clear stays in memory."""

    def take_heard(self: Shared) -> list[str]:
        right(self)
        self.heard_is_cleared()
        return []

    right = Shared.take_heard
    return [(Shared, "take_heard", take_heard)]


def _answer_unconfirmed() -> list[Patch]:
    """A clear is complete when it is in the log, whether hosts have heard or not."""
    return [(Shared, "is_clearing", property(lambda self: bool(self._clears)))]


def _keep_a_lost_log() -> list[Patch]:
    """A service that starts again empty gets no entries of the log again."""
    nothing_is_lost: Patch = (SharedLog, "_has_lost_its_end", lambda self: False)
    return [nothing_is_lost, (SharedLog, "_read_anew", lambda self: None)]


def _miss_for_ever() -> list[Patch]:
    """What the service lacked once is never asked for again."""
    return [(shared_tier, "MISS_LASTS_S", 1e9)]


def _remember_for_ever() -> list[Patch]:
    """What the service has lost is not written again."""
    return [(RecentKeys, "remove", lambda self, place, keys: None)]


def _never_revive() -> list[Patch]:
    return [(Shared, "revive", lambda self, number: False)]


MUTANTS = {
    "stay-deaf-to-clears": Mutant(
        "generations of tenants that others cleared are not used", _stay_deaf_to_clears
    ),
    "confirm-unheard": Mutant("a clear is confirmed and not carried out", _confirm_unheard),
    "answer-unconfirmed": Mutant(
        "a clear is complete before other hosts have heard", _answer_unconfirmed
    ),
    "keep-a-lost-log": Mutant("a service that lost the log stays without", _keep_a_lost_log),
    "miss-for-ever": Mutant("a miss on the shared tier lasts for ever", _miss_for_ever),
    "remember-for-ever": Mutant(
        "what the shared tier has lost is not written again", _remember_for_ever
    ),
    "never-revive": Mutant("a tier that was set aside is never used again", _never_revive),
    "trust-the-disk": Mutant("blocks from the disk are not verified", _trust_the_disk),
    "acknowledge-unsynced": Mutant(
        "a write to the disk is acknowledged before it is durable", _acknowledge_unsynced
    ),
    "forget-clears": Mutant("a restart brings cleared blocks back", _forget_clears),
    "promote-after-clear": Mutant(
        "cleared blocks are still found on the disk", _promote_after_clear
    ),
    "keep-promotions": Mutant("a promotion that failed keeps its slots", _keep_promotions),
    "forget-disk-lease": Mutant("a block on the disk stays leased", _forget_disk_lease),
    "free-under-mover": Mutant("slots are reused while a killed mover lives", _free_under_mover),
    "skip-fence": Mutant("a session's lock falls while its copies are under way", _skip_fence),
    "ignore-epoch": Mutant(
        "slots that an earlier server gave are used with the next one", _ignore_epoch
    ),
    "free-on-timeout": Mutant("silence ends a session that may still write", _free_on_timeout),
    "miss-checksum": Mutant("loads are not verified", _miss_checksum),
    "believe-bad-blocks": Mutant("blocks that do not match are used", _believe_bad_blocks),
    "trust-the-network": Mutant(
        "bytes that came by Put are not compared with their checksums", _trust_the_network
    ),
    "skip-crc": Mutant("damaged messages are read", _skip_crc),
    "skip-proof": Mutant("a server of another user is spoken to", _skip_proof),
    "prove-too-late": Mutant("a server is spoken to before its user is known", _prove_too_late),
    "half-is-whole": Mutant("half a message is taken for a whole one", _half_is_whole),
    "drop-unsent": Mutant("bytes that a socket did not take at once are dropped", _drop_unsent),
    "keep-lost-bytes": Mutant(
        "bytes of a lost connection are read with those of the next", _keep_lost_bytes
    ),
    "stay-deaf": Mutant("a connection on which nothing comes is kept", _stay_deaf),
    "read-on": Mutant("a peer that does not take its replies is read from", _read_on),
    "accept-stale-answer": Mutant("an answer of an earlier session is taken", _accept_stale_answer),
    "forget-lease": Mutant("a lease is not given back", _forget_lease),
    "say-once": Mutant("what is given back is said once, confirmed or not", _say_once),
    "forget-the-dead": Mutant("what dead processes held is kept", _forget_the_dead),
    "reuse-session-number": Mutant("two sessions have one number", _reuse_session_number),
    "no-deadline": Mutant("a call waits for its reply for ever", _no_deadline),
    "report-early": Mutant("a load is reported before it has arrived", _report_early),
    "reuse-engine-blocks": Mutant(
        "engine blocks are reused while they are loaded into", _reuse_engine_blocks
    ),
    "overwrite-unread-blocks": Mutant(
        "engine blocks are reused before stores have read them", _overwrite_unread_blocks
    ),
    "publish-early": Mutant("a block is visible before its last shard", _publish_early),
    "evict-pinned": Mutant("blocks that somebody reads or writes are evicted", _evict_pinned),
    "release-without-unpin": Mutant("a released block stays pinned", _release_without_unpin),
    "skip-seal": Mutant("what a server left is adopted unproven", _skip_seal),
    "skip-ghost": Mutant("a new server reuses what old processes still write to", _skip_ghost),
    "quota-off-by-one": Mutant("a tenant loses one block too many to others", _quota_off_by_one),
    "drop-under-readers": Mutant(
        "cleared blocks are reused while somebody reads or writes them", _drop_under_readers
    ),
}
