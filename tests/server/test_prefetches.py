"""Prefetches of operators and engines, with a real server, mover and disk; and their share of
memory."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
from tests.server.test_movement import BLOCKS, World, children_of, tokens_of

from kvkeep.kv.identity import tenant_of
from kvkeep.server.prefetches import UnusedBlocks
from kvkeep.store.operators import set_limit
from kvkeep.store.store import Store
from kvkeep.testing.clock import eventually

BLOCK = 64 << 10
POOL_BLOCKS = 128  # of 8 MiB
BLUE = "blue"


class Operator:
    """Asks the admin API of a world's server."""

    def __init__(self, world: World) -> None:
        self._world = world

    def ask(self, method: str, path: str, body: Any = None, token: bool = True) -> Any:
        server = self._world.server
        headers = {"Content-Type": "application/json"}
        if token:
            text = (server.state_dir / server.name / "admin.token").read_text().strip()
            headers["Authorization"] = f"Bearer {text}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            f"http://{server.http}{path}", data, headers, method=method
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def prefetch(self, tenant: str = "default", **body: int) -> int:
        return int(self.ask("POST", "/v1/prefetch", {"tenant": tenant, **body})["number"])

    def shown(self, number: int) -> dict[str, Any]:
        (found,) = [each for each in self.ask("GET", "/v1/prefetch") if each["number"] == number]
        return dict(found)

    def ended(self, number: int) -> dict[str, Any]:
        assert eventually(lambda: self.shown(number)["state"] not in ("looking", "running"))
        return self.shown(number)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "disk")
    yield made
    made.close()


@pytest.fixture
def operator(world: World) -> Operator:
    return Operator(world)


def restarted(world: World, *conversations: int) -> None:
    """A server without anything in memory, whose disk has these conversations, the last one used
    last."""
    for count, conversation in enumerate(conversations, start=1):
        world.put(conversation)
        assert eventually(lambda: world.written(count * BLOCKS))  # noqa: B023
    world.restart()


def in_memory(world: World) -> int:
    with urllib.request.urlopen(f"http://{world.server.http}/v1/status") as answer:
        return int(json.load(answer)["pool"]["blocks"]["ready"])


def test_what_was_used_last_comes_first_before_any_engine_connects(
    world: World, operator: Operator
) -> None:
    restarted(world, 1, 2, 3)
    number = operator.prefetch(most_bytes=(BLOCKS + 10) * BLOCK)
    shown = operator.ended(number)
    assert (shown["state"], shown["problem"]) == ("done", "")
    assert shown["blocks"] == shown["coming_blocks"] == BLOCKS + 10 == in_memory(world)
    assert shown["nbytes"] == (BLOCKS + 10) * BLOCK and shown["chains"] == 2
    promoted = world.tier()["counts"]["promoted_blocks"]
    assert world.get(3) == BLOCKS
    assert world.tier()["counts"]["promoted_blocks"] == promoted  # all of it was in memory
    assert world.get(2, 10) == 10
    assert world.tier()["counts"]["promoted_blocks"] == promoted


def test_the_default_is_a_quarter_of_the_pool(world: World, operator: Operator) -> None:
    restarted(world, 1, 2)
    shown = operator.ended(operator.prefetch())
    assert shown["most_bytes"] == 2 << 20 and shown["blocks"] == POOL_BLOCKS // 4


def test_what_memory_has_does_not_come_again(world: World, operator: Operator) -> None:
    restarted(world, 1)
    first = operator.ended(operator.prefetch())
    again = operator.ended(operator.prefetch(most_bytes=8 << 20))
    assert first["blocks"] + again["blocks"] == BLOCKS
    assert operator.ended(operator.prefetch(most_bytes=8 << 20))["coming_blocks"] == 0
    assert world.tier()["counts"]["promoted_blocks"] == BLOCKS


def test_a_tenant_has_one_prefetch_that_can_be_cancelled(world: World, operator: Operator) -> None:
    restarted(world, 1)
    (mover,) = children_of(world.server.pid)
    os.kill(mover, signal.SIGSTOP)
    try:
        number = operator.prefetch(most_bytes=8 << 20)
        assert operator.prefetch() == number  # it is the one that runs
        assert eventually(lambda: operator.shown(number)["chains"] >= 1)
        cancelled = operator.ask("DELETE", f"/v1/prefetch/{number}")
        assert cancelled["state"] == "cancelled"
        other = operator.prefetch()
        assert other != number
        assert operator.ask("DELETE", "/v1/prefetch") == {"prefetches": 1}
        assert operator.shown(other)["state"] == "cancelled"
    finally:
        os.kill(mover, signal.SIGCONT)
    assert eventually(lambda: world.tier()["promotions"] == 0)
    assert eventually(lambda: world.get(1) == BLOCKS)  # what was cancelled comes when it is needed


def test_a_prefetch_of_an_engine_ends_with_it(world: World) -> None:
    """A disk of which a prefetch waits is asked again only for engines that are there."""
    restarted(world, 1)
    (mover,) = children_of(world.server.pid)
    cache = world.cache
    os.kill(mover, signal.SIGSTOP)
    try:
        assert cache.prefetch(tokens_of(1, BLOCKS)) == BLOCKS
        assert world.tier()["promotions"] == 1
        cache.close()
        world._cache = None
    finally:
        os.kill(mover, signal.SIGCONT)
    assert eventually(lambda: world.tier()["promotions"] == 0)
    assert eventually(lambda: world.get(1) == BLOCKS)


