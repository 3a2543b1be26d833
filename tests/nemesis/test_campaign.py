"""The nemesis campaign: it continues after errors and over several calls, and summarizes its result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import campaign
import pytest
from modes import MODES, recipe
from schedules import Schedule
from small_runs import write_toml
from summary import identity, read_results, summary, upper_bound

from understudy.cli.main import main

RESULT = {"faults": 2, "drawn": 3, "kinds": ["kill replica", "clock trainer"], "launches": [-9, 0], "seconds": 36.0, "violations": []}  # fmt: skip


def test_a_driver_error_is_recorded_and_the_next_call_tries_that_seed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def try_schedule(schedule: Schedule, *_: object) -> dict[str, Any]:
        tried.append(schedule.mode)
        if tried == ["sync full", "sync fast"]:
            raise ConnectionError("the proxy is gone")
        return {"mode": schedule.mode, **RESULT}

    monkeypatch.setattr(campaign, "try_schedule", try_schedule)
    out = tmp_path / "out.jsonl"

    def call(*more: str) -> int:
        monkeypatch.setattr("sys.argv", ["campaign.py", "--seeds", "0:3", "--out", str(out), *more])
        return campaign.main()

    assert call() == 1
    lines = read_results(out)
    assert [line["seed"] for line in lines] == [0, 1, 2]
    assert "the proxy is gone" in lines[1]["error"]
    assert Schedule.from_dict(lines[1]["schedule"]).mode == "sync fast"
    assert call() == 0
    assert tried == ["sync full", "sync fast", "async 0", "sync fast"]
    assert call("--only", "clock") == 0, "the same seeds with other faults are other schedules"
    assert len(tried) == 7
    assert "6 schedules, 12 faults" in summary(read_results(out))


def test_result_lines_of_older_formats_are_read(tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    file.write_text(
        "".join(
            json.dumps({"seed": seed, "only": mode, "mode": "async 1", **RESULT}) + "\n"
            for seed, mode in ((3, None), (7, "async 1"))
        )
    )
    with file.open("a") as lines:
        lines.write(
            json.dumps({"seed": 9, "mode": "async 1", **RESULT}) + "\n"
        )  # the format of the first campaign
    assert [identity(line) for line in read_results(file)] == [
        (3, None, ""), (7, "async 1", ""), (9, None, ""),
    ]  # fmt: skip


def test_a_summary_counts_faults_modes_violations_and_errors() -> None:
    results = [
        {"seed": 0, "mode": "sync full", **RESULT},
        {"seed": 1, "mode": "lora", **RESULT, "violations": ["a row was lost"]},
        {"seed": 2, "mode": "lora", "error": "ConnectionError: reset"},
    ]
    text = summary(results)
    assert "2 schedules, 4 faults that hit (2.0 a schedule), 4 launches, 0.0 h" in text
    assert "1 schedules with violations, 1 that could not be carried out" in text
    assert "| kill replica | 2 |" in text and "| sync full | 1 |" in text
    assert "seed 1 (lora): a row was lost" in text and "seed 2 (lora): ConnectionError: reset" in text
    assert "below 97.47 %" in text


def test_upper_bound_is_the_clopper_pearson_bound() -> None:
    """Without failures it is 1 − 0.05^(1/n), nearly 3/n; the value for 1 of 10 is from a table."""
    assert upper_bound(0, 1000) == pytest.approx(1 - 0.05 ** (1 / 1000), rel=1e-9)
    assert upper_bound(1, 10) == pytest.approx(0.39416, abs=1e-5)
    assert upper_bound(3, 3) == 1.0


def test_violations_in_result_lines_contain_no_paths_of_the_machine() -> None:
    folder, source = Path("/somewhere/trial"), Path(campaign.__file__).resolve().parents[2] / "src" / "a.py"
    text = campaign.without_paths(f'error: {folder}/run is not empty; File "{source}", line 1', folder)
    assert text == 'error: FOLDER/run is not empty; File "src/a.py", line 1'


@pytest.mark.parametrize("name", [name for name, own in MODES.items() if not own.by_seed])
def test_check_accepts_the_recipe_of_each_mode_that_no_seed_draws(name: str, tmp_path: Path) -> None:
    assert main(["check", str(write_toml(tmp_path / "recipe.toml", recipe(MODES[name], tmp_path)))]) == 0
