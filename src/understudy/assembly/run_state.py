"""Opens what a run writes: metrics and loggers, spans, checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from understudy.assembly.prepare import Launch
from understudy.dataplane.base import DataPlane
from understudy.observability.loggers.logged_metrics import LoggedMetrics
from understudy.observability.metrics import read_metrics
from understudy.observability.rundir import RunDir
from understudy.observability.spans import Spans
from understudy.policy.checkpoints.background import BackgroundSaver
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.trainers.callbacks import CallbackRunner
from understudy.trainers.evaluation.best_checkpoint import BestSoFar
from understudy.trainers.system import RunState, Saves


def open_checkpoints(run: RunDir, keep: int) -> CheckpointStore:
    """The run's checkpoint store. It first removes half-written checkpoints of a crash, which is safe under
    the run's lock."""
    store = CheckpointStore(run.checkpoints, keep)
    store.recover()
    return store


async def open_run_state(
    launch: Launch,
    plane: DataPlane,
    checkpoints: CheckpointStore,
    loggers: Sequence[str],
    recipe_values: Mapping[str, Any],
    callbacks: CallbackRunner | None,
) -> RunState:
    """`recipe_values`: what loggers show as the run's configuration."""
    run, view, stack = launch.run, launch.view, launch.stack
    metrics = LoggedMetrics(
        run.metrics, loggers, run.path / "loggers", run.path.name, recipe_values, view.note
    )
    stack.callback(metrics.close)
    spans = Spans(run.spans)
    stack.callback(spans.close)
    view.on_note = spans.event
    saver = BackgroundSaver(checkpoints)
    stack.push_async_callback(asyncio.to_thread, saver.close)
    return RunState(
        run=run,
        plane=plane,
        metrics=metrics,
        spans=spans,
        view=view,
        saves=Saves(checkpoints, saver, BestSoFar(read_metrics(run.metrics))),
        background=await stack.enter_async_context(asyncio.TaskGroup()),
        callbacks=callbacks,
    )