def test_requests_are_served_while_another_tenant_prefetches(
    world: World, operator: Operator
) -> None:
    for count, conversation in enumerate((1, 2, 3), start=1):
        world.put(conversation, salt=BLUE)
        assert eventually(lambda: world.written(count * BLOCKS))  # noqa: B023
    world.put(9)
    assert eventually(lambda: world.written(4 * BLOCKS))
    world.restart()
    number = operator.prefetch(tenant_of(BLUE), most_bytes=8 << 20)
    assert eventually(lambda: world.get(9) == BLOCKS)
    assert operator.ended(number)["blocks"] > 0


def test_a_full_memory_keeps_what_is_used(world: World, operator: Operator) -> None:
    """Memory holds 128 blocks. A prefetch into full memory brings a share of it, and then stops."""
    restarted(world, 1, 2, 3, 4, 5)
    for conversation in (1, 2):
        assert eventually(lambda: world.get(conversation) == BLOCKS)  # noqa: B023
    shown = operator.ended(operator.prefetch(most_bytes=8 << 20))
    assert shown["state"] == "failed" and "share" in shown["problem"]
    free = POOL_BLOCKS - 2 * BLOCKS
    assert shown["blocks"] <= free + POOL_BLOCKS // 8
    before = world.tier()["counts"]["promoted_blocks"]
    assert world.get(2) == BLOCKS
    assert world.tier()["counts"]["promoted_blocks"] == before
    again = operator.ended(operator.prefetch(most_bytes=8 << 20))
    assert again["blocks"] == 0  # what came before is unused, and has the share


def test_clearing_a_tenant_ends_its_prefetch(world: World, operator: Operator) -> None:
    restarted(world, 1, 2)
    (mover,) = children_of(world.server.pid)
    os.kill(mover, signal.SIGSTOP)
    number = operator.prefetch(most_bytes=8 << 20)
    assert eventually(lambda: operator.shown(number)["chains"] >= 1)
    os.kill(mover, signal.SIGCONT)
    world.admin("DELETE", "/v1/tenants/default/blocks")
    assert operator.shown(number)["state"] in ("cancelled", "done")
    assert world.get(1) == world.get(2) == 0


def test_refusals(world: World, operator: Operator) -> None:
    for body, token, path, code, error in (
        ({"tenant": "default"}, False, "/v1/prefetch", 401, "unauthorized"),
        ({"tenant": "my salt"}, True, "/v1/prefetch", 422, "bad_tenant"),
        ({"tenant": "default", "most_bytes": 0}, True, "/v1/prefetch", 422, "bad_request"),
    ):
        with pytest.raises(HTTPError) as refused:
            operator.ask("POST", path, body, token)
        said = json.load(refused.value)
        assert (refused.value.code, said["error"]) == (code, error)
        assert "my salt" not in str(said)
    with pytest.raises(HTTPError) as refused:
        operator.ask("DELETE", "/v1/prefetch/7")
    assert json.load(refused.value)["error"] == "unknown_prefetch"


# -- the share of memory


def filled(blocks: int) -> tuple[Store, Any]:
    """A store of 16 blocks of 4 KiB, of which some are in use."""
    store = Store(16 << 12, 1 << 16)
    store.add_slabs(0, 1)
    store.open_session(1)
    layout = store.open_layout(1, b"f", (4096,))
    put(store, "default", 0, blocks)
    return store, layout


def put(store: Store, tenant: str, first: int, blocks: int) -> list[bytes]:
    keys = [bytes([number + 1]) * 16 for number in range(first, first + blocks)]
    layout = next(iter(store.layouts)).number
    if keys:
        store.prepare_store(1, first + 1, tenant, layout, 0, b"", b"".join(keys), 0)
        store.complete_store(1, first + 1, np.ones(blocks, np.uint64), 0)
    return keys


def test_free_memory_may_be_prefetched_into() -> None:
    store, layout = filled(4)
    assert UnusedBlocks(store).is_room_for("a", layout, 12)


def test_a_tenant_may_fill_an_eighth_and_all_a_quarter_of_full_memory() -> None:
    store, layout = filled(10)
    unused = UnusedBlocks(store)
    assert not unused.is_room_for("a", layout, 13)
    for tenant, first in (("a", 10), ("b", 12)):
        keys = put(store, tenant, first, 2)
        unused.add(tenant, b"", keys[-1], 2 * 4096)
    put(store, "default", 14, 2)
    assert not unused.is_room_for("a", layout, 1)  # it has its eighth
    assert not unused.is_room_for("c", layout, 1)  # others have the quarter
    store.lookup(1, 99, "b", layout.number, bytes([13]) * 16 + bytes([14]) * 16, 0, 0)
    assert unused.is_room_for("c", layout, 2) and not unused.is_room_for("c", layout, 3)
    assert not unused.is_room_for("a", layout, 1)


def test_a_limit_counts_as_full_memory() -> None:
    store, layout = filled(0)
    set_limit(store, "a", 8 * 4096, 0)
    unused = UnusedBlocks(store)
    assert unused.is_room_for("a", layout, 8) and not unused.is_room_for("a", layout, 9)
