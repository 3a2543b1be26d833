"""The Python API: `understudy.distill(…)`, `understudy.train(recipe)`, `understudy.resume(run_dir)`.

All of them work in a notebook too (`run/own_thread.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.config import Recipe, load_recipe, parse_recipe
from understudy.config.messages.unknown_keys import unknown_key
from understudy.config.paths import resolve_paths
from understudy.config.recipe import apply_overrides
from understudy.errors import ConfigError
from understudy.observability.metrics import read_metrics
from understudy.observability.rundir import RunDir, read_json
from understudy.run.entry import early_fork_server, run_to_its_end
from understudy.run.outcome import RunOutcome
from understudy.trainers.callbacks import (
    Callbacks,
    Evaluation,
    OnCheckpoint,
    OnEval,
    OnStep,
    SavedCheckpoint,
    Step,
    evaluation_of,
)

__all__ = ["Evaluation", "Run", "SavedCheckpoint", "Step", "distill", "resume", "train"]

Model = str | Path
"""A hub id or a folder."""
Rows = str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]]
"""A jsonl or parquet file, several, or rows: a list of dicts, a `datasets.Dataset`, any iterable of
mappings."""
Reward = str | Callable[..., Any]
"""`"module:function"`, or the function, if other processes can import it."""


@dataclass(frozen=True, slots=True)
class Run(RunOutcome):
    """A run that has ended: its files, its result, and the calls that can follow."""

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The run that left the directory `path`."""
        run = RunDir.open(path)
        metrics = read_metrics(run.metrics)
        return cls(run.path, int(metrics[-1]["step"]) if metrics else 0, metrics)

    @property
    def last(self) -> dict[str, Any]:
        return self.metrics[-1] if self.metrics else {}

    @property
    def status(self) -> str:
        """`finished`, `stopped` (by Ctrl-C or a signal), `failed`; `running` while another process trains,
        or after a kill."""
        return str(read_json(RunDir(self.dir).state)["status"])

    @property
    def evaluations(self) -> list[Evaluation]:
        """Every evaluation of the student during the run."""
        found = (evaluation_of(int(line["step"]), line, self.dir) for line in self.metrics)
        return [one for one in found if one is not None]

    def resume(
        self,
        *,
        progress: bool = True,
        on_step: OnStep | None = None,
        on_eval: OnEval | None = None,
        on_checkpoint: OnCheckpoint | None = None,
        **overrides: Any,
    ) -> Run:
        """Go on from the last checkpoint; see `understudy.resume`."""
        return resume(
            self.dir,
            progress=progress,
            on_step=on_step,
            on_eval=on_eval,
            on_checkpoint=on_checkpoint,
            **overrides,
        )

    def evaluate(
        self,
        data: Rows | None = None,
        reward: Reward | None = None,
        *,
        samples: int | None = None,
        k: int | None = None,
        best: bool = False,
        max_new_tokens: int | None = None,
        progress: bool = True,
    ) -> dict[str, float]:
        """Measures the latest student, or the best, as `understudy eval` does: with the run's own
        `data.eval` and `data.reward`, or with these."""
        from understudy.observability.live import LiveView  # noqa: PLC0415
        from understudy.run.evaluate_model import evaluate_model  # noqa: PLC0415 - imports torch
        from understudy.run.given import storable  # noqa: PLC0415 - most callers of `import understudy` need neither

        given = {key: value for key, value in (("eval", data), ("reward", reward)) if value is not None}
        with storable({"data": given}) as (tables, _), LiveView(0, enabled=progress) as view:
            return run_to_its_end(
                evaluate_model(
                    str(self.dir),
                    tables["data"].get("eval"),
                    tables["data"].get("reward"),
                    max_new_tokens,
                    samples,
                    k=k,
                    best=best,
                    view=view,
                )
            )

    def export(
        self, out: str | Path, *, best: bool = False, averaged: bool = False, adapter: bool = False
    ) -> Path:
        """Writes the trained student as a Hugging Face folder: the latest, or the best by held-out accuracy.
        `averaged` writes its running average; `adapter` its LoRA adapter alone, in peft's layout."""
        from understudy.run.export import export_run  # noqa: PLC0415 - imports torch

        return export_run(self.dir, Path(out), best=best, averaged=averaged, adapter=adapter)


def train(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    *,
    progress: bool = True,
    on_step: OnStep | None = None,
    on_eval: OnEval | None = None,
    on_checkpoint: OnCheckpoint | None = None,
) -> Run:
    """Run a recipe to its end: a `Recipe`, the path of a TOML file, or plain tables, which may hold rows and
    functions. Callbacks: see `distill`."""
    from understudy.planning.preflight import preflight  # noqa: PLC0415
    from understudy.run.given import GivenRows, storable  # noqa: PLC0415 - most callers of `import understudy` need neither

    callbacks = Callbacks(on_step, on_eval, on_checkpoint)

    def run(checked: Recipe, rows: GivenRows | None = None) -> Run:
        with early_fork_server(checked.cluster, checked.teachers):
            problems = preflight(checked, progress=progress)
            if problems:
                raise ConfigError([rows.reworded(problem) for problem in problems] if rows else problems)
            from understudy.run.launch import launch  # noqa: PLC0415 - imports torch

            return _as_run(run_to_its_end(launch(checked, progress=progress, rows=rows, callbacks=callbacks)))

    if isinstance(recipe, Recipe):
        return run(recipe)
    if isinstance(recipe, str | Path):
        return run(load_recipe(Path(recipe)))
    if not isinstance(recipe, Mapping):
        raise ConfigError(
            f"recipe is a {type(recipe).__name__}; expected the path of a TOML file, a dict of tables, or a Recipe"
        )
    with storable(recipe) as (tables, rows):
        resolve_paths(tables, Path.cwd())
        return run(parse_recipe(tables), rows)


