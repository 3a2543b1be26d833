"""What a run's teachers must fit: the student's vocabulary, the longest prompts, the mixtures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from understudy.assembly.engines import context_of, renderer_of
from understudy.assembly.usable_ids import Vocabularies
from understudy.config import DataConfig, TeacherConfig
from understudy.errors import DataError
from understudy.media.processor import PictureReader
from understudy.media.store import MediaStore
from understudy.planning.models.pairs import Side
from understudy.planning.resolved import EngineSettings, ModelSource
from understudy.planning.teacher_checks import scores_row
from understudy.rollout.dataset import Dataset, Row
from understudy.rollout.render import Renderer
from understudy.rollout.teacher_prompts import TeacherPrompts
from understudy.teacher.scoring.model import FrozenModel, vocabulary_of
from understudy.teacher.vocabulary import Vocabulary
from understudy.trainers.models import LoadedModel
from understudy.types.usable_ids import UsableIds

_AT_A_TIME = 256
"""Prompts rendered in one batch, which halves the work."""


@dataclass(frozen=True, slots=True)
class StudentFacts:
    """Facts about the student and its data that a teacher must fit."""

    vocabulary: Vocabulary
    head_rows: int
    """The rows of the student's output head; some may belong to no token."""
    usable: UsableIds | None
    """The token ids of this run: those that the student and all other models have a token for."""
    device: torch.device
    context: int
    """The maximum length of a rollout."""
    weight_bytes: int
    """The size of its weights, for teachers that take the student's weights after each publish."""
    longest_prompt: Callable[[str], Awaitable[int]]
    """Teacher → the tokens of the longest prompt that it scores. Called only if the teacher may not hold the
    longest rollout."""
    mixed: Mapping[str, int] = field(default_factory=dict)
    """Teachers that rows name in a mixture → the most teachers of one of its mixtures."""
    longest_own_prompt: Mapping[str, Callable[[], Awaitable[int]]] = field(default_factory=dict)
    """The same as `longest_prompt` for external teachers that read prompts of their own. Those of replicas
    that this run starts were measured by `check`, which knows their context."""
    pictures: PictureReader | None = None
    """For a student that reads pictures."""
    base: FrozenModel | None = None
    """The student's model before adapters, for teachers with `placement = "trainer"`."""
    aligned: Mapping[str, Side] = field(default_factory=dict)
    """By name: the vocabulary of teachers with another tokenizer."""

    def vocabulary_of(self, teacher: str) -> Vocabulary:
        """The vocabulary that a teacher must have."""
        return self.aligned[teacher].vocabulary if teacher in self.aligned else self.vocabulary

    @property
    def family(self) -> str | None:
        return None if self.pictures is None else self.pictures.processor.family

    @property
    def media(self) -> MediaStore | None:
        return None if self.pictures is None else self.pictures.store


def student_facts(
    settings: EngineSettings,
    data: DataConfig,
    teachers: Mapping[str, TeacherConfig],
    student: LoadedModel,
    prompts: Dataset,
    own: TeacherPrompts,
    vocabularies: Vocabularies,
) -> StudentFacts:
    """`own`: the prompts that teachers read instead of the student's."""
    source = settings.student
    external = {
        name: partial(
            asyncio.to_thread,
            longest_own_prompt,
            own,
            name,
            prompts,
            partial(scores_row, data, teachers, name),
        )
        for name, one in teachers.items()
        if (one.reads_own_prompt or name in vocabularies.aligned) and one.placement == "external"
    }
    return StudentFacts(
        vocabulary_of(source.model, source.revision),
        student.model.get_output_embeddings().weight.shape[0],
        vocabularies.usable,
        student.device,
        context_of(settings, student),
        sum(tensor.numel() * tensor.element_size() for tensor in student.model.parameters()),
        once_longest_prompt(
            renderer_of(settings, data, student), prompts, partial(scores_row, data, teachers)
        ),
        mixed_teachers(prompts, data.mixture_key),
        external,
        student.pictures,
        _base(source, student) if any(one.placement == "trainer" for one in teachers.values()) else None,
        vocabularies.aligned,
    )


def _base(source: ModelSource, student: LoadedModel) -> FrozenModel:
    """The student without adapters: modules of its own, the same tensors. Made before adapters are put into the
    student."""
    twin = student.sharing_copy().model.eval()
    return FrozenModel(twin, source.model, source.dtype, student.device, student.context)


def once_longest_prompt(
    renderer: Renderer, dataset: Dataset, scores: Callable[[str, Row], bool]
) -> Callable[[str], Awaitable[int]]:
    """A function for the tokens of the longest prompt that a teacher scores. Prompts are measured once, on the
    first call, in a thread: the event loop starts teachers meanwhile."""

    @cache
    def measuring() -> asyncio.Task[list[int]]:
        return asyncio.create_task(asyncio.to_thread(prompt_lengths, renderer, dataset))

    async def longest(teacher: str) -> int:
        lengths = await measuring()
        return max(
            (one for one, row in zip(lengths, dataset.rows, strict=True) if scores(teacher, row)), default=0
        )

    return longest


def prompt_lengths(renderer: Renderer, dataset: Dataset) -> list[int]:
    """Tokens of each prompt; 0 for one that the renderer refuses, which never reaches a teacher."""
    lengths = []
    for start in range(0, len(dataset), _AT_A_TIME):
        ordinals = range(start, min(start + _AT_A_TIME, len(dataset)))
        prompts = [dataset.prompt(ordinal, key=f"row {ordinal}", epoch=0) for ordinal in ordinals]
        renderer.ahead(prompts)
        for prompt in prompts:
            try:
                lengths.append(len(renderer.render(prompt)))
            except DataError:  # becomes a dead letter when its turn comes
                lengths.append(0)
    return lengths


def mixed_teachers(dataset: Dataset, column: str) -> dict[str, int]:
    """All teachers that rows name in mixtures → the most teachers of one of its mixtures."""
    most: dict[str, int] = {}
    for row in dataset.rows:
        weights = row.get(column)
        if isinstance(weights, Mapping):
            named = [str(name) for name, weight in weights.items() if weight]
            most |= {name: max(most.get(name, 0), len(named)) for name in named}
    return most


def longest_own_prompt(
    prompts: TeacherPrompts, teacher: str, dataset: Dataset, scored: Callable[[Row], bool]
) -> int:
    """Tokens of the longest prompt that a teacher reads itself, among the rows that it scores."""
    longest = 0
    for ordinal, row in enumerate(dataset.rows):
        if scored(row):
            with suppress(DataError):  # becomes a dead letter when its turn comes
                ids = prompts.ids(teacher, dataset.prompt(ordinal, key=f"row {ordinal}", epoch=0))
                longest = max(longest, 0 if ids is None else len(ids))
    return longest
