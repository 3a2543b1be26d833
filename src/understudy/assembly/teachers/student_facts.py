"""What the student and a run's rows ask of its teachers: the longest prompt, mixtures, prompts that teachers read
themselves, tokens of another tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, suppress
from functools import cache, partial

from transformers import PreTrainedTokenizerBase

from understudy.assembly.engines import context_of
from understudy.assembly.teachers.start import StudentFacts
from understudy.assembly.usable_ids import Vocabularies
from understudy.config import DataConfig, RolloutConfig, TeacherConfig
from understudy.errors import ConfigError, DataError
from understudy.planning.resolved import EngineSettings, ModelSource
from understudy.planning.teacher_checks import own_prompts, scores_row
from understudy.policy.load import load_tokenizer
from understudy.rollout.agents.registry import LoopChoice
from understudy.rollout.dataset import Dataset, Row
from understudy.rollout.render import Renderer, turn_end
from understudy.rollout.row_length import longest_row, prompts_of
from understudy.rollout.teacher_prompts import TeacherPrompts
from understudy.teacher.alignment import TokenAligner, TurnEnds
from understudy.teacher.scoring.model import FrozenModel, vocabulary_of
from understudy.teacher.token_bytes import TokenBytes
from understudy.trainers.models import LoadedModel
from understudy.trainers.prompt_data import PromptData
from understudy.types.usable_ids import UsableIds

_AT_A_TIME = 256
"""Prompts rendered in one batch, which halves the work."""
_NO_LIMIT = 1 << 30


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


def renderer_of(settings: EngineSettings, data: DataConfig, student: LoadedModel) -> Renderer:
    """Writes prompts for the student."""
    return Renderer(
        student.tokenizer,
        context=context_of(settings, student),
        reserve=settings.rollout.max_new_tokens,
        template_options=settings.rollout.for_templates,
        max_prompt=data.max_prompt_tokens,
        truncate=data.overlong == "truncate_left",
        pictures=student.pictures,
    )


def longest_request(
    settings: EngineSettings, data: DataConfig, student: LoadedModel, rows: PromptData
) -> int | None:
    """Tokens of the longest row that the engine writes. Only for a student on a GPU, where an engine reserves keys and values
    for `rollout.max_batch` rows: of 32,768 tokens each they need more than a GPU has. None: not known, or not needed."""
    rollout = settings.rollout
    if rollout.context_length is not None or student.device.type == "cpu" or student.pictures is not None:
        return None
    renderer = renderer_of(settings, data, student)
    return longest_row(renderer, prompts_of(rows.train, rows.eval), rollout.agent, rollout.max_new_tokens)


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


def teacher_prompts_of(
    teachers: Mapping[str, TeacherConfig],
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    others: Mapping[str, PreTrainedTokenizerBase],
    usable: UsableIds | None,
    stack: AsyncExitStack,
) -> TeacherPrompts:
    """The prompts that teachers read instead of the student's. `others`: tokenizers of teachers that have another.
    `stack` closes what their tools opened."""
    own = own_prompts(teachers)
    unlimited = partial(Renderer, context=_NO_LIMIT, reserve=0)
    renderer = unlimited(tokenizer, template_options=rollout.for_templates)
    theirs = {
        name: unlimited(one, template_options=rollout.for_other_tokenizers) for name, one in others.items()
    }
    if not own and not theirs:
        return TeacherPrompts(own, renderer, lambda prompt: None, usable)
    loops = LoopChoice(rollout.agent, rollout.agent_options)
    stack.push_async_callback(loops.close)
    return TeacherPrompts(own, renderer, loops.schemas, usable, theirs)


def other_tokenizers(
    teachers: Mapping[str, TeacherConfig], aligned: Collection[str]
) -> dict[str, PreTrainedTokenizerBase]:
    """The tokenizers of teachers whose tokens are aligned with the student's."""
    return {name: load_tokenizer(teachers[name].model, revision=teachers[name].revision) for name in aligned}


def writable_ids(
    student: LoadedModel, others: Mapping[str, PreTrainedTokenizerBase], usable: UsableIds | None
) -> UsableIds | None:
    """The ids less the student's special tokens that a teacher with another tokenizer lacks, by name. Prompts may
    hold them; none is ever drawn, because no teacher could say that it was wrong."""
    ends = set(student.stop_ids)
    ours = {number: name for number, name in _special(student.tokenizer).items() if number not in ends}
    lacked = [
        number
        for number, name in ours.items()
        if any(name not in _special(other).values() for other in others.values())
    ]
    if not lacked:
        return usable
    known = usable or UsableIds(int(student.model.get_output_embeddings().weight.shape[0]))
    return known.without(tuple(number for number in lacked if number < known.limit))


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def aligners_of(
    rollout: RolloutConfig,
    student: LoadedModel,
    others: Mapping[str, PreTrainedTokenizerBase],
    usable: UsableIds | None,
) -> dict[str, TokenAligner]:
    """By name: what translates between the student's tokens and those of a teacher with another tokenizer."""
    if not others:
        return {}
    ours = _bytes_of(student.tokenizer, "student")
    own_end = turn_end(student.tokenizer, rollout.for_templates)
    own = own_end if own_end in student.stop_ids else student.stop_ids[0]
    found = {}
    for name, tokenizer in others.items():
        end = turn_end(tokenizer, rollout.for_other_tokenizers)
        if end is None:
            raise ConfigError(
                f"teachers.{name}: its tokenizer names no token that ends a turn; set eos_token in its tokenizer_config.json"
            )
        theirs = _bytes_of(tokenizer, f"teachers.{name}")
        found[name] = TokenAligner(ours, theirs, TurnEnds(student.stop_ids, own, end), usable)
    return found


def _bytes_of(tokenizer: PreTrainedTokenizerBase, place: str) -> TokenBytes:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            f"{place}: vocabulary = 'align' needs tokenizer.json, and this tokenizer has none; save it with a fast tokenizer"
        )
    return TokenBytes(backend.to_str(), place)


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