def distill(
    *,
    student: Model,
    teacher: Model | Mapping[str, Model],
    data: Rows,
    eval_data: Rows | None = None,
    reward: Reward | None = None,
    teacher_prompt: str | Sequence[Mapping[str, str]] | None = None,
    progress: bool = True,
    on_step: OnStep | None = None,
    on_eval: OnEval | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    **overrides: Any,
) -> Run:
    """Distil `teacher` into `student` on the student's own rollouts.

    `teacher` is one model, or `{data_source: model}`. `teacher_prompt` is a Jinja template over a row's
    columns (or messages of templates) that every teacher reads in place of the student's prompt. Rows given
    as objects are kept in the run directory, a reward function by its name. Any other recipe key goes in as
    `section__key=value`, for example `trainer__steps=200, loss__topk=32`.

    `on_step`, `on_eval` and `on_checkpoint` are called with a `Step`, an `Evaluation`, a `SavedCheckpoint`, one
    at a time on a thread of the run, which waits for them. If one raises, the step is saved and the run ends
    with a `CallbackError` whose cause is the exception. They belong to the call, not to the run: give them
    again to `resume`.
    """
    table: dict[str, Any] = {
        "student": {"model": _model(student, "student")},
        "teachers": _teachers(teacher),
        "data": {"train": data},
    }
    if teacher_prompt is not None:
        for one in table["teachers"].values():
            one["prompt"] = teacher_prompt if isinstance(teacher_prompt, str) else list(teacher_prompt)
    if eval_data is not None:
        table["data"]["eval"] = eval_data
    if reward is not None:
        if not isinstance(reward, str) and not callable(reward):
            raise ConfigError(
                f"reward is a {type(reward).__name__}; expected a function (row, text) -> float, or its 'module:function'"
            )
        table["data"]["reward"] = reward
    apply_overrides(table, _dotted(overrides))
    return train(table, progress=progress, on_step=on_step, on_eval=on_eval, on_checkpoint=on_checkpoint)


def resume(
    run_dir: str | Path,
    *,
    progress: bool = True,
    on_step: OnStep | None = None,
    on_eval: OnEval | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    **overrides: Any,
) -> Run:
    """Continue a run from its last checkpoint, as `understudy resume` does; `trainer__steps=400` changes
    what may change. Callbacks: see `distill`."""
    from understudy.run.changed_recipe import changed_recipe  # noqa: PLC0415 - most callers of `import understudy` need neither

    if not isinstance(run_dir, str | Path):
        raise ConfigError(f"run_dir is a {type(run_dir).__name__}; expected the path of a run directory")
    callbacks, changes = Callbacks(on_step, on_eval, on_checkpoint), _dotted(overrides)
    recipe, _ = changed_recipe(RunDir.open(run_dir), changes)
    with early_fork_server(recipe.cluster, recipe.teachers):
        from understudy.run.launch import resume as continued  # noqa: PLC0415 - imports torch

        return _as_run(
            run_to_its_end(continued(Path(run_dir), changes, progress=progress, callbacks=callbacks))
        )


def _as_run(outcome: RunOutcome) -> Run:
    return Run(outcome.dir, outcome.steps, outcome.metrics)


def _teachers(given: Any) -> dict[str, dict[str, Any]]:
    """A table for each teacher, under a name made from its key: names are parts of paths and metrics, keys
    may be any text."""
    if not isinstance(given, Mapping):
        return {"teacher": {"model": _model(given, "teacher")}}
    if not given:
        raise ConfigError("teacher is an empty mapping; expected a model, or {data_source: model}")
    teachers: dict[str, dict[str, Any]] = {}
    for key, model in given.items():
        if not isinstance(key, str):
            raise ConfigError(f"teacher has the key {key!r}; expected {{data_source: model}}, keys of text")
        base = "".join(c if c.isalnum() else "-" for c in key) or "teacher"
        name, number = base, 2
        while name in teachers:
            name, number = f"{base}-{number}", number + 1
        teachers[name] = {"model": _model(model, f"teacher[{key!r}]"), "key": key}
    return teachers


def _model(given: Any, what: str) -> str:
    if not isinstance(given, str | Path) or not str(given):
        hint = "; save it with save_pretrained first" if hasattr(given, "save_pretrained") else ""
        raise ConfigError(
            f"{what} is {'empty' if given == '' else f'a {type(given).__name__}'}; expected a hub id or the folder of a model{hint}"
        )
    return str(given)


def _dotted(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`section__key` → `section.key`, as in a recipe."""
    for name, value in overrides.items():
        if "__" not in name.strip("_"):
            hint = (
                "" if name in Recipe.model_fields else unknown_key(Recipe, [name], None)[0].partition("; ")[2]
            )
            raise ConfigError(
                f"{name}={value!r}: {hint}{hint and '; '}write section and key as section__key, for example trainer__steps=200"
            )
    return {name.replace("__", "."): value for name, value in overrides.items()}
