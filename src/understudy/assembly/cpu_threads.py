"""How `run.threads` are used: within an operation, or by whole micro-batches side by side.

The operations of a small student are over before a second thread has woken up, and wherever something else has a core (a
teacher's process, say) they wait for each other. So such a student trains its micro-batches side by side, each with one thread,
and everything else of the trainer's process computes with one. What is decided here follows from the recipe and the student's
folder alone, so that a resume elsewhere repeats it to the bit.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from understudy.config import Recipe
from understudy.planning.models.folder import ModelFolder
from understudy.trainers.models import resolve_device

NEW_OBJECTS = 50_000
"""Made more than freed before the newest are looked through: some ten megabytes."""


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Leaves a collector alone that is switched off, or has been told to wait longer still."""
    before = gc.get_threshold()
    if 0 < before[0] < NEW_OBJECTS:
        gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


SMALL = 1 << 22
"""Parameters. Every lane holds a gradient of its own, and larger students have larger products."""
KNOWN = {"llama", "qwen2", "qwen3"}
"""Model types whose layers keep nothing from one call to the next, so that threads may share them."""
STEADY = {"default", "linear", "llama3", "yarn"}
"""Rotary kinds of which that is true."""


def lanes_of(recipe: Recipe) -> int:
    """Micro-batches the student is trained on at a time; 1: an operation has all threads."""
    threads, student = recipe.run.threads or 1, recipe.student
    critic = recipe.critic.model if recipe.critic is not None else None
    if threads == 1 or recipe.trainer.ranks > 1 or student.compile or critic is not None:
        return 1
    if resolve_device(student.device).type != "cpu" or not _is_small(Path(student.model)):
        return 1
    return threads


def torch_threads(recipe: Recipe) -> int | None:
    """Threads of one operation; None leaves torch's choice."""
    return 1 if lanes_of(recipe) > 1 else recipe.run.threads


@contextmanager
def products_of_lanes(recipe: Recipe) -> Iterator[None]:
    """Where micro-batches go side by side, products stay with torch's own library.

    On ARM torch hands a product with a transposed weight to oneDNN. That takes a third of a millisecond more a call, and the
    threads of OMP_NUM_THREADS whatever torch was told: those of two lanes and of a teacher wait for each other then. Without
    a bias the numbers are the same to the bit; with one they are not, so such students keep it. So does half precision, which
    it alone is fast at.
    """
    before, student = torch.backends.mkldnn.enabled, recipe.student
    if lanes_of(recipe) > 1 and student.dtype == "float32" and not _has_biases(Path(student.model)):
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def _is_small(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        return False
    model = ModelFolder(folder)
    rotary = model.config.get("rope_parameters") or model.config.get("rope_scaling") or {}
    return (
        model.config.get("model_type") in KNOWN
        and str(rotary.get("rope_type", "default")) in STEADY
        and 0 < model.parameters <= SMALL
    )


def _has_biases(folder: Path) -> bool:
    """Of a model that is known here: Qwen2 always has some, the others where they say so."""
    config = ModelFolder(folder).config
    said = any(config.get(name) for name in ("attention_bias", "mlp_bias"))
    return said or config.get("model_type") == "qwen2"
