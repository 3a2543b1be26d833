"""Phase times measured from a run directory with known ones, and `plan --simulate`, which uses them."""

import json
from importlib import resources
from pathlib import Path

import pytest

from understudy.cli.main import main
from understudy.config import load_recipe
from understudy.errors import ConfigError
from understudy.planning.simulation.phase_times import combined, measure

QUICKSTART = Path(str(resources.files("understudy.assets") / "quickstart" / "recipe.toml"))
STEPS, ROWS, LENGTH, PROMPT = 10, 32, 6, 14
DECODE, SCORE, UPDATE, OPTIMIZER, PUBLISH = 0.05, 0.24, 0.8, 0.02, 0.04
"""Seconds of a decode step, of scoring a batch on two teachers, of forward and backward, of the rest of an update, and
of a publish."""


def write_run(folder: Path, decode: float = DECODE, max_batch: int = ROWS) -> Path:
    """A sync run in which every step is the same."""
    folder.mkdir()
    overrides = ["teachers.add.replicas=1", "teachers.sort.replicas=1"]
    overrides += [f"trainer.batch_size={ROWS}", f"rollout.max_batch={max_batch}", f'run.dir="{folder}"']
    recipe = load_recipe(QUICKSTART, overrides).model_dump()
    (folder / "recipe.json").write_text(json.dumps(recipe))
    waves = ROWS // max_batch
    generate, tokens = waves * LENGTH * decode, ROWS * (LENGTH + PROMPT)
    step = generate + SCORE + UPDATE + OPTIMIZER + PUBLISH
    lines, spans, now = [], [], 100.0
    for number in range(1, STEPS + 1):
        for row in range(ROWS):
            ends = now + (row // max_batch + 1) * LENGTH * decode
            spans.append({"name": "rollout", "start": now, "end": ends, "key": f"row-{row}"})
        last = now + generate
        for row in range(ROWS):  # each teacher scores half the rows, all in one request
            teacher = ("add", "sort")[row % 2]
            spans.append({"name": "score", "start": last, "end": last + SCORE, "teacher": teacher})
        spans.append({"name": "update", "start": last + SCORE, "end": now + step - PUBLISH, "step": number})
        spans.append({"name": "publish", "start": now + step - PUBLISH, "end": now + step, "step": number})
        now += step
        line = {
            "step": number, "time/step": step, "time/produce": generate + SCORE, "time/update": UPDATE + OPTIMIZER,
            "time/update/compute": UPDATE, "time/publish": PUBLISH, "perf/tokens_per_second": tokens / step,
            "rollout/rows": float(ROWS), "response_length/mean": float(LENGTH), "response_length/max": float(LENGTH),
        }  # fmt: skip
        lines.append(line)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "spans.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
    return folder


def test_measure_recovers_the_phase_times_of_a_run_and_predicts_its_step_time(tmp_path: Path) -> None:
    run = measure(write_run(tmp_path / "run"))
    assert run.costs.decode.seconds == pytest.approx((DECODE,)) and run.costs.decode.rows == (ROWS,)
    assert run.costs.update_token == pytest.approx(UPDATE / (ROWS * (LENGTH + PROMPT)))
    assert run.costs.update_fixed == pytest.approx(OPTIMIZER) and run.costs.publish == pytest.approx(PUBLISH)
    assert run.costs.score_token == pytest.approx(2 * SCORE / (ROWS * (LENGTH + PROMPT)))
    assert run.costs.host_row == pytest.approx(0.0, abs=1e-9)
    assert set(run.work.lengths) == {LENGTH} and run.work.prompt_tokens == PROMPT
    assert run.predicted().step_seconds == pytest.approx(run.step_seconds, rel=0.001)


def test_runs_with_two_batch_sizes_give_interpolated_decode_times(tmp_path: Path) -> None:
    small, large = write_run(tmp_path / "small", 0.02, 8), write_run(tmp_path / "large", 0.05, 32)
    costs = combined([measure(large), measure(small)])
    assert costs.decode.rows == (8, 32) and costs.decode(20) == pytest.approx(0.035)


def test_measuring_a_run_that_is_too_short_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:5]))
    with pytest.raises(ConfigError, match="2 steps after the first 3"):
        measure(run)


def test_plan_simulates_and_recommends(
    quickstart: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    assert main(["plan", *quickstart, "--simulate", str(run), "--devices", "6"]) == 0
    output = capsys.readouterr().out
    assert "measured 22.86 rows/s, its own phase times give 22.86" in output and "staleness 1" in output
    assert "recommended for 6 devices" in output and "(6 in use)" in output
    flags = [
        "--decode",
        "1:0.01,64:0.02",
        "--update-token",
        "0.001",
        "--lengths",
        "2,4,8",
        "--score-token",
        "0.001",
    ]
    assert main(["plan", *quickstart, "trainer.batch_size=16", "--simulate", *flags]) == 0
    assert "1 + 1 + 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "needs --decode and --update-token"),
        (["--decode", "64"], "expected ROWS:SECONDS"),
        (["--decode", "a:b"], "expected numbers"),
        (["--decode", "1:0.1", "--update-token", "1", "--lengths", "x"], "--lengths 'x'"),
        (["--decode", "1:0.1", "--update-token", "1", "--devices", "1"], "1 devices cannot hold"),
        (["--decode", "1:0.1,1:0.2", "--update-token", "1"], "two times for the same number of rows"),
        (["--decode", "1:0.2,64:0.1", "--update-token", "1"], "more rows cannot take less time"),
        (["--decode", "1:inf", "--update-token", "1"], "--decode '1:inf': expected numbers"),
        (["--decode", "1:0.1", "--update-token=-1"], "--update-token -1: expected 0 or more"),
        (["--decode", "1:0.1", "--update-token", "nan"], "--update-token nan: expected 0 or more"),
        (["--decode", "1:0.1", "--engine-devices", "0"], "--engine-devices 0: expected 1 or more"),
        (["--replica-devices", "-2", "--devices", "0"], "--devices 0: expected 1 or more"),
        (["--decode", "1:0.1", "--update-token", "1", "--lengths", "9,2"], "from the least to the most"),
        (["--prompt-tokens=-1"], "--prompt-tokens -1: expected 0 or more"),
        (["--gpus", "4"], "--simulate shares out --devices"),
        (["--decode-cached", "3e-8"], "--decode-cached without --decode"),
        (["no/such/run"], "no/such/run is not a run directory"),
        (["--also", "no/such/run"], "no/such/run is not a run directory"),
    ],
)
def test_invalid_simulation_flags_are_refused(
    quickstart: list[str], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *quickstart, "--simulate", *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_simulating_a_run_without_spans_is_refused(
    quickstart: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    assert main(["plan", *quickstart, "--simulate", str(tmp_path)]) == 2
    assert "has no spans.jsonl: nothing was measured there" in " ".join(capsys.readouterr().err.split())


def test_simulation_flags_without_simulate_are_refused(
    quickstart: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *quickstart, "--devices", "8", "--also", "runs/x"]) == 2
    assert "--devices, --also: only --simulate looks at it" in " ".join(capsys.readouterr().err.split())


def test_an_override_after_simulate_is_not_taken_for_a_run_directory(
    quickstart: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--decode", "1:0.01", "--update-token", "0.001", "--simulate", "trainer.batch_size=16"]
    assert main(["plan", *quickstart, *flags]) == 0, capsys.readouterr().err
    assert main(["plan", *quickstart, *flags[:-1], "trainer.batch_sise=16"]) == 2
    assert "did you mean `trainer.batch_size`" in capsys.readouterr().err
