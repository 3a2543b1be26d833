"""The table that ends a run's output."""

import json
from pathlib import Path

import pytest

from understudy.cli.outcome import finish
from understudy.run.outcome import RunOutcome


@pytest.mark.parametrize(
    ("rewards", "title", "figures"),
    [
        ((0.25, 0.5, 0.75), "held-out accuracy", ("25.0%", "50.0%", "75.0%", "66.7%")),
        ((0.5, 8.0, 10.0), "held-out mean reward", ("0.5", "8", "10", "80.0%")),
        ((-1.0, 0.5, 1.0), "held-out mean reward", ("-1", "0.5", "1", "50.0%")),
    ],
)
def test_rewards_beyond_1_are_not_shown_as_percentages(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rewards: tuple[float, float, float],
    title: str,
    figures: tuple[str, ...],
) -> None:
    before, after, teacher = rewards
    (tmp_path / "state.json").write_text(json.dumps({"status": "finished"}))
    metrics = [
        {"step": 0, "val/accuracy/all": before, "val/teacher_accuracy/all": teacher},
        {"step": 4, "val/accuracy/all": after},
    ]
    assert finish(RunOutcome(tmp_path, 4, metrics)) == 0
    output = capsys.readouterr().out
    (row,) = [line for line in output.splitlines() if " all " in line]
    assert title in output and tuple(row.replace("│", " ").split()[1:]) == figures


def test_escape_sequences_and_markup_in_the_name_of_a_data_source_are_printed_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"status": "finished"}))
    (tmp_path / "recipe.json").write_text(json.dumps({"teachers": {}}))
    metrics = [{"step": step, "val/accuracy/\x1b[2J[/b]": 0.5} for step in (0, 4)]
    assert finish(RunOutcome(tmp_path, 4, metrics)) == 0
    output = capsys.readouterr().out
    assert "\x1b[2J" not in output and "\\x1b[2J[/b]" in output
