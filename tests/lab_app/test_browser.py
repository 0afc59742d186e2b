"""The console script, a copy of the repository, a real browser: what AppTest cannot see.

`streamlit run lab_app` puts lab_app/ on the path but not the folder above it, and the block wall is
drawn by a component; both only show here.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import lab_app

pytestmark = pytest.mark.browser

ROOT = Path(lab_app.__file__).resolve().parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)
SCRIPT = Path(sys.executable).with_name("streamlit")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a lab started from another folder's copy, by the console script."""
    if not SCRIPT.exists():
        pytest.skip(f"no streamlit console script beside {sys.executable}")
    folder = tmp_path_factory.mktemp("clone")
    for name in ("engine", "simulator", "lab_app"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.Popen(
        [str(SCRIPT), "run", "lab_app", "--server.port", str(port), "--server.headless", "true",
         "--server.address", "127.0.0.1", "--browser.gatherUsageStats", "false"],
        cwd=folder, env={**settings, "TANDEM_RUNS": str(folder / "runs")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/_stcore/health", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def wait_for(url, process):
    for _ in range(300):
        if process.poll() is not None:
            pytest.fail(f"streamlit ended: {process.stdout.read()[-2000:]}")
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail("streamlit did not start within 60 s")


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.set_default_timeout(60_000)
    yield page
    page.close()


def wall(page):
    """What the wall shows: each block's classes, owners and fill."""
    return page.locator(".cell").evaluate_all(
        "cells => cells.map(c => [c.dataset.block, c.className, c.dataset.r || '', c.innerHTML])")


def title(page):
    return page.locator(".card h3")


def test_stepping_the_replay_changes_the_block_wall_and_a_link_opens_the_same_step(server, page,
                                                                                   browser):
    page.goto(f"{server}/replay")
    title(page).filter(has_text="Step 0:").wait_for()
    before = wall(page)
    assert len(before) == 24
    page.get_by_role("button", name="preemption").click()
    title(page).filter(has_text="Step 24:").wait_for()
    after = wall(page)
    assert len(after) == 24 and after != before
    assert page.locator("[data-testid=stException]").count() == 0

    page.locator(".why .chip").first.click()  # the preempted request
    page.locator(".lens .row").first.wait_for()
    page.wait_for_url("**request=r*")
    link, seen = page.url, wall(page)
    other = browser.new_page()
    other.goto(link)
    other.locator(".lens .row").first.wait_for()
    assert title(other).inner_text() == title(page).inner_text()
    assert wall(other) == seen
    other.close()


def test_keys_step_and_a_click_on_the_strip_goes_there(server, page):
    page.goto(f"{server}/replay?step=10")
    title(page).filter(has_text="Step 10:").wait_for()
    page.get_by_role("button", name="preemption").wait_for()
    page.keyboard.press("ArrowRight")
    title(page).filter(has_text="Step 11:").wait_for()
    plot = page.locator(".plot").first
    plot.click(position={"x": plot.bounding_box()["width"] - 2, "y": 10})
    title(page).filter(has_text=re.compile(r"Step 10[4-7]:")).wait_for()


def test_playing_goes_on_by_itself_until_it_is_paused(server, page):
    page.goto(f"{server}/replay?step=3")
    title(page).filter(has_text="Step 3:").wait_for()
    page.locator(".st-key-play button").first.click()
    title(page).filter(has_text="Step 5:").wait_for()
    page.locator(".st-key-play button").first.click()
    page.wait_for_timeout(1500)
    stopped = title(page).inner_text()
    page.wait_for_timeout(2000)
    assert title(page).inner_text() == stopped


def test_every_page_opens_without_an_exception(server, page):
    for path, text in (("", "see an inference engine think"), ("simulate", "Workload"),
                       ("run", "Prompts, one a line")):
        page.goto(f"{server}/{path}")
        page.get_by_text(text).first.wait_for()
        assert page.locator("[data-testid=stException]").count() == 0
