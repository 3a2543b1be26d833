"""How a CPU run uses `run.threads`: within an operation, or for several micro-batches in parallel.

The operations of a small student end before a second thread has woken up. If another process, such as a
teacher, uses a core, the threads of an operation wait for each other. So a small student trains several
micro-batches in parallel, each on one thread ("lanes"), and all other operations of the trainer's process use
one thread. The decision depends only on the recipe and the student's folder, so a resume on another machine
repeats it to the bit.
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
"""The gc threshold of the youngest generation: objects allocated minus freed, about ten megabytes."""


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Raises the gc threshold while a CPU run trains. A disabled collector or a higher threshold is left as
    it is."""
    before = gc.get_threshold()
    if 0 < before[0] < NEW_OBJECTS:
        gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


SMALL = 1 << 22
"""The most parameters of a student that trains in lanes. Every lane holds its own gradient, and the products
of larger students are large enough for several threads."""
KNOWN = {"llama", "qwen2", "qwen3"}
"""Model types whose layers keep no state between calls, so that threads may share them."""
STEADY = {"default", "linear", "llama3", "yarn"}
"""Rotary kinds that keep no state between calls."""


def lanes_of(recipe: Recipe) -> int:
    """How many micro-batches train in parallel. 1: an operation uses all threads."""
    threads, student = recipe.run.threads or 1, recipe.student
    critic = recipe.critic.model if recipe.critic is not None else None
    if threads == 1 or recipe.trainer.ranks > 1 or student.compile or critic is not None:
        return 1
    if resolve_device(student.device).type != "cpu" or not _is_small(Path(student.model)):
        return 1
    return threads


def torch_threads(recipe: Recipe) -> int | None:
    """Threads of one operation. None: torch's default."""
    return 1 if lanes_of(recipe) > 1 else recipe.run.threads


@contextmanager
def products_of_lanes(recipe: Recipe) -> Iterator[None]:
    """Disables oneDNN for students that train in lanes.

    On ARM torch passes a product with a transposed weight to oneDNN. Each call then takes a third of a
    millisecond more and uses OMP_NUM_THREADS threads, whatever torch's setting, so the threads of two lanes
    and of a teacher wait for each other. Without a bias the results are bit-identical. With a bias they are
    not, so such students keep oneDNN. So do students in half precision, which is fast only with oneDNN.
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
    """Whether a model of a `KNOWN` type has biases: Qwen2 always does, the other types if their config says
    so."""
    config = ModelFolder(folder).config
    said = any(config.get(name) for name in ("attention_bias", "mlp_bias"))
    return said or config.get("model_type") == "qwen2"
