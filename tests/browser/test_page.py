"""The page in a real browser: a recorded run, a live run, a killed run, hostile text, keyboard, two widths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_run import HOSTILE, journalled, recorded_run

from understudy.viewer.frozen import write_report

PICTURES = os.environ.get("UNDERSTUDY_PICTURES")
"""A folder for screenshots; docs/images when the pictures of the docs are made again."""


def picture(page: Any, name: str) -> None:
    if PICTURES:
        page.wait_for_timeout(500)
        page.screenshot(path=f"{PICTURES}/{name}.png")


def until(page: Any, condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Asked from here: the page's policy forbids the evaluation of a condition in it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        page.wait_for_timeout(100)


def fits(page: Any) -> bool:
    """Nothing is wider than the window."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def test_hostile_text_shows_as_text_and_a_planted_disagreement_is_found(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    address = view(str(recorded_run(tmp_path / "run").path))
    page = open_page(address)
    page.wait_for_selector(".chart canvas")
    assert "<script>document.title" in page.inner_text(".note") and "␛[31m" in page.inner_text(".note")
    assert "⟨U+202E⟩evil" in page.inner_text(".note")
    page.goto(f"{address}#/rollouts?q=needle8")
    page.wait_for_selector("table.rows td.text")
    page.click("table.rows td.text a")
    page.wait_for_selector(".conversation pre")
    assert "<img src=x onerror=alert(1)>" in page.inner_text(".conversation")
    assert page.evaluate("document.querySelectorAll('main script, main img').length") == 0
    page.click("text=Disagreements")
    page.click(".worst a >> nth=0")
    page.wait_for_selector(".panel .candidates tr")
    panel = page.inner_text(".panel")
    assert "The teacher wanted" in panel and "0.600" in panel and "all others (tail)" in panel
    assert "7.5" in panel and "weight version" in panel
    assert "Teacher add read another prompt" in page.inner_text(".own-prompt summary")
    page.click(".own-prompt summary")
    assert "<script>document.title" in page.inner_text(".own-prompt pre")
    assert "owned" not in page.title() and HOSTILE not in page.title()


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_fits_at_every_width(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any], width: int, scheme: str
) -> None:
    address = view(os.environ.get("UNDERSTUDY_PICTURED_RUN") or str(recorded_run(tmp_path / "run").path))
    page = open_page(address, width, scheme)
    page.wait_for_selector(".chart canvas")
    page.wait_for_timeout(500)
    assert fits(page)
    picture(page, f"view-overview-{width}-{scheme}")
    page.goto(f"{address}#/rollouts?sort=kl")
    page.wait_for_selector("table.rows td.text")
    assert fits(page)
    picture(page, f"view-rollouts-{width}-{scheme}")
    page.goto(f"{address}#/disagreements")
    page.click(".worst a >> nth=0")
    page.wait_for_selector(".panel .candidates tr")
    assert fits(page) and "The teacher wanted" in page.inner_text(".panel")
    picture(page, f"view-tokens-{width}-{scheme}")
    page.goto(f"{address}#/timeline")
    page.wait_for_selector("canvas")
    assert fits(page)
    picture(page, f"view-timeline-{width}-{scheme}")


