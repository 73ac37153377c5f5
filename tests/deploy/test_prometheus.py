"""The alert rules and the dashboard: they name real metrics, and alerts fire on planted faults, in
Prometheus' own unit tests and in a real Prometheus beside a real server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.server.test_movement import BLOCKS, World, blocks_of

from kvkeep.kv.outcomes import LAST, LOADED, LOCAL, NAMES, NO_MISS
from kvkeep.testing.clock import eventually

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
CONFIG = RULES.with_name("prometheus.yaml")
DASHBOARD = ROOT / "deploy" / "grafana" / "kvkeep.json"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed"
)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed"
)
SERVER = 'job="kvkeep", instance="a:1"'
TIER = f'{SERVER}, tier="/disk"'
# Of each alert: a series of a fault, one value a minute.
PLANTED = {
    "KvkeepDown": (f"up{{{SERVER}}}", "1 1 0x18"),
    "KvkeepNotReady": (f"kvkeep_ready{{{SERVER}}}", "0x20"),
    "KvkeepBadBlocks": (f"kvkeep_bad_blocks_total{{{SERVER}}}", "0x15 1x5"),
    "KvkeepInternalErrors": (f"kvkeep_internal_errors_total{{{SERVER}}}", "0x15 1x5"),
    "KvkeepPoolDegraded": (f"kvkeep_pool_degraded{{{SERVER}}}", "1x20"),
    "KvkeepQuotasExceedPool": (f"kvkeep_quotas_scaled_down{{{SERVER}}}", "1x20"),
    "KvkeepEnginesDie": (f"kvkeep_sessions_died_total{{{SERVER}}}", "0x15 4x5"),
    "KvkeepPeersRefused": (
        f'kvkeep_auth_failures_total{{{SERVER}, reason="other_user"}}',
        "0x15 30x5",
    ),
    "KvkeepSlowLoop": (f"kvkeep_loop_longest_turn_seconds{{{SERVER}}}", "0.5x20"),
    "KvkeepTierSetAside": (f"kvkeep_tier_set_aside{{{TIER}}}", "1x20"),
    "KvkeepTierBadBlocks": (f"kvkeep_tier_bad_blocks_total{{{TIER}}}", "0x15 1x5"),
    "KvkeepTierErrors": (f"kvkeep_tier_errors_total{{{TIER}}}", "0x15 3x5"),
    "KvkeepTierFull": (f"kvkeep_tier_refused_blocks_total{{{TIER}}}", "0+5x20"),
}
HEALTHY = {
    name: "1x20" if name in ("up", "kvkeep_ready") else "0x20"
    for name in (series.partition("{")[0] for series, _ in PLANTED.values())
}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return list(group["rules"])


def documented() -> set[str]:
    """Metrics as the server exports them: tests/test_docs.py keeps the page complete."""
    names: set[str] = set()
    for line in (ROOT / "docs" / "reference" / "metrics.md").read_text().splitlines():
        if match := re.match(r"\| `(kvkeep_\w+)` \| (\w+)", line):
            name, kind = match.groups()
            parts = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            names |= {name + part for part in parts}
    return names


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\bkvkeep_\w+", text))


def expressions_of(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_alerts_name_real_metrics_and_say_what_to_do() -> None:
    assert len(rules()) >= 10
    for rule in rules():
        assert metrics_in(rule["expr"]) <= documented(), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description"} == set(rule["annotations"])


def test_the_guide_has_every_alert() -> None:
    text = (ROOT / "docs" / "guides" / "monitoring.md").read_text()
    rows = re.findall(r"^\| `(Kvkeep\w+)` \| (\w+) \|", text, flags=re.MULTILINE)
    assert rows == [(rule["alert"], rule["labels"]["severity"]) for rule in rules()]


def labels_of_metrics() -> dict[str, set[str]]:
    """By the names of documented metrics."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "reference" / "metrics.md").read_text().splitlines():
        if match := re.match(r"\| `(kvkeep_\w+)` \| (\w+) \| ([^|]*) \|", line):
            name, kind, labels = match.groups()
            suffix, more = ("_bucket", {"le"}) if kind == "histogram" else ("", set())
            found[name + suffix] = {*re.findall(r"`(\w+)`", labels), *more, "instance"}
    return found


def test_the_dashboard_names_real_metrics() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = expressions_of(dashboard)
    assert len(expressions) > 10
    assert metrics_in(" ".join(expressions)) <= documented()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel.get("description") for panel in dashboard["panels"] if "targets" in panel)


def test_the_dashboard_groups_and_selects_by_labels_that_its_metrics_have() -> None:
    labels = labels_of_metrics()
    for expression in expressions_of(json.loads(DASHBOARD.read_text())):
        for name, selector in re.findall(r"\b(kvkeep_\w+)\{([^}]*)\}", expression):
            asked = set(re.findall(r"(\w+)[=!]", selector))
            asked |= {
                label
                for group in re.findall(r"by \(([\w, ]+)\)", expression)
                for label in group.split(", ")
            }
            assert "instance" in asked and asked <= labels[name], expression
        assert metrics_in(expression) <= set(re.findall(r"\b(kvkeep_\w+)\{", expression))


