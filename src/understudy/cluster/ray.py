"""Processes on the machines of a Ray cluster, with the interface of `LocalProcesses`.

    trainer's machine                                    another machine
    RayProcesses.start("teacher-math-0", …) ──actor──>  Supervisor ──pipe──> python -m understudy.teacher.replica.server …
      .ready["url"]  <──────────────────────────────────── its address, with the run's token
      logs/teacher-math-0.log  <─────────────────────────── its output, copied while it runs

`RayLayout` says which process runs on which machine; a process without a bundle there is started on this
machine. The caller of `start` decides what is restarted:

    process          restarted by
    teacher replica  its pool, with a backoff, on the machine that has its bundle then; rows wait meanwhile or
                     go to another replica
    rollout engine   the engine client in the trainer, in the same way
    rank, critic     the run: all ranks and the critic at once, from the last checkpoint, with a new placement
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from understudy.cluster.local import SUPERVISOR_GONE, Child, LocalProcesses
from understudy.cluster.ray_cluster import RayCluster, RaySettings
from understudy.cluster.ray_layout import NodeFacts, RayLayout, UnitBundle, draw, unit_of
from understudy.cluster.ray_supervisor import FOLDER, ProcessUpdate, supervisor_of
from understudy.errors import ChildDied, ClusterError
from understudy.observability.owned_folder import remove_abandoned

logger = logging.getLogger(__name__)

_FOLLOW_SECONDS = 5.0
_SEAT_SECONDS = 60.0
"""How long an actor may take to start in a bundle that we hold."""
_HOMELESS_SECONDS = 5.0
"""How long a bundle whose machine is lost may go without another before that is an error."""
_LOOK_SECONDS = 1.0
_GOODBYE_SECONDS = 15.0
_LOST = -9
"""The exit code of a process whose machine or supervisor is lost."""


def _take_sigterm_back() -> None:
    """Ray's C++ part handles SIGTERM on any thread: it prints a stack and aborts the process after 3 s. Puts
    Python's handler back."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


class RemoteProcess:
    """The trainer's handle on a remote process: the part of `subprocess.Popen` that a `Child` needs."""

    def __init__(self, pid: int, node: str, node_id: str) -> None:
        self.pid = pid
        self.node = node
        self.node_id = node_id
        """Ray's id of the machine: two Ray nodes may share an address."""
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


