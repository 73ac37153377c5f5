"""The class that vLLM makes: found by its names, told by its config, and never raising into the
engine."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

from engine_parts import cache_config, full, needs_named_failures, request, vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

import kvkeep.vllm
import kvkeep.vllm.connector
from kvkeep.errors import SettingsError
from kvkeep.vllm.connector import KVKeepConnector
from kvkeep.vllm.messages import Handshake, Reports, Step
from kvkeep.vllm.stats import KVKeepStats

BOTH = pytest.mark.parametrize("role", list(KVConnectorRole))


def connector(role: KVConnectorRole, extra: dict[str, Any] | None = None) -> KVKeepConnector:
    return KVKeepConnector(vllm_config(extra), role, cache_config(full()))


# --- the ways in ----------------------------------------------------------------------------------


def test_importing_the_package_imports_no_vllm() -> None:
    code = "import sys, kvkeep.vllm; print([name for name in ('vllm', 'torch') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


def test_it_is_registered_by_name_and_twice_is_once() -> None:
    for _ in range(2):
        kvkeep.vllm.register()
    assert KVConnectorFactory.get_connector_class_by_name("KVKeepConnector") is KVKeepConnector


@pytest.mark.parametrize("name", ["KVKeepConnector", "LMCacheMPConnector"])
def test_it_is_found_by_module_path(name: str) -> None:
    config = vllm_config()
    config.kv_transfer_config.kv_connector = name
    config.kv_transfer_config.kv_connector_module_path = "kvkeep.vllm"
    assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is KVKeepConnector
    assert getattr(kvkeep.vllm, name) is KVKeepConnector


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="Nothing"):
        _ = kvkeep.vllm.Nothing


def test_it_is_what_vllm_asks_of_connectors() -> None:
    assert issubclass(KVKeepConnector, SupportsHMA)
    assert not KVKeepConnector.__abstractmethods__
    assert connector(KVConnectorRole.SCHEDULER).requires_kv_delivery is False


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, "recompute", "fail"])
def test_the_policy_is_set_before_vllm_reads_it_and_logged(
    policy: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = vllm_config({} if policy is None else {"kvkeep.load_failure_policy": policy})
    config.kv_transfer_config.kv_load_failure_policy = "fail"
    with caplog.at_level(logging.INFO, "kvkeep"):
        KVKeepConnector(config, KVConnectorRole.SCHEDULER, cache_config(full()))
    assert config.kv_transfer_config.kv_load_failure_policy == (policy or "recompute")
    source = "set by kvkeep.load_failure_policy" if policy else "kvkeep's default; vLLM's is fail"
    said = [line for line in caplog.messages if "kv_load_failure_policy" in line]
    assert said == [f"kvkeep: kv_load_failure_policy is {policy or 'recompute'} ({source})"]


@BOTH
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kvkeep.adress", "tcp://localhost:1"),
        ("kvkeep.address", "ftp://nowhere"),
        ("kvkeep.port", 0),
        ("kvkeep.lookup_deadline_ms", "soon"),
        ("kvkeep.load_failure_policy", "panic"),
        ("kvkeep.revision", ""),
        ("kvkeep.allow_untested_vllm", "yes"),
        ("kvkeep.verify", 1),
    ],
)
def test_a_bad_setting_is_refused_and_named(role: KVConnectorRole, key: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=key) as error:
        connector(role, {key: value})
    assert error.value.hint


@BOTH
@pytest.mark.parametrize(
    ("version", "allowed"), [("0.34.0", True), ("0.34.0", False), ("0.25.0", True)]
)
def test_a_release_that_is_not_served_is_refused(
    role: KVConnectorRole, version: str, allowed: bool
) -> None:
    extra = {"kvkeep.allow_untested_vllm": allowed}
    with mock.patch.object(kvkeep.vllm.connector.vllm, "__version__", version):
        if version == "0.34.0" and allowed:
            connector(role, extra)
        else:
            with pytest.raises(SettingsError, match=r"0\.26 to 0\.33"):
                connector(role, extra)


# --- no call raises -------------------------------------------------------------------------------


class Broken:
    """A side of which everything raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is broken")


