"""Reads a run's training and held-out prompts, and handles those that are too long."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import AutoConfig, PreTrainedTokenizerBase

from understudy.config import DataConfig, RolloutConfig, StudentConfig, TeacherConfig
from understudy.errors import DataError
from understudy.media.pictures import PictureLimits, Pictures, PictureSizes
from understudy.media.processor import PictureProcessor, PictureReader, vision_family
from understudy.media.sources import PictureSources
from understudy.media.store import MediaStore
from understudy.planning.models.aligned import aligned_names
from understudy.planning.models.opened import open_student, open_teachers
from understudy.planning.overlong import Overlong, PromptLimits, prompt_limits, settle_overlong
from understudy.planning.teacher_checks import contexts_of
from understudy.policy.load import context_of_config, load_tokenizer
from understudy.rollout.agents.registry import LoopChoice
from understudy.rollout.dataset import Dataset, load_dataset
from understudy.rollout.render import Renderer

_NO_LIMIT = 1 << 30
_AT_A_TIME = 256
"""Prompts rendered in one batch, which halves the work."""


@dataclass(frozen=True, slots=True)
class PromptData:
    """The datasets of a run."""

    train: Dataset
    eval: Dataset | None
    notes: list[str] = field(default_factory=list)
    """Notes for the user."""

    def storing(self, pictures: Pictures) -> PromptData:
        """The same data, with a store for the pictures of prompts."""
        held_out = None if self.eval is None else self.eval.storing(pictures)
        return replace(self, train=self.train.storing(pictures), eval=held_out)


def open_data(
    data: DataConfig,
    rollout: RolloutConfig,
    student: StudentConfig,
    teachers: Mapping[str, TeacherConfig] | None = None,
) -> PromptData:
    """Reads a run's datasets. If prompts have a length limit, all are rendered with the student's
    tokenizer. `teachers` score the training rows and limit their prompts too."""
    train = load_dataset(data.train, "data.train")
    held_out = load_dataset(data.eval, "data.eval") if data.eval else None
    notes: list[str] = []
    if _is_limited(data):
        tokenizer, context, processor = _student_facts(student)
        teachers = teachers or {}
        folders, own = open_teachers(teachers), open_student(student)
        aligned = aligned_names(teachers, own, folders) if own else set()
        contexts = contexts_of(teachers, {name: one for name, one in folders.items() if name not in aligned})
        scored = prompt_limits(data, rollout, context, teachers, contexts)
        train, notes = without_overlong(data, rollout, train, "data.train", tokenizer, scored, processor)
        if held_out is not None:
            limits = prompt_limits(data, rollout, context)
            held_out, more = without_overlong(
                data, rollout, held_out, "data.eval", tokenizer, limits, processor
            )
            notes += more
    return PromptData(train, held_out, notes)


def pictures_of(data: DataConfig, folder: Path) -> Pictures:
    """A store of a run's pictures with the recipe's limits."""
    store = MediaStore(folder)
    return Pictures(store, _limits(data), PictureSources.open(store))


def _limits(data: DataConfig) -> PictureLimits:
    return PictureLimits(data.max_image_bytes, data.max_image_pixels)


def without_overlong(
    data: DataConfig,
    rollout: RolloutConfig,
    dataset: Dataset,
    role: str,
    tokenizer: PreTrainedTokenizerBase,
    limits: PromptLimits,
    processor: PictureProcessor | None,
) -> tuple[Dataset, list[str]]:
    """The rows after `data.overlong` was applied, and notes for the user. Tokenizer and processor are the
    student's."""
    if not _is_limited(data):
        return dataset, []
    loops = LoopChoice(rollout.agent, rollout.agent_options)
    reader, seen = None, dataset
    if processor is not None:
        sizes = PictureSizes(MediaStore(Path()), _limits(data))
        reader = PictureReader(processor, sizes.store, sizes.sizes.__getitem__)
        seen = dataset.storing(sizes)
    renderer = Renderer(
        tokenizer,
        context=_NO_LIMIT,
        reserve=0,
        template_options=rollout.for_templates,
        pictures=reader,
    )
    overlong = Overlong(role, data.overlong, limits)
    for start in range(0, len(dataset), _AT_A_TIME):
        ordinals = range(start, min(start + _AT_A_TIME, len(dataset)))
        prompts = [seen.prompt(ordinal, key=dataset.place(ordinal), epoch=0) for ordinal in ordinals]
        renderer.ahead(prompts)
        for prompt in prompts:
            # A prompt that cannot be rendered becomes a dead letter when its turn comes.
            with suppress(DataError):
                length = len(renderer.render(prompt, tools=loops.schemas(prompt)))
                overlong.see(prompt.ordinal, dataset.rows[prompt.ordinal], length)
    return settle_overlong(overlong, dataset, data, rollout)


def _is_limited(data: DataConfig) -> bool:
    return data.max_prompt_tokens is not None or data.overlong != "error"


def _student_facts(
    student: StudentConfig,
) -> tuple[PreTrainedTokenizerBase, int, PictureProcessor | None]:
    tokenizer = load_tokenizer(student.model, student.trust_remote_code, student.revision)
    config = AutoConfig.from_pretrained(
        student.model, trust_remote_code=student.trust_remote_code, revision=student.revision
    )
    known = vision_family(config) is not None
    processor = PictureProcessor.load(student.model, student.revision) if known else None
    return tokenizer, context_of_config(config), processor
