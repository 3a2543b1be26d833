"""A refused step: all inputs of its update are in a file, and `understudy replay` finds the rows that break it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import understudy
from understudy.assembly.learner import load_source, objective_of, policy_settings
from understudy.cli.main import main
from understudy.config import parse_recipe
from understudy.errors import UnderstudyError
from understudy.planning.resolved import resolve
from understudy.policy.bad_rows import replay
from understudy.policy.policy import Policy
from understudy.run.replay import replay_run
from understudy.types.jagged import Jagged

Make = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("mode", ["sync", pytest.param("fully_async", marks=pytest.mark.slow)])
def test_replay_finds_the_rows_that_broke_a_refused_step(
    recipe: Make, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The update reads teachers, rewards, advantages and old logprobs, and is refused after two good steps. The
    weights were saved, and the same rows break again. With ordinary advantages they do not."""
    lines = Path(recipe()["data"]["train"]).read_text().splitlines()[:16]
    calm = [{**json.loads(line), "calm": place < 2 * 4} for place, line in enumerate(lines)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in calm))
    table = recipe(
        loss={"topk": 8, "task_coef": 1.0, "advantage": "grpo_no_std", "correction": {"weigh": "token"}},
        rollout__n=3, trainer__batch_size=4, trainer__checkpoint_every=50, trainer__mode=mode,
        data__train=str(tmp_path / "rows.jsonl"), data__shuffle=False, data__reward="small_rewards:immense_unless_calm",
        **({"trainer__max_staleness": 0.0} if mode != "sync" else {}),
    )  # fmt: skip
    with pytest.raises(UnderstudyError, match="were not touched"):
        ended = understudy.train(table, progress=False)
        pytest.fail(f"{ended.status} after step {ended.steps}: {ended.last}")
    run = Path(table["run"]["dir"])
    refused = [json.loads(line) for line in (run / "refused.jsonl").read_text().splitlines()]
    found = replay_run(run)
    assert found.same_weights and found.weights_of == found.refused.step == 2
    assert [row.key for row in found.findings] == [line["key"] for line in refused]
    assert found.findings and not any(row.sound for row in found.findings)
    rows, old = found.refused.rows, found.refused.old_logprobs
    assert rows.advantages is not None and rows.teacher_ids is not None and old is not None
    assert rows.teacher_topk_logprobs is not None and rows.importance is not None
    assert set(rows.teachers) <= {"add", "sort"} and max(map(abs, rows.rewards)) == pytest.approx(1e38)
    assert torch.isfinite(rows.behaviour_logprobs.values[rows.loss_mask.values]).all()
    assert torch.isfinite(old.values).all() and len(old.values) == int(rows.loss_mask.values.sum())

    calmed = replace(
        rows, advantages=Jagged(torch.ones_like(rows.advantages.values), rows.advantages.offsets)
    )
    settled = resolve(parse_recipe(table), gpus=0)
    policy = Policy(load_source(settled.student).model, policy_settings(settled.learn))
    assert all(
        row.sound
        for row in replay(policy, replace(found.refused, rows=calmed), objective_of(settled.learn.loss))
    )

    assert main(["replay", str(run)]) == 1
    output = capsys.readouterr().out
    assert "weights    of step 2, those the student had" in output and output.count("BROKEN") == len(rows)
    assert main(["replay", str(run), "--step", "1"]) == 2
    assert "no step after 1 others was refused" in capsys.readouterr().err

    moments = run / "checkpoints" / "step-000002" / "optimizer.safetensors"
    content = moments.read_bytes()
    for damage in (lambda: moments.write_bytes(content[:-1] + bytes([content[-1] ^ 0xFF])), moments.unlink):
        damage()
        code, said = main(["replay", str(run)]), capsys.readouterr()
        assert code == 1 and said.out == output, "a replay should need only the weights: " + said.err


def test_replay_reports_that_no_step_was_refused(recipe: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = understudy.train(recipe(trainer__steps=1), progress=False)
    assert main(["replay", str(run.dir)]) == 2
    assert "no step was refused" in capsys.readouterr().err
