"""Health, readiness and the admin API, spoken to over real sockets."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.errors import SettingsError
from kvkeep.server.figures import FiguresShown
from kvkeep.server.http_server import HttpServer
from kvkeep.units import MIB
from kvkeep.wire import messages as m
from kvkeep_lab.simulation.peer import Peer, chain

TENANT = "t-" + "a" * 32
OTHER = "t-" + "b" * 32
QUOTA, LIMIT = (f"/v1/tenants/{TENANT}/{what}" for what in ("quota", "limit"))
Start = Callable[..., Any]


@pytest.fixture
def running(start: Start) -> Any:
    return start()


@pytest.fixture
def stuck(start: Start) -> Iterator[Any]:
    """A server whose loop does not turn until the test is over."""
    running = start(stuck_after_s=0.2, loop_wait_s=0.2)
    release, entered = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        release.wait(60)

    running.daemon.run_in_loop(block)
    assert entered.wait(60)
    yield running
    release.set()


# -- health


def test_a_server_that_runs_is_healthy_and_ready(running: Any) -> None:
    assert running.ask("/healthz") == (
        200,
        {"healthy": True, "busy_s": pytest.approx(0, abs=5), "reason": ""},
    )
    status, said = running.ask("/readyz")
    assert status == 200
    assert said["ready"] is True
    assert said["filled_bytes"] == said["pool_bytes"] == 32 * MIB


def test_an_idle_server_stays_healthy(start: Start) -> None:
    """The loop sleeps for an hour here: waiting for work is not being stuck."""
    flags = ("--session-check-interval", "1h", "--network-session-timeout", "2h")
    running = start(*flags, stuck_after_s=0.05)
    time.sleep(0.2)
    assert running.ask("/healthz")[0] == 200


def test_health_is_red_while_the_loop_is_stuck(stuck: Any) -> None:
    while stuck.ask("/healthz")[0] == 200:
        time.sleep(0.01)
    status, said = stuck.ask("/healthz")
    assert status == 503 and said["healthy"] is False and said["busy_s"] > 0
    assert stuck.ask("/readyz")[1]["reason"] == "the server's loop is stuck"


def test_a_stuck_loop_fails_a_scrape_and_does_not_hang_it(stuck: Any) -> None:
    for path in ("/metrics", "/v1/status", "/v1/tenants"):
        status, said = stuck.ask(path)
        assert status == 503 and said["error"] == "loop_busy"


def test_a_change_that_a_stuck_loop_did_not_begin_never_happens(stuck: Any) -> None:
    quota = {"quota_bytes": MIB}
    assert stuck.ask(QUOTA, "PUT", quota)[1]["error"] == "loop_busy"
    assert not stuck.daemon.quotas.path.exists()


def test_many_questions_to_a_stuck_loop_do_not_break_it(stuck: Any) -> None:
    """Each one wakes the loop through a socket, whose buffer holds only so many."""
    for _ in range(2000):
        stuck.daemon.run_in_loop(lambda: None)


def test_a_pool_that_is_being_filled_is_not_ready(start: Start) -> None:
    running = start(loop=False)  # nobody fills it any further
    running.daemon.pool.filled_bytes = MIB
    status, said = running.ask("/readyz")
    assert status == 503
    assert f"being filled: {MIB} of {32 * MIB}" in said["reason"]
    assert said["filled_bytes"] == MIB
    assert running.ask("/healthz")[0] == 200


def test_who_stores_at_once_finds_room(start: Start) -> None:
    assert start(loop=False).daemon.store.slabs.capacity_bytes == 32 * MIB


def test_a_degraded_pool_is_ready_and_says_so_unless_it_is_empty(running: Any) -> None:
    running.daemon.degraded = "no more memory"
    status, said = running.ask("/readyz")
    assert status == 200 and said["degraded"] == "no more memory"
    running.daemon.pool.filled_bytes = 0
    assert running.ask("/readyz")[1]["reason"] == "the pool has no memory"


def test_a_server_that_stops_is_not_ready(start: Start) -> None:
    running = start("--shutdown-grace", "1h")
    running.store("default", 1, complete=False)  # keeps it waiting
    running.daemon.stop()
    status, said = running.ask("/readyz")
    assert status == 503 and said["reason"] == "the server is stopping"
    running.in_loop(lambda: running.daemon.store.close_session(1, 0))


# -- tenants, quotas and limits


def test_limits_are_set_shown_kept_and_taken_back(running: Any) -> None:
    running.store(TENANT, 5)
    assert running.ask(LIMIT, "PUT", {"limit_bytes": 3 * 4096}) == (204, "")
    _, said = running.ask(f"/v1/tenants/{TENANT}")
    assert (said["blocks"], said["usage_bytes"], said["limit_bytes"], said["own_limit"]) == (
        3,
        12288,
        12288,
        True,
    )
    assert running.daemon.quotas.load().limits == {TENANT: 12288}
    _, text = running.ask("/metrics")
    assert f'kvkeep_tenant_limit_bytes{{tenant="{TENANT}"}} 12288.0' in text
    assert running.ask("/v1/status")[1]["largest_tenants"][0]["limit_bytes"] == 12288
    assert running.ask(LIMIT, "PUT", {"limit_bytes": 0}) == (204, "")
    assert running.ask(f"/v1/tenants/{TENANT}")[1]["blocks"] == 0
    assert running.ask(LIMIT, "PUT", {"limit_bytes": None}) == (204, "")
    assert running.daemon.quotas.load().limits == {}


def test_the_default_limit_is_a_live_setting_that_is_kept(running: Any) -> None:
    running.store(TENANT, 5)
    for first in range(0, 2000, 500):
        running.store("default", 500, first)
    status, rows = running.ask("/v1/settings", "PATCH", {"default_limit": "8KiB"})
    assert status == 200 and {row["name"]: row["value"] for row in rows}["default_limit"] == "8KiB"
    listed = running.ask("/v1/tenants")[1]["tenants"]
    assert {
        each["tenant"]: (each["blocks"], each["limit_bytes"], each["own_limit"]) for each in listed
    } == {TENANT: (2, 8192, False), "default": (2, 8192, False)}
    kept = running.daemon.quotas.load()
    assert (kept.default_limit_set, kept.default_limit_bytes) == (True, 8192)
    assert "kvkeep_default_limit_bytes 8192.0" in running.ask("/metrics")[1]


def test_a_limit_below_the_quota_is_refused_and_names_both_fields(running: Any) -> None:
    running.ask(QUOTA, "PUT", {"quota_bytes": 2 * MIB})
    status, said = running.ask(LIMIT, "PUT", {"limit_bytes": MIB})
    assert (status, said["error"], said["field"]) == (409, "limit_below_quota", "limit_bytes")
    assert "limit_bytes = 1MiB" in said["message"] and "quota_bytes = 2MiB" in said["message"]
    status, said = running.ask(
        "/v1/settings", "PATCH", {"default_quota": "2MiB", "default_limit": "1MiB"}
    )
    assert status == 422
    assert "default_limit = 1MiB is less than default_quota = 2MiB" in said["message"]
    status, said = running.ask("/v1/settings", "PATCH", {"default_limit": "1MiB"})
    assert (status, said["error"], said["field"]) == (409, "limit_below_quota", "default_limit")
    assert running.daemon.quotas.load().limits == {}
    assert not running.daemon.quotas.load().default_limit_set


def test_defaults_that_fit_together_can_change_together(running: Any) -> None:
    for limit, quota in (("2MiB", "1MiB"), ("8MiB", "4MiB"), ("1MiB", "1MiB")):
        changes = {"default_quota": quota, "default_limit": limit}
        assert running.ask("/v1/settings", "PATCH", changes)[0] == 200
    assert running.daemon.store.tenants.default_limit_bytes == MIB


def test_quotas_are_set_and_taken_back(running: Any) -> None:
    assert running.ask(QUOTA, "PUT", {"quota_bytes": 8 * MIB}) == (204, "")
    assert running.ask(f"/v1/tenants/{TENANT}") == (
        200,
        {
            "tenant": TENANT,
            "blocks": 0,
            "usage_bytes": 0,
            "quota_bytes": 8 * MIB,
            "own_quota": True,
            "set_quota_bytes": 8 * MIB,
            "limit_bytes": None,
            "own_limit": False,
            "lookups": 0,
            "hit_blocks": 0,
            "missed_blocks": 0,
            "figures": dataclasses.asdict(FiguresShown()),
        },
    )
    assert running.ask(QUOTA, "PUT", {"quota_bytes": None}) == (204, "")
    assert running.ask(f"/v1/tenants/{TENANT}")[0] == 404


def test_tenants_are_listed_largest_first(running: Any) -> None:
    running.store("default", 2)
    running.store(TENANT, 5)
    running.store(OTHER, 3)
    status, said = running.ask("/v1/tenants?limit=2")
    assert status == 200 and said["total"] == 3
    assert [row["tenant"] for row in said["tenants"]] == [TENANT, OTHER]
    assert said["tenants"][0]["usage_bytes"] == 5 * 4096


def test_clearing_one_tenant_leaves_the_others(running: Any) -> None:
    running.store(TENANT, 5)
    running.store(OTHER, 3)
    assert running.ask(f"/v1/tenants/{TENANT}/blocks", "DELETE") == (
        200,
        {"blocks": 5, "unreached": []},
    )
    assert running.ask(f"/v1/tenants/{OTHER}")[1]["blocks"] == 3
    assert running.ask(f"/v1/tenants/{TENANT}/blocks", "DELETE")[0] == 404


def test_clearing_everything_must_be_confirmed(running: Any) -> None:
    running.store(TENANT, 5)
    running.store("default", 3)
    status, said = running.ask("/v1/blocks", "DELETE")
    assert (
        status == 422 and said["error"] == "not_confirmed" and "?confirm=everything" in said["hint"]
    )
    assert running.ask("/v1/blocks?confirm=everything", "DELETE") == (
        200,
        {"blocks": 8, "unreached": []},
    )
    assert running.ask("/v1/tenants")[1]["total"] == 0


@pytest.mark.parametrize(
    ("path", "method", "body", "status", "error", "field"),
    [
        (f"/v1/tenants/{TENANT}", "GET", None, 404, "unknown_tenant", "tenant"),
        ("/v1/tenants/my-salt", "GET", None, 422, "bad_tenant", "tenant"),
        (f"/v1/tenants/{TENANT.upper()}", "GET", None, 422, "bad_tenant", "tenant"),
        ("/v1/tenants?limit=0", "GET", None, 422, "bad_request", "limit"),
        ("/v1/tenants?limit=many", "GET", None, 422, "bad_request", "limit"),
        (QUOTA, "PUT", {"quota_bytes": None}, 404, "unknown_tenant", "tenant"),
        (QUOTA, "PUT", {"quota_bytes": -1}, 422, "bad_request", "quota_bytes"),
        (QUOTA, "PUT", {"quota_bytes": "8GiB"}, 422, "bad_request", "quota_bytes"),
        (QUOTA, "PUT", {"quota_bytes": True}, 422, "bad_request", "quota_bytes"),
        (QUOTA, "PUT", {"quota_bytes": 1.5}, 422, "bad_request", "quota_bytes"),
        (QUOTA, "PUT", {"quota_bytes": 33 * MIB}, 409, "quota_too_large", "quota_bytes"),
        (QUOTA, "PUT", {"quota_bytes": 1 << 200}, 409, "quota_too_large", "quota_bytes"),
        (QUOTA, "PUT", {}, 422, "bad_request", "quota_bytes"),
        (QUOTA, "PUT", {"quota_bytes": 1, "more": 1}, 422, "bad_request", "more"),
        (LIMIT, "PUT", {"limit_bytes": None}, 404, "unknown_tenant", "tenant"),
        (LIMIT, "PUT", {"limit_bytes": -1}, 422, "bad_request", "limit_bytes"),
        (LIMIT, "PUT", {"limit_bytes": 1 << 200}, 422, "bad_limit", "limit_bytes"),
        (LIMIT, "PUT", {"quota_bytes": 1}, 422, "bad_request", "limit_bytes"),
        (QUOTA, "PUT", [1], 422, "bad_request", ""),
        (QUOTA, "PUT", b"{", 422, "bad_request", ""),
        (QUOTA, "PUT", b"\xff\xfe", 422, "bad_request", ""),
        (QUOTA, "PUT", b'{"quota_bytes": ' + b"9" * 5000 + b"}", 400, "bad_request", ""),
        (QUOTA, "PUT", b"[" * 60_000, 400, "bad_request", ""),
        (QUOTA, "PUT", b"x" * 70_000, 413, "body_too_large", ""),
        (QUOTA, "PUT", None, 422, "bad_request", ""),
        (f"/v1/tenants/{TENANT}/blocks", "DELETE", None, 404, "unknown_tenant", "tenant"),
        ("/v1/settings", "PATCH", {"pool_size": "1GiB"}, 422, "bad_setting", ""),
        ("/v1/settings", "PATCH", {"log_level": "loud"}, 422, "bad_setting", ""),
        ("/v1/settings", "PATCH", {"default_quota": -5}, 422, "bad_setting", ""),
        (
            "/v1/settings",
            "PATCH",
            {"default_quota": "33MiB"},
            409,
            "quota_too_large",
            "default_quota",
        ),
        ("/v1/settings", "PATCH", {"verify": []}, 422, "bad_request", "verify"),
        ("/v1/settings", "PATCH", {}, 422, "bad_request", ""),
        ("/v1/nothing", "GET", None, 404, "not_found", ""),
        ("/v1/status/", "GET", None, 404, "not_found", ""),  # not sent on to another address
        ("/v1/status", "POST", None, 405, "method_not_allowed", ""),
    ],
)
def test_bad_requests_are_refused_and_change_nothing(
    running: Any, path: str, method: str, body: Any, status: int, error: str, field: str
) -> None:
    settings = running.ask("/v1/settings")
    got, said = running.ask(path, method, body)
    assert (got, said["error"], said["field"]) == (status, error, field), said
    assert said["message"] and set(said) == {"error", "message", "field", "hint"}
    assert "my-salt" not in str(said)
    assert running.ask("/v1/tenants")[1]["total"] == 0
    assert running.ask("/v1/settings") == settings
    assert not running.daemon.quotas.path.exists()


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
def test_a_body_that_is_not_said_to_be_json_is_refused_with_the_remedy(
    running: Any, kind: str
) -> None:
    for path, method, body in (
        (QUOTA, "PUT", {"quota_bytes": 1}),
        ("/v1/settings", "PATCH", {"verify": False}),
    ):
        status, said = running.ask(path, method, body, {"content-type": kind})
        assert (status, said["error"]) == (422, "bad_request")
        assert "JSON" in said["message"] and "content-type: application/json" in said["hint"]


def test_quotas_that_do_not_fit_are_told_in_sizes_for_people(running: Any) -> None:
    _, said = running.ask(QUOTA, "PUT", {"quota_bytes": 33 * MIB})
    assert "33MiB (34603008 bytes)" in said["message"] and "32MiB" in said["message"]
    status, said = running.ask(QUOTA, "PUT", {"quota_bytes": 10**4000})
    assert status == 409 and said["error"] == "quota_too_large"
    _, said = running.ask("/v1/settings", "PATCH", {"default_quota": "33MiB"})
    assert "33MiB" in said["message"] and "--pool-size" in said["hint"]


def test_an_unknown_setting_names_the_nearest(running: Any) -> None:
    status, said = running.ask("/v1/settings", "PATCH", {"defualt_quota": "1MiB"})
    assert status == 422 and "default_quota" in said["hint"]


@pytest.mark.parametrize(
    "changes", [{"log_level": "\ud800"}, {"\ud800": "x"}, {"default_quota": "\udfff1"}]
)
def test_half_a_character_is_refused_like_any_other_text(
    running: Any, changes: dict[str, str]
) -> None:
    status, said = running.ask("/v1/settings", "PATCH", changes)
    assert status == 422 and said["error"] == "bad_setting"
    status, said = running.ask(QUOTA, "PUT", {"quota_bytes": 1, "\ud800": 1})
    assert status == 422 and said["error"] == "bad_request"


# -- settings


def test_live_settings_change_what_they_say(running: Any) -> None:
    try:
        changes = {"default_quota": "2MiB", "verify": False, "log_level": "error"}
        status, said = running.ask("/v1/settings", "PATCH", changes)
        assert status == 200
        values = {row["name"]: row["value"] for row in said}
        assert (values["default_quota"], values["verify"], values["log_level"]) == (
            "2MiB",
            "false",
            "error",
        )
        assert running.daemon.service.verify is False
        assert running.daemon.store.tenants.default_quota_bytes == 2 * MIB
        assert logging.getLogger("kvkeep").level == logging.ERROR
        assert running.ask("/v1/settings", "PATCH", {"default_quota": None})[0] == 200
        assert running.daemon.store.tenants.default_quota_bytes is None
    finally:
        logging.getLogger("kvkeep").setLevel(logging.NOTSET)


def test_several_settings_change_all_or_none(running: Any) -> None:
    status, said = running.ask("/v1/settings", "PATCH", {"verify": False, "log_level": "loud"})
    assert status == 422 and said["error"] == "bad_setting"
    assert running.daemon.service.verify is True


# -- the whole


def test_status_tells_the_addresses_and_what_is_held(running: Any) -> None:
    running.store(TENANT, 3)
    running.store("default", 2, complete=False)
    status, said = running.ask("/v1/status")
    assert status == 200
    assert said["address"] == running.daemon.address
    assert said["http_address"] == running.http.address
    assert said["pool"]["blocks"] == {"writing": 2, "waiting": 0, "ready": 3, "evicting": 0}
    assert said["writes"] == 1 and said["tenants"] == 2


@pytest.mark.parametrize("authorization", ["", "Bearer wrong"])
def test_without_the_token_a_status_counts_sessions_and_does_not_name_them(
    running: Any, authorization: str
) -> None:
    peer = Peer(running.handle)
    peer.attach()
    parts = {"model": "m"}
    peer.ask(m.LayoutOpened, m.OpenLayout(b"f" * 16, [64], parts=parts, role="lighthouse"))
    status, said = running.ask("/v1/status", headers={"authorization": authorization})
    assert status == 200 and said["sessions"] is None and said["not_shared"] is None
    assert said["open_sessions"] == {"shared_memory": 0, "network": 1, "none": 0}
    assert "lighthouse" not in json.dumps(said)
    [shown] = running.ask("/v1/status")[1]["sessions"]
    assert (shown["role"], shown["engine"]) == ("lighthouse", "peer")


@pytest.mark.parametrize("version", ["abc", "1..0", "1.0." + 5000 * "9"])
@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
def test_an_accept_header_with_a_senseless_version_gets_text(
    running: Any, kind: str, version: str
) -> None:
    status, text = running.ask("/metrics", headers={"accept": f"{kind}; version={version}"})
    assert status == 200 and "kvkeep_default_limit_bytes" in text


def test_a_failure_is_answered_each_time_and_logged_once(
    running: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(running.http.admin, "status", fail)
    for _ in range(5):
        status, said = running.ask("/v1/status")
        assert (status, said["error"]) == (500, "internal_error")
    assert [each.levelname for each in caplog.records if each.exc_info] == ["ERROR"]
    assert "internal_error by ZeroDivisionError" in caplog.text
    assert caplog.text.count("ZeroDivisionError: planted") == 1


def test_openapi_describes_every_route(running: Any) -> None:
    status, said = running.ask("/openapi.json")
    assert status == 200
    assert {"/healthz", "/readyz", "/metrics", "/v1/status", "/v1/tenants/{tenant}/quota"} <= set(
        said["paths"]
    )
    assert [running.ask(path)[0] for path in ("/docs", "/redoc")] == [404, 404], (
        "they load scripts from other sites"
    )


def test_the_description_is_rendered_before_it_is_asked_for(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that would render it answers /healthz."""
    monkeypatch.delattr("fastapi.FastAPI.openapi")
    assert running.ask("/openapi.json")[0] == 200


