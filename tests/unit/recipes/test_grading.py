"""The grader of the studies, on the quickstart's models."""

import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "src/understudy/assets/quickstart"


def test_the_grader_gives_a_teacher_a_higher_accuracy_and_no_kl_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "recipes/word-problems"), *sys.path])
    from grading import Grader, read_prompts

    models = QUICKSTART / "models"
    prompts = [one for one in read_prompts(QUICKSTART / "data/test.jsonl", 64) if one.data_source == "add"]
    assert len(prompts) > 8
    teacher = {"add": AutoModelForCausalLM.from_pretrained(models / "teacher-add").eval()}
    accuracy, distance = {}, {}
    for name in ("student", "teacher-add"):
        grader = Grader(models / name, 8, 64, 32, "understudy.rollout.rewards.builtin:exact_match")
        accuracy[name] = grader.accuracy(prompts)["accuracy"]
        distance[name] = grader.distance(teacher, prompts)
        grader.close()
    assert accuracy["student"] < 0.2 < 0.8 < accuracy["teacher-add"]
    assert abs(distance["teacher-add"]) < 1e-5 < 0.1 < distance["student"]
