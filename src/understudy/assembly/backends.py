"""Opens the process launcher and the data plane that a recipe chooses. Optional extras are imported on use."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from typing import Any

from understudy.cluster.local import LocalProcesses
from understudy.cluster.ray_layout import NodeFacts, RayLayout
from understudy.config import ClusterConfig, DataPlaneConfig
from understudy.dataplane.base import DataPlane, Retain
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.observability.rundir import RunDir

_EMBEDDED_SPILL_BYTES = 1 << 20


def processes_of(
    cluster: ClusterConfig, run: RunDir, layout: Callable[[Sequence[NodeFacts]], RayLayout], cpus: int
) -> LocalProcesses:
    """The launcher of this run's processes. It has not started or connected to anything yet.

    On Ray, `layout` maps the cluster's machines to the placement of processes, and a cluster of the run's own
    declares `cpus`."""
    if cluster.backend == "local":
        return LocalProcesses(run.logs, cluster.start_timeout_seconds)
    ray_module: Any = importlib.import_module("understudy.cluster.ray")
    settings = ray_module.RaySettings(address=cluster.address, token=cluster.ray_auth == "token", cpus=cpus)
    processes: LocalProcesses = ray_module.RayProcesses(
        run.logs, cluster.start_timeout_seconds, settings, layout
    )
    return processes


def own_ray_cluster(cluster: ClusterConfig) -> AbstractContextManager[None]:
    """A context for what outlives one attempt of a run: a Ray cluster of the run's own, which can be started
    only once."""
    if cluster.backend != "ray" or cluster.address is not None:
        return nullcontext()
    ray_module: Any = importlib.import_module("understudy.cluster.ray_cluster")
    if ray_module.is_connected():  # the caller's own connection, which stays as it is
        return nullcontext()
    held: AbstractContextManager[None] = ray_module.held_ray()
    return held


async def open_plane(
    settings: DataPlaneConfig,
    run: RunDir,
    stack: AsyncExitStack,
    *,
    drop_when_acked: bool,
    start_timeout: float,
) -> DataPlane:
    """The run's data plane. `stack` closes it, and after it the queue."""
    retain = Retain.UNTIL_ACK if drop_when_acked else Retain.UNTIL_SETTLED
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
        queue: Any = importlib.import_module("understudy.dataplane.transfer_queue.plane")
        link = await asyncio.to_thread(
            queue.QueueLink.start,
            settings.storage_units,
            prefix=f"{run.path.name}/",
            timeout=start_timeout,
        )
        stack.push_async_callback(asyncio.to_thread, link.close)
        plane = queue.TransferQueueDataPlane.open_on(
            link,
            run.dataplane,
            max_rows=settings.max_rows,
            max_bytes=settings.max_bytes,
            spill_bytes=settings.spill_bytes,
            retain=retain,
            timeout_s=settings.queue_timeout_seconds,
        )
    stack.push_async_callback(plane.close)
    return plane
