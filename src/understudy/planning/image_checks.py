"""Checks of rows with pictures for `understudy check`: who reads them, and whether their files can be used.

Every problem names the file and the row. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from understudy.config import Recipe, TeacherConfig
from understudy.media.pictures import PictureError, PictureLimits, Pictures, PictureSizes
from understudy.media.processor import FAMILIES, NAMES, PictureProcessor
from understudy.media.store import MediaStore
from understudy.planning.data_checks import whole_texts
from understudy.planning.models.folder import ModelFolder
from understudy.planning.resolved import workers_write_rows
from understudy.planning.teacher_checks import Measure, Measured, scores_row
from understudy.rollout.dataset import Dataset, Row, picture_sources


def picture_problems(
    recipe: Recipe,
    dataset: Dataset,
    role: str,
    student: ModelFolder | None,
    teachers: Mapping[str, ModelFolder],
) -> list[str]:
    """What this recipe asks of pictures that is not supported."""
    rows = dataset.with_pictures()
    if not rows:
        return []
    first = f"{role}: {dataset.place(rows[0])} has pictures"
    problems = [f"{first}; {why}" for why in _unsupported(recipe)]
    if student is not None and (family := _family(student)) not in FAMILIES:
        what = f"is of the family {family}" if "vision_config" in student.config else "reads text only"
        problems.append(f"{first}; student.model = {recipe.student.model!r} {what}. Supported are {NAMES}")
    for name, teacher in recipe.teachers.items():
        sent = (
            next((i for i in rows if scores_row(recipe.data, recipe.teachers, name, dataset.rows[i])), None)
            if role == "data.train"
            else None
        )
        if sent is None:
            continue
        place = f"{role}: {dataset.place(sent)} has pictures and goes to teachers.{name}"
        if teacher.reads_own_prompt:
            problems.append(
                f"{place}, which reads a prompt of its own; a prompt of its own holds no pictures"
            )
        elif teacher.backend in ("sglang", "openai"):
            problems.append(
                f"{place}; a teacher served by {teacher.backend} gets text only, serve it natively or by vLLM"
            )
        elif teacher.backend == "vllm" and recipe.cluster.backend == "ray":
            problems.append(
                f"{place}; a teacher served by vllm gets no pictures from remote workers, serve it natively"
            )
        elif teacher.backend == "auto" and teacher.placement == "external" and workers_write_rows(recipe):
            problems.append(
                f"{place}; remote workers send pictures to native replicas only, and teachers.{name}.backend = 'auto' may find another "
                "server; set backend = 'native' and serve it so"
            )
        elif (folder := teachers.get(name)) is not None and (family := _family(folder)) not in FAMILIES:
            problems.append(
                f"{place}, of the family {family}, which reads no pictures here; route such rows to a teacher of {NAMES} "
                f"(data.teacher_key = {recipe.data.teacher_key!r})"
            )
    return problems


def replicas_read_pictures(
    teachers: Mapping[str, TeacherConfig], folders: Mapping[str, ModelFolder]
) -> list[str]:
    """Problems of native replicas of vision-language models, whichever rows they score."""
    fields, problems = TeacherConfig.model_fields, []
    for name, folder in folders.items():
        teacher = teachers[name]
        if teacher.starts_vllm or _family(folder) not in FAMILIES:
            continue
        problems += [
            f"teachers.{name}.{key} = {getattr(teacher, key)!r} is for text models, and {folder.path.name} reads pictures; leave it out"
            for key in ("quantize", "offload", "tensor_parallel")
            if getattr(teacher, key) != fields[key].default
        ]
    return problems


def _family(folder: ModelFolder) -> str:
    return str(folder.config.get("model_type", ""))


def _unsupported(recipe: Recipe) -> list[str]:
    engine = recipe.rollout.engine
    why = []
    if engine not in ("hf", "vllm"):
        why.append(f'rollout.engine = "{engine}" gets text only; set rollout.engine = "hf" or "vllm"')
    if recipe.critic is not None:
        why.append("a critic reads text only; leave [critic] out")
    if recipe.trainer.ranks > 1 and not recipe.student.freeze_vision:
        why.append(
            "student.freeze_vision = false trains on one rank; set trainer.ranks = 1 or student.freeze_vision = true"
        )
    return why


def with_picture_tokens(measure: Measure, recipe: Recipe, student: ModelFolder) -> Measure:
    """The same lengths, with the tokens that stand for pictures in place of one marker each. The student's image
    processor is loaded for the first row that has pictures."""
    if _family(student) not in FAMILIES:
        return measure
    sizes = PictureSizes(MediaStore(Path()), _limits(recipe))
    tokenizer = whole_texts(student)
    processor = cache(lambda: PictureProcessor.load(str(student.path)))

    @cache
    def tokens_of(size: tuple[int, int]) -> int:
        found = processor()
        assert found is not None
        return len(tokenizer.encode(found.text_of(size), add_special_tokens=False).ids)

    def measured(row: Row) -> Measured | None:
        found = measure(row)
        parts = picture_sources(row)
        if not parts or found is None:
            return found
        try:
            shown = [tokens_of(sizes.size(str(part["image"]))) for part in parts if "image" in part]
        except PictureError:
            return None  # `look_at_pictures` reports it; the row becomes a dead letter
        return found._replace(length=found.length + sum(shown) - len(shown))

    return measured


def _limits(recipe: Recipe) -> PictureLimits:
    return PictureLimits(recipe.data.max_image_bytes, recipe.data.max_image_pixels)


def look_at_pictures(
    recipe: Recipe, dataset: Dataset, role: str, advance: Callable[[int], None] = lambda _: None
) -> tuple[list[str], list[str]]:
    """Reads and decodes the pictures of all rows; (problems, notes). A bad picture costs its row."""
    reader, rows = Pictures(MediaStore(Path()), _limits(recipe)), dataset.with_pictures()
    bad: list[str] = []
    known: dict[str, str] = {}
    for number in rows:
        advance(1)
        for part in picture_sources(dataset.rows[number]):
            why = str(part.get("error") or "") or _trouble(reader, str(part.get("image")), known)
            if why:
                bad.append(f"{role}: {dataset.place(number)}: {why}")
                break
    if not bad:
        return [], []
    if len(bad) == len(rows):
        return [f"{bad[0]}; no row with pictures of {role} can be used"], []
    return [], [f"{len(bad)} of {len(rows)} rows with pictures become dead letters; the first is {bad[0]}"]


def _trouble(reader: Pictures, source: str, known: dict[str, str]) -> str:
    if source not in known:
        try:
            reader.read(source)
            known[source] = ""
        except PictureError as error:
            known[source] = str(error)
    return known[source]
