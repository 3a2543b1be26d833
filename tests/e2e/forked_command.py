"""A command as a process of its own, forked from one that has imported torch: an import costs seven seconds of CPU time."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from understudy.cluster import fork_server


class ForkedCommand:
    """A running command with the part of `subprocess.Popen` that tests use; its output is read from a pipe."""

    def __init__(self, child: fork_server.ChildProcess, output: int) -> None:
        self.pid = child.pid
        self._child = child
        self._output = output
        self._received = b""

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    def poll(self) -> int | None:
        return self._child.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._child.wait(timeout)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 150) -> tuple[str, None]:
        """Reads the output until it is closed, then waits for the process to end."""
        deadline = time.monotonic() + timeout
        while self._output >= 0:
            if not select.select([self._output], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout, self._received)
            if chunk := os.read(self._output, 1 << 16):
                self._received += chunk
            else:
                os.close(self._output)
                self._output = -1
        self.wait(max(deadline - time.monotonic(), 1))
        return self._received.decode(), None


def forked_command(
    arguments: Sequence[str], env: Mapping[str, str], log: int | None = None
) -> ForkedCommand | None:
    """Runs `python -m understudy.cli.main` with these arguments; None if this process has no fork server for `env`.
    With `log`, the output goes to that file descriptor."""
    server = fork_server.current()
    if server is None or not server.takes(env):
        return None
    while not server.ready():
        if server.over:
            return None
        time.sleep(0.05)
    if log is not None:
        return ForkedCommand(server.start("understudy.cli.main", arguments, env, log, None), -1)
    output, theirs = os.pipe()
    try:
        return ForkedCommand(server.start("understudy.cli.main", arguments, env, theirs, None), output)
    finally:
        os.close(theirs)
