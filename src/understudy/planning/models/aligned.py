"""Teachers whose tokens are aligned with the student's by their bytes (`vocabulary = "align"`), before a run.

Imports no torch: `understudy check` runs this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from understudy.config import DataConfig, LossConfig, TeacherConfig
from understudy.errors import UnderstudyError
from understudy.planning.models.folder import ModelFolder
from understudy.planning.models.pairs import Side, pair_problems
from understudy.rollout.dataset import Dataset
from understudy.teacher.token_bytes import TokenBytes


def aligned_sides(
    teachers: Mapping[str, TeacherConfig], student: Side, others: Sequence[Side]
) -> dict[str, Side]:
    """By name: the teachers that ask for it and whose vocabulary is not the student's. Others exchange ids."""
    asked = {f"teachers.{name}": name for name, one in teachers.items() if one.vocabulary == "align"}
    return {
        asked[side.place]: side for side in others if side.place in asked and pair_problems(student, side)
    }


def aligned_names(
    teachers: Mapping[str, TeacherConfig], student: ModelFolder, folders: Mapping[str, ModelFolder]
) -> set[str]:
    """The same for teachers whose files are open, by name."""
    asked = [name for name in folders if teachers[name].vocabulary == "align"]
    if not asked:
        return set()
    sides = [Side.of(folders[name], f"teachers.{name}") for name in asked]
    return set(aligned_sides(teachers, Side.of(student, "student"), sides))


def unread_tokenizers(teachers: Mapping[str, TeacherConfig], models: Mapping[str, ModelFolder]) -> list[str]:
    """Problems of external teachers whose tokenizer is not on this machine; others were reported as missing."""
    return [
        f"teachers.{name}.vocabulary = 'align' reads the teacher's tokenizer here, and teachers.{name}.model = {one.model!r} is no folder "
        "with config.json and tokenizer.json, nor in the hub's cache; give its folder or hub id"
        for name, one in teachers.items()
        if one.vocabulary == "align" and one.placement == "external" and f"teachers.{name}" not in models
    ]


def alignment_notes(
    student: ModelFolder, teacher: ModelFolder, name: str, loss: LossConfig
) -> tuple[list[str], list[str]]:
    """(problems, notes) of two tokenizers that are to be aligned."""
    place = f"teachers.{name}"
    if loss.signal == "topk" and loss.topk >= student.vocab_size:
        return [
            f"{place}.vocabulary = 'align' with loss.topk = {loss.topk}: candidates without a counterpart belong to the tail, and "
            f"with all {student.vocab_size} ids of the student as candidates there is no tail; lower loss.topk"
        ], []
    try:
        ours = TokenBytes.load(student.path, "student").by_bytes()
        theirs = TokenBytes.load(teacher.path, place).by_bytes()
    except UnderstudyError as error:
        return [str(error)], []
    shared = len(ours.keys() & theirs.keys())
    if not shared:
        return [
            f"{place}: no token of it writes the same bytes as a token of the student; choose another model"
        ], []
    return [], [
        f"{place} has another tokenizer: {shared:,} of its {len(theirs):,} tokens write the same bytes as one of the student's "
        f"{len(ours):,}; completions are aligned by their bytes (docs/losses.md), and it reads its own chat template"
    ]


def rows_can_be_aligned(data: DataConfig, aligned: Collection[str], dataset: Dataset) -> list[str]:
    """Rows of data.train that a teacher with another tokenizer cannot score; the first of each kind is named."""
    if not aligned:
        return []
    given, problems = f"teachers.{next(iter(aligned))}.vocabulary = 'align'", []
    if shown := dataset.with_pictures():
        problems.append(
            f"data.train: {dataset.place(shown[0])} has pictures, and with {given} teachers read text; leave them out"
        )
    for number, row in enumerate(dataset.rows):
        if row.get("agent") not in (None, "", "single_turn"):
            problems.append(
                f"data.train: {dataset.place(number)}: agent = {row['agent']!r} with {given}: a completion is aligned if it is one turn; "
                "use 'single_turn'"
            )
            break
    for number, row in enumerate(dataset.rows):
        weights = row.get(data.mixture_key)
        if isinstance(weights, Mapping) and any(weights.get(name) for name in aligned):
            problems.append(
                f"data.train: {dataset.place(number)} has a mixture of teachers with one of another tokenizer ({given}): a mixture is one "
                "of distributions over the same ids; name one teacher for the row"
            )
            break
    return problems
