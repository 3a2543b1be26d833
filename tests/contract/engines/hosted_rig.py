"""Engine processes with the contract's small model, started as a run starts them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engines_under_contract import CONTEXT

from understudy.assembly.engine_processes import HostSettings, start_hosts
from understudy.cluster.local import LocalProcesses
from understudy.engines.hosted.engine import HostedEngine
from understudy.engines.local.scheduler import Batching


class RemoteProcesses(LocalProcesses):
    """Local processes reported as being on other machines, so that weights must not reach them by shared memory."""

    def __init__(self, logs: Path, local: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(logs, **settings)
        self.local = local

    def is_remote(self, name: str) -> bool:
        return name not in self.local

    def shares_memory(self, name: str) -> bool:
        return name in self.local


@asynccontextmanager
async def hosted(
    model: Any,
    folder: Path,
    *,
    hosts: int = 1,
    deterministic: bool = True,
    processes: LocalProcesses | None = None,
) -> AsyncIterator[tuple[HostedEngine, LocalProcesses]]:
    """`hosts` processes with the model's weights under version 0."""
    model.save_pretrained(folder / "student")
    processes = processes or LocalProcesses(folder / "logs")
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
