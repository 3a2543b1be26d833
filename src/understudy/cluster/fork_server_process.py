"""The fork server's process: imports the heavy modules once, then forks one child per job.

| message | direction | when |
|---|---|---|
| `{"ready": bool, "why": …}` | to the launcher | imports are done; `ready` is false if extra threads run |
| job: module, arguments, env, folder; the descriptors of the log and, if any, the pipe | from the launcher | a child is wanted |
| `{"pid": …}` | to the launcher | the child is forked and has its own session |
| `{"gone": pid, "code": …}` | to the launcher | the child ended; it stays a zombie |
| `{"bury": pid}` | from the launcher | the exit code was read; the zombie is reaped |

The server never computes: forking a process that has threads or a CUDA context is unsafe. It exits when its
socket closes.

A spare process (`spare_processes.py`) begins in the same way, but does not fork: it becomes the child of its first
job.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from setproctitle import getproctitle, setproctitle

from understudy.cluster.mps import uses_cuda

MODULES = ("torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
"""The modules that take seconds to import, besides numpy."""
LARGEST = 1 << 18
"""The most bytes of a message, most of which is the environment."""


@dataclass(frozen=True, slots=True)
class Job:
    """One child to become: which module it runs, with which arguments and environment, in which folder."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str


def main(number: int, modules: Sequence[str], forks: bool = True) -> None:
    line = socket.socket(fileno=number)
    getproctitle()  # first call: it locates the title's memory by the environment as it was at the start
    gc.disable()  # imports leave little garbage, and looking for it takes a seventh of their CPU time
    importlib.import_module("numpy")
    known = _threads()  # threads of numpy's OpenBLAS, which stops them before a fork
    for module in modules:
        importlib.import_module(module)
    why_not = _why_no_fork(known) if forks else _why_no_spare()
    _tell(line, {"ready": why_not is None, "why": why_not})
    if why_not is not None:
        return
    if forks:
        gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, every page
    gc.enable()
    job = _serve(line) if forks else _only_job(line)
    if job is not None:  # in a child; run from here so that it exits as any program does
        _become(job)


def _why_no_fork(known: int) -> str | None:
    return f"{_threads()} threads run where {known} did" if _threads() > known else None


def _why_no_spare() -> str | None:
    """CUDA reads its variables when it is opened, and the job brings others."""
    return "an import has opened CUDA" if uses_cuda() else None


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _tell(line: socket.socket, message: dict[str, Any]) -> None:
    line.send(json.dumps(message).encode())


def _serve(line: socket.socket) -> Job | None:
    """Returns twice: a `Job` in each forked child, None in the fork server when the launcher closed the
    socket."""
    ends: dict[int, int] = {}
    """Pid by pidfd."""
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
            log, *pipe = given
            pid = _fork(line, log, list(ends))
            if pid == 0:
                return _job(asked, pipe)
            for descriptor in given:
                os.close(descriptor)
            end = os.pidfd_open(pid)
            ends[end] = pid
            waiting.register(end, select.POLLIN)
            _tell(line, {"pid": pid})


def _only_job(line: socket.socket) -> Job | None:
    """The job of a spare process; None when the launcher closed the socket."""
    message, given, _, _ = socket.recv_fds(line, LARGEST, 2)
    line.close()
    if not message:
        return None
    log, *pipe = given
    _print_to(log)
    return _job(json.loads(message), pipe)


def _job(asked: dict[str, Any], pipe: list[int]) -> Job:
    watch = ["--watch-fd", str(pipe[0])] if pipe else []
    return Job(asked["module"], [*asked["arguments"], *watch], asked["env"], asked["folder"])


def _code(pid: int) -> int:
    """The exit code as in `subprocess`: negative for a signal.

    The zombie stays, so that its pid is not reused.
    """
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _fork(line: socket.socket, log: int, others: list[int]) -> int:
    """Returns 0 in the child. The parent returns only when the child has its own session."""
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
    _print_to(log)
    return 0


def _print_to(log: int) -> None:
    """Standard input stays /dev/null, as the launcher set it."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _become(job: Job) -> None:
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.folder)
    sys.argv = [job.module, *job.arguments]
    sys.modules["numpy"].random.seed()  # otherwise all forks would draw the same numbers
    setproctitle(" ".join((sys.executable, "-m", job.module, *job.arguments)))  # shown by `ps`
    try:
        runpy.run_module(job.module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    _leave(code)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _leave(code: int) -> None:
    """Ends the process as the interpreter does, apart from its last garbage collection. That collection goes through
    everything the fork server imported, and so copies it: 2 to 3 s of CPU time in each child."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
