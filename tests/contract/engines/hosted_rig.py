"""Engine processes around the contract's small model, as a run starts them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engines_under_contract import CONTEXT

from understudy.cluster.local import LocalProcesses
from understudy.engines.hosted import HostedEngine
from understudy.engines.schedule import Batching
from understudy.trainers.hosts import HostSettings, start_hosts


@asynccontextmanager
async def hosted(
    model: Any, folder: Path, *, hosts: int = 1, deterministic: bool = True
) -> AsyncIterator[tuple[HostedEngine, LocalProcesses]]:
    """`hosts` processes with the model's weights under version 0."""
    model.save_pretrained(folder / "student")
    processes = LocalProcesses(folder / "logs")
    try:
        batching = Batching.COMPOSED if deterministic else Batching.CONTINUOUS
        settings = HostSettings(
            str(folder / "student"), "float32", "cpu", 1, 8, CONTEXT, 0, batching, deterministic
        )
        engine = await start_hosts(processes, settings, [{}] * hosts, weight_bytes=1 << 20)
        try:
            await engine.update_weights(0, ())
            yield engine, processes
        finally:
            await engine.close()
    finally:
        await processes.close()
