"""The store as anyone would write it who had no regard for speed: lists, loops and sums.

It is written from the docstrings of `kvkeep.store`, so that state machines can drive both and find
where they differ. All blocks have one size here. With several sizes, which slab moves when is a
matter of policy, not of promises."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from kvkeep.errors import RequestError
from kvkeep.kv.checksum import ABSENT
from kvkeep.store.plans import Limits


@dataclass(eq=False)
class ModelBlock:
    """One block. `state` is the name that the store's table gives it."""

    tenant: str
    key: bytes
    layout: int
    shards: int
    parent: ModelBlock | None
    priority: int
    expires_ms: int
    used: int
    finished: int = 0
    state: str = "writing"
    late: bool = False  # nobody expects it to be whole any more
    checksums: dict[int, int] = field(default_factory=dict)  # by shard, only of shards that are in


@dataclass
class ModelWrite:
    shards: tuple[int, ...]
    blocks: list[ModelBlock]


@dataclass
class ModelSession:
    leases: dict[int, ModelBlock] = field(default_factory=dict)
    writes: dict[int, ModelWrite] = field(default_factory=dict)

    @property
    def writing_blocks(self) -> int:
        return sum(len(write.blocks) for write in self.writes.values())


@dataclass(frozen=True)
class ModelPlan:
    positions: list[int]
    refused: int
    orphan: bool = False
    apart: bool = False


