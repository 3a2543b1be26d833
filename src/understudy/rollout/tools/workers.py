"""Long-lived jailed processes that serve one function.

The function is trusted (ours, or the user's), its arguments are not: a call that overruns its deadline or
crashes costs only its process. A process serves one call at a time and ends when our side of its stdin
closes, so none outlives this process.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from understudy.errors import ConfigError
from understudy.rollout.tools.base import ToolOutcome, ToolResult
from understudy.rollout.tools.child import ToolChild
from understudy.rollout.tools.sandbox import Sandbox, end_child, start_child

_START_S = 60.0
"""Includes the import of the user's module."""


class FunctionWorkers:
    """Up to `count` processes, started on demand. Used on one event loop."""

    def __init__(self, sandbox: Sandbox, function: str, paths: Sequence[str], count: int) -> None:
        self._sandbox, self._function, self._paths = sandbox, function, tuple(paths)
        self._places = asyncio.Semaphore(count)
        self._idle: list[ToolChild] = []

    async def call(self, arguments: Mapping[str, Any], *, deadline_s: float) -> ToolResult:
        async with self._places:
            child = self._idle.pop() if self._idle else await self._start()
            start = time.perf_counter()
            answer: dict[str, Any] | None = None
            try:
                async with asyncio.timeout(deadline_s):
                    answer = await self._ask(child, arguments)
            except TimeoutError:
                answer = {"timeout": True, "text": f"the tool was stopped after {deadline_s:g} s"}
            finally:
                # Cancelled, overrun or dead: the process is in an unknown state.
                if answer is None or "timeout" in answer:
                    await end_child(self._sandbox, child)
                else:
                    self._idle.append(child)
            return self._result(answer, time.perf_counter() - start)

    def _result(self, answer: dict[str, Any] | None, seconds: float) -> ToolResult:
        if answer is None:
            return ToolResult(ToolOutcome.ERROR, "the tool's process died", seconds)
        text, limit = answer["text"], self._sandbox.output_bytes
        if len(text) > limit:
            text = text[:limit] + "\n… (cut off)"
        if "timeout" in answer:
            return ToolResult(ToolOutcome.TIMEOUT, text, seconds)
        return ToolResult(ToolOutcome.OK if answer["ok"] else ToolOutcome.ERROR, text, seconds)

    async def _start(self) -> ToolChild:
        job = {"kind": "serve", "name": self._function, "paths": list(self._paths)}
        child = await start_child(self._sandbox, job, self._paths, cpu_s=None)
        output = b""
        try:
            async with asyncio.timeout(_START_S):
                output = await child.stdout.readline()
                if output == b'{"ready": true}\n':
                    return child
                output += await child.stdout.read()
        except TimeoutError:
            output += f"not ready after {_START_S:g} s".encode()
        except BaseException:
            await end_child(self._sandbox, child)
            raise
        await end_child(self._sandbox, child)
        problem = output.decode(errors="replace").strip() or "it printed nothing"
        raise ConfigError(f'the tool "{self._function}" cannot be started: {problem}')

    async def _ask(self, child: ToolChild, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """The child's answer; None if it died."""
        try:
            child.stdin.write(json.dumps(dict(arguments)).encode() + b"\n")
            await child.stdin.drain()
            line = await child.stdout.readline()
        except (BrokenPipeError, ConnectionResetError, ValueError):
            return None  # ValueError: a line longer than the reader takes
        return json.loads(line) if line.endswith(b"\n") else None

    async def close(self) -> None:
        while self._idle:
            await end_child(self._sandbox, self._idle.pop())
