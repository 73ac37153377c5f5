"""The dashboard in a real Chromium, of a real server with a reference engine.

KVKEEP_TEST_PICTURES=1 python -m pytest tests/e2e/test_dashboard.py     also makes the pictures
                                                                        of the documentation
"""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import GQA, POOL, engine, eventually, prompt, seed, serve

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that served a prompt of 202 tokens twice, from two engines, with a disk below it."""
    disk = tmp_path_factory.mktemp("tier") / "disk"
    with ServerProcess(*POOL, "--tier", f"disk://{disk}?size=64MiB") as running:
        number, tokens = seed(), prompt(202)
        for _ in range(2):
            with engine(running, GQA, seed=number) as llm:
                serve(llm, [tokens])
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


def take_picture(tab: webdriver.Chrome, name: str) -> None:
    if os.environ.get("KVKEEP_TEST_PICTURES"):
        PICTURES.mkdir(exist_ok=True)
        tab.save_screenshot(str(PICTURES / name))


def test_it_shows_what_the_cache_gave(server: ServerProcess, browser: Browser) -> None:
    tab = browser()
    open_dashboard(tab, server)
    figures = status_of(server)["figures"]
    assert figures["tokens_loaded"] > 0
    assert tile(tab, "Tokens loaded and used").startswith(f"{figures['tokens_loaded']:,}")
    assert tile(tab, "Tokens computed").startswith(f"{figures['tokens_computed']:,}")
    assert tile(tab, "Time saved").split()[1] == "s"
    assert "default" in text(tab, "tenants") and "disk" in text(tab, "tiers")
    (model,) = [each["model"] for each in status_of(server)["models"] if each["usage_bytes"]]
    map_by_model = tab.find_element(By.ID, "model-map")
    assert f"Memory by model: {model} " in str(map_by_model.get_attribute("aria-label"))
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
        serve(llm, [prompt(120)])
    assert eventually(lambda: tile(tab, "Requests") != before)
    enter_token(tab, server)
    with engine(server, GQA, seed=seed()):
        assert eventually(lambda: "scheduler" in text(tab, "sessions"))
    assert eventually(lambda: "never stored" in text(tab, "requests"))
    assert errors(tab) == []


def test_a_quota_is_edited_with_the_token_and_the_keyboard(
    server: ServerProcess, browser: Browser
) -> None:
    tab = browser()
    open_dashboard(tab, server)
    assert not may_change(tab)
    enter_token(tab, server)
    assert eventually(lambda: may_change(tab))
    tab.find_element(By.CSS_SELECTOR, "#tenants button").send_keys(Keys.ENTER)
    quota = tab.switch_to.active_element
    assert quota.get_attribute("id") == "quota"
    quota.send_keys("nonsense", Keys.ENTER)
    assert eventually(lambda: "expected a number" in text(tab, "change-problem"))
    quota.clear()
    quota.send_keys("0.03125", Keys.ENTER)  # 32 MiB
    assert eventually(lambda: "32 MiB" in text(tab, "tenants"))
    (tenant,) = status_of(server)["largest_tenants"]
    assert (tenant["quota_bytes"], tenant["own_quota"]) == (32 << 20, True)
    assert "token" not in tab.current_url
    assert tab.execute_script("return localStorage.length + sessionStorage.length") == 0
    assert errors(tab) == []


def test_a_wrong_token_is_explained(server: ServerProcess, browser: Browser) -> None:
    tab = browser()
    open_dashboard(tab, server)
    tab.find_element(By.ID, "token").send_keys("wrong", Keys.ENTER)
    assert eventually(lambda: may_change(tab))
    tab.find_element(By.CSS_SELECTOR, "#tenants button").click()
    tab.find_element(By.ID, "save").click()
    assert eventually(lambda: "token" in text(tab, "change-problem"))


def test_it_survives_a_restart_of_the_server(browser: Browser, tmp_path: Path) -> None:
    tab = browser()
    http = "127.0.0.1:0"
    with ServerProcess(*POOL, state_dir=tmp_path) as first:
        open_dashboard(tab, first)
        http, name = first.http, first.name
        first.stop()
        assert eventually(lambda: text(tab, "state") == "no answer")
        assert "does not answer" in text(tab, "problem")
        with ServerProcess(*POOL, "--http-address", http, name=name, state_dir=tmp_path):
            assert eventually(lambda: "ready" in text(tab, "state"))
            assert eventually(lambda: text(tab, "problem") == "")


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
        assert table.find_element(By.TAG_NAME, "caption").text
    levels = [int(each.tag_name[1]) for each in tab.find_elements(By.CSS_SELECTOR, "h1, h2")]
    assert levels[0] == 1 and set(levels[1:]) == {2}


def test_the_browser_may_do_nothing_else(server: ServerProcess, browser: Browser) -> None:
    tab = browser()
    open_dashboard(tab, server)
    script = """const done = arguments[0]; const s = document.createElement("script");
    s.textContent = "window.ran = true"; document.body.append(s);
    const image = new Image(); image.onload = () => done("loaded");
    image.onerror = () => done(window.ran ? "ran" : "refused");
    image.src = "http://127.0.0.1:9/x.png";"""
    assert tab.execute_async_script(script) == "refused"
    with urllib.request.urlopen(f"http://{server.http}/dashboard") as answer:
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
