"""What must hold in a chaos run, at every moment and at its end."""

from __future__ import annotations

from collections.abc import Sequence

from kvkeep.kv.checksum import ABSENT, checksum
from kvkeep.store.operators import clear
from kvkeep.store.store import Store
from kvkeep.store.table import EVICTING, NO_ROW, READY, STATE_NAMES, WRITING
from kvkeep.store.tree import with_descendants
from kvkeep_lab.chaos.client import ChaosClient, ChaosConnection
from kvkeep_lab.chaos.record import Record, Violation
from kvkeep_lab.chaos.server import ChaosServer
from kvkeep_lab.chaos.truth import Truth
from kvkeep_lab.simulation.store_integrity import check_integrity

_EVERY = 40  # requests: then all is looked at
_MOST_DEBTS = 2_000
_OVERDUE_MS = 4_000  # a client polls its connections at least that often, also when a copy is slow


class Checks:
    """Looks at everything; raises Violation."""

    def __init__(
        self, server: ChaosServer, clients: Sequence[ChaosClient], truth: Truth, record: Record
    ) -> None:
        # key and slot of blocks in which we have flipped a bit
        self.flipped: set[tuple[bytes, int]] = set()
        self._server = server
        self._clients = clients
        self._truth = truth
        self._record = record
        self._requests = 0
        self._usage: dict[str, tuple[int, int | None]] = {}
        self._moves = self._evictions = 0

    # -- at every moment

    def after_request(self) -> None:
        """After each request that the server has handled."""
        self._requests += 1
        self._check_quotas()
        if self._requests % _EVERY == 0:
            self.everything()

    def everything(self) -> None:
        if self._server.is_up:
            try:
                below = self._server.disk.index.store if self._server.disk else None
                check_integrity(self._server.store, below)
                if below is not None:
                    check_integrity(below, self._server.store)
            except AssertionError as error:
                raise Violation("broken_rules", f"the store contradicts itself: {error}") from error
            self._check_ready_blocks()
            if self._server.shared is not None:
                self._server.shared.check_memory()
        for client in self._clients:
            self._check_client(client)

    def _check_ready_blocks(self) -> None:
        """What any reader could be given: the bytes of its own prefix, in its own tenant."""
        store, view = self._server.store, self._server.pool.segments.view
        table = store.blocks.table
        for row in table.live_rows().tolist():
            if table.state[row] != READY:
                continue
            key, layout = table.keys[row], store.layouts[table.layout[row]]
            known = self._truth.of(key)
            if known is None:
                raise Violation(
                    "wrong_bytes", f"a block is ready under a key that nobody has: {key.hex()}"
                )
            tenant, sums = known
            if store.tenants.by_number[table.tenant[row]].name != tenant:
                raise Violation("wrong_bytes", f"block {key.hex()} is ready for another tenant")
            stated = layout.checks[table.check[row]]
            if ((stated != sums) & (stated != ABSENT)).any():
                raise Violation(
                    "broken_rules", f"block {key.hex()} is ready with checksums of other bytes"
                )
            if (key, table.slot[row]) in self.flipped:
                continue
            for shard, expected in enumerate(sums.tolist()):
                area = view(
                    table.slot[row] + layout.shard_offsets[shard], layout.shard_bytes[shard]
                )
                if checksum(area) != expected:
                    place = f"shard {shard} in slot {table.slot[row]}"
                    raise Violation(
                        "wrong_bytes",
                        f"block {key.hex()} is ready with other bytes than its own, {place}",
                    )

    def before_copy(self, client: ChaosClient, address: int, is_store: bool) -> None:
        """Whoever writes to a slot, or reads from it, has it, or had it before its server ended:
        nobody else does."""
        server, place = self._server, client.place_of(address)
        if not server.is_up or place is None or place[0] != server.memory:
            return  # memory of its own, or of a pool that is gone
        self._check_holder(client.process.name, place[1], is_store)

    def before_tier_copy(self, slot: int, is_write: bool) -> None:
        """The mover owns the slots that it writes to and reads from."""
        if self._server.is_up:
            self._check_holder("the mover", slot, is_write)

    def _check_holder(self, name: str, at: int, is_store: bool) -> None:
        """A write or a lease holds the slot."""
        server, store = self._server, self._server.store
        table, row = store.blocks.table, NO_ROW
        for each in table.live_rows().tolist():
            if 0 <= at - table.slot[each] < store.layouts[table.layout[each]].slot_bytes:
                row = each
        allowed = (WRITING, EVICTING) if is_store else (READY, EVICTING)
        # A write pins its blocks, a lease the last one of a chain: what is above it stays, too.
        held = row != NO_ROW and any(
            table.pins[each]
            for each in ([row] if is_store else with_descendants(table, [row], len(table)))
        )
        if not held or table.state[row] not in allowed:
            state = "free" if row == NO_ROW else STATE_NAMES[table.state[row]]
            doing = "writes to" if is_store else "reads"
            text = f"{name} {doing} slot {at}, which is {state}{'' if held else ' and nobody holds it'}"
            # Raised here it would be a failed copy, which clients are made to survive.
            server.process.simulation.fail(Violation("wrong_bytes", text))

    def _check_quotas(self) -> None:
        """No tenant within its own quota loses a block to another tenant's store. Dropped blocks
        that a lease still holds count as usage, but cannot be lost."""
        store = self._server.store
        usage = {
            t.name: (t.usage_bytes - t.unindexed_bytes, t.own_quota_bytes) for t in store.tenants
        }
        in_memory = {t.name: t.usage_bytes for t in store.tenants}
        moves = store.eviction.slab_moves
        evicted = store.eviction.evictions
        if self._usage and moves == self._moves and evicted > self._evictions:
            growing = [
                name
                for name, (now, _) in usage.items()
                if now > self._usage.get(name, (0, None))[0]
            ]
            for name, (before, quota) in self._usage.items():
                now = usage.get(name, (0, None))[0]
                if (
                    quota is not None
                    and now < min(before, quota)
                    and in_memory.get(name, 0) < quota
                    and growing
                    and name not in growing
                ):
                    raise Violation(
                        "broken_rules", f"tenant {name} lost blocks within its quota to {growing}"
                    )
        self._usage = {} if store.has_to_tidy else usage
        self._moves = moves
        self._evictions = evicted

    def begin_anew(self) -> None:
        """There is another server, with what it found."""
        self.forget_usage()
        self.everything()

    def forget_usage(self) -> None:
        """Something else than a request has changed it."""
        self._usage = {}

    def _check_client(self, client: ChaosClient) -> None:
        """Calls end by their deadlines, and what is owed is bounded."""
        process = client.process
        if process.dead or process.paused:
            return
        now_ms = process.now_ms()
        jumped = process.simulation.now_us - process.jumped_us < _OVERDUE_MS * 1000
        for connection in client.connections:
            overdue = len(connection._calls.overdue(now_ms - _OVERDUE_MS))
            if overdue and not jumped:
                text = (
                    f"{client.process.name} waits for {overdue} replies long after their deadlines"
                )
                raise Violation("broken_rules", text)
            owed = sum(map(len, connection._debts._owed.values()))
            if owed > _MOST_DEBTS:
                raise Violation(
                    "broken_rules", f"{client.process.name} owes {owed} leases and writes"
                )

    # -- at the end

    def answers(self) -> int:
        """Every request of every engine that lives has ended as it would have without a cache.
        Returns how many."""
        count = 0
        for client in self._clients:
            for arrival, request in client.turns:
                given = tuple(request.output_tokens)
                expected = arrival.reference
                if request.finish_reason == "abort":
                    expected = expected[: len(given)]
                if given != expected:
                    text = f"{client.process.name}, {request.request_id}: {list(given)} instead of {list(expected)}"
                    raise Violation("wrong_tokens", text)
                count += 1
        return count

    def engines_hold_nothing(self) -> None:
        for client in self._clients:
            if client.engine is not None:
                pool = client.engine.scheduler.pool
                if pool.num_free != pool.num_blocks - 1:
                    raise Violation(
                        "leaked_blocks",
                        f"{client.process.name} keeps blocks of requests that are over",
                    )

    def leases(self) -> list[str]:
        """What is leased, or to be given back. Empty when everybody is idle and some time has
        passed."""
        sessions = self._server.store.sessions.items()
        leases = [
            f"session {number} holds lease {lease}"
            for number, held in sessions
            for lease in held.leases
        ]
        owed = [
            c.client.process.name
            for c in self._connections()
            if any(c._debts._owed.values()) or c._debts._said
        ]
        return leases + [f"{name} owes something" for name in owed]

    def writes(self) -> list[str]:
        """Blocks that are being written, or are out of use and still there. Likewise."""
        store = self._server.store
        table, sessions = store.blocks.table, store.sessions.items()
        evicting = sum(table.state[row] == EVICTING for row in table.live_rows().tolist())
        writes = [
            f"session {number} holds write {write}"
            for number, held in sessions
            for write in held.writes
        ]
        return writes + ([f"{evicting} blocks are evicting"] if evicting else [])

    def moving(self) -> list[str]:
        """What is on its way to or from the tier. Likewise."""
        return self._server.tier.left() if self._server.tier else []

    def strays(self) -> list[str]:
        """Sessions that nobody has. Empty when those that are silent have timed out."""
        known = {each.welcome.session for each in self._connections() if each.welcome is not None}
        return [
            f"session {s.number}"
            for s in self._server.service.sessions.all()
            if s.token not in known
        ]

    def _connections(self) -> list[ChaosConnection]:
        return [
            each for client in self._clients if not client.closed for each in client.connections
        ]

    def pool_is_whole(self) -> None:
        """With all blocks gone, all memory can be used again."""
        store: Store = self._server.store
        if self._server.disk is not None:
            self._server.disk.clear(None)
            movement = self._server.disk.movement
            while movement is not None and movement.is_held:
                self._server.disk.turn(self._server.process.now_ms())
            self._check_room(self._server.disk.index.store, "on the disk")
        clear(store)
        self._check_room(store, "in memory")

    def _check_room(self, store: Store, where: str) -> None:
        """With all blocks cleared, all slots can be used again."""
        while store.tidy(self._server.process.now_ms()):
            pass
        if len(store.blocks.table):
            raise Violation(
                "leaked_blocks",
                f"{len(store.blocks.table)} blocks are left {where} after all were cleared",
            )
        for slot_bytes in {layout.slot_bytes for layout in store.layouts}:
            room = store.slabs.available(slot_bytes)
            fit = store.pool_bytes // store.slabs.slab_bytes * store.slabs.per_slab(slot_bytes)
            if room != fit:
                raise Violation(
                    "leaked_blocks", f"{fit - room} slots of {slot_bytes} bytes are lost {where}"
                )
