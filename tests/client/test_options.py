"""Options are checked where they are made, and the one that is wrong is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvkeep.client.options import DEFAULT_ADDRESS, LONGEST_WAIT_MS, ClientOptions
from kvkeep.errors import SettingsError
from kvkeep.wire.peers import OVERFLOW_UID


def test_the_defaults_reach_a_server_on_this_host() -> None:
    assert ClientOptions().address == DEFAULT_ADDRESS == "tcp://localhost:5555"


@pytest.mark.parametrize(
    "option", ["lookup_deadline_ms", "ping_interval_ms", "reconnect_interval_ms"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, "100", True, None])
def test_a_number_that_is_none_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=option):
        ClientOptions(**{option: value})


@pytest.mark.parametrize(
    ("text", "patience_ms"),
    [("best_effort", 0), ("timeout=0", 0), ("timeout=1500", 1_500), ("wait", LONGEST_WAIT_MS)],
)
def test_patience_with_a_tier_is_a_policy(text: str, patience_ms: int) -> None:
    assert ClientOptions(tier_patience=text).patience_ms == patience_ms
    assert ClientOptions().patience_ms == 200


@pytest.mark.parametrize(
    "text", ["", "timeout", "timeout=", "timeout=-1", "timeout=1.5", "timeout=200ms", "Wait", 200]
)
def test_another_word_for_patience_is_refused_with_those_that_there_are(text: Any) -> None:
    with pytest.raises(SettingsError, match=r"tier_patience = .*best_effort.*timeout=200.*wait"):
        ClientOptions(tier_patience=text)


FILES = {"tls_cert": "/keys/a.pem", "tls_key": "/keys/a.key", "tls_ca": "/keys/ca.pem"}
OLD = ("KVKEEP_CLIENT_KEY", "KVKEEP_SERVER_KEY")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "KVKEEP_ADDRESS",
        "KVKEEP_TRUSTED_USERS",
        *OLD,
        *(f"KVKEEP_CLIENT_{name.upper()}" for name in FILES),
    )
    for name in names:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("missing", FILES)
def test_tls_needs_all_three_files(missing: str) -> None:
    with pytest.raises(SettingsError, match=f"is set and {missing} is not") as caught:
        ClientOptions(**(FILES | {missing: None}))  # type: ignore[arg-type]
    assert "kvkeep keygen" in caught.value.hint
    assert ClientOptions(**FILES).tls_key == "/keys/a.key"  # type: ignore[arg-type]


def test_trusted_users_come_from_the_environment_if_nobody_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ClientOptions().trusted_users == ()
    monkeypatch.setenv("KVKEEP_TRUSTED_USERS", "1000, root")
    assert ClientOptions().trusted_users == (1000, 0)
    assert ClientOptions(trusted_users=(7,)).trusted_users == (7,)
    monkeypatch.setenv("KVKEEP_TRUSTED_USERS", "1000,no such user")
    with pytest.raises(
        SettingsError, match=r'KVKEEP_TRUSTED_USERS = "1000,no such user": there is no user'
    ):
        ClientOptions()


@pytest.mark.parametrize(
    "users", [[1000], "1000", ("1000",), (True,), (-1,), (OVERFLOW_UID,), None]
)
def test_what_is_no_user_is_refused(users: Any) -> None:
    with pytest.raises(SettingsError, match="trusted_users"):
        ClientOptions(trusted_users=users)


def test_files_come_from_the_environment_if_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {getattr(ClientOptions(), name) for name in FILES} == {None}
    for name, path in FILES.items():
        monkeypatch.setenv(f"KVKEEP_CLIENT_{name.upper()}", path)
    assert {name: getattr(ClientOptions(), name) for name in FILES} == FILES
    assert ClientOptions(tls_cert="/keys/b.pem").tls_cert == "/keys/b.pem"
    monkeypatch.setenv("KVKEEP_CLIENT_TLS_CA", "")
    with pytest.raises(SettingsError, match="tls_ca is not"):
        ClientOptions()


@pytest.mark.parametrize("old", OLD)
def test_variables_of_earlier_releases_are_refused_by_name(
    old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ClientOptions()
    monkeypatch.setenv(old, "/keys/a.key")
    with pytest.raises(SettingsError, match=f"{old} does not exist any more") as caught:
        ClientOptions()
    assert "KVKEEP_CLIENT_TLS_CERT" in caught.value.hint and "migration guide" in caught.value.hint
    assert dataclasses.replace(options, client="b").client == "b", (
        "what was read once is not read again"
    )
    monkeypatch.setenv(old, "")
    assert ClientOptions() == options


@pytest.mark.parametrize("old", ["curve_key", "server_key"])
def test_options_of_earlier_releases_are_refused_by_name(old: str) -> None:
    with pytest.raises(SettingsError, match=f"{old} does not exist any more") as caught:
        ClientOptions(**{old: "/keys/a.key"})  # type: ignore[arg-type]
    assert "tls_cert, tls_key and tls_ca" in caught.value.hint
