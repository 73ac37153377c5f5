"""The store beside a naive model, in a pool so small that everything is always being evicted.

The same code and the same selection of tests try the same runs. KVKEEP_TEST_EXAMPLES=2000 tries
that many, with fresh seeds."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvkeep.errors import RequestError
from kvkeep.kv.checksum import ABSENT
from kvkeep.store import key_index, operators, order
from kvkeep.store.key_index import KeyIndex
from kvkeep.store.plans import Hit, Limits, StorePlan, TenantUsage
from kvkeep.store.store import Store
from kvkeep.store.table import NO_ROW, READY, STATE_NAMES
from kvkeep_lab.simulation.store_integrity import check_integrity
from kvkeep_lab.simulation.store_model import ModelBlock, StoreModel

EXAMPLES = int(os.environ.get("KVKEEP_TEST_EXAMPLES", "0"))
FEW = os.environ.get("TEST_TIER") == "quick"
SETTINGS = settings(
    max_examples=EXAMPLES or (20 if FEW else 400),
    stateful_step_count=100,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

SLOT = 4096
LIMITS = Limits(
    blocks_per_request=8,
    leases_per_session=3,
    writing_blocks_per_session=9,
    sessions=3,
    layouts=4,
    tenants=3,
)

# tenant, layout, and a walk down a binary tree: each step is one more block
Chain = tuple[str, int, list[int]]

TENANTS = ["ann", "ann", "ann", "bob", "bob", "cy", "dee"]
LAYOUTS = [1, 1, 1, 2, 2, 3]

QUOTAS = [None, *(slots * SLOT for slots in range(9))]
LIMIT_BYTES = [
    None, 0, 1, SLOT, 2 * SLOT, 3 * SLOT + 1, 4 * SLOT, 6 * SLOT - 1, 8 * SLOT, 1000 * SLOT,
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_structures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only large stores have: indices with parts, and queues that get rid of stale entries."""
    monkeypatch.setattr(key_index, "KEYS_IN_ONE", 2)
    monkeypatch.setattr(order, "_STALE_SLACK", 0)
    monkeypatch.setattr(order, "_DISCARDED_A_TURN", 2)


# Hypothesis chooses seeds, and shortens a failing run to the steps that matter. What each step does
# is chosen evenly from its seed, because most choices depend on what is in the store at the time.
picks = st.integers(0, 2**32 - 1).map(Random)


def walk(pick: Random, shortest: int, longest: int) -> list[int]:
    return pick.choices([0, 0, 1], k=pick.randint(shortest, longest))


def key_of(path: list[int], layout: int) -> bytes:
    return f"{layout}:{''.join(map(str, path))}".encode().ljust(16, b".")


def keys_of(path: list[int], layout: int) -> list[bytes]:
    return [key_of(path[: depth + 1], layout) for depth in range(len(path))]


def path_of(key: bytes) -> tuple[int, list[int]]:
    layout, _, steps = key.decode().rstrip(".").partition(":")
    return int(layout), [int(step) for step in steps]


def slots_down_to(store: Store, row: int) -> list[int]:
    """The slots of a block and of all that it hangs on."""
    slots = []
    while row != NO_ROW:
        slots.append(store.blocks.table.slot[row])
        row = store.blocks.table.parent[row]
    return slots


def held_slots(store: Store) -> dict[tuple[str, int, int], list[int]]:
    """What each lease and write covers, prefixes included."""
    held = {}
    for number, session in store.sessions.items():
        for lease, row in session.leases.items():
            held["lease", number, lease] = slots_down_to(store, row)
        for write, work in session.writes.items():
            held["write", number, write] = [
                slot for row in work.rows for slot in slots_down_to(store, row)
            ]
    return held


def snapshot(store: Store) -> dict[str, Any]:
    """Everything that a refused request must leave alone."""
    table, slabs = store.blocks.table, store.slabs
    columns = table.many.__slots__
    return {
        "rows": {
            row: (table.keys[row], *(getattr(table, name)[row] for name in columns))
            for row in table.live_rows().tolist()
        },
        "tenants": {
            t.name: (
                t.number,
                t.own_quota_bytes,
                t.own_limit_bytes,
                t.usage_bytes,
                dict(t.index.items()),
            )
            for t in store.tenants
        },
        # The quota and limit in force of a tenant follow from its own and the defaults, and change
        # with its next request after a default has changed.
        "defaults": (store.tenants.default_quota_bytes, store.tenants.default_limit_bytes),
        "usage": {t.name: (t.blocks, t.usage_bytes) for t in store.tenants},
        "sessions": {
            number: (
                dict(s.leases),
                {w: (list(work.shards), list(work.rows)) for w, work in s.writes.items()},
            )
            for number, s in store.sessions.items()
        },
        "layouts": {
            layout.number: (layout.blocks, set(layout.sessions)) for layout in store.layouts
        },
        "writing": (dict(store.blocks.shards_in), dict(store.writers)),
        "slabs": (
            slabs.sizes(),
            slabs.unused_slabs,
            {size: slabs.available(size) for size in slabs.sizes()},
        ),
        "uses": store.blocks.sequence,
    }


