"""`run.keep_rows`: the run directory keeps rows with the token columns that were trained on; the run's bits
stay equal."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_runs import run_cli, write_toml

import understudy
from understudy.dataplane.kept_rows import read_columns
from understudy.dataplane.token_measures import measures
from understudy.observability.metrics import without_clock
from understudy.observability.rundir import RunDir
from understudy.viewer.run_view import RunView

_BY_TRAINER = ("loss", "weight", "entropy", "kl", "ratio")
Make = Callable[..., dict[str, Any]]


def kept_rows_of(run: Path, step: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    lines = [json.loads(line) for line in (run / "kept_rows" / f"{step:06d}.jsonl").open(encoding="utf-8")]
    return [(line, read_columns(run / "kept_rows", step, line)) for line in lines]


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_kept_rows_agree_with_the_metrics_and_change_no_bit_of_the_run(recipe: Make, mode: str) -> None:
    small = {"trainer__steps": 2, "trainer__batch_size": 4, "trainer__mode": mode}
    if mode == "fully_async":
        small["trainer__max_staleness"] = 0
    plain = understudy.train(recipe("plain", run__keep_rows=0, **small), progress=False)
    run = understudy.train(recipe("kept", run__keep_rows=1 << 20, **small), progress=False)
    assert not (plain.dir / "kept_rows").exists()
    rows, line = kept_rows_of(run.dir, 2), run.metrics[-1]
    idle = [
        line[f"perf/{mode.removeprefix('fully_')}/{part}_idle"] for part in ("trainer", "rollout", "teacher")
    ]
    assert all(0 <= share < 1 for share in idle) and sum(idle) > 0
    assert json.loads((run.dir / "state.json").read_text())["host"] == socket.gethostname()
    assert len(rows) == 4 and (run.dir / "kept_rows" / "tokenizer.json").exists()
    gaps = np.concatenate([measures(columns)["gap"] for _, columns in rows])
    assert gaps.mean() == pytest.approx(line["actor/distillation/k1"], abs=1e-4)
    for summary, columns in rows:
        assert summary["source"] == summary["teacher"] == columns["teacher"] and summary["newest"] == 1
        assert columns["teacher_ids"].shape == columns["teacher_topk_logprobs"].shape
        assert len(columns["teacher_ids"]) == columns["loss_mask"].sum() == summary["tokens"]
        assert summary["why"] in ("sample", "both") and columns["student_ids"].shape[1] == 8
        own = np.exp(columns["student_logprobs"].astype(np.float64))
        assert (np.diff(own, axis=1) <= 0).all() and own.sum(1).max() <= 1 + 1e-5
    measured = {
        name: np.concatenate([measures(columns)[name] for _, columns in rows]) for name in _BY_TRAINER
    }
    assert (measured["loss"] * measured["weight"]).sum() == pytest.approx(line["actor/loss"], rel=1e-4)
    assert measured["entropy"].mean() == pytest.approx(line["actor/entropy"], rel=1e-4)
    # The recipe's loss is forward KL with a tail.
    assert measured["loss"] == pytest.approx(measured["kl"], abs=2e-4)
    assert measured["ratio"] == pytest.approx(1, abs=1e-3)
    view = RunView(RunDir.open(run.dir))
    while view.look():
        pass
    row = view.row(f"kept:2:{0}")
    assert "".join(row["pieces"]) == rows[0][0]["prompt"] + rows[0][0]["completion"]
    assert row["facts"]["replica"] == "0"
    (first, *_) = view.candidates("kept:2:0", 0, 1)
    assert len(first["student"]) == 8 and all(one["q"] is not None for one in first["teacher"])
    assert [without_clock(one) for one in run.metrics] == [without_clock(one) for one in plain.metrics]
    ours, theirs = (
        load_file(folder / "checkpoints" / "step-000002" / "model.safetensors")
        for folder in (run.dir, plain.dir)
    )
    assert all((ours[name] == theirs[name]).all() for name in ours)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["sync.after_ack:3", "kept_rows.between_files:2", "sync.after_metrics:2"])
def test_a_killed_and_resumed_run_keeps_the_same_rows(recipe: Make, tmp_path: Path, fault: str) -> None:
    """Also when it is killed between the two files of a step. Before the resume, the viewer can read every row that it
    lists."""
    small = {"trainer__steps": 3, "trainer__batch_size": 4}
    table, whole = recipe("killed", **small), understudy.train(recipe("whole", **small), progress=False)
    path = write_toml(tmp_path / "recipe.toml", table)
    code, _ = run_cli("train", str(path), fault=fault)
    assert code != 0
    left = RunView(RunDir.open(Path(table["run"]["dir"])))
    while left.look():
        pass
    for row in left.spread("kept", 100):
        assert left.row(row["id"])["tokens"]
    code, output = run_cli("resume", table["run"]["dir"])
    assert code == 0, output
    for step in (1, 2, 3):
        ours, theirs = (
            [path.read_bytes() for path in sorted((folder / "kept_rows").glob(f"{step:06d}.*"))]
            for folder in (Path(table["run"]["dir"]), whole.dir)
        )
        assert len(ours) == 2 and ours == theirs


def test_a_resume_removes_kept_rows_of_later_steps(recipe: Make) -> None:
    """As if a launch had been killed at step 9, after its last checkpoint; the resume continues from step 1."""
    run = understudy.train(recipe("run", trainer__steps=1, trainer__batch_size=4), progress=False)
    folder = run.dir / "kept_rows"
    for ending in ("jsonl", "rows"):
        (folder / f"000009.{ending}").write_bytes((folder / f"000001.{ending}").read_bytes())
    understudy.resume(run.dir, progress=False, trainer__steps=2)
    assert sorted(path.stem for path in folder.glob("*.jsonl")) == ["000001", "000002"]


def test_every_answer_of_an_evaluation_is_written_to_samples_jsonl(recipe: Make, tmp_path: Path) -> None:
    problems = Path(recipe()["data"]["train"]).read_text().splitlines()[:20]
    (tmp_path / "eval.jsonl").write_text("\n".join(problems) + "\n")
    small = {"trainer__steps": 1, "trainer__batch_size": 2, "data__eval": str(tmp_path / "eval.jsonl")}
    run = understudy.train(recipe(**small), progress=False)
    lines = [json.loads(line) for line in (run.dir / "samples.jsonl").read_text().splitlines()]
    for step in (0, 1):
        mine = [line["reward"] for line in lines if line["step"] == step and line["model"] == "student"]
        at = next(one for one in run.metrics if one["step"] == step)
        assert len(mine) == 20 and sum(mine) / 20 == pytest.approx(at["val/accuracy"])
