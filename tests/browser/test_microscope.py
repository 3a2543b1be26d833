"""The token view ("microscope") in a real browser: the shipped demo, and a row longer than one reply of the server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_run import long_columns, recorded_run, summary
from test_page import fits_window, wait_until

from understudy.dataplane.kept_rows import FOLDER_NAME, RowKeeper


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1440])
def test_a_token_of_the_demo_shows_its_measures_on_hover_and_by_keyboard(
    view: Callable[..., str], open_page: Callable[..., Any], width: int
) -> None:
    """The panel shows loss, weight version and replica without scrolling, for the pointer and for the arrow keys."""
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
    wait_until(page, lambda: page.inner_text(".panel h3") != label or page.locator(".panel .origin").count())
    origin = page.inner_text(".panel .origin")
    assert re.fullmatch(
        r"loss [\d.e-]+, written by weights \d+, scored by (add|sort), replica [01]", origin
    ), origin
    shown, panel = (page.locator(place).bounding_box() for place in (".panel .origin", ".panel"))
    assert panel["y"] <= shown["y"] and shown["y"] + shown["height"] <= panel["y"] + panel["height"]
    assert "teacher p" in page.inner_text(".panel") and "student q" in page.inner_text(".panel")
    page.click(".token.written >> nth=1")
    page.keyboard.press("ArrowLeft")
    wait_until(
        page, lambda: page.inner_text(".panel h3") != label and page.inner_text(".panel .origin") != ""
    )
    assert fits_window(page)


@pytest.mark.browser
def test_a_row_longer_than_one_server_reply_opens_at_the_disagreement_and_pages(
    tmp_path: Path, view: Callable[..., str], open_page: Callable[..., Any]
) -> None:
    """The row has 7,100 tokens, and a server reply at most 4,096: two turns with a tool's result between them."""
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

    def turn_headings() -> list[str]:
        found = page.evaluate("[...document.querySelectorAll('.tokens .who')].map((one) => one.innerText)")
        return [one.lower() for one in found]

    assert turn_headings() == ["environment", "student, turn 2"]
    page.click("text=the tokens before")
    wait_until(page, lambda: len(turn_headings()) == 3)
    assert turn_headings() == ["prompt", "student, turn 1", "environment"]
    page.goto(f"{address}#/rollouts?step_min=20&kind=kept")
    page.click("table.rows td.text a >> nth=0")
    wait_until(page, lambda: len(turn_headings()) == 2)
    assert turn_headings() == ["prompt", "student, turn 1"]
    page.click("text=the next tokens")
    wait_until(page, lambda: len(turn_headings()) == 3)
    assert turn_headings() == ["student, turn 1", "environment", "student, turn 2"]
