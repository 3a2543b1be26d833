"""Calls the user's code (rewards, agent loops, tools) so that what it raises costs its row, not the run.

`SystemExit` and `KeyboardInterrupt` leave the event loop when a task raises them, and end the process. A
`CancelledError` passes for the cancellation of our own task. A `StopIteration` cannot be put into a future.
User code raises them where it runs text that a model wrote, or awaits a task of its own that was cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")


def as_ordinary(error: BaseException) -> Exception:
    """The error, or a `RuntimeError` with its name and text if it is no ordinary `Exception`."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    ordinary = RuntimeError(f"{type(error).__name__}: {error}".removesuffix(": "))
    ordinary.__cause__ = error
    return ordinary


async def awaited(work: Awaitable[Result]) -> Result:
    """The result of user code; it raises ordinary exceptions alone, or our own task's cancellation."""
    try:
        return await work
    except SystemExit as error:
        raise as_ordinary(error) from error
    except (asyncio.CancelledError, KeyboardInterrupt) as error:
        # The user's Ctrl-C has cancelled this task before it raises KeyboardInterrupt anywhere.
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise as_ordinary(error) from error
