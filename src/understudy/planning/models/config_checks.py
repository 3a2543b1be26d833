"""Checks of a model's config.json: remote code, and rotary embeddings that change with length.

Imports no torch and no transformers: `understudy check` runs this.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from understudy.config import Recipe
from understudy.nn.rotary_border import crossing
from understudy.planning.models.folder import ModelFolder


def models_load(
    recipe: Recipe, student: ModelFolder | None, teachers: Mapping[str, ModelFolder]
) -> list[str]:
    """Problems of the student and of the teachers that the run starts itself."""
    problems = []
    trusted = recipe.student.trust_remote_code
    if student:
        problems += _brings_code(student, "student", trusted)
        problems += stays_within_border(recipe, student)
    for name, folder in teachers.items():
        problems += _brings_code(folder, f"teachers.{name}", recipe.teachers[name].trust_remote_code)
    return problems


def stays_within_border(recipe: Recipe, student: ModelFolder) -> list[str]:
    """If the student's rotary embedding changes beyond a length, all rollouts must stay below it."""
    border, room = student.rotary_border, recipe.rollout.context_length or student.context
    if border is None or room is None or room <= border:
        return []
    return [crossing(f"student.model = {str(student.path)!r}", border, room)]


def _brings_code(folder: ModelFolder, section: str, trusted: bool) -> list[str]:
    """A folder's own code is needed only for model types that transformers lacks: it prefers its own."""
    kind, brought = str(folder.config.get("model_type")), folder.config.get("auto_map")
    if not brought or trusted or _known_to_transformers(kind):
        return []
    return [
        f"{section}.model = {str(folder.path)!r}: its code comes with the model (auto_map in config.json), and transformers has no "
        f"model type {kind!r} of its own; set {section}.trust_remote_code = true if you trust that code"
    ]


@lru_cache
def _known_to_transformers(kind: str) -> bool:
    """Reads the list of model types from its source files; importing it would import torch."""
    found = find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return True
    lists = Path(found.submodule_search_locations[0]).glob("models/auto/*.py")
    return any(f'"{kind}"' in file.read_text(encoding="utf-8") for file in lists)
