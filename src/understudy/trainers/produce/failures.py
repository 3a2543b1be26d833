"""Sorts failures: a sample (a session, or one of its outputs) becomes a dead letter, or the run ends. Stops a session's
clock while it waits."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from understudy.errors import ClusterError, DataError, DataPlaneError, EngineError

INFRASTRUCTURE = (ClusterError, DataPlaneError, EngineError)
"""Errors that no single sample causes. They end the run."""


class SampleFailed(DataError):
    """A sample failed. The message is the full reason: a timeout, or what a worker or an earlier launch
    reported."""


def reason_of(error: Exception) -> str:
    """The reason text of the dead letter."""
    return str(error) if isinstance(error, SampleFailed) else f"{type(error).__name__}: {error}"


def sample_fault(error: Exception) -> Exception:
    """The error, if it is the fault of one sample. Raises it if it must end the run.

    Raises `CancelledError` if the sample's task was cancelled: an agent loop may turn its cancellation into
    another error."""
    if isinstance(error, INFRASTRUCTURE):
        raise error
    if (task := asyncio.current_task()) is not None and task.cancelling():
        raise asyncio.CancelledError from error
    return error


def as_timeout(error: Exception, clock: asyncio.Timeout, what: str, limit: float) -> Exception:
    """A timeout error that names `what` if `clock` expired, otherwise `error`. An agent loop may turn its
    timeout into another error, so the clock decides."""
    if not clock.expired() or isinstance(error, INFRASTRUCTURE):
        return error
    return SampleFailed(f"{what} took longer than rollout.deadline_seconds = {limit:g}")


class PausedClock:
    """Stops a session's clock while it waits for the engine, and under full determinism for the other sessions
    of its batch.

    A class, because a step has hundreds of them and a generator costs several times as much."""

    __slots__ = ("_clock", "_left")

    def __init__(self, clock: asyncio.Timeout) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        due = self._clock.when()
        self._left = None if due is None else due - asyncio.get_running_loop().time()
        if due is not None:  # else stopped already, by another branch of the same loop
            self._clock.reschedule(None)

    def __exit__(self, *raised: object) -> None:
        if self._left is not None:
            # A worker's generation is a task of its own and may end after its session, whose clock is then over.
            with suppress(RuntimeError):
                self._clock.reschedule(asyncio.get_running_loop().time() + self._left)
