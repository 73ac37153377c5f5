"""The target of the admin API: it is quiet on the code as it is, reaches every operation, and
notices planted bugs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvkeep.server.admin import Admin, TenantList
from kvkeep_lab.fuzz import http as fuzz_http
from kvkeep_lab.fuzz.choices import Leak, random_inputs
from kvkeep_lab.fuzz.http import WITH_TOKEN, App, run_http


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    made = App()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _shared(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_http, "shared_app", lambda: app)


def run_all(count: int = 200, seed: int = 51) -> int:
    return sum(run_http(data).messages for data in random_inputs(seed, count))


def test_it_is_quiet_and_reaches_every_operation(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, int]] = set()
    real = App.ask

    def watched(self: App, method: str, path: str, *rest: Any) -> tuple[int, bytes]:
        answer = real(self, method, path, *rest)
        seen.add((method, answer[0]))
        return answer

    monkeypatch.setattr(App, "ask", watched)
    assert run_all() > 500
    methods = {
        name.upper() for operations in app.description["paths"].values() for name in operations
    }
    assert methods <= {method for method, status in seen if status < 300}, (
        "each kind of operation went well"
    )
    assert {403, 404, 405, 422} <= {status for _, status in seen}


def test_draining_does_not_end_it(app: App) -> None:
    assert app.ask("POST", "/v1/drain", b"", [(b"host", b"localhost")], b"")[0] == 401
    status, _ = app.ask("POST", "/v1/drain", b"", [(b"host", b"localhost"), WITH_TOKEN], b"")
    assert status == 202
    assert app.ask("GET", "/v1/status", b"", [(b"host", b"localhost")], b"")[0] == 200


def test_an_operation_that_fails_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Admin, tenant: str) -> None:
        raise KeyError(tenant)

    monkeypatch.setattr(Admin, "tenant", broken)
    with pytest.raises((AssertionError, KeyError)):
        run_all()


def test_an_answer_that_is_not_as_described_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_http, "_GUARDED", {404})
    with pytest.raises(AssertionError, match="not in the description"):
        run_all()


def test_a_schema_is_held_against_an_answer(app: App) -> None:
    schema = {
        "type": "object",
        "required": ["a"],
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}},
    }
    fuzz_http._conform(app, {"a": [1, 2]}, schema)
    for wrong in ([], {}, {"a": 1}, {"a": ["x"]}):
        with pytest.raises(AssertionError):
            fuzz_http._conform(app, wrong, schema)


def test_tenants_without_a_limit_are_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_http, "_MOST_TENANTS", 0)
    monkeypatch.setattr(Admin, "tenants", lambda self, limit: TenantList(0, []))
    with pytest.raises(Leak):
        run_all()
