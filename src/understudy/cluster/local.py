"""Child processes on this machine, started, watched and ended by us.

A child is its own session, so a Ctrl-C in the terminal reaches the launcher alone and the launcher decides.
It inherits the read end of a pipe whose write end only the launcher holds: when the launcher dies, however it dies,
the pipe closes and the child ends itself. So no child outlives its run, kill -9 of the launcher included.
"""

from __future__ import annotations

import asyncio
import contextlib
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

from understudy.cluster import nursery
from understudy.errors import ChildDied, ClusterError
from understudy.observability.forks import only_here

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0
_LAST_WORDS = 12


@dataclass(slots=True)
class Child:
    name: str
    process: nursery.Process
    log: Path
    ready: dict[str, Any]
    """What the child wrote into its ready file: at least `url` for servers."""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


class LocalProcesses:
    """Starts Python modules as children; every one of them ends with `close`."""

    def __init__(self, logs: Path, start_timeout: float = 180.0) -> None:
        self._logs = logs
        self._start_timeout = start_timeout
        self._children: dict[str, Child] = {}
        self._pipe_read, self._pipe_write = os.pipe()
        os.set_inheritable(self._pipe_read, True)
        only_here(self, LocalProcesses._close_pipe)

    @property
    def children(self) -> Mapping[str, Child]:
        return self._children

    @property
    def address(self) -> str:
        """Where this machine is reached by the machines its processes are on."""
        return "127.0.0.1"

    def is_elsewhere(self, name: str) -> bool:
        """Whether a process of this name would be on another machine."""
        return False

    def shares_memory(self, name: str) -> bool:
        """Whether the process of this name, as it runs now, is on this machine and sees its memory."""
        return True

    async def ready(self) -> None:
        """Wait until processes can be started: at once on this machine."""

    async def start(
        self, name: str, module: str, arguments: Sequence[str], env: Mapping[str, str] | None = None
    ) -> Child:
        """Start `python -m module …` and wait until it says it is ready.

        The module must take `--ready-file PATH` and `--watch-fd N`. Its last words are the error when it dies first.
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
            start_of_words = sink.tell()
            process = await self._forked(module, arguments, environment, sink.fileno())
            process = process or self._begun(module, arguments, environment, sink.fileno())
        child = Child(name, process, log, {})
        self._children[name] = child
        try:
            child.ready = await self._until_ready(child, ready_file, start_of_words)
        except BaseException:
            await self.stop(name)
            raise
        return child

    async def _forked(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: int
    ) -> nursery.Process | None:
        """The process out of this launcher's nursery; None where there is none, or none for it."""
        found = nursery.current()
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
    ) -> nursery.Process:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments, "--watch-fd", str(self._pipe_read)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[self._pipe_read],
            start_new_session=True,
        )

    async def _until_ready(self, child: Child, ready_file: Path, start_of_words: int) -> dict[str, Any]:
        deadline = time.monotonic() + self._start_timeout
        while not ready_file.exists():
            if not child.alive:
                words = _last_words(child.log, start_of_words)
                raise ChildDied(
                    f"{words}\n(process {child.name} ended with code {child.process.returncode}; log: {child.log})"
                )
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"process {child.name} was not ready after {self._start_timeout:.0f} s; "
                    f"see {child.log}, or raise cluster.start_timeout_seconds"
                )
            await asyncio.sleep(_POLL_SECONDS)
        ready = json.loads(ready_file.read_text())
        ready_file.unlink()
        return dict(ready)

    def last_words(self, name: str) -> str:
        """The end of what a process said, in this life or the one before; nothing where it never ran."""
        log = self._logs / f"{name}.log"
        return _last_words(log, 0) if log.exists() else ""

    async def stop(self, name: str) -> None:
        """SIGTERM, a moment of grace, then SIGKILL to the child's whole session."""
        child = self._children.pop(name, None)
        if child is None:
            return
        try:
            _signal(child, signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_SECONDS
            while child.alive and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_SECONDS)
        finally:  # also where whoever waits is cancelled: nobody else knows of the child any more
            _signal(child, signal.SIGKILL)
            child.process.wait()

    async def close(self) -> None:
        await asyncio.gather(*(self.stop(name) for name in list(self._children)))
        self._close_pipe()

    def kill_now(self) -> None:
        """For the second Ctrl-C: no grace, no waiting."""
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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)


def _last_words(log: Path, start: int) -> str:
    """The child's own error: its last lines since it was started."""
    with log.open("rb") as handle:
        handle.seek(start)
        lines = [line for line in handle.read().decode(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_LAST_WORDS:]) if lines else "(it said nothing)"


_LAST_WORDS_BYTES = 8192
SUPERVISOR_GONE = "(its supervisor is gone"
"""How the log of a process elsewhere ends when its machine does."""


def obituary(who: str, child: Child, said_before: int, *, elsewhere: bool) -> str:
    """How a process ended, in its own words where it left any after the first `said_before` bytes of its log."""
    code = child.process.returncode or 0
    lines: list[str] = []
    with suppress(OSError), child.log.open("rb") as handle:  # its log may be gone, or never have come
        handle.seek(max(said_before, child.log.stat().st_size - _LAST_WORDS_BYTES))
        lines = [line for line in handle.read().decode(errors="replace").splitlines() if line.strip()]
    words = lines[-1].strip() if lines else "it said nothing"
    if code < 0 and elsewhere and words.startswith(SUPERVISOR_GONE):
        return f"{who} went with its machine {words}; log: {child.log}"
    if code < 0:
        return f"{who} was killed by {signal.Signals(-code).name} (out of memory, or by somebody); log: {child.log}"
    return f"{words} ({who} ended with code {code}; log: {child.log})"
