"""Prompts that teachers read in place of the student's, and teachers with another tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from functools import partial

from transformers import PreTrainedTokenizerBase

from understudy.config import RolloutConfig, TeacherConfig
from understudy.errors import ConfigError
from understudy.media.processor import PictureReader
from understudy.planning.teacher_checks import own_prompts
from understudy.policy.load import load_tokenizer
from understudy.rollout.agents.registry import LoopChoice
from understudy.rollout.render import Renderer, turn_end
from understudy.rollout.teacher_prompts import TeacherPrompts
from understudy.teacher.alignment import TokenAligner, TurnEnds
from understudy.teacher.token_bytes import TokenBytes
from understudy.trainers.models import LoadedModel
from understudy.types.usable_ids import UsableIds

_NO_LIMIT = 1 << 30


def teacher_prompts_of(
    teachers: Mapping[str, TeacherConfig],
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    others: Mapping[str, PreTrainedTokenizerBase],
    usable: UsableIds | None,
    stack: AsyncExitStack,
    pictures: PictureReader | None = None,
) -> TeacherPrompts:
    """The prompts that teachers read instead of the student's. `others`: tokenizers of teachers that have another.
    `stack` closes what their tools opened. `pictures`: the student's, whose placeholders are text in a text."""
    own = own_prompts(teachers)
    unlimited = partial(Renderer, context=_NO_LIMIT, reserve=0)
    renderer = unlimited(tokenizer, template_options=rollout.for_templates, pictures=pictures)
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
    sources = {name: teachers[name] for name in aligned}
    return {
        name: load_tokenizer(one.model, one.trust_remote_code, one.revision) for name, one in sources.items()
    }


def writable_ids(
    student: LoadedModel, others: Mapping[str, PreTrainedTokenizerBase], usable: UsableIds | None
) -> UsableIds | None:
    """The ids less the student's special tokens that a teacher with another tokenizer lacks, by name. Prompts may
    hold them; none is ever drawn, because no teacher could score it."""
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
