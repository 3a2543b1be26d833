"""The viewer's page in a real browser: recorded, live and killed runs, hostile text, keyboard, two widths, pictures."""

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
"""A folder for screenshots, or None; set it to docs/images to renew the pictures of the docs."""


_CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "understudy.cli.main", *sys.argv[1:]])
"""
"""Runs the command with the default SIGINT handler: a shell's background job ignores SIGINT, and children
inherit that."""


def save_screenshot(page: Any, name: str) -> None:
    if PICTURES:
        page.wait_for_timeout(500)
        page.screenshot(path=f"{PICTURES}/{name}.png")


def wait_until(page: Any, condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Polls the condition in Python, because the page's content security policy forbids evaluating one in the page."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        page.wait_for_timeout(100)


def fits_window(page: Any) -> bool:
    """Whether nothing on the page is wider than the window."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def test_hostile_text_is_shown_as_text_and_the_largest_disagreement_opens(
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
def test_each_view_fits_the_window_at_two_widths_in_light_and_dark(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any], width: int, scheme: str
) -> None:
    address = view(os.environ.get("UNDERSTUDY_PICTURED_RUN") or str(recorded_run(tmp_path / "run").path))
    page = open_page(address, width, scheme)
    page.wait_for_selector(".chart canvas")
    page.wait_for_timeout(500)
    assert fits_window(page)
    save_screenshot(page, f"view-overview-{width}-{scheme}")
    page.goto(f"{address}#/rollouts?sort=kl")
    page.wait_for_selector("table.rows td.text")
    assert fits_window(page)
    save_screenshot(page, f"view-rollouts-{width}-{scheme}")
    page.goto(f"{address}#/disagreements")
    page.click(".worst a >> nth=0")
    page.wait_for_selector(".panel .candidates tr")
    assert fits_window(page) and "The teacher wanted" in page.inner_text(".panel")
    save_screenshot(page, f"view-tokens-{width}-{scheme}")
    page.goto(f"{address}#/timeline")
    page.wait_for_selector("canvas")
    assert fits_window(page)
    save_screenshot(page, f"view-timeline-{width}-{scheme}")


@pytest.mark.browser
def test_views_search_rows_and_tokens_can_be_reached_by_keyboard(
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
    wait_until(page, lambda: "place 0" in page.inner_text(".panel"))
    page.keyboard.press("4")
    page.wait_for_selector("canvas")
    names = page.evaluate(
        "[...document.querySelectorAll('button, a, select, input')].filter((e) => !e.innerText.trim() && !e.getAttribute('aria-label') && !e.closest('label')).length"
    )
    assert names == 0


@pytest.mark.browser
def test_two_runs_share_charts_and_two_rows_are_shown_side_by_side(
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
def test_answers_of_two_checkpoints_to_one_held_out_prompt_are_shown_side_by_side(
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
def test_a_row_links_to_its_spans_on_the_timeline(
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
def test_the_accessibility_tree_has_roles_names_and_chart_values(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    """Reads chromium's own accessibility tree."""
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
def test_train_view_serves_a_live_page_and_ends_it_with_the_run(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    """`train --view` on the quickstart's recipe: the page follows the run and shows what it waits for; Ctrl-C
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
        wait_until(
            page, lambda: "running" in page.inner_text("#runs") and "step 3" in page.inner_text("#runs"), 200
        )
        page.keyboard.press("4")
        page.wait_for_selector(".waits .waits .node", timeout=60000)
        assert "train waits for rows of step" in page.inner_text(".waits >> nth=0")
        save_screenshot(page, "view-live-1440-light")
        page.close()  # an open page would report that its server is gone
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
def test_a_run_can_be_viewed_while_it_trains_and_after_it_was_killed(
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
        wait_until(page, lambda: int(page.inner_text(".run").split("step ")[1].split("/")[0]) > before + 2)
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
def test_rows_in_the_journal_of_a_killed_run_are_shown(
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


def test_the_report_file_has_the_views_of_the_page_without_a_server(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    run = recorded_run(tmp_path / "run")
    page = open_page(write_report(run, "understudy export RUN out").as_uri())
    page.wait_for_selector(".chart canvas")
    assert "understudy export RUN out" in page.inner_text("main") and fits_window(page)
    page.keyboard.press("2")
    page.fill("input[type=search]", "needle8")
    page.keyboard.press("Enter")
    wait_until(page, lambda: "needle8" in page.url)
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
    assert "owned" not in page.title() and fits_window(page)


def _sizes(page: Any, place: str) -> list[list[int]]:
    return page.evaluate(
        f"[...document.querySelectorAll('{place} img')].map((i) => [i.naturalWidth, i.naturalHeight])"
    )


@pytest.mark.browser
def test_rows_show_their_pictures_in_the_page_and_in_the_report(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    """From the server, and as data URLs in the report."""
    run, _ = pictured_run(tmp_path / "run", HOSTILE, broken=False)
    address = view(str(run.path))
    for home in (address, write_report(run).as_uri()):
        page = open_page(f"{home}#/rollouts?kind=kept&sort=kl")
        page.wait_for_selector("table.rows .pictures img")
        page.click("tr:has(.pictures img:nth-child(2)) td.text a >> nth=0")
        page.wait_for_selector("article .pictures img")
        wait_until(page, lambda page=page: _sizes(page, "article .pictures") == [[48, 32], [48, 32]])
        names = page.evaluate("[...document.querySelectorAll('article img')].map((one) => one.alt)")
        assert names[0].startswith("picture 1 of 2, ") and fits_window(page)
        sources = page.evaluate("[...document.querySelectorAll('article img')].map((one) => one.src)")
        assert all(one.startswith("data:image/png" if home != address else address) for one in sources)
        save_screenshot(page, f"view-pictures-{'report' if home != address else 'served'}")
