"""What is kept of a step whose loss or gradient was not finite: its rows, and the weights it started from.

`refused.jsonl` names the rows with the reason; `refused/step-….safetensors` holds all the update read of them. `understudy replay`
runs them again (`replay.py`).
"""

from __future__ import annotations

import json
import logging

from understudy.config import Recipe
from understudy.observability.rundir import RunDir
from understudy.policy.refused import RefusedRows
from understudy.trainers.checkpoints import finish_saving, save_checkpoint
from understudy.trainers.system import System

logger = logging.getLogger(__name__)


def keep_refused(run: RunDir, role: str, refused: RefusedRows) -> None:
    """`role`: whose update it was, "student" or "critic"."""
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
    """After a refusal: save `step`, the last one taken, whose weights the refused update started from; a replay needs them.

    Only where the refused update was its step's first: otherwise the weights are already on their way to the next step.
    """
    if step == saved or not _one_update_a_step(system.recipe):
        return
    try:
        await save_checkpoint(system, step)
        await finish_saving(system)
    except Exception:
        logger.exception("the weights of step %d could not be saved for a replay", step)


def _one_update_a_step(recipe: Recipe) -> bool:
    trainer = recipe.trainer
    whole = trainer.mini_batch_size is None or trainer.mini_batch_size >= trainer.batch_size
    return whole and trainer.epochs == 1 and recipe.loss.advantage != "gae"
