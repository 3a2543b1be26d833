"""`run.rollout_dump_every`: a step's rows as text. They agree with the run's metrics, and no bit of the run changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from small_runs import call_cli, run_cli, write_toml

import understudy
from understudy.observability.metrics import without_clock

Make = Callable[..., dict[str, Any]]


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts" / f"{step:06d}.jsonl").open(encoding="utf-8")]


@pytest.mark.parametrize("mode", ["fully_async", pytest.param("sync", marks=pytest.mark.slow)])
def test_rollouts_of_every_second_step_are_written_and_agree_with_the_metrics(
    recipe: Make, mode: str
) -> None:
    small = {"trainer__steps": 2, "trainer__batch_size": 4, "trainer__mode": mode}
    if mode == "fully_async":
        small["trainer__max_staleness"] = 0
    plain = understudy.train(recipe("plain", **small), progress=False)
    run = understudy.train(recipe("dumped", run__rollout_dump_every=2, **small), progress=False)
    assert not (plain.dir / "rollouts").exists()
    assert [path.name for path in (run.dir / "rollouts").iterdir()] == ["000002.jsonl"]
    rows, line = rows_of(run.dir, 2), run.metrics[-1]
    data = [json.loads(text) for text in Path(recipe()["data"]["train"]).read_text().splitlines()]
    assert len(rows) == line["rollout/rows"] == 4
    for row in rows:
        problem = next(one for one in data if one["messages"][0]["content"] in row["prompt"])
        assert row["teacher"] == problem["data_source"] and row["stop_reason"] in ("eos", "length")
        assert 0 < row["tokens"] <= 8 and row["turns"] == 1
        solved = row["completion"].partition("<")[0].strip() == problem["answer"]
        assert row["reward"] == float(solved), row
    assert sum(row["tokens"] for row in rows) / 4 == pytest.approx(line["response_length/mean"])
    assert sum(row["reward"] for row in rows) / 4 == pytest.approx(line["critic/score/mean"])
    # On policy the engine's logprobs equal the trainer's, so the mean over tokens is the metric of the update.
    kl = sum(row["kl"] * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows)
    assert kl == pytest.approx(line["actor/distillation/k1"], abs=1e-4)
    assert [without_clock(one) for one in run.metrics] == [without_clock(one) for one in plain.metrics]
    ours, theirs = (
        load_file(folder / "checkpoints" / "step-000002" / "model.safetensors")
        for folder in (run.dir, plain.dir)
    )
    assert all((ours[name] == theirs[name]).all() for name in ours)


def test_a_rollout_file_that_cannot_be_written_does_not_end_the_run(recipe: Make) -> None:
    """A file stands where the folder belongs. The resume may change `run.rollout_dump_every`."""
    run = understudy.train(recipe(trainer__steps=1, trainer__batch_size=2), progress=False)
    (run.dir / "rollouts").write_text("not a folder")
    code, output = call_cli("resume", str(run.dir), "trainer.steps=2", "run.rollout_dump_every=1")
    assert code == 0, output
    assert "step 2: its rollouts could not be written" in output
    assert (run.dir / "checkpoints" / "step-000002").is_dir()


@pytest.mark.slow
def test_a_step_repeated_after_a_kill_replaces_its_rollout_file(recipe: Make, tmp_path: Path) -> None:
    table = recipe("killed", trainer__steps=3, trainer__batch_size=4, run__rollout_dump_every=1)
    whole = understudy.train(
        recipe("whole", trainer__steps=3, trainer__batch_size=4, run__rollout_dump_every=1), progress=False
    )
    path = write_toml(tmp_path / "recipe.toml", table)
    code, _ = run_cli("train", str(path), fault="sync.after_ack:3")
    assert code != 0
    code, output = run_cli("resume", table["run"]["dir"])
    assert code == 0, output
    for step in (1, 2, 3):
        assert rows_of(Path(table["run"]["dir"]), step) == rows_of(whole.dir, step)
