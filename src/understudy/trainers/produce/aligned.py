"""Scores a row by a teacher with another tokenizer: the request has the teacher's tokens of the same text, and the
scores are mapped back to the student's tokens (`teacher/alignment.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np

from understudy.errors import DataError
from understudy.teacher.alignment import TokenAligner
from understudy.types.references import RowRef, ScoreRef, ScoresRef
from understudy.types.scores import TeacherScores


async def aligned_scores(
    aligner: TokenAligner,
    row: RowRef,
    prompt: np.ndarray,
    item: ScoreRef,
    send: Callable[[ScoreRef], Awaitable[ScoresRef]],
) -> TeacherScores:
    """`prompt`: the row's prompt in the teacher's tokens. `send` sends a request to the teacher."""
    here, wanted = row.here, item.here
    if here is None or wanted is None:
        raise DataError(
            f"row {row.key} lies on another machine, and rows are aligned in the trainer's process"
        )
    first = here.first
    if not row.key.endswith("_0") or not here.loss_mask[first:].all():
        raise DataError(
            f"row {row.key} is not one prompt and one turn after it, and only such rows can be aligned with a teacher of another "
            "tokenizer; use rollout.agent = 'single_turn'"
        )
    alignment = aligner.align(here.tokens[first:], row.key)
    scores = await (await send(aligner.request(wanted, prompt, alignment))).fetch()
    return aligner.scores(scores, alignment, here.behaviour_logprobs[first:])


async def counted(scores: ScoresRef) -> TeacherScores:
    """The scores with their counts of aligned tokens set. A teacher with the student's tokenizer scores
    every token one to one."""
    here = await scores.fetch()
    return here if here.aligned is not None else replace(here, aligned=(len(here.sampled_logprobs), 0, 0))
