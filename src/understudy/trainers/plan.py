"""Which processes a recipe starts, and roughly what each will hold. Reads model folders; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from understudy.config import Recipe
from understudy.trainers.model_folder import ModelFolder, is_hub_id

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PROCESS_BYTES = 400 * 2**20
"""Python, torch and transformers once imported, measured on a CPU build."""


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    name: str
    job: str
    device: str
    parameters: int | None
    bytes: int | None
    """None for hub models, which are only measured once they are here."""


def plan_processes(recipe: Recipe) -> list[PlannedProcess]:
    processes = [_trainer(recipe)]
    for name, teacher in recipe.teachers.items():
        if teacher.placement == "external":
            processes += [
                PlannedProcess(f"teacher-{name}-{i}", f"scores, at {url}", "external", None, 0)
                for i, url in enumerate(teacher.urls)
            ]
            continue
        parameters = _parameters(teacher.model)
        size = None if parameters is None else parameters * _BYTES[teacher.dtype] + _PROCESS_BYTES
        processes += [
            PlannedProcess(
                f"teacher-{name}-{i}",
                f"scores rows of {teacher.key or 'every source'}",
                teacher.device,
                parameters,
                size,
            )
            for i in range(teacher.replicas)
        ]
    return processes


def _trainer(recipe: Recipe) -> PlannedProcess:
    parameters = _parameters(recipe.student.model)
    size = None
    if parameters is not None:
        # Master weights, gradient and two AdamW moments in float32, and the working copy where it is narrower.
        working = 0 if recipe.student.dtype == "float32" else _BYTES[recipe.student.dtype]
        size = parameters * (16 + working) + _PROCESS_BYTES
    return PlannedProcess(
        "trainer", "rollouts, journal, loss, optimizer", recipe.student.device, parameters, size
    )


def _parameters(model: str) -> int | None:
    return None if is_hub_id(model) else ModelFolder.open(model, "model").parameters
