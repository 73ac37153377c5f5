"""The dashboard in a real Chromium, of a real server with reference engines.

KVKEEP_TEST_PICTURES=1 python -m pytest tests/e2e/test_dashboard.py     also makes the pictures
                                                                        of the documentation
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import GQA, POOL, engine, eventually, prompt, seed, serve

from kvkeep.cli.demo import Screen, Talk, _fifth_turn, _first_engine
from kvkeep.cli.demo_engine import EngineProcess
from kvkeep.kv.outcomes import OUTCOMES
from kvkeep.testing.process import ServerProcess

selenium = pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="chromium and chromium-driver are not installed"
)
PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
Browser = Callable[..., "webdriver.Chrome"]


# Of the marks in a table of owners of blocks, and of their parts in the map above it.
COLOURS = """const colour = (each, part) => getComputedStyle(each, part).backgroundColor
    const all = (selector, part) =>
        [...document.querySelectorAll(selector)].map(each => colour(each, part))
    return [all(`#${arguments[0]} .owner > :first-child`, "::before"), all(`#${arguments[1]} > span`)]
"""
TALKS = [Talk("alice", 768), Talk("bob", 512)]
ROOM = 300  # blocks of an engine that computes both


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that has the conversations of two users, with a disk below it."""
    disk = tmp_path_factory.mktemp("tier") / "disk"
    with ServerProcess(*POOL, "--tier", f"disk://{disk}?size=64MiB") as running:
        _first_engine(TALKS, running.address, ROOM, Screen(json=True))
        yield running


@pytest.fixture
def browser() -> Iterator[Browser]:
    opened: list[webdriver.Chrome] = []

    def start(*flags: str) -> webdriver.Chrome:
        options = webdriver.ChromeOptions()
        for flag in ("--headless=new", "--no-sandbox", "--window-size=1200,1500", *flags):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        opened.append(webdriver.Chrome(options, webdriver.ChromeService(DRIVER)))
        return opened[-1]

    yield start
    for each in opened:
        each.quit()


def text(tab: webdriver.Chrome, name: str) -> str:
    script = "return document.getElementById(arguments[0]).innerText"
    return str(tab.execute_script(script, name))


def tile(tab: webdriver.Chrome, name: str) -> str:
    script = """return [...document.querySelectorAll("#gain > div")]
        .map(each => [each.children[0].textContent, each.children[1].textContent])"""
    return str(dict(tab.execute_script(script)).get(name, ""))


def may_change(tab: webdriver.Chrome) -> bool:
    script = 'return !(document.querySelector("#tenants button")?.disabled ?? true)'
    return bool(tab.execute_script(script))


def open_dashboard(tab: webdriver.Chrome, server: ServerProcess) -> None:
    tab.get(f"http://{server.http}/")
    assert eventually(lambda: "ready" in text(tab, "state"))


def enter_token(tab: webdriver.Chrome, server: ServerProcess) -> None:
    token = (server.state_dir / server.name / "admin.token").read_text().strip()
    tab.find_element(By.ID, "token").send_keys(token, Keys.ENTER)
    assert eventually(lambda: "Enter the admin token" not in text(tab, "sessions"))


def status_of(server: ServerProcess) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{server.http}/v1/status") as answer:
        return dict(json.load(answer))


def errors(tab: webdriver.Chrome) -> list[str]:
    """What the console says, less the requests that fail while the server is restarted."""
    return [
        str(each["message"])
        for each in tab.get_log("browser")
        if "ERR_CONNECTION_REFUSED" not in each["message"]
    ]


def take_picture(tab: webdriver.Chrome, name: str, part: str = "") -> None:
    """Of the window, or of the section that holds the element of this id. Where none is to be made,
    the one in the documentation is checked: it is there, and nearly as wide as this one."""
    if not part:
        tab.execute_script("scrollTo(0, 0)")
    path = f"//*[self::section or self::dialog][.//*[@id='{part}'] or @id='{part}']"
    made = (
        tab.find_element(By.XPATH, path).screenshot_as_png if part else tab.get_screenshot_as_png()
    )
    if os.environ.get("KVKEEP_TEST_PICTURES"):
        (PICTURES / name).write_bytes(made)
    assert abs(width_of((PICTURES / name).read_bytes()) - width_of(made)) <= 20, name


def width_of(png: bytes) -> int:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return int(struct.unpack(">I", png[16:20])[0])


