"""A recipe written as TOML loads as an equal recipe."""

from pathlib import Path

import pytest

from understudy.cli.main import main
from understudy.config import Recipe, parse_recipe
from understudy.config.messages.keys import fields
from understudy.config.recipe import load_recipe
from understudy.config.toml import as_tables, recipe_as_toml

ROOT = Path(__file__).parents[3]
SHIPPED = sorted([*ROOT.glob("recipes/**/*.toml"), *ROOT.glob("src/understudy/assets/**/recipe.toml")])
ODD = {
    "student": {"model": 'a "quoted" \\ folder\twith\x7f é 漢', "lora": {"rank": 4}},
    "teachers": {"a.b c": {"model": "m", "key": "x"}, "plain": {"model": "m", "key": ""}},
    "data": {"train": ["a.jsonl", "b.jsonl"], "reward": "m:f"},
    "trainer": {"passes": 1.5, "learning_rate": 1e-5},
    "rollout": {
        "agent": "tool",
        "agent_options": {"tool": {"tools": ["calculator"], "max_turns": 3}, "m:Loop": {"deep": {"er": [1, {"x": True}]}}},
        "template_options": {"enable_thinking": False},
        "stop": ["\n\n", "]"],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_recipes_written_as_toml_load_as_equal_recipes(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    (tmp_path / "r.toml").write_text(recipe_as_toml(as_tables(recipe)))
    assert load_recipe(tmp_path / "r.toml") == recipe


def test_unusual_names_and_values_written_as_toml_load_as_an_equal_recipe(tmp_path: Path) -> None:
    recipe = parse_recipe(ODD)
    (tmp_path / "r.toml").write_text(recipe_as_toml(as_tables(recipe)))
    assert load_recipe(tmp_path / "r.toml") == recipe


def test_plan_with_toml_prints_a_recipe_with_every_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "src/understudy/assets/quickstart/recipe.toml"
    assert main(["plan", str(path), "--toml", "trainer.steps=7"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "all.toml").write_text(text)
    again = load_recipe(tmp_path / "all.toml")
    assert again == load_recipe(path, ["trainer.steps=7"])
    for name, field in fields(Recipe):
        if name.startswith("trainer.") and field.default is not None:
            assert f"\n{name.partition('.')[2]} = " in text, name
