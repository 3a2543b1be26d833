"""Compares the vocabularies of a run's models, and finds the token ids that all of them can use.

    student ─┐
    teacher ─┼─ id → token ──> one id, different tokens in two models: an error
    critic  ─┤                 ids that not all models have: never sampled, never candidates (`UsableIds`)
    reference┘                 different eos, pad, unk, chat template: allowed, noted where it matters

Imports no torch: `understudy check` runs this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from understudy.planning.models.folder import ModelFolder
from understudy.teacher.vocabulary import Vocabulary, describe_differences, differences
from understudy.types.usable_ids import UsableIds

_SHOWN = 3


@dataclass(frozen=True)
class Side:
    """The vocabulary of one model of a run."""

    place: str
    """Its name in the recipe: `student`, `teachers.math`, `critic`, `reference`."""
    vocabulary: Vocabulary
    rows: int | None = None
    """Embedding rows; None if unknown."""
    ends: tuple[int, ...] = ()
    """Ids that end a turn, from its generation config and its tokenizer."""
    template: str | None = None

    @classmethod
    def of(cls, folder: ModelFolder, place: str) -> Side:
        return cls(place, folder.vocabulary, folder.vocab_size, folder.ends, folder.chat_template)

    @cached_property
    def tokens(self) -> Mapping[int, str]:
        return self.vocabulary.tokens(self.rows)

    @property
    def kind(self) -> str:
        return self.place.partition(".")[0].removesuffix("s")


def usable_ids(student: Side, others: Sequence[Side]) -> UsableIds:
    """The ids that have a token in every model. If the student's tokens are unknown, all of its rows."""
    shared = set(student.tokens)
    if not shared:
        return UsableIds(student.rows or 1 << 31)
    for other in others:
        shared = shared & other.tokens.keys()
    return replace(
        _ids_of(shared), models=tuple((side.place, _ids_of(side.tokens)) for side in (student, *others))
    )


def _ids_of(known: Collection[int]) -> UsableIds:
    limit = max(known, default=-1) + 1
    return UsableIds(limit, tuple(number for number in range(limit) if number not in known))


def tokens_lacked(student: Side, others: Iterable[Side]) -> dict[str, dict[int, str]]:
    """By place: the tokens of the student's tokenizer that a model of the run lacks."""
    written = student.vocabulary.tokens()
    lacked = {side.place: written.keys() - side.tokens.keys() for side in (student, *others)}
    return {place: {one: written[one] for one in ids} for place, ids in lacked.items() if ids}


def pair_problems(student: Side, other: Side) -> list[str]:
    """Why this student and this model cannot be in one run; empty if they can."""
    differing = differences(student.vocabulary, other.vocabulary, (student.rows, other.rows))
    if differing:
        return [
            f"{other.place}: its tokenizer differs from the student's in {len(differing)} of the ids that both have: "
            f"{describe_differences(differing, other.kind)}. Token ids are sent as they are, so an id must be the same token for both: choose a "
            f"{other.kind} of the student's family, or give both one tokenizer"
        ]
    if student.tokens and not student.tokens.keys() & other.tokens.keys():
        return [f"{other.place}: its tokenizer and the student's have no id in common; choose another model"]
    if student.ends and not set(student.ends) & other.tokens.keys():
        return [
            f"{other.place}: it has no token for {_named(student.ends, student.tokens)}, which ends the student's turns, so no rollout "
            f"could end; set eos_token_id in the student's generation_config.json to an id that both have, or choose another {other.kind}"
        ]
    return []


def pair_notes(student: Side, other: Side) -> list[str]:
    """The differences between two compatible models that change what a run does."""
    notes = []
    ours, theirs = student.tokens, other.tokens
    if other.kind == "teacher" and other.ends and set(other.ends) != set(student.ends):
        notes.append(
            f"{other.place} ends its turns with {_named(other.ends, theirs)}; rollouts end with the student's "
            f"{_named(student.ends, ours)} (eos_token_id in its generation_config.json)"
        )
    only_other = sorted(theirs.keys() - ours.keys())
    if only_other and other.kind != "critic":
        notes.append(
            f"{other.place}: {_counted(only_other, theirs)} that the student lacks, never among its candidates"
        )
    only_student = sorted(ours.keys() - theirs.keys())
    if only_student:
        notes.append(
            f"{other.place} lacks {_counted(only_student, ours)} of the student, never sampled in this run; a prompt that holds one "
            "cannot be scored"
        )
    if other.kind == "teacher" and student.template and other.template and student.template != other.template:
        notes.append(f"{other.place} has another chat template; it reads what the student's template renders")
    return notes


def _named(ids: Sequence[int], tokens: Mapping[int, str]) -> str:
    return ", ".join(f"{tokens[one]!r} ({one})" if one in tokens else str(one) for one in ids)


def _counted(ids: Sequence[int], tokens: Mapping[int, str]) -> str:
    more = ", …" if len(ids) > _SHOWN else ""
    return f"{len(ids)} token{'s' if len(ids) > 1 else ''} ({_named(ids[:_SHOWN], tokens)}{more})"