def auth_failures(server: ServerProcess) -> int:
    return sum(server.ask()["auth_failures"].values())


def test_it_shows_what_the_cache_gave(server: ServerProcess, browser: Browser) -> None:
    tab = browser()
    open_dashboard(tab, server)
    with EngineProcess(server.address, ROOM) as other:
        screen = Screen(json=True)
        with screen.progress("another engine", 7) as show:
            _fifth_turn(TALKS, other, show, screen)
    assert eventually(lambda: status_of(server)["figures"]["requests"] == 11)
    figures = status_of(server)["figures"]
    assert figures["tokens_loaded"] > 1000 and figures["saved_s"] > 0
    loaded = f"{figures['tokens_loaded']:,}"
    assert eventually(lambda: tile(tab, "Tokens loaded and used").startswith(loaded))
    computed = f"{figures['tokens_computed']:,}"
    assert eventually(lambda: tile(tab, "Tokens computed").startswith(computed))
    assert eventually(lambda: float(tile(tab, "Time saved").split()[0]) > 0)
    assert tile(tab, "Time saved").split()[1] == "s"
    missed = text(tab, "missed")
    for outcome in ("never_stored", "other_salt"):
        assert outcome.replace("_", " ") in missed and dict(OUTCOMES)[outcome] in missed
    assert "disk" in text(tab, "tiers")
    (model,) = [each["model"] for each in status_of(server)["models"] if each["usage_bytes"]]
    map_by_model = tab.find_element(By.ID, "model-map")
    assert f"Memory by model: {model} " in str(map_by_model.get_attribute("aria-label"))
    for owners, parts in (("tenants", "memory-map"), ("models", "model-map")):
        colours = tab.execute_script(COLOURS, owners, parts)
        assert colours[0] == colours[1] and len(set(colours[0])) == len(colours[0]) > 0
    assert "Enter the admin token" in text(tab, "sessions")
    assert "Enter the admin token" in text(tab, "requests")
    assert tab.current_url.endswith("/dashboard")
    take_picture(tab, "dashboard.png")
    assert errors(tab) == []


def test_it_follows_the_server(server: ServerProcess, browser: Browser) -> None:
    tab = browser("--force-dark-mode")
    open_dashboard(tab, server)
    before = tile(tab, "Requests")
    with engine(server, GQA, seed=seed()) as llm:
        serve(llm, [prompt(120), prompt(480)])
    assert eventually(lambda: tile(tab, "Requests") != before)
    enter_token(tab, server)
    with engine(server, GQA, seed=seed()):
        assert eventually(lambda: "scheduler" in text(tab, "sessions"))
        assert eventually(lambda: "never stored" in text(tab, "requests"))
        back = tab.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert back == "rgb(13, 17, 23)"
        take_picture(tab, "dashboard-dark.png")
    rows = [row.split("\t") for row in text(tab, "requests").splitlines()]
    took_s = [float(cells[5].removesuffix(" s")) for cells in rows]
    assert len(took_s) > 1 and took_s == sorted(took_s, reverse=True), "the slowest first"
    take_picture(tab, "dashboard-requests.png", "requests")
    assert errors(tab) == []


def test_a_quota_is_edited_with_the_token_and_the_keyboard(
    server: ServerProcess, browser: Browser
) -> None:
    tab = browser()
    open_dashboard(tab, server)
    assert not may_change(tab)
    enter_token(tab, server)
    assert eventually(lambda: may_change(tab))
    button = tab.find_element(By.CSS_SELECTOR, "#tenants button")
    name = button.get_attribute("aria-label")
    button.send_keys(Keys.ENTER)
    quota = tab.switch_to.active_element
    assert quota.get_attribute("id") == "quota"
    quota.send_keys("nonsense", Keys.ENTER)
    assert eventually(lambda: "expected a number" in text(tab, "change-problem"))
    quota.clear()
    quota.send_keys("0.03125")  # 32 MiB
    take_picture(tab, "dashboard-quota.png", "change")
    quota.send_keys(Keys.ENTER)
    assert eventually(lambda: "32 MiB" in text(tab, "tenants"))
    assert tab.switch_to.active_element.get_attribute("aria-label") == name
    [tenant] = [each for each in status_of(server)["largest_tenants"] if each["own_quota"]]
    assert tenant["quota_bytes"] == 32 << 20 and tenant["tenant"] in str(name)
    take_picture(tab, "dashboard-tenants.png", "tenants")
    assert "token" not in tab.current_url
    assert tab.execute_script("return localStorage.length + sessionStorage.length") == 0
    assert errors(tab) == []


