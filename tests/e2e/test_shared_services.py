"""Hosts with each kind of shared tier, with the real service below, and reference engines on the
oracle model: one wrong byte gives a wrong token. One host stores and vanishes, and the other starts
from what it has computed. A fault of the service costs hits of the tier, and nothing else: `TABLE`
has all kinds and all faults."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import (
    POOL,
    at_rest,
    counting,
    engine,
    eventually,
    forget_local,
    oracle,
    prompt,
    serve,
    tokens_of,
    without_cache,
)
from secret_keys import key_file
from shared_services import KINDS, SharedService, service
from tiered import BLOCKS, FOUND, TOKENS, WAITS, is_ready, is_written, restart_cold, tiers, written

from kvkeep.testing.process import ServerProcess
from kvkeep.tiers.checked_tier import FRAME_BYTES, HEAD, SEGMENT_BYTES, Checksums
from kvkeep.units import MIB

STORED = BLOCKS + 1  # blocks: with what was generated a prompt has one more
TRIES = 5  # on a busy machine
MOST_IN_FLIGHT = 16 * MIB  # a quarter of the pool
MOST_PROMOTIONS = 4
BURDEN = 6  # prompts during a fault
MOST_CHAINS = 2 * BURDEN + 8


def host(running: SharedService, *more: str) -> ServerProcess:
    """A server with memory of its own."""
    return ServerProcess(*POOL, *more, "--tier", running.address, environment=running.environment)


# -- a host that vanishes


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_host_has_computed_the_other_hits_within_six_seconds_of_its_end(
    kind: str, tmp_path: Path
) -> None:
    """The other host uses the tier all the while. Its requests wait for the tier, but not at all
    costs: what no host seems to have written they do not wait for."""
    model = oracle()
    patience = {"kvkeep.tier_patience": "timeout=10000"}
    with (
        service(kind, tmp_path) as running,
        host(running) as other,
        engine(other, model, extra=patience) as two,
    ):
        serve(two, [prompt(TOKENS)])
        assert is_written(other), "it knows what the tier lacks"

        def is_hit_in_time() -> bool:
            prompts = [prompt(TOKENS) for _ in range(12)]
            expected = without_cache(model, prompts)
            with host(running) as first:
                with engine(first, model, num_blocks=1024) as one:
                    assert tokens_of(serve(one, prompts)) == expected
                assert is_written(first, len(prompts) * BLOCKS)
                first.stop(signal.SIGKILL)
                ended_s = time.monotonic()
            for tokens, right in zip(prompts, expected, strict=True):
                [answer] = serve(two, [counting(tokens)])
                assert answer.token_ids == right and answer.metrics.failed_loads == 0
                if answer.metrics.external_cached_tokens == FOUND:
                    return time.monotonic() < ended_s + 6
                time.sleep(0.5)
            return False

        assert any(is_hit_in_time() for _ in range(TRIES))
        assert at_rest(other), "a lease or a write outlived its request"


# -- faults

Objects = Mapping[str, bytes]


@dataclass(frozen=True)
class Fault:
    """`begin` damages a service, or those objects of it that have one prompt, for as long as its
    block lasts. `hit`: how many tokens of that prompt may come from the tier all the same.
    `is_shown`: whether operators see it. `stays`: the objects are not removed."""

    begin: Callable[[SharedService, Objects], AbstractContextManager[None]]
    hit: range = range(1)
    is_shown: Callable[[dict[str, Any]], bool] = lambda tier: True
    is_encrypted: bool = False
    stays: bool = False


def damaged(
    change: Callable[[bytes], bytes],
) -> Callable[[SharedService, Objects], AbstractContextManager[None]]:
    @contextmanager
    def begin(running: SharedService, objects: Objects) -> Iterator[None]:
        running.replace({name: change(data) for name, data in objects.items()})
        yield

    return begin


@contextmanager
def forged(running: SharedService, objects: Objects) -> Iterator[None]:
    """By someone who can write to the service and has no key: other objects that the hosts have
    sealed, or blocks with right checksums."""

    def forge(number: int, name: str, data: bytes, other: bytes) -> bytes:
        if number % 2:
            return other
        content = memoryview(b"\1" * min(len(data) - FRAME_BYTES, SEGMENT_BYTES))
        head = HEAD.pack(*HEAD.unpack(data[: HEAD.size])[:2], Checksums.kind, 0, 0, len(content))
        proof, _ = Checksums().seal(running.tier_name(name), head, content)
        return head + proof + content

    others = itertools.chain([*objects.values()][1:], [b"\2" + next(iter(objects.values()))])
    found = enumerate(zip(objects.items(), others, strict=True))
    running.replace({name: forge(at, name, data, other) for at, ((name, data), other) in found})
    yield


@contextmanager
def evicting(running: SharedService, objects: Objects) -> Iterator[None]:
    running.lose_some()
    yield


@contextmanager
def killed(running: SharedService, objects: Objects) -> Iterator[None]:
    running.kill()
    try:
        yield
    finally:
        running.start()


def is_set_aside(tier: dict[str, Any]) -> bool:
    return bool(tier["state"] == "set aside" and tier["problem"])


FAULTS = {
    "garbage": Fault(damaged(lambda data: b"\xa5" * len(data))),
    "half an object": Fault(damaged(lambda data: data[: len(data) // 2]), hit=range(FOUND)),
    "one bit": Fault(damaged(lambda data: data[:70] + bytes([data[70] ^ 1]) + data[71:])),
    # Another release of kvkeep reads these.
    "older header": Fault(damaged(lambda data: data[:4] + b"\0" + data[5:]), stays=True),
    "evicting": Fault(evicting, hit=range(FOUND + 1)),
    "full": Fault(
        lambda running, objects: running.full(),
        hit=range(FOUND + 1),
        # A cluster makes room by evicting blocks that are not pinned, as these are not.
        is_shown=lambda tier: (
            tier["counts"]["refused_blocks"] > 0 or tier["tier"].startswith("mooncake:")
        ),
    ),
    "stalled": Fault(lambda running, objects: running.paused(), is_shown=is_set_aside),
    "killed": Fault(killed, is_shown=is_set_aside),
    "forged": Fault(forged, is_encrypted=True),
}
CANNOT_BE = {
    ("file", "stalled"): "no process serves a directory; tests/tiers/test_shared_process.py stops "
    "the process of ours that would wait for its file server",
    ("s3", "full"): "an object store has no limit of its own; for kvkeep's, `size=`, see "
    "tests/tiers/test_swept_bucket.py",
}
TABLE = [each for each in itertools.product(KINDS, FAULTS) if each not in CANNOT_BE]


class Hosts:
    """Two hosts that use one service. `first` stores what `other` is to find there. `other` has a
    prompt in its memory, and on its disk, if it has one, those of `on_disk`."""

    def __init__(
        self, stack: ExitStack, running: SharedService, *more: str, disk: Path | None = None
    ) -> None:
        self.running = running
        self.model = oracle()
        self.first = stack.enter_context(host(running, *more))
        disks = () if disk is None else ("--tier", f"disk://{disk}?size=64MiB")
        self.other = stack.enter_context(host(running, *disks, *more))
        self.on_disk: list[list[int]] = []
        if disk is not None:
            self._fill_disk()
        self.one = stack.enter_context(engine(self.first, self.model))
        self.two = stack.enter_context(engine(self.other, self.model, extra=WAITS))
        assert eventually(lambda: is_ready(self.first) and is_ready(self.other))
        self._in_memory = prompt(TOKENS)
        serve(self.two, [self._in_memory])

    def _fill_disk(self) -> None:
        """Then the memory of that host is empty."""
        self.on_disk = [prompt(TOKENS) for _ in FAULTS]
        with engine(self.other, self.model, num_blocks=1024) as llm:
            serve(llm, self.on_disk)
            stored = len(self.on_disk) * STORED
            assert eventually(
                lambda: all(
                    tier["counts"]["written_blocks"] >= stored for tier in tiers(self.other)
                )
            )
        restart_cold(self.other)

    def right(self, tokens: list[int]) -> list[int]:
        [answer] = without_cache(self.model, [tokens])
        return answer

    def share(self, tokens: list[int]) -> Objects:
        """Computes a prompt on the first host, until the service has it. Returns its objects."""
        before = self.running.objects()
        assert self.stores(tokens)
        now = self.running.objects().items()
        return {name: data for name, data in now if name not in before}

    def stores(self, tokens: list[int], limit_s: float = 120.0) -> bool:
        """Whether the service has what the first host computes."""
        count = written(self.first)
        serve(self.one, [tokens])
        return eventually(lambda: written(self.first) >= count + STORED, limit_s)

    def hit(self, tokens: list[int]) -> int:
        """How many tokens the other host finds. The answer is right."""
        [answer] = serve(self.two, [counting(tokens)])
        assert answer.token_ids == self.right(tokens)
        assert answer.metrics.failed_loads == 0, "a bad block is not brought up at all"
        return int(answer.metrics.external_cached_tokens)

    def hit_in_memory(self) -> int:
        forget_local(self.two)
        return self.hit(self._in_memory)

    def hit_on_disk(self) -> int:
        before = tiers(self.other)[0]["counts"]["promoted_blocks"]
        found = self.hit(self.on_disk.pop())
        assert tiers(self.other)[0]["counts"]["promoted_blocks"] >= before + BLOCKS
        return found

    def check_queues(self) -> None:
        for tier in tiers(self.other):
            assert tier["in_flight_bytes"] <= MOST_IN_FLIGHT
            assert tier["promotions"] <= MOST_PROMOTIONS
            assert tier["to_write_chains"] <= MOST_CHAINS

    def is_well(self) -> bool:
        """Whether what the first host stores the other finds, with nothing left to do."""
        assert eventually(lambda: is_ready(self.first) and is_ready(self.other))
        tokens = prompt(TOKENS)
        # A connection that is kept for the next call may fail once after the service has ended.
        found = self.hit(tokens) if self.stores(tokens, limit_s=30) else 0
        for server in (self.first, self.other):
            assert at_rest(server), "a lease or a write outlived the fault"
            assert eventually(
                lambda server=server: (
                    not any(
                        tier["in_flight_bytes"] or tier["promotions"] or tier["to_write_chains"]
                        for tier in tiers(server)
                    )
                )
            ), tiers(server)
        return found == FOUND


class KindOfHosts:
    """Hosts of one kind at a time, for all of its faults but those that need encryption."""

    def __init__(self, directories: pytest.TempPathFactory) -> None:
        self._directories = directories
        self._stack = ExitStack()
        self._kind = ("", False)

    def of(self, kind: str, is_encrypted: bool) -> Hosts:
        if (kind, is_encrypted) != self._kind:
            self.close()
            directory = self._directories.mktemp(kind)
            running = self._stack.enter_context(service(kind, directory))
            if is_encrypted:
                keys = key_file(directory / "tier.keys", "key")
                self._hosts = Hosts(self._stack, running, "--tier-keys", str(keys))
            else:
                self._hosts = Hosts(self._stack, running, disk=directory / "disk")
            self._kind = kind, is_encrypted
        return self._hosts

    def close(self) -> None:
        self._kind = ("", False)
        self._stack.close()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KindOfHosts]:
    with closing(KindOfHosts(tmp_path_factory)) as made:
        yield made


@pytest.mark.parametrize(("kind", "name"), TABLE)
def test_a_fault_costs_hits_of_the_tier_and_nothing_else(
    hosts: KindOfHosts, kind: str, name: str
) -> None:
    fault = FAULTS[name]
    try:
        check(hosts.of(kind, fault.is_encrypted), fault)
    except BaseException:  # guard: raised again; the next fault gets other hosts
        hosts.close()
        raise


def check(hosts: Hosts, fault: Fault) -> None:
    lost = prompt(TOKENS)
    objects = hosts.share(lost)
    assert objects, "nothing to damage"
    with fault.begin(hosts.running, objects):
        found = hosts.hit(lost)
        assert found in fault.hit and hosts.hit_in_memory() == FOUND
        if hosts.on_disk:
            assert hosts.hit_on_disk() == FOUND
        for _ in range(BURDEN):
            hosts.hit(prompt(TOKENS))
            hosts.check_queues()
        assert eventually(lambda: fault.is_shown(tiers(hosts.other)[-1])), tiers(hosts.other)
        assert hosts.hit_in_memory() == FOUND
        hosts.check_queues()
        if fault.stays:
            now = hosts.running.objects()
            assert all(now[each][4] == 0 for each in objects)
    assert any(hosts.is_well() for _ in range(TRIES))
