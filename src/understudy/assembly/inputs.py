"""Loads what a run reads: the student, the tokenizers of its teachers, and the prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from understudy.assembly.learner import load_source
from understudy.assembly.prepare import Launch
from understudy.assembly.teachers.clients import teacher_tokens
from understudy.assembly.teachers.prompts import other_tokenizers, teacher_prompts_of, writable_ids
from understudy.assembly.usable_ids import Vocabularies, find_usable_ids, keep_usable_ids
from understudy.config import DataConfig, RolloutConfig, StudentConfig, TeacherConfig
from understudy.media.store import MediaStore
from understudy.planning.resolved import ModelSource
from understudy.rollout.teacher_prompts import TeacherPrompts
from understudy.trainers.models import LoadedModel
from understudy.trainers.prompt_data import PromptData, open_data, pictures_of
from understudy.types.usable_ids import UsableIds


@dataclass(frozen=True)
class Inputs:
    """The student as it was loaded, and everything that it and the teachers read."""

    student: LoadedModel
    pictures: MediaStore
    vocabularies: Vocabularies
    """What the student's vocabulary and the teachers' have in common."""
    others: Mapping[str, PreTrainedTokenizerBase]
    """The tokenizers of teachers that do not have the student's."""
    rows: PromptData
    teacher_prompts: TeacherPrompts

    @property
    def usable(self) -> UsableIds | None:
        return self.vocabularies.usable


async def load_inputs(
    launch: Launch,
    source: ModelSource,
    beside: Mapping[str, str],
    student: StudentConfig,
    teachers: Mapping[str, TeacherConfig],
    data: DataConfig,
    rollout: RolloutConfig,
    rows: PromptData | None,
) -> Inputs:
    """Loads the student, compares the tokenizers, and reads the prompts unless `rows` has them. `source`: the student's
    files. `beside`: the models of critic and reference, if they are not the student's."""
    with launch.view.work(f"loading the student {source.model}"):
        model = await asyncio.to_thread(load_source, source)
        pictures = MediaStore(launch.run.media.absolute())
        model = model.with_pictures(pictures, source.model, source.revision)
    vocabularies = await find_usable_ids(
        source, model, teachers, beside, teacher_tokens(teachers), launch.view.note
    )
    others = other_tokenizers(teachers, vocabularies.aligned)
    usable = writable_ids(model, others, vocabularies.usable)
    keep_usable_ids(launch.run, usable)
    if rows is None:
        rows = await asyncio.to_thread(open_data, data, rollout, student, teachers)
    rows = rows.storing(pictures_of(data, pictures.folder))
    prompts = teacher_prompts_of(
        teachers, rollout, model.tokenizer, others, usable, launch.stack, model.pictures
    )
    return Inputs(model, pictures, replace(vocabularies, usable=usable), others, rows, prompts)
