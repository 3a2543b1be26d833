"""The nursery's own process: imports once what every process of a run imports, then forks one child per job.

    socket ──job, log, pipe──> fork ──> child: its own session, log, environment, arguments; then `python -m module`
       └──<── {"pid": …} when it runs, {"gone": pid, "code": …} when it ended; it is buried when the launcher has taken note

It never computes anything: a fork of a process with threads, or with a CUDA context, is a broken one. It ends when its socket does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from setproctitle import getproctitle, setproctitle

MODULES = ("torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
"""What takes seconds to import, beside numpy."""
LARGEST = 1 << 18
"""Bytes of a message; most of it is the environment."""


@dataclass(frozen=True, slots=True)
class Job:
    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str


def main(number: int, modules: Sequence[str]) -> None:
    line = socket.socket(fileno=number)
    getproctitle()  # finds the place of titles by the environment as it was at the start
    importlib.import_module("numpy")
    known = _threads()  # of its OpenBLAS, which ends them before a fork
    for module in modules:
        importlib.import_module(module)
    why_not = f"{_threads()} threads run where {known} did" if _threads() > known else None
    _tell(line, {"ready": why_not is None, "why": why_not})
    if why_not is not None:
        return
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page
    job = _serve(line)
    if job is not None:  # in a child; here, so that it ends as any program does
        _become(job)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _tell(line: socket.socket, message: dict[str, Any]) -> None:
    line.send(json.dumps(message).encode())


def _serve(line: socket.socket) -> Job | None:
    """A job in the child that is to do it; None in the nursery itself, when nobody is left to give any."""
    ends: dict[int, int] = {}
    """By descriptor: the process whose end it shows."""
    waiting = select.poll()
    waiting.register(line, select.POLLIN)
    while True:
        for descriptor, _ in waiting.poll():
            if descriptor in ends:
                waiting.unregister(descriptor)
                os.close(descriptor)
                _tell(line, {"gone": (pid := ends.pop(descriptor)), "code": _code(pid)})
                continue
            message, given, _, _ = socket.recv_fds(line, LARGEST, 2)
            if not message:
                return None
            asked = json.loads(message)
            if "bury" in asked:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(asked["bury"], 0)
                continue
            log, pipe = given
            pid = _fork(line, log, pipe, list(ends))
            if pid == 0:
                return Job(
                    asked["module"],
                    [*asked["arguments"], "--watch-fd", str(pipe)],
                    asked["env"],
                    asked["folder"],
                )
            os.close(log)
            os.close(pipe)
            end = os.pidfd_open(pid)
            ends[end] = pid
            waiting.register(end, select.POLLIN)
            _tell(line, {"pid": pid})


def _code(pid: int) -> int:
    """As `subprocess` has it: a signal's number is negative. The dead stay where they are: their number must not be given to others."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _fork(line: socket.socket, log: int, pipe: int, others: list[int]) -> int:
    """0 in the child, which has a session of its own before anybody hears of it."""
    hear, say = os.pipe()
    pid = os.fork()
    if pid:
        os.close(say)
        os.read(hear, 1)
        os.close(hear)
        return pid
    os.setsid()
    os.close(hear)
    os.close(say)
    line.close()
    for other in others:
        os.close(other)
    os.dup2(log, 1)  # standard input stays what the nursery has: nothing
    os.dup2(log, 2)
    os.close(log)
    return 0


def _become(job: Job) -> None:
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.folder)
    sys.path[0] = job.folder
    sys.argv = [job.module, *job.arguments]
    sys.modules["numpy"].random.seed()  # forks would all draw the same
    setproctitle(" ".join((sys.executable, "-m", job.module, *job.arguments)))  # for `ps`
    runpy.run_module(job.module, run_name="__main__", alter_sys=True)
