"""The processes that a recipe starts, with their devices and approximate memory. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from understudy.cluster.placement import DeviceKind
from understudy.config import CriticConfig, Recipe, ReferenceConfig, TeacherConfig
from understudy.planning.memory.working import engine_work, replica_work, trainer_work
from understudy.planning.models.folder import ModelFolder, is_hub_id
from understudy.planning.resolved import workers_write_rows
from understudy.planning.seating import (
    CRITIC,
    ROLLOUT,
    STUDENT,
    WORKERS,
    Seating,
    critic_device,
    critic_sits_apart,
    teacher_role,
)

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PROCESS_BYTES = 400 * 2**20
"""Python, torch and transformers once imported, measured on a CPU build."""
_PACKED_MOMENTS = 2 * (1 + 4 / 256)
"""Bytes of both moments of `adamw_8bit`: one each, and a float32 scale per 256 values."""


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    name: str
    job: str
    device: str
    parameters: int | None
    bytes: int | None
    """None for hub models, whose size is unknown before they are downloaded."""
    working_bytes: int = 0
    """On a GPU, at the peak and beyond `bytes`: activations, keys and values, logits (`memory/working.py`)."""
    host_bytes: int = 0
    """Host memory in addition to the GPU's (`trainer.offload_optimizer`, `teachers.NAME.offload`)."""


def plan_processes(recipe: Recipe, seating: Seating) -> list[PlannedProcess]:
    processes = _student(recipe, seating) + _critic(recipe, seating) + _rollouts(recipe, seating)
    of_student = processes[0].parameters
    for name, teacher in recipe.teachers.items():
        if teacher.placement == "external":
            processes += [
                PlannedProcess(f"teacher-{name}-{i}", f"scores, at {url}", "external", None, 0)
                for i, url in enumerate(teacher.urls)
            ]
        elif teacher.placement == "trainer":
            job = "scores, in the trainer's process, with the student's base"
            processes.append(PlannedProcess(f"teacher-{name}-0", job, processes[0].device, of_student, 0))
        elif teacher.placement == "engine":
            devices, work = {one.name: one.device for one in processes}, replica_work(recipe, teacher)
            for i in range(recipe.rollout.processes):
                at, job = devices[f"rollout-{i}"], f"scores, in the process of rollout-{i}, with its base"
                processes.append(
                    PlannedProcess(f"teacher-{name}-{i}", job, at, of_student, 0, _on_gpu(at, work))
                )
        else:
            for replica in range(teacher.replicas):
                processes += _replica(recipe, name, teacher, replica, seating)
    return processes


def _rollouts(recipe: Recipe, seating: Seating) -> list[PlannedProcess]:
    """Rollout engines and servers, and the workers that run agent loops."""
    rollout, parameters = recipe.rollout, _parameters(recipe.student.model)
    size = None if parameters is None else parameters * _BYTES[recipe.student.dtype] + PROCESS_BYTES

    def device(unit: int, wanted: str) -> str:
        named = rollout.devices[unit] if rollout.devices else wanted
        return _device(recipe, seating, ROLLOUT, unit, named)

    planned = [
        PlannedProcess(f"{rollout.engine}-{i}", f"generates, at {url}", "external", None, 0)
        for i, url in enumerate(rollout.urls)
    ]
    if rollout.starts_servers:
        planned += [
            PlannedProcess(
                f"vllm-replica-{i}", "generates (and vLLM's cache)", device(i, "auto"), parameters, size
            )
            for i in range(rollout.replicas)
        ]
    work = sum(engine_work(recipe)) if rollout.processes else 0
    for i in range(rollout.processes):
        at = device(i, recipe.student.device)
        whole = None if size is None else size + _kept_base(recipe)
        planned.append(PlannedProcess(f"rollout-{i}", "generates", at, parameters, whole, _on_gpu(at, work)))
    return planned + [
        PlannedProcess(
            f"rollout-worker-{i}",
            _loops(recipe),
            _device(recipe, seating, WORKERS, i, "cpu"),
            None,
            PROCESS_BYTES,
        )
        for i in range(rollout.workers)
    ]


