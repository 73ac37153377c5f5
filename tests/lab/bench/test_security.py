"""The security benchmark runs and says what it must. How fast is not a test's business; how told
apart is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep.client.options import ClientOptions
from kvkeep.errors import SettingsError
from kvkeep.server.settings import Settings
from kvkeep_lab.bench import security


def test_rows_for_both_servers_and_what_time_tells(without_unit: Callable[..., list[str]]) -> None:
    result = security.run(rounds=3, repeats=2)
    assert [row["security"] for row in result["rows"]] == ["none", "tls"]
    measured = {"handshake_us", "ping_us", "lookup_us", "put_us_per_mib", "fetch_us_per_mib"}
    for row in result["rows"]:
        assert measured == set(row) - {"security"} and all(row[name] > 0 for name in measured)
    assert set(result["tls_to_none"]) == measured
    assert result["timing"]["samples"] == 60 and without_unit(result) == []


def test_a_coin_and_certainty_are_told() -> None:
    assert security.told_apart([1, 2, 3, 4], [1, 2, 3, 4]) == 0.5
    assert security.told_apart([1, 2], [3, 4]) == security.told_apart([3, 4], [1, 2]) == 1.0
    assert security.told_apart([1, 1, 1], [1, 1, 1]) == 0.5
    assert security.told_apart([1, 3], [2, 4]) == pytest.approx(0.75)


def test_certificates_are_made_for_both_sides(tmp_path: Path) -> None:
    flags, options = security.make_certificates(tmp_path / "keys")
    settings = Settings.load(None, {}, ["--pool-size", "64MiB", *flags])
    assert (
        settings.tls_cert == tmp_path / "keys" / "server.pem"
        and settings.authorized_clients is not None
    )
    assert ClientOptions(**options).tls_cert == str(tmp_path / "keys" / "bench.pem")
    with pytest.raises(SettingsError, match="is there already"):
        security.make_certificates(tmp_path / "keys")
