"""Options are checked where they are made, and the one that is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest

from kvkeep.client.options import DEFAULT_ADDRESS, ClientOptions
from kvkeep.errors import SettingsError
from kvkeep.wire.peers import OVERFLOW_UID


def test_the_defaults_reach_a_server_on_this_host() -> None:
    assert ClientOptions().address == DEFAULT_ADDRESS == "tcp://localhost:5555"


@pytest.mark.parametrize("option", ["lookup_deadline_ms", "ping_interval_ms", "reconnect_interval_ms"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "100", True, None])
def test_a_number_that_is_none_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=option):
        ClientOptions(**{option: value})


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVKEEP_ADDRESS", "KVKEEP_CLIENT_KEY", "KVKEEP_SERVER_KEY", "KVKEEP_TRUSTED_USERS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("given", [{"curve_key": "/keys/a.key"}, {"server_key": "/keys/server.pub"}])
def test_one_key_without_the_other_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"is given and .* is not") as caught:
        ClientOptions(**given)  # type: ignore[arg-type]
    assert "kvkeep keygen" in caught.value.hint


def test_keys_come_from_the_environment_if_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ClientOptions().curve_key, ClientOptions().server_key) == (None, None)
    monkeypatch.setenv("KVKEEP_CLIENT_KEY", "/keys/a.key")
    monkeypatch.setenv("KVKEEP_SERVER_KEY", "/keys/server.pub")
    assert (ClientOptions().curve_key, ClientOptions().server_key) == ("/keys/a.key", "/keys/server.pub")
    assert ClientOptions(curve_key="/keys/b.key").curve_key == "/keys/b.key"


def test_trusted_users_come_from_the_environment_if_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ClientOptions().trusted_users == ()
    monkeypatch.setenv("KVKEEP_TRUSTED_USERS", "1000, root")
    assert ClientOptions().trusted_users == (1000, 0)
    assert ClientOptions(trusted_users=(7,)).trusted_users == (7,)
    monkeypatch.setenv("KVKEEP_TRUSTED_USERS", "1000,no such user")
    with pytest.raises(SettingsError, match=r'KVKEEP_TRUSTED_USERS = "1000,no such user": there is no user'):
        ClientOptions()


@pytest.mark.parametrize("users", [[1000], "1000", ("1000",), (True,), (-1,), (OVERFLOW_UID,), None])
def test_what_is_no_user_is_refused(users: Any) -> None:
    with pytest.raises(SettingsError, match="trusted_users"):
        ClientOptions(trusted_users=users)
