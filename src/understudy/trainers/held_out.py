"""An evaluation between two steps, which must cost neither the step before it nor the way out.

The step is taken when its evaluation begins. So where the evaluation fails, its step is written down and saved before the error
ends the run; and where somebody asks to stop while answers are waited for, the step is kept without them.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from understudy.errors import RankLost
from understudy.trainers.checkpoints import finish_saving, save_checkpoint
from understudy.trainers.evaluation.evaluate import evaluate
from understudy.trainers.stopping import Abandoned, Interrupts
from understudy.trainers.system import System

logger = logging.getLogger(__name__)


async def evaluate_first(system: System, stop: Interrupts) -> None:
    """How good the student is before its first step, and its teachers; there is nothing to save yet."""
    with suppress(Abandoned):
        line = await stop.waiting(evaluate(system, step=0, teachers=True))
        if line:
            system.view.step(system.metrics.write(0, line))


async def evaluated(system: System, step: int, line: dict[str, Any], stop: Interrupts) -> dict[str, Any]:
    """The metrics of a step just taken, with its held-out accuracy as far as there is time for it."""
    try:
        return line | await stop.waiting(evaluate(system, step))
    except Abandoned:
        return line
    except RankLost:
        raise
    except Exception as error:
        system.view.step(system.metrics.write(step, line))
        try:
            await save_checkpoint(system, step)
            await finish_saving(system)
        except Exception:
            logger.exception("step %d could not be saved after its evaluation failed", step)
        else:
            system.view.note(f"the evaluation after step {step} failed ({error}); the step itself is saved")
        raise