def test_focus_is_where_it_was_after_the_dialog(server: ServerProcess, browser: Browser) -> None:
    """Also if the row was drawn anew meanwhile."""
    tab = browser()
    open_dashboard(tab, server)
    enter_token(tab, server)
    assert eventually(lambda: may_change(tab))
    button = tab.find_element(By.CSS_SELECTOR, "#tenants button")
    name = button.get_attribute("aria-label")
    button.send_keys(Keys.ENTER)
    tab.execute_script("document.querySelector('#tenants td').textContent = 'something else'")
    assert eventually(lambda: "something else" not in text(tab, "tenants"))
    tab.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert eventually(lambda: tab.switch_to.active_element.get_attribute("aria-label") == name)


def test_a_wrong_token_is_told_and_used_once(server: ServerProcess, browser: Browser) -> None:
    tab = browser()
    open_dashboard(tab, server)
    before = auth_failures(server)
    tab.find_element(By.ID, "token").send_keys("wrong", Keys.ENTER)
    assert eventually(lambda: "did not accept this token" in text(tab, "problem"))
    assert text(tab, "token-state") == "not accepted"
    first = text(tab, "uptime")
    assert eventually(lambda: text(tab, "uptime") != first)
    assert "did not accept this token" in text(tab, "problem"), "and it stays told"
    assert not may_change(tab) and auth_failures(server) <= before + 1
    enter_token(tab, server)
    assert eventually(lambda: may_change(tab))
    assert (text(tab, "problem"), text(tab, "token-state")) == ("", "in use")


def test_an_operator_with_another_proof_needs_no_token(
    server: ServerProcess, browser: Browser
) -> None:
    """A certificate, say. Here something in between adds the token."""
    tab = browser()
    token = (server.state_dir / server.name / "admin.token").read_text().strip()
    source = """const real = window.fetch;
    window.fetch = (path, options) => real(path, {
      ...options, headers: { ...options.headers, Authorization: "Bearer TOKEN" } });"""
    tab.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": source.replace("TOKEN", token)}
    )
    open_dashboard(tab, server)
    assert eventually(lambda: may_change(tab))
    assert "Enter the admin token" not in text(tab, "sessions") + text(tab, "requests")
    assert text(tab, "token-state") == ""


def test_a_server_that_wants_its_token_is_asked_once(browser: Browser, tmp_path: Path) -> None:
    """A page without the token that asked again and again would fire the alert for attacks."""
    (tmp_path / "token").write_text("a-token-of-the-operator-with-many-characters")
    (tmp_path / "token").chmod(0o600)
    tab = browser("--window-size=1200,900")
    with ServerProcess(*POOL, "--admin-token", str(tmp_path / "token")) as asked:
        tab.get(f"http://{asked.http}/")
        assert eventually(lambda: text(tab, "state") == "token needed")
        assert "wants its admin token" in text(tab, "problem")
        take_picture(tab, "dashboard-token.png")
        token = (tmp_path / "token").read_text()
        tab.set_script_timeout(10)
        tab.execute_async_script("setTimeout(arguments[0], 5000)")
        tab.find_element(By.ID, "token").send_keys(token, Keys.ENTER)
        assert eventually(lambda: text(tab, "state") == "ready")
        assert text(tab, "problem") == "" and "None" in text(tab, "sessions")
        request = urllib.request.Request(
            f"http://{asked.http}/v1/status", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request) as answer:
            assert sum(json.load(answer)["auth_failures"].values()) <= 1


def test_it_survives_a_restart_of_the_server(browser: Browser, tmp_path: Path) -> None:
    """And shows quotas as they were set, where they are scaled down to a smaller pool."""
    tab = browser("--window-size=1200,900")
    http = "127.0.0.1:0"
    with ServerProcess(*POOL, state_dir=tmp_path) as first:
        open_dashboard(tab, first)
        assert "No block of a prompt has missed yet" in text(tab, "missed")
        take_picture(tab, "dashboard-empty.png")
        enter_token(tab, first)
        with engine(first, GQA, seed=seed()) as llm:
            serve(llm, [prompt(40)])
        assert eventually(lambda: may_change(tab))
        tab.find_element(By.CSS_SELECTOR, "#tenants button").click()
        tab.find_element(By.ID, "quota").send_keys("0.046875", Keys.ENTER)
        assert eventually(lambda: "48 MiB" in text(tab, "tenants"))
        http, name = first.http, first.name
        first.stop()
        assert eventually(lambda: text(tab, "state") == "no answer")
        assert "does not answer" in text(tab, "problem")
        take_picture(tab, "dashboard-away.png")
        first.flags = ("--pool-size", "16MiB", *POOL[2:], "--http-address", http)
        first.start()
        assert (first.http, first.name) == (http, name)
        assert eventually(lambda: "ready" in text(tab, "state"))
        assert eventually(lambda: text(tab, "problem") == "")
        assert eventually(lambda: may_change(tab) and "48 MiB" not in text(tab, "tenants"))
        tab.find_element(By.CSS_SELECTOR, "#tenants button").click()
        assert tab.find_element(By.ID, "quota").get_property("value") == "0.046875"