class PromisesMachine(RuleBasedStateMachine):
    """What both machines have in common: a store, a clock, and what must hold whatever happens."""

    store: Store

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 1000
        self.held: dict[tuple[str, int, int], list[int]] = {}
        self.quotas_fit = True  # whether each own quota could be had, whatever the others hold

    def one_of(self, pick: Random, weights: dict[Callable[[Random], None], int]) -> None:
        chosen = pick.choices(list(weights), list(weights.values()))[0]
        note(f"{chosen.__name__} at {self.now_ms} ms")
        chosen(pick)

    def any_session(self, pick: Random) -> int:
        return pick.choice(sorted(self.store.sessions))

    def fresh_number(self, session: int) -> int:
        state = self.store.sessions[session]
        return max([0, *state.leases, *state.writes]) + 1

    def any_held(self, pick: Random, kind: str) -> tuple[int, int] | None:
        held = sorted(
            (session, number) for holding, session, number in self.held if holding == kind
        )
        return pick.choice(held) if held else None

    def any_live(self, pick: Random) -> tuple[str, bytes] | None:
        """Tenant and key of a block that is in the index."""
        live = sorted(
            (tenant.name, key) for tenant in self.store.tenants for key, _ in tenant.index.items()
        )
        return pick.choice(live) if live else None

    def any_chain(self, pick: Random) -> Chain:
        """Mostly one that is there, or one that branches off it; now and then a new one."""
        live = self.any_live(pick) if pick.randrange(4) else None
        if live is None:
            return pick.choice(TENANTS), pick.choice(LAYOUTS), walk(pick, 1, 5)
        layout, path = path_of(live[1])
        stem = path[: len(path) - pick.choice([0, 0, 1, 2])]
        return live[0], layout, (stem + walk(pick, 0, 4) or path)[:8]

    def garbage(self, pick: Random) -> list[bytes]:
        """Keys in no order, known and unknown, of several layouts."""
        keys = []
        for _ in range(pick.randint(0, 6)):
            live = self.any_live(pick) if pick.randrange(2) else None
            keys.append(live[1] if live else key_of(walk(pick, 1, 5), pick.choice(LAYOUTS)))
        return keys

    def storing(self, tenant: str, prepare: Callable[[], StorePlan]) -> StorePlan:
        """Runs a prepare_store and checks what it may do to others."""
        before = {usage.tenant: usage for usage in operators.usage(self.store)}
        held = {slot for slots in held_slots(self.store).values() for slot in slots}
        in_use = set(
            self.store.blocks.table.many.slot[self.store.blocks.table.live_rows()].tolist()
        )
        plan = prepare()
        self.check_limits({name: usage.usage_bytes for name, usage in before.items()})
        after = {usage.tenant: usage.usage_bytes for usage in operators.usage(self.store)}
        # Who has a quota of its own, or is one tenant too many, takes also from those that have
        # only the default quota.
        takes_more = before[tenant].own_quota if tenant in before else len(before) >= LIMITS.tenants
        for name, usage in before.items():
            if (
                name != tenant
                and usage.quota_bytes is not None
                and (usage.own_quota or not takes_more)
            ):
                floor = min(usage.usage_bytes, usage.quota_bytes)
                assert after.get(name, 0) >= floor, f"{tenant} pushed {name} below its quota"
        assert len(set(plan.slots.tolist())) == len(plan.slots)
        fresh = {slot for slot in plan.slots.tolist() if slot not in in_use}
        assert not fresh & held
        for slot in set(plan.slots.tolist()) & held:
            # Only another shard of a block that is being written, or was stored without it, may
            # share a slot.
            table = self.store.blocks.table
            (row,) = [r for r in table.live_rows().tolist() if table.slot[r] == slot]
            lacks = (
                ABSENT
                in self.store.layouts.get(table.layout[row]).checks[table.check[row]].tolist()
            )
            assert row in self.store.blocks.shards_in or lacks, (
                "a slot was handed out that somebody still holds"
            )
        return plan

    def check_limits(self, before: dict[str, int] | None = None) -> None:
        """Nobody uses more than its limit. The one exception: after a limit was lowered, blocks
        that somebody reads or writes are on their way out; then nothing is added."""
        for tenant in self.store.tenants:
            if tenant.limit_bytes is None:
                continue
            if before is not None and tenant.is_over_limit:
                assert tenant.usage_bytes <= before[tenant.name], (
                    f"{tenant.name} stored while over its limit"
                )
            sizes = [
                self.store.layouts.get(self.store.blocks.table.layout[row])
                for _, row in tenant.index.items()
            ]
            indexed = sum(layout.slot_bytes for layout in sizes)
            assert tenant.usage_bytes <= tenant.limit_bytes or indexed <= tenant.limit_bytes

    def check_quotas(self) -> None:
        """No lookup and no store lets tenants hold so much beyond their own quotas that another own
        quota could not be had. (A quota that is set or raised while others hold more waits until
        they let go.)"""
        nbytes, owner = self.slot_sizes(), self.slot_owners()
        held = {slot for slots in held_slots(self.store).values() for slot in slots}
        for session in self.store.closing:  # whose blocks are let go of piece by piece
            rows = [
                *session.leases.values(),
                *(row for write in session.writes.values() for row in write.rows),
            ]
            held |= {slot for row in rows for slot in slots_down_to(self.store, row)}
        needed = 0
        for tenant in self.store.tenants:
            share = tenant.quota_bytes if tenant.own_quota_bytes is not None else 0
            assert share is not None
            needed += max(share, sum(nbytes[slot] for slot in held if owner[slot] == tenant.number))
        fit = needed <= self.store.slabs.capacity_bytes
        assert fit or not self.quotas_fit, "tenants hold what others are promised"
        self.quotas_fit = fit

    def slot_sizes(self) -> dict[int, int]:
        table, layouts = self.store.blocks.table, self.store.layouts
        return {
            table.slot[row]: layouts[table.layout[row]].slot_bytes
            for row in table.live_rows().tolist()
        }

    def slot_owners(self) -> dict[int, int]:
        table = self.store.blocks.table
        return {table.slot[row]: table.tenant[row] for row in table.live_rows().tolist()}

    def check_promises(self) -> None:
        check_integrity(self.store)
        self.check_quotas()
        self.check_limits()
        held = held_slots(self.store)
        for holding, slots in held.items():
            if holding in self.held:
                assert self.held[holding] == slots, f"{holding}: its slots changed under it"
        self.held = held

    def expect_refusal(self, code: str, request: Callable[[], object]) -> None:
        before = snapshot(self.store)
        with pytest.raises(RequestError) as refusal:
            request()
        assert refusal.value.code == code
        assert refusal.value.field
        assert snapshot(self.store) == before, f"a request refused with {code} changed something"