def _kept_base(recipe: Recipe) -> int:
    """Bytes of the adapted layers' base, which an engine process keeps to merge adapters with."""
    lora = recipe.student.lora
    if lora is None or lora.publish != "adapter":
        return 0
    folder = ModelFolder.open(recipe.student.model, "student.model")
    return folder.adapted_parameters(lora.targets) * _BYTES[recipe.student.dtype]


def _loops(recipe: Recipe) -> str:
    return "agent loops, rewards; writes its rows" if workers_write_rows(recipe) else "agent loops"


def _student(recipe: Recipe, seating: Seating) -> list[PlannedProcess]:
    parameters, ranks = _parameters(recipe.student.model), recipe.trainer.ranks

    def device(rank: int) -> str:
        return _device(recipe, seating, STUDENT, rank, recipe.student.device)

    size, host = None, 0
    if parameters is not None:
        size, host = student_bytes(recipe, parameters)
        if "cuda" not in device(0):
            size, host = size + host, 0
        size, host = size // ranks + PROCESS_BYTES, host // ranks
    beside = _beside(recipe)
    whole = None if size is None or beside is None else size + beside
    job = "rollouts, journal, loss, optimizer"
    lead = PlannedProcess(
        "trainer", job, device(0), parameters, whole, _on_gpu(device(0), trainer_work(recipe)), host
    )
    others = [(f"rank-{rank}", device(rank)) for rank in range(1, ranks)]
    job = f"trains 1/{ranks} of the student"
    work = trainer_work(recipe, generates=False) if others else 0
    return [
        lead,
        *(PlannedProcess(name, job, at, parameters, size, _on_gpu(at, work), host) for name, at in others),
    ]


def _on_gpu(device: str, size: int) -> int:
    return size if "cuda" in device else 0


def student_bytes(recipe: Recipe, parameters: int) -> tuple[int, int]:
    """Training memory on the student's device, and on the host if the optimizer is offloaded; without
    activations.

    A trained parameter has its weight, and in float32 a master (the weight itself, if that is float32), a
    gradient and two AdamW moments, or packed ones; a weight average (EMA) is one more float32. With adapters
    the model is frozen.
    """
    trainer, lora, width = recipe.trainer, recipe.student.lora, _BYTES[recipe.student.dtype]
    frozen, trained = 0, parameters
    if lora is not None:
        folder = ModelFolder.open(recipe.student.model, "student.model")
        # Several ranks keep frozen weights in float32 too (`policy/ranks/shard.py`).
        kept_in = width if trainer.ranks == 1 else _BYTES["float32"]
        frozen, trained = parameters * kept_in, folder.adapter_parameters(lora.rank, lora.targets)
    moments = _PACKED_MOMENTS if trainer.optimizer == "adamw_8bit" else 8.0
    state = 8.0 + moments + (4.0 if trainer.ema_decay is not None else 0.0)
    if trainer.offload_optimizer:
        # Several ranks keep their shards in float32 and compute with rounded copies of one layer at a time.
        kept = width if trainer.ranks == 1 else _BYTES["float32"]
        return frozen + trained * kept, round(trained * state)
    working = 0 if recipe.student.dtype == "float32" else width
    return frozen + round(trained * (state + working)), 0


def _beside(recipe: Recipe) -> int | None:
    """Bytes of a critic and a reference in the trainer's own process."""
    total = 0
    if recipe.loss.advantage == "gae" and not critic_sits_apart(recipe):
        size = _critic_bytes(recipe)
        if size is None:
            return None
        total += size
    if recipe.loss.kl_coef > 0:
        reference = recipe.reference or ReferenceConfig(dtype=recipe.student.dtype)
        parameters = _parameters(reference.model or recipe.student.model)
        if parameters is None:
            return None
        total += parameters * _BYTES[reference.dtype]
    return total


def _critic(recipe: Recipe, seating: Seating) -> list[PlannedProcess]:
    if not critic_sits_apart(recipe):
        return []
    size = _critic_bytes(recipe)
    return [
        PlannedProcess(
            CRITIC,
            "values of the student's tokens, and its own updates",
            _device(recipe, seating, CRITIC, 0, critic_device(recipe)),
            _parameters(_critic_model(recipe)),
            None if size is None else size + PROCESS_BYTES,
        )
    ]


