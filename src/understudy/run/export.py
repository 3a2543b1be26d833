"""Exports a run's student as a Hugging Face folder with a model card."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

from understudy import __version__
from understudy.config import parse_recipe
from understudy.config.recipe import stored
from understudy.observability.metrics import read_metrics, without_clock
from understudy.observability.rundir import RunDir, read_whole
from understudy.planning.objective import describe
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.policy.checkpoints.export import export
from understudy.rollout.sources import hub_dataset
from understudy.trainers.evaluation.best_checkpoint import best_step


def export_run(
    run_path: Path, out: Path, *, best: bool = False, averaged: bool = False, adapter: bool = False
) -> Path:
    """Writes the student of the latest checkpoint, or of the best one.

    `averaged`: its running average (`trainer.ema_decay`). `adapter`: only its LoRA adapter."""
    run = RunDir.open(run_path)
    recipe = parse_recipe(stored(read_whole(run.recipe)))
    store = CheckpointStore(run.checkpoints, recipe.trainer.keep_checkpoints)
    # The average is stored with the optimizer's state.
    checkpoint = store.load(best_step(store) if best else None, optimizer=averaged)
    metrics = [line for line in read_metrics(run.metrics) if line["step"] <= checkpoint.step]
    card = {
        "student": recipe.student.model,
        "teachers": {name: teacher.model for name, teacher in recipe.teachers.items()},
        "objective": describe(recipe.loss).name,
        "step": checkpoint.step,
        "data": {"prompts": recipe.data.train, "fingerprint": checkpoint.extra["cursor"]["dataset"]},
        "datasets": _hub_datasets(recipe.data.train),
        "command": f"understudy train (recipe.json in {run.path.name})",
        # Of understudy itself not from the package's metadata: a source tree on PYTHONPATH has none.
        "versions": {
            "understudy": __version__,
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        },
        "metrics": without_clock(metrics[-1]) if metrics else {},
    }
    return export(
        checkpoint.path,
        recipe.student.model,
        out,
        card,
        trust_remote_code=recipe.student.trust_remote_code,
        revision=recipe.student.revision,
        averaged=averaged,
        adapter=adapter,
    )


def _hub_datasets(sources: Sequence[str]) -> list[str]:
    """Names of the hub datasets among the training data, each once."""
    return list(dict.fromkeys(hub.name for hub in map(hub_dataset, sources) if hub is not None))
