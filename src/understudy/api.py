"""The same runs from Python: `understudy.train(recipe)` and `understudy.distill(student=…, teacher=…, data=…)`."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.config import Recipe, load_recipe, parse_recipe
from understudy.errors import ConfigError, UnderstudyError
from understudy.trainers.early import begun_early
from understudy.trainers.ending import run_to_its_end


@dataclass(frozen=True, slots=True)
class Run:
    """A run that ended: where it left its files, and how it went."""

    dir: Path
    steps: int
    """Steps taken in all, earlier launches of the same run included."""
    metrics: list[dict[str, Any]]
    """Every line of metrics.jsonl."""

    @property
    def last(self) -> dict[str, Any]:
        return self.metrics[-1] if self.metrics else {}

    def export(self, out: str | Path, *, best: bool = False) -> Path:
        """Write the trained student as a Hugging Face folder: the latest, or the best by held-out accuracy."""
        from understudy.trainers.export import export_run  # noqa: PLC0415 - imports torch

        return export_run(self.dir, Path(out), best=best)


def train(recipe: Recipe | Mapping[str, Any] | str | Path, *, progress: bool = True) -> Run:
    """Run a recipe (a `Recipe`, plain tables, or the path of a TOML file) to its end."""
    from understudy.trainers.preflight import preflight  # noqa: PLC0415 - trainers import this module

    _refuse_a_running_loop()
    if isinstance(recipe, str | Path):
        recipe = load_recipe(Path(recipe))
    elif not isinstance(recipe, Recipe):
        recipe = parse_recipe(recipe)
    problems = preflight(recipe, progress=progress)
    if problems:
        raise ConfigError(problems)
    with begun_early(recipe):
        from understudy.trainers.launch import launch  # noqa: PLC0415 - imports torch

        return run_to_its_end(launch(recipe, progress=progress))


def distill(
    *,
    student: str | Path,
    teacher: str | Path | Mapping[str, str | Path],
    data: str | Path | Sequence[Mapping[str, Any]],
    eval_data: str | Path | None = None,
    reward: str | None = None,
    progress: bool = True,
    **overrides: Any,
) -> Run:
    """Distil `teacher` into `student` on the student's own rollouts.

    `teacher` is one model, or `{data_source: model}` for several. `data` is a jsonl or parquet file, or a list of rows.
    Any other recipe key goes in as `section__key=value`, for example `trainer__steps=200, loss__topk=32`.
    """
    table: dict[str, Any] = {"student": {"model": str(student)}, "data": {}, "teachers": {}}
    if isinstance(teacher, Mapping):
        table["teachers"] = {
            _name(key): {"model": str(model), "key": key if len(teacher) > 1 else None}
            for key, model in teacher.items()
        }
    else:
        table["teachers"] = {"teacher": {"model": str(teacher)}}
    if eval_data is not None:
        table["data"]["eval"] = str(eval_data)
    if reward is not None:
        table["data"]["reward"] = reward
    for name, value in overrides.items():
        *sections, key = name.split("__")
        if not sections:
            raise ConfigError(
                f"{name}={value!r}: write section and key as section__key, for example trainer__steps=200"
            )
        place = table
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    if isinstance(data, str | Path):
        table["data"]["train"] = str(data)
        return train(table, progress=progress)
    with tempfile.TemporaryDirectory(prefix="understudy-") as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(json.dumps(dict(row)) + "\n" for row in data))
        table["data"]["train"] = str(rows)
        return train(table, progress=progress)


def _name(key: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in key)


def _refuse_a_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UnderstudyError(
        "understudy.train was called inside a running event loop (a notebook?); "
        "await understudy.trainers.launch.launch(recipe) instead"
    )
