"""All problems of a recipe are reported at once, each with the nearest valid key or value."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from understudy.config import parse_recipe
from understudy.config.recipe import apply_overrides, examine, load_recipe, read_tables
from understudy.config.toml import as_tables, recipe_as_toml
from understudy.errors import ConfigError

GOOD = {"student": {"model": "s"}, "teachers": {"t": {"model": "m"}}, "data": {"train": "d.jsonl"}}


def problems_of(table: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_recipe(table)
    return str(caught.value)


def changed(**sections: dict) -> dict:
    return {**GOOD, **{name: {**GOOD.get(name, {}), **values} for name, values in sections.items()}}


def test_a_recipe_with_only_the_required_keys_is_accepted() -> None:
    recipe = parse_recipe(GOOD)
    assert recipe.loss.kind == "forward_kl" and recipe.loss.tail == "bucket"


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (changed(loss={"kindd": "k2"}), "unknown key `loss.kindd`; did you mean `loss.kind`?"),
        (changed(teachers={"t": {"model": "m", "replcas": 2}}), "did you mean `teachers.t.replicas`?"),
        (changed(los={"kind": "k2"}), "unknown key `los`; did you mean `loss`?"),
        (changed(loss={"kind": "forwrd_kl"}), "did you mean 'forward_kl'?"),
        (
            changed(loss={"topk": "8"}),
            "`loss.topk` = '8': expected a whole number of at least 1; write it without quotes",
        ),
        (changed(trainer={"steps": 0}), "`trainer.steps` = 0"),
        (
            changed(trainer={"steps": 1e3}),
            "`trainer.steps` = 1000.0: expected a whole number of at least 1; write 1000",
        ),
        (
            changed(run={"name": 5}),
            '`run.name` = 5: expected a string; write it in quotes: "5", on a command line \'"5"\'',
        ),
        (changed(trainer={"steps": True}), "`trainer.steps` = True"),
        (changed(teachers={"t": {"model": "m", "placement": "colocate"}}), "woke up with wrong weights"),
        (changed(teachers={"t": {"model": "m", "replicas": 0}}), "at least 1 replica"),
        (changed(teachers={"t": {"model": "m", "placement": "external"}}), "needs `urls`"),
        (changed(student={"trust_remote_code": True}), "pin it with `revision`"),
        (changed(loss={"task_coef": 1.0}), "needs data.reward"),
        (changed(loss={"distill_coef": 0.0}), "nothing would be learnt"),
        (
            changed(loss={"distill_coef": 0.0, "task_coef": 1.0}, data={"reward": "m:f"}, rollout={"n": 4}),
            "loss.distill_coef = 0 with [teachers.t]: no loss uses a teacher's scores",
        ),
        (
            changed(loss={"task_coef": 1.0}, data={"reward": "m:f"}),
            "loss.advantage = 'grpo' compares the sessions of a prompt, and rollout.n = 1 makes one",
        ),
        (
            changed(loss={"task_coef": 1.0, "advantage": "rloo"}, data={"reward": "m:f"}),
            "loss.advantage = 'rloo' compares the sessions of a prompt",
        ),
        (changed(loss={"teacher_temperature": 0.7}), "cannot be computed for another temperature"),
        (changed(student={"dtype": "float16"}), "vanish without an error"),
        ({**GOOD, "teachers": {}}, "no teacher"),
        (
            {**GOOD, "teachers": {"a": {"model": "m", "key": "x"}, "b": {"model": "m"}}},
            "teachers.b.key is missing",
        ),
        (
            {**GOOD, "teachers": {"a": {"model": "m", "key": "x"}, "b": {"model": "m", "key": "x"}}},
            "two teachers have key = 'x'",
        ),
        (changed(data={"default_teacher": "tt"}), "did you mean 't'?"),
        ({"student": {"model": "s"}, "teachers": {"t": {"model": "m"}}}, "`data.train` is missing"),
    ],
)
def test_each_invalid_recipe_is_refused_with_its_explanation(table: dict, expected: str) -> None:
    assert expected in problems_of(table)


@pytest.mark.parametrize(
    "sections",
    [
        {"loss": {"task_coef": 1.0, "advantage": "reinforce++"}},
        {"loss": {"task_coef": 1.0, "advantage": "gae"}},
        {"loss": {"task_coef": 1.0}, "rollout": {"n": 2}},
        {"loss": {"task_coef": 1.0}, "rollout": {"agent": "mine:Loop"}},
        {"loss": {"advantage": "grpo"}},
    ],
)
def test_one_session_per_prompt_is_accepted_when_advantages_do_not_compare_the_sessions_of_a_prompt(
    sections: dict,
) -> None:
    """The baseline is the whole batch, a critic, or other rows of the session (a user's own loop); or there are no
    rewards."""
    recipe, problems = examine(changed(data={"reward": "m:f"}, **sections))
    assert recipe is not None and problems == []


def test_an_empty_recipe_reports_each_missing_key_once() -> None:
    with pytest.raises(ConfigError) as found:
        parse_recipe({})
    assert [str(line).partition(";")[0].partition(":")[0] for line in found.value.problems] == [
        "`student.model` is missing",
        "`data.train` is missing",
        "no teacher",
    ]


def test_all_problems_of_a_recipe_are_reported_together() -> None:
    """A misspelt key does not hide the problems that only a whole-section or cross-section check finds."""
    text = problems_of(
        changed(student={"modle": "x"}, loss={"topk": "8", "task_coef": 1.0}, trainer={"steps": -1})
    )
    for expected in ("student.modle", "loss.topk", "trainer.steps", "needs data.reward"):
        assert expected in text


def test_integers_are_accepted_as_floats_but_not_floats_as_integers() -> None:
    assert parse_recipe(changed(loss={"distill_coef": 2})).loss.distill_coef == 2.0
    assert "trainer.batch_size" in problems_of(changed(trainer={"batch_size": 4.0}))


@pytest.mark.parametrize(
    "word", ["run.loggers=[wandb]", "data.train=[a.jsonl,b.jsonl]", "teachers={a={model=x}}"]
)
def test_an_override_whose_quotes_the_shell_removed_is_refused_with_that_hint(word: str) -> None:
    """A shell removes the quotes of run.loggers=["wandb"]."""
    with pytest.raises(ConfigError, match=r"is not TOML \(a shell removes quotes\)"):
        apply_overrides({}, [word])
    table: dict[str, Any] = {}
    apply_overrides(table, ["data.train=[ab]*.jsonl", 'run.loggers=["wandb"]'])
    assert table == {"data": {"train": "[ab]*.jsonl"}, "run": {"loggers": ["wandb"]}}


@pytest.mark.parametrize("name", ['teachers."a.b".model', "teachers.'a.b'.model", 'teachers . "a.b" . model'])
def test_a_quoted_name_in_an_override_may_contain_dots(name: str) -> None:
    table: dict[str, Any] = {}
    apply_overrides(table, [f"{name}=x", "teachers.plain.model=y"])
    assert table == {"teachers": {"a.b": {"model": "x"}, "plain": {"model": "y"}}}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("teachers..model=x", "teachers..model has an empty name beside a dot"),
        (".steps=3", ".steps has an empty name"),
        ('teachers."".model=x', "has an empty name"),
        ('teachers."a.model=x', 'teachers."a.model is not a key'),
    ],
)
def test_override_names_that_are_empty_or_half_quoted_are_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        apply_overrides({}, [word])


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(b'\xef\xbb\xbf[student]\r\nmodel = "m"\r\n')
    assert read_tables(path)["student"] == {"model": "m"}


@pytest.mark.parametrize("name", ["", "math/easy", "code+math", "a\nb", "t" * 101])
def test_a_teachers_name_must_be_usable_in_file_names(name: str) -> None:
    _, problems = examine(GOOD | {"teachers": {name: {"model": "m"}}})
    assert len(problems) == 1 and "logs and metrics carry a teacher's name" in problems[0]
    for fine in ("a b", "..", "ü", "math.easy", "t" * 100):
        assert examine(GOOD | {"teachers": {fine: {"model": "m"}}})[1] == []


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (f"run.seed={1 << 64}", "`run.seed` = 18446744073709551616: expected a whole number of at least 0"),
        ("rollout.temperature=1e-300", "temperature = 1e-300 makes logits overflow; write 0"),
        (f"data.train={'x' * 300}", "a file or folder that it names cannot be looked up: [Errno 36] File name too long"),
        (f"student.model={'x' * 300}", "File name too long"),
    ],
)  # fmt: skip
def test_values_that_used_to_fail_during_the_run_or_with_a_raw_error_are_refused(
    tmp_path: Path, word: str, message: str
) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[student]\nmodel = "m"\n[teachers.t]\nmodel = "m"\n[data]\ntrain = "d.jsonl"\n')
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_recipe(path, [word])
    assert load_recipe(path, [f"run.seed={(1 << 64) - 1}"]).run.seed == (1 << 64) - 1


def test_loading_a_recipe_applies_overrides_resolves_paths_and_reports_unreadable_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "d.jsonl").write_text("{}")
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[student]\nmodel = "model"\n[teachers.t]\nmodel = "model"\n[data]\ntrain = "d.jsonl"\n'
    )
    loaded = load_recipe(recipe, ["trainer.steps=7", "run.name=fine", "loss.kind=k2", "loss.signal=sampled"])
    assert loaded.trainer.steps == 7 and loaded.run.name == "fine"
    assert loaded.student.model == str(tmp_path / "model") and loaded.data.train == [
        str(tmp_path / "d.jsonl")
    ]
    with pytest.raises(ConfigError, match="expected key=value"):
        load_recipe(recipe, ["trainer.steps"])
    with pytest.raises(ConfigError, match="is not TOML"):
        recipe.write_text("[student\n")
        load_recipe(recipe)
    with pytest.raises(ConfigError, match="no recipe at"):
        load_recipe(tmp_path / "none.toml")


def test_a_config_error_keeps_its_problems_when_pickled() -> None:
    import pickle

    error = ConfigError(["a", "b"])
    assert pickle.loads(pickle.dumps(error)).problems == ["a", "b"]


@pytest.mark.parametrize(
    "given", [["trainer.steps=3", "trainer.passes=1"], {"trainer.steps": 3, "trainer.passes": 1.0}]
)
def test_overriding_both_steps_and_passes_is_refused_and_one_replaces_the_other(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"both trainer.steps and trainer.passes are given; keep one"):
        apply_overrides(changed(trainer={"steps": 5}), given)
    table = changed(trainer={"steps": 5})
    apply_overrides(table, ["trainer.passes=2"])
    assert table["trainer"] == {"passes": 2}


def test_toml_dates_and_times_become_strings() -> None:
    """TOML has dates, and recipe.json has none."""
    text = "template_date = 2025-07-26\n[template_options]\nday = 2025-07-26\nothers = [{at = 07:32:00}]"
    recipe = parse_recipe(changed(rollout=tomllib.loads(text)))
    assert recipe.rollout.template_date == "2025-07-26"
    assert recipe.rollout.template_options == {"day": "2025-07-26", "others": [{"at": "07:32:00"}]}
    assert parse_recipe(json.loads(json.dumps(recipe.model_dump()))) == recipe
    assert parse_recipe(tomllib.loads(recipe_as_toml(as_tables(recipe)))) == recipe
