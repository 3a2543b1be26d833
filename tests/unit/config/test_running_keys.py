"""Keys of ranks, evaluation and loggers that do not go together."""

from typing import Any

import pytest

from understudy.config import parse_recipe
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
    ("sections", "said"),
    [
        ({"trainer": {"ranks": 2}, "student": {"device": "cuda:0"}}, "student.device = 'cuda'"),
        ({"trainer": {"ranks": 2, "offload_optimizer": True}}, "spreads the optimizer's state"),
        ({"trainer": {"ranks": 2, "optimizer": "adamw_8bit"}}, "spreads the optimizer's state"),
        ({"trainer": {"eval_k": 4}, "rollout": {"temperature": 0.0}}, "would be the same"),
        ({"trainer": {"ranks": 0}}, "trainer.ranks"),
        ({"trainer": {"eval_k": -1}}, "trainer.eval_k"),
    ],
)
def test_refused_with_a_reason(sections: dict[str, dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_recipe(recipe(**sections))


def test_what_goes_together() -> None:
    parsed = parse_recipe(recipe(trainer={"ranks": 4, "eval_k": 8}, student={"device": "cuda"}))
    assert parsed.trainer.ranks == 4 and parsed.trainer.keep_best and parsed.trainer.async_save
    assert parse_recipe(recipe(trainer={"eval_k": 1}, rollout={"temperature": 0.0})).trainer.eval_k == 1
