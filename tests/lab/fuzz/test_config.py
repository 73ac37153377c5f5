"""The target of configuration: it is quiet on the code as it is, and notices bugs that are
planted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.client import hints
from kvkeep.errors import SettingsError
from kvkeep.server import quotas
from kvkeep.server import settings as server_settings
from kvkeep_lab.fuzz import config as fuzz_config
from kvkeep_lab.fuzz.choices import Choices, random_inputs
from kvkeep_lab.fuzz.config import run_config


def run_all(count: int = 3000, seed: int = 41) -> None:
    for data in random_inputs(seed, count):
        assert run_config(data) == (1, 0)


def test_it_is_quiet() -> None:
    run_all()


@pytest.mark.parametrize("reader", fuzz_config._READERS, ids=lambda reader: reader.__name__)
def test_each_reader_reads_something_and_refuses_something(
    reader: Callable[[Choices], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = 0
    real = SettingsError.__init__

    def counting(self: SettingsError, *arguments: Any, **more: Any) -> None:
        nonlocal refused
        refused += 1
        real(self, *arguments, **more)

    monkeypatch.setattr(SettingsError, "__init__", counting)
    for data in random_inputs(42, 200):
        reader(Choices(data))
    assert refused > 0 or reader.__name__ in ("_params", "_units"), "those refuse by other means"


def test_params_that_raise_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hints, "_integer", lambda mapping, name, most, default: mapping.get(name, default)
    )
    with pytest.raises((AssertionError, TypeError)):
        run_all()


def test_a_negative_quota_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas.QuotaFile, "load", lambda self: quotas.KeptQuotas({"default": -5}))
    with pytest.raises(AssertionError):
        run_all()


def test_a_kind_that_shows_what_it_cannot_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = server_settings.Kind(
        "a whole number", lambda text: int(text), lambda value: f"{value:,}"
    )
    line = dataclasses.replace(
        server_settings.TABLE["max_frame_size"], kind=kind, default="67108864"
    )
    monkeypatch.setitem(server_settings.TABLE, "max_frame_size", line)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="67,108,864"):
        fuzz_config._settings(Choices(b""))
