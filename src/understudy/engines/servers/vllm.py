"""vLLM servers as child processes: started by an injected launcher, monitored, restarted.

A remote server is reached over the network, through a proxy that asks for the run's token
(`vllm_proxy.py`). A server on this machine listens on a Unix socket.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from understudy.engines.launcher import HostLauncher
from understudy.engines.replicas import EngineReplica
from understudy.engines.servers.dialects import DIALECTS
from understudy.engines.servers.engine import RemoteEngine
from understudy.engines.servers.vllm_servers import VLLMServers
from understudy.errors import EngineError, UnderstudyError
from understudy.observability.report import many
from understudy.serving.supervisor import RestartCount, Restarts, StartedProcess

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_SCREEN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """How the vLLM servers of one engine are started."""

    python: str
    """The interpreter of an environment that has vLLM."""
    model: str
    """The student's folder; published weights later replace the loaded ones."""
    max_length: int
    max_batch: int = 256
    dtype: str = "auto"
    options: tuple[str, ...] = ()
    """Further arguments for vLLM's command line, passed unchanged."""
    env: tuple[Mapping[str, str], ...] = field(default=({},))
    """The environment of each replica (CUDA_VISIBLE_DEVICES); one replica per entry."""

    def arguments(self) -> list[str]:
        arguments = ["--python", self.python, "--model", self.model, "--max-length", str(self.max_length)]
        arguments += ["--max-batch", str(self.max_batch), "--dtype", self.dtype]
        return arguments + [f"--option={option}" for option in self.options]


class VLLMEngine(RemoteEngine):
    """A `RemoteEngine` that owns its servers: one task per replica restarts it. Created by `start_vllm`."""

    def __init__(
        self,
        servers: _Servers,
        children: Mapping[str, StartedProcess],
        restarts: Restarts,
        notify: Callable[[str], None],
        **engine: Any,
    ) -> None:
        super().__init__(
            DIALECTS["vllm"],
            [servers.endpoint(process_name(name), child) for name, child in children.items()],
            model="student",
            max_length=servers.settings.max_length,
            address=servers.launcher.address,
            **engine,
        )
        self._servers, self._restarts, self._notify = servers, restarts, notify
        self._children = dict(children)
        self._given_up: dict[str, str] = {}
        """Replicas that are no longer restarted, with the reason."""
        self._watchers = [asyncio.create_task(self._watch(name)) for name in self._children]

    @property
    def children(self) -> Mapping[str, StartedProcess]:
        """The servers' processes by replica."""
        return self._children

    async def _watch(self, name: str) -> None:
        """Restarts the replica whenever its process has died; it serves once it has the newest weights.

        A replica that is restarted `Restarts.most` times without answering a request in between is given
        up. The error shows the end of its output.
        """
        replica, count, answered = self._replica(name), RestartCount(self._restarts), 0
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._children[name].alive and not self.is_withdrawn(name):
                continue
            self.withdraw(name)
            if replica.answers > answered:
                count.was_useful()
                answered = replica.answers
            problem = self._servers.problem(name, self._children[name])
            if count.spent:
                self._drop_server(replica, problem, count.in_vain)
                return
            wait = count.restart()
            what = "started again" if self._servers.must_start(name, self._children[name]) else "asked again"
            self._tell(
                f"vLLM {name} {problem}; {what} in {wait:g} s ({count.in_vain} of {count.limits.most})"
            )
            await asyncio.sleep(wait)
            try:
                await self._bring_back(name)
            except (UnderstudyError, OSError) as error:
                self._servers.failed(name, str(error))
                continue
            self._tell(f"vLLM {name} is back, with weights of version {self.version}")

    async def _bring_back(self, name: str) -> None:
        """Reconnects to a process that is alive and was only unreachable; otherwise starts a new process."""
        if self._servers.must_start(name, self._children[name]):
            await self._servers.stop(name)
            self._children[name] = await self._servers.start_replica(name)
        await self.replace(name, self._servers.endpoint(process_name(name), self._children[name]))

    def _drop_server(self, replica: EngineReplica, problem: str, restarts: int) -> None:
        times = f"after {many(restarts, 'restart')} without an answer (cluster.restarts.rollout)"
        self._given_up[replica.name] = f"vLLM {replica.name} {problem}; it was given up {times}"
        self._tell(self._given_up[replica.name])

    def _tell(self, news: str) -> None:
        """Logs the whole message and shows one line of it."""
        logger.warning("%s", news)
        self._notify(_in_one_line(news))

    def _is_restarting(self) -> bool:
        if len(self._given_up) == len(self._children):
            raise EngineError("no vLLM server is left. " + "\n".join(sorted(set(self._given_up.values()))))
        return any(self.is_withdrawn(name) and name not in self._given_up for name in self._children)

    def _report_lost(self, replica: EngineReplica) -> bool:
        self.withdraw(replica.name)
        return True

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await super().close()
        await asyncio.gather(*(self._servers.stop(name) for name in self._children))


class _Servers(VLLMServers):
    """The servers of one engine by replica, and why the last start of each failed."""

    def __init__(self, settings: VLLMSettings, launcher: HostLauncher) -> None:
        super().__init__(launcher, secrets.token_urlsafe(24))
        self.settings = settings
        self._failures: dict[str, str] = {}
        """By replica: why its last start or reconnection failed."""

    async def start_replica(self, name: str) -> StartedProcess:
        env = self.settings.env[int(name.rpartition("-")[2])]
        child = await self.start(process_name(name), self.settings.arguments(), env)
        self._failures.pop(name, None)
        return child

    def failed(self, name: str, problem: str) -> None:
        self._failures[name] = problem

    def must_start(self, name: str, child: StartedProcess) -> bool:
        return not child.alive or name in self._failures

    def problem(self, name: str, child: StartedProcess) -> str:
        """Why a replica does not serve; for a dead process, the end of its output."""
        if name in self._failures:
            return f"could not be started again: {self._failures[name]}"
        if child.alive:
            return "does not answer"
        return f"died: {self.launcher.end_of_log(process_name(name))}"

    async def stop(self, name: str) -> None:
        await self.launcher.stop(process_name(name))


async def start_vllm(
    settings: VLLMSettings,
    launcher: HostLauncher,
    *,
    restarts: Restarts | None = None,
    notify: Callable[[str], None] | None = None,
    **engine: Any,
) -> VLLMEngine:
    """Starts one server per entry of `settings.env`; `engine` are further settings of `RemoteEngine`.

    `restarts` says when a server that does not stay up is given up. `notify` is called with a message when
    a server is lost and when it is back.
    """
    servers = _Servers(settings, launcher)
    names = [f"replica-{i}" for i in range(len(settings.env))]
    try:
        children = await asyncio.gather(*(servers.start_replica(name) for name in names))
    except BaseException:
        await asyncio.gather(*(servers.stop(name) for name in names))
        raise
    return VLLMEngine(
        servers,
        dict(zip(names, children, strict=True)),
        restarts or Restarts(first_wait_s=1.0),
        notify or (lambda news: None),
        **engine,
    )


def process_name(replica: str) -> str:
    return f"vllm-{replica}"


def _in_one_line(news: str) -> str:
    """The first and the last two lines: a process that fails prints its error there."""
    lines = [line.strip() for line in news.splitlines() if line.strip()]
    line = " … ".join(dict.fromkeys([lines[0], *lines[-2:]]))
    half = _SCREEN_CHARACTERS // 2
    return line if len(line) <= _SCREEN_CHARACTERS else f"{line[:half]} … {line[-half:]}"
