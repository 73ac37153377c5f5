"""Two hosts and one shared directory: what one has computed the other, which has its own memory,
starts from. Real processes, a real directory, the oracle model. Other kinds of shared tiers:
test_shared_services.py."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import (
    GQA,
    POOL,
    at_rest,
    counting,
    engine,
    eventually,
    oracle,
    prompt,
    seed,
    serve,
    tokens_of,
    without_cache,
)

from kvkeep.cli.remote import ask
from kvkeep.testing.process import ServerProcess

WAITS = {"kvkeep.tier_patience": "wait"}
BLOCKS = 50  # of a prompt of 203 tokens


def host(directory: Path, *more: str) -> ServerProcess:
    """A server with memory of its own, and the shared directory."""
    return ServerProcess(*POOL, *more, "--tier", f"file://{directory / 'shared'}?size=64MiB")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    with host(tmp_path) as one, host(tmp_path) as other:
        assert eventually(lambda: is_ready(one) and is_ready(other))
        yield one, other
        assert at_rest(other), "a lease or a write outlived its request"


def shared(server: ServerProcess) -> dict[str, Any]:
    return dict(ask(server.http, "/v1/tiers")[-1])


def is_ready(server: ServerProcess) -> bool:
    """Whether it uses the tier: it has read the log of clears."""
    return bool(shared(server)["state"] == "ok")


def is_shared(server: ServerProcess, blocks: int) -> bool:
    return eventually(lambda: shared(server)["counts"]["written_blocks"] >= blocks)


def test_a_real_model_and_several_ranks(hosts: tuple[ServerProcess, ServerProcess]) -> None:
    sizes, number, tokens = GQA, seed(), prompt(203)
    expected = without_cache(sizes, [tokens], seed=number)
    ranks = {"seed": number, "tensor_parallel_size": 2}
    with engine(hosts[0], sizes, **ranks) as one:
        assert tokens_of(serve(one, [tokens])) == expected
    assert is_shared(hosts[0], BLOCKS)
    with engine(hosts[1], sizes, extra=WAITS, **ranks) as other:
        [answer] = serve(other, [counting(tokens)])
    assert [answer.token_ids] == expected
    assert answer.metrics.external_cached_tokens == BLOCKS * 4


@pytest.mark.parametrize(("stores", "hits"), [(2, 4), (4, 1)])
def test_hosts_with_engines_of_several_tensor_parallel_sizes_share(
    hosts: tuple[ServerProcess, ServerProcess], stores: int, hits: int
) -> None:
    model, tokens, cut = oracle(num_kv_heads=4), prompt(203), {"kvkeep.tp_shards": 4}
    expected = without_cache(model, [tokens])
    with engine(hosts[0], model, tensor_parallel_size=stores, extra=cut) as one:
        assert tokens_of(serve(one, [tokens])) == expected
    assert is_shared(hosts[0], BLOCKS)
    hosts[0].stop(signal.SIGKILL)
    with engine(hosts[1], model, tensor_parallel_size=hits, extra=cut | WAITS) as other:
        # a request that comes before all are connected is a miss
        sessions = lambda: ask(hosts[1].http, "/v1/status", needs_token=True)["sessions"]  # noqa: E731
        assert eventually(lambda: sum(bool(each["identity"]) for each in sessions()) == hits + 1)
        [answer] = serve(other, [counting(tokens)])
    assert [answer.token_ids] == expected
    assert answer.metrics.external_cached_tokens == BLOCKS * 4
    assert answer.metrics.failed_loads == 0


def test_a_tenant_finds_its_own_blocks_only(hosts: tuple[ServerProcess, ServerProcess]) -> None:
    model, tokens = oracle(), prompt(203)
    with engine(hosts[0], model) as one:
        serve(one, [counting(tokens, "alice")])
    assert is_shared(hosts[0], BLOCKS)
    with engine(hosts[1], model, extra=WAITS) as other:
        found = serve(other, [counting(tokens, "bob"), counting(tokens, "alice")])
    assert [each.metrics.external_cached_tokens for each in found] == [0, BLOCKS * 4]


def test_a_longer_prompt_uses_what_is_there_and_stores_the_rest(
    hosts: tuple[ServerProcess, ServerProcess],
) -> None:
    model, tokens = oracle(), prompt(203)
    with engine(hosts[0], model) as one:
        serve(one, [tokens[:103]])
    assert is_shared(hosts[0], 25)
    with engine(hosts[1], model, extra=WAITS) as other:
        [answer] = serve(other, [counting(tokens)])
    assert answer.metrics.external_cached_tokens == 100
    assert is_shared(hosts[1], 25)
    assert [answer.token_ids] == without_cache(model, [tokens])


def test_memory_disk_and_shared_tier_stack(tmp_path: Path) -> None:
    """What the disk has comes from the disk, the rest from the shared tier."""
    model, tokens = oracle(), prompt(203)
    disk = ("--tier", f"disk://{tmp_path / 'disk'}?size=64MiB")
    with host(tmp_path) as one, engine(one, model) as llm:
        serve(llm, [tokens])
        assert is_shared(one, BLOCKS)
    with host(tmp_path, *disk) as other:
        assert eventually(lambda: is_ready(other))
        with engine(other, model, extra=WAITS) as llm:
            [first] = serve(llm, [counting(tokens[:103])])
        assert first.metrics.external_cached_tokens == 100
        on_disk = lambda: ask(other.http, "/v1/tiers")[0]["counts"]  # noqa: E731
        assert eventually(lambda: on_disk()["written_blocks"] >= 25)
        other.stop(signal.SIGKILL)
        shutil.rmtree(other.pool)
        other.start()
        assert eventually(lambda: is_ready(other))
        with engine(other, model, extra=WAITS) as llm:
            [answer] = serve(llm, [counting(tokens)])
        assert answer.metrics.external_cached_tokens == BLOCKS * 4
        assert on_disk()["promoted_blocks"] >= 25
        assert shared(other)["counts"]["promoted_blocks"] >= 25
        assert at_rest(other)
    assert [answer.token_ids] == without_cache(model, [tokens])


@pytest.mark.parametrize("damage", ["garbage", "half", "forged", "removed"])
def test_a_damaged_block_is_a_miss(
    hosts: tuple[ServerProcess, ServerProcess], tmp_path: Path, damage: str
) -> None:
    model, tokens = oracle(), prompt(203)
    with engine(hosts[0], model) as one:
        serve(one, [tokens])
    assert is_shared(hosts[0], BLOCKS)
    paths = [path for path in (tmp_path / "shared" / "v1").rglob("*") if path.is_file()]
    first = paths[0].read_bytes()
    for path in paths:
        content = path.read_bytes()
        if damage == "removed":
            path.unlink()
        else:
            changed = {
                "garbage": b"\xa5" * len(content),
                "half": content[: len(content) // 2],
                "forged": first if path != paths[0] else content[:4096].ljust(len(content), b"x"),
            }
            path.write_bytes(changed[damage])
    with engine(hosts[1], model, extra=WAITS) as other:
        [answer] = serve(other, [counting(tokens)])
    assert [answer.token_ids] == without_cache(model, [tokens])
    right = range(BLOCKS * 4 if damage in ("half", "forged") else 1)  # blocks before the damage
    assert answer.metrics.external_cached_tokens in right
    assert answer.metrics.failed_loads == 0, "a bad block is not brought up at all"


def test_without_patience_no_request_waits(hosts: tuple[ServerProcess, ServerProcess]) -> None:
    model, tokens = oracle(), prompt(203)
    with engine(hosts[0], model) as one:
        serve(one, [tokens])
    assert is_shared(hosts[0], BLOCKS)
    with engine(hosts[1], model, extra={"kvkeep.tier_patience": "best_effort"}) as other:
        [answer] = serve(other, [counting(tokens)])
    assert answer.metrics.external_cached_tokens == 0
    assert [answer.token_ids] == without_cache(model, [tokens])
