"""Child processes on this machine: starts, watches and stops them.

A child runs in its own session (setsid), so Ctrl-C in the terminal reaches the launcher alone, which decides
what to stop. A child inherits the read end of a pipe whose write end only the launcher holds. When the
launcher dies, by kill -9 too, the pipe closes and the child exits. So no child outlives its run.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.cluster import fork_server
from understudy.errors import ChildDied, ClusterError
from understudy.observability.forks import close_in_forks

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0
_LAST_LINES = 12
_LAST_BYTES = 1 << 16
_STACKS = "Fatal Python error: "
_END_OF_STACKS = ("Extension modules: ", "  File ")
"""How the output of Python's faulthandler begins, and how its last line does (`serving/process.py`)."""
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
SUPERVISOR_GONE = "(its supervisor is gone"
"""How the log of a remote process ends when its machine or its supervisor is lost."""


@dataclass(slots=True)
class Child:
    """One started process; held by `LocalProcesses`."""

    name: str
    process: fork_server.ChildProcess
    log: Path
    ready: dict[str, Any]
    """What the child wrote into its ready file: at least `url` for servers."""
    log_start: int = 0
    """The size of its log before it started."""
    remote: bool = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self.process.returncode

    def exit_report(self, who: str) -> str:
        """How the process ended: its exit code or signal, and its last log line."""
        code, lines = self.exit_code or 0, _last_lines(self.log, self.log_start)
        last_line = lines[-1].strip() if lines else "it printed nothing"
        if code < 0 and self.remote and last_line.startswith(SUPERVISOR_GONE):
            return f"{who} was lost with its machine {last_line}; log: {self.log}"
        if code < 0:
            number = signal.Signals(-code)
            why = "out of memory, or by a user or another process"
            if number in _CRASHES:
                why = "a crash in native code; the log has its stack"
            return f"{who} was killed by {number.name} ({why}); log: {self.log}"
        return f"{last_line} ({who} ended with code {code}; log: {self.log})"


