"""Evaluates a run's student, or any model, with lm-evaluation-harness (`understudy eval --harness TASKS`).

A run's student is exported to a temporary folder, which the harness loads as it loads any model.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from understudy.errors import ConfigError
from understudy.run.measurable import check_model

_INSTALL = 'pip install "understudy[harness]"'


def check_harness(model: str, tasks: Sequence[str], *, best: bool = False) -> None:
    """Raises before torch is imported if the harness is not installed or there is no such run or model."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"--harness needs lm-evaluation-harness, which is not installed; {_INSTALL}")
    if not all(tasks):
        raise ConfigError(
            f"--harness {','.join(tasks)}: expected names of tasks with commas between, for example gsm8k,arc_easy"
        )
    check_model(model, best=best)


def evaluate_with_harness(
    model: str,
    tasks: Sequence[str],
    *,
    best: bool = False,
    samples: int | None = None,
    task_folder: Path | None = None,
    batch_size: int = 8,
) -> dict[str, float]:
    """Every number that the harness gives, as `task/metric,filter`. `samples`: the first problems of each task."""
    check_harness(model, tasks, best=best)
    harness: Any = importlib.import_module("lm_eval")
    tasks_module: Any = importlib.import_module("lm_eval.tasks")
    own = None if task_folder is None else str(task_folder)
    # The harness reads thousands of files to know its own tasks; those of the folder alone are a moment.
    manager = tasks_module.TaskManager(include_path=own, include_defaults=own is None)
    if own is not None and not all(manager.match_tasks([task]) for task in tasks):
        manager = tasks_module.TaskManager(include_path=own)
    missing = [task for task in tasks if not manager.match_tasks([task])]
    if missing:
        raise ConfigError(
            f"--harness: lm-evaluation-harness has no task {', '.join(missing)}; `lm_eval ls tasks` lists them, "
            "--harness-tasks FOLDER adds your own"
        )
    with tempfile.TemporaryDirectory(prefix="understudy-eval-") as temporary:
        source = model
        if (Path(model) / "recipe.json").is_file():
            export = importlib.import_module("understudy.run.export")  # imports torch
            source = str(export.export_run(Path(model), Path(temporary) / "student", best=best))
        found = harness.simple_evaluate(
            model="hf",
            model_args={"pretrained": source},
            tasks=list(tasks),
            limit=samples,
            batch_size=batch_size,
            device="cuda" if importlib.import_module("torch").cuda.is_available() else "cpu",
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
        )
    return {
        f"{task}/{name}": float(value)
        for task, values in found["results"].items()
        for name, value in values.items()
        if isinstance(value, int | float) and not name.startswith("sample_len")
    }
