"""What torch says in its own words about a GPU, in words a user can act on."""

from __future__ import annotations

import torch

from understudy.config import Recipe
from understudy.errors import PolicyError

NOT_REPEATABLE = "does not have a deterministic implementation"
"""How torch refuses an operation whose sums come in any order."""


def explained(error: BaseException, recipe: Recipe) -> BaseException:
    """The error itself, unless the recipe has keys that decide about it: then one that names them."""
    if isinstance(error, torch.OutOfMemoryError):
        return _full_memory(error, recipe)
    if isinstance(error, RuntimeError) and NOT_REPEATABLE in str(error):
        return _not_repeatable(error)
    return error


def _not_repeatable(error: RuntimeError) -> PolicyError:
    # "cumsum_cuda_kernel does not have a deterministic implementation, but you set …"
    operation = str(error).split(NOT_REPEATABLE)[0].strip()
    return PolicyError(
        f"run.determinism = 'full': torch's {operation} cannot repeat its sums to the bit on a GPU. "
        "run.determinism = 'fast' allows it; or leave out what needs it (of a loss or model of your own, say)"
    )


def _full_memory(error: torch.OutOfMemoryError, recipe: Recipe) -> PolicyError:
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
