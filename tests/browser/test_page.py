"""The page in a real browser: a recorded run, a live run, a killed run, hostile text, keyboard, two widths."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pictured_run import pictured_run
from recorded_run import HOSTILE, QUICKSTART, journalled, recorded_run

from understudy.viewer.frozen import write_report

PICTURES = os.environ.get("UNDERSTUDY_PICTURES")
"""A folder for screenshots; docs/images when the pictures of the docs are made again."""


_CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "understudy.cli.main", *sys.argv[1:]])
"""
"""Under a shell's background job SIGINT is ignored, and a child would inherit that."""


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
def test_two_checkpoints_answer_the_same_held_out_prompt_side_by_side(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    address = view(str(recorded_run(tmp_path / "run").path))
    page = open_page(f"{address}#/rollouts?kind=held-out&sort=step")
    page.wait_for_selector("table.rows td.text")
    page.click("table.rows td.text a >> nth=0")
    page.wait_for_selector("a:has-text('beside this')")
    page.click("a:has-text('beside this') >> nth=0")
    page.wait_for_selector(".pair article >> nth=1")
    steps = [page.inner_text(f".pair article >> nth={n} >> .facts") for n in (0, 1)]
    assert {text.split()[1] for text in steps} == {"0", "12"}


@pytest.mark.browser
def test_a_row_is_followed_to_its_place_on_the_timeline(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    address = view(str(recorded_run(tmp_path / "run").path))
    page = open_page(f"{address}#/rollouts?kind=kept&sort=kl")
    page.click("table.rows td.text a >> nth=0")
    page.click("text=on the timeline")
    page.wait_for_selector("canvas")
    shown = page.inner_text(".view.timeline")
    assert "1 span from" in shown or "2 spans from" in shown
    page.click("summary:has-text('spans from')")
    assert "p1_0_0" in page.inner_text("table")


@pytest.mark.browser
def test_a_screen_reader_finds_names_headings_and_values(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    """By chromium's own accessibility tree."""
    address = view(str(recorded_run(tmp_path / "run").path))
    page = open_page(address)
    page.wait_for_selector(".chart canvas")
    for path in ("overview", "rollouts?kind=kept&sort=kl", "disagreements", "timeline"):
        page.goto(f"{address}#/{path}")
        page.wait_for_selector("main h2")
        page.wait_for_timeout(200)
        session = page.context.new_cdp_session(page)
        nodes = session.send("Accessibility.getFullAXTree")["nodes"]
        shown = [node for node in nodes if not node.get("ignored")]
        roles = {node["role"]["value"] for node in shown if "role" in node}
        assert {"main", "navigation", "heading", "status"} <= roles
        nameless = [
            node["role"]["value"]
            for node in shown
            if node.get("role", {}).get("value") in ("button", "link", "textbox", "searchbox", "combobox", "checkbox", "slider", "spinbutton", "image", "img")
            and not node.get("name", {}).get("value")
        ]  # fmt: skip
        assert nameless == []
        if path == "overview":
            names = [
                node["name"]["value"]
                for node in shown
                if node.get("role", {}).get("value") in ("image", "img")
            ]
            assert any("actor/loss 0.1667 at step 12" in name for name in names)


@pytest.mark.browser
def test_train_view_serves_a_page_while_it_trains_and_ends_it(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    """`train --view` on the quickstart's recipe: the page follows the run, shows what it waits for, and Ctrl-C
    still stops the run."""
    folder = tmp_path / "run"
    arguments = [
        "train",
        str(QUICKSTART / "recipe.toml"),
        "--view",
        "--quiet",
        "trainer.steps=400",
        "trainer.eval_every=0",
    ]
    trainer = subprocess.Popen(
        [sys.executable, "-c", _CTRL_C, *arguments, f"run.dir={folder}"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert trainer.stderr is not None
        lines = iter(trainer.stderr.readline, "")
        address = next(
            found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+/\S+/", line))
        )
        page = open_page(address)
        until(
            page, lambda: "running" in page.inner_text("#runs") and "step 3" in page.inner_text("#runs"), 200
        )
        page.keyboard.press("4")
        page.wait_for_selector(".waits .waits .node", timeout=60000)
        assert "train waits for rows of step" in page.inner_text(".waits >> nth=0")
        picture(page, "view-live-1440-light")
        page.close()  # it would report that its server is gone
        trainer.send_signal(signal.SIGINT)
        threading.Thread(target=trainer.stderr.read, daemon=True).start()
        assert trainer.wait(timeout=60) is not None
        deadline = time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(address, timeout=2)
            except OSError:
                break
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert json.loads((folder / "state.json").read_text())["status"] == "stopped"
    finally:
        if trainer.poll() is None:
            trainer.kill()
            trainer.wait()


@pytest.mark.browser
def test_a_run_is_watched_while_it_trains_and_after_it_was_killed(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    folder = tmp_path / "run"
    arguments = [
        "quickstart",
        "--quiet",
        "trainer.steps=400",
        "trainer.eval_every=0",
        "trainer.batch_size=16",
        f"run.dir={folder}",
    ]
    trainer = subprocess.Popen(
        [sys.executable, "-m", "understudy.cli.main", *arguments],
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


def _sizes(page: Any, place: str) -> list[list[int]]:
    return page.evaluate(
        f"[...document.querySelectorAll('{place} img')].map((i) => [i.naturalWidth, i.naturalHeight])"
    )


@pytest.mark.browser
def test_rows_show_their_pictures(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    """From the server, and in the report without one."""
    run, _ = pictured_run(tmp_path / "run", HOSTILE, broken=False)
    address = view(str(run.path))
    for home in (address, write_report(run).as_uri()):
        page = open_page(f"{home}#/rollouts?kind=kept&sort=kl")
        page.wait_for_selector("table.rows .pictures img")
        page.click("tr:has(.pictures img:nth-child(2)) td.text a >> nth=0")
        page.wait_for_selector("article .pictures img")
        until(page, lambda page=page: _sizes(page, "article .pictures") == [[48, 32], [48, 32]])
        names = page.evaluate("[...document.querySelectorAll('article img')].map((one) => one.alt)")
        assert names[0].startswith("picture 1 of 2, ") and fits(page)
        sources = page.evaluate("[...document.querySelectorAll('article img')].map((one) => one.src)")
        assert all(one.startswith("data:image/png" if home != address else address) for one in sources)
        picture(page, f"view-pictures-{'report' if home != address else 'served'}")
