"""The token microscope in a real browser: the shipped demo, and a row that is longer than one answer of the server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_run import long_columns, recorded_run, summary
from test_page import fits, until

from understudy.dataplane.kept_rows import FOLDER_NAME, RowKeeper


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1440])
def test_the_demo_opens_and_a_token_pointed_at_tells_its_story(
    view: Callable[..., str], open_page: Callable[..., Any], width: int
) -> None:
    """By the pointer and by the keyboard, without scrolling the panel: the loss, the weights, the replica."""
    address = view("--demo")
    page = open_page(address, width)
    page.wait_for_selector(".chart canvas")
    assert page.inner_text(".status") == "finished" and page.locator(".chart canvas").count() >= 11
    page.goto(f"{address}#/disagreements")
    page.click(".worst a >> nth=0")
    page.wait_for_selector(".panel .candidates tr")
    offered = page.inner_text("select[aria-label='Shade tokens by']")
    for measure in ("KL(p‖q)", "log q(y) − log p(y)", "−log p(y)", "student's entropy", "trainer's q(y) over the engine's", "weight version", "loss weight", "loss of the position"):  # fmt: skip
        assert measure in offered
    page.hover(".token.written >> nth=1")
    label = page.inner_text(".panel h3")
    until(page, lambda: page.inner_text(".panel h3") != label or page.locator(".panel .origin").count())
    origin = page.inner_text(".panel .origin")
    assert re.fullmatch(
        r"loss [\d.e-]+, written by weights \d+, scored by (add|sort), replica [01]", origin
    ), origin
    shown, panel = (page.locator(place).bounding_box() for place in (".panel .origin", ".panel"))
    assert panel["y"] <= shown["y"] and shown["y"] + shown["height"] <= panel["y"] + panel["height"]
    assert "teacher p" in page.inner_text(".panel") and "student q" in page.inner_text(".panel")
    page.click(".token.written >> nth=1")
    page.keyboard.press("ArrowLeft")
    until(page, lambda: page.inner_text(".panel h3") != label and page.inner_text(".panel .origin") != "")
    assert fits(page)


@pytest.mark.browser
def test_a_long_row_opens_at_the_disagreement_and_shows_its_turns(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    """7,100 tokens, of which an answer of the server has 4,096: two turns with a tool's result between them."""
    run, columns = recorded_run(tmp_path / "run"), long_columns()
    kept = RowKeeper(run.path / FOLDER_NAME, 4 << 20)
    kept.write(20, [(summary("long_0_0", columns, turns=2, kl=9.0), columns)])
    address = view(str(run.path))
    page = open_page(f"{address}#/disagreements?step=20")
    page.click(".worst a >> nth=0")
    page.wait_for_selector(".panel .candidates tr")
    panel = page.inner_text(".panel")
    assert "The teacher wanted" in panel and "7.5" in panel and "place 7090" in panel
    assert "3,600" in page.inner_text(".facts")

    def heads() -> list[str]:
        found = page.evaluate("[...document.querySelectorAll('.tokens .who')].map((one) => one.innerText)")
        return [one.lower() for one in found]

    assert heads() == ["environment", "student, turn 2"]
    page.click("text=the tokens before")
    until(page, lambda: len(heads()) == 3)
    assert heads() == ["prompt", "student, turn 1", "environment"]
    page.goto(f"{address}#/rollouts?step_min=20&kind=kept")
    page.click("table.rows td.text a >> nth=0")
    until(page, lambda: len(heads()) == 2)
    assert heads() == ["prompt", "student, turn 1"]
    page.click("text=the next tokens")
    until(page, lambda: len(heads()) == 3)
    assert heads() == ["student, turn 1", "environment", "student, turn 2"]
