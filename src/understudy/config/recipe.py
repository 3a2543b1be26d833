"""The whole recipe, and the checks across its sections.

    recipe = load_recipe(Path("recipe.toml"), ["trainer.steps=10"])

All problems are collected before any is reported, so a user can fix a recipe in one go.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from understudy.config.base import nearest, unwrap
from understudy.config.checks.aligned_teachers import NEUTRAL_SAMPLING, aligned_teacher_problems
from understudy.config.checks.capacity import capacity_problems
from understudy.config.checks.cluster import cluster_problems
from understudy.config.checks.fully_async import async_problems
from understudy.config.checks.idle_keys import idle_problems
from understudy.config.checks.objective import objective_problems
from understudy.config.checks.self_teachers import self_teacher_problems, with_self_teachers
from understudy.config.messages.explain import Finding, explain
from understudy.config.messages.keys import KeyType, walk
from understudy.config.messages.synonyms import REMOVED
from understudy.config.models import TeacherConfig
from understudy.config.paths import resolve_paths
from understudy.config.tables import RecipeTables
from understudy.errors import ConfigError

Overrides = Sequence[str] | Mapping[str, Any]
"""`["section.key=value", …]`, as on a command line, or `{"section.key": value}`."""
_LONGEST_NAME = 100
"""Characters of a teacher's name, of which a log's file name has a few more."""
NOT_GIVEN = "<not given>"
"""Placeholder for a required key that is missing or wrong, while the rest is checked. Findings about it are
not reported."""


class Recipe(RecipeTables):
    """The recipe of one run. Every key that is not written has a default that suits most runs."""

    def with_steps(self, rows: int) -> Recipe:
        """The same recipe with `trainer.steps` computed from `trainer.passes` over this many rows."""
        if self.trainer.passes is None:
            return self
        trainer = self.trainer.model_copy(update={"steps": self.trainer.steps_over(rows), "passes": None})
        return self.model_copy(update={"trainer": trainer})

    @model_validator(mode="before")
    @classmethod
    def _name_the_student(cls, table: Any) -> Any:
        return with_self_teachers(table)

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        problems = _cross_checks(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a TOML recipe, apply `key=value` overrides, resolve paths relative to the recipe, and check it."""
    return parse_recipe(read_tables(path, overrides))


