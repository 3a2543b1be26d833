"""`dataplane.max_rows`: a recipe whose rows do not fit is refused, and one whose run it limits gets a note."""

from importlib import resources
from typing import Any

import pytest

from understudy.cli.main import main
from understudy.config import parse_recipe
from understudy.config.checks.capacity import capacity_notes, max_prompts
from understudy.errors import ConfigError
from understudy.planning.windows import Windows

ASYNC = {"mode": "fully_async", "batch_size": 8}


def tables(max_rows: int, n: int = 4, **trainer: Any) -> dict[str, Any]:
    return {
        "student": {"model": "s"},
        "teachers": {"t": {"model": "t"}},
        "data": {"train": "d.jsonl"},
        "rollout": {"n": n},
        "trainer": {"batch_size": 8, **trainer},
        "dataplane": {"max_rows": max_rows},
    }


def notes(table: dict[str, Any]) -> list[str]:
    recipe = parse_recipe(table)
    return capacity_notes(recipe.trainer, recipe.rollout, recipe.dataplane)


@pytest.mark.parametrize(
    ("max_rows", "trainer"),
    [(31, {}), (31, ASYNC), (95, ASYNC | {"sync_every": 3}), (63, ASYNC | {"sync_every": 3, "steps": 2})],
)
def test_a_recipe_whose_window_exceeds_dataplane_max_rows_is_refused(
    max_rows: int, trainer: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=rf"dataplane\.max_rows = {max_rows} does not hold"):
        parse_recipe(tables(max_rows, **trainer))
    parse_recipe(tables(max_rows + 1, **trainer))


def test_a_max_rows_that_limits_how_far_the_run_gets_ahead_gives_a_note() -> None:
    assert notes(tables(64, **ASYNC, max_staleness=1.0)) == []
    assert notes(tables(32)) == []
    (note,) = notes(tables(40, **ASYNC, max_staleness=1.0))
    assert "run 0.25 of a window ahead" in note and "dataplane.max_rows = 64" in note


def test_max_rows_limits_the_slots_of_windows_to_the_prompts_that_fit() -> None:
    """43 rows hold ten prompts of 4 sessions: a quarter of the next window, although staleness allows all of it."""
    recipe = parse_recipe(tables(43, **ASYNC, max_staleness=1.0))
    windows = Windows(8, 1, 1.0, 10, max_prompts(recipe.rollout, recipe.dataplane))
    assert windows.slots == 10 and windows.oldest == 1
    assert Windows(8, 1, 1.0, 10).slots == 16 and Windows(8, 1, 1.0, 10, 100).slots == 16
    assert Windows(8, 1, 0.0, 10, 10).oldest == 0


def test_check_prints_the_note_about_max_rows(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(resources.files("understudy.assets") / "quickstart" / "recipe.toml")
    tight = ["trainer.mode=fully_async", "trainer.batch_size=8", "rollout.n=4", "dataplane.max_rows=40"]
    assert main(["check", recipe, *tight, "trainer.max_staleness=1"]) == 0
    assert "0.25 of a window ahead" in capsys.readouterr().out
