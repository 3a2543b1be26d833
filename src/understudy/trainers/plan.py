"""Which processes a recipe starts, where each sits, and roughly what it will hold. Reads model folders; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from understudy.config import CriticConfig, Recipe, ReferenceConfig, TeacherConfig
from understudy.trainers.model_folder import ModelFolder, is_hub_id
from understudy.trainers.seating import STUDENT, WORKERS, Seating, teacher_role

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


def plan_processes(recipe: Recipe, seating: Seating) -> list[PlannedProcess]:
    processes = _student(recipe, seating) + _rollouts(recipe)
    for name, teacher in recipe.teachers.items():
        if teacher.placement == "external":
            processes += [
                PlannedProcess(f"teacher-{name}-{i}", f"scores, at {url}", "external", None, 0)
                for i, url in enumerate(teacher.urls)
            ]
        else:
            for replica in range(teacher.replicas):
                processes += _replica(name, teacher, replica, seating)
    return processes


def _rollouts(recipe: Recipe) -> list[PlannedProcess]:
    """Servers that generate for the student, and the processes of agent loops."""
    rollout, parameters = recipe.rollout, _parameters(recipe.student.model)
    size = None if parameters is None else parameters * _BYTES[recipe.student.dtype] + _PROCESS_BYTES
    planned = [
        PlannedProcess(f"{rollout.engine}-{i}", f"generates, at {url}", "external", None, 0)
        for i, url in enumerate(rollout.urls)
    ]
    if rollout.starts_servers:
        planned += [
            PlannedProcess(f"vllm-replica-{i}", "generates (and vLLM's cache)", device, parameters, size)
            for i, device in enumerate(rollout.devices or ["auto"] * rollout.replicas)
        ]
    planned += [
        PlannedProcess(f"rollout-{i}", "generates", device, parameters, size)
        for i, device in enumerate(rollout.devices or [recipe.student.device] * rollout.processes)
        if rollout.processes
    ]
    return planned + [
        PlannedProcess(f"rollout-worker-{i}", _loops(recipe), "cpu", None, _PROCESS_BYTES)
        for i in range(rollout.workers)
    ]


def _loops(recipe: Recipe) -> str:
    elsewhere = recipe.cluster.backend == "ray" and WORKERS in recipe.cluster.roles
    writes = elsewhere and recipe.dataplane.backend == "transfer_queue"
    return "agent loops, rewards; writes its rows" if writes else "agent loops"


def _student(recipe: Recipe, seating: Seating) -> list[PlannedProcess]:
    parameters, ranks = _parameters(recipe.student.model), recipe.trainer.ranks
    size = None
    if parameters is not None:
        # Master weights, gradient and two AdamW moments in float32, and the working copy where it is narrower.
        working = 0 if recipe.student.dtype == "float32" else _BYTES[recipe.student.dtype]
        size = parameters * (16 + working) // ranks + _PROCESS_BYTES

    def device(rank: int) -> str:
        return _device(seating.gpus(STUDENT, rank), recipe.student.device)

    beside = _beside(recipe)
    whole = None if size is None or beside is None else size + beside
    lead = PlannedProcess("trainer", "rollouts, journal, loss, optimizer", device(0), parameters, whole)
    return [
        lead,
        *(
            PlannedProcess(f"rank-{rank}", f"trains 1/{ranks} of the student", device(rank), parameters, size)
            for rank in range(1, ranks)
        ),
    ]


def _beside(recipe: Recipe) -> int | None:
    """Bytes of a critic and a reference, which live whole in the trainer's process."""
    total = 0
    if recipe.loss.advantage == "gae":
        critic = recipe.critic or CriticConfig()
        parameters = _parameters(critic.model or recipe.student.model)
        if parameters is None:
            return None
        total += parameters * (16 + (0 if critic.dtype == "float32" else _BYTES[critic.dtype]))
    if recipe.loss.kl_coef > 0:
        reference = recipe.reference or ReferenceConfig(dtype=recipe.student.dtype)
        parameters = _parameters(reference.model or recipe.student.model)
        if parameters is None:
            return None
        total += parameters * _BYTES[reference.dtype]
    return total


def _replica(name: str, teacher: TeacherConfig, replica: int, seating: Seating) -> list[PlannedProcess]:
    parameters, ranks = _parameters(teacher.model), teacher.tensor_parallel
    size = None if parameters is None else parameters * _BYTES[teacher.dtype] // ranks + _PROCESS_BYTES
    gpus = seating.gpus(teacher_role(name), replica)
    job = f"scores rows of {teacher.key or 'every source'}"
    return [
        PlannedProcess(
            f"teacher-{name}-{replica}" + (f"-rank{rank}" if rank else ""),
            job if rank == 0 else f"holds 1/{ranks} of the model",
            _device(gpus[rank : rank + 1], teacher.device),
            parameters,
            size,
        )
        for rank in range(ranks)
    ]


def _device(gpus: list[int], wanted: str) -> str:
    return f"cuda:{gpus[0]}" if gpus else wanted


def _parameters(model: str) -> int | None:
    return None if is_hub_id(model) else ModelFolder.open(model, "model").parameters