def _critic_model(recipe: Recipe) -> str:
    return (recipe.critic.model if recipe.critic is not None else None) or recipe.student.model


def _critic_bytes(recipe: Recipe) -> int | None:
    """Weights, masters, gradients and moments, counted as in `student_bytes`."""
    parameters, dtype = _parameters(_critic_model(recipe)), (recipe.critic or CriticConfig()).dtype
    state = 8.0 + (_PACKED_MOMENTS if recipe.trainer.optimizer == "adamw_8bit" else 8.0)
    return (
        None
        if parameters is None
        else round(parameters * (state + (0 if dtype == "float32" else _BYTES[dtype])))
    )


def _replica(
    recipe: Recipe, name: str, teacher: TeacherConfig, replica: int, seating: Seating
) -> list[PlannedProcess]:
    parameters, ranks = _parameters(teacher.model), teacher.tensor_parallel
    if teacher.starts_vllm:  # one server, whose workers share the weights among its GPUs
        return [
            PlannedProcess(
                f"teacher-{name}-{replica}",
                f"scores rows of {teacher.key or 'every source'} (vLLM, and its cache)",
                _device(recipe, seating, teacher_role(name), replica, teacher.device),
                parameters,
                None if parameters is None else parameters * _BYTES[teacher.dtype] + PROCESS_BYTES,
            )
        ]
    size = None if parameters is None else parameters * _BYTES[teacher.dtype] // ranks + PROCESS_BYTES
    if size is not None and teacher.quantize is not None:
        size -= ModelFolder.open(teacher.model, "model").quantized_parameters * (_BYTES[teacher.dtype] - 1)
    job = f"scores rows of {teacher.key or 'every source'}"
    host = 0
    if size is not None and teacher.offload and seating.gpus(teacher_role(name), replica):
        blocks, host = offloaded_bytes(teacher)
        size += blocks
    work = replica_work(recipe, teacher)
    devices = [
        _device(recipe, seating, teacher_role(name), replica, teacher.device, rank) for rank in range(ranks)
    ]
    return [
        PlannedProcess(
            f"teacher-{name}-{replica}" + (f"-rank{rank}" if rank else ""),
            job if rank == 0 else f"holds 1/{ranks} of the model",
            at,
            parameters,
            size,
            _on_gpu(at, work),
            host,
        )
        for rank, at in enumerate(devices)
    ]


def offloaded_bytes(teacher: TeacherConfig) -> tuple[int, int]:
    """What `offload` adds to a replica's memory on its GPU (two blocks for the layers it moves, less the layers that are not
    there), and on the host, where torch gives a block of pinned memory the size of a power of two."""
    layers = [
        count * _BYTES[teacher.dtype] for count in ModelFolder.open(teacher.model, "model").layer_parameters
    ]
    moved = layers if teacher.offload == "all" else layers[len(layers) - min(teacher.offload, len(layers)) :]
    if not moved:
        return 0, 0
    pinned = sum(1 << (size - 1).bit_length() for size in moved)
    return max(moved) * len(moved[:2]) - sum(moved), pinned


def _device(
    recipe: Recipe, seating: Seating, role: str, unit: int, wanted: str, rank: int | None = None
) -> str:
    """The GPUs of a unit, or of one of its ranks; without a seat, the recipe's device. On Ray the machines of
    a pool are numbered, and GPUs are numbered per machine."""
    seats = seating.placement.of(role, unit)
    if recipe.cluster.backend == "ray" and seats:
        gpus = [seat.device for seat in seats if seat.kind is DeviceKind.GPU]
        return f"{seats[0].pool} node {seats[0].node}, {_names(gpus, rank) or 'cpu'}"
    return _names(seating.gpus(role, unit), rank) or wanted


def _names(gpus: list[int], rank: int | None) -> str:
    chosen = gpus if rank is None else gpus[rank : rank + 1]
    return f"cuda:{','.join(map(str, chosen))}" if chosen else ""


def _parameters(model: str) -> int | None:
    return None if is_hub_id(model) else ModelFolder.open(model, "model").parameters
