"""Teachers that are the student itself: `model = "student"` in `[teachers.NAME]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from understudy.config.loss import LossConfig
from understudy.config.models import StudentConfig, TeacherConfig
from understudy.config.trainer import TrainerConfig

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


def self_teacher_problems(
    student: StudentConfig, teachers: Mapping[str, TeacherConfig], loss: LossConfig, trainer: TrainerConfig
) -> list[str]:
    problems = []
    for name, teacher in teachers.items():
        place = f"teachers.{name}"
        if teacher.placement == "trainer":
            problems += _base_problems(place, student, teacher, trainer)
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


def _base_problems(
    place: str, student: StudentConfig, teacher: TeacherConfig, trainer: TrainerConfig
) -> list[str]:
    """Problems of a teacher that is the base of a LoRA student, in the trainer's process."""
    given, problems = f"{place}.placement = 'trainer'", []
    if teacher.version != "start":
        problems.append(
            f"{given} is for model = 'student' with version = 'start'; set them, or use 'standalone'"
        )
    if student.lora is None:
        problems.append(
            f"{given} shares the frozen base of a student with adapters, and this one trains all its weights; set [student.lora], or "
            "use 'standalone'"
        )
    if trainer.ranks > 1:
        problems.append(
            f"{given} with trainer.ranks = {trainer.ranks}: the base is sharded over ranks; use 'standalone', or one rank"
        )
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
