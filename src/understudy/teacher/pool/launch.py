"""The interfaces by which a pool starts and stops replica processes that the launcher owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from understudy.serving.endpoint import Endpoint


class Launcher(Protocol):
    """Starts and stops the processes of a pool's replicas; called by `ReplicaProcesses` on the pool's event loop."""

    async def start(self, replica: str) -> Endpoint:
        """Start the replica's process; returns its endpoint once it can score."""
        ...

    async def stop(self, replica: str) -> None:
        """End the replica's process, if there is one; returns when it has exited."""
        ...

    def alive(self, replica: str) -> bool:
        """Whether the replica's process exists; says nothing about whether it answers."""
        ...

    def end_of_log(self, replica: str) -> str:
        """The end of the replica's log, to begin an error with; empty if none is kept."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica of a pool: launched by the pool's launcher, or external at a fixed address."""

    name: str
    endpoint: Endpoint | None = None

    @property
    def external(self) -> bool:
        return self.endpoint is not None
