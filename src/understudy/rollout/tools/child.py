"""A tool's child process with its pipes on the event loop. It is waited for by `end` alone.

asyncio's own processes are waited for as soon as they end, after which the number of their group may be another's
(`serving/process_group.py`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from understudy.serving.process_group import end_group, has_ended, signal_group

_LONGEST_PAUSE_S = 0.02
_LINE_BYTES = 1 << 22
"""Longest line that is read."""


class ToolChild:
    """Leader of a process group and a session of its own. Created by `start`; used on one event loop."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.stdout = asyncio.StreamReader(limit=_LINE_BYTES)
        self.stdin: asyncio.StreamWriter
        self._transports: list[asyncio.BaseTransport] = []

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> ToolChild:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd="/",
            bufsize=0,
            start_new_session=True,
        )
        child = cls(process)
        try:
            await child._connect()
        except BaseException:
            await child.end()
            raise
        return child

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()

        def protocol(reader: asyncio.StreamReader) -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(reader, loop=loop)

        reading, _ = await loop.connect_read_pipe(lambda: protocol(self.stdout), self.process.stdout)
        self._transports.append(reading)
        own: Any
        writing, own = await loop.connect_write_pipe(
            lambda: protocol(asyncio.StreamReader()), self.process.stdin
        )
        self._transports.append(writing)
        self.stdin = asyncio.StreamWriter(writing, own, None, loop)

    @property
    def ended(self) -> bool:
        return has_ended(self.process)

    async def wait(self) -> None:
        """Until it has ended; its exit code is that of `end`."""
        pause = 0.0005
        while not self.ended:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def terminate(self) -> None:
        """SIGTERM to the child alone. `Popen.send_signal` would wait for one that has ended."""
        if self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGTERM)

    async def end(self) -> int:
        """SIGKILL to its group, and waits for it; returns the exit code, which is its own if it had ended."""
        signal_group(self.process, signal.SIGKILL)
        try:
            await self.wait()
        finally:
            for one in self._transports or filter(None, (self.process.stdin, self.process.stdout)):
                one.close()
        return end_group(self.process)
