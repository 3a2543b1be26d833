"""Starts and monitors the ranks of a student (`trainer.ranks`), on this machine or on a cluster.

    trainer process                       child processes (processes/rank.py)
    ┌──────────────────────────┐   gloo   ┌──────────────────────┐  ┌──────────────────────┐
    │ rank 0: LeadingPolicy    │<── or ──>│ rank 1: follow()     │  │ rank 2: follow()     │  …
    │ engine: a whole model    │   nccl   └──────────────────────┘  └──────────────────────┘
    └──────────────────────────┘

`serving/supervisor.py` detects a rank that exits or hangs, by its heartbeat file in the coordination folder
(`mark_file`). A rank that refuses a command writes the reason to a file there (`refusal_file`), and the command fails.
`run/restarts.py` decides what the run does after `RankLost`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType

import psutil
import torch

from understudy.cluster.local import Child, LocalProcesses
from understudy.errors import ConfigError, RankLost
from understudy.observability.live import LiveView
from understudy.observability.owned_folder import OwnedFolder
from understudy.observability.rundir import RunDir
from understudy.policy.policy import Policy
from understudy.policy.ranks.follow import LeadingPolicy
from understudy.policy.ranks.rank_thread import RankThread
from understudy.policy.ranks.shard import RankGroup, abandon, join, leave
from understudy.policy.step import BadRows, PolicySettings
from understudy.serving.supervisor import Monitor, newest_mark
from understudy.trainers.models import LoadedModel

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_LEAVE_SECONDS = 10.0
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def join_at(rank: int, size: int, rendezvous: str, device: torch.device) -> RankGroup:
    """Joins the process group. Ranks on one machine use the loopback: gloo would otherwise resolve the host's
    name, which may have no address. Ranks on several machines use the interface that reaches the
    rendezvous."""
    if rendezvous.startswith("file:"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    else:
        interface = interface_towards(rendezvous)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        device = torch.device(device.type)  # on Ray each rank sees its own GPU as cuda:0
    return join(rank, size, rendezvous, str(device))


def interface_towards(rendezvous: str) -> str | None:
    """The network interface this machine would use to reach `tcp://HOST:PORT`."""
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        own = probe.getsockname()[0]
    found = [name for name, all_ in psutil.net_if_addrs().items() if any(one.address == own for one in all_)]
    return found[0] if found else None


def refusal_file(folder: Path, number: int, rank: int) -> Path:
    """The file in which rank `rank` writes why it could not carry out command `number`."""
    return folder / f"refused-{number}-{rank}"


def mark_file(folder: Path, rank: int) -> Path:
    """The file whose content changes while rank `rank` runs."""
    return folder / f"pulse-{rank}"


def joining_file(folder: Path, rank: int) -> Path:
    """The file that rank `rank` creates when it is about to join the group."""
    return folder / f"here-{rank}"


class RankProcesses(Monitor):
    """The processes of ranks 1 … size−1, and rank 0's `RankMonitor` for them.

    The event loop starts, watches and closes them. The thread that waits for a command of rank 0 calls `lost`
    and `refused`.
    """

    def __init__(self, processes: LocalProcesses, run: RunDir, size: int) -> None:
        super().__init__(RankLost)
        self._processes = processes
        self._run = run
        self._size = size
        self._children: dict[int, Child] = {}
        self._leave_s = _LEAVE_SECONDS
        self.here = [rank for rank in range(size) if not rank or not processes.is_remote(f"rank-{rank}")]
        """Ranks on the trainer's machine."""
        apart = len(self.here) < size
        # Ranks on other machines can read the run directory, but no other folder of this machine.
        self._folder = OwnedFolder("understudy-ranks-", run.path if apart else None, tidy=not apart)
        self.coordination = self._folder.path
        self.rendezvous = (
            f"tcp://{processes.address}:{_free_port(processes.address)}"
            if apart
            else f"file://{self.coordination / 'rendezvous'}"
        )

    async def start(self, rank: int) -> None:
        name = f"rank-{rank}"
        arguments = ["--run", str(self._run.path), "--rank", str(rank), "--size", str(self._size)]
        arguments += ["--coordination", str(self.coordination), "--rendezvous", self.rendezvous]
        child = await self._processes.start(name, "understudy.assembly.processes.rank", arguments)
        self._children[rank] = child
        mark = partial(newest_mark, mark_file(self.coordination, rank))
        self.add(rank, f"rank {rank} of {self._size}", child, mark)

    async def all_joining(self) -> None:
        """Returns once all ranks are about to join. If one fails before that, `start` raises in its own
        task."""
        while not all(joining_file(self.coordination, rank).exists() for rank in range(1, self._size)):
            await asyncio.sleep(_POLL_SECONDS)

    def refused(self, number: int) -> dict[int, str]:
        found: dict[int, str] = {}
        for rank in self._children:
            with suppress(OSError):
                found[rank] = refusal_file(self.coordination, number, rank).read_text()
        return found

    def end_at_once(self) -> None:
        """From now on neither the ranks nor a call that involves them is waited for."""
        self._leave_s = 0.0
        self._loss = self._loss or RankLost("the ranks were ended with the run")

    async def close(self) -> None:
        """Waits for the ranks to end after a stop command, and ends those that do not."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._leave_s
        while any(child.alive for child in self._children.values()) and loop.time() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.gather(*(self._processes.stop(child.name) for child in self._children.values()))
        self._folder.close()


async def start_ranks(
    size: int,
    run: RunDir,
    processes: LocalProcesses,
    student: LoadedModel,
    settings: PolicySettings,
    on_bad_rows: BadRows,
    stack: AsyncExitStack,
    view: LiveView,
) -> LeadingPolicy:
    """Starts ranks 1 … n−1 as child processes, joins them with rank 0 in this process and shards the student.
    `stack` undoes it all.

    If a rank is lost later, the calling task is cancelled and the stack raises the rank's error.
    """
    ranks, thread = RankProcesses(processes, run, size), RankThread()
    _one_device_each(len(ranks.here), student.device)

    def lead() -> tuple[RankGroup, Policy]:
        group = join_at(0, size, ranks.rendezvous, student.device)
        return group, Policy(
            student.model, settings, on_bad_rows=on_bad_rows, ranks=group, pictures=student.pictures
        )

    async def join() -> tuple[RankGroup, Policy]:
        # Not sooner: a wait in torch's rendezvous for a missing rank cannot be cancelled. And torch numbers
        # the groups of a process, so a later group of this process would never match that of its ranks.
        await ranks.all_joining()
        return await asyncio.wrap_future(thread.submit(lead))

    stack.callback(thread.close)
    stack.push_async_callback(_leave, thread)
    stack.push_async_callback(ranks.close)
    with view.work(f"starting {size - 1} more rank(s)"):
        async with asyncio.TaskGroup() as tasks:
            for rank in range(1, size):
                tasks.create_task(ranks.start(rank))
            mine = tasks.create_task(join())
    group, policy = mine.result()
    leading = LeadingPolicy(policy, group, thread, ranks)
    stack.push_async_exit(partial(_end_ranks, leading, ranks, thread))
    watchers = await stack.enter_async_context(asyncio.TaskGroup())
    watcher = watchers.create_task(ranks.watch())
    stack.callback(watcher.cancel)
    return leading


async def _end_ranks(
    leading: LeadingPolicy,
    ranks: RankProcesses,
    thread: RankThread,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """After a successful run all ranks leave the group together. After an error they are ended at once,
    because a rank may be stuck in a collective and would not receive a command."""
    ranks.expect_exit()
    if error is None:
        await asyncio.to_thread(leading.close)
        await _leave(thread)
    else:
        ranks.end_at_once()


async def forget_group() -> bool:
    """Leaves the group. Returns whether this process may join ranks again: not while a call still waits for
    the lost ones."""
    for way in (leave, abandon):
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                await asyncio.to_thread(way)
        except Exception as error:
            logger.warning(
                "the group of ranks could not be left (%s): %s", way.__name__, error or type(error).__name__
            )
            if isinstance(error, TimeoutError):
                break  # its thread is still inside torch
        if not torch.distributed.is_initialized():
            return True
    return not torch.distributed.is_initialized()


async def _leave(thread: RankThread) -> None:
    """Leaves the group, or abandons it. A collective that a lost rank has not joined blocks the trainer's stream
    until then, and the engine, which closes later, waits for that stream."""
    try:
        async with asyncio.timeout(_LEAVE_SECONDS):
            await asyncio.wrap_future(thread.submit(leave))
    except Exception:
        await forget_group()


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def _one_device_each(size: int, device: torch.device) -> None:
    if device.type == "cuda" and device.index is None and torch.cuda.device_count() < size:
        raise ConfigError(
            f"trainer.ranks = {size} needs {size} GPUs, this machine shows {torch.cuda.device_count()}; "
            "lower trainer.ranks, or set student.device = 'cuda:0' (all ranks share that GPU) or 'cpu'"
        )
