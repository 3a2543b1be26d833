"""Chooses the process launcher and the data plane of a recipe. Optional extras are imported on use."""

from __future__ import annotations

import asyncio
import importlib
import os
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from functools import partial
from typing import Any

from understudy.cluster.local import LocalProcesses
from understudy.config import Recipe
from understudy.dataplane.base import DataPlane, Retain
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.errors import ConfigError
from understudy.observability.rundir import RunDir
from understudy.planning.preflight import missing_extras
from understudy.planning.ray_seating import ray_layout

_EMBEDDED_SPILL_BYTES = 1 << 20


def processes_of(recipe: Recipe, run: RunDir) -> LocalProcesses:
    """The launcher of this run's processes. It has not started or connected to anything yet."""
    cluster = recipe.cluster
    if cluster.backend == "local":
        return LocalProcesses(run.logs, cluster.start_timeout_seconds)
    _require(recipe)
    ray_module: Any = importlib.import_module("understudy.cluster.ray")
    settings = ray_module.RaySettings(
        address=cluster.address, token=cluster.ray_auth == "token", cpus=_cpus_of_our_own(recipe)
    )
    processes: LocalProcesses = ray_module.RayProcesses(
        run.logs, cluster.start_timeout_seconds, settings, partial(ray_layout, recipe)
    )
    return processes


def lasting(recipe: Recipe) -> AbstractContextManager[None]:
    """A context for what outlives one attempt of a run: a Ray cluster of the run's own, which can be started
    only once."""
    if recipe.cluster.backend != "ray" or recipe.cluster.address is not None:
        return nullcontext()
    _require(recipe)
    ray_module: Any = importlib.import_module("understudy.cluster.ray_cluster")
    if ray_module.is_connected():  # the caller's own connection, which stays as it is
        return nullcontext()
    held: AbstractContextManager[None] = ray_module.held_ray()
    return held


async def open_plane(recipe: Recipe, run: RunDir, deterministic: bool, stack: AsyncExitStack) -> DataPlane:
    """The run's data plane. `stack` closes it, and after it the queue."""
    settings = recipe.dataplane
    retain = Retain.UNTIL_ACK if deterministic else Retain.UNTIL_SETTLED
    plane: DataPlane
    if settings.backend == "embedded":
        plane = EmbeddedDataPlane.open(
            run.dataplane,
            max_rows=settings.max_rows,
            max_bytes=settings.max_bytes,
            spill_bytes=settings.spill_bytes or _EMBEDDED_SPILL_BYTES,
            retain=retain,
        )
    else:
        _require(recipe)
        queue: Any = importlib.import_module("understudy.dataplane.transfer_queue.plane")
        link = await asyncio.to_thread(
            queue.QueueLink.start,
            settings.storage_units,
            prefix=f"{run.path.name}/",
            timeout=recipe.cluster.start_timeout_seconds,
        )
        stack.push_async_callback(asyncio.to_thread, link.close)
        plane = queue.TransferQueueDataPlane.open_on(
            link,
            run.dataplane,
            max_rows=settings.max_rows,
            max_bytes=settings.max_bytes,
            spill_bytes=settings.spill_bytes,
            retain=retain,
            patience=settings.queue_timeout_seconds,
        )
    stack.push_async_callback(plane.close)
    return plane


def _cpus_of_our_own(recipe: Recipe) -> int:
    """The CPU count that the run's own Ray cluster declares for this machine.

    Only this run uses it, so it declares as many as the recipe asks for: as with local processes, a high
    count is not refused."""
    teachers = sum(
        teacher.replicas * teacher.tensor_parallel * max(teacher.threads, 1)
        for teacher in recipe.teachers.values()
        if teacher.placement == "standalone"
    )
    pools = sum(pool.nodes * pool.cpus_per_node for pool in recipe.cluster.pools.values())
    queue = recipe.dataplane.storage_units + 1 if recipe.dataplane.backend == "transfer_queue" else 0
    return max(os.cpu_count() or 1, teachers + pools + queue)


def _require(recipe: Recipe) -> None:
    problems = missing_extras(recipe)
    if problems:
        raise ConfigError(problems)
