"""What a failure means: one sample's own fault becomes a dead letter with a reason; anything else ends the run."""

from __future__ import annotations

import asyncio

from understudy.errors import ClusterError, DataError, DataPlaneError, EngineError

INFRASTRUCTURE = (ClusterError, DataPlaneError, EngineError)
"""Not one sample's fault: these end the run."""


class SampleFailed(DataError):
    """Why a sample failed. The message is the whole reason: a timeout, or what a worker or an earlier launch told."""


def reason_of(error: Exception) -> str:
    """For the dead letter."""
    return str(error) if isinstance(error, SampleFailed) else f"{type(error).__name__}: {error}"


def own_fault(error: Exception) -> Exception:
    """The error, where it is one sample's own fault. Raises it where it must end the run, and `CancelledError` where the sample
    was given up: a loop may answer its cancellation with another error."""
    if isinstance(error, INFRASTRUCTURE):
        raise error
    if (task := asyncio.current_task()) is not None and task.cancelling():
        raise asyncio.CancelledError from error
    return error


def timed(error: Exception, clock: asyncio.Timeout, what: str, limit: float) -> Exception:
    """Names what took too long, where `clock` ran out; otherwise the error as it is. A loop may answer the end of its time with
    an error of its own."""
    if not clock.expired() or isinstance(error, INFRASTRUCTURE):
        return error
    return SampleFailed(f"{what} took longer than rollout.deadline_seconds = {limit:g}")