class RayProcesses(LocalProcesses):
    """Starts processes on a Ray cluster; those without a bundle in the layout on this machine.

    Holds one supervisor actor per unit, the remote children by name and one task per child that copies its
    log. Called on the trainer's event loop.
    """

    def __init__(
        self,
        logs: Path,
        start_timeout: float,
        settings: RaySettings,
        layout: Callable[[Sequence[NodeFacts]], RayLayout],
    ) -> None:
        """`layout` maps the machines of the cluster to the placement of processes."""
        super().__init__(logs, start_timeout)
        self._settings = settings
        self._lay_out = layout
        self.layout = RayLayout()
        self.cluster: RayCluster | None = None
        self._supervisors: dict[str, Any] = {}
        self._remote: dict[str, Child] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}

    @property
    def address(self) -> str:
        return str(ray.util.get_node_ip_address())

    def is_remote(self, name: str) -> bool:
        return self.layout.bundle_of(name) is not None

    def shares_memory(self, name: str) -> bool:
        process = self._remote[name].process if name in self._remote else None
        if not isinstance(process, RemoteProcess):
            return True
        return process.node_id == str(ray.get_runtime_context().get_node_id())

    async def ready(self) -> None:
        """Connect to Ray and reserve the layout's bundles; `ClusterError` within seconds if they do not
        fit."""
        if self.cluster is None:
            # Off the main thread: on it Ray would replace our SIGTERM handler with its own.
            await asyncio.to_thread(self._connect)
            _take_sigterm_back()

    async def watch(self) -> None:
        while True:
            if self.cluster is not None:
                self.cluster.require_machine()
            await asyncio.sleep(_LOOK_SECONDS)

    def _connect(self) -> None:
        cluster = RayCluster(self._settings)
        try:
            layout = self._lay_out(cluster.nodes())
            cluster.take(list(layout.groups.values()), self._start_timeout)
        except BaseException:
            cluster.close()
            raise
        self.cluster, self.layout = cluster, layout

    @property
    def children(self) -> Mapping[str, Child]:
        return {**super().children, **self._remote}

    async def start(
        self, name: str, module: str, arguments: Sequence[str], env: Mapping[str, str] | None = None
    ) -> Child:
        await self.ready()
        unit_bundle = self.layout.bundle_of(name)
        if unit_bundle is None:
            return await super().start(name, module, arguments, env)
        if name in self._remote and self._remote[name].alive:
            raise ClusterError(f"process {name} runs already")
        log = self._logs / f"{name}.log"
        self._logs.mkdir(parents=True, exist_ok=True)
        log_start = log.stat().st_size if log.exists() else 0
        supervisor = await self._supervisor(unit_of(name), unit_bundle)
        try:
            reply = await supervisor.start.remote(
                name, module, _with_device(arguments, name, unit_bundle), dict(env or {})
            )
        except ray.exceptions.RayActorError as error:
            self._supervisors.pop(unit_of(name), None)
            raise ChildDied(
                f"the machine that process {name} was to start on went away ({_reason(error)})"
            ) from None
        except asyncio.CancelledError:
            await self._dismiss(unit_of(name))
            raise
        if "error" in reply:
            await self._copy_log(supervisor, name, log)
            await self._dismiss(unit_of(name))
            kind = ChildDied if reply["kind"] == "ChildDied" else ClusterError
            raise kind(f"{reply['error']}\n(on machine {reply['node']}; its log is copied to {log})")
        process = RemoteProcess(reply["pid"], reply["node"], reply["node_id"])
        popen = cast("subprocess.Popen[bytes]", process)
        child = Child(name, popen, log, dict(reply["ready"]), log_start, remote=True)
        self._remote[name] = child
        self._followers[name] = asyncio.create_task(
            self._follow(supervisor, name, process, log), name=f"follow-{name}"
        )
        logger.info("process %s runs on %s (pid %d)", name, process.node, process.pid)
        return child

    async def _supervisor(self, unit: str, unit_bundle: UnitBundle) -> Any:
        """The unit's actor; a new one if there is none or the old one was lost with its machine."""
        if unit in self._supervisors:
            return self._supervisors[unit]
        assert self.cluster is not None
        strategy = PlacementGroupSchedulingStrategy(
            self.cluster.group(unit_bundle.group), placement_group_bundle_index=unit_bundle.bundle
        )
        actor = supervisor_of(
            self._start_timeout,
            num_cpus=unit_bundle.share.cpus,
            num_gpus=unit_bundle.share.gpus,
            scheduling_strategy=strategy,
        )
        self._supervisors[unit] = actor
        try:
            await self._seated(unit, unit_bundle, actor)
        except ClusterError:
            self._kill(unit)
            raise
        except ray.exceptions.RayError as error:
            self._kill(unit)
            raise ClusterError(f"{unit}: its supervisor did not start ({_reason(error)})") from None
        except asyncio.CancelledError:
            self._kill(unit)
            raise
        return actor

    async def _seated(self, unit: str, unit_bundle: UnitBundle, actor: Any) -> None:
        """Wait until an actor runs in its bundle; `ClusterError` once no machine can hold the bundle."""
        assert self.cluster is not None
        seating = asyncio.ensure_future(actor.where.remote())
        began, homeless_since = time.monotonic(), None
        try:
            while True:
                await asyncio.wait([seating], timeout=_LOOK_SECONDS)
                if seating.done():
                    await seating
                    return
                problem = await asyncio.to_thread(
                    self.cluster.why_not_placed, self.layout.groups[unit_bundle.group], unit_bundle.bundle
                )
                now = time.monotonic()
                homeless_since = None if problem is None else homeless_since or now
                if homeless_since is not None and now - homeless_since > _HOMELESS_SECONDS:
                    raise ClusterError(f"{unit} has no machine now: {problem}")
                if now - began > _SEAT_SECONDS:
                    raise ClusterError(
                        f"{unit}: no machine has its bundle ({unit_bundle.share}) now\n{draw(self.cluster.nodes())}"
                    )
        finally:
            seating.cancel()

    async def _follow(self, supervisor: Any, name: str, process: RemoteProcess, log: Path) -> None:
        """Copy the process's log into the run directory until the process ends. If its supervisor is lost, so
        is the process.

        A log that cannot be written (a full disk) gives a warning and is retried; the end of the process is
        still noticed.
        """
        offset, writable = 0, True
        while process.returncode is None:
            try:
                news: ProcessUpdate = await supervisor.follow.remote(name, offset, _FOLLOW_SECONDS)
            except ray.exceptions.RayError as error:
                with contextlib.suppress(OSError):
                    _append(log, f"{SUPERVISOR_GONE}: {_reason(error)})\n".encode())
                process.returncode = _LOST
                if self._supervisors.get(unit_of(name)) is supervisor:
                    del self._supervisors[unit_of(name)]
                return
            try:
                copied, problem = _append(log, news.output), None
            except OSError as error:
                copied, problem = 0, error
            offset += copied
            if writable and problem is not None:
                logger.warning(
                    "what process %s says cannot be copied to %s (%s); tried again", name, log, problem
                )
            writable = problem is None
            if not copied:  # the whole log is copied, or cannot be
                process.returncode = news.code
            if problem is not None and news.code is None:
                await asyncio.sleep(_LOOK_SECONDS)

    async def _copy_log(self, supervisor: Any, name: str, log: Path) -> None:
        with contextlib.suppress(ray.exceptions.RayError, OSError):
            offset = 0
            while output := (await supervisor.follow.remote(name, offset, 0.0)).output:
                offset += _append(log, output)

    async def stop(self, name: str) -> None:
        if name not in self._remote:
            await super().stop(name)
            return
        del self._remote[name]
        follower, supervisor = self._followers.pop(name), self._supervisors.get(unit_of(name))
        if supervisor is not None:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                async with asyncio.timeout(_GOODBYE_SECONDS):
                    await supervisor.stop.remote(name)
                    await asyncio.wait([follower])
        follower.cancel()
        if not any(unit_of(other) == unit_of(name) for other in self._remote):
            await self._dismiss(unit_of(name))

    async def _dismiss(self, unit: str) -> None:
        """End a unit's supervisor and every process it still has."""
        supervisor = self._supervisors.get(unit)
        if supervisor is None:
            return
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await supervisor.close.remote()
        self._kill(unit)

    def _kill(self, unit: str) -> None:
        supervisor = self._supervisors.pop(unit, None)
        if supervisor is not None:
            with contextlib.suppress(Exception):
                ray.kill(supervisor, no_restart=True)

    async def close(self) -> None:
        await asyncio.gather(*(self.stop(name) for name in list(self._remote)))
        await asyncio.gather(*(self._dismiss(unit) for unit in list(self._supervisors)))
        await super().close()
        if self.cluster is not None:
            await asyncio.to_thread(self.cluster.close)
            remove_abandoned(Path(tempfile.gettempdir()), FOLDER)  # of supervisors that were lost

    def kill_now(self) -> None:
        for unit in list(self._supervisors):
            self._kill(unit)
        super().kill_now()


def _append(log: Path, output: bytes) -> int:
    """The number of bytes written: a disk that fills up may take a part."""
    # Unbuffered: otherwise closing the file would retry what was not written.
    with log.open("ab", buffering=0) as sink:
        return sink.write(output) if output else 0


def _with_device(arguments: Sequence[str], name: str, unit_bundle: UnitBundle) -> list[str]:
    """The arguments with `--device` as the remote machine names it: a unit sees only its own GPUs, one per
    rank."""
    given = list(arguments)
    if "--device" in given:
        rank = name.removeprefix(unit_of(name)).removeprefix("-rank") or "0"
        given[given.index("--device") + 1] = f"cuda:{rank}" if unit_bundle.share.gpus else "cpu"
    return given


def _reason(error: BaseException) -> str:
    """The last line of Ray's long message, which holds the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
