"""A GPU that ran out of memory, in words a user can act on."""

from __future__ import annotations

import torch

from understudy.config import Recipe
from understudy.errors import PolicyError


def explained(error: BaseException, recipe: Recipe) -> BaseException:
    """The error itself, unless it is CUDA's own about memory: then one that names the keys which decide how much is used."""
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    # "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of …": the rest is about the allocator.
    sentences = " ".join(str(error).split()).replace("GPU 0 has", "The GPU has").split(". ")
    student = recipe.student
    ways = [
        f"trainer.micro_batch_tokens (now {recipe.trainer.micro_batch_tokens}) decides what a forward and backward keeps, and "
        "changes no result: halve it first",
        f"rollout.max_batch (now {recipe.rollout.max_batch}) and rollout.context_length decide what the engine keeps for its "
        "rows",
    ]
    if not student.gradient_checkpointing:
        ways.append(
            "student.gradient_checkpointing = true computes activations twice instead of keeping them"
        )
    return PolicyError(
        f"the GPU's memory is full: {'. '.join(sentences[1:3])}.\n" + "\n".join(f"- {way}" for way in ways)
    )
