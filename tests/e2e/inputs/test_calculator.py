"""The calculator recipe: a tool loop, distilled on every assistant turn."""

from pathlib import Path

import pytest

import understudy
from understudy.config import load_recipe

FOLDER = Path(__file__).parents[3] / "recipes" / "calculator"
RECIPE = FOLDER / "recipe.toml"


def test_the_shipped_models_are_smaller_than_3_mb() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("models/*/*")) < 3_000_000


@pytest.mark.slow
def test_the_loss_covers_tool_calls_and_answers(tmp_path: Path) -> None:
    """The student starts with the teacher's weights, so every rollout calls the calculator and the loss is zero."""
    overrides = [
        f"run.dir={tmp_path / 'run'}", "run.threads=1", f"student.model={FOLDER / 'models' / 'teacher'}",
        "trainer.steps=1", "trainer.batch_size=6", "trainer.eval_teachers=false", "trainer.eval_samples=6",
        "rollout.temperature=0.3",
    ]  # fmt: skip
    run = understudy.train(load_recipe(RECIPE, overrides), progress=False)
    line = run.last
    assert line["num_turns/min"] >= 2 and line["rollout/tool/calls"] >= 1 and line["rollout/tool/ok"] >= 1
    assert line["critic/score/mean"] > 0.5 and line["val/accuracy"] > 0.5
    assert line["response_length/mean"] > 25, "the call and the answer both count as response"
    assert line["actor/loss"] < 1e-3, "a teacher agrees with itself on every token of every turn"
    assert line["time/rollout/tool/max"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_student_learns_to_use_the_calculator(tmp_path: Path) -> None:
    run = understudy.train(
        load_recipe(RECIPE, [f"run.dir={tmp_path / 'run'}", "trainer.eval_samples=100"]), progress=False
    )
    assert run.metrics[0]["val/accuracy"] <= 0.05 and run.metrics[1]["rollout/tool/calls"] < 0.2
    assert run.last["val/accuracy"] >= 0.85
    assert run.last["num_turns/mean"] > 1.8 and run.last["rollout/tool/ok"] > 0.8
