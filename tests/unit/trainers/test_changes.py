"""What may change in a run that is resumed."""

import json
from pathlib import Path
from typing import Any

import pytest

from understudy.config import Recipe, parse_recipe
from understudy.errors import ConfigError
from understudy.observability.rundir import RunDir
from understudy.trainers.changes import ACCEPTED, REFUSED, changed_recipe, flatten

TABLE: dict[str, Any] = {
    "student": {"model": "student"},
    "teachers": {"add": {"model": "teacher", "key": "add"}, "sort": {"model": "teacher", "key": "sort"}},
    "data": {"train": "train.jsonl", "reward": "understudy.rollout.reward:exact_match"},
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "recipe.json").write_text(json.dumps(parse_recipe(TABLE).model_dump()))
    return RunDir.open(tmp_path)


def test_harmless_changes_are_listed_with_their_reasons(run: RunDir) -> None:
    recipe, changes = changed_recipe(
        run, ["trainer.steps=400", "teachers.add.replicas=3", "run.loggers=['wandb']", "trainer.ranks=2"]
    )
    assert recipe.trainer.steps == 400 and recipe.teachers["add"].replicas == 3
    assert [change.key for change in changes] == [
        "run.loggers", "teachers.add.replicas", "trainer.ranks", "trainer.steps",
    ]  # fmt: skip
    assert "100 → 400" in str(changes[-1]) and "how far" in str(changes[-1])


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("run.seed=1", "randomness"),
        ("student.model=other", "one model"),
        ("loss.kind=reverse_kl", "objective"),
        ("loss.topk=8", "objective"),
        ("trainer.batch_size=32", "batches of the old size"),
        ("trainer.learning_rate=1e-3", "optimizer"),
        ("data.train=other.jsonl", "place in the data"),
        ("teachers.add.model=other", "judged"),
        ("rollout.temperature=0.5", "other rules"),
        ("rollout.max_new_tokens=9", "other rules"),
    ],
)
def test_changes_of_meaning_are_refused_and_say_why(run: RunDir, override: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        changed_recipe(run, [override, "trainer.steps=400"])
    (problem,) = caught.value.problems
    assert problem.startswith(f"cannot resume with {override.split('=')[0]} = ")


def test_every_refusal_comes_at_once(run: RunDir) -> None:
    with pytest.raises(ConfigError) as caught:
        changed_recipe(run, ["run.seed=1", "loss.kind=reverse_kl"])
    assert len(caught.value.problems) == 2


def test_a_teacher_more_or_less_is_refused(run: RunDir) -> None:
    with pytest.raises(ConfigError, match="judged by the old teachers"):
        changed_recipe(run, ["teachers.third.model=x", "teachers.third.key=third"])


def test_the_same_value_is_no_change(run: RunDir) -> None:
    assert changed_recipe(run, ["run.seed=0"])[1] == []


def test_the_tables_name_only_keys_that_exist() -> None:
    known = set(flatten(parse_recipe(TABLE).model_dump()))
    known |= {
        ".".join([first, "*", *rest])
        for first, _, *rest in (k.split(".") for k in known if k.startswith("teachers."))
    }
    sections = set(Recipe.model_fields)
    for key in (*ACCEPTED, *REFUSED):
        assert key in known or key in sections or (key.endswith(".*") and key[:-2] in sections), key