def test_every_route_that_changes_something_needs_the_token(running: Any) -> None:
    running.store(TENANT, 1)
    routes = running.ask("/openapi.json")[1]["paths"]
    changes = [
        (method.upper(), path)
        for path, methods in routes.items()
        for method in methods
        if method != "get"
    ]
    assert ("POST", "/v1/drain") in changes and len(changes) == 14
    for method, path in changes:
        for given in ("", "Bearer ", f"Bearer {'x' * 43}", f"Basic {running.token}"):
            status, said = running.ask(
                path.format(tenant=TENANT, number=1), method, headers={"authorization": given}
            )
            assert (status, said["error"]) == (401, "unauthorized"), (method, path)
            assert str(running.daemon.settings.made_token) in said["hint"]
            assert running.token not in str(said)
    assert not running.daemon.stopping and running.ask(f"/v1/tenants/{TENANT}")[1]["blocks"] == 1
    assert running.daemon.service.counters.auth_failures == {"admin_token": 4 * len(changes)}


def test_reading_needs_no_token_unless_one_was_set(start: Start, tmp_path: Path) -> None:
    paths = ("/metrics", "/v1/status", "/v1/tenants", "/v1/settings", "/openapi.json")
    open_paths = ("/healthz", "/readyz")
    token = tmp_path / "token"
    token.write_text("t" * 43)
    token.chmod(0o600)
    for running, expected in (
        (start(), 200),
        (start("--name", "second", "--admin-token", str(token)), 401),
    ):
        for given in ("", f"Bearer {'x' * 43}"):
            assert {running.ask(path, headers={"authorization": given})[0] for path in paths} == {
                expected
            }
            assert {
                running.ask(path, headers={"authorization": given})[0] for path in open_paths
            } == {200}
    assert running.ask("/v1/status", headers={"authorization": f"Bearer {'t' * 43}"})[0] == 200
    assert not running.daemon.settings.made_token.exists(), "it makes none where one is set"


