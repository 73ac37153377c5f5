"""M1 and M5 in a real engine whose MultiConnector has kvkeep and vLLM's own file-based connector,
which lacks HMA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from replicas import (
    POOL,
    EngineFailed,
    PoolMemory,
    Replica,
    Server,
    Since,
    at_rest,
    counting,
    eventually,
    prompt,
    request,
    tokens_of,
    transfer,
)

from kvkeep.testing.process import ServerProcess


@pytest.fixture(scope="module")
def fragile() -> Iterator[ServerProcess]:
    with Server(*POOL) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def _engines_end(fragile: ServerProcess, one: Replica, two: Replica) -> Iterator[None]:
    yield
    one.close_engine()
    two.close_engine()


def beside(
    replica: Replica, server: ServerProcess, files: Path, first: str, **outer: Any
) -> dict[str, Any]:
    """What vLLM is told: both connectors, and which of them is asked first."""
    own = transfer(server, {"kvkeep.client": replica.name})
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(files)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [own, other] if first == "kvkeep" else [other, own]
        },
        **outer,
    }


def start(replica: Replica, config: dict[str, Any], server: ServerProcess) -> Replica:
    """Its first request brings the handshakes; from then on it is connected."""
    replica.use("llama", transfer_config=config)
    replica.serve([request(prompt(40))])
    replica.wait_for(server)
    return replica


def check_nothing_is_left(replica: Replica, server: ServerProcess) -> None:
    """A store may end after its request; the scheduler hears of it in the next step."""
    held: dict[str, int] = {}

    def is_nothing_left() -> bool:
        replica.settle()
        replica.step()
        kept: dict[str, int] = replica.call("remembered")
        names = [name for name in kept if name.endswith(("_requests", "_running", "_jobs"))]
        held.update((name, kept[name]) for name in names)
        return not any(held.values())

    assert eventually(is_nothing_left) and len(held) >= 3, held
    assert at_rest(server)


@pytest.mark.parametrize("first", ["kvkeep", "example"])
def test_a_restarted_engine_hits_and_a_failed_load_is_computed_and_nothing_is_left(
    plain: Replica, one: Replica, two: Replica, fragile: ServerProcess, tmp_path: Path, first: str
) -> None:
    tokens, other = prompt(300), prompt(300)
    expected = tokens_of(plain.use("llama").serve([request(tokens), request(other)]))
    start(one, beside(one, fragile, tmp_path / "a", first), fragile)
    since = Since(fragile)
    stored = one.serve([counting(tokens), counting(other)])
    assert tokens_of(stored) == expected and [each.extra for each in stored] == [0, 0]
    assert eventually(lambda: since("stored_blocks") >= 18)
    assert any((tmp_path / "a").iterdir()), "the sibling stores too"
    check_nothing_is_left(one, fragile)

    start(
        two, beside(two, fragile, tmp_path / "b", first), fragile
    )  # another process; no files for its sibling
    [again] = two.serve([counting(tokens)])
    assert (again.tokens, again.extra) == (expected[0], 288)
    check_nothing_is_left(two, fragile)

    PoolMemory(fragile).flip_all()
    [failed] = two.serve([counting(other)])
    assert (failed.tokens, failed.reason, failed.extra) == (expected[1], "length", 0)
    assert eventually(lambda: since("bad_blocks") >= 1)
    check_nothing_is_left(two, fragile)


def test_what_the_sibling_loads_is_right_and_not_counted_as_ours(
    plain: Replica, one: Replica, fragile: ServerProcess, tmp_path: Path
) -> None:
    tokens = prompt(300)
    expected = tokens_of(plain.use("llama").serve([request(tokens)]))
    start(one, beside(one, fragile, tmp_path, "example"), fragile)
    answers = [*one.serve([counting(tokens)]), *one.fresh().serve([counting(tokens)])]
    assert tokens_of(answers) == expected * 2
    assert [each.extra for each in answers] == [0, 0]
    check_nothing_is_left(one, fragile)


def test_the_policy_that_vllm_would_not_read_is_refused_with_what_to_write(
    two: Replica, fragile: ServerProcess, tmp_path: Path
) -> None:
    config = beside(two, fragile, tmp_path, "kvkeep")
    del config["kv_load_failure_policy"]
    with pytest.raises(EngineFailed, match='write "kv_load_failure_policy": "recompute" beside'):
        two.use("llama", transfer_config=config)


def test_two_kvkeep_connectors_are_refused(
    two: Replica, fragile: ServerProcess, tmp_path: Path
) -> None:
    config = beside(two, fragile, tmp_path, "kvkeep")
    children = config["kv_connector_extra_config"]["connectors"]
    config["kv_connector_extra_config"] = {"connectors": [*children, children[0]]}
    with pytest.raises(EngineFailed, match="2 kvkeep connectors"):
        two.use("llama", transfer_config=config)
