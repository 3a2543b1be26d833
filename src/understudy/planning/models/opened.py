"""Opens the models of a recipe by their small files, from local folders or from the hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from understudy.config import Recipe, StudentConfig, TeacherConfig
from understudy.config.paths import resolved_model
from understudy.errors import DataError
from understudy.planning.models.folder import ModelFolder, is_hub_id


def open_models(recipe: Recipe, attempt: Callable[[Callable[[], Any]], Any]) -> dict[str, ModelFolder]:
    """Every model of a recipe whose files can be read, by its place in the recipe: `student`,
    `teachers.math`, …"""
    named = {"student": (recipe.student.model, recipe.student.revision)}
    for role, beside in (("critic", recipe.critic), ("reference", recipe.reference)):
        if beside is not None and beside.model:
            named[role] = (beside.model, None)
    named |= {f"teachers.{name}": (one.model, one.revision) for name, one in recipe.teachers.items()}
    external = {f"teachers.{name}" for name, one in recipe.teachers.items() if one.placement == "external"}
    found: dict[str, ModelFolder] = {}
    for place, (model, revision) in named.items():
        look = _external if place in external else _own
        folder = attempt(partial(look, model, f"{place}.model", revision))
        if isinstance(folder, ModelFolder):
            found[place] = folder
    return found


def open_student(student: StudentConfig) -> ModelFolder | None:
    return _own(student.model, "student.model", student.revision)


def open_teachers(teachers: Mapping[str, TeacherConfig]) -> dict[str, ModelFolder]:
    """The models of the teachers that a run starts itself, by name, if their files can be read here."""
    found: dict[str, ModelFolder] = {}
    for name, teacher in teachers.items():
        if teacher.placement != "external":
            with suppress(DataError):
                folder = _own(teacher.model, f"teachers.{name}.model", teacher.revision)
                found |= {name: folder} if folder else {}
    return found


def check_present(model: str, role: str, revision: str | None = None) -> None:
    """Raises at once for a folder that does not exist, and for a hub id that cannot be fetched: transformers
    would try the hub for minutes. `role` is the argument, for errors."""
    if Path(model).is_dir():
        return
    if resolved_model(model, Path()) != model:  # a folder was meant, although it could be a hub id
        ModelFolder.open(model, role)
    _own(model, role, revision)


def _own(model: str, role: str, revision: str | None) -> ModelFolder | None:
    if not model:
        return None
    return _from_hub(model, role, revision) if is_hub_id(model) else ModelFolder.open(model, role)


def _external(model: str, role: str, revision: str | None) -> ModelFolder | None:
    """An external teacher's model may be absent from this machine, and its name may be known to its server
    only. It is compared with the student if its files can be read."""
    path = Path(model)
    if (path / "tokenizer.json").is_file() and (path / "config.json").is_file():
        folder = ModelFolder(path)
        if problem := folder.unreadable():
            raise DataError(f"{role} = {model!r}: {problem}")
        return folder
    if "/" not in model or not is_hub_id(model):
        return None
    try:
        return _from_hub(model, role, revision)
    except DataError:
        return None


def _from_hub(model: str, role: str, revision: str | None) -> ModelFolder | None:
    from understudy.planning.models.hub_files import hub_folder  # noqa: PLC0415 - half a second that most checks need not spend

    return hub_folder(model, role, revision)
