"""What runs on another machine: an actor that starts, watches and ends processes there.

It owns them the way the launcher owns local ones (`LocalProcesses`): each holds the read end of a pipe whose write end
only the actor has. When the actor goes, with its node, with the driver, by `ray.kill`, the pipe closes and the
processes end themselves; so Ray's own rule (actors end with their driver) is enough to leave no orphan anywhere.
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
"""How the names of folders for logs and ready files begin, on every machine; what killed supervisors left of them is swept by the next."""
_LOOK_SECONDS = 0.2
_MOST_BYTES = 1 << 20
_LOOPBACK = "127.0.0.1:"


@dataclass(frozen=True, slots=True)
class News:
    """What `follow` tells of a process."""

    said: bytes
    """Of its log, since the offset asked about."""
    code: int | None
    """Its exit code, once it ended."""


class Supervisor:
    """The actor; made a Ray actor by `supervisor_of`, where its share of a bundle is known."""

    def __init__(self, start_timeout: float) -> None:
        self._folder = OwnedFolder(FOLDER, None)
        self._processes = LocalProcesses(self._folder.path, start_timeout)
        self._codes: dict[str, int | None] = {}

    async def where(self) -> dict[str, Any]:
        """This machine's address, and this process."""
        return {"ip": ray.util.get_node_ip_address(), "pid": os.getpid()}

    async def start(
        self, name: str, module: str, arguments: Sequence[str], env: Mapping[str, str]
    ) -> dict[str, Any]:
        """Start a process; `{"ready": …}`, or `{"error": …}` in its own words. Never raises for the process's own fault."""
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

    async def follow(self, name: str, offset: int, patience: float) -> News:
        """What it said from `offset` on, as soon as it says something or ends, or after `patience` seconds."""
        log = self._folder.path / f"{name}.log"
        deadline = asyncio.get_running_loop().time() + patience
        while True:
            said = await asyncio.to_thread(_read, log, offset)
            child = self._processes.children.get(name)
            code = self._codes.get(name) if child is None else child.process.poll()
            if said or code is not None or asyncio.get_running_loop().time() >= deadline:
                return News(said, code)
            await asyncio.sleep(_LOOK_SECONDS)

    async def stop(self, name: str) -> None:
        child = self._processes.children.get(name)
        await self._processes.stop(name)
        if child is not None:
            self._codes[name] = child.process.returncode

    async def close(self) -> None:
        """Ends every process, with grace, and leaves nothing on this machine's disk."""
        await self._processes.close()
        self._folder.close()


def supervisor_of(start_timeout: float, **options: Any) -> Any:
    """A supervisor on the cluster; `options` say where and with what share of the machine."""
    # One event loop serves many waiting `follow` calls at once.
    actor = ray.remote(Supervisor).options(max_restarts=0, max_concurrency=64, **options)
    return actor.remote(start_timeout)


def _here(argument: str, address: str) -> str:
    """Arguments as they hold on this machine: servers bind its own address, ranks meet in a folder of its own.

    Binding an address that others can reach is refused by the servers themselves unless they have the run's token.
    """
    if argument.startswith(_LOOPBACK):
        return f"{address}:{argument.removeprefix(_LOOPBACK)}"
    if argument.startswith("file:///"):
        Path(argument.removeprefix("file://")).parent.mkdir(parents=True, exist_ok=True)
    return argument


def _own_devices(env: Mapping[str, str]) -> dict[str, str]:
    """The GPUs of this machine are given out by Ray, which named them in this process's own environment."""
    return {name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"}


def _read(log: Path, offset: int) -> bytes:
    try:
        with log.open("rb") as handle:
            handle.seek(offset)
            return handle.read(_MOST_BYTES)
    except OSError:  # not there yet, or not to be read: whether the process lives is told all the same
        return b""
