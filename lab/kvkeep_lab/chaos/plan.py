"""What happens in a chaos run, drawn from its seed before anything runs: engines, requests, faults.

A plan is a list of items, each of which can be left out without changing the others: that is how a
failing run is made small (chaos_shrink.py). What an item does in detail (which message, which bit)
it draws from a seed of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvkeep.engine.config import EngineConfig
from kvkeep.engine.engine import Engine
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep_lab.simulation.oracle import OracleModel

VOCABULARY = 97
SALTS = (None, "blue", "green")

# Of a send, or of a copy.
RATES: dict[str, tuple[float, ...]] = {
    "cut_connection": (0.002, 0.03),
    "half_message": (0.01, 0.08),
    "late_message": (0.01, 0.05),
    "corrupted_message": (0.01, 0.05),
    "flipped_payload_bit": (0.05, 0.3),
    "slow_tier": (0.02, 0.1),
    "failing_tier": (0.01, 0.05),
}
# Of an operation of a disk, in runs with one.
DISK_RATES: dict[str, tuple[float, ...]] = {
    "slow_disk": (0.05, 0.3),
    "stalled_disk": (0.002, 0.01),
    "failing_disk": (0.02, 0.1),
    "full_disk": (0.05, 0.3),
    "garbage_on_disk": (0.05, 0.4),
    "half_on_disk": (0.05, 0.3),
}
DISK_MOMENTS = ("power_cut", "evicted_memory")
# Of a call of the service behind a shared tier, or of a value; in runs with several hosts.
SERVICE_RATES: dict[str, tuple[float, ...]] = {
    "slow_service": (0.02, 0.2),
    "stalled_service": (0.0005, 0.003),
    "failing_service": (0.01, 0.1),
    "failing_delete": (0.5, 1.0),
    "garbage_of_service": (0.02, 0.2),
    "half_value": (0.02, 0.2),
    "full_service": (0.05, 0.5),
    "evicting_service": (0.002, 0.02),
    "lost_write": (0.02, 0.2),
    "late_write": (0.01, 0.1),
}
SERVICE_MOMENTS = ("service_restart", "cut_off", "lost_entry")
# At a moment, each so often.
MOMENTS: dict[str, int] = {
    "server_crash": 3,
    "server_crash_in_request": 3,
    "server_crash_in_copy": 6,
    "server_crash_then_fresh": 4,
    "torn_index": 2,
    "server_restart": 2,
    "server_pause": 3,
    "server_of_other_user": 3,
    "stalled_connection": 3,
    "client_crash": 2,
    "client_crash_in_copy": 3,
    "client_pause": 2,
    "client_pause_in_copy": 5,
    "flipped_pool_bit": 4,
    "server_clock_jump": 2,
    "client_clock_jump": 2,
    "quota_change": 3,
    "clear": 2,
    "drain": 1,
    "abort": 2,
    "preemption": 2,
    "forgotten_prefixes": 6,
}
# Many faults of one kind, in this share of the runs: one alone rarely meets what it can harm.
MANY: dict[str, tuple[int, float]] = {"quota_change": (12, 0.2), "torn_index": (3, 0.15)}
_CROWDED_POOL_BLOCKS = 12  # in runs of many quotas: quotas matter only in a full pool
FAULTS = (
    *RATES,
    *DISK_RATES,
    *SERVICE_RATES,
    *MOMENTS,
    *DISK_MOMENTS,
    *SERVICE_MOMENTS,
    "full_pool",
)
_WITH_DISK = 0.25  # of all seeds
_WITH_HOSTS = 0.33  # of those without a disk


@dataclass(frozen=True)
class Cut:
    """How a model is spread and its blocks are cut. Engines of one cut share blocks."""

    config: EngineConfig
    use_mla: bool

    def model(self) -> OracleModel:
        return OracleModel(
            vocab_size=VOCABULARY, use_mla=self.use_mla, words=4 if self.use_mla else 8
        )


@dataclass(frozen=True)
class EngineItem:
    """An engine process. `kept`: its workers' connections are polled by a thread of their own, too,
    as those of `kvkeep.connect` are, so that a session may end in the middle of a copy."""

    cut: int
    shared_memory: bool
    kept: bool
    longest_step_us: int
    host: int = 0


@dataclass(frozen=True)
class DiskItem:
    """A disk below the server. `patience` is that of all engines."""

    slabs: int
    patience: str


@dataclass(frozen=True)
class HostsItem:
    """Several hosts, and a tier that they share. `patience` is that of all engines."""

    hosts: int
    patience: str


@dataclass(frozen=True)
class Arrival:
    """A request, and what it must answer."""

    at_ms: int
    engine: int
    salt: str | None
    tokens: tuple[int, ...]
    sampling: SamplingParams
    reference: tuple[int, ...]


@dataclass(frozen=True)
class Rate:
    """A fault that befalls messages or copies, each with this chance."""

    fault: str
    chance: float


@dataclass(frozen=True)
class Moment:
    """A fault at a time."""

    at_ms: int
    fault: str
    seed: int


Item = EngineItem | DiskItem | HostsItem | Arrival | Rate | Moment


@dataclass(frozen=True)
class Plan:
    """Everything that one seed decides beforehand."""

    seed: int
    cuts: tuple[Cut, ...]
    pool_blocks: int
    switch_chance: float
    any_line: bool  # threads of clients may be stopped at any line of theirs
    duration_ms: int
    items: tuple[Item, ...]

    def without(self, dropped: Sequence[int]) -> Plan:
        """The plan without the items of these numbers."""
        left = set(dropped)
        items = tuple(item for number, item in enumerate(self.items) if number not in left)
        return replace(self, items=items)


def draw(seed: int) -> Plan:
    """The plan of this seed."""
    chance = random.Random(f"plan {seed}")
    cuts = [_cut(chance)]
    if chance.random() < 0.2:
        cuts.append(replace(_cut(chance), use_mla=cuts[0].use_mla))  # it gives the same answers
    duration_ms = chance.choice((600, 1_500, 3_000))
    engines = [_engine(chance, 0) for _ in range(chance.choice((1, 2, 2, 3)))]
    if len(cuts) > 1:
        engines.append(_engine(chance, 1))
    arrivals = _arrivals(chance, cuts[0], len(engines), duration_ms)
    calm = chance.random() < 0.08
    rates = [] if calm else _rates(chance)
    moments = [] if calm else _moments(chance, duration_ms)
    pool_blocks = chance.choice((6, 12, 12, 40, 150))
    if not calm:
        many = _many_moments(seed, duration_ms)
        if any(moment.fault == "quota_change" for moment in many):
            pool_blocks = min(pool_blocks, _CROWDED_POOL_BLOCKS)
        moments = sorted([*moments, *many], key=lambda moment: moment.at_ms)
    below = _disk(seed, arrivals, duration_ms, calm)
    plan = Plan(
        seed,
        tuple(cuts),
        pool_blocks,
        chance.choice((0.02, 0.1, 0.4)),
        chance.random() < 0.3,
        duration_ms,
        (*engines, *arrivals, *rates, *moments, *below),
    )
    return plan if below else _on_hosts(plan, calm)


def _disk(seed: int, arrivals: Sequence[Arrival], duration_ms: int, calm: bool) -> list[Item]:
    """In some runs a disk, its faults, and requests that come again later. They have a chance of
    their own, so that the other items are those of a run without a disk."""
    chance = random.Random(f"disk {seed}")
    if chance.random() >= _WITH_DISK:
        return []
    patience = chance.choice(("wait", "timeout=50", "best_effort"))
    items: list[Item] = [DiskItem(chance.choice((2, 8, 40)), patience)]
    for arrival in chance.choices(arrivals, k=chance.choice((10, 30))):
        items.append(replace(arrival, at_ms=chance.randrange(arrival.at_ms, duration_ms)))
    if calm:
        return items
    few = chance.choice((0.0, 0.5, 0.9))
    items += [
        Rate(fault, chance.choice(rates))
        for fault, rates in DISK_RATES.items()
        if chance.random() < few
    ]
    moments = [
        *["power_cut"] * chance.choice((0, 1, 2)),
        *["evicted_memory"] * chance.choice((4, 12)),
        *["clear"] * chance.choice((0, 0, 2)),
    ]
    return items + [
        Moment(chance.randrange(duration_ms), fault, chance.randrange(1 << 30)) for fault in moments
    ]


def _on_hosts(plan: Plan, calm: bool) -> Plan:
    """In some runs several hosts with a shared tier, its faults, and requests that come again later,
    on any host. Everything takes longer: hosts hear of each other once a second, and some of what
    they know holds for five. Moments and requests keep their order."""
    chance = random.Random(f"hosts {plan.seed}")
    if chance.random() >= _WITH_HOSTS:
        return plan
    hosts = chance.choice((2, 2, 3))
    duration_ms = chance.choice((5_000, 12_000, 20_000))
    items: list[Item] = []
    engines = [item for item in plan.items if isinstance(item, EngineItem)]
    for number in range(max(hosts, len(engines))):
        engine = engines[number] if number < len(engines) else _engine(chance, 0)
        items.append(replace(engine, host=number % hosts))
    later = duration_ms / plan.duration_ms
    for item in plan.items:
        if isinstance(item, Arrival | Moment):
            items.append(replace(item, at_ms=int(item.at_ms * later)))
        elif isinstance(item, Rate):
            items.append(item)
    items.append(HostsItem(hosts, chance.choice(("wait", "wait", "timeout=50", "best_effort"))))
    arrivals = [item for item in items if isinstance(item, Arrival)]
    for arrival in chance.choices(arrivals, k=chance.choice((15, 40))):
        at_ms = chance.randrange(arrival.at_ms, duration_ms)
        items.append(replace(arrival, at_ms=at_ms, engine=chance.randrange(hosts)))
    if not calm:
        items += _service_faults(chance, duration_ms)
        items += _lost_entries(plan.seed, duration_ms)
    return replace(plan, duration_ms=duration_ms, items=tuple(items))


def _service_faults(chance: random.Random, duration_ms: int) -> list[Item]:
    few = chance.choice((0.0, 0.3, 0.7))
    rates: list[Item] = [
        Rate(fault, chance.choice(rates))
        for fault, rates in SERVICE_RATES.items()
        if chance.random() < few
    ]
    moments = [
        *["cut_off"] * chance.choice((0, 1, 3)),
        *["service_restart"] * chance.choice((0, 0, 1)),
        *["power_cut"] * chance.choice((0, 1, 2)),
        *["evicted_memory"] * chance.choice((4, 12, 30)),
        *["clear"] * chance.choice((0, 2, 5)),
    ]
    return rates + [
        Moment(chance.randrange(duration_ms), fault, chance.randrange(1 << 30)) for fault in moments
    ]


def _lost_entries(seed: int, duration_ms: int) -> list[Item]:
    """From a stream of their own, so that the rest of all plans stays as it is."""
    chance = random.Random(f"lost entries {seed}")
    return [
        Moment(chance.randrange(duration_ms), "lost_entry", chance.randrange(1 << 30))
        for _ in range(chance.choice((0, 0, 2, 6)))
    ]


def _engine(chance: random.Random, cut: int) -> EngineItem:
    return EngineItem(
        cut, chance.random() < 0.75, chance.random() < 0.4, chance.choice((3_000, 20_000, 60_000))
    )


def _cut(chance: random.Random) -> Cut:
    block_tokens = chance.choice((4, 8, 16))  # a block of 16 has 8 KiB, the others less than 4
    config = EngineConfig(
        block_tokens=block_tokens,
        num_blocks=-(-150 // block_tokens) + chance.choice((2, 10, 60)),
        max_num_batched_tokens=chance.choice((16, 64)),
        max_num_seqs=chance.choice((2, 6)),
        enable_prefix_caching=chance.random() < 0.4,
        tensor_parallel_size=chance.choice((1, 1, 1, 2)),
        pipeline_parallel_size=chance.choice((1, 1, 1, 1, 2)),
        sync_loads=chance.random() < 0.2,
    )
    return Cut(config, use_mla=chance.random() < 0.2)


def _rates(chance: random.Random) -> list[Rate]:
    few = chance.choice((0.0, 0.2, 0.5))
    return [
        Rate(fault, chance.choice(rates)) for fault, rates in RATES.items() if chance.random() < few
    ]


def _moments(chance: random.Random, duration_ms: int) -> list[Moment]:
    kinds = chance.sample(list(MOMENTS), chance.choice((1, 3, 6, len(MOMENTS))))
    count = chance.choice((0, 3, 8, 16))
    # what is rarest and worst: a copy under way while everything changes
    if chance.random() < 0.25:
        kinds, count = [kind for kind in MOMENTS if kind.endswith("in_copy")], 5
    weights = [MOMENTS[kind] for kind in kinds]
    quotas = chance.choice((0, 0, 0, 4))
    moments = [
        Moment(chance.randrange(duration_ms), fault, chance.randrange(1 << 30))
        for fault in chance.choices(kinds, weights, k=count)
    ]
    moments += [Moment(at_ms, "quota_change", chance.randrange(1 << 30)) for at_ms in range(quotas)]
    return sorted(moments, key=lambda moment: moment.at_ms)


def _many_moments(seed: int, duration_ms: int) -> list[Moment]:
    """Several faults of one kind, or none. They are drawn from a stream of their own, so that a
    change here leaves the rest of all plans as it is."""
    chance = random.Random(f"many moments {seed}")
    shares = [share for _, share in MANY.values()]
    fault = chance.choices((*MANY, ""), (*shares, 1 - sum(shares)))[0]
    count, _ = MANY.get(fault, (0, 0.0))
    return [
        Moment(chance.randrange(duration_ms // 4, duration_ms), fault, chance.randrange(1 << 30))
        for _ in range(count)
    ]


def _arrivals(chance: random.Random, cut: Cut, engines: int, duration_ms: int) -> list[Arrival]:
    """Conversations in rounds: each turn continues one that was answered before, or begins like
    one."""
    reference = Engine(cut.model(), _roomy(cut.config))
    stems = [
        tuple(chance.randrange(VOCABULARY) for _ in range(chance.choice((10, 30, 60))))
        for _ in range(2)
    ]
    histories: list[tuple[str | None, tuple[int, ...]]] = [
        (chance.choice(SALTS), stem) for stem in stems
    ]
    histories += [(salt, stems[0]) for salt in SALTS]  # the same words of several tenants
    arrivals: list[Arrival] = []
    rounds = 3
    for turn in range(rounds):
        asked = []
        for _ in range(chance.choice((2, 4, 6))):
            salt, history = chance.choice(histories)
            tail = tuple(chance.randrange(VOCABULARY) for _ in range(chance.choice((1, 3, 9, 20))))
            tokens = history[:110] + tail
            sampling = SamplingParams(
                max_tokens=chance.choice((1, 4, 12)),
                temperature=chance.choice((0.0, 0.8)),
                seed=chance.randrange(1000),
            )
            asked.append((salt, tokens, sampling, reference.add(list(tokens), sampling, salt=salt)))
        while reference.busy:
            reference.step()
        together = chance.random() < 0.4  # users who come at the same time, to the same engine
        place = (0, 0)
        for number, (salt, tokens, sampling, request) in enumerate(asked):
            if not (together and number):
                at_ms = duration_ms * turn // rounds + chance.randrange(
                    max(1, duration_ms // rounds)
                )
                place = (at_ms, chance.randrange(engines))
            answer = tuple(request.output_tokens)
            arrivals.append(Arrival(*place, salt, tokens, sampling, answer))
            histories.append((salt, tokens + answer))
    return sorted(arrivals, key=lambda arrival: arrival.at_ms)


def _roomy(config: EngineConfig) -> EngineConfig:
    """Room for everything, and nothing kept from one request to the next."""
    return EngineConfig(
        block_tokens=config.block_tokens,
        num_blocks=8 * -(-160 // config.block_tokens) + 2,
        max_num_batched_tokens=2_000,
        max_num_seqs=8,
        enable_prefix_caching=False,
    )
