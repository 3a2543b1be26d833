"""Failing evaluations: answers that cannot be scored are counted, and an evaluation that raises does not lose
the step."""

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import ASSETS, run_cli

import understudy
from understudy.dataplane.ledger import audit
from understudy.engines.local.engine import HFEngine
from understudy.errors import ConfigError, EngineError
from understudy.observability.metrics import read_metrics
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.rollout.rewards.reward_threads import _MOST
from understudy.run.evaluate_model import evaluate_model

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def held_out(recipe: Make, tmp_path: Path) -> str:
    """Twelve problems: four are scored, four get NaN, for four the reward raises."""
    lines = Path(recipe()["data"]["train"]).read_text().splitlines()[:12]
    rows = [{**json.loads(line), "trouble": place % 3} for place, line in enumerate(lines)]
    path = tmp_path / "held-out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("mode", ["sync", pytest.param("fully_async", marks=pytest.mark.slow)])
def test_answers_without_a_reward_count_as_failed_and_unsolved(
    recipe: Make, held_out: str, mode: str
) -> None:
    run = understudy.train(
        recipe(
            data__eval=held_out, data__reward="small_rewards:broken_held_out", trainer__eval_k=2, trainer__steps=2,
            trainer__solved_at=-5.0, trainer__mode=mode,
        ),
        progress=False,
    )  # fmt: skip
    assert run.steps == 2
    first, _, last = run.metrics
    for line in (first, last):
        assert line["val/failed"] == 8 * 3
        assert line["val/failed"] == sum(v for k, v in line.items() if k.startswith("val/failed/"))
        assert line["val/accuracy"] <= 4 / 12
        assert line["val/pass@2"] == pytest.approx(4 / 12), (
            "every scored answer reaches −5, no failed one does"
        )
    letters = [
        json.loads(line) for line in (run.dir / "dataplane/dead_letters.jsonl").read_text().splitlines()
    ]
    assert Counter(letter["step"] for letter in letters) == {0: 24, 2: 24}
    reasons = Counter("no reward" in letter["reason"] for letter in letters)
    assert reasons == {True: 24, False: 24} and all(letter["partition"] == "eval" for letter in letters)
    samples = [json.loads(line) for line in (run.dir / "samples.jsonl").read_text().splitlines()]
    unrewarded = [sample for sample in samples if sample["reward"] is None]
    assert unrewarded and all(sample["text"] and sample["stop_reason"] != "aborted" for sample in unrewarded)
    report = audit(run.dir)
    assert report.balanced and report.dead == 48 and report.trained == 32
    assert json.loads((run.dir / "state.json").read_text())["dead_letters"] == 0, (
        "none of the rows trained on"
    )


def test_an_answer_whose_reward_hangs_counts_as_failed_after_the_deadline(
    recipe: Make, tmp_path: Path
) -> None:
    """More rewards hang than there are reward threads, in both evaluations; the other answers are still scored."""
    lines = Path(recipe()["data"]["train"]).read_text().splitlines()[: 8 + 2 * _MOST]
    hanging = range(8, len(lines))
    rows = [{**json.loads(line), "trouble": 3 * (place in hanging)} for place, line in enumerate(lines)]
    path = tmp_path / "held-out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = recipe(
        data__eval=str(path), data__reward="small_rewards:broken_held_out", trainer__steps=1, rollout__deadline_seconds=1.0,
        rollout__max_batch=32,
    )  # fmt: skip
    run = understudy.train(table, progress=False)
    assert [line["val/failed"] for line in run.metrics] == [len(hanging)] * 2
    letters = [
        json.loads(line) for line in (run.dir / "dataplane/dead_letters.jsonl").read_text().splitlines()
    ]
    first = f"reward broken_held_out timed out: eval-{hanging[0]:07d} took longer than rollout.deadline_seconds = 1"
    assert letters[0]["reason"] == first and len(letters) == 2 * len(hanging)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_step_is_saved_when_the_evaluation_after_it_raises(
    recipe: Make, held_out: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    table = recipe(
        data__eval=held_out, trainer__eval_every=2, trainer__checkpoint_every=500, trainer__mode=mode,
        rollout__agent="troubled_loop:GivesOut", rollout__agent_options={"troubled_loop:GivesOut": {"good": 20}},
    )  # fmt: skip
    with pytest.raises(EngineError, match="the engine of this loop is gone"):
        understudy.train(table, progress=False)
    run = Path(table["run"]["dir"])
    assert CheckpointStore(run / "checkpoints").steps() == [2]
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]
    code, output = run_cli("resume", str(run), "trainer.eval_samples=10", "--quiet")
    assert code == 0, output
    evaluated = ["val/accuracy" in line for line in read_metrics(run / "metrics.jsonl")]
    assert evaluated == [True, False, True, False, True], "the resume begins with the evaluation that raised"
    report = audit(run)
    assert report.balanced and report.per_step == dict.fromkeys(range(1, 5), 16)


def test_an_evaluation_that_cannot_begin_closes_its_engine_and_removes_its_folder(
    held_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[HFEngine] = []
    close = HFEngine.close

    async def noted(engine: HFEngine) -> None:
        closed.append(engine)
        await close(engine)

    monkeypatch.setattr(HFEngine, "close", noted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    student, reward = str(ASSETS / "models" / "student"), "understudy.rollout.rewards.builtin:exact_match"
    with pytest.raises(ConfigError, match="no_such") as raised:
        asyncio.run(evaluate_model(student, held_out, reward, 4, None, "no_such:Agent"))
    assert len(closed) == 1
    assert not list(tmp_path.glob("understudy-eval-*"))
    del raised  # held the frames until here, so the garbage collector cannot have removed the folder
