"""The launcher that engines are given to start their processes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from understudy.serving.supervisor import StartedProcess


class HostLauncher(Protocol):
    """The owner of child processes on this machine and on others (`cluster.local.LocalProcesses`)."""

    async def start(
        self, name: str, module: str, arguments: Sequence[str], env: Mapping[str, str] | None = None
    ) -> StartedProcess:
        """Starts `python -m module …` with `--ready-file` and `--watch-fd`; returns once it is ready."""
        ...

    async def stop(self, name: str) -> None: ...

    @property
    def address(self) -> str: ...

    def is_remote(self, name: str) -> bool: ...

    def shares_memory(self, name: str) -> bool: ...

    def end_of_log(self, name: str) -> str:
        """The end of a process's output."""
        ...
