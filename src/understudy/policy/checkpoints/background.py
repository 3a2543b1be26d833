"""Saves checkpoints on a thread while the next step runs."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.policy.checkpoints.state import PolicyState


class BackgroundSaver:
    """Copies the state to host memory in the caller's thread and writes it on a thread of its own, one save
    at a time.

    The trainer waits for the copy, not for the disk; a second save waits for the first. An error of a save
    is raised by the next call, whichever it is. Every run ends with `close`.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def save(
        self, step: int, policy: PolicyState, extra: Mapping[str, Any] | None = None, *, copied: bool = True
    ) -> Future[Path]:
        """Returns as soon as `policy` may change again; the future is done when the checkpoint is complete.
        With `copied = False` the policy must not change before that."""
        self.wait()
        state = policy.detached() if copied else policy
        self.store.begun = step  # not by the writer, which may begin after the next publish
        self._pending = self._writer.submit(self.store.save, step, state, dict(extra or {}))
        return self._pending

    def wait(self) -> Path | None:
        """Waits until the last save is on disk and returns its folder; returns at once if no save is
        running."""
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else None

    def close(self) -> None:
        """Waits for the running save and raises its error."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