class LocalProcesses:
    """Starts Python modules as child processes and stops all of them in `close`.

    Holds the children by name and both ends of the launcher's pipe. Called on the launcher's event loop.
    """

    def __init__(self, logs: Path, start_timeout: float = 180.0) -> None:
        self._logs = logs
        self._start_timeout = start_timeout
        self._children: dict[str, Child] = {}
        self._pipe_read, self._pipe_write = os.pipe()
        os.set_inheritable(self._pipe_read, True)
        close_in_forks(self, LocalProcesses._close_pipe)

    @property
    def children(self) -> Mapping[str, Child]:
        return self._children

    @property
    def address(self) -> str:
        """The address by which our processes reach this machine."""
        return "127.0.0.1"

    def is_remote(self, name: str) -> bool:
        """Whether a process of this name runs remotely, on a machine of a cluster."""
        return False

    def shares_memory(self, name: str) -> bool:
        """Whether the process of this name runs on this machine now and so can share memory with us."""
        return True

    async def ready(self) -> None:
        """Wait until processes can be started. Returns at once for local processes."""

    async def watch(self) -> None:
        """Raises once every machine is lost and no other will come. Local processes have no other machine."""

    async def start(
        self, name: str, module: str, arguments: Sequence[str], env: Mapping[str, str] | None = None
    ) -> Child:
        """Start `python -m module …` and wait until it has written its ready file.

        The module must take `--ready-file PATH` and `--watch-fd N`. If it dies first, `ChildDied` carries the
        end of its log.
        """
        if name in self._children and self._children[name].alive:
            raise ClusterError(f"process {name} runs already")
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{name}.log"
        ready_file = self._logs / f".{name}.ready"
        ready_file.unlink(missing_ok=True)
        arguments = [*arguments, "--ready-file", str(ready_file)]
        environment = {**os.environ, **(env or {})}
        with log.open("ab") as sink:
            log_start = sink.tell()
            process = await self._forked(module, arguments, environment, sink.fileno())
            process = process or self._begun(module, arguments, environment, sink.fileno())
        child = Child(name, process, log, {}, log_start)
        self._children[name] = child
        try:
            child.ready = await self._until_ready(child, ready_file)
        except BaseException:
            await self.stop(name)
            raise
        return child

    async def _forked(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: int
    ) -> fork_server.ChildProcess | None:
        """A process forked by this launcher's fork server (`fork_server.py`); None if there is no server or it
        cannot serve this one."""
        found = fork_server.current()
        if found is None or not found.takes(environment):
            return None
        deadline = time.monotonic() + self._start_timeout
        while not found.ready():
            if found.over or time.monotonic() > deadline:
                return None
            await asyncio.sleep(_POLL_SECONDS)
        try:
            return found.start(module, arguments, environment, log, self._pipe_read)
        except OSError:
            return None

    def _begun(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: int
    ) -> fork_server.ChildProcess:
        # -P, as wherever Python is started: a random.py in the user's working directory is not imported.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments, "--watch-fd", str(self._pipe_read)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[self._pipe_read],
            start_new_session=True,
        )

    async def _until_ready(self, child: Child, ready_file: Path) -> dict[str, Any]:
        deadline = time.monotonic() + self._start_timeout
        while not ready_file.exists():
            if not child.alive:
                code = child.exit_code or 0
                if code < 0 and -code not in _CRASHES:
                    reason = child.exit_report(f"process {child.name}")
                else:
                    output = _end_of_log(child.log, child.log_start)
                    reason = f"{output}\n(process {child.name} ended with code {code}; log: {child.log})"
                died = ChildDied(reason)
                died.killed = code < 0
                raise died
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"process {child.name} was not ready after {self._start_timeout:.0f} s; "
                    f"see {child.log}, or raise cluster.start_timeout_seconds"
                )
            await asyncio.sleep(_POLL_SECONDS)
        ready = json.loads(ready_file.read_text())
        ready_file.unlink()
        return dict(ready)

    def end_of_log(self, name: str) -> str:
        """The end of a process's log, of an earlier start too; empty if it never ran."""
        log = self._logs / f"{name}.log"
        return _end_of_log(log, 0) if log.exists() else ""

    async def stop(self, name: str) -> None:
        """SIGTERM, up to `_GRACE_SECONDS` of waiting, then SIGKILL to the child's whole process group."""
        child = self._children.pop(name, None)
        if child is None:
            return
        try:
            _signal(child, signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_SECONDS
            while child.alive and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_SECONDS)
        finally:  # also on cancellation: the child is no longer in `_children`, so nothing else would kill it
            _signal(child, signal.SIGKILL)
            child.process.wait()

    async def close(self) -> None:
        await asyncio.gather(*(self.stop(name) for name in list(self._children)))
        self._close_pipe()

    def kill_now(self) -> None:
        """SIGKILL to every child without waiting: for the second Ctrl-C."""
        for child in self._children.values():
            _signal(child, signal.SIGKILL)
        self._close_pipe()

    def _close_pipe(self) -> None:
        for end in (self._pipe_read, self._pipe_write):
            if end >= 0:
                os.close(end)
        self._pipe_read = self._pipe_write = -1


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)


def _end_of_log(log: Path, start: int) -> str:
    """The child's own error: its last log lines from byte `start` on. If they are the stacks of a crash in native
    code, their beginning, where the thread is that crashed."""
    lines = _last_lines(log, start)
    first = len(lines) - _LAST_LINES
    if lines and lines[-1].startswith(_END_OF_STACKS):
        first = max((i for i, line in enumerate(lines) if line.startswith(_STACKS)), default=first)
    output = "\n".join(lines[max(first, 0) :][:_LAST_LINES])
    return output.removeprefix("error: ") or "(it printed nothing)"  # our own error begins with it


def _last_lines(log: Path, start: int) -> list[str]:
    """Lines of the log from byte `start` on, of its last 64 kB. Empty if the log was deleted or never copied here."""
    with suppress(OSError), log.open("rb") as handle:
        handle.seek(max(start, log.stat().st_size - _LAST_BYTES))
        return [line for line in handle.read().decode(errors="replace").splitlines() if line.strip()]
    return []
