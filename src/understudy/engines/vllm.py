"""vLLM servers as child processes: started by a launcher that is handed in, watched, and started again when they die."""

from __future__ import annotations

import asyncio
import logging
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

    def arguments(self) -> list[str]:
        words = ["--python", self.python, "--model", self.model, "--max-length", str(self.max_length)]
        words += ["--max-batch", str(self.max_batch), "--dtype", self.dtype]
        return words + [f"--option={option}" for option in self.options]


class VLLMEngine(RemoteEngine):
    """A `RemoteEngine` that owns its servers. Make it with `start_vllm`."""

    def __init__(
        self, settings: VLLMSettings, launcher: ChildLauncher, children: Sequence[Child], **engine: Any
    ) -> None:
        endpoints = [_endpoint(child) for child in children]
        super().__init__(
            DIALECTS["vllm"], endpoints, model="student", max_length=settings.max_length, **engine
        )
        self._settings, self._launcher = settings, launcher
        self._children = dict(zip([f"replica-{i}" for i in range(len(children))], children, strict=True))
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
                    self._children[name] = await _start(self._launcher, self._settings, name)
                await self.replace(name, _endpoint(self._children[name]))
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
        await asyncio.gather(*(self._launcher.stop(_process_name(name)) for name in self._children))


async def start_vllm(settings: VLLMSettings, launcher: ChildLauncher, **engine: Any) -> VLLMEngine:
    """Starts one server per entry of `settings.env`; `engine` are further settings of `RemoteEngine`."""
    names = [f"replica-{i}" for i in range(len(settings.env))]
    try:
        children = await asyncio.gather(*(_start(launcher, settings, name) for name in names))
    except BaseException:
        await asyncio.gather(*(launcher.stop(_process_name(name)) for name in names))
        raise
    return VLLMEngine(settings, launcher, children, **engine)


async def _start(launcher: ChildLauncher, settings: VLLMSettings, name: str) -> Child:
    env = settings.env[int(name.rpartition("-")[2])]
    return await launcher.start(_process_name(name), HOST_MODULE, settings.arguments(), env)


def _process_name(replica: str) -> str:
    return f"vllm-{replica}"


def _endpoint(child: Child) -> Endpoint:
    return Endpoint(child.ready["url"], socket=child.ready["socket"])
