"""When `--kv-offloading-backend lmcache` means kvkeep."""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

from engine_parts import cache_config, full, vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import kvkeep.vllm
from kvkeep.errors import SettingsError
from kvkeep.vllm import stand_in
from kvkeep.vllm.connector import KVKeepConnector


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own entry is there, as in a process that has loaded no plugin."""
    entry = object()
    monkeypatch.delenv(stand_in.VARIABLE, raising=False)
    monkeypatch.setitem(KVConnectorFactory._registry, stand_in.NAME, entry)  # type: ignore[arg-type]
    monkeypatch.setitem(KVConnectorFactory._registry, "KVKeepConnector", lambda: KVKeepConnector)
    return entry


def install(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    find = importlib.util.find_spec
    spec = importlib.util.spec_from_loader("lmcache", None) if installed else None
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: spec if name == "lmcache" else find(name)
    )


@pytest.mark.parametrize(
    ("variable", "installed", "is_ours"),
    [
        (None, False, True),
        (None, True, False),
        ("1", True, True),
        ("1", False, True),
        ("0", False, False),
        ("", True, False),
    ],
)
def test_vllms_entry_is_replaced_only_where_lmcache_is_missing_or_somebody_says_so(
    monkeypatch: pytest.MonkeyPatch,
    theirs: Any,
    variable: str | None,
    installed: bool,
    is_ours: bool,
) -> None:
    install(monkeypatch, installed)
    if variable is not None:
        monkeypatch.setenv(stand_in.VARIABLE, variable)
    for _ in range(2):  # vLLM may load a plugin twice
        kvkeep.vllm.register()
        entry = KVConnectorFactory._registry[stand_in.NAME]
        assert (entry is not theirs) == is_ours
    if is_ours:
        assert KVConnectorFactory.get_connector_class_by_name(stand_in.NAME) is KVKeepConnector


def test_a_value_that_is_neither_is_named_and_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, True)
    monkeypatch.setenv(stand_in.VARIABLE, "yes")
    with caplog.at_level(logging.WARNING):
        assert stand_in.reason() == ""
    assert "KVKEEP_AS_LMCACHE = 'yes' is ignored: expected 1 or 0" in caplog.text


def test_a_module_without_a_spec_counts_as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(stand_in.VARIABLE, raising=False)
    odd = ModuleType("lmcache")
    odd.__spec__ = None
    monkeypatch.setitem(sys.modules, "lmcache", odd)
    assert stand_in.reason() == ""


def test_one_line_says_so_in_the_schedulers_process_and_none_in_the_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, theirs: Any
) -> None:
    install(monkeypatch, False)
    config = vllm_config()
    config.kv_transfer_config.kv_connector = stand_in.NAME
    with caplog.at_level(logging.INFO, "kvkeep"):
        for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER):
            KVConnectorFactory.get_connector_class(config.kv_transfer_config)(
                config, role, cache_config(full())
            )
    said = [each.getMessage() for each in caplog.records if "stands in" in each.getMessage()]
    assert said == ["kvkeep: stands in for LMCacheMPConnector (lmcache is not installed)"]


def test_a_class_that_is_found_by_its_module_is_known_by_name_too(theirs: Any) -> None:
    """MultiConnector asks by name for the class that reads a child's statistics, also where plugins
    are off."""
    del KVConnectorFactory._registry["KVKeepConnector"]
    assert kvkeep.vllm.KVKeepConnector is KVKeepConnector
    assert KVConnectorFactory.get_connector_class_by_name("KVKeepConnector") is KVKeepConnector


def test_a_wrong_key_is_refused_when_vllm_asks_for_the_class(
    theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM does so while it checks its options; it makes the connector when the model is there."""
    monkeypatch.setattr(
        KVConnectorFactory,
        "get_connector_class",
        KVConnectorFactory.__dict__["get_connector_class"],
    )
    kvkeep.vllm.register()
    kvkeep.vllm.register()
    transfer = vllm_config().kv_transfer_config
    transfer.kv_connector = "KVKeepConnector"
    assert KVConnectorFactory.supports_hma_config(transfer)
    transfer.kv_connector_extra_config = {"kvkeep.adress": "tcp://127.0.0.1:1"}
    with pytest.raises(SettingsError, match=r"unknown key 'kvkeep\.adress'"):
        KVConnectorFactory.supports_hma_config(transfer)
