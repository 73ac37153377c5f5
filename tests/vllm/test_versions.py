"""What differs between releases, and that the installed one is what the table says of it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

from engine_parts import BLOCK, Engine, cache_config, full, request, vllm_config, window
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

import vllm
from kvkeep.vllm import versions
from kvkeep.vllm.connector import KVKeepConnector
from kvkeep_lab.simulation.cache import SimulatedCache

found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
assert found is not None
RELEASE = (int(found[1]), int(found[2]))


# --- the table ------------------------------------------------------------------------------------


def test_failed_requests_have_names_since_0_30() -> None:
    assert versions.names_failed_requests() == (RELEASE >= (0, 30))
    assert hasattr(KVConnectorBase_V1, "get_transfer_results") == (RELEASE >= (0, 30))


@pytest.mark.skipif(RELEASE < (0, 30), reason="before 0.30 only blocks can be named")
def test_what_a_worker_says_of_its_loads() -> None:
    results = versions.transfer_results({"a", "b"}, {"b"})
    assert (results.finished_recving, results.failed_recving, results.finished_sending) == (
        {"a", "b"},
        {"b"},
        set(),
    )


def test_connectors_hear_of_sleep_since_0_33() -> None:
    assert versions.tells_of_sleep() == (RELEASE >= (0, 33))
    assert hasattr(KVConnectorBase_V1, "restore_kv_caches") == (RELEASE >= (0, 33))


def test_the_cache_manager_comes_since_0_30() -> None:
    with mock.patch.object(KVKeepConnector, "bind_kv_cache_manager") as bind:
        engine = Engine(SimulatedCache(seed=1))
    assert engine.half is not None
    assert bind.called == (RELEASE >= (0, 30))
    engine.scheduler.shutdown()


_PRINT_HASHES = """
import sys
sys.path.insert(0, {folder!r})
from test_versions import hashes
for name in ("sha256", "sha256_cbor"):
    print("HASHES", name, hashes(name))
"""


def hashes(algorithm: str) -> str:
    """What vLLM's block hashes are in this process, as one that has just started."""
    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    hasher = get_request_block_hasher(BLOCK, function)
    asked = Request(
        "a", list(range(40)), SamplingParams(), None, block_hasher=hasher, cache_salt="s"
    )
    return b"".join(asked.block_hashes).hex()


@pytest.fixture
def unseeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    yield
    init_none_hash(get_hash_fn_by_name("sha256"))  # for whoever comes next


@pytest.mark.usefixtures("unseeded")
def test_hashes_that_are_called_stable_are_the_same_in_every_process() -> None:
    code = _PRINT_HASHES.format(folder=str(Path(__file__).parent))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    elsewhere = dict(
        line.split()[1:] for line in run.stdout.splitlines() if line.startswith("HASHES")
    )
    assert len(elsewhere) == 2
    for name, there in elsewhere.items():
        assert (
            versions.hashes_are_stable(name) == (hashes(name) == there) == (RELEASE >= (0, 29))
        ), name


@pytest.mark.usefixtures("unseeded")
def test_a_seed_makes_hashes_that_engines_without_it_do_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without = hashes("sha256")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert hashes("sha256") == hashes("sha256") != without
    assert not versions.hashes_are_stable("sha256")


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "", "md5"])
def test_other_algorithms_are_no_sound_keys(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert not versions.hashes_are_stable(algorithm)


def test_how_many_tokens_a_hash_covers() -> None:
    config = cache_config(full(16), window(8))
    assert versions.hash_tokens(config, [16, 8]) == 8
    assert versions.hash_tokens(SimpleNamespace(), [32]) == 32
    assert versions.hash_tokens(SimpleNamespace(hash_block_size=None), [32]) == 32
    assert versions.hash_tokens(SimpleNamespace(hash_block_size=4), [32, 8]) == 4
    assert hasattr(config, "hash_block_size") == (RELEASE >= (0, 32))


def test_how_many_ranks_hold_the_same_kv() -> None:
    config = cache_config(full())
    assert versions.kv_tp_replicas(SimpleNamespace()) is None
    assert versions.kv_tp_replicas(SimpleNamespace(kv_tp_replicas=4)) == 4
    assert versions.kv_tp_replicas(config) == (1 if RELEASE >= (0, 31) else None)


@pytest.mark.skipif(RELEASE < (0, 33), reason="before 0.33 a hash covers its own block only")
def test_hashes_beside_a_connector_do_not_look_ahead() -> None:
    """Blocks of a drafting engine would otherwise be keyed by tokens that come after them."""
    config = vllm_config()
    config.speculative_config = SimpleNamespace(
        use_eagle=lambda: True,
        use_eagle_block_drop=lambda: True,
        use_multi_module_mtp=lambda: False,
        disable_lookahead_block_hashes=False,
    )
    assert config.num_hash_lookahead_tokens == 0
    config.kv_transfer_config = None
    assert config.num_hash_lookahead_tokens == 1, "without one they do"


# --- block tables ---------------------------------------------------------------------------------


def test_tables_are_kept_here_without_a_manager() -> None:
    tables = versions.BlockTables()
    assert tables.of("a") == ()
    given = [[1, 2], [3]]
    tables.allocated("a", given)
    tables.grown("a", ([4], [5, 6]))
    tables.grown("b", ([9], [9]))
    assert tables.of("a") == [[1, 2, 4], [3, 5, 6]] and tables.of("b") == ()
    assert given == [[1, 2], [3]], "vLLM's own lists stay as they are"
    tables.allocated("a", [[7], [8]])
    assert tables.of("a") == [[7], [8]], "admitted again, with other blocks"
    tables.forget("a")
    tables.forget("a")
    assert tables.of("a") == ()


def test_a_manager_knows_best() -> None:
    tables = versions.BlockTables()
    tables.manager = SimpleNamespace(get_block_ids=lambda name: ([1, 2], [name]))
    tables.allocated("a", [[7]])
    tables.grown("a", [[8]])
    assert tables.of("a") == ([1, 2], ["a"])
    tables.forget("a")


@pytest.mark.parametrize("budget", [2 * BLOCK, 3 * BLOCK, 64])
def test_tables_that_are_kept_here_are_those_of_the_manager(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = KVKeepConnector.bind_gpu_block_pool
    monkeypatch.setattr(
        KVKeepConnector,
        "bind_kv_cache_manager",
        lambda self, manager: bind(self, manager.block_pool),
    )
    engine = Engine(SimulatedCache(seed=1), budget=budget)
    requests = engine.half
    engine.add(request(range(30), "a", max_tokens=20), request(range(100, 107), "b", max_tokens=20))
    while engine.scheduler.requests:
        for name in (
            {"a", "b"} & set(engine.step().num_scheduled_tokens) & set(engine.scheduler.requests)
        ):
            known = engine.scheduler.kv_cache_manager.get_block_ids(name)
            assert [list(table) for table in requests._tables.of(name)] == [
                list(table) for table in known
            ]
    engine.scheduler.shutdown()
