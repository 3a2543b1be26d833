"""A GPU that ran out of memory: smaller micro-batches where that helps.

How many tokens a forward and backward holds decides what it needs, and nothing else but rounding. So a step that met a full
GPU before it touched a weight is taken again with half of them, and the run keeps to that. Not where a run must repeat to
the bit (`run.determinism = "full"`): what else was on the GPU would decide its rounding. And not on several ranks: the
others are in the middle of a pass that the one without memory has left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from understudy.policy.policy import Policy, untouched
from understudy.types.far_batch import AnyBatch, FarBatch

if TYPE_CHECKING:
    from understudy.trainers.system import System


MOST_HALVINGS = 3
"""At a time: an eighth of what was asked for is another recipe."""
Result = TypeVar("Result")


def within_memory(system: System, learner: object, batch: AnyBatch, work: Callable[[int], Result]) -> Result:
    """`work(tokens)`, a call of `learner` (a policy or a critic) with `batch`; again with half the tokens where the GPU's memory was too small."""
    asked = tokens = system.micro_batches.tokens(system.recipe)
    for halvings in range(MOST_HALVINGS + 1):
        try:
            result = work(tokens)
        except torch.OutOfMemoryError:
            smaller = max(tokens // 2, _longest_row(batch))
            if halvings == MOST_HALVINGS or smaller >= tokens or not _may_try_again(system, learner):
                raise
            tokens = smaller
        else:
            break
        # Out of the handler: the error's traceback keeps the tensors of the pass that failed.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if tokens < asked:
        system.micro_batches.most_tokens = tokens
        system.view.note(
            f"the GPU's memory was full with micro-batches of {asked} tokens: going on with {tokens}; "
            f"trainer.micro_batch_tokens = {tokens} starts there"
        )
    return result


def _longest_row(batch: AnyBatch) -> int:
    """In tokens: no micro-batch can hold fewer."""
    lengths = batch.token_lengths if isinstance(batch, FarBatch) else batch.tokens.lengths.tolist()
    return max(lengths, default=0)


def _may_try_again(system: System, learner: object) -> bool:
    """One rank, no promise of bits, and nothing happened yet."""
    if system.deterministic:
        return False
    # A critic says it of itself: it may be in another process.
    return untouched(learner) if isinstance(learner, Policy) else bool(getattr(learner, "untouched", False))