def test_a_tier_that_is_set_aside_is_told(browser: Browser, tmp_path: Path) -> None:
    tab = browser()
    disk = tmp_path / "disk"
    with ServerProcess(*POOL, "--tier", f"disk://{disk}?size=16MiB") as running:
        open_dashboard(tab, running)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text()
        os.kill(int(children), signal.SIGKILL)  # the process that reads and writes the disk
        assert eventually(lambda: "set aside" in text(tab, "tiers"))
        take_picture(tab, "dashboard-tier.png", "tiers")


def test_a_screen_reader_finds_its_way(server: ServerProcess, browser: Browser) -> None:
    """Every control has a name, every picture words, every table a caption, the language is set."""
    tab = browser()
    open_dashboard(tab, server)
    assert tab.find_element(By.TAG_NAME, "html").get_attribute("lang") == "en"
    for control in tab.find_elements(By.CSS_SELECTOR, "input, button, meter"):
        assert control.accessible_name or not control.is_displayed(), control.get_attribute("id")
    for picture in tab.find_elements(By.CSS_SELECTOR, "[role=img]"):
        assert picture.get_attribute("aria-label"), picture.get_attribute("id")
    for table in tab.find_elements(By.TAG_NAME, "table"):
        assert table.find_element(By.TAG_NAME, "caption").text and table.aria_role == "table"
        assert table.find_elements(By.CSS_SELECTOR, "th[scope=row], td[colspan]")
    levels = [int(each.tag_name[1]) for each in tab.find_elements(By.CSS_SELECTOR, "h1, h2")]
    assert levels[0] == 1 and set(levels[1:]) == {2}


def test_a_screen_reader_is_told_only_what_is_new(server: ServerProcess, browser: Browser) -> None:
    """The page is drawn anew every two seconds; its statuses and alerts are not."""
    tab = browser()
    open_dashboard(tab, server)
    tab.execute_script("""window.told = 0;
    for (const each of document.querySelectorAll("[role=status], [role=alert]"))
      new MutationObserver(() => window.told++)
        .observe(each, {childList: true, characterData: true, attributes: true, subtree: true});""")
    first = text(tab, "uptime")
    assert eventually(lambda: text(tab, "uptime") != first)
    assert tab.execute_script("return window.told") == 0


def test_the_browser_may_do_nothing_else(server: ServerProcess, browser: Browser) -> None:
    tab = browser()
    open_dashboard(tab, server)
    script = """const done = arguments[0]; const s = document.createElement("script");
    s.textContent = "window.ran = true"; document.body.append(s);
    const image = new Image(); image.onload = () => done("loaded");
    image.onerror = () => done(window.ran ? "ran" : "refused");
    image.src = "http://127.0.0.1:9/x.png";"""
    assert tab.execute_async_script(script) == "refused"
    script = "return performance.getEntriesByType('resource').map(each => each.name)"
    loaded = [str(each) for each in tab.execute_script(script)]
    own = f"http://{server.http}/"
    assert loaded and all(each.startswith(own) for each in loaded if "127.0.0.1:9/" not in each)
    with urllib.request.urlopen(f"http://{server.http}/dashboard") as answer:
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_the_guide_shows_every_picture() -> None:
    """And they stay small."""
    guide = (PICTURES.parent / "guides" / "monitoring.md").read_text()
    found = sorted(PICTURES.iterdir())
    assert len(found) > 8 and sum(each.stat().st_size for each in found) < 1.5 * (1 << 20)
    here = Path(__file__).read_text()
    for each in found:
        assert f"](../pictures/{each.name})" in guide, each.name
        assert f'"{each.name}"' in here, "made by no test"
