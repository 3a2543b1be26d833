"""Applies `data.overlong` to prompts that are too long: error, drop or truncate. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from understudy.config import DataConfig, RolloutConfig, TeacherConfig
from understudy.errors import DataError
from understudy.planning.teacher_checks import scores_row
from understudy.rollout.dataset import Dataset, Row, picture_sources


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """The most tokens that the prompt of a row may have."""

    student: int | None
    """Its context minus the answer, and `data.max_prompt_tokens`."""
    teachers: Mapping[str, int] = field(default_factory=dict)
    """By teacher that reads the student's prompt: its context minus the answer and one more token."""
    scores: Callable[[str, Row], bool] = lambda teacher, row: True
    """(teacher, row) → whether it scores the row."""

    def of(self, row: Row) -> int | None:
        teachers = [room for name, room in self.teachers.items() if self.scores(name, row)]
        known = teachers if self.student is None else [self.student, *teachers]
        return max(min(known), 0) if known else None


def prompt_limits(
    data: DataConfig,
    rollout: RolloutConfig,
    context: int | None,
    teachers: Mapping[str, TeacherConfig] | None = None,
    contexts: Mapping[str, int] | None = None,
) -> PromptLimits:
    """The limits for training rows; without `teachers`, for rows that no teacher scores. `context`: the
    student's; `contexts`: those of teachers that have its tokenizer. With `data.overlong = "error"` teachers set no limit here:
    `contexts_fit` names the one that is too small."""
    whole = min((one for one in (rollout.context_length, context) if one), default=None)
    bounds = [data.max_prompt_tokens]
    if whole is not None:
        bounds.append(whole - rollout.max_new_tokens)
    own = min((one for one in bounds if one is not None), default=None)
    if data.overlong == "error" or not teachers:
        return PromptLimits(own)
    rooms = {
        name: room - rollout.max_new_tokens - 1
        for name, room in (contexts or {}).items()
        if not teachers[name].reads_own_prompt
    }
    return PromptLimits(own, rooms, partial(scores_row, data, teachers))


@dataclass
class Overlong:
    """Counts the rows of one dataset whose prompts exceed their limits."""

    role: str
    """The recipe key that names the data."""
    rule: str
    limits: PromptLimits
    over: dict[int, int] = field(default_factory=dict)
    """By row: the tokens of its prompt."""

    def see(self, number: int, row: Row, length: int) -> None:
        limit = self.limits.of(row)
        if limit is not None and length > limit:
            self.over[number] = length


def settle_overlong(
    overlong: Overlong, dataset: Dataset, data: DataConfig, rollout: RolloutConfig
) -> tuple[Dataset, list[str]]:
    """The rows to train on, and notes for the user; raises `DataError` if long prompts are an error or no row
    is left."""
    if not overlong.over:
        return dataset, []
    over = overlong.over
    first = min(over)
    what = f"{overlong.role}: the prompt of {dataset.place(first)} has {over[first]} tokens"
    where = f" ({len(over)} rows in all)" if len(over) > 1 else ""
    if overlong.rule == "error":
        room = overlong.limits.student  # below 0 if the answer alone is too long
        if room is None or room == data.max_prompt_tokens:
            why, lower = f"data.max_prompt_tokens = {room}", ""
        else:
            context = room + rollout.max_new_tokens
            whose = (
                "rollout.context_length ="
                if context == rollout.context_length
                else "the student's context of"
            )
            why = f"with rollout.max_new_tokens = {rollout.max_new_tokens} it exceeds {whose} {context}"
            lower = "lower rollout.max_new_tokens, "
        raise DataError(
            f"{what}; {why}; {lower}shorten it, or set data.overlong to 'drop' or 'truncate_left'{where}"
        )
    limits = {number: overlong.limits.of(dataset.rows[number]) for number in over}
    least = min(one for one in limits.values() if one is not None)
    cut: list[int] = []
    dropped = sorted(over)
    if overlong.rule == "truncate_left":
        if least < 1:
            raise DataError(f"{what}; rollout.max_new_tokens leaves no room for a prompt; lower it")
        # A prompt with pictures is never cut: it would lose a part of one.
        cut = [number for number in dropped if not picture_sources(dataset.rows[number])]
        own = {number: limits[number] for number in cut}
        dropped = [number for number in dropped if number not in own]
        dataset = dataset.cut_to([own.get(number) for number in range(len(dataset))])
    long = f"have more than {least} tokens"
    if least != overlong.limits.student:
        rooms = ", ".join(f"{name} {max(room, 0)}" for name, room in overlong.limits.teachers.items())
        long += f" (room that teachers leave for prompts: {rooms})"
    gone = set(dropped)
    kept = dataset.only([number for number in range(len(dataset)) if number not in gone])
    if not len(kept):
        raise DataError(
            f"{overlong.role}: {len(dropped)} of {len(dataset)} prompts {long}: data.overlong = 'drop' leaves no row; raise the limit"
        )
    with_pictures = "with pictures " if overlong.rule == "truncate_left" else ""
    notes = [
        f"{overlong.role}: {len(rows)} of {len(dataset)} prompts {effect} (data.overlong); the first is {dataset.place(rows[0])}"
        for rows, effect in (
            (cut, f"{long} and lose their beginning"),
            (dropped, f"{with_pictures}{long} and are left out"),
        )
        if rows
    ]
    return kept, notes
