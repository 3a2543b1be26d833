"""The JSON schema of recipes, for editors: every key with its type, default and meaning.

The file that ships is `assets/recipe.schema.json`; a recipe names it in its first line (`#:schema PATH`).
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from understudy.config.tables import RecipeTables

_DRAFT = "http://json-schema.org/draft-07/schema#"
"""Known to every editor's TOML plugin, unlike later drafts."""


def recipe_schema() -> dict[str, Any]:
    """Without the rules between keys, which `understudy check` knows."""
    whole = RecipeTables.model_json_schema(schema_generator=_ForToml)
    schema = _inlined(whole, whole.pop("$defs"))
    description = "A recipe of Understudy. `understudy check` also checks the rules between keys."
    return {"$schema": _DRAFT, **schema, "title": "Understudy recipe", "description": description}


def schema_text() -> str:
    return json.dumps(recipe_schema(), indent=1, ensure_ascii=False) + "\n"


class _ForToml(GenerateJsonSchema):
    """TOML has no null: a key that may be None is left out instead."""

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _inlined(node: Any, sections: dict[str, Any]) -> Any:
    """Sections in place of references to them (none is recursive), prose on one line."""
    if isinstance(node, list):
        return [_inlined(one, sections) for one in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        section = sections[node["$ref"].rpartition("/")[2]]
        # The default of a section is that of its keys.
        return _inlined(section | {"description": node.get("description", section["description"])}, sections)
    found: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":
            found[key] = {name: _inlined(one, sections) for name, one in value.items()}
        elif key == "description":
            found[key] = re.sub(r"\s+", " ", value)
        elif key == "default":
            found |= {} if value is None else {key: value}
        elif key != "title":
            found[key] = _inlined(value, sections)
    return found
