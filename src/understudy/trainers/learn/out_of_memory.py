"""Retries a step that ran out of GPU memory with smaller micro-batches.

The number of tokens per micro-batch determines the memory of forward and backward. It changes results by
rounding only. So a step that ran out of memory before it changed a weight is retried with half the tokens,
and the run keeps that size.

It is not retried under `run.determinism = "full"`, where other users of the GPU would then decide the
rounding. Nor with several ranks, because the other ranks are in the middle of a pass that the failed rank has
left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from understudy.policy.policy import Policy, untouched
from understudy.types.batch_ref import BatchRef

if TYPE_CHECKING:
    from understudy.trainers.system import Learner


MOST_HALVINGS = 3
"""The maximum number of halvings in one call. A run that needs less than an eighth of the size needs another
recipe."""
Result = TypeVar("Result")


def within_memory(learner: Learner, model: object, batch: BatchRef, work: Callable[[int], Result]) -> Result:
    """`work(tokens)`, a call of `model` (a policy or a critic) with `batch`. Retried with half the tokens
    if memory ran out."""
    asked = tokens = learner.micro_batches.tokens
    for halvings in range(MOST_HALVINGS + 1):
        try:
            result = work(tokens)
        except torch.OutOfMemoryError:
            smaller = max(tokens // 2, _longest_row(batch))
            if halvings == MOST_HALVINGS or smaller >= tokens or not _may_try_again(learner, model):
                raise
            tokens = smaller
        else:
            break
        # Outside the handler, because the error's traceback keeps the tensors of the failed pass alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if tokens < asked:
        learner.micro_batches.most_tokens = tokens
        learner.state.view.note(
            f"the GPU's memory was full with micro-batches of {asked} tokens: going on with {tokens}; "
            f"trainer.micro_batch_tokens = {tokens} starts there"
        )
    return result


def _longest_row(batch: BatchRef) -> int:
    """The length of the longest row in tokens. No micro-batch can be smaller."""
    return max(batch.token_lengths, default=0)


def _may_try_again(learner: Learner, model: object) -> bool:
    """Whether there is one rank, no full determinism, and no weight was changed yet."""
    if learner.settings.deterministic:
        return False
    if isinstance(model, Policy):
        return untouched(model)
    # A critic has its own property, because it may be in another process. The policy of several ranks
    # (`LeadingPolicy`) has none and is not tried again.
    return bool(getattr(model, "untouched", False))
