"""vLLM servers as child processes: started by a launcher that is handed in, watched, and started again when they die.

One that the launcher puts on another machine is reached over the network, through a door that asks for the run's token; and so is
one beside us that others are to reach (`VLLMSettings.address`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from understudy.engines.dialects import DIALECTS
from understudy.engines.remote import RemoteEngine
from understudy.engines.replicas import Endpoint, Replica
from understudy.errors import UnderstudyError

logger = logging.getLogger(__name__)

HOST_MODULE = "understudy.engines.vllm_host"
_WATCH_S = 1.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0


class Child(Protocol):
    """A process a launcher started."""

    @property
    def alive(self) -> bool: ...

    ready: dict[str, Any]
    """What it wrote into its ready file."""


class ChildLauncher(Protocol):
    """Whoever owns processes. `understudy.cluster.local.LocalProcesses` is one."""

    async def start(
        self, name: str, module: str, arguments: Sequence[str], env: Mapping[str, str] | None = None
    ) -> Child:
        """Starts `python -m module …` with `--ready-file` and `--watch-fd` and returns when it says it is ready."""
        ...

    async def stop(self, name: str) -> None: ...


class HostLauncher(ChildLauncher, Protocol):
    """A launcher that may start processes on other machines too."""

    @property
    def address(self) -> str: ...

    def is_elsewhere(self, name: str) -> bool: ...

    def shares_memory(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    python: str
    """The interpreter of an environment that has vLLM."""
    model: str
    """The student's folder; weights published later replace what is in it."""
    max_length: int
    max_batch: int = 256
    dtype: str = "auto"
    options: tuple[str, ...] = ()
    """More words for vLLM's command line, as they are."""
    env: tuple[Mapping[str, str], ...] = field(default=({},))
    """Environment of each replica (CUDA_VISIBLE_DEVICES); as many replicas as entries."""
    address: str | None = None
    """Where a server on this machine listens, for workers elsewhere to reach it; on a Unix socket alone where not given."""

    def arguments(self) -> list[str]:
        words = ["--python", self.python, "--model", self.model, "--max-length", str(self.max_length)]
        words += ["--max-batch", str(self.max_batch), "--dtype", self.dtype]
        return words + [f"--option={option}" for option in self.options]


class VLLMEngine(RemoteEngine):
    """A `RemoteEngine` that owns its servers. Make it with `start_vllm`."""

    def __init__(self, servers: _Servers, children: Mapping[str, Child], **engine: Any) -> None:
        super().__init__(
            DIALECTS["vllm"],
            [servers.endpoint(name, child) for name, child in children.items()],
            model="student",
            max_length=servers.settings.max_length,
            address=servers.launcher.address,
            **engine,
        )
        self._servers = servers
        self._children = dict(children)
        self._watchers = [asyncio.create_task(self._watch(name)) for name in self._children]

    @property
    def children(self) -> Mapping[str, Child]:
        """The servers' processes by replica."""
        return self._children

    async def _watch(self, name: str) -> None:
        """Starts the replica again whenever its process has died; it serves once it has the newest weights."""
        wait = _FIRST_WAIT_S
        while True:
            await asyncio.sleep(_WATCH_S)
            alive = self._children[name].alive
            if alive and not self.is_withdrawn(name):
                continue
            self.withdraw(name)
            try:
                if not alive:
                    logger.warning("vLLM %s died; starting it again in %g s", name, wait)
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, _LONGEST_WAIT_S)
                    await self._servers.stop(name)
                    self._children[name] = await self._servers.start(name)
                await self.replace(name, self._servers.endpoint(name, self._children[name]))
            except (UnderstudyError, OSError) as error:
                logger.warning("vLLM %s could not be started again: %s", name, error)
                continue
            wait = _FIRST_WAIT_S

    def _give_up(self, replica: Replica) -> bool:
        self.withdraw(replica.name)
        return True

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await super().close()
        await asyncio.gather(*(self._servers.stop(name) for name in self._children))


class _Servers:
    """Starts and ends servers, here or wherever the launcher has a place for them."""

    def __init__(self, settings: VLLMSettings, launcher: HostLauncher) -> None:
        self.settings, self.launcher = settings, launcher
        self._token = secrets.token_urlsafe(24)

    async def start(self, name: str) -> Child:
        arguments, env = self.settings.arguments(), dict(self.settings.env[int(name.rpartition("-")[2])])
        elsewhere = self.launcher.is_elsewhere(process_name(name))
        if elsewhere or self.settings.address is not None:
            # On another machine that machine's own address.
            arguments += ["--bind", "127.0.0.1:0" if elsewhere else f"{self.settings.address}:0"]
            # Through the environment: command lines are readable by every user of the machine.
            env["UNDERSTUDY_TOKEN"] = self._token
        return await self.launcher.start(process_name(name), HOST_MODULE, arguments, env)

    async def stop(self, name: str) -> None:
        await self.launcher.stop(process_name(name))

    def endpoint(self, name: str, child: Child) -> Endpoint:
        if "socket" in child.ready:
            return Endpoint(child.ready["url"], socket=child.ready["socket"])
        shares = self.launcher.shares_memory(process_name(name))
        return Endpoint(child.ready["url"], key=self._token, shares_memory=shares)


async def start_vllm(settings: VLLMSettings, launcher: HostLauncher, **engine: Any) -> VLLMEngine:
    """Starts one server per entry of `settings.env`; `engine` are further settings of `RemoteEngine`."""
    servers = _Servers(settings, launcher)
    names = [f"replica-{i}" for i in range(len(settings.env))]
    try:
        children = await asyncio.gather(*(servers.start(name) for name in names))
    except BaseException:
        await asyncio.gather(*(servers.stop(name) for name in names))
        raise
    return VLLMEngine(servers, dict(zip(names, children, strict=True)), **engine)


def process_name(replica: str) -> str:
    return f"vllm-{replica}"
