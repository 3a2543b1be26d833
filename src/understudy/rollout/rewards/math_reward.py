"""The math-verify reward: 1.0 if the answer equals the row's `answer` (of a list, any of them), graded in a jailed child.

    [data]
    reward = "understudy.rollout.rewards.math_reward:math_verify"

A text that takes longer than the deadline to grade is worth 0.0 and counted in the metric `timeout`. The
metric `parsed` is the share of texts in which an expression was found. A reference answer that cannot be parsed raises `DataError`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from understudy.errors import ConfigError, DataError
from understudy.rollout.rewards.builtin import answers_of
from understudy.rollout.tools.base import ToolOutcome, ToolResult
from understudy.rollout.tools.sandbox import Isolation, Sandbox, namespace_problem
from understudy.rollout.tools.workers import FunctionWorkers

DEADLINE_S = 10.0
PROCESSES = 2


class MathVerify:
    """The reward as an object, for other settings: `grade = MathVerify(deadline_s=3)` in your own module."""

    def __init__(
        self, *, deadline_s: float = DEADLINE_S, processes: int = PROCESSES, memory_mb: int = 1024
    ) -> None:
        self._deadline_s, self._processes, self._memory_mb = deadline_s, processes, memory_mb
        # Per event loop: a child process belongs to the loop that started it.
        self._workers: WeakKeyDictionary[asyncio.AbstractEventLoop, FunctionWorkers] = WeakKeyDictionary()

    async def __call__(self, row: Mapping[str, Any], text: str) -> dict[str, float]:
        best: dict[str, float] | None = None
        for answer in answers_of(row):
            arguments = {"answer": answer, "text": text}
            result = await self._pool().call(arguments, deadline_s=self._deadline_s)
            unreadable = result.outcome is ToolOutcome.ERROR and "reference answer" in result.text
            if not unreadable:
                found = _scored(result)
                best = found if best is None else {name: max(best[name], found[name]) for name in best}
                if best["score"] or best["timeout"]:
                    break
        if best is None:
            raise DataError(result.text)
        return best

    def _pool(self) -> FunctionWorkers:
        loop = asyncio.get_running_loop()
        if loop not in self._workers:
            if importlib.util.find_spec("math_verify") is None:
                raise ConfigError(
                    "the math_verify reward needs the package math-verify: pip install math-verify"
                )
            # The grading function is ours: without namespaces, a child with a deadline and a memory limit is
            # enough.
            isolation = Isolation.NONE if namespace_problem() else Isolation.NAMESPACES
            folders = [str(Path(__file__).parents[1] / "tools"), *_package_folders()]
            sandbox = Sandbox(isolation, self._memory_mb)
            self._workers[loop] = FunctionWorkers(sandbox, "math_grader:grade", folders, self._processes)
        return self._workers[loop]

    async def close(self) -> None:
        """Ends this event loop's grading processes; they also end when this process does."""
        pool = self._workers.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.close()


def _scored(result: ToolResult) -> dict[str, float]:
    verdict = result.text if result.outcome is ToolOutcome.OK else ""
    return {
        "score": float(verdict == "right"),
        "parsed": float(verdict in ("right", "wrong")),
        "timeout": float(result.outcome is ToolOutcome.TIMEOUT),
    }


def _package_folders() -> list[str]:
    spec = importlib.util.find_spec("math_verify")
    found = [str(Path(spec.origin).parent.parent)] if spec and spec.origin else []
    return list(dict.fromkeys([*found, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]))


math_verify = MathVerify()
