"""The page in a real browser: Debian's chromium, driven by selenium; skipped where there is none."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.journal import Journal
from surefoot.records import Action as Actions
from surefoot.records import Decision, Note
from surefoot.watch.frozen_page import freeze

from .conftest import Training, append_rows, wait_for

selenium = pytest.importorskip("selenium", reason="selenium is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromedriver on this machine")
MakeRun = Callable[..., Path]
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-dev-shm-usage", "--window-size=1280,900",
)  # fmt: skip
OWNED = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


class Browser:
    """A page in chromium, and what it logged and asked for."""

    def __init__(self) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service

        options = Options()
        for flag in FLAGS:
            options.add_argument(flag)
        options.binary_location = CHROMIUM or ""
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))

    def open(self, url: str) -> None:
        self.driver.get("about:blank")
        self.driver.get_log("browser")  # of the page before, whose server may have gone
        self.driver.get_log("performance")
        self.driver.get(url)
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.run("return document.body.dataset.ready") == "1")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, element: str) -> str:
        return self.run("return document.getElementById(arguments[0]).textContent", element)

    def check_clean(self) -> None:
        """No error in the console, and no request that leaves this machine."""
        logged = [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
        assert logged == []
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        assert [
            url for url in sent if not url.startswith(("http://127.0.0.1:", "data:", "file:", "about:", "chrome"))
        ] == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.driver.quit()


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Starts surefoot watch --web and returns its address."""
    processes: list[subprocess.Popen[str]] = []

    def start(path: Path) -> str:
        command = [sys.executable, "-m", "surefoot", "watch", str(path), "--web"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.stdout.readline().strip()

    yield start
    for process in processes:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_spike_of_one_step_in_a_million_is_found_by_zooming(
    browser: Browser, serve: Callable[[Path], str], tmp_path: Path
) -> None:
    from benchmarks.watch_bench import make_run

    made = make_run(tmp_path / "run", steps=1_000_000, layers=4)
    browser.open(serve(made.path))
    spike = """
        const { attempts, firsts, series } = Page.curves, top = series.loss.max || series.loss.mean;
        const at = top.indexOf(Math.max(...top));
        return [firsts[at], attempts[at], top[at], Page.curves.attempts.length];"""
    first, last, top, points = browser.run(spike)
    assert points <= 2000
    assert first <= made.spike <= last
    while last > first:
        assert top == 41.25
        browser.run("Page.zoom(arguments[0], arguments[1])", first - 1, last + 1)
        browser.wait_until_ready()
        first, last, top, _ = browser.run(spike)
    assert (first, top) == (made.spike, 41.25)
    bad = "const bad = Page.curves.series.loss.nonfinite; return bad ? bad.reduce((a, b) => a + b) : 0"
    browser.run("Page.showAll()")
    browser.wait_until_ready()
    assert browser.run(bad) == 1
    browser.check_clean()


def test_a_hostile_run_is_shown_as_text(
    browser: Browser, serve: Callable[[Path], str], open_run: Callable[..., Journal], tmp_path: Path
) -> None:
    name = "run <img src=x onerror=alert(1)>"
    journal = open_run(name, info={"config": {"model": OWNED}, "environment": {"host": OWNED}})
    journal.layout([OWNED, "b"], [1, 1])
    append_rows(journal, range(100), layers=2)
    journal.event(Decision(step=50, attempt=50, action=Actions.REWIND, reason=OWNED, remedy=OWNED))
    journal.event(Note(step=60, attempt=60, name="failed", detail=OWNED))
    journal.close()
    freeze(tmp_path / name, tmp_path / "page.html")
    for url in (serve(tmp_path / name), f"file://{tmp_path}/page.html"):
        browser.open(url)
        assert browser.text("name") == name
        assert OWNED in browser.text("incidents")
        assert OWNED in browser.text("events")
        assert OWNED in browser.text("facts")
        assert browser.run("return document.title") != "owned"
        assert browser.run("return document.querySelectorAll('img').length") == 0
        assert browser.run("return document.querySelectorAll('canvas').length") > 4
        browser.check_clean()


def test_charts_compare_runs_switch_scale_and_zoom_by_hand(
    browser: Browser, serve: Callable[[Path], str], made_run: MakeRun, tmp_path: Path
) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    for name in ("a", "b"):
        made_run(name, loss={100: 30.0, 150: math.nan})
    browser.open(serve(tmp_path))
    assert browser.run("return Page.log")  # a spike would flatten the rest
    browser.driver.find_element(By.ID, "log").click()
    assert not browser.run("return Page.log")
    browser.run("document.querySelector('#others input:not(:checked)').click()")
    browser.run("document.querySelectorAll('#others input')[1].click()")
    wait_for(lambda: browser.run("return document.body.dataset.compared") == "1")
    series = browser.run("return Page.plots[0].series.length")
    over = browser.driver.find_element(By.CSS_SELECTOR, "#chart-loss .u-over")
    width = over.size["width"]
    drag = ActionChains(browser.driver).move_to_element_with_offset(over, -width // 4, 0).click_and_hold()
    drag.move_by_offset(width // 4, 0).release().perform()
    wait_for(lambda: browser.run("return document.body.dataset.ready") == "1" and browser.text("range"))
    first, last = browser.run("return Page.range()")
    assert 50 < first < 100 < 130 < last < 200
    assert browser.run("return Page.plots[0].series.length") == series
    over = browser.driver.find_element(By.CSS_SELECTOR, "#chart-loss .u-over")  # drawn again
    ActionChains(browser.driver).move_to_element_with_offset(over, 5, 0).perform()
    assert "attempt" in browser.run("return document.querySelector('#chart-loss small').textContent")
    browser.driver.find_element(By.ID, "out").click()
    wait_for(lambda: browser.text("range") == "")
    browser.check_clean()


def test_a_real_run_is_followed_through_fault_rewind_kill_and_resume(
    browser: Browser, serve: Callable[[Path], str], training: Training
) -> None:
    training.start()
    wait_for((training.run_dir / "signals" / "scalars-000000.bin").exists)
    browser.open(serve(training.run_dir))
    wait_for(lambda: "rewound to step" in browser.text("events"))
    assert "the loss is nan" in browser.text("events")
    wait_for(lambda: browser.run("return Page.undone.length"))
    wait_for(lambda: browser.run("return Page.curves.last > Page.incidents[1].attempt"))
    training.kill()
    wait_for(lambda: browser.text("health") == "killed")
    before = browser.run("return Page.curves.last")
    training.start("resume")
    wait_for(lambda: browser.run("return document.getElementById('verdict').dataset.state") == "running")
    wait_for(lambda: browser.run("return Page.curves.last") > before + 20)
    attempts = browser.run("return Array.from(Page.curves.attempts)")
    assert attempts == sorted(set(attempts))
    assert len(attempts) >= before
    browser.check_clean()
