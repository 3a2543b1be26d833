"""Keys of ranks, evaluation, adapters and the cluster that contradict each other."""

from typing import Any

import pytest

from understudy.config import Recipe, parse_recipe
from understudy.config.base import Section, unwrap
from understudy.errors import ConfigError


def recipe(**sections: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {
        "student": {"model": "s"},
        "teachers": {"t": {"model": "t"}},
        "data": {"train": "d"},
    }
    for name, keys in sections.items():
        table[name] = {**table.get(name, {}), **keys}
    return table


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"trainer": {"ranks": 2}, "student": {"device": "cuda:0"}, "cluster": {"backend": "ray"}},
            "student.device = 'cuda'",
        ),
        ({"trainer": {"eval_k": 4}, "rollout": {"temperature": 0.0}}, "would be the same"),
        ({"trainer": {"ranks": 0}}, "trainer.ranks"),
        ({"student": {"lora": {"publish": "adapter"}}}, "where no weights travel; set rollout.processes"),
        (
            {"student": {"lora": {"publish": "adapter"}}, "rollout": {"engine": "vllm"}},
            "vllm servers get merged weights",
        ),
        (
            {"cluster": {"backend": "ray", "address": "ray://10.0.0.1:10001"}},
            "the trainer is one of its machines",
        ),
        ({"cluster": {"restarts": {"workers": -1}}}, "cluster.restarts.workers"),
        ({"trainer": {"eval_k": -1}}, "trainer.eval_k"),
    ],
)
def test_each_invalid_combination_is_refused_with_one_problem(
    sections: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_recipe(recipe(**sections))
    assert len(caught.value.problems) == 1, "one mistake is reported once"


def test_valid_combinations_of_ranks_evaluation_and_adapters_are_accepted() -> None:
    parsed = parse_recipe(recipe(trainer={"ranks": 4, "eval_k": 8}, student={"device": "cuda"}))
    assert parsed.trainer.ranks == 4 and parsed.trainer.keep_best and parsed.trainer.async_save
    adapted = parse_recipe(recipe(student={"lora": {"publish": "adapter"}}, rollout={"processes": 2}))
    assert adapted.student.lora is not None and adapted.student.lora.publish == "adapter"
    assert parse_recipe(recipe(trainer={"eval_k": 1}, rollout={"temperature": 0.0})).trainer.eval_k == 1


def float_keys(section: type[Section] = Recipe, place: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all keys of a recipe that take a float."""
    found = []
    for name, field in section.model_fields.items():
        kind = unwrap(field.annotation)
        inner = unwrap(kind) if field.annotation is not None and "dict" in str(field.annotation) else kind
        if isinstance(inner, type) and issubclass(inner, Section):
            found += float_keys(inner, (*place, name, *(("t",) if inner is not kind else ())))
        elif "float" in str(field.annotation) and "Literal" not in str(field.annotation):
            found.append((*place, name))
    return found


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinity_and_nan_are_refused_for_every_float_key(value: float) -> None:
    keys = float_keys()
    assert {
        ("trainer", "max_staleness"),
        ("loss", "correction", "cap"),
        ("teachers", "t", "deadline_seconds"),
    } < {*keys}
    for place in keys:
        table = recipe()
        inner = table
        for part in place[:-1]:
            inner = inner.setdefault(part, {})
        inner[place[-1]] = value
        with pytest.raises(ConfigError, match=f"`{'.'.join(place)}` = {value}: expected a finite number"):
            parse_recipe(table)