class StoreModel:
    """What a Store must do. Refusals are RequestErrors with the store's codes, raised before
    anything has changed."""

    def __init__(
        self, pool_slots: int, slot_bytes: int, limits: Limits, default_quota_bytes: int | None
    ) -> None:
        self.pool_slots = pool_slots
        self.slot_bytes = slot_bytes
        self.limits = limits
        self.default_quota_bytes = default_quota_bytes
        self.default_limit_bytes: int | None = None
        self.own_quotas: dict[str, int] = {}
        self.own_limits: dict[str, int] = {}
        self.blocks: list[ModelBlock] = []
        self.sessions: dict[int, ModelSession] = {}
        self.layouts: dict[int, int] = {}  # number -> shards
        # tenants that may make way for a new name, the one held longest ago first
        self.idle: list[str] = []
        self._uses = 0

    # -- what can be asked -------------------------------------------------------------------------

    def find(self, tenant: str, key: bytes) -> ModelBlock | None:
        for block in self.blocks:
            if (block.tenant, block.key) == (tenant, key) and block.state != "evicting":
                return block
        return None

    def tenants(self) -> set[str]:
        return {block.tenant for block in self.blocks} | self.named()

    def named(self) -> set[str]:
        return set(self.own_quotas) | set(self.own_limits)

    def limit(self, tenant: str) -> int | None:
        return self.own_limits.get(tenant, self.default_limit_bytes)

    def quota(self, tenant: str) -> int | None:
        """In force: scaled down where all own quotas exceed the pool, and never more than the
        limit."""
        quota = self.default_quota_bytes
        pool_bytes = self.pool_bytes
        promised = sum(self.own_quotas.values())
        if tenant in self.own_quotas:
            quota = self.own_quotas[tenant]
            if promised > pool_bytes:
                quota = quota * pool_bytes // promised
        caps = [cap for cap in (quota, self.limit(tenant), pool_bytes) if cap is not None]
        return None if quota is None else min(caps)

    @property
    def pool_bytes(self) -> int:
        return self.pool_slots * self.slot_bytes

    def held(self, tenant: str) -> int:
        """Bytes of its blocks that somebody reads or writes, and of all that these hang on."""
        held = {
            id(each) for block in self.blocks if self._held(block) for each in self.chain(block)
        }
        return sum(
            self.slot_bytes for block in self.blocks if block.tenant == tenant and id(block) in held
        )

    def share(self, tenant: str) -> int:
        """What the tenant may hold by right: its own quota."""
        return self.quota(tenant) or 0 if tenant in self.own_quotas else 0

    def may_hold(self, tenant: str) -> int:
        """How much more: what is left of its share, and of the memory that nobody has a right to.
        Without own quotas that is all there is, and what can be had is a matter of room alone."""
        if not any(self.share(each) for each in self.own_quotas):
            return 2 * self.pool_bytes
        beyond = sum(max(0, self.held(each) - self.share(each)) for each in self.tenants())
        unpromised = self.pool_bytes - sum(self.share(each) for each in self.own_quotas)
        return max(0, self.share(tenant) - self.held(tenant)) + max(0, unpromised - beyond)

    def usage(self, tenant: str) -> int:
        return sum(self.slot_bytes for block in self.blocks if block.tenant == tenant)

    def chain(self, block: ModelBlock | None) -> list[ModelBlock]:
        """The block and all that it hangs on, the root first."""
        return [] if block is None else [*self.chain(block.parent), block]

    def hit(self, tenant: str, keys: list[bytes]) -> list[ModelBlock]:
        """The longest READY prefix, by walking."""
        found: list[ModelBlock] = []
        for key in keys:
            block = self.find(tenant, key)
            if (
                block is None
                or block.state != "ready"
                or block.parent is not (found[-1] if found else None)
            ):
                break
            found.append(block)
        return found

    # -- what engines do ---------------------------------------------------------------------------

    def open_session(self, session: int) -> None:
        if session in self.sessions:
            _refuse("session_exists")
        if len(self.sessions) >= self.limits.sessions:
            _refuse("too_many_sessions")
        self.sessions[session] = ModelSession()

    def close_session(self, session: int) -> None:
        state = self._session(session)
        for lease in reversed(list(state.leases)):
            self.release(session, lease)
        for write in reversed(list(state.writes)):
            self.abandon_store(session, write)
        del self.sessions[session]

    def check_lookup(self, session: int, lease: int, keys: list[bytes], skip: int) -> None:
        """Refuses what a lookup refuses."""
        state = self._session(session)
        if len(keys) > self.limits.blocks_per_request:
            _refuse("too_many_blocks")
        if not 0 <= skip <= len(keys):
            _refuse("bad_skip")
        if lease in state.leases or lease in state.writes:
            _refuse("lease_exists")
        if len(state.leases) >= self.limits.leases_per_session:
            _refuse("too_many_leases")

    def lookup(
        self, session: int, lease: int, tenant: str, keys: list[bytes], skip: int
    ) -> list[ModelBlock]:
        """For keys that form a chain: the blocks of the hit, leased if they reach beyond `skip`."""
        self.check_lookup(session, lease, keys, skip)
        found = self.hit(tenant, keys)
        if len(found) > skip:
            too_many = self._not_held(found[-1]) - self.may_hold(tenant) // self.slot_bytes
            found = found[: max(skip, len(found) - max(0, too_many))]
        if len(found) > skip:
            self.lease(session, lease, found[-1])
        return found

    def lease(self, session: int, lease: int, deepest: ModelBlock) -> None:
        deepest.used = self._next_use()
        self.sessions[session].leases[lease] = deepest
        self._note_idle()

    def release(self, session: int, lease: int) -> bool:
        released = self._session(session).leases.pop(lease, None)
        self._let_go([] if released is None else [released])
        return released is not None

    def finish(self, session: int, tenant: str, key: bytes) -> bool:
        self._session(session)
        block = self.find(tenant, key)
        if block is not None:
            block.finished = block.used
        return block is not None

    def prepare_store(
        self,
        session: int,
        write: int,
        tenant: str,
        layout: int,
        shard: int,
        parent: bytes,
        keys: list[bytes],
        now_ms: int,
        priority: int,
        ttl_ms: int,
        further_shards: tuple[int, ...] = (),
    ) -> ModelPlan:
        state, shards = self._session(session), (shard, *further_shards)
        self._check_store(state, write, layout, shards, keys, priority, ttl_ms)
        above = self.find(tenant, parent) if parent else None
        if parent and above is None:
            return ModelPlan([], len(keys), orphan=True)
        if above is not None and above.layout != layout:
            _refuse("broken_chain")
        known = self._known_part(tenant, layout, above, keys)
        above = known[-1] if known else above
        lacks = [[self._lacks(block, each) for each in shards] for block in known]
        lacking = [i for i, each in enumerate(lacks) if all(each)]
        apart = any(any(each) and not all(each) for each in lacks)
        may_write = self.limits.writing_blocks_per_session - state.writing_blocks
        if len(lacking) > may_write:
            joined, taken, room = lacking[:may_write], lacking[may_write], 0
        else:
            joined, taken = lacking, len(known)
            room = min(len(keys) - len(known), may_write - len(lacking))
        limit = self.limit(tenant)
        room = 0 if limit is not None and limit < self.slot_bytes else room
        may_hold = self.may_hold(tenant) // self.slot_bytes - self._not_held(above)
        room = max(0, min(room, may_hold))
        if may_hold < 0 and joined:
            joined, taken = [], joined[0]
        if room and tenant not in self.tenants() and len(self.tenants()) >= self.limits.tenants:
            self._drop_coldest_tenant()
        work = ModelWrite(shards, [known[i] for i in joined])
        state.writes[write] = work
        if above is not None:
            above.used = self._next_use()
        last_known = above if room else None
        room = self._make_room(tenant, room, above, now_ms) if room else 0
        use = self._next_use()
        for key in keys[taken : taken + room]:
            expires_ms = now_ms + ttl_ms if ttl_ms else 0
            above = ModelBlock(
                tenant, key, layout, self.layouts[layout], above, priority, expires_ms, use
            )
            self.blocks.append(above)
            work.blocks.append(above)
        awaited = [b for b in self.blocks if b.state == "writing" and b.shards > 1 and not b.late]
        for block in (
            awaited[: max(0, len(awaited) - max(8, len(self.blocks) // 8))] if room else ()
        ):
            block.late = True
        if not work.blocks:
            del state.writes[write]
        if last_known is not None:
            self._let_go([last_known])
        self._note_idle()
        return ModelPlan(
            [*joined, *range(taken, taken + room)], len(keys) - taken - room, apart=apart
        )

    def complete_store(self, session: int, write: int, checksums: list[int]) -> int:
        state = self._session(session)
        if write not in state.writes:
            _refuse("unknown_write")
        work = state.writes[write]
        if len(checksums) != len(work.blocks) * len(work.shards):
            _refuse("bad_checksums")
        del state.writes[write]
        written = [(block, shard) for block in work.blocks for shard in work.shards]
        for (block, shard), checksum in zip(written, checksums, strict=True):
            block.checksums[shard] = checksum
        for block in self.blocks:
            if block.state == "writing" and len(block.checksums) == block.shards:
                block.state = "waiting"
        for block in self.blocks:
            if block.state == "waiting" and all(
                b.state in ("waiting", "ready") for b in self.chain(block)
            ):
                block.state = "ready"
        self._let_go(work.blocks)
        return len(work.blocks)

    def _not_held(self, block: ModelBlock | None) -> int:
        """How many blocks a lease that ends in this one would hold that are not held."""
        held = {
            id(each) for other in self.blocks if self._held(other) for each in self.chain(other)
        }
        return sum(id(each) not in held for each in self.chain(block))

    def _note_idle(self) -> None:
        names = sorted({block.tenant for block in self.blocks} - self.named())
        idle = [name for name in names if not self.held(name)]
        self.idle = [name for name in self.idle if name in idle] + [
            name for name in idle if name not in self.idle
        ]

    def abandon_store(self, session: int, write: int) -> bool:
        abandoned = self._session(session).writes.pop(write, None)
        self._let_go(abandoned.blocks if abandoned else [])
        return abandoned is not None

    # -- what operators do -------------------------------------------------------------------------

    def drop_block(self, tenant: str, key: bytes) -> int:
        block = self.find(tenant, key)
        return (
            0 if block is None else self._drop([b for b in self.blocks if block in self.chain(b)])
        )

    def clear(self, tenant: str | None) -> int:
        if tenant is not None and tenant not in self.tenants():
            _refuse("unknown_tenant")
        return self._drop([b for b in self.blocks if tenant in (None, b.tenant)])

    def set_quota(self, tenant: str, quota_bytes: int | None) -> None:
        if quota_bytes is None:
            if tenant not in self.tenants():
                _refuse("unknown_tenant")
            self.own_quotas.pop(tenant, None)
            self._note_idle()
            return
        others = sum(quota for name, quota in self.own_quotas.items() if name != tenant)
        is_raised, limit = quota_bytes > self.own_quotas.get(tenant, 0), self.limit(tenant)
        if quota_bytes < 0 or (is_raised and quota_bytes > self.pool_bytes - others):
            _refuse("quota_too_large")
        if is_raised and limit is not None and quota_bytes > limit:
            _refuse("limit_below_quota")
        if tenant not in self.tenants() and len(self.tenants()) >= self.limits.tenants:
            _refuse("too_many_tenants")
        self.own_quotas[tenant] = quota_bytes
        self._note_idle()

    def restore(
        self,
        quotas: dict[str, int],
        limits: dict[str, int],
        default_quota: int | None,
        default_limit: int | None,
    ) -> None:
        """At a start, with no blocks: quotas may exceed the pool and the limits."""
        self.own_quotas, self.own_limits = dict(quotas), dict(limits)
        self.default_quota_bytes, self.default_limit_bytes = default_quota, default_limit

    def set_default_quota(self, quota_bytes: int | None) -> None:
        if quota_bytes is not None and not 0 <= quota_bytes <= self.pool_bytes:
            _refuse("quota_too_large")
        self.default_quota_bytes = quota_bytes

    def set_limit(self, tenant: str, limit_bytes: int | None, now_ms: int) -> None:
        if limit_bytes is None and tenant not in self.tenants():
            _refuse("unknown_tenant")
        limit = self.default_limit_bytes if limit_bytes is None else limit_bytes
        if limit is not None and limit < self.own_quotas.get(tenant, 0):
            _refuse("limit_below_quota")
        if tenant not in self.tenants() and len(self.tenants()) >= self.limits.tenants:
            _refuse("too_many_tenants")
        if limit_bytes is None:
            self.own_limits.pop(tenant, None)
        else:
            self.own_limits[tenant] = limit_bytes
        self._shrink_to_limit(tenant, now_ms)
        self._note_idle()

    def set_default_limit(self, limit_bytes: int | None, now_ms: int) -> None:
        if limit_bytes is not None and any(
            quota > limit_bytes
            for name, quota in self.own_quotas.items()
            if name not in self.own_limits
        ):
            _refuse("limit_below_quota")
        self.default_limit_bytes = limit_bytes
        for tenant in self.tenants() - set(self.own_limits):
            self._shrink_to_limit(tenant, now_ms)
        self._note_idle()

    # -- inside ------------------------------------------------------------------------------------

    def _session(self, session: int) -> ModelSession:
        if session not in self.sessions:
            _refuse("unknown_session")
        return self.sessions[session]

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses

    def _check_store(
        self,
        state: ModelSession,
        write: int,
        layout: int,
        shards: tuple[int, ...],
        keys: list[bytes],
        priority: int,
        ttl_ms: int,
    ) -> None:
        if len(keys) > self.limits.blocks_per_request:
            _refuse("too_many_blocks")
        if not set(shards) <= set(range(self.layouts[layout])) or list(shards) != sorted(
            set(shards)
        ):
            _refuse("bad_shard")
        if not 0 <= priority <= 100:
            _refuse("bad_priority")
        if ttl_ms < 0:
            _refuse("bad_ttl")
        if state.writing_blocks >= self.limits.writing_blocks_per_session:
            _refuse("too_many_writes")
        if write in state.writes or write in state.leases:
            _refuse("write_exists")

    def _known_part(
        self, tenant: str, layout: int, above: ModelBlock | None, keys: list[bytes]
    ) -> list[ModelBlock]:
        """The leading keys that have blocks, each a child of the one before; no key after them may
        be known."""
        known: list[ModelBlock] = []
        for key in keys:
            block = self.find(tenant, key)
            if block is None:
                break
            if block.parent is not (known[-1] if known else above) or block.layout != layout:
                _refuse("broken_chain")
            known.append(block)
        rest = keys[len(known) :]
        if len(set(rest)) < len(rest) or any(self.find(tenant, key) for key in rest):
            _refuse("broken_chain")
        return known

    def _lacks(self, block: ModelBlock, shard: int) -> bool:
        """Whether the shard is neither in nor on its way, or said not to be there."""
        if block.state == "writing" and shard in block.checksums:
            return False
        if block.state != "writing" and block.checksums[shard] != ABSENT:
            return False
        writes = [write for session in self.sessions.values() for write in session.writes.values()]
        return not any(shard in write.shards and block in write.blocks for write in writes)

    def _held(self, block: ModelBlock) -> bool:
        """Whether a lease ends here or somebody is writing here."""
        for session in self.sessions.values():
            if block in session.leases.values() or any(
                block in write.blocks for write in session.writes.values()
            ):
                return True
        return False

    def _free_leaf(self, block: ModelBlock) -> bool:
        return not any(other.parent is block for other in self.blocks) and not self._held(block)

    def _rank(self, block: ModelBlock, now_ms: int) -> tuple[int, int, int]:
        is_half = block.state == "writing"
        # of a single shard there is no other that could still come
        is_late = block.late or block.shards == 1
        if 0 < block.expires_ms <= now_ms or (is_half and is_late):
            order_class = 0
        elif block.finished == block.used:
            order_class = 1
        else:
            order_class = 2
        return order_class, min(block.priority, 50) if is_half else block.priority, block.used

    def _make_room(self, tenant: str, wanted: int, above: ModelBlock | None, now_ms: int) -> int:
        wanted = self._within_limit(tenant, wanted, above, now_ms)
        while self.pool_slots - len(self.blocks) < wanted:
            leaves = [
                b
                for b in self.blocks
                if b.state != "evicting" and b is not above and self._free_leaf(b)
            ]
            own = [b for b in leaves if b.tenant == tenant]
            borrowed = [b for b in leaves if self._may_lose_one(b.tenant)]
            free, quota = self.pool_slots - len(self.blocks), self.quota(tenant)
            if quota is None:
                choice = borrowed
            elif self.usage(tenant) + (free + 1) * self.slot_bytes <= quota:
                by_default = [
                    b
                    for b in leaves
                    if tenant in self.own_quotas and b.tenant not in self.own_quotas
                ]
                choice = borrowed or by_default or own
            else:
                choice = own
            if not choice:
                break
            self._evict(min(choice, key=lambda b: self._rank(b, now_ms)))
        return min(wanted, self.pool_slots - len(self.blocks))

    def _leaves_of(self, tenant: str) -> list[ModelBlock]:
        """Its blocks that can be evicted."""
        return [
            b
            for b in self.blocks
            if b.tenant == tenant and b.state != "evicting" and self._free_leaf(b)
        ]

    def _within_limit(self, tenant: str, wanted: int, above: ModelBlock | None, now_ms: int) -> int:
        """How many more blocks the tenant may have, after its own have made way for them."""
        limit = self.limit(tenant)
        if limit is None:
            return wanted
        if self.usage(tenant) > limit:
            return 0
        wanted = min(wanted, limit // self.slot_bytes)
        while self.usage(tenant) + wanted * self.slot_bytes > limit:
            leaves = [block for block in self._leaves_of(tenant) if block is not above]
            if not leaves:
                break
            self._evict(min(leaves, key=lambda b: self._rank(b, now_ms)))
        return min(wanted, (limit - self.usage(tenant)) // self.slot_bytes)

    def _shrink_to_limit(self, tenant: str, now_ms: int) -> None:
        """First what can be evicted; if that is not enough, all that is left leaves the index."""
        limit = self.limit(tenant)
        while (
            limit is not None and self.usage(tenant) > limit and (leaves := self._leaves_of(tenant))
        ):
            self._evict(min(leaves, key=lambda b: self._rank(b, now_ms)))
        indexed = [
            block for block in self.blocks if block.tenant == tenant and block.state != "evicting"
        ]
        if limit is not None and len(indexed) * self.slot_bytes > limit:
            self._drop(indexed)

    def _drop_coldest_tenant(self) -> None:
        if not self.idle:
            _refuse("too_many_tenants")
        self._drop([block for block in self.blocks if block.tenant == self.idle[0]])

    def _may_lose_one(self, tenant: str) -> bool:
        quota = self.quota(tenant)
        return quota is None or self.usage(tenant) - self.slot_bytes >= quota

    def _evict(self, block: ModelBlock) -> None:
        """The parent inherits the last use, and whether it was the last."""
        self.blocks.remove(block)
        self._pass_on_use(block)

    def _pass_on_use(self, block: ModelBlock) -> None:
        if block.parent is not None and block.used >= block.parent.used:
            block.parent.used, block.parent.finished = block.used, block.finished

    def _drop(self, blocks: list[ModelBlock]) -> int:
        leaving = [block for block in blocks if block.state != "evicting"]
        for block in leaving:
            block.state = "evicting"
        self._let_go(leaving)
        return len(leaving)

    def _let_go(self, blocks: list[ModelBlock]) -> None:
        """These are no longer held. Evicting leaves go, and leaves that nothing was ever written
        to; upwards too."""
        for block in reversed(blocks):
            each: ModelBlock | None = block
            while each is not None and each in self.blocks and self._free_leaf(each):
                if each.state == "evicting":
                    self.blocks.remove(each)
                elif each.state == "writing" and not each.checksums:
                    self._evict(each)
                else:
                    break
                each = each.parent
        self._note_idle()


def _refuse(code: str) -> NoReturn:
    raise RequestError(code, "the model refuses")
