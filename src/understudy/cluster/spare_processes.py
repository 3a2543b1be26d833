"""Spare processes: import ahead, and become a child when one is wanted.

    SpareProcesses(…) ──> each imports while the trainer checks and loads ──> start(…) ──> runs `python -m module`

They take the place of a fork server (`fork_server.py`) on machines with a GPU, where a process that has imported
torch must not be forked. There is one for each child that a run will start; a child that finds none left is started
as a plain subprocess, as is one whose environment differs in variables that libraries read when they load. Variables
of CUDA may differ: it reads them when it is opened, and a spare process that has opened it is not used.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from understudy.cluster import fork_server
from understudy.cluster.fork_server import ChildProcess, begin, can_fork, job_message, read_at_load
from understudy.cluster.fork_server_process import LARGEST, MODULES
from understudy.observability.forks import close_in_forks


class _Spare:
    """One spare process and the socket to it."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.setblocking(False)
        with theirs:
            self.process = begin(theirs.fileno(), modules, environment, forks=False)
        self._ready: bool | None = None
        close_in_forks(self, _Spare.let_go)

    def ready(self) -> bool | None:
        """None while it imports; False if it must not be used, or has ended."""
        if self._ready is None:
            try:
                message = self.line.recv(LARGEST)
            except BlockingIOError:
                return None
            except OSError:
                message = b""
            self._ready = bool(message) and bool(json.loads(message)["ready"])
        return self._ready

    def let_go(self) -> None:
        self.line.close()

    def close(self) -> None:
        self.let_go()
        self.process.kill()
        self.process.wait()


class SpareProcesses:
    """The spare processes that this launcher has left (a `ProcessSource`)."""

    def __init__(self, env: Mapping[str, str], count: int, modules: Sequence[str] = MODULES) -> None:
        environment = {**os.environ, **env}
        self._environment = _without_cuda(environment)
        self._left = [_Spare(environment, modules) for _ in range(count)]

    @property
    def over(self) -> bool:
        return not self._left

    def ready(self) -> bool:
        """Whether one of them can become a child now."""
        for lost in [spare for spare in self._left if spare.ready() is False]:
            self._left.remove(lost)
            lost.close()
        return any(spare.ready() for spare in self._left)

    def takes(self, environment: Mapping[str, str]) -> bool:
        return _without_cuda(environment) == self._environment

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: int,
        pipe: int | None,
    ) -> ChildProcess:
        """Gives one of them the job. Call it when `ready` was true; only a child with a pipe is given `--watch-fd`."""
        message = job_message(module, arguments, environment)
        spare = next(spare for spare in self._left if spare.ready())
        self._left.remove(spare)
        try:
            socket.send_fds(spare.line, [message], [log] if pipe is None else [log, pipe])
        except OSError:
            spare.close()
            raise
        spare.let_go()
        return spare.process

    def close(self) -> None:
        for spare in self._left:
            spare.close()
        self._left.clear()


@contextmanager
def prepared_spares(env: Mapping[str, str], count: int, modules: Sequence[str] = MODULES) -> Iterator[None]:
    """`count` spare processes for the duration of the block, on a Linux machine whose processes must not fork."""
    if not count or fork_server.current() is not None or can_fork() or sys.platform != "linux":
        yield
        return
    with fork_server.used(SpareProcesses(env, count, modules)):
        yield


def _without_cuda(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in read_at_load(environment).items() if not name.startswith("CUDA_")}
