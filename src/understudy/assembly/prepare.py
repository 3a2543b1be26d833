"""Prepares the trainer's process for a run: import path, torch, cluster. Defines `Launch`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from understudy.assembly.cpu_threads import onednn_as_resolved, raised_gc_threshold, set_up_torch
from understudy.cluster.local import LocalProcesses
from understudy.config import ClusterConfig
from understudy.observability.live import LiveView
from understudy.observability.rundir import RunDir
from understudy.planning.resolved import Compute
from understudy.planning.seating import Seating
from understudy.rollout.loading import set_python_path


@dataclass(frozen=True, slots=True)
class Launch:
    """What the stages of `build.py` start the parts of one launch with."""

    run: RunDir
    processes: LocalProcesses
    view: LiveView
    stack: AsyncExitStack
    """Stops each part again, in the reverse of the order in which they were started."""
    gpus: Sequence[str]
    """The name in CUDA_VISIBLE_DEVICES of each GPU of this process."""
    seating: Seating


async def prepare(
    launch: Launch, compute: Compute, cluster: ClusterConfig, python_path: Sequence[str]
) -> None:
    """Sets this process up for the recipe and connects to the cluster; says which processes share a GPU."""
    view, stack, processes = launch.view, launch.stack, launch.processes
    set_python_path(python_path)
    set_up_torch(compute)
    stack.enter_context(onednn_as_resolved(compute))
    if compute.device == "cpu":
        stack.enter_context(raised_gc_threshold())
    clustered = cluster.backend != "local"
    if clustered:
        view.phase(f"connecting to {cluster.backend}")
    await processes.ready()
    if clustered:
        watchers = await stack.enter_async_context(asyncio.TaskGroup())
        watcher = watchers.create_task(processes.watch(), name="watch-machines")
        stack.callback(watcher.cancel)
    if message := launch.seating.shared():
        view.note(message)
