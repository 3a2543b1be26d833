"""Teachers that are the student itself: `model = "student"` in `[teachers.NAME]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from understudy.config.models import OF_BASES, TeacherConfig
from understudy.config.tables import RecipeTables

STUDENT = "student"
"""The name that stands for the student's own model."""
_SHARED = ("model", "revision", "trust_remote_code", "attention", "dtype")


def with_self_teachers(table: Any) -> Any:
    """A recipe's tables in which `model = "student"` is the student's model, loaded in the same way."""
    if not isinstance(table, Mapping) or not isinstance(table.get("teachers"), Mapping):
        return table
    student = table.get("student")
    if not isinstance(student, Mapping) or "model" not in student:
        return table
    shared = {key: student[key] for key in _SHARED if key in student}
    return {
        **table,
        "teachers": {
            name: {
                "version": "start",
                **shared,
                **{key: value for key, value in one.items() if key != "model"},
            }
            if isinstance(one, Mapping) and one.get("model") == STUDENT
            else one
            for name, one in table["teachers"].items()
        },
    }


def self_teacher_problems(recipe: RecipeTables) -> list[str]:
    student, teachers, loss, trainer = recipe.student, recipe.teachers, recipe.loss, recipe.trainer
    problems = []
    for name, teacher in teachers.items():
        place = f"teachers.{name}"
        if teacher.placement in OF_BASES:
            problems += _base_problems(place, teacher, recipe)
        if teacher.version is None:
            continue
        given = f"{place}.version = {teacher.version!r}"
        if (teacher.model, teacher.revision) != (student.model, student.revision):
            problems.append(f"{given} belongs to model = 'student'; {place}.model is {teacher.model!r}")
            continue
        if teacher.placement == "external":
            problems.append(f"{given}: replicas of the student are started by the run; leave `urls` out")
        if not teacher.follows_student:
            continue
        if teacher.tensor_parallel > 1:
            problems.append(
                f"{given} with tensor_parallel = {teacher.tensor_parallel}: a replica over several processes cannot take new "
                "weights; set tensor_parallel = 1, or version = 'start'"
            )
        if loss.signal == "hidden":
            problems.append(
                f"{given} with loss.signal = 'hidden': the teacher's head would change with every version, and rows of several "
                "versions are trained together; use 'topk' or 'at_ids', or version = 'start'"
            )
        if teacher.version == "ema" and trainer.ema_decay is None:
            problems.append(
                f"{given} is the running average of the weights; set trainer.ema_decay, such as 0.99"
            )
        if teacher.version == "live" and not teacher.reads_own_prompt:
            problems.append(
                f"{given} without `prompt` or `prompt_column`: teacher and student would be the same distribution, and the loss "
                "would be 0; give the teacher a prompt of its own, or another version"
            )
    return problems


_OF_PROCESSES = ("replicas", "tensor_parallel", "device", "compile", "threads", "ports")
"""Keys of replicas in processes of their own."""


def _base_problems(place: str, teacher: TeacherConfig, recipe: RecipeTables) -> list[str]:
    """Problems of a teacher that is the base of a LoRA student, in the trainer's process or the engine processes."""
    given, student, problems = f"{place}.placement = {teacher.placement!r}", recipe.student, []
    if teacher.version != "start":
        problems.append(
            f"{given} is for model = 'student' with version = 'start'; set them, or use 'standalone'"
        )
    if student.lora is None:
        problems.append(
            f"{given} shares the frozen base of a student with adapters, and this one trains all its weights; set [student.lora], or "
            "use 'standalone'"
        )
    problems += (_beside_engine if teacher.placement == "engine" else _beside_trainer)(given, recipe)
    fields = TeacherConfig.model_fields
    idle = [key for key in _OF_PROCESSES if getattr(teacher, key) != fields[key].default]
    if idle:
        problems.append(
            f"{place}.{idle[0]} belongs to replicas in processes of their own; leave it out with {given}"
        )
    return problems + [
        f"{place}.{key} = {getattr(teacher, key)!r}: the base is the student's, with student.{key} = {getattr(student, key)!r}; leave it "
        f"out with {given}"
        for key in ("dtype", "attention")
        if getattr(teacher, key) != getattr(student, key)
    ]


def _beside_trainer(given: str, recipe: RecipeTables) -> list[str]:
    ranks = recipe.trainer.ranks
    if ranks == 1:
        return []
    return [
        f"{given} with trainer.ranks = {ranks}: the base is sharded over ranks; use 'engine' (with rollout.processes), 'standalone', or "
        "one rank"
    ]


def _beside_engine(given: str, recipe: RecipeTables) -> list[str]:
    rollout, lora, problems = recipe.rollout, recipe.student.lora, []
    if rollout.engine != "hf":
        problems.append(
            f"{given} with rollout.engine = {rollout.engine!r}: the base scores in our own engine processes; use 'trainer' or 'standalone', "
            "or set rollout.engine = 'hf' and rollout.processes"
        )
    elif not rollout.processes:
        problems.append(f"{given} runs in the engine processes; set rollout.processes, or use 'trainer'")
    if lora is not None and lora.publish != "adapter":
        problems.append(
            f"{given} with student.lora.publish = {lora.publish!r}: whole weights would take the place of the base in the engine processes; "
            "set student.lora.publish = 'adapter'"
        )
    return problems
