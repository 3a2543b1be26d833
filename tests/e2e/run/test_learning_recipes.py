"""Recipes that learn in minutes on two CPU cores: privileged context, given answers, teachers of another tokenizer."""

import subprocess
import sys
from pathlib import Path

import pytest

import understudy
from understudy.config import load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_student_learns_from_itself_with_the_answer_in_view(tmp_path: Path) -> None:
    """It starts without the skill. As its own teacher it sees the answers, and never generates."""
    folder = RECIPES / "self-distillation"
    made = [sys.executable, str(folder / "make_model.py"), "--out", str(tmp_path / "student")]
    subprocess.run(made, check=True, timeout=900)
    overrides = [f"run.dir={tmp_path / 'run'}", f"student.model={tmp_path / 'student'}"]
    run = understudy.train(load_recipe(folder / "recipe.toml", overrides), progress=False)
    assert run.metrics[0]["val/accuracy"] < 0.1
    assert run.last["val/accuracy"] > 0.4 and run.last["val/accuracy/sort"] > 0.8


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_given_answers_are_learnt_from(tmp_path: Path) -> None:
    recipe = RECIPES / "given-answers" / "recipe.toml"
    run = understudy.train(load_recipe(recipe, [f"run.dir={tmp_path / 'run'}"]), progress=False)
    assert run.metrics[0]["val/accuracy"] < 0.3
    assert run.last["val/accuracy"] > 0.85
    shares = [line["rollout/given"] for line in run.metrics[1:]]
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.03)
    assert run.last["actor/sft_loss"] < run.metrics[1]["actor/sft_loss"] / 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_given_answers_alone_are_learnt_from(tmp_path: Path) -> None:
    recipe = RECIPES / "given-answers" / "sft.toml"
    run = understudy.train(load_recipe(recipe, [f"run.dir={tmp_path / 'run'}"]), progress=False)
    assert run.metrics[0]["val/accuracy"] < 0.3
    assert run.last["val/accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_student_learns_from_teachers_of_another_tokenizer(tmp_path: Path) -> None:
    folder = RECIPES / "other-tokenizer"
    made = [sys.executable, str(folder / "make_model.py"), "--out", str(tmp_path / "student")]
    subprocess.run(made, check=True, timeout=900)
    overrides = [f"run.dir={tmp_path / 'run'}", f"student.model={tmp_path / 'student'}"]
    run = understudy.train(load_recipe(folder / "recipe.toml", overrides), progress=False)
    assert run.metrics[0]["val/accuracy/sort"] < 0.5
    assert run.last["val/accuracy/sort"] > 0.85
    assert run.metrics[1]["teacher/add/in_chains"] > 0.1 > run.last["teacher/add/in_chains"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_student_learns_from_teachers_in_eight_bits(tmp_path: Path) -> None:
    recipe = RECIPES / "eight-bit-teachers" / "recipe.toml"
    run = understudy.train(load_recipe(recipe, [f"run.dir={tmp_path / 'run'}"]), progress=False)
    assert run.metrics[0]["val/accuracy"] < 0.3
    assert run.last["val/accuracy"] > 0.85
    log = (run.dir / "logs" / "trainer.log").read_text()
    assert "teacher add has weights in float32+int8: KL " in log