def read_tables(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A recipe's plain tables, overrides applied and paths resolved, not yet checked."""
    if not path.is_file():
        raise ConfigError(f"no recipe at {path}; give the path of a TOML file")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    apply_overrides(table, overrides)
    try:
        resolve_paths(table, path.parent)
    except (OSError, ValueError) as error:  # a name that is too long, or holds a zero byte
        raise ConfigError(f"{path}: a file or folder that it names cannot be looked up: {error}") from None
    return table


def apply_overrides(table: dict[str, Any], overrides: Overrides) -> None:
    """Set each override in the plain tables of a recipe."""
    problems = []
    given = {str(one).partition("=")[0].strip() for one in overrides}
    if given.issuperset(f"trainer.{name}" for name in _LENGTHS):
        problems.append(
            "both trainer.steps and trainer.passes are given; keep one: steps, or passes over the data"
        )
    for override in overrides:
        try:
            if isinstance(overrides, Mapping):
                set_key(table, override, overrides[override], f"{override} = {overrides[override]!r}")
            else:
                _apply(table, override)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def parse_recipe(table: Mapping[str, Any]) -> Recipe:
    """A checked recipe from plain tables; raises `ConfigError` with every problem at once."""
    recipe, problems = examine(table)
    if problems or recipe is None:
        raise ConfigError(problems)
    return recipe


def stored(table: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a run's recipe.json, which lists every key, without those that this version has no more
    and that the run had not set. One that it had set is left in, and refused when the tables are parsed."""

    def was_set(name: str, value: Any) -> bool:
        old = [default for removed, default in REMOVED.items() if fnmatchcase(name, removed)]
        return value not in (None, False, [], {}, *old)

    def kept(part: Any, place: list[str]) -> Any:
        _, kind = walk(Recipe, place)
        if kind is None or not isinstance(part, Mapping):
            return part
        known = part if kind.section is None else kind.section.model_fields
        return {
            name: kept(value, [*place, name])
            for name, value in part.items()
            if name in known or was_set(".".join([*place, name]), value)
        }

    return dict(kept(table, []))


def examine(table: Mapping[str, Any]) -> tuple[Recipe | None, list[str]]:
    """Every problem of a recipe, and the recipe as far as it can be understood.

    A validator of a whole section only runs once its keys are valid. So each offending key is reported and
    removed, and the rest is checked again, until nothing new is found.
    """
    # A missing section is treated as an empty one: each missing key is reported by name, once.
    needed: dict[str, Any] = {name: {} for name, field in Recipe.model_fields.items() if field.is_required()}
    current: dict[str, Any] = needed | _floats(_days_as_text(table))
    problems: list[str] = []
    for _ in range(4):
        try:
            return Recipe.model_validate(current), problems
        except ValidationError as error:
            findings = explain(error, Recipe)
            problems += [line for finding in findings for line in finding.lines if line not in problems]
            current = copy.deepcopy(current)
            mended = [_mend(current, finding) for finding in findings]
            if not all(mended):
                break
    return None, problems


def _mend(table: Any, finding: Finding) -> bool:
    """Removes one offending key (or puts in a placeholder if it is required), so that the rest can be
    checked."""
    if not finding.movable:
        return False
    within: list[str] = []
    for part in finding.place:
        if not isinstance(table, dict):
            break
        holder, key = table, str(part)
        within.append(key)
        table = table.get(key)
    holder.pop(key, None)
    _, kind = walk(Recipe, within)
    _, around = walk(Recipe, within[:-1])
    field = around.section.model_fields.get(key) if around and around.section else None
    named = (
        around is not None and around.values is not None
    )  # a teacher or a pool: other sections refer to it by name
    if kind is not None and (named or (field is not None and field.is_required())):
        holder[key] = _placeholder(kind)
    return True


def _placeholder(kind: KeyType) -> Any:
    """The smallest placeholder for a required key."""
    if kind.section is None:
        return NOT_GIVEN
    return {name: NOT_GIVEN for name, field in kind.section.model_fields.items() if field.is_required()}


_LENGTHS = ("steps", "passes")


def _apply(table: dict[str, Any], override: str) -> None:
    """Sets one `section.key=value`; the value is parsed as TOML, or taken as a plain string if it is not
    TOML."""
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"override {override!r}: expected key=value, for example trainer.steps=10")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
        if value[:1] + value[-1:] in ("[]", "{}"):
            example = 'run.loggers=["wandb"]'
            raise ConfigError(
                f"override {override!r}: a list or table that is not TOML (a shell removes quotes); texts in it are quoted, and the whole "
                f"word once more: '{example}'"
            ) from None
    set_key(table, name.strip(), value, f"override {override!r}")


def set_key(table: dict[str, Any], name: str, value: Any, shown: str) -> None:
    """Sets one `section.key`; `shown` is what the error message shows as given."""
    *sections, key = _parts(name, shown)
    for section in sections:
        if table.get(section) is None:  # a run directory writes omitted sections as null
            table[section] = {}
        table = table[section]
        if not isinstance(table, dict):
            raise ConfigError(f"{shown}: `{section}` is a value, not a section")
    if (
        sections == ["trainer"] and key in _LENGTHS
    ):  # the length is given as steps or as passes; an override replaces both
        for other in _LENGTHS:
            table.pop(other, None)
    table[key] = value


def _parts(name: str, shown: str) -> list[str]:
    """The names of a dotted key. A quoted one may hold dots, as in TOML."""
    if '"' in name or "'" in name:
        try:
            inner: Any = tomllib.loads(f"{name} = 0")
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{shown}: {name} is not a key ({error})") from None
        parts = []
        while isinstance(inner, dict):
            [(part, inner)] = inner.items()
            parts.append(part)
    else:
        parts = name.split(".")
    if not all(parts):
        raise ConfigError(f"{shown}: {name} has an empty name beside a dot; expected section.key")
    return parts


def _days_as_text(value: Any) -> Any:
    """TOML's dates and times as text: recipe.json has none, and `template_date = 2026-11-19` is easily written."""
    if isinstance(value, Mapping):
        return {name: _days_as_text(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_days_as_text(one) for one in value]
    return value.isoformat() if isinstance(value, date | time) else value


def _floats(table: Any, model: Any = Recipe) -> Any:
    """Converts whole numbers where a float is expected (`distill_coef = 1`); nothing else is coerced."""
    if not isinstance(table, Mapping):
        return table
    fields = getattr(model, "model_fields", {})
    result: dict[str, Any] = {}
    for key, value in table.items():
        annotation = fields[key].annotation if key in fields else None
        if key == "teachers" and isinstance(value, Mapping):
            result[key] = {name: _floats(entry, TeacherConfig) for name, entry in value.items()}
        elif isinstance(value, Mapping):
            result[key] = _floats(value, unwrap(annotation))
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and "float" in str(annotation)
            and "int" not in str(annotation)
            and abs(value) < 1 << 1000  # a larger one has no float, and is refused unchanged
        ):
            result[key] = float(value)
        else:
            result[key] = value
    return result


def _cross_checks(recipe: Recipe) -> list[str]:
    """Problems that no single section can detect."""
    problems = []
    loss, teachers = recipe.loss, recipe.teachers
    if loss.distill_coef == 0 and loss.task_coef == 0:
        if loss.sft_coef == 0:
            problems.append(
                "loss.distill_coef and loss.task_coef are both 0: nothing would be learnt; set one above 0, or learn from given "
                "answers alone (loss.sft_coef = 1 and rollout.off_policy = 1)"
            )
        elif recipe.rollout.off_policy < 1:
            problems.append(
                f"loss.sft_coef is the only term, and rollout.off_policy = {recipe.rollout.off_policy:g}: the student's own answers "
                "would teach it nothing; set rollout.off_policy = 1, or loss.distill_coef or loss.task_coef above 0"
            )
    if loss.distill_coef > 0 and not teachers:
        problems.append(
            "no teacher: add a [teachers.NAME] table, or set loss.distill_coef = 0 to train on rewards alone"
        )
    if loss.task_coef > 0 and recipe.data.reward is None:
        problems.append("loss.task_coef > 0 needs data.reward, a function that scores an answer")
    if loss.teacher_temperature != 1.0 and loss.signal != "hidden":
        problems.append(
            f"loss.teacher_temperature = {loss.teacher_temperature} needs loss.signal = 'hidden': "
            f"scores at a few ids ('{loss.signal}') cannot be computed for another temperature"
        )
    trained = {"student.dtype": recipe.student.dtype}
    if recipe.critic is not None:
        trained["critic.dtype"] = recipe.critic.dtype
    problems += [
        f"{key} = 'float16': the gradients of a large batch are too small for it and vanish without an error; use 'bfloat16' or 'float32'"
        for key, dtype in trained.items()
        if dtype == "float16"
    ]
    problems += _engine(recipe)
    if recipe.trainer.eval_k > 1 and recipe.rollout.temperature == 0:
        problems.append(
            f"trainer.eval_k = {recipe.trainer.eval_k} with rollout.temperature = 0: all samples of a problem would be the same; "
            "raise the temperature, or set trainer.eval_k = 0"
        )
    apart = recipe.cluster.backend == "ray"
    if apart and recipe.trainer.ranks > 1 and recipe.student.device.startswith("cuda:"):
        problems.append(
            f"student.device = {recipe.student.device!r} with trainer.ranks = {recipe.trainer.ranks} and cluster.backend = 'ray': "
            "each rank takes its own GPU there; write student.device = 'cuda'"
        )
    problems += [
        f"teachers.{name!r}: logs and metrics carry a teacher's name; choose one of 1 to {_LONGEST_NAME} characters without '/', '+' "
        "(which joins the names of a mixture) and control characters (the value of the rows it scores is its `key`)"
        for name in teachers
        if not 1 <= len(name) <= _LONGEST_NAME or {*"/+"} & {*name} or not name.isprintable()
    ]
    problems += objective_problems(recipe)
    problems += idle_problems(recipe)
    problems += aligned_teacher_problems(recipe)
    problems += self_teacher_problems(recipe)
    problems += async_problems(recipe.trainer, recipe.rollout, recipe.run, recipe.teachers, recipe.cluster)
    problems += capacity_problems(recipe.trainer, recipe.rollout, recipe.dataplane)
    problems += _routing(recipe)
    problems += _pools(recipe)
    problems += cluster_problems(recipe.cluster, recipe.dataplane)
    return problems


def _engine(recipe: Recipe) -> list[str]:
    """Features of the recipe that the chosen engine does not support."""
    rollout, problems = recipe.rollout, []
    if rollout.engine != "hf" and recipe.run.determinism == "full":
        problems.append(
            f"run.determinism = 'full' needs rollout.engine = 'hf': a {rollout.engine} server batches requests as they come, "
            "so a run cannot repeat to the bit; leave run.determinism out"
        )
    if recipe.loss.signal != "at_ids" or rollout.engine == "hf":
        return problems
    if rollout.engine == "openai":
        problems.append(
            "loss.signal = 'at_ids' needs the student's own candidates, which rollout.engine = 'openai' does not report; use "
            "'hf', 'vllm' or 'sglang', or loss.signal = 'topk'"
        )
    problems += [
        f"loss.signal = 'at_ids' with rollout.{key} = {getattr(rollout, key)}: a {rollout.engine} server names candidates of the "
        f"filtered distribution, not the student's own; leave rollout.{key} out, or use rollout.engine = 'hf'"
        for key, value in NEUTRAL_SAMPLING.items()
        if getattr(rollout, key) != value
    ]
    return problems


def _routing(recipe: Recipe) -> list[str]:
    teachers, default = recipe.teachers, recipe.data.default_teacher
    problems = []
    if len(teachers) > 1:
        keyless = [name for name, teacher in teachers.items() if teacher.key is None and name != default]
        problems += [
            f"teachers.{name}.key is missing: with several teachers each names the rows it scores"
            for name in keyless
        ]
    keys = [teacher.key for teacher in teachers.values() if teacher.key is not None]
    for key in sorted({key for key in keys if keys.count(key) > 1}):
        problems.append(f"two teachers have key = {key!r}; a row goes to one teacher")
    if default is not None and default not in teachers:
        guess = nearest(default, teachers)
        hint = f"did you mean {guess!r}?" if guess else f"teachers: {', '.join(teachers) or 'none'}"
        problems.append(f"data.default_teacher = {default!r} is not a teacher of this recipe; {hint}")
    return problems


def _pools(recipe: Recipe) -> list[str]:
    """Checks that every named pool exists; on one machine a pool is a slice of that machine."""
    pools, problems = recipe.cluster.pools, []
    named = {f"cluster.roles.{role}": pool for role, pool in recipe.cluster.roles.items()}
    named |= {
        f"teachers.{name}.pool": teacher.pool for name, teacher in recipe.teachers.items() if teacher.pool
    }
    for place, pool in named.items():
        if pool not in pools:
            guess = nearest(pool, pools)
            hint = f"did you mean {guess!r}?" if guess else f"pools: {', '.join(pools) or 'none'}"
            problems.append(f"{place} = {pool!r} is not one of [cluster.pools]; {hint}")
    if recipe.cluster.backend == "local":
        problems += [
            f"cluster.pools.{name}.nodes = {pool.nodes}: backend = 'local' is this one machine; set nodes = 1"
            for name, pool in pools.items()
            if pool.nodes > 1
        ]
    return problems