def test_the_token_that_the_server_made_is_kept_and_its_users_alone(
    start: Start, stop: Any
) -> None:
    running = start()
    file, token = running.daemon.settings.made_token, running.token
    status = file.lstat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, len(token)) == (0o600, os.geteuid(), 43)
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    stop(running)
    assert start().token == token
    other = start("--name", "other")
    assert other.token != token
    assert (
        other.ask("/v1/settings", "PATCH", {"verify": True}, {"authorization": f"Bearer {token}"})[
            0
        ]
        == 401
    )


def test_web_sites_are_kept_out(running: Any) -> None:
    running.store(TENANT, 1)
    status, said = running.ask("/v1/status", headers={"Host": "rebound.example"})
    assert status == 403 and said["error"] == "bad_host"
    origin = {"Origin": "http://other.example"}
    status, said = running.ask("/v1/blocks?confirm=everything", "DELETE", headers=origin)
    assert status == 403 and said["error"] == "bad_origin"
    assert running.ask(f"/v1/tenants/{TENANT}")[1]["blocks"] == 1
    own = {"Origin": f"http://{running.http.address}"}
    assert running.ask("/v1/blocks?confirm=everything", "DELETE", headers=own)[0] == 200


def test_a_server_without_its_lock_file_finds_nothing_and_says_so(
    start: Start, caplog: Any
) -> None:
    running = start("--session-check-interval", "10ms")
    daemon = running.daemon
    peer = Peer(
        lambda frames: running.in_loop(lambda: daemon.service.handle(frames, daemon.now_ms()))
    ).attach()
    layout, keys = peer.open_layout(4096), chain("a", 2)
    peer.store(layout, keys, [b"1" * 4096, b"2" * 4096])
    assert peer.ask(m.Found, m.Lookup("default", layout, keys)).blocks == 2
    (running.daemon.pool.directory / "daemon.lock").unlink()
    while running.ask("/healthz")[0] == 200:
        time.sleep(0.01)
    status, said = running.ask("/healthz")
    assert status == 503
    assert said["reason"] == "the pool's lock file was removed: restart the server"
    assert "its lock" in running.ask("/readyz")[1]["reason"]
    assert peer.ask(m.Found, m.Lookup("default", layout, keys)).blocks == 0
    assert (
        peer.say(m.PrepareStore("default", layout, 0, b"", chain("b", 1))).code == "shutting_down"
    )
    assert caplog.text.count("was removed: this server finds and stores nothing more") == 1


