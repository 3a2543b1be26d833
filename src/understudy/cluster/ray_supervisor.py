"""The Ray actor that starts, watches and stops our processes on another machine.

It owns them as the launcher owns local ones (`LocalProcesses`): each process holds the read end of a pipe
whose write end only the actor has. When the actor ends (with its node, with the driver or by `ray.kill`), the
pipe closes and the processes exit. Ray ends actors with their driver, so no orphan is left on any machine.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from understudy.cluster.local import LocalProcesses
from understudy.errors import ChildDied, ClusterError, UnderstudyError
from understudy.observability.owned_folder import OwnedFolder

FOLDER = "understudy-node-"
"""Prefix of the folders for logs and ready files. A supervisor removes the folders that killed supervisors
left."""
_LOOK_SECONDS = 0.2
_MOST_BYTES = 1 << 20
_LOOPBACK = "127.0.0.1:"


@dataclass(frozen=True, slots=True)
class ProcessUpdate:
    """What `follow` returns about a process."""

    output: bytes
    """Its log from the requested offset on."""
    code: int | None
    """Its exit code; None while it runs."""


class Supervisor:
    """The actor's class: the processes of one unit, their folder and exit codes. `RayProcesses` calls it
    remotely.

    `supervisor_of` makes it a Ray actor with its share of a bundle. All its methods run on one event loop.
    """

    def __init__(self, start_timeout: float) -> None:
        self._folder = OwnedFolder(FOLDER, None)
        self._processes = LocalProcesses(self._folder.path, start_timeout)
        self._codes: dict[str, int | None] = {}

    async def where(self) -> dict[str, Any]:
        """This machine's address and this process's pid."""
        return {"ip": ray.util.get_node_ip_address(), "pid": os.getpid()}

    async def start(
        self, name: str, module: str, arguments: Sequence[str], env: Mapping[str, str]
    ) -> dict[str, Any]:
        """Start a process: `{"ready": …}`, or `{"error": …}` with the process's own error instead of raising
        it."""
        address = ray.util.get_node_ip_address()
        try:
            child = await self._processes.start(
                name, module, [_here(argument, address) for argument in arguments], _own_devices(env)
            )
        except UnderstudyError as error:
            kind = ChildDied if isinstance(error, ChildDied) else ClusterError
            return {"error": str(error), "kind": kind.__name__, "node": address}
        node_id = ray.get_runtime_context().get_node_id()
        return {"ready": child.ready, "pid": child.process.pid, "node": address, "node_id": node_id}

    async def follow(self, name: str, offset: int, timeout_s: float) -> ProcessUpdate:
        """Its log from `offset` on, as soon as there is more or it ends, or after `timeout_s` seconds."""
        log = self._folder.path / f"{name}.log"
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            output = await asyncio.to_thread(_read, log, offset)
            child = self._processes.children.get(name)
            code = self._codes.get(name) if child is None else child.process.poll()
            if output or code is not None or asyncio.get_running_loop().time() >= deadline:
                return ProcessUpdate(output, code)
            await asyncio.sleep(_LOOK_SECONDS)

    async def stop(self, name: str) -> None:
        child = self._processes.children.get(name)
        await self._processes.stop(name)
        if child is not None:
            self._codes[name] = child.process.returncode

    async def close(self) -> None:
        """Stops every process and removes the folder from this machine's disk."""
        await self._processes.close()
        self._folder.close()


def supervisor_of(start_timeout: float, **options: Any) -> Any:
    """A supervisor on the cluster; `options` are Ray's: the bundle, and the share of it."""
    # One event loop serves many waiting `follow` calls at once.
    actor = ray.remote(Supervisor).options(max_restarts=0, max_concurrency=64, **options)
    return actor.remote(start_timeout)


def _here(argument: str, address: str) -> str:
    """An argument adapted to this machine: servers bind its address, and the folder in which ranks meet is
    created.

    The servers refuse to bind an address beyond loopback without the run's token.
    """
    if argument.startswith(_LOOPBACK):
        return f"{address}:{argument.removeprefix(_LOOPBACK)}"
    if argument.startswith("file:///"):
        Path(argument.removeprefix("file://")).parent.mkdir(parents=True, exist_ok=True)
    return argument


def _own_devices(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without CUDA_VISIBLE_DEVICES: Ray assigns this machine's GPUs and has set it in this process."""
    return {name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"}


def _read(log: Path, offset: int) -> bytes:
    try:
        with log.open("rb") as handle:
            handle.seek(offset)
            return handle.read(_MOST_BYTES)
    except OSError:  # no log yet, or unreadable: `follow` still reports whether the process lives
        return b""
