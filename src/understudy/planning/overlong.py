"""Applies `data.overlong` to prompts that are too long: error, drop or truncate. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from understudy.config import DataConfig, RolloutConfig
from understudy.errors import DataError
from understudy.rollout.dataset import Dataset, picture_sources


def prompt_limit(data: DataConfig, rollout: RolloutConfig, context: int | None) -> int | None:
    """The maximum tokens of a prompt: the context minus the answer, and `data.max_prompt_tokens`."""
    whole = min((one for one in (rollout.context_length, context) if one), default=None)
    bounds = [data.max_prompt_tokens]
    if whole is not None:
        bounds.append(whole - rollout.max_new_tokens)
    return min((one for one in bounds if one is not None), default=None)


@dataclass
class Overlong:
    """Counts the rows of one dataset whose prompts exceed `limit`."""

    role: str
    """The recipe key that names the data."""
    rule: str
    limit: int | None
    over: dict[int, int] = field(default_factory=dict)
    """By row: the tokens of its prompt."""

    def see(self, number: int, length: int) -> None:
        if self.limit is not None and length > self.limit:
            self.over[number] = length


def settle_overlong(
    overlong: Overlong, dataset: Dataset, data: DataConfig, rollout: RolloutConfig
) -> tuple[Dataset, list[str]]:
    """The rows to train on, and notes for the user; raises `DataError` if long prompts are an error or no row
    is left."""
    if not overlong.over:
        return dataset, []
    over, limit = overlong.over, overlong.limit
    first = min(over)
    what = f"{overlong.role}: the prompt of {dataset.place(first)} has {over[first]} tokens"
    where = f" ({len(over)} rows in all)" if len(over) > 1 else ""
    if overlong.rule == "error":
        own = limit == data.max_prompt_tokens
        why = (
            f"data.max_prompt_tokens = {limit}"
            if own
            else f"with rollout.max_new_tokens = {rollout.max_new_tokens} it exceeds the student's context of "
            f"{(limit or 0) + rollout.max_new_tokens}"
        )
        raise DataError(
            f"{what}; {why}; shorten it, or set data.overlong to 'drop' or 'truncate_left'{where}"
        )
    cut, dropped = [], sorted(over)
    if overlong.rule == "truncate_left":
        if limit is not None and limit < 1:
            raise DataError(f"{what}; rollout.max_new_tokens leaves no room for a prompt; lower it")
        # A prompt with pictures is never cut: it would lose a part of one.
        cut = [number for number in dropped if not picture_sources(dataset.rows[number])]
        dropped = [number for number in dropped if number not in cut]

    long = f"have more than {limit} tokens"
    kept = dataset.only([number for number in range(len(dataset)) if number not in dropped])
    if not len(kept):
        raise DataError(
            f"{overlong.role}: {len(dropped)} of {len(dataset)} prompts {long}: data.overlong = 'drop' leaves no row; raise the limit"
        )
    with_pictures = "with pictures " if overlong.rule == "truncate_left" else ""
    notes = [
        f"{overlong.role}: {len(rows)} of {len(dataset)} prompts {told} (data.overlong); the first is {dataset.place(rows[0])}"
        for rows, told in (
            (cut, f"{long} and lose their beginning"),
            (dropped, f"{with_pictures}{long} and are left out"),
        )
        if rows
    ]
    return kept, notes
