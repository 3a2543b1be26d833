"""The processes behind a `HostedEngine`: started, restarted and stopped through the run's launcher."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from understudy.engines.launcher import HostLauncher
from understudy.serving.endpoint import Endpoint
from understudy.serving.supervisor import StartedProcess

HOST_MODULE = "understudy.engines.hosted.process"


class HostProcesses:
    """Starts and restarts engine processes, on this machine or where the launcher places them. Hosts are called
    replica-0, replica-1, …"""

    def __init__(
        self,
        launcher: HostLauncher,
        arguments: Sequence[str],
        env: Sequence[Mapping[str, str]],
        module: str = HOST_MODULE,
    ) -> None:
        self._launcher, self._module, self._arguments = launcher, module, arguments
        # The token goes through the environment: command lines are readable by every user of the machine.
        self._token = secrets.token_urlsafe(24)
        self._env = [{**one, "UNDERSTUDY_TOKEN": self._token} for one in env]
        self._children: dict[str, StartedProcess] = {}

    @property
    def names(self) -> list[str]:
        return [f"replica-{i}" for i in range(len(self._env))]

    async def restart(self, name: str) -> Endpoint:
        """Ends the old process, starts a new one, and returns its address once it can generate."""
        await self.stop(name)
        env, process = self._env[self.names.index(name)], process_name(name)
        child = await self._launcher.start(process, self._module, list(self._arguments), env)
        self._children[name] = child
        shares = self._launcher.shares_memory(process)
        return Endpoint(
            child.ready["url"], token=self._token, shares_memory=shares, gpu=child.ready.get("gpu")
        )

    async def stop(self, name: str) -> None:
        await self._launcher.stop(process_name(name))

    def newest(self, name: str) -> StartedProcess | None:
        """The process that was started last; it may have ended."""
        return self._children.get(name)

    def alive(self, name: str) -> bool:
        return name in self._children and self._children[name].alive


def process_name(host: str) -> str:
    """The process name of an engine replica, also used for its log: replica-0 is rollout-0."""
    return f"rollout-{host.rpartition('-')[2]}"
