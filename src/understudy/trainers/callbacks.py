"""Functions of the caller that a run calls: after a step, after an evaluation, after a checkpoint.

    understudy.distill(…, on_step=lambda step: print(step.step, step.metrics["actor/loss"]))

They are called one at a time on a thread of the run, and the trainer waits for them. A fully async run goes on
producing meanwhile. After a resume or a restart from a checkpoint, steps that are taken again are reported again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from understudy.errors import CallbackError, ConfigError
from understudy.trainers.stopping import Abandoned, Interrupts


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was taken."""

    step: int
    steps: int
    """Steps that the run will take in all."""
    metrics: Mapping[str, Any]
    """The step's line of metrics.jsonl; a number that is not finite is None."""
    dir: Path
    """The run directory."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out measures of the student after a step. Step 0: before training, with the teachers' accuracy."""

    step: int
    metrics: Mapping[str, float]
    """Everything under `val/`, without that prefix."""
    dir: Path
    """The run directory."""

    @property
    def accuracy(self) -> float:
        return self.metrics["accuracy"]


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is complete on disk. It stays there at least until the callback returns."""

    step: int
    path: Path
    best: bool
    """Whether it is the best so far by held-out accuracy (needs `trainer.keep_best`)."""
    dir: Path
    """The run directory."""


OnStep = Callable[[Step], object]
OnEval = Callable[[Evaluation], object]
OnCheckpoint = Callable[[SavedCheckpoint], object]


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The functions a caller gave. What they return is ignored."""

    on_step: OnStep | None = None
    on_eval: OnEval | None = None
    on_checkpoint: OnCheckpoint | None = None

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self)):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise ConfigError(f"{name} is a {type(given).__name__}; expected a function of one argument")
            if inspect.iscoroutinefunction(given):
                raise ConfigError(
                    f"{name} is an async function; expected a plain one (it is called on a thread of its own)"
                )


@dataclass(frozen=True, slots=True)
class CallbackRunner:
    """Calls the callbacks of one attempt at a run. Used on the event loop."""

    callbacks: Callbacks
    stop: Interrupts
    dir: Path
    steps: int
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def step(self, step: int, line: Mapping[str, Any]) -> None:
        """Reports a step with its line of metrics, and the evaluation in it if there is one."""
        await self.evaluation(step, line)
        if step > 0 and (call := self.callbacks.on_step) is not None:
            await self._call("on_step", call, Step(step, self.steps, dict(line), self.dir))

    async def evaluation(self, step: int, line: Mapping[str, Any]) -> None:
        found = evaluation_of(step, line, self.dir)
        if found is not None and (call := self.callbacks.on_eval) is not None:
            await self._call("on_eval", call, found)

    async def checkpoint(self, step: int, path: Path, best: bool) -> None:
        if (call := self.callbacks.on_checkpoint) is not None:
            await self._call("on_checkpoint", call, SavedCheckpoint(step, path, best, self.dir))

    async def _call(self, name: str, call: Callable[[Any], object], report: Any) -> None:
        def guarded() -> CallbackError | None:
            try:
                call(report)
            # Also SystemExit and KeyboardInterrupt: raised in a task, they would leave the event loop at once.
            except BaseException as error:
                own = getattr(call, "__qualname__", type(call).__qualname__)
                wrapped = CallbackError(
                    f"{name} ({getattr(call, '__module__', '?')}.{own}) raised {type(error).__name__}: {error} "
                    f"after step {report.step}; understudy.resume({str(self.dir)!r}) continues from the last checkpoint"
                )
                wrapped.__cause__ = error
                return wrapped
            return None

        async with self._one_at_a_time:
            try:
                failed = await self.stop.waiting(asyncio.to_thread(guarded))
            except Abandoned:
                return
        if failed is not None:
            raise failed


def evaluation_of(step: int, line: Mapping[str, Any], run: Path) -> Evaluation | None:
    """The evaluation in a line of metrics.jsonl, if the step had one."""
    found = {key.removeprefix("val/"): line[key] for key in line if key.startswith("val/")}
    return Evaluation(step, found, run) if "accuracy" in found else None