def test_the_dashboard_covers_what_an_operator_asks() -> None:
    expressions = " ".join(expressions_of(json.loads(DASHBOARD.read_text())))
    for name in (
        *("avoided_seconds", "load_seconds", "loaded_tokens", "local_tokens", "computed_tokens"),
        *("tenant_avoided_seconds", "tenant_loaded_tokens", "model_avoided_seconds"),
        *("prompt_blocks", "evicted_blocks", "load_failures", "auth_failures", "tier_errors"),
    ):
        assert f"kvkeep_{name}_total{{" in expressions, name
    for name in (
        *("tenant_usage_bytes", "pool_used_bytes", "sessions", "leases", "tier_used_bytes"),
        *("tier_set_aside", "loop_longest_turn_seconds", "loop_turn_seconds_bucket"),
    ):
        assert f"kvkeep_{name}{{" in expressions, name
    # Of the outcomes of blocks, those that are misses.
    assert f'outcome!~"{"|".join(NAMES[each] for each in (LOCAL, LOADED, LAST))}"' in expressions
    assert {LOCAL, LOADED, LAST} == NO_MISS


def test_grafana_can_import_the_dashboard() -> None:
    """Each panel asks the chosen source, has a place of its own, and names its queries."""
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["uid"] and dashboard["schemaVersion"] >= 39 and not dashboard.get("id")
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert variables["source"]["type"] == "datasource" and variables["source"]["query"]
    assert variables["instance"]["datasource"]["uid"] == "${source}"
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${source}"}
            assert panel["fieldConfig"]["defaults"]["unit"]
            names = [target["refId"] for target in panel["targets"]]
            assert names and len(set(names)) == len(names)


def in_prometheus(expression: str) -> str:
    """With values for what Grafana puts in."""
    for variable, value in (
        *(("$__rate_interval", "5m"), ("$__range", "1h"), ("$instance", ".*")),
    ):
        expression = expression.replace(variable, value)
    return expression


@needs_promtool
def test_the_example_configuration_is_valid() -> None:
    assert_promtool("check", "config", str(CONFIG))


@needs_promtool
def test_expressions_of_the_dashboard_are_valid(tmp_path: Path) -> None:
    found = expressions_of(json.loads(DASHBOARD.read_text()))
    recorded = [
        {"record": f"panel:{number}", "expr": in_prometheus(each)}
        for number, each in enumerate(found)
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    assert_promtool("check", "rules", str(file))


@needs_promtool
@pytest.mark.parametrize("alert", [rule["alert"] for rule in rules()])
def test_an_alert_fires_on_its_fault_alone(alert: str, tmp_path: Path) -> None:
    planted, values = PLANTED[alert]
    series = [{"series": planted, "values": values}] + [
        {"series": f"{name}{{{TIER if 'tier' in name else SERVER}}}", "values": good}
        for name, good in HEALTHY.items()
        if name != planted.partition("{")[0]
    ]
    query = f'count(ALERTS{{alertstate="firing", alertname="{alert}"}})'
    others = f'count(ALERTS{{alertstate="firing", alertname!="{alert}"}})'
    test = {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [
            {"expr": query, "eval_time": "20m", "exp_samples": [{"labels": "{}", "value": 1}]},
            {"expr": others, "eval_time": "20m", "exp_samples": []},
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [test]}))
    assert_promtool("test", "rules", str(file))


def assert_promtool(*words: str) -> None:
    done = subprocess.run(
        ["promtool", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- a real Prometheus beside a real server


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Scrapes and evaluates each second, with the rules as they are but for their waiting times."""
    short = yaml.safe_load(RULES.read_text())
    for rule in short["groups"][0]["rules"]:
        rule.pop("for", None)
    (folder / "alerts.yaml").write_text(yaml.safe_dump(short))
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def firing(url: str) -> set[str]:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/alerts", timeout=5) as answer:
            alerts = json.load(answer)["data"]["alerts"]
    except OSError:
        return set()
    return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


def is_scraped(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?query=kvkeep_ready", timeout=5) as answer:
            return bool(json.load(answer)["data"]["result"])
    except OSError:
        return False


def panels_without_data(url: str) -> set[str]:
    """Titles of the dashboard's panels one of whose queries finds nothing."""
    return {
        panel["title"]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", [])
        if not answer_to(url, in_prometheus(target["expr"]))
    }


def answer_to(url: str, expression: str) -> list[Any]:
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=30) as answer:
        return list(json.load(answer)["data"]["result"])


def damage(world: World) -> None:
    content = (world.disk / "data").read_bytes()
    with open(world.disk / "data", "r+b") as data:
        data.seek(content.index(blocks_of(1, BLOCKS)[5].tobytes()) + 99)
        data.write(b"wrong")
        os.fsync(data.fileno())


def send_wrong_tokens(http: str, count: int) -> None:
    for _ in range(count):
        request = urllib.request.Request(
            f"http://{http}/v1/drain", method="POST", headers={"Authorization": "Bearer wrong"}
        )
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=10)


@needs_prometheus
def test_faults_of_a_real_server_fire(tmp_path: Path) -> None:
    world = World(tmp_path / "disk")
    with contextlib.ExitStack() as stack:
        stack.callback(world.close)
        url = stack.enter_context(prometheus(tmp_path, world.server.http))
        world.put(1)
        assert eventually(lambda: world.written(BLOCKS))
        assert eventually(lambda: is_scraped(url))
        assert firing(url) == set()
        assert world.get(1) == BLOCKS
        assert eventually(lambda: not panels_without_data(url)), panels_without_data(url)
        damage(world)
        world.admin("POST", "/v1/verify")
        assert eventually(lambda: "KvkeepTierBadBlocks" in firing(url))
        send_wrong_tokens(world.server.http, 25)
        assert eventually(lambda: "KvkeepPeersRefused" in firing(url))
        assert world.server.process is not None
        world.server.process.send_signal(signal.SIGSTOP)
        assert eventually(lambda: "KvkeepDown" in firing(url))
        world.server.process.send_signal(signal.SIGCONT)
        assert eventually(lambda: "KvkeepDown" not in firing(url))
