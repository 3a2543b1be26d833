"""The whole recipe, and the checks that look across its sections.

    recipe = load_recipe(Path("recipe.toml"), ["trainer.steps=10"])

Every problem is collected before anything is said: a user mends a recipe in one go.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from understudy.config.base import Section, explain, nearest
from understudy.config.loss import LossConfig
from understudy.config.models import StudentConfig, TeacherConfig
from understudy.config.rollout import DataConfig, RolloutConfig
from understudy.config.trainer import ClusterConfig, DataPlaneConfig, RunConfig, TrainerConfig
from understudy.errors import ConfigError


class Recipe(Section):
    """One run, whole. Everything not written has a default that is right for most."""

    student: StudentConfig
    teachers: dict[str, TeacherConfig] = Field(default={})
    data: DataConfig
    loss: LossConfig = LossConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    dataplane: DataPlaneConfig = DataPlaneConfig()
    cluster: ClusterConfig = ClusterConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        problems = _cross_checks(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a TOML recipe, apply `key=value` overrides, resolve paths beside the recipe, and check it."""
    return parse_recipe(read_tables(path, overrides))


def read_tables(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A recipe's plain tables, overrides applied and paths resolved, not yet checked."""
    if not path.is_file():
        raise ConfigError(f"no recipe at {path}; give the path of a TOML file")
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    problems = []
    for override in overrides:
        try:
            _apply(table, override)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    _resolve_paths(table, path.parent)
    return table


def parse_recipe(table: Mapping[str, Any]) -> Recipe:
    """A checked recipe from plain tables; raises `ConfigError` with every problem at once."""
    recipe, problems = examine(table)
    if problems or recipe is None:
        raise ConfigError(problems)
    return recipe


def examine(table: Mapping[str, Any]) -> tuple[Recipe | None, list[str]]:
    """Every problem of a recipe, and the recipe as far as it can be understood.

    A validator that looks at a whole section only runs once its keys are right. So each offending key is told, taken
    out, and the rest is looked at again, until nothing new is found.
    """
    current: dict[str, Any] = _floats(table)
    problems: list[str] = []
    for _ in range(4):
        try:
            return Recipe.model_validate(current), problems
        except ValidationError as error:
            problems += [
                line for entry in explain(error, Recipe) for line in entry.split("\n") if line not in problems
            ]
            current = copy.deepcopy(current)
            if not all(_mend(current, finding["loc"], finding["type"]) for finding in error.errors()):
                break
    return None, problems


def _mend(table: Any, place: tuple[int | str, ...], kind: str) -> bool:
    """Take one offending key out (or put a missing one in, empty), so that the rest can be looked at."""
    if not place or kind in ("value_error", "model_type"):
        return False
    *sections, key = place
    for section in sections:
        if not isinstance(table, dict) or section not in table:
            return False
        table = table[section]
    if not isinstance(table, dict):
        return False
    if kind == "missing":
        table[key] = "" if key in ("model", "train") else {}
    else:
        table.pop(key, None)
    return True


def _apply(table: dict[str, Any], override: str) -> None:
    """Set one `section.key=value`; the value is read as TOML, or as a plain string where it is none."""
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"override {override!r}: expected key=value, for example trainer.steps=10")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, key = name.strip().split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: `{section}` is a value, not a section")
    table[key] = value


def _resolve_paths(table: dict[str, Any], base: Path) -> None:
    """Model folders and data files named in a recipe are looked up beside the recipe first."""

    def resolved(value: Any) -> Any:
        if isinstance(value, str) and not Path(value).is_absolute() and (base / value).exists():
            return str((base / value).resolve())
        return value

    models = [table.get("student"), *_tables(table.get("teachers"))]
    for section in models:
        if isinstance(section, dict) and "model" in section:
            section["model"] = resolved(section["model"])
    data = table.get("data")
    if isinstance(data, dict):
        for key in ("train", "eval"):
            if key in data:
                data[key] = resolved(data[key])


def _tables(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []


def _floats(table: Any, model: Any = Recipe) -> Any:
    """Whole numbers where a float is expected are fine (`distill_coef = 1`); nothing else is coerced."""
    if not isinstance(table, Mapping):
        return table
    fields = getattr(model, "model_fields", {})
    result: dict[str, Any] = {}
    for key, value in table.items():
        annotation = fields[key].annotation if key in fields else None
        if key == "teachers" and isinstance(value, Mapping):
            result[key] = {name: _floats(entry, TeacherConfig) for name, entry in value.items()}
        elif isinstance(value, Mapping):
            result[key] = _floats(value, annotation)
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and "float" in str(annotation)
            and "int" not in str(annotation)
        ):
            result[key] = float(value)
        else:
            result[key] = value
    return result


def _cross_checks(recipe: Recipe) -> list[str]:
    """What no section can see alone."""
    problems = []
    loss, teachers = recipe.loss, recipe.teachers
    if loss.distill_coef == 0 and loss.task_coef == 0:
        problems.append(
            "loss.distill_coef and loss.task_coef are both 0: nothing would be learnt; set one above 0"
        )
    if loss.distill_coef > 0 and not teachers:
        problems.append(
            "no teacher: add a [teachers.NAME] table, or set loss.distill_coef = 0 to train on rewards alone"
        )
    if loss.task_coef > 0 and recipe.data.reward is None:
        problems.append("loss.task_coef > 0 needs data.reward, a function that judges an answer")
    if loss.teacher_temperature != 1.0 and loss.signal != "hidden":
        problems.append(
            f"loss.teacher_temperature = {loss.teacher_temperature} needs loss.signal = 'hidden': "
            f"scores at a few ids ('{loss.signal}') cannot be re-tempered"
        )
    if loss.signal == "at_ids":
        problems.append(
            "loss.signal = 'at_ids' is served by teachers and known to the losses, but no engine reports the student's own "
            "candidates to the trainer yet; use 'topk' or 'hidden'"
        )
    problems += _routing(recipe)
    return problems


def _routing(recipe: Recipe) -> list[str]:
    teachers, default = recipe.teachers, recipe.data.default_teacher
    problems = []
    if len(teachers) > 1:
        keyless = [name for name, teacher in teachers.items() if teacher.key is None and name != default]
        problems += [
            f"teachers.{name}.key is missing: with several teachers each names the rows it judges"
            for name in keyless
        ]
    keys = [teacher.key for teacher in teachers.values() if teacher.key is not None]
    for key in sorted({key for key in keys if keys.count(key) > 1}):
        problems.append(f"two teachers have key = {key!r}; a row goes to one teacher")
    if default is not None and default not in teachers:
        guess = nearest(default, teachers)
        hint = f"did you mean {guess!r}?" if guess else f"teachers: {', '.join(teachers) or 'none'}"
        problems.append(f"data.default_teacher = {default!r} is no teacher of this recipe; {hint}")
    return problems