ASKED = request(range(20))
BLOCKS = SimpleNamespace(get_block_ids=lambda: ([1, 2],))
SCHEDULER: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "set_xfer_handshake_metadata": (
        lambda c: c.set_xfer_handshake_metadata({0: Handshake(None)}),
        None,
    ),
    "set_xfer_handshake_metadata_pp_aware": (
        lambda c: c.set_xfer_handshake_metadata_pp_aware({(0, 0): Handshake(None)}),
        None,
    ),
    "on_new_request": (lambda c: c.on_new_request(ASKED), None),
    "get_num_new_matched_tokens": (lambda c: c.get_num_new_matched_tokens(ASKED, 0), (0, False)),
    "update_state_after_alloc": (lambda c: c.update_state_after_alloc(ASKED, BLOCKS, 0), None),
    "build_connector_meta": (lambda c: c.build_connector_meta(None), Step(all_withdrawn=True)),
    "update_connector_output": (
        lambda c: c.update_connector_output(SimpleNamespace(kv_connector_worker_meta=Reports())),
        None,
    ),
    "request_finished_all_groups": (
        lambda c: c.request_finished_all_groups(ASKED, ([1],)),
        (False, None),
    ),
    "request_finished": (lambda c: c.request_finished(ASKED, [1]), (False, None)),
    "reset_cache": (lambda c: c.reset_cache(), False),
    "take_events": (lambda c: c.take_events(), ()),
    "get_kv_connector_stats": (lambda c: c.get_kv_connector_stats(), None),
    "shutdown": (lambda c: c.shutdown(), None),
}
WORKER: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "register_kv_caches": (lambda c: c.register_kv_caches({}), None),
    "unregister_kv_caches": (lambda c: c.unregister_kv_caches(), None),
    "restore_kv_caches": (lambda c: c.restore_kv_caches(), None),
    "handle_preemptions": (lambda c: c.handle_preemptions(Step()), None),
    "bind_connector_metadata": (lambda c: c.bind_connector_metadata(Step()), None),
    "wait_for_save": (lambda c: c.wait_for_save(), None),
    "get_finished": (lambda c: c.get_finished(set()), (None, None)),
    "get_block_ids_with_load_errors": (lambda c: c.get_block_ids_with_load_errors(), set()),
    "build_connector_worker_meta": (lambda c: c.build_connector_worker_meta(), None),
    "get_kv_connector_stats": (lambda c: c.get_kv_connector_stats(), None),
    "shutdown": (lambda c: c.shutdown(), None),
}


def broken(role: KVConnectorRole) -> KVKeepConnector:
    made = connector(role)
    made.half = Broken()
    if role == KVConnectorRole.WORKER:
        made._connector_metadata = Step()
    return made


@pytest.mark.parametrize("name", SCHEDULER)
def test_no_call_of_the_scheduler_raises(name: str) -> None:
    call, expected = SCHEDULER[name]
    made = broken(KVConnectorRole.SCHEDULER)
    assert call(made) == expected
    assert made.faults == 1


@pytest.mark.parametrize("name", WORKER)
def test_no_call_of_a_worker_raises(name: str) -> None:
    call, expected = WORKER[name]
    made = broken(KVConnectorRole.WORKER)
    assert call(made) == expected
    assert made.faults == 1


@needs_named_failures
def test_results_of_a_broken_worker_are_none() -> None:
    made = broken(KVConnectorRole.WORKER)
    results = made.get_transfer_results(set())
    assert not results.finished_recving and not results.failed_recving and made.faults == 1


def test_every_hook_that_does_something_is_tested_here() -> None:
    quiet = {
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "requires_kv_delivery",
        "get_transfer_results",
    }
    quiet |= {
        "build_kv_connector_stats",
        "build_prom_metrics",
        "bind_kv_cache_manager",
        "get_handshake_metadata",
    }
    quiet |= {"bind_gpu_block_pool", "supports_sleep_mode"}
    hooks = {
        name
        for name in vars(KVKeepConnector)
        if not name.startswith("_") and hasattr(KVConnectorBase_V1, name)
    }
    hooks |= {"request_finished_all_groups"}
    assert hooks - quiet <= {*SCHEDULER, *WORKER}


def test_the_hooks_that_do_nothing_do_nothing() -> None:
    made = connector(KVConnectorRole.WORKER)
    assert made.start_load_kv(None, anything=1) is None  # type: ignore[func-returns-value]
    assert made.wait_for_layer_load("layer") is None  # type: ignore[func-returns-value]
    assert made.save_kv_layer("layer", None, None, anything=1) is None  # type: ignore[func-returns-value]
    made.wait_for_save()
    assert made.faults == 0
    assert made.get_handshake_metadata() is None


# --- stats ----------------------------------------------------------------------------------------


@BOTH
def test_faults_are_counted_in_the_stats_once(role: KVConnectorRole) -> None:
    made = connector(role)
    made.faults = 3
    stats = made.get_kv_connector_stats()
    assert isinstance(stats, KVKeepStats) and stats.data == {"faults": 3}
    assert made.get_kv_connector_stats() is None


def test_vllm_rebuilds_stats_from_their_data() -> None:
    assert KVKeepConnector.build_kv_connector_stats({"lookups": 2}) == KVKeepStats.of(lookups=2)
    assert KVKeepConnector.build_kv_connector_stats(None).is_empty()
