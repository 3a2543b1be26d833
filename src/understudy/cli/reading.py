"""Reads a recipe for a command: overrides applied, and checked as far as possible without starting it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from understudy.config import Recipe
from understudy.config.recipe import NOT_GIVEN, examine, read_tables
from understudy.errors import ConfigError
from understudy.planning.preflight import Findings, preflight
from understudy.run.entry import early_fork_server

_WRONG_VALUE = re.compile(r"`([\w.]+)` = ")
"""The beginning of a problem with one key's value."""


@contextmanager
def recipe_to_run(path: Path, overrides: Sequence[str], *, progress: bool = True) -> Iterator[Recipe]:
    """The checked recipe of a run that the block starts. Its teachers' processes import while it is checked."""
    with ExitStack() as stack:

        def import_ahead(recipe: Recipe) -> None:
            stack.enter_context(early_fork_server(recipe.cluster, recipe.teachers))

        yield checked_recipe(path, overrides, progress=progress, before_checks=import_ahead)


def checked_recipe(
    path: Path,
    overrides: Sequence[str],
    *,
    progress: bool = True,
    findings: Findings | None = None,
    new_run: bool = True,
    before_checks: Callable[[Recipe], object] | None = None,
) -> Recipe:
    """The recipe, or a `ConfigError` with every problem of its keys, models, data and ports together.
    `findings` receives everything else that was found, for a command that starts nothing. `new_run`: its
    run.dir must be free. `before_checks` is called with a recipe whose values are right, before the seconds that the
    other checks take."""
    recipe, problems = examine(read_tables(path, overrides))
    if recipe is not None and not problems and before_checks is not None:
        before_checks(recipe)
    if recipe is not None:
        # Wrong values were taken out before this check, so their keys have defaults in it that the user did not give.
        assumed = [NOT_GIVEN, *(found[1] for one in problems if (found := _WRONG_VALUE.match(one)))]
        problems += [
            problem
            for problem in preflight(
                recipe, progress=progress, findings=findings, starting=findings is None, new_run=new_run
            )
            if problem not in problems and not any(key in problem for key in assumed)
        ]
    if problems or recipe is None:
        raise ConfigError(problems)
    return recipe
