"""Saves the rows and initial weights of a step whose loss or gradient was not finite.

`refused.jsonl` lists the rows and the reason. `refused/step-….safetensors` holds everything the update read
of them. `understudy replay` runs them again (`run/replay.py`).
"""

from __future__ import annotations

import json
import logging

from understudy.observability.rundir import RunDir
from understudy.policy.refused import RefusedRows
from understudy.trainers.checkpoints import finish_saving, save_checkpoint
from understudy.trainers.system import System

logger = logging.getLogger(__name__)


def keep_refused(run: RunDir, role: str, refused: RefusedRows) -> None:
    """`role`: the model that refused the rows, "student" or "critic"."""
    run.refused_rows.mkdir(exist_ok=True)
    path = run.refused_rows / f"step-{refused.step:06d}-{role}.safetensors"
    refused.save(path, {"role": role})
    with run.refused.open("a") as handle:
        for index, key in enumerate(refused.rows.keys):
            line = {
                "key": key,
                "step": refused.step,
                "role": role,
                "reason": refused.reason,
                "file": str(path.relative_to(run.path)),
                "tokens": refused.rows.tokens[index].tolist(),
            }
            handle.write(json.dumps(line) + "\n")


async def keep_weights(system: System, step: int, saved: int) -> None:
    """After a refused update, saves a checkpoint of `step`, the last one taken: a replay starts from its weights.

    Only if a step has one update: with more, an earlier update of the refused step may have changed the
    weights.
    """
    if step == saved or not system.learner.settings.one_update_per_step:
        return
    try:
        await save_checkpoint(system, step)
        await finish_saving(system.state)
    except Exception:
        logger.exception("the weights of step %d could not be saved for a replay", step)