class StoreMachine(PromisesMachine):
    """One slot size: the model says exactly what happens."""

    model: StoreModel

    @initialize(
        slabs=st.sampled_from([2, 3, 4, 1]),
        per_slab=st.sampled_from([3, 4, 2, 1]),
        default_quota=st.sampled_from(QUOTAS),
        pick=picks,
    )
    def start(self, slabs: int, per_slab: int, default_quota: int | None, pick: Random) -> None:
        pool_bytes = slabs * per_slab * SLOT
        default_quota = None if default_quota is None else min(default_quota, pool_bytes)
        self.store = Store(pool_bytes, per_slab * SLOT, LIMITS, default_quota)
        self.store.add_slabs(0, slabs)
        self.model = StoreModel(slabs * per_slab, SLOT, LIMITS, default_quota)
        for session in (1, 2):
            self.store.open_session(session)
            self.model.open_session(session)
        for shards in (1, 2, 3):
            layout = self.store.open_layout(1, b"layout %d" % shards, (64,) * shards)
            assert layout.slot_bytes == SLOT
            self.model.layouts[layout.number] = shards
        self.restore(pick)

    def restore(self, pick: Random) -> None:
        """What a start finds kept, half of the time: perhaps set when the pool was larger."""
        if pick.randrange(2):
            return
        names = [name for name in ("ann", "bob", "cy") if pick.randrange(2)]
        quotas = {name: pick.randint(0, 20) * SLOT for name in names if pick.randrange(2)}
        limits = {name: pick.randint(0, 12) * SLOT for name in names if pick.randrange(2)}
        defaults = (pick.choice([*QUOTAS, 100 * SLOT]), pick.choice([None, *LIMIT_BYTES]))
        self.model.restore(quotas, limits, *defaults)
        operators.restore(self.store, quotas, limits, *defaults, self.now_ms)

    def both(
        self, in_model: Callable[[], Any], in_store: Callable[[], Any]
    ) -> tuple[Any, Any] | None:
        """Runs a request in both. None if both refuse it, and the store then has not changed."""
        try:
            expected = in_model()
        except RequestError as refusal:
            self.expect_refusal(refusal.code, in_store)
            return None
        return expected, in_store()

    def same(self, in_model: Callable[[], Any], in_store: Callable[[], Any]) -> None:
        answers = self.both(in_model, in_store)
        assert answers is None or answers[0] == answers[1]

    @rule(pick=picks)
    def step(self, pick: Random) -> None:
        engine = {
            self.store_whole_chain: 9,
            self.store_some_shards: 6,
            self.complete_store: 4,
            self.abandon_store: 1,
        }
        engine |= {self.lookup: 6, self.release: 4, self.finish: 2, self.wait: 2}
        engine |= {self.open_session: 1, self.close_session: 1, self.claim_quota: 3}
        operator = {self.drop_block: 2, self.set_quota: 2, self.set_default_quota: 1, self.clear: 1}
        operator |= {self.set_limit: 3, self.set_default_limit: 1}
        nonsense = {self.store_garbage: 2, self.lookup_garbage: 2, self.store_out_of_bounds: 1}
        nonsense |= {self.lookup_out_of_bounds: 1}
        self.one_of(pick, engine | operator | nonsense)

    # -- sessions and time -------------------------------------------------------------------------

    def open_session(self, pick: Random) -> None:
        session = pick.randint(1, 4)
        self.same(
            lambda: self.model.open_session(session), lambda: self.store.open_session(session)
        )

    def close_session(self, pick: Random) -> None:
        if len(self.store.sessions) == 1:
            return
        session = self.any_session(pick)
        self.same(
            lambda: self.model.close_session(session),
            lambda: self.store.close_session(session, self.now_ms),
        )

    def wait(self, pick: Random) -> None:
        self.now_ms += pick.randint(1, 30)

    # -- stores ------------------------------------------------------------------------------------

    def store_whole_chain(self, pick: Random) -> None:
        """All shards, as one engine would, whose ranks hold one or several of them each: what makes
        blocks visible."""
        priority, ttl_ms = pick.choice([50, 50, 0, 100]), pick.choice([0, 0, 5, 50])
        session, (tenant, layout, path) = self.any_session(pick), self.any_chain(pick)
        keys, count = keys_of(path, layout), self.model.layouts[layout]
        at_a_time = pick.randint(1, count)
        for first in range(0, count, at_a_time):
            shard, *further = range(first, min(first + at_a_time, count))
            write = self.fresh_number(session)
            self.prepare(
                session, write, tenant, layout, shard, b"", keys, priority, ttl_ms, tuple(further)
            )
            if write in self.store.sessions[session].writes:
                self.complete(session, write)

    def store_some_shards(self, pick: Random) -> None:
        """Left open: others may join, complete or abandon it."""
        priority, ttl_ms = pick.choice([50, 50, 0, 100]), pick.choice([0, 0, 5, 50])
        session, (tenant, layout, path) = self.any_session(pick), self.any_chain(pick)
        keys = keys_of(path, layout)
        known = pick.choice([0, pick.randint(0, len(keys))])
        count = self.model.layouts[layout]
        shard, *further = sorted(pick.sample(range(count), pick.randint(1, count)))
        parent = keys[known - 1] if known else b""
        write = self.fresh_number(session)
        ask = (session, write, tenant, layout, shard, parent, keys[known:], priority, ttl_ms)
        self.prepare(*ask, tuple(further))

    def claim_quota(self, pick: Random) -> None:
        """A tenant within its own quota gets all of it, whatever the others read and write."""
        named = [tenant for tenant in self.store.tenants if tenant.own_quota_bytes is not None]
        if not named or not self.quotas_fit:
            return
        tenant, session = pick.choice(named), self.any_session(pick)
        may_write = LIMITS.writing_blocks_per_session - self.store.sessions[session].writing_blocks
        blocks = min(
            (tenant.quota_bytes - tenant.usage_bytes) // SLOT, LIMITS.blocks_per_request, may_write
        )
        keys = keys_of([pick.randint(2, 9) for _ in range(blocks)], 1)
        # Quotas that are no whole number of slots are kept rounded up, and may together be more
        # than the pool.
        kept = sum(
            max(-(-other.share_bytes // SLOT) * SLOT, other.held_bytes)
            for other in self.store.tenants
        )
        if blocks <= 0 or tenant.index.get(keys[0]) != NO_ROW or kept > self.store.pool_bytes:
            return
        write = self.fresh_number(session)
        self.prepare(session, write, tenant.name, 1, 0, b"", keys, 50, 0)
        assert len(self.store.sessions[session].writes[write].rows) == blocks, (
            f"{tenant.name} is refused its quota"
        )

    def store_garbage(self, pick: Random) -> None:
        session, keys, live = self.any_session(pick), self.garbage(pick), self.any_live(pick)
        layout = pick.choice(LAYOUTS)
        if live is None or pick.randrange(2):
            live = pick.choice(TENANTS), b""
        self.prepare(session, self.fresh_number(session), live[0], layout, 0, live[1], keys, 50, 0)

    def store_out_of_bounds(self, pick: Random) -> None:
        """Sessions, numbers, shards and hints that may not exist, may exist already, or are out of
        range."""
        session, number, shard = (
            pick.randint(1, 4),
            pick.randint(1, 4),
            pick.choice([0, 0, 0, 1, 2, 3]),
        )
        tenant, layout, path = self.any_chain(pick)
        keys = keys_of(path + walk(pick, 0, 2), layout)
        priority, ttl_ms = pick.choice([50, 50, 50, -1, 101]), pick.choice([0, 0, 0, -1])
        further = pick.choice([(), (), (), (1,), (2, 1), (1, 1), (-1,)])
        self.prepare(session, number, tenant, layout, shard, b"", keys, priority, ttl_ms, further)

    def prepare(
        self,
        session: int,
        write: int,
        tenant: str,
        layout: int,
        shard: int,
        parent: bytes,
        keys: list[bytes],
        priority: int,
        ttl_ms: int,
        further_shards: tuple[int, ...] = (),
    ) -> None:
        ask = (session, write, tenant, layout, shard, parent)
        hints = (self.now_ms, priority, ttl_ms, further_shards)
        answers = self.both(
            lambda: self.model.prepare_store(*ask, keys, *hints),
            lambda: self.storing(
                tenant, lambda: self.store.prepare_store(*ask, b"".join(keys), *hints)
            ),
        )
        if answers is not None:
            expected, plan = answers
            assert plan.positions.tolist() == expected.positions
            assert (plan.refused, plan.orphan) == (expected.refused, expected.orphan)
            assert plan.apart == expected.apart
            index = owner.index if (owner := self.store.tenants.get(tenant)) else KeyIndex()
            rows = [index.get(keys[position]) for position in expected.positions]
            assert plan.slots.tolist() == [self.store.blocks.table.slot[row] for row in rows]

    def complete_store(self, pick: Random) -> None:
        self.complete(*(self.any_held(pick, "write") or (1, 1)), wrong=pick.choice([0, 0, 0, 0, 1]))

    def complete(self, session: int, write: int, wrong: int = 0) -> None:
        state = self.model.sessions.get(session)
        work = state.writes.get(write) if state else None
        count = (len(work.blocks) * len(work.shards) if work else 0) + wrong
        first = 1000 * self.store.blocks.sequence
        checksums = [ABSENT if at % 5 == first // 1000 % 7 else first + at for at in range(count)]
        self.same(
            lambda: self.model.complete_store(session, write, checksums),
            lambda: (
                self.store.complete_store(
                    session, write, np.array(checksums, np.uint64), self.now_ms
                ).blocks
            ),
        )

    def abandon_store(self, pick: Random) -> None:
        session, write = self.any_held(pick, "write") or (1, 1)
        for _ in range(pick.choice([1, 1, 2])):
            self.same(
                lambda: self.model.abandon_store(session, write),
                lambda: self.store.abandon_store(session, write, self.now_ms),
            )

    # -- lookups -----------------------------------------------------------------------------------

    def lookup(self, pick: Random) -> None:
        session, (tenant, layout, path) = self.any_session(pick), self.any_chain(pick)
        skip = pick.choice([0, 0, pick.randint(0, len(path))])
        self.look(session, self.fresh_number(session), tenant, layout, keys_of(path, layout), skip)

    def lookup_out_of_bounds(self, pick: Random) -> None:
        session, number, skip = pick.randint(1, 4), pick.randint(1, 4), pick.choice([0, 0, -1, 9])
        tenant, layout, path = self.any_chain(pick)
        self.look(session, number, tenant, layout, keys_of(path, layout), skip)

    def lookup_garbage(self, pick: Random) -> None:
        session, keys = self.any_session(pick), self.garbage(pick)
        tenant, layout, skip = pick.choice(TENANTS), pick.choice(LAYOUTS), pick.randint(0, 2)
        self.look(session, self.fresh_number(session), tenant, layout, keys, skip)

    def look(
        self, session: int, lease: int, tenant: str, layout: int, keys: list[bytes], skip: int
    ) -> None:
        def in_store() -> Hit:
            return self.store.lookup(
                session, lease, tenant, layout, b"".join(keys), skip, self.now_ms
            )

        if self.is_chain(tenant, layout, keys):
            answers = self.both(
                lambda: self.model.lookup(session, lease, tenant, keys, skip), in_store
            )
            if answers is not None:
                found, hit = answers
                assert hit.blocks == len(found)
                self.check_described(hit, found[skip:])
            return
        # Keys that form no chain may give any count, but nothing is leased or described that is not
        # one.
        answers = self.both(lambda: self.model.check_lookup(session, lease, keys, skip), in_store)
        if answers is not None and len(answers[1].slots):
            hit = answers[1]
            deepest = self.model.find(tenant, keys[hit.blocks - 1])
            assert deepest is not None
            found = self.model.chain(deepest)[-len(hit.slots) :]
            assert [block.key for block in found] == keys[skip : hit.blocks]
            assert all(block.state == "ready" and block.layout == layout for block in found)
            self.check_described(hit, found)
            self.model.lease(session, lease, deepest)

    def is_chain(self, tenant: str, layout: int, keys: list[bytes]) -> bool:
        """Whether those of the keys that are known hang on one another. What was stored as garbage
        does not."""
        blocks = [self.model.find(tenant, key) for key in keys]
        known = [block for block in blocks if block is not None]
        return blocks[: len(known)] == known and all(
            block.parent is above and block.layout == layout
            for above, block in zip([None, *known], known, strict=False)
        )

    def check_described(self, hit: Hit, found: list[ModelBlock]) -> None:
        assert len(hit.slots) == len(found)
        table = self.store.blocks.table
        for slot, checksums, block in zip(
            hit.slots.tolist(), hit.checksums.tolist(), found, strict=True
        ):
            owner = self.store.tenants.get(block.tenant)
            assert owner and table.slot[owner.index.get(block.key)] == slot
            assert checksums == [block.checksums[shard] for shard in range(block.shards)]

    def release(self, pick: Random) -> None:
        session, lease = self.any_held(pick, "lease") or (1, 1)
        for _ in range(pick.choice([1, 1, 2])):
            self.same(
                lambda: self.model.release(session, lease),
                lambda: self.store.release(session, lease, self.now_ms),
            )

    def finish(self, pick: Random) -> None:
        session, (tenant, layout, path) = self.any_session(pick), self.any_chain(pick)
        key = key_of(path, layout)
        self.same(
            lambda: self.model.finish(session, tenant, key),
            lambda: self.store.finish(session, tenant, key, self.now_ms),
        )

    # -- operators ---------------------------------------------------------------------------------

    def drop_block(self, pick: Random) -> None:
        tenant, layout, path = self.any_chain(pick)
        key = key_of(path, layout)
        self.same(
            lambda: self.model.drop_block(tenant, key),
            lambda: self.store.drop_blocks(tenant, [key]),
        )

    def clear(self, pick: Random) -> None:
        tenant = pick.choice([*TENANTS, None])
        self.same(lambda: self.model.clear(tenant), lambda: operators.clear(self.store, tenant))

    def set_quota(self, pick: Random) -> None:
        tenant, quota = pick.choice(TENANTS), pick.choice(QUOTAS)
        self.quotas_fit = False  # until it is seen that they do
        self.same(
            lambda: self.model.set_quota(tenant, quota),
            lambda: operators.set_quota(self.store, tenant, quota, self.now_ms),
        )

    def set_default_quota(self, pick: Random) -> None:
        quota = pick.choice(QUOTAS)
        self.same(
            lambda: self.model.set_default_quota(quota),
            lambda: operators.set_default_quota(self.store, quota, self.now_ms),
        )

    def set_limit(self, pick: Random) -> None:
        tenant, limit = pick.choice(TENANTS), pick.choice(LIMIT_BYTES)
        self.quotas_fit = False
        self.same(
            lambda: self.model.set_limit(tenant, limit, self.now_ms),
            lambda: operators.set_limit(self.store, tenant, limit, self.now_ms),
        )

    def set_default_limit(self, pick: Random) -> None:
        limit = pick.choice([None, None, *LIMIT_BYTES])
        self.quotas_fit = False
        self.same(
            lambda: self.model.set_default_limit(limit, self.now_ms),
            lambda: operators.set_default_limit(self.store, limit, self.now_ms),
        )

    # -- what holds after every rule ---------------------------------------------------------------

    @invariant()
    def equals_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        self.check_promises()
        table, model = self.store.blocks.table, self.model
        assert {usage.tenant: usage for usage in operators.usage(self.store)} == {
            name: TenantUsage(
                name,
                sum(block.tenant == name for block in model.blocks),
                model.usage(name),
                model.quota(name),
                name in model.own_quotas,
                model.own_quotas.get(name),
                model.limit(name),
                name in model.own_limits,
            )
            for name in model.tenants()
        }
        rows = table.live_rows().tolist()
        names = {tenant.number: tenant.name for tenant in self.store.tenants}
        assert sorted(
            (
                names[table.tenant[row]],
                table.keys[row],
                STATE_NAMES[table.state[row]],
                table.priority[row],
            )
            for row in rows
        ) == sorted(
            (block.tenant, block.key, block.state, block.priority) for block in model.blocks
        )
        for number, session in self.store.sessions.items():
            held = model.sessions[number]
            assert {n: table.keys[row] for n, row in session.leases.items()} == {
                n: block.key for n, block in held.leases.items()
            }
            assert {
                n: (tuple(w.shards), [table.keys[row] for row in w.rows])
                for n, w in session.writes.items()
            } == {n: (w.shards, [block.key for block in w.blocks]) for n, w in held.writes.items()}
        for block in model.blocks:
            if block.state == "ready":
                assert len(block.checksums) == block.shards
                assert block.parent is None or block.parent.state == "ready"


class SlabMachine(PromisesMachine):
    """Slots of three sizes in one pool: which slab moves is policy; the promises hold all the
    same."""

    SHARD_BYTES = ((4000,), (4096, 4000), (12000,))

    @initialize(slabs=st.sampled_from([2, 3, 4, 1]), default_quota=st.sampled_from(QUOTAS))
    def start(self, slabs: int, default_quota: int | None) -> None:
        slab_bytes = 6 * SLOT
        self.store = Store(
            slabs * slab_bytes, slab_bytes, LIMITS, default_quota and min(default_quota, slab_bytes)
        )
        self.store.add_slabs(0, slabs)
        for session in (1, 2):
            self.store.open_session(session)
        for number, shard_bytes in enumerate(self.SHARD_BYTES, start=1):
            layout = self.store.open_layout(1, b"layout %d" % number, shard_bytes)
            assert (layout.number, layout.slot_bytes) == (number, number * SLOT)

    @rule(pick=picks)
    def step(self, pick: Random) -> None:
        engine = {
            self.store_chain: 9,
            self.complete_store: 3,
            self.abandon_store: 1,
            self.lookup: 5,
            self.release: 4,
        }
        rare = {
            self.restart_session: 1,
            self.drop_block: 2,
            self.set_quota: 2,
            self.set_limit: 2,
            self.wait: 1,
        }
        self.one_of(pick, engine | rare)

    def quietly(self, request: Callable[[], Any]) -> Any:
        """Runs a request; a refusal is fine, but changes nothing."""
        before = snapshot(self.store)
        try:
            return request()
        except RequestError as refusal:
            code = refusal.code
        assert snapshot(self.store) == before, f"a request refused with {code} changed something"
        return None

    def store_chain(self, pick: Random) -> None:
        ttl_ms, complete = pick.choice([0, 0, 5, 50]), pick.randrange(4)
        session, (tenant, layout, path) = self.any_session(pick), self.any_chain(pick)
        keys = b"".join(keys_of(path, layout))
        for shard in range(len(self.SHARD_BYTES[layout - 1])):
            ask = (
                session,
                self.fresh_number(session),
                tenant,
                layout,
                shard,
                b"",
                keys,
                self.now_ms,
                50,
                ttl_ms,
            )
            self.quietly(
                lambda ask=ask: self.storing(tenant, lambda: self.store.prepare_store(*ask))
            )
            if complete and ask[1] in self.store.sessions[session].writes:
                self.complete(session, ask[1])

    def complete_store(self, pick: Random) -> None:
        self.complete(*(self.any_held(pick, "write") or (1, 1)))

    def complete(self, session: int, write: int) -> None:
        work = self.store.sessions[session].writes.get(write)
        checksums = np.zeros(len(work.rows) if work else 0, np.uint64)
        self.quietly(lambda: self.store.complete_store(session, write, checksums, self.now_ms))

    def abandon_store(self, pick: Random) -> None:
        self.store.abandon_store(*(self.any_held(pick, "write") or (1, 1)), self.now_ms)

    def lookup(self, pick: Random) -> None:
        session, (tenant, layout, path) = self.any_session(pick), self.any_chain(pick)
        keys = keys_of(path, layout)
        owner, table = self.store.tenants.get(tenant), self.store.blocks.table
        rows = [owner.index.get(key) if owner else NO_ROW for key in keys]
        ready = [  # what hangs on a dropped block is in the index until it is swept
            row != NO_ROW and table.state[row] == READY and table.parent[row] == above
            for above, row in pairwise([NO_ROW, *rows])
        ]
        ask = (session, self.fresh_number(session), tenant, layout, b"".join(keys), 0, self.now_ms)
        hit = self.quietly(lambda: self.store.lookup(*ask))
        if hit is not None:
            blocks = ready.index(False) if False in ready else len(ready)
            assert hit.blocks == blocks or (
                hit.blocks < blocks and self.store.tenants.reserved_bytes
            )
            assert hit.slots.tolist() == [table.slot[row] for row in rows[: hit.blocks]]

    def release(self, pick: Random) -> None:
        self.store.release(*(self.any_held(pick, "lease") or (1, 1)), self.now_ms)

    def restart_session(self, pick: Random) -> None:
        session = self.any_session(pick)
        self.store.close_session(session, self.now_ms)
        self.store.open_session(session)

    def drop_block(self, pick: Random) -> None:
        tenant, layout, path = self.any_chain(pick)
        self.store.drop_blocks(tenant, [key_of(path, layout)])

    def set_quota(self, pick: Random) -> None:
        tenant, quota = pick.choice(TENANTS), pick.choice(QUOTAS)
        self.quotas_fit = False
        self.quietly(lambda: operators.set_quota(self.store, tenant, quota, self.now_ms))

    def set_limit(self, pick: Random) -> None:
        tenant, limit = pick.choice(TENANTS), pick.choice(LIMIT_BYTES)
        self.quotas_fit = False
        self.quietly(lambda: operators.set_limit(self.store, tenant, limit, self.now_ms))

    def wait(self, pick: Random) -> None:
        self.now_ms += pick.randint(1, 30)

    @invariant()
    def promises_hold(self) -> None:
        if hasattr(self, "store"):
            self.check_promises()


class PiecesMachine(SlabMachine):
    """The same where a turn has room for hardly any block: most of what is taken out of use, given
    back or moved is on its way when the next request comes."""

    @initialize(
        slabs=st.sampled_from([2, 3, 4, 1]),
        default_quota=st.sampled_from(QUOTAS),
        a_turn=st.integers(1, 3),
    )
    def start(self, slabs: int, default_quota: int | None, a_turn: int) -> None:  # type: ignore[override]
        super().start(slabs, default_quota)
        self.store.blocks.a_turn = a_turn
        self.store.blocks.order.looks_a_turn = a_turn

    @rule(pick=picks)
    def begin(self, pick: Random) -> None:
        self.one_of(
            pick, {self.clear: 2, self.tidy: 4, self.open_layout: 1, self.set_default_limit: 1}
        )

    def clear(self, pick: Random) -> None:
        indexed = {tenant.name: len(tenant.index) for tenant in self.store.tenants}
        tenant = pick.choice([*indexed, None])
        count = operators.clear(self.store, tenant)
        assert count == (sum(indexed.values()) if tenant is None else indexed[tenant])
        cleared = [self.store.tenants.get(name) for name in indexed if tenant in (None, name)]
        assert not any(owner.index for owner in cleared if owner), "it can be found no more"

    def tidy(self, pick: Random) -> None:
        freed, evicted, a_turn = (
            self.store.blocks.freed,
            self.store.eviction.evictions,
            self.store.blocks.a_turn,
        )
        self.store.tidy(self.now_ms)
        assert (
            self.store.blocks.freed - freed
            <= a_turn + self.store.eviction.evictions - evicted
            <= 2 * a_turn
        )

    def open_layout(self, pick: Random) -> None:
        """There are three, and a fourth one is one too many when a fifth comes."""
        name = b"layout %d" % pick.randint(1, 6)
        session = self.any_session(pick)
        shard_bytes = self.SHARD_BYTES[int(name[-1:]) - 1] if name < b"layout 4" else (4000,)
        self.quietly(lambda: self.store.open_layout(session, name, shard_bytes))

    def set_default_limit(self, pick: Random) -> None:
        limit = pick.choice([None, None, *LIMIT_BYTES])
        self.quotas_fit = False
        self.quietly(lambda: operators.set_default_limit(self.store, limit, self.now_ms))

    def storing(self, tenant: str, prepare: Callable[[], StorePlan]) -> StorePlan:
        return prepare()

    def check_limits(self, before: dict[str, int] | None = None) -> None:
        """Whoever is still over its limit is known to be."""
        if not self.store.has_to_tidy:
            super().check_limits(before)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for session in list(self.store.sessions):
                self.store.close_session(session, self.now_ms)
            while self.store.tidy(self.now_ms):
                pass
            self.check_promises()
            assert all(not tenant.is_over_limit for tenant in self.store.tenants)
            operators.clear(self.store)
            while self.store.tidy(self.now_ms):
                pass
            assert (
                not len(self.store.blocks.table)
                and self.store.slabs.unused_slabs == self.store.slabs.slabs
            )


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = SETTINGS
TestSlabMachine = SlabMachine.TestCase
TestSlabMachine.settings = SETTINGS
TestPiecesMachine = PiecesMachine.TestCase
TestPiecesMachine.settings = SETTINGS
