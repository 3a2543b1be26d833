"""A wrong key is answered with the right one or with the difference, and never with a key of another meaning."""

import re

import pytest

from understudy.config import Recipe, parse_recipe
from understudy.config.messages.keys import fields, kind_of, walk
from understudy.config.messages.synonyms import FAMILIES, KEYS, VALUES
from understudy.config.recipe import apply_overrides
from understudy.errors import ConfigError

SECTIONS = "|".join(Recipe.model_fields)


def refusals(*overrides: str) -> list[str]:
    table = {"student": {"model": "s"}, "teachers": {"t": {"model": "m"}}, "data": {"train": "d.jsonl"}}
    apply_overrides(table, overrides)
    with pytest.raises(ConfigError) as caught:
        parse_recipe(table)
    return caught.value.problems


def keys_in(answer: str) -> list[str]:
    if " " not in answer:
        return [answer]
    return re.findall(rf"`((?:{SECTIONS})\.[\w.]+)`", answer) + re.findall(
        rf"\[((?:{SECTIONS})\.[\w.]+)\]", answer
    )


def test_every_key_to_which_a_synonym_points_exists() -> None:
    named = 0
    for name, answer in {**KEYS, **FAMILIES}.items():
        for path in keys_in(answer):
            place, kind = walk(Recipe, path.split("."))
            assert kind is not None and len(place) == len(path.split(".")), f"{name}: {path}"
            named += 1
    assert len(KEYS) >= 80 and named > 200


def test_no_synonym_is_itself_a_key_of_a_recipe() -> None:
    """Otherwise it would never be looked up, or it would hide the key."""
    ours = dict(fields(Recipe))
    assert not [name for name in KEYS if name in ours]
    for name in KEYS:
        section, _, key = name.rpartition(".")
        _, kind = walk(Recipe, section.replace("*", "NAME").split(".")) if section else (None, None)
        assert kind is None or kind.section is None or key not in kind.section.model_fields, name


def test_every_value_to_which_a_synonym_points_is_allowed() -> None:
    paths = dict(fields(Recipe))
    for end, synonyms in VALUES.items():
        fitting = [field for path, field in paths.items() if path == end or path.endswith(f".{end}")]
        assert fitting, end
        for field in fitting:
            kind = kind_of(field)
            choices = kind.choices or (kind_of(kind.items).choices if kind.items else ())
            assert set(synonyms.values()) <= set(choices) or end == "rollout.agent", end
            assert not set(synonyms) & set(choices), end


@pytest.mark.parametrize(
    ("written", "right", "wrong"),
    [
        ("trainer.total_epochs=5", "`trainer.steps`", "did you mean"),
        ("trainer.save_steps=5", "it is `trainer.checkpoint_every` here", "`trainer.steps`"),
        ("trainer.save_every=5", "it is `trainer.checkpoint_every` here", "sync_every"),
        ("trainer.lend_after=5", "it was removed", "did you mean"),
        ("rollout.top_k=-1", "write 0, which keeps every token", "did you mean"),
        ("trainer.eval_every=-1", "write 0, which evaluates", "did you mean"),
        ("trainer.checkpoint_every=-1", "the last step is always saved", "did you mean"),
        ("trainer.max_steps=5", "it is `trainer.steps` here", "staleness"),
        ("rollout.max_length=5", "`rollout.max_new_tokens`", "did you mean"),
        ("rollout.response_length=5", "it is `rollout.max_new_tokens` here", "context_length"),
        ("trainer.mode=async", "did you mean 'fully_async'?", "mean 'sync'"),
        ("data.truncation=5", "prompt", "data.train`"),
        ("loss.temperature=5", "`rollout.temperature`", "did you mean"),
        ("steps=3", "it is `trainer.steps` here", "did you mean"),
        ("trainer.lr=1", "it is `trainer.learning_rate` here", ""),
        ("lr=1", "it is `trainer.learning_rate` here", ""),
        ("critic.lr=1", "it is `critic.learning_rate` here", "trainer"),
        ("student.lora.r=8", "it is `student.lora.rank` here", ""),
        ("lora.r=8", "it is `student.lora.rank` here", ""),
        ("student.path=x", "it is `student.model` here", ""),
        ("trainer.save_freq=1", "it is `trainer.checkpoint_every` here", ""),
        ("trainer.test_freq=1", "it is `trainer.eval_every` here", ""),
        ("trainer.logger=wandb", "it is `run.loggers` here", ""),
        ("temperature=1", "it is `rollout.temperature` here", ""),
        ("actor_rollout_ref.actor.optim.lr=1", "it is `trainer.learning_rate` here", ""),
        ("actor_rollout_ref.rollout.n=4", "it is `rollout.n` here", ""),
        ("actor_rollout_ref.hybrid_engine=true", "docs/coming-from-verl.md", ""),
        ("+distillation.teacher_models.a.model_path=m", "it is `teachers.NAME.model` here", "student"),
        ("distillation.distillation_loss.topk=8", "it is `loss.topk` here", ""),
        ("teachers.t.path=m", "it is `teachers.t.model` here", "NAME"),
        ("trainer.batch-size=4", "did you mean `trainer.batch_size`?", ""),
        ("trainer.stpes=4", "did you mean `trainer.steps`?", ""),
        ("trainer.gradient_accumulation_steps=4", "`trainer.micro_batch_tokens`", "did you mean"),
        ("student.dtype=bf16", "did you mean 'bfloat16'?", ""),
        ("loss.advantage=ppo", "did you mean 'gae'?", "grpo'?"),
    ],
)
def test_keys_and_values_of_other_projects_are_answered_with_ours(
    written: str, right: str, wrong: str
) -> None:
    line = refusals(written)[0]
    assert right in line
    assert not wrong or wrong not in line


