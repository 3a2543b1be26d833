"""Sorts failures: one sample's own fault becomes a dead letter; an infrastructure error ends the run."""

from __future__ import annotations

import asyncio

from understudy.errors import ClusterError, DataError, DataPlaneError, EngineError

INFRASTRUCTURE = (ClusterError, DataPlaneError, EngineError)
"""Errors that no single sample causes. They end the run."""


class SampleFailed(DataError):
    """A sample failed. The message is the full reason: a timeout, or what a worker or an earlier launch
    reported."""


def reason_of(error: Exception) -> str:
    """The reason text of the dead letter."""
    return str(error) if isinstance(error, SampleFailed) else f"{type(error).__name__}: {error}"


def own_fault(error: Exception) -> Exception:
    """Returns the error if it is one sample's own fault, and raises it if it must end the run.

    Raises `CancelledError` if the sample's task was cancelled: an agent loop may turn its cancellation into
    another error."""
    if isinstance(error, INFRASTRUCTURE):
        raise error
    if (task := asyncio.current_task()) is not None and task.cancelling():
        raise asyncio.CancelledError from error
    return error


def timed(error: Exception, clock: asyncio.Timeout, what: str, limit: float) -> Exception:
    """An error that names `what` if `clock` expired, otherwise `error`. An agent loop may turn its timeout
    into another error."""
    if not clock.expired() or isinstance(error, INFRASTRUCTURE):
        return error
    return SampleFailed(f"{what} took longer than rollout.deadline_seconds = {limit:g}")