def test_a_pool_that_was_removed_is_told_and_the_network_goes_on(start: Start) -> None:
    # Its loop does not look at the lock file meanwhile: that would make it unhealthy as well.
    running = start("--session-check-interval", "1h", "--network-session-timeout", "2h")
    shutil.rmtree(running.daemon.pool.directory)
    status, said = running.ask("/readyz")
    assert status == 503 and "was removed" in said["reason"]
    assert running.ask("/healthz")[0] == 200
    peer = Peer(lambda frames: running.in_loop(lambda: running.daemon.service.handle(frames, 0)))
    assert peer.hello().pool.lock == ""
    peer.ask(m.Done, m.Attach(m.NETWORK))
    layout = peer.open_layout(64)
    peer.store(layout, chain("a", 2), [b"x" * 64, b"y" * 64])
    assert peer.load(layout, chain("a", 2)) == [b"x" * 64, b"y" * 64]


def test_a_port_in_use_is_refused_at_once(start: Start) -> None:
    running = start()
    with pytest.raises(SettingsError, match="cannot listen on") as caught:
        start("--name", "second", "--http-address", running.http.address)
    assert "--http-address" in caught.value.hint


def test_localhost_and_ipv6_can_be_listened_on(start: Start) -> None:
    assert start("--http-address", "localhost:0").ask("/healthz")[0] == 200
    if has_ipv6():
        assert start("--name", "six", "--http-address", "[::1]:0").ask("/healthz")[0] == 200


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_server_that_never_started_can_be_stopped(start: Start, tmp_path: Path) -> None:
    running = start()
    extra = HttpServer(running.daemon)
    extra.stop()
    extra.stop()