def test_each_key_of_another_projects_table_is_answered_separately() -> None:
    lines = refusals("actor_rollout_ref.actor.ppo_epochs=1", "actor_rollout_ref.rollout.temperature=1")
    assert lines == [
        "unknown key `actor_rollout_ref.actor.ppo_epochs`; it is `trainer.epochs` here",
        "unknown key `actor_rollout_ref.rollout.temperature`; it is `rollout.temperature` here",
    ]


def test_the_answer_to_an_unknown_key_does_not_list_a_whole_section() -> None:
    lines = refusals("trainer.foo=1", "trainer.eval_foo=1", "rollout.bar=2", "baz.qux=3", "gpus=3")
    assert "unknown key `trainer.foo`; `understudy keys trainer` lists all" in lines
    assert any("keys like it: `trainer.eval_every`" in line for line in lines)
    assert all(line.count("`") <= 12 and len(line) < 260 for line in lines)


PHRASES = re.compile(
    r"[Ii]nput should|valid dictionary|valid list|instance of|\[type=|https?://(?!host)|pydantic|Config\b|_type\b"
)


@pytest.mark.parametrize("path", [path for path, _ in fields(Recipe)])
def test_errors_about_wrong_values_contain_no_phrases_of_pydantic(path: str) -> None:
    """Each key gets a string, numbers in and out of range, lists, a table and a boolean; refusals are in our
    own words."""
    key = path.replace("NAME", "t" if path.startswith("teachers") else "p")
    refused = 0
    for value in (
        '"zzz"',
        "-7",
        "-7.5",
        "nan",
        "[]",
        '["zzz", 3]',
        "[{a = 1}]",
        "{zzz = 1}",
        "true",
        "1" + 400 * "0",
    ):
        table = {"student": {"model": "s"}, "teachers": {"t": {"model": "m"}}, "data": {"train": "d.jsonl"}}
        apply_overrides(table, [f"{key}={value}"])
        try:
            parse_recipe(table)
        except ConfigError as error:
            refused += 1
            for line in error.problems:
                assert not PHRASES.search(line) and "\n" not in line and (len(line) < 500 or "000" in line), (
                    line
                )
            assert len(set(error.problems)) == len(error.problems)
            assert not any(f"`{key}` is missing" in line for line in error.problems), error.problems
    assert refused >= 3


@pytest.mark.parametrize("section", list(Recipe.model_fields))
def test_a_value_in_place_of_a_section_is_refused(section: str) -> None:
    for value in ("3", '"x"', "[1]"):
        table = {"student": {"model": "s"}, "teachers": {"t": {"model": "m"}}, "data": {"train": "d.jsonl"}}
        apply_overrides(table, [f"{section}={value}"])
        with pytest.raises(ConfigError) as caught:
            parse_recipe(table)
        first = caught.value.problems[0]
        assert first.startswith(f"`{section}` = ") and "expected a table" in first
        assert not PHRASES.search(str(caught.value))


@pytest.mark.parametrize(
    ("written", "line"),
    [
        (
            "run.loggers=wandb",
            "`run.loggers` = 'wandb': expected a list of 'tensorboard', 'wandb', 'trackio', 'mlflow' or 'opentelemetry'; "
            'write run.loggers = ["wandb"]',
        ),
        ("rollout.stop=END", "`rollout.stop` = 'END': expected a list of strings; write rollout.stop = [\"END\"]"),
        ("trainer.steps='5'", "`trainer.steps` = '5': expected a whole number of at least 1; write it without quotes"),
        ("trainer.max_dead_letters=.5", "`trainer.max_dead_letters` = '.5': expected a number of at least 0 and at most 1; write 0.5"),
        ("rollout.filter_groups=True", "`rollout.filter_groups` = 'True': expected true or false; write true"),
        ("loss.beta=2", "`loss.beta` = 2.0: expected a number of at least 0 and at most 1"),
        ("trainer.solved_at=inf", "`trainer.solved_at` = inf: expected a finite number"),
        ("trainer=5", "`trainer` = 5: expected a table of keys, [trainer]"),
        ("cluster.roles.foo=x", "unknown key `cluster.roles.foo`; cluster.roles takes 'student', 'rollout', 'workers' or 'critic'"),
    ],
)  # fmt: skip
def test_exact_messages_about_wrong_values(written: str, line: str) -> None:
    assert line in refusals(written)
