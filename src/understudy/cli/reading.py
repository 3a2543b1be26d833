"""A recipe as commands take it: read, overridden, and checked as far as it can be without starting anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from understudy.config import Recipe
from understudy.config.recipe import NOT_GIVEN, examine, read_tables
from understudy.errors import ConfigError
from understudy.planning.preflight import Findings, preflight


def checked_recipe(
    path: Path, overrides: Sequence[str], *, progress: bool = True, findings: Findings | None = None
) -> Recipe:
    """The recipe, or a `ConfigError` with every problem of its keys, models, data and ports together. `findings` takes what else was
    found."""
    recipe, problems = examine(read_tables(path, overrides))
    if recipe is not None:
        # A key that was wrong was taken out before this look; most findings have nothing to do with one another.
        problems += [
            problem
            for problem in preflight(recipe, progress=progress, findings=findings)
            if problem not in problems and NOT_GIVEN not in problem
        ]
    if problems or recipe is None:
        raise ConfigError(problems)
    return recipe
