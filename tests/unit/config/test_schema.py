"""The JSON schema of recipes: complete, current, and consistent with the config models."""

import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from understudy import assets
from understudy.cli.main import main
from understudy.config.messages.keys import NAME, fields
from understudy.config.recipe import examine
from understudy.config.schema import recipe_schema, schema_text
from understudy.config.tables import RecipeTables

ROOT = Path(__file__).parents[3]
SHIPPED = Path(assets.__file__).parent / "recipe.schema.json"
RECIPES = sorted([*ROOT.glob("recipes/**/*.toml"), *ROOT.glob("src/understudy/assets/**/*.toml")])
SCHEMA = recipe_schema()
KEYS = dict(fields(RecipeTables))
SMALL: dict[str, Any] = {
    "student": {"model": "org/student"},
    "teachers": {"math": {"model": "org/teacher"}},
    "data": {"train": "rows.jsonl"},
}


def entry(path: str) -> dict[str, Any]:
    node = SCHEMA
    for part in path.split("."):
        node = node["additionalProperties"] if part == NAME else node["properties"][part]
    return node


def accepts(table: dict[str, Any]) -> bool:
    return bool(jsonschema.Draft7Validator(SCHEMA).is_valid(table))


def test_the_shipped_schema_file_is_current() -> None:
    assert SHIPPED.read_text() == schema_text(), f"run: understudy schema > {SHIPPED.relative_to(ROOT)}"


def test_the_schema_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == schema_text()


def test_the_schema_is_valid_json_schema_without_references_and_nulls() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert "$ref" not in schema_text() and '"null"' not in schema_text()


@pytest.mark.parametrize("path", KEYS)
def test_every_key_in_the_schema_has_a_type_a_description_and_its_default(path: str) -> None:
    found, field = entry(path), KEYS[path]
    assert ("type" in found or "anyOf" in found) and found["description"].strip()
    assert not re.search(r"\s{2}|\n", found["description"])
    if field.is_required() or field.default is None:
        assert "default" not in found
    else:
        assert found["default"] == field.default
        jsonschema.validate(found["default"], found)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_recipe_names_the_schema_and_conforms_to_it(path: Path) -> None:
    text = path.read_text()
    named = re.fullmatch(r"#:schema (\S+)", text.splitlines()[0])
    assert named and (path.parent / named[1]).resolve() == SHIPPED.resolve()
    jsonschema.validate(tomllib.loads(text), SCHEMA)


@pytest.mark.parametrize(
    "wrong",
    [
        {"trainer": {"stepz": 3}},
        {"trainer": {"steps": "3"}},
        {"trainer": {"steps": 0}},
        {"loss": {"kind": "foward_kl"}},
        {"student": {"model": "org/student", "device": "gpu"}},
        {"teachers": {"math": {"model": "org/teacher", "placement": "colocate"}}},
        {"teachers": {"math": {}}},
        {"data": {"train": []}},
        {"cluster": {"roles": {"judge": "pool"}}},
        {"optimizer": {}},
    ],
)
def test_the_schema_and_the_config_models_refuse_the_same_recipes(wrong: dict[str, Any]) -> None:
    assert accepts(SMALL) and not examine(SMALL)[1]
    assert not accepts(SMALL | wrong) and examine(SMALL | wrong)[1]