@pytest.mark.browser
def test_the_keyboard_reaches_everything(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    address = view(str(recorded_run(tmp_path / "run").path))
    page = open_page(address)
    page.wait_for_selector(".chart canvas")
    page.keyboard.press("2")
    page.wait_for_selector("table.rows td.text")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.goto(f"{address}#/rollouts?kind=kept&sort=kl")
    page.wait_for_selector("table.rows td.text")
    page.focus("table.rows td.text a >> nth=0")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.wait_for_selector(".token")
    page.focus(".token[tabindex='0']")
    page.keyboard.press("n")
    page.wait_for_selector(".panel .candidates tr.written, .panel .candidates tr")
    focused = page.evaluate("document.activeElement.className")
    assert "above9" in focused and "The teacher wanted" in page.inner_text(".panel")
    page.keyboard.press("Home")
    until(page, lambda: "place 0" in page.inner_text(".panel"))
    page.keyboard.press("4")
    page.wait_for_selector("canvas")
    names = page.evaluate(
        "[...document.querySelectorAll('button, a, select, input')].filter((e) => !e.innerText.trim() && !e.getAttribute('aria-label') && !e.closest('label')).length"
    )
    assert names == 0


@pytest.mark.browser
def test_two_runs_are_laid_over_each_other_and_rows_stand_side_by_side(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    runs = [recorded_run(tmp_path / name, steps) for name, steps in (("one", 12), ("two", 16))]
    address = view(*(str(run.path) for run in runs))
    page = open_page(address)
    page.wait_for_selector("text=Recipe keys that differ")
    assert "trainer.steps" in page.inner_text("main") and "two actor/loss" in page.inner_text(
        ".chart >> nth=0"
    )
    page.goto(f"{address}#/rollouts?run=0&kind=kept&sort=kl")
    page.click("table.rows td.text a >> nth=0")
    page.wait_for_selector("text=beside this")
    page.click("a:has-text('beside this') >> nth=-1")
    page.wait_for_selector(".pair article >> nth=1")
    assert page.locator(".pair article").count() == 2


@pytest.mark.browser
def test_a_run_is_watched_while_it_trains_and_after_it_was_killed(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    folder = tmp_path / "run"
    words = [
        "quickstart",
        "--quiet",
        "trainer.steps=400",
        "trainer.eval_every=0",
        "trainer.batch_size=16",
        f"run.dir={folder}",
    ]
    trainer = subprocess.Popen(
        [sys.executable, "-m", "understudy.cli.main", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 150
        while (
            not (folder / "metrics.jsonl").exists()
            or len((folder / "metrics.jsonl").read_text().splitlines()) < 3
        ):
            assert time.monotonic() < deadline and trainer.poll() is None
            time.sleep(0.2)
        address = view(str(folder))
        page = open_page(address)
        page.wait_for_selector(".chart canvas")
        assert page.inner_text(".status") == "running"
        before = int(page.inner_text(".run").split("step ")[1].split("/")[0])
        until(page, lambda: int(page.inner_text(".run").split("step ")[1].split("/")[0]) > before + 2)
        page.goto(f"{address}#/rollouts")
        page.wait_for_selector("table.rows td.text")
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        page.goto(f"{address}#/overview")
        page.wait_for_selector(".status.killed", timeout=40000)
        page.reload()
        page.wait_for_selector("text=understudy resume")
        page.goto(f"{address}#/rollouts")
        page.wait_for_selector("table.rows td.text")
    finally:
        if trainer.poll() is None:
            trainer.kill()
            trainer.wait()


@pytest.mark.browser
def test_a_killed_runs_journal_is_read(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    run = recorded_run(tmp_path / "run")
    journalled(run)
    page = open_page(view(str(run.path)))
    page.wait_for_selector(".status.killed")
    page.goto(page.url.split("#")[0] + "#/rollouts?kind=journal")
    page.wait_for_selector("table.rows td.text")
    page.click("table.rows td.text a >> nth=0")
    page.wait_for_selector(".token.written")
    assert json.loads(run.state.read_text())["status"] == "running"


def test_the_report_is_the_same_page_without_a_server(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    run = recorded_run(tmp_path / "run")
    page = open_page(write_report(run, "understudy export RUN out").as_uri())
    page.wait_for_selector(".chart canvas")
    assert "understudy export RUN out" in page.inner_text("main") and fits(page)
    page.keyboard.press("2")
    page.fill("input[type=search]", "needle8")
    page.keyboard.press("Enter")
    until(page, lambda: "needle8" in page.url)
    page.wait_for_selector(".pages")
    page.keyboard.press("Escape")
    page.click("text=Disagreements")
    page.click(".worst a >> nth=0")
    page.wait_for_selector(".panel .candidates tr")
    panel = page.inner_text(".panel")
    assert "The teacher wanted" in panel and "0.600" in panel and "all others (tail)" in panel
    page.click("text=Timeline")
    page.wait_for_selector("canvas")
    page.click("text=zoom in")
    assert "owned" not in page.title() and fits(page)
